"""Define the options, logging and exit codes that all commands have in common."""

from __future__ import annotations

import argparse
import difflib
import errno
import io
import json
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from types import TracebackType
from typing import Any, NoReturn, TextIO

import yaml

from fl_engine.core import system
from fl_engine.core.errors import (
    BadInput,
    ConfigError,
    EnvironmentFailure,
    FlexfleetError,
    Interrupted,
    first_line,
    masked,
    nearest,
    out_of_memory,
    printable,
)
from fl_engine.core.text import comment_of, path_of, read_yaml
from flexfleet.config.dotted import Overrides, check_once, on_top, pair_of, place
from flexfleet.files.doctor import EXTRAS
from flexfleet.files.signals import end_with_starter

log = logging.getLogger("flexfleet")

LOG_FORMAT = "FLEXFLEET_LOG_FORMAT"
"""Environment variable with the format of log lines."""


def show(text: str) -> None:
    """Print `text`. A reader such as `head` can close the pipe early without an error."""
    with _read_or_not(sys.stdout):
        print(text, flush=True)


@contextmanager
def _read_or_not(stream: TextIO) -> Iterator[None]:
    """Ignore OSErrors that occur because the pipe or terminal of `stream` was closed."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO) and stream is not sys.stderr:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # Otherwise Python prints an error at exit.


class ArgumentParser(argparse.ArgumentParser):
    """A parser that raises BadInput for wrong arguments, so that `run_main` reports them like all other errors.

    Messages suggest the most similar option or value. Unknown arguments are an error of the subcommand's parser, so
    that the usage of the subcommand is printed.
    """

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        raise BadInput(printable(message))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        if options:
            self.error(", ".join(f"unknown option {name}{self._similar(name)}" for name in dict.fromkeys(options)))
        if unknown:
            self.error(f"unexpected arguments: {' '.join(unknown)}")
        return found, unknown

    def _similar(self, name: str) -> str:
        """Return a hint such as ` (did you mean --jobs?)`. The dashes do not count towards the similarity."""
        word, known = name.strip("-"), {option.strip("-"): option for option in self._option_string_actions}
        if found := difflib.get_close_matches(word, known, n=1):
            return f" (did you mean {known[found[0]]}?)"
        if "set" in known:
            return f" (`flexfleet params {word.replace('-', '_')}` finds parameters for --set)"
        return " (options must follow the command)" if self._subparsers else ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"unknown value {value!r}{nearest(str(value), action.choices)}")


def add_config(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--config", type=path_of, action="append", metavar="FILE",
        help="parameters (default: ./params.yaml, else the built-in defaults); later files override earlier ones",
    )  # fmt: skip
    add_set(p, "override one parameter; may be repeated")


def add_set(p: argparse.ArgumentParser, about: str) -> None:
    p.add_argument("--set", action=_Set, default={}, metavar="a.b=value", help=about)


def add_short(p: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Add options with the short names of parameters (`flexfleet.config.dotted`)."""
    about = "short for --set; `flexfleet params` lists all parameters with their defaults"
    group = p.add_argument_group("common parameters", about)
    for name in names:
        group.add_argument(
            f"--{name.replace('_', '-')}", dest=name, action=_Given, default=argparse.SUPPRESS, metavar="VALUE",
            help=place(name, ""),
        )  # fmt: skip


def add_loudness(p: argparse.ArgumentParser) -> None:
    group = p.add_mutually_exclusive_group()
    group.add_argument("-q", "--quiet", action="store_true", help="print only warnings and the result")
    group.add_argument("-v", "--verbose", action="store_true", help="print more, and errors with their traceback")


def add_resume(p: argparse.ArgumentParser) -> None:
    p.add_argument("--resume", action="store_true", help="resume the run if it exists")
    p.add_argument(
        "--discard-damaged", action="store_true", help="on a damaged checkpoint, resume from the last good commit"
    )
    p.add_argument(
        "--accept-numerics", action="store_true", help="resume although the last bits of results differ on this machine"
    )


class _Set(argparse.Action):
    """Collect the values of all `--set a.b=value` options by dotted name."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        path, value = pair_of(values)
        namespace.set = on_top(namespace.set, {path: value})


class _Given(argparse.Action):
    """Store the value of a short form of `--set`. `dest` is a short name or a dotted name."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        path = self.dest if "." in self.dest else place(self.dest, values)
        given: list[tuple[str, Overrides]] = getattr(namespace, "given", [])
        namespace.given = [*given, (self.option_strings[-1], {path: _read(path, values)})]


def _read(path: str, text: str) -> Any:
    """Parse the value of a short option. A '#' in the value does not begin a comment."""
    try:
        value = read_yaml(text)
        return text if isinstance(value, str) and comment_of(text) else value
    except yaml.YAMLError:
        return pair_of(f"{path}={text}")[1]  # raises ConfigError


def tags_of(texts: Sequence[str], option: str = "--tag") -> dict[str, str]:
    """Parse the `key=value` strings of an option into {key: value}. Raises ConfigError for bad or repeated keys."""
    pairs = [text.partition("=") for text in texts]
    wrong = [text for text, (key, sign, _) in zip(texts, pairs, strict=True) if not key or not sign]
    if wrong:
        raise ConfigError(f"{option} must be key=value, got {wrong[0]!r}")
    tags = {key: value for key, _, value in pairs}
    if len(tags) < len(pairs):
        raise ConfigError(f"{option} must not repeat a key, got {', '.join(texts)}", code="config.given_twice")
    return tags


