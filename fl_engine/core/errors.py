"""What can go wrong, as a tree. Each leaf carries the exit code that the command line ends with.

    FlexfleetError
    ├── BadInput             2   the user can mend it: parameters, data, a partition, a pool, a model
    │   ├── ConfigError          an unknown, misspelt or impossible parameter
    │   │   └── Faults   2/6     several errors of one form or configuration
    │   ├── DataError            a data file that is missing, truncated or not what its checksum says
    │   ├── PartitionError       a partition that cannot be cut from this data
    │   ├── PoolError            a target size that no gamma reaches, a Gamma too large for the pool
    │   └── ModelError           an input that a network cannot take, a slice that does not exist
    │       └── Diverged     7   a model whose weights or figures are not finite, or a run whose updates all diverged
    ├── Stopped              3   stopped on request; the run can be resumed
    ├── IntegrityError       4   a stored file is not what the ledger says
    ├── GateFailed           5   a figure is worse than it was, beyond what noise explains
    ├── EnvironmentFailure   6   this machine cannot do it: a package, a device, other numerics
    │   ├── Unreachable          a server does not answer, for longer than a call waits: another try may mend it
    │   ├── InUse                another coordinator has the run, or the invited devices: it may let go later
    │   └── Refused              a server answered, and refuses this one thing
    ├── NothingMerged        7   a run that merged no update, because all clients failed
    └── ClientError         42   a client cannot do its order, and trying again will not help

A client's failure during a round is no exception but a value: `types.ClientFailure`.
"""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class FlexfleetError(Exception):
    exit_code = 1


def out_of_memory(error: BaseException) -> bool:
    """Whether memory was refused. On a CPU torch says so by a RuntimeError of no kind of its own."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error))


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raises MemoryError where memory is refused on a CPU, whoever says so."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise MemoryError(f"out of memory: {first_line(error)}") from error


class BadInput(FlexfleetError):
    exit_code = 2


class ConfigError(BadInput):
    pass


class Faults(ConfigError):
    """Several errors that are reported together. The exit code is that of a wrong parameter if one of the errors is,
    since no retry cures that one."""

    def __init__(self, said: str, errors: Iterable[FlexfleetError] = ()) -> None:
        super().__init__(said)
        self.errors = tuple(errors) or (ConfigError(said),)
        self.exit_code = min(error.exit_code for error in self.errors)


class DataError(BadInput):
    pass


class PartitionError(BadInput):
    pass


class PoolError(BadInput):
    pass


class ModelError(BadInput):
    pass


class Diverged(ModelError):
    """Training gave numbers that are not finite, or too large for a codec. A smaller learning rate may help."""

    exit_code = 7


def together(errors: Iterable[FlexfleetError]) -> FlexfleetError:
    """Return the only error, or Faults with all of them."""
    flat = [each for error in errors for each in (error.errors if isinstance(error, Faults) else (error,))]
    return flat[0] if len(flat) == 1 else Faults("; ".join(map(str, flat)), flat)


class Stopped(FlexfleetError):
    exit_code = 3


ON_REQUEST = "stopped on request: what was committed stays, resume with --resume"
"""What Stopped says within the rounds."""


class Replaced(Stopped):
    """Another coordinator has taken over: what is shared is no longer this one's to touch."""


class IntegrityError(FlexfleetError):
    exit_code = 4


class TooLarge(IntegrityError):
    """A value holds more bytes than were expected."""


class GateFailed(FlexfleetError):
    exit_code = 5


class EnvironmentFailure(FlexfleetError):
    exit_code = 6


class Unreachable(EnvironmentFailure):
    """A server does not answer, for longer than a call waits. It may be back later."""


class Busy(Unreachable):
    """A server answers, after all tries, that it has too much to do, or starts."""


class InUse(EnvironmentFailure):
    """Another coordinator has the run, or the invited devices. It may let go later."""


class UnreachableAddress(Unreachable, ConfigError):
    """The server at an address has never answered yet: the parameter that names it may be wrong, or the server may be
    starting. Exit code 6, with which a Job tries again."""


class Refused(EnvironmentFailure):
    """A store or MLflow answered, and refuses this one thing: whether it would refuse any other is to be looked at."""


class NothingMerged(FlexfleetError):
    """No update of the run was merged, so its model is not trained."""

    exit_code = 7


