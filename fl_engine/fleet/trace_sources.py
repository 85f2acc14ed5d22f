"""The generators that `fleet.trace` can name. A new one is a class and a line in TRACES."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

from fl_engine.core.errors import DataError, printable
from fl_engine.core.registry import Contract
from fl_engine.core.system import hashed
from fl_engine.core.types import Device
from fl_engine.fleet.lognormal import LogNormal
from fl_engine.fleet.trace import Trace
from fl_engine.fleet.trace_files import FedScale, TraceFile


class TraceSource(Protocol):
    """A frozen dataclass of options."""

    @property
    def files(self) -> tuple[str, ...]:
        """The files that it reads."""

    def trace(self, fleet: Sequence[Device], samples: Sequence[int], seed: int) -> Trace:
        """Return the devices' behaviour, a function of the arguments, the options and the files. `samples` is the
        number of samples of each client. Raises ConfigError, or DataError for a file."""


TRACES: dict[str, type[TraceSource]] = {"lognormal": LogNormal, "file": TraceFile, "fedscale": FedScale}


@dataclass(frozen=True)
class OrFile(Contract[TraceSource]):
    """A path alone is a file of rows."""

    def parse(self, section: Any) -> TraceSource:
        return super().parse({"name": "file", "path": section} if isinstance(section, str) else section)


Tracing = Annotated[TraceSource, OrFile("trace", TRACES, TraceSource)]
"""For a field: a file, chosen by name in a configuration, or one's own as `package.module:NAME`."""


def digest(source: TraceSource) -> str:
    """Return the sha256 of the files' contents, in order. Raises DataError for an unreadable file."""
    whole = hashlib.sha256()
    for path in source.files:
        try:
            whole.update(hashed(Path(path), hashlib.sha256()).digest())
        except OSError as error:
            raise DataError(f"fleet.trace: {printable(path)} cannot be read: {error.strerror}") from error
    return whole.hexdigest()


__all__ = ["TRACES", "FedScale", "LogNormal", "TraceFile", "TraceSource", "Tracing", "digest"]