def add_faults(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--faults", dest="rounds.faults", action=_Given, default=argparse.SUPPRESS, metavar="LIST",
        help="clients that misbehave on purpose, such as drop=0.2,slow=0.1x5; faults: drop, slow, nan, scale, flip, "
        "corrupt, uphill, backdoor",
    )  # fmt: skip


def parsed(p: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command's arguments, and call `settle`. Raises ConfigError."""
    args = p.parse_args(argv)
    settle(args)
    return args


def settle(args: argparse.Namespace) -> None:
    """Add the short options to `args.set`, set the log level, and log which configuration files are merged. Raises
    ConfigError if a parameter is set twice."""
    if getattr(args, "quiet", False) or getattr(args, "verbose", False):
        for name in ("flexfleet", "fl_engine"):
            logging.getLogger(name).setLevel(logging.WARNING if args.quiet else logging.DEBUG)
        if args.quiet:
            logging.getLogger().setLevel(logging.WARNING)  # also for libraries
    if given := getattr(args, "given", None):
        check_once([*given, ("--set", args.set)])
        for _, values in given:
            args.set = {**args.set, **values}
    files = getattr(args, "config", None)
    if isinstance(files, list) and len(files) > 1:
        log.info("configuration: %s", ", replaced by ".join(map(str, files)))


class JsonLines(logging.Formatter):
    """Format each log record as a JSON object in one line, for programs that collect logs."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line = {"time": when, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = masked(self.formatException(record.exc_info))
        return json.dumps(line)


def set_log_format(handlers: Iterable[logging.Handler]) -> None:
    """Let the handlers write JSON if FLEXFLEET_LOG_FORMAT is `json`. Python's warnings are then logged too. Raises
    ConfigError for a value other than `json` and `text` (default)."""
    kind = os.environ.get(LOG_FORMAT) or "text"
    if kind not in ("text", "json"):
        raise ConfigError.at(f"{LOG_FORMAT} must be text or json, got {kind!r}")
    if kind == "json":
        logging.captureWarnings(True)
        for handler in handlers:
            handler.setFormatter(JsonLines())


@contextmanager
def logging_to(stream: TextIO) -> Iterator[logging.Handler]:
    """Write flexfleet's log lines to `stream` inside the context."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.addHandler(handler)
    try:
        yield handler
    finally:
        log.removeHandler(handler)


def _print_last(text: str, level: int) -> None:
    """Print the last message of a command to stderr, as a log line if log lines are JSON."""
    with _read_or_not(sys.stderr):
        if os.environ.get(LOG_FORMAT) == "json":
            log.log(level, "%s", text.removeprefix("error: "))
        else:
            print(text, file=sys.stderr, flush=True)


def run_main(main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> None:
    """Run a command and exit. Expected errors are printed as one line on stderr. Unexpected errors are printed with a
    traceback, in which passwords in addresses are masked. With `--json`, every error is also an object on stdout."""
    argv = sys.argv[1:] if argv is None else argv
    as_json = any(len(word) > 2 and "--json".startswith(word) for word in argv)  # argparse accepts abbreviations
    end_with_starter()
    _open_streams()
    sys.excepthook = _print_masked
    try:
        # Log to stderr, because results are printed to stdout.
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
        set_log_format(logging.getLogger().handlers)
        logging.getLogger("botocore").setLevel(logging.WARNING)  # its INFO lines show where credentials are stored
        system.check_torch()
        sys.exit(main(argv))
    except (Exception, KeyboardInterrupt) as error:
        known = expected(error)
        about = (known or FlexfleetError(f"{type(error).__name__}: {first_line(error)}")).as_json()
        if as_json:
            show(json.dumps({"error": about}))
        if known is None:
            raise
        log.debug("traceback:", exc_info=error)
        is_stop = isinstance(known, Interrupted)
        _print_last(f"{'' if is_stop else 'error: '}{about['message']}", logging.WARNING if is_stop else logging.ERROR)
        sys.exit(known.exit_code)


def _open_streams() -> None:
    """Discard output if stdout or stderr is closed. Replace characters that the encoding of stdout does not support."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def expected(error: BaseException) -> FlexfleetError | None:
    """Convert an expected error to a FlexfleetError. Returns None if the error is a bug."""
    if isinstance(error, FlexfleetError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted(": ".join(["interrupted", *map(str, error.args)]))
    if isinstance(error, ModuleNotFoundError):
        return EnvironmentFailure(missing(str(error.name)))
    if isinstance(error, OSError):
        return EnvironmentFailure(_full_folder(error) or f"{error.filename or 'system'}: {error.strerror or error}")
    if out_of_memory(error):
        return EnvironmentFailure(f"not enough memory: {first_line(error)}")
    return None


def _full_folder(error: OSError) -> str | None:
    """Return the error message if the folder of temporary files is full, otherwise None. A failed write does not name
    its file. If no folder is writable when Python searches for one, Python does not report why."""
    folder = tempfile.tempdir or os.environ.get("TMPDIR") or "/tmp"
    is_inside = error.filename is None or str(error.filename).startswith(folder)
    if (error.errno in (errno.ENOSPC, errno.EDQUOT) and is_inside) or "No usable temporary directory" in str(error):
        return f"{folder} cannot be written: {error.strerror}. Free disk space, or set TMPDIR to another folder"
    return None


def _print_masked(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _print_last(masked("".join(traceback.format_exception(kind, error, trace))).rstrip(), logging.CRITICAL)


def missing(module: str) -> str:
    """Return the error message for a module that is not installed."""
    package = module.partition(".")[0]
    extra = next((name for name, (modules, _) in EXTRAS.items() if package in modules), "all")
    return f"{package} is not installed. Run `{system.install_command(extra)}`"
