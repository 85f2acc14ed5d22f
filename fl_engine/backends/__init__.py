"""How orders reach clients. Each backend gives the same bits for the same plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from fl_engine.backends.in_process import InProcess
from fl_engine.backends.kubernetes.backend import Kubernetes
from fl_engine.backends.kubernetes.settings import KubernetesConfig
from fl_engine.backends.processes import Processes
from fl_engine.core.contracts import Backend
from fl_engine.core.errors import EnvironmentFailure, Replaced, Stopped
from fl_engine.exchange.client import Site
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.training.memory import Peaks

log = logging.getLogger("flexfleet")


@dataclass(frozen=True)
class Surroundings:
    """What backends are made from; each takes what it needs."""

    site: Site
    mailbox: Mailbox
    devices: tuple[str, ...] = ("cpu",)
    run_id: str = ""
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    memory: Peaks | None = None
    """What training each level takes: for kubernetes.observe=cgroup, and pools with memory=auto."""
    should_stop: Callable[[], bool] = lambda: False
    code: tuple[Path, str] | None = None
    """The wheel of one's own code in the run's folder, and its sha256."""


@contextmanager
def _in_pods(of: Surroundings) -> Iterator[Backend]:
    """Removes the run's objects from the cluster at the end; after a failure they stay, to be looked at."""
    pods = Kubernetes(
        of.kubernetes,
        of.run_id,
        of.site.fleet,
        of.mailbox,
        of.memory,
        should_stop=of.should_stop,
        code=None if of.code is None else of.code[1],
    )
    try:
        yield pods
        pods.finish()
    except Replaced:
        raise  # the objects belong to the other coordinator now
    except (Stopped, EnvironmentFailure, KeyboardInterrupt):
        log.warning(pods.what_is_left())
        raise


BACKENDS: dict[str, Callable[[Surroundings], AbstractContextManager[Backend]]] = {
    "in_process": lambda of: nullcontext(InProcess(of.site, of.devices)),
    "processes": lambda of: closing(Processes(of.site, of.devices, of.mailbox, of.code)),
    "kubernetes": _in_pods,
}
"""By the name that `run.backend` takes: a context manager that gives the backend for one run."""

__all__ = ["BACKENDS", "InProcess", "Kubernetes", "Processes", "Surroundings"]
