"""What all commands share: options, logs, and the exit."""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TextIO

import yaml

from fl_engine.core import system
from fl_engine.core.errors import ConfigError, EnvironmentFailure, FlexfleetError, masked, out_of_memory, printable
from fl_engine.core.text import comment_of, path_of, read_yaml
from flexfleet.config.form_fields import place
from flexfleet.config.overrides import Overrides, check_once, on_top, pair_of
from flexfleet.files.doctor import EXTRAS

log = logging.getLogger("flexfleet")


def show(text: str) -> None:
    """Print a text, of which `head` or a pager may read only a part."""
    with _read_or_not(sys.stdout):
        print(text, flush=True)


@contextmanager
def _read_or_not(stream: TextIO) -> Iterator[None]:
    """Ignore that the reader of `stream` is gone, because a pipe or terminal was closed."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO) and stream is not sys.stderr:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # else Python complains when it ends


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all commands have."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config(p)
    return p


def step_parser(description: str, **reads: str) -> argparse.ArgumentParser:
    """Return a step's parser: `--out`, and for each `<option>=<step>` the folder that an earlier step wrote."""
    p = parser(description)
    for option, step in reads.items():
        p.add_argument(f"--{option}", type=path_of, required=True, metavar="DIR", help=f"what the {step} step wrote")
    p.add_argument("--out", type=path_of, required=True, metavar="DIR")
    return p


def add_config(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--config", type=path_of, action="append", metavar="FILE",
        help="parameters (default: ./params.yaml, else the built-in defaults); of several, each goes on top of those "
        "before it",
    )  # fmt: skip
    add_set(p, "override one parameter; may be repeated")


def add_set(p: argparse.ArgumentParser, about: str) -> None:
    p.add_argument("--set", action=_Set, default={}, metavar="a.b=value", help=about)


def add_short(p: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Options with the short names of parameters (`flexfleet.config.form_fields`)."""
    about = "short for --set; `flexfleet params` tells all with their defaults"
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
        "--accept-numerics", action="store_true", help="resume although this machine computes other last bits"
    )


class _Set(argparse.Action):
    """`--set a.b=value`: the values of all of them, by dotted name."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        path, value = pair_of(values)
        namespace.set = on_top(namespace.set, {path: value})


class _Given(argparse.Action):
    """An option that is short for `--set`. `dest` is a short name or a parameter's dotted name."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        path = self.dest if "." in self.dest else place(self.dest, values)
        given: dict[str, Overrides] = getattr(namespace, "given", {})
        option = self.option_strings[-1]
        if option in given:
            raise ConfigError(f"{option} is given twice: leave one out")
        namespace.given = {**given, option: {path: _read(path, values)}}


def _read(path: str, text: str) -> Any:
    """Return the value of a short option. A text with a '#' is kept, since it has no need for a comment."""
    try:
        value = read_yaml(text)
        return text if isinstance(value, str) and comment_of(text) else value
    except yaml.YAMLError:
        return pair_of(f"{path}={text}")[1]  # which says what is wrong


def add_faults(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--faults", dest="rounds.faults", action=_Given, default=argparse.SUPPRESS, metavar="LIST",
        help="clients that misbehave on purpose: drop=0.2,slow=0.1x5,nan=0.02,scale=0.02x100,flip=0.02,corrupt=0.01",
    )  # fmt: skip


def parsed(p: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and settle a command's arguments. Raises ConfigError."""
    args = p.parse_args(argv)
    settle(args)
    return args


def settle(args: argparse.Namespace) -> None:
    """Add the short options to `args.set`, set the log's level, and log which files are merged. Raises ConfigError if a
    parameter is given twice."""
    if getattr(args, "quiet", False) or getattr(args, "verbose", False):
        for name in ("flexfleet", "fl_engine"):
            logging.getLogger(name).setLevel(logging.WARNING if args.quiet else logging.DEBUG)
        if args.quiet:
            logging.getLogger().setLevel(logging.WARNING)  # libraries tell things too
    given: dict[str, Overrides] = getattr(args, "given", {})
    if given:
        check_once([*given.items(), ("--set", args.set)])
        for values in given.values():
            args.set = {**args.set, **values}
    files = getattr(args, "config", None)
    if isinstance(files, list) and len(files) > 1:
        log.info("configuration: %s", ", then on top ".join(map(str, files)))


def start_logging() -> None:
    """Logs go to stderr: stdout belongs to results."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("botocore").setLevel(logging.WARNING)  # it tells where it found the credentials, every time


def run_main(main: Callable[[Sequence[str] | None], int]) -> None:
    """Run a command and exit. An expected error is one line on stderr and its exit code; an unexpected one has a
    traceback, without the passwords of addresses."""
    _open_streams()
    start_logging()
    sys.excepthook = _tell
    try:
        system.check_torch()
        sys.exit(main(None))
    except Exception as error:
        known = told_of(error)
        if known is None:
            raise
        log.debug("where it happened:", exc_info=error)
        with _read_or_not(sys.stderr):
            print(f"error: {known[0]}", file=sys.stderr, flush=True)
        sys.exit(known[1])
    except KeyboardInterrupt as error:
        with _read_or_not(sys.stderr):
            print(": ".join(["interrupted", *map(str, error.args)]), file=sys.stderr, flush=True)
        sys.exit(130)


def _open_streams() -> None:
    """Discard what is printed if stdout or stderr is closed. Print a question mark for a character that the locale's
    encoding lacks."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def told_of(error: Exception) -> tuple[str, int] | None:
    """The line to print for an expected error, and its exit code; None if the error is a bug."""
    ours = EnvironmentFailure.exit_code
    if isinstance(error, FlexfleetError):
        return printable(str(error)), error.exit_code
    if isinstance(error, ModuleNotFoundError):
        return missing(str(error.name)), ours
    if isinstance(error, OSError):
        return f"{error.filename or 'system'}: {error.strerror or error}", ours
    if out_of_memory(error):
        return f"not enough memory: {str(error).splitlines()[0] if str(error) else 'no more to be had'}", ours
    return None


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print(masked("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def missing(module: str) -> str:
    """Say what to install for a missing module."""
    package = module.partition(".")[0]
    extra = next((name for name, (modules, _) in EXTRAS.items() if package in modules), "all")
    return f"{package} is not installed: pip install 'flexfleet[{extra}]'"
