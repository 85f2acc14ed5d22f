"""Error classes, each with the exit code of the command line and a stable `code`; and hints for error messages.

    FlexfleetError
    ├── BadInput             2   wrong parameters, data, partition, pool or model
    │   ├── ConfigError          an unknown, misspelt or impossible parameter
    │   │   └── SeveralErrors    2/6 the errors of one form or configuration
    │   ├── DataError            a data file that is missing, truncated or has another checksum
    │   ├── PartitionError       a partition that cannot be cut from this data
    │   ├── PoolError            a target size that no gamma reaches, or a Gamma too large for the pool
    │   └── ModelError           an input that a network cannot take, or a slice that does not exist
    │       └── Diverged     7   weights or metrics that are not finite
    ├── Stopped              3   stopped on request; the run can be resumed
    ├── IntegrityError       4   a stored file differs from what the ledger says
    ├── GateFailed           5   a metric is worse than before, beyond noise
    ├── EnvironmentFailure   6   a missing package or device, or other numerics
    │   ├── Unreachable          a server does not answer; a retry may help
    │   ├── InUse                another coordinator holds the run or the invited devices
    │   └── Refused              a server refuses this request
    ├── NothingMerged        7   no update was merged, because all clients failed
    └── ClientError         42   a client cannot execute its assignment, and a retry will not help

The failure of a client in a round is a value, `types.ClientFailure`, not an exception.
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
    code = "error"


class BadInput(FlexfleetError):
    exit_code = 2
    code = "input"


class ConfigError(BadInput):
    code = "config"


class SeveralErrors(ConfigError):
    """Several errors, reported together. The exit code is 2 if one of the errors has it, since no retry helps then."""

    code = "several"

    def __init__(self, said: str, errors: Iterable[FlexfleetError] = ()) -> None:
        super().__init__(said)
        self.errors = tuple(errors) or (ConfigError(said),)
        self.exit_code = min(error.exit_code for error in self.errors)


class DataError(BadInput):
    code = "data"


class PartitionError(BadInput):
    code = "partition"


class PoolError(BadInput):
    code = "pool"


class ModelError(BadInput):
    code = "model"


class Diverged(ModelError):
    """Numbers that are not finite, or too large for a codec. A smaller learning rate may help."""

    exit_code = 7
    code = "diverged"


class Stopped(FlexfleetError):
    exit_code = 3
    code = "stopped"


ON_REQUEST = "stopped on request: what was committed stays, resume with --resume"


class Replaced(Stopped):
    """Another coordinator has taken over the run, so this one must not write to it any more."""

    code = "replaced"


class IntegrityError(FlexfleetError):
    exit_code = 4
    code = "integrity"


class TooLarge(IntegrityError):
    """A value holds more bytes than expected."""

    code = "too_large"


class GateFailed(FlexfleetError):
    exit_code = 5
    code = "gate"


class EnvironmentFailure(FlexfleetError):
    exit_code = 6
    code = "environment"


class Unreachable(EnvironmentFailure):
    """A server did not answer in time."""

    code = "unreachable"


class Busy(Unreachable):
    """A server still answered after all retries that it is overloaded or starting."""

    code = "busy"


class InUse(EnvironmentFailure):
    """Another coordinator holds the run, or the invited devices."""

    code = "in_use"


class UnreachableAddress(Unreachable, ConfigError):
    """The server at an address has never answered: it may be starting, or the parameter may be wrong. A Job retries."""

    code = "address"


class Refused(EnvironmentFailure):
    """A store or MLflow refused one request. Other requests may succeed."""

    code = "refused"


class NothingMerged(FlexfleetError):
    """No update of the run was merged, so its model is not trained."""

    exit_code = 7
    code = "nothing_merged"


class ClientError(FlexfleetError):
    exit_code = 42
    code = "client"


def together(errors: Iterable[FlexfleetError]) -> FlexfleetError:
    """Return the only error, or SeveralErrors with all of them."""
    flat = [each for error in errors for each in (error.errors if isinstance(error, SeveralErrors) else (error,))]
    return flat[0] if len(flat) == 1 else SeveralErrors("; ".join(map(str, flat)), flat)


def out_of_memory(error: BaseException) -> bool:
    """Return whether the system refused memory. On a CPU, torch raises a plain RuntimeError for it."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error))


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise MemoryError when memory is refused on a CPU, also for torch's RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise MemoryError(f"out of memory: {first_line(error)}") from error