class ClientError(FlexfleetError):
    exit_code = 42


def brief(error: Any) -> str:
    """A pydantic ValidationError in one printable line: where, what, and how much more there is."""
    first, *more = error.errors()
    where = ".".join(str(part) for part in first["loc"])
    return printable(f"{where + ': ' if where else ''}{first['msg']}{f' (and {len(more)} more)' if more else ''}")


WHO_ASKS = re.compile(r"(?<=://)(?:[^/\s]*@|[^/:@\s]*:(?!\d+(?:/|$))\S*@)")
"""User and password of an address, also where a password holds an @ or a slash that should have been quoted."""


QUERIED = re.compile(r"(?<=[?&;])(\w*(?:password|passwd|pwd|token)|odbc_connect)=[^&;\s]+", re.IGNORECASE)
"""A password among the options of a database's address, or what ODBC is told, which may hold one."""


def holds_password(text: str) -> bool:
    """Whether an address in it says a password. A name alone is none (ssh://git@host), but for HTTP, where tokens stand
    in its place (https://token@host)."""
    asked = ((text[: found.start()], found[0]) for found in WHO_ASKS.finditer(text))
    return QUERIED.search(text) is not None or any(
        ":" in who or before.endswith(("http://", "https://")) for before, who in asked
    )


def masked(address: str) -> str:
    """An address without user and password, to be shown."""
    return QUERIED.sub(r"\1=...", WHO_ASKS.sub("", address))


def printable(text: str) -> str:
    """In one line what somebody else has written: characters that a terminal obeys or does not show, among them those
    that turn the direction of writing, are written out (`\\x1b`)."""
    one_line = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in one_line)


def first_line(error: BaseException) -> str:
    """The first line of what somebody else's error says, without passwords; its kind where it says nothing. (SQLAlchemy
    begins with advice to programmers, before which MLflow's server puts a code.)"""
    said = [line for line in str(error).splitlines() if not re.match(r"([A-Z_]+: )?\(raised as a result of ", line)]
    return masked((said or [type(error).__name__])[0])


def line_in(call: Any, error: Exception) -> str:
    """` (line 7 of mine.py)`, the last one of the file that a function stands in; empty if the error passed none."""
    file = getattr(getattr(call, "__code__", None), "co_filename", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" (line {lines[-1]} of {file})" if lines else ""


STRICT = (
    "CA cert does not include key usage extension",
    "Missing Authority Key Identifier",
    "Missing Subject Key Identifier",
    "Basic Constraints of CA cert not marked critical",
)
"""What OpenSSL says of a certificate that is refused by ssl.VERIFY_X509_STRICT alone."""


def certificate_hint(said: str) -> str:
    """What to do where Python 3.13 or newer refuses a certificate that older ones take; empty for any other error."""
    if not any(each in said for each in STRICT):
        return ""
    return (
        ". Python 3.13 and newer check certificates strictly (RFC 5280): issue the server's authority anew, with "
        "basicConstraints (critical), keyUsage keyCertSign and key identifiers, or run with Python 3.11 or 3.12"
    )


UNTRUSTED = ("unable to get local issuer certificate", "self-signed certificate", "self signed certificate")
WRONG_TIME = ("certificate has expired", "certificate is not yet valid")


def device_hint(said: str) -> str:
    """What to do on a device that refuses a server's certificate; empty for any other error."""
    if any(each in said for each in UNTRUSTED):
        return (
            ". No authority that this machine trusts has signed the server's certificate: if the server is yours, let "
            "SSL_CERT_FILE name a file with its authority's certificate (PEM)"
        )
    if any(each in said for each in WRONG_TIME):
        return ". Is this machine's clock right?"
    return certificate_hint(said)


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: ` (did you mean 'alpha'?)`, or the known names when none is close."""
    names = list(known)
    return did_you_mean(word, names) or f" (known: {', '.join(sorted(names)) or 'none'})"


def kind_of(value: object) -> str:
    """Of what kind a value is, for an error: `None`, or `a dict`."""
    return "None" if value is None else f"a {type(value).__name__}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint where the known names are listed anyway: ` (did you mean 'alpha'?)`, or nothing when none is close. Small
    and capital letters count as equal."""
    names = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), names, n=1)
    return f" (did you mean {names[found[0]]!r}?)" if found else ""
