"""Define error classes, each with an exit code and a stable `code`, and helpers for error messages.

A subclass inherits the exit code of its base class unless it sets another exit code. `CODES` lists causes and cures. If
a client fails in a round, no exception is raised; the result is a `types.ClientFailure`.
"""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

E = TypeVar("E", bound="FlexfleetError")

CODES: dict[str, tuple[str, str]] = {
    "error": ("An error without a code of its own.", "Read the message."),
    "input": ("An argument or a file of the command is wrong.", "Correct the argument that the message names."),
    "config": ("A parameter, or a combination of parameters, is impossible.", "Change what the message names."),
    "config.unknown": ("A parameter or a name does not exist.", "Run `flexfleet params` or `flexfleet list`."),
    "config.out_of_range": ("A number is outside its range.", "Choose a number in the range of the message."),
    "config.wrong_type": ("A value has the wrong type.", "Set a value of the type in the message."),
    "config.missing": ("A required parameter is not set.", "Set the parameter."),
    "config.conflict": ("Two parameters exclude each other.", "Change one of the two."),
    "config.given_twice": ("A parameter is given twice.", "Give it once."),
    "config.yaml": ("A configuration file is not valid YAML.", "Correct the line that the message names."),
    "config.own_code": ("Your own function or class cannot be used.", "See docs/guides/extending.md."),
    "config.several": ("Several parameters are wrong.", "`errors` lists each of them."),
    "data": ("A data file is missing, damaged or from another data set.", "Run `flexfleet fetch`, or name its folder."),
    "partition": ("The data cannot be partitioned as configured.", "Use fewer clients or a less skewed rule."),
    "pool": ("No sub-model has the requested size.", "Change the sizes, or choose a wider network."),
    "model": ("The network cannot be used or cut as configured.", "Read which layer the message names."),
    "model.uncut": (
        "Your module cannot be cut into sub-models.",
        "Pin what the message names, or send the whole model.",
    ),
    "model.untrainable": ("Your module cannot be trained.", "See docs/guides/own-networks.md."),
    "diverged": ("Weights or metrics are not finite.", "Choose a smaller `training.lr`."),
    "stopped": ("The run stopped on request.", "Continue with `--resume`."),
    "interrupted": ("Ctrl-C ended the command.", "Continue with `--resume`."),
    "replaced": ("Another coordinator has taken over the run.", "Leave the run to that coordinator."),
    "integrity": ("A stored file differs from what the run recorded.", "Restore the file, or start a new run."),
    "too_large": ("A stored value is larger than expected.", "Find out who wrote the file."),
    "gate": ("A metric is worse than before, beyond noise.", "Read the nightly report."),
    "environment": ("A package, device or server is missing.", "Run `flexfleet doctor`."),
    "unreachable": ("A server does not answer.", "Check the address and the network, then continue with `--resume`."),
    "busy": ("A server is overloaded or starting.", "Continue later with `--resume`."),
    "in_use": ("Another process uses the run.", "Wait for that process, or stop it."),
    "address": ("A server has never answered at the configured address.", "Correct the address, or start the server."),
    "refused": ("A server refused the request.", "Check credentials and permissions."),
    "nothing_merged": ("No client's update was merged.", "Run `flexfleet status RUN` and read why clients failed."),
    "config.reference": (
        "The reference of a nightly suite does not exist, or was made for other settings.",
        "Make it with `flexfleet regress --update`.",
    ),
    "config.not_comparable": ("Runs differ in settings that must be equal.", "Compare runs with equal settings."),
    "client": ("A client cannot execute its assignment.", "Read the log of the client."),
}
"""Map each error code to its cause and its cure."""