# ------------------------------------------------------------------------------------------- texts of others
WHO_ASKS = re.compile(r"(?<=://)(?:[^/\s]*@|[^/:@\s]*:(?!\d+(?:/|$))\S*@)")
"""User and password of an address, also if the password contains an unquoted @ or slash."""

QUERIED = re.compile(r"(?<=[?&;])(\w*(?:password|passwd|pwd|token)|odbc_connect)=[^&;\s]+", re.IGNORECASE)
"""A password among the options of a database's address."""


def holds_password(text: str) -> bool:
    """Return whether an address in the text contains a password. A user name alone counts only for HTTP, where tokens
    stand in its place (https://token@host)."""
    asked = ((text[: found.start()], found[0]) for found in WHO_ASKS.finditer(text))
    return QUERIED.search(text) is not None or any(
        ":" in who or before.endswith(("http://", "https://")) for before, who in asked
    )


def masked(address: str) -> str:
    """Return an address without user and password."""
    return QUERIED.sub(r"\1=...", WHO_ASKS.sub("", address))


def printable(text: str) -> str:
    """Return a foreign text in one line, with control and invisible characters escaped (`\\x1b`)."""
    one_line = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in one_line)


def first_line(error: BaseException) -> str:
    """Return the first line of a foreign error's text, without passwords, or its class's name if the text is empty.

    SQLAlchemy begins with advice to programmers, which is skipped.
    """
    said = [line for line in str(error).splitlines() if not re.match(r"([A-Z_]+: )?\(raised as a result of ", line)]
    return masked((said or [type(error).__name__])[0])


def brief(error: Any) -> str:
    """Return a pydantic ValidationError in one printable line."""
    first, *more = error.errors()
    where = ".".join(str(part) for part in first["loc"])
    return printable(f"{where + ': ' if where else ''}{first['msg']}{f' (and {len(more)} more)' if more else ''}")


def line_in(call: Any, error: Exception) -> str:
    """Return ` (line 7 of mine.py)` for the function's file, or an empty text if the error did not pass through it."""
    file = getattr(getattr(call, "__code__", None), "co_filename", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" (line {lines[-1]} of {file})" if lines else ""


def kind_of(value: object) -> str:
    """Return `None`, or the value's type as in `a dict`."""
    return "None" if value is None else f"a {type(value).__name__}"


# --------------------------------------------------------------------------------------------------- hints
STRICT = (
    "CA cert does not include key usage extension",
    "Missing Authority Key Identifier",
    "Missing Subject Key Identifier",
    "Basic Constraints of CA cert not marked critical",
)
"""OpenSSL's texts for certificates that only ssl.VERIFY_X509_STRICT refuses."""
UNTRUSTED = ("unable to get local issuer certificate", "self-signed certificate", "self signed certificate")
WRONG_TIME = ("certificate has expired", "certificate is not yet valid")


def certificate_hint(said: str) -> str:
    """Return the cure for a certificate that Python 3.13 and newer refuse; empty for any other error."""
    if not any(each in said for each in STRICT):
        return ""
    return (
        ". Python 3.13 and newer check certificates strictly (RFC 5280): issue the server's authority anew, with "
        "basicConstraints (critical), keyUsage keyCertSign and key identifiers, or run with Python 3.11 or 3.12"
    )


def device_hint(said: str) -> str:
    """Return the cure for a device that refuses a server's certificate; empty for any other error."""
    if any(each in said for each in UNTRUSTED):
        return (
            ". No authority that this machine trusts has signed the server's certificate. If the server is yours, set "
            "SSL_CERT_FILE to a PEM file with its authority's certificate"
        )
    if any(each in said for each in WRONG_TIME):
        return ". Is this machine's clock right?"
    return certificate_hint(said)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'alpha'?)`, or all known names if none is close."""
    names = list(known)
    return did_you_mean(word, names) or f" (known: {', '.join(sorted(names)) or 'none'})"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'alpha'?)`, or an empty text if no name is close. Case does not count."""
    names = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), names, n=1)
    return f" (did you mean {names[found[0]]!r}?)" if found else ""
