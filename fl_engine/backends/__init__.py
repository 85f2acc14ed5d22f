"""How orders reach clients. Each backend gives the same bits for the same plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fl_engine.backends.in_process import InProcess
from fl_engine.backends.processes import Processes
from fl_engine.core.types import Backend
from fl_engine.exchange.client import Site
from fl_engine.exchange.mailbox import Mailbox

BACKENDS: dict[str, Callable[[Site, Sequence[str], Mailbox], Backend]] = {
    "in_process": lambda site, devices, mailbox: InProcess(site, devices),
    "processes": Processes,
}
"""By the name that `run.backend` takes: where clients live, the torch devices, and the run's mailbox."""

__all__ = ["BACKENDS", "InProcess", "Processes"]