class FlexfleetError(Exception):
    """Base class of all expected errors.

    Args:
        message: What is wrong, what was expected, and what to do.
        code: A key of CODES; None means the code of the class.
        path: Dotted name of the wrong parameter, such as `partition.alpha`.

    Attributes:
        exit_code: Exit code of a command that fails with this error.

    Examples:
        >>> try:
        ...     flexfleet.run(options={"partition.alpha": -1.0})
        ... except flexfleet.FlexfleetError as error:
        ...     print(error.code, error.path)
    """

    exit_code = 1
    code = "error"

    def __init__(self, message: str = "", *, code: str | None = None, path: str | None = None) -> None:
        super().__init__(message)
        self.code = self.code if code is None else code
        self.path = path

    @classmethod
    def at(cls: type[E], message: str, *, code: str | None = None) -> E:
        """Return an error whose message begins with the dotted name of the wrong parameter, which becomes `path`. The
        name may have dashes or a backtick in front, and ends at a space, a colon, `=` or a backtick."""
        return cls(message, code=code, path=re.split(r"[\s:=`]", message.lstrip("-`"), maxsplit=1)[0])

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object that a command with `--json` prints for the error."""
        return {"code": self.code, "path": self.path, "message": printable(str(self)), "exit_code": self.exit_code}


class BadInput(FlexfleetError):
    exit_code = 2
    code = "input"


class ConfigError(BadInput):
    """Raised if a parameter is unknown, misspelt or has an invalid value."""

    code = "config"


class SeveralErrors(ConfigError):
    """Raised to report several errors together. The exit code is the smallest exit code of the errors."""

    code = "config.several"

    def __init__(self, message: str, errors: Iterable[FlexfleetError] = ()) -> None:
        super().__init__(message)
        self.errors = tuple(errors) or (ConfigError(message),)
        self.exit_code = min(error.exit_code for error in self.errors)

    def as_json(self) -> dict[str, Any]:
        return super().as_json() | {"errors": [error.as_json() for error in self.errors]}


class DataError(BadInput):
    """Raised if a data file is missing or damaged, or if samples cannot be used."""

    code = "data"


class PartitionError(BadInput):
    code = "partition"


class PoolError(BadInput):
    code = "pool"


class ModelError(BadInput):
    """Raised if a network cannot process an input, cannot be cut into sub-models, or cannot be trained."""

    code = "model"


class Diverged(ModelError):
    """Raised if numbers are not finite, or are too large for a codec. A smaller learning rate may help."""

    exit_code = 7
    code = "diverged"


class Stopped(FlexfleetError):
    """Raised if the run stopped on request. The run can be resumed."""

    exit_code = 3
    code = "stopped"


ON_REQUEST = "stopped on request: committed rounds are stored, resume with --resume"


class Replaced(Stopped):
    """Raised if another coordinator has taken over the run. The old coordinator must not write to the run any more."""

    code = "replaced"


class Interrupted(FlexfleetError):
    """Describes the end of a command by Ctrl-C, for which Python raises KeyboardInterrupt."""

    exit_code = 130
    code = "interrupted"


class IntegrityError(FlexfleetError):
    """Raised if a stored file differs from what the run recorded."""

    exit_code = 4
    code = "integrity"


class TooLarge(IntegrityError):
    """Raised if a stored value has more bytes than expected."""

    code = "too_large"


class GateFailed(FlexfleetError):
    exit_code = 5
    code = "gate"


class EnvironmentFailure(FlexfleetError):
    """Raised if a package or device is missing, a server fails, or results of two machines are not bit-identical."""

    exit_code = 6
    code = "environment"


class Unreachable(EnvironmentFailure):
    """Raised if a server does not respond in time."""

    code = "unreachable"


class Busy(Unreachable):
    """Raised if a server is still overloaded or starting after all retries."""

    code = "busy"


class InUse(EnvironmentFailure):
    """Raised if another coordinator uses the run or the invited devices."""

    code = "in_use"


class UnreachableAddress(Unreachable, ConfigError):
    """Raised if no server has ever responded at an address. The server may be starting, or the address may be wrong."""

    code = "address"


class Refused(EnvironmentFailure):
    """Raised if a store or MLflow refuses one request. Other requests may succeed."""

    code = "refused"


class NothingMerged(FlexfleetError):
    """Raised if no update of the run was merged, so the model is not trained."""

    exit_code = 7
    code = "nothing_merged"


class ClientError(FlexfleetError):
    exit_code = 42
    code = "client"


def together(errors: Iterable[FlexfleetError]) -> FlexfleetError:
    """Return a single error unchanged, or combine several into SeveralErrors. Duplicate messages are removed."""
    flat = [each for error in errors for each in (error.errors if isinstance(error, SeveralErrors) else (error,))]
    unique = {str(error): error for error in reversed(flat)}
    first, *more = reversed(unique.values())
    return SeveralErrors("; ".join(map(str, (first, *more))), (first, *more)) if more else first


def out_of_memory(error: BaseException) -> bool:
    """Return whether the error reports exhausted memory, for which torch raises a RuntimeError on the CPU."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error))


