"""Backends execute the assignments of a round. All backends give bit-identical results for the same plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from fl_engine.backends.in_process import InProcess
from fl_engine.backends.processes import Processes
from fl_engine.core.contracts import Backend
from fl_engine.core.errors import FlexfleetError, Replaced
from fl_engine.exchange.client import Site
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.remote.kubernetes.provisioner import MAILBOXES, Pods
from fl_engine.remote.leases import RemoteRun
from fl_engine.remote.provisioner import Enrolled, Provisioner
from fl_engine.remote.registry import Mailboxes, Registry
from fl_engine.remote.scheduler import WorkerBackend
from fl_engine.remote.settings import AgentsConfig, KubernetesConfig
from fl_engine.storage.run_lock import RunLock, hold
from fl_engine.storage.s3 import open_store
from fl_engine.training.memory import Peaks

log = logging.getLogger("flexfleet")


@dataclass(frozen=True)
class Surroundings:
    """Settings and services that backends use."""

    site: Site
    mailbox: Mailbox
    devices: tuple[str, ...] = ("cpu",)
    run_id: str = ""
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    agents: AgentsConfig = field(default_factory=AgentsConfig)
    memory: Peaks | None = None
    should_stop: Callable[[], bool] = lambda: False
    code: tuple[Path, str] | None = None
    """Path and SHA-256 hash of the wheel with the user's code. The wheel is stored in the run's folder."""
    mailboxes: Mailboxes | None = None
    registry: Registry | None = None
    site_sums: Mapping[str, str] = field(default_factory=dict)
    """See `AssignmentMessage.site`."""
    patience_s: float = 600.0

    def remote(self, provisioner: Provisioner, lock: RunLock) -> WorkerBackend:
        more = (None if self.code is None else self.code[1], self.memory, lock.check, self.should_stop)
        return WorkerBackend(RemoteRun(self.run_id, self.site.fleet, self.mailbox, provisioner, self.site_sums, *more))


@contextmanager
def _in_pods(of: Surroundings) -> Iterator[Backend]:
    """Yield a backend that trains clients in pods. The run's Kubernetes objects are deleted at the end, except after a
    failure. Holding the run's lock implies holding the mailboxes' lock, so do not wait for the latter."""
    home = open_store(of.mailbox.store.uri(MAILBOXES), patience_s=of.patience_s)
    with hold(home, 0) as lock:
        pods = Pods(of.kubernetes, of.run_id, of.site.fleet, of.mailbox.store, home, of.patience_s)
        with pods.watched():
            try:
                yield of.remote(pods, lock)
            except Replaced:
                raise  # keep the Kubernetes objects, which another coordinator now uses
            except (FlexfleetError, KeyboardInterrupt):
                log.warning(pods.what_is_left())
                raise
        pods.clear()
    home.delete(*home.list(""))


@contextmanager
def _on_devices(of: Surroundings) -> Iterator[Backend]:
    """Yield a backend that trains clients on enrolled devices. A device serves one run at a time. If the run fails,
    devices finish their assignments and wait for further assignments."""
    assert of.mailboxes is not None and of.registry is not None
    with hold(of.mailboxes.home) as lock:
        remote = of.remote(Enrolled(of.site.fleet, of.registry, of.mailboxes, of.agents), lock)
        yield remote
        remote.finish()


BACKENDS: dict[str, Callable[[Surroundings], AbstractContextManager[Backend]]] = {
    "in_process": lambda of: nullcontext(InProcess(of.site, of.devices)),
    "processes": lambda of: closing(Processes(of.site, of.devices, of.code, of.should_stop)),
    "kubernetes": _in_pods,
    "agents": _on_devices,
}
"""Map each value of `run.backend` to a function that returns a context manager for the backend of a run."""

__all__ = ["BACKENDS", "InProcess", "Processes", "Surroundings", "WorkerBackend"]
