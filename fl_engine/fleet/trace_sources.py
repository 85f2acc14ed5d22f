"""What `fleet.trace` may name. A new generator is a class and a line in TRACES."""

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
        """What the devices of this fleet do; `samples`: how many each holds. A function of these, of the options and of
        the files. Raises ConfigError, or DataError for a file."""


TRACES: dict[str, type[TraceSource]] = {"lognormal": LogNormal, "file": TraceFile, "fedscale": FedScale}


@dataclass(frozen=True)
class OrFile(Contract[TraceSource]):
    """A path alone is a file of rows."""

    def parse(self, section: Any) -> TraceSource:
        return super().parse({"name": "file", "path": section} if isinstance(section, str) else section)


Tracing = Annotated[TraceSource, OrFile("trace", TRACES, TraceSource)]
"""For a field: a file, chosen by name in a configuration, or one's own as `package.module:NAME`."""


def digest(source: TraceSource) -> str:
    """sha256 of the files' contents, in their order. Raises DataError for one that cannot be read."""
    whole = hashlib.sha256()
    for path in source.files:
        try:
            whole.update(hashed(Path(path), hashlib.sha256()).digest())
        except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
            said = error.strerror if isinstance(error, OSError) else str(error)
            raise DataError(f"fleet.trace: {printable(path)} cannot be read: {said}") from error
    return whole.hexdigest()


__all__ = ["TRACES", "FedScale", "LogNormal", "TraceFile", "TraceSource", "Tracing", "digest"]