@contextmanager
def memory_errors() -> Iterator[None]:
    """If the CPU's memory is exhausted, raise a MemoryError instead of torch's RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise MemoryError(f"out of memory: {first_line(error)}") from error


# ------------------------------------------------------------------------------------------- texts of others
WHO_ASKS = re.compile(r"(?<=://)(?:[^/\s]*@|[^/:@\s]*:(?!\d+(?:/|$))\S*@)")
"""Pattern of the user and password in a URL, even if the password contains an unquoted @ or slash."""

QUERIED = re.compile(r"(?<=[?&;])(\w*(?:password|passwd|pwd|token)|odbc_connect)=[^&;\s]+", re.IGNORECASE)
"""Pattern of a password in the query string of a database URL."""


def holds_password(text: str) -> bool:
    """Return whether a URL in `text` contains a password. A user name alone is treated as a password only for HTTP,
    because the name may be a token (https://token@host)."""
    asked = ((text[: found.start()], found[0]) for found in WHO_ASKS.finditer(text))
    return QUERIED.search(text) is not None or any(
        ":" in who or before.endswith(("http://", "https://")) for before, who in asked
    )


def masked(address: str) -> str:
    """Return a URL without user and password."""
    return QUERIED.sub(r"\1=...", WHO_ASKS.sub("", address))


def printable(text: str) -> str:
    """Return an untrusted string as one line, with control and invisible characters escaped (`\\x1b`)."""
    one_line = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in one_line)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without passwords, or the class name if the message is empty.

    The note `(raised as a result of ...)` at the beginning of SQLAlchemy's messages is skipped.
    """
    lines = [line for line in str(error).splitlines() if not re.match(r"([A-Z_]+: )?\(raised as a result of ", line)]
    return masked((lines or [type(error).__name__])[0])


def brief(error: Any) -> str:
    """Format a pydantic ValidationError as one printable line."""
    first, *more = error.errors()
    where = ".".join(str(part) for part in first["loc"])
    return printable(f"{where + ': ' if where else ''}{first['msg']}{f' (and {len(more)} more)' if more else ''}")


def line_in(call: Any, error: Exception) -> str:
    """Return the last traceback line in the function's file, such as ` (line 7 of mine.py)`, or an empty string."""
    file = getattr(getattr(call, "__code__", None), "co_filename", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" (line {lines[-1]} of {file})" if lines else ""


def kind_of(value: object) -> str:
    """Return the name of the value's type with an article, such as `a dict`, or `None` for None."""
    return "None" if value is None else f"a {type(value).__name__}"


class Named(dict[str, Any]):
    """Dict that raises ConfigError if a key is missing. The message is the key, `problem` and a hint."""

    def __init__(self, values: Mapping[str, Any], problem: str) -> None:
        super().__init__(values)
        self._problem = problem

    def __missing__(self, key: str) -> NoReturn:
        raise ConfigError(f"{key!r} {self._problem}{nearest(key, self)}", code="config.own_code")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint such as ` (did you mean 'alpha'?)`, or list all known names if no name is similar."""
    names = list(known)
    return did_you_mean(word, names) or f" (known: {', '.join(sorted(names)) or 'none'})"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint such as ` (did you mean 'alpha'?)`, or an empty string if no name is similar. Case is ignored."""
    names = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), names, n=1)
    return f" (did you mean {names[found[0]]!r}?)" if found else ""
