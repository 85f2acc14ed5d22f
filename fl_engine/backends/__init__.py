"""Backends execute the assignments of a round. All of them give the same bits for the same plan."""

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
from fl_engine.remote.leases import Assigner
from fl_engine.remote.mailboxes import Mailboxes
from fl_engine.remote.provisioner import Enrolled
from fl_engine.remote.registry import Registry
from fl_engine.remote.scheduler import Remote
from fl_engine.remote.settings import LEASE_S, AgentsConfig, KubernetesConfig
from fl_engine.storage import lease
from fl_engine.storage.s3 import open_store
from fl_engine.training.memory import Peaks

log = logging.getLogger("flexfleet")


@dataclass(frozen=True)
class Surroundings:
    """Everything that a backend may need."""

    site: Site
    mailbox: Mailbox
    devices: tuple[str, ...] = ("cpu",)
    run_id: str = ""
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    agents: AgentsConfig = field(default_factory=AgentsConfig)
    memory: Peaks | None = None
    """The memory that training takes, for observe=cgroup and memory=auto."""
    should_stop: Callable[[], bool] = lambda: False
    code: tuple[Path, str] | None = None
    """The wheel of the run's own code in the run's folder, and its sha256."""
    mailboxes: Mailboxes | None = None
    """The mailboxes of the enrolled devices."""
    registry: Registry | None = None
    site_sums: Mapping[str, str] = field(default_factory=dict)
    """See `Assignment.site`."""
    patience_s: float = 600.0

    def remote(self, mailboxes: Mailboxes, provisioner: Pods | Enrolled, lease_s: float, held: lease.Lease) -> Remote:
        options = provisioner.options if isinstance(provisioner, Pods) else self.agents
        code = None if self.code is None else self.code[1]
        assigner = Assigner(self.mailbox, mailboxes, options, lease_s, self.site_sums, code, self.memory)
        return Remote(assigner, self.run_id, self.site.fleet, provisioner, held.check, self.should_stop)


@contextmanager
def _in_pods(of: Surroundings) -> Iterator[Backend]:
    """Delete the run's objects in the cluster at the end; after a failure they remain for inspection. Holding the run's
    lock implies holding the mailboxes' lock, so do not wait for it."""
    home = open_store(of.mailbox.store.uri(MAILBOXES), patience_s=of.patience_s)
    with lease.held(home, 0) as held:
        pods = Pods(of.kubernetes, of.run_id, of.site.fleet, of.mailbox.store, home, held.key, of.patience_s, of.memory)
        with pods.watched():
            remote = of.remote(pods.mailboxes, pods, LEASE_S, held)
            try:
                yield remote
            except Replaced:
                raise  # another coordinator has the objects
            except (FlexfleetError, KeyboardInterrupt):
                log.warning(pods.what_is_left())
                raise
        pods.clear()
    home.delete(*home.list(""))


@contextmanager
def _on_devices(of: Surroundings) -> Iterator[Backend]:
    """One run at a time has the enrolled devices. After a failure they finish their assignments, and wait."""
    assert of.mailboxes is not None and of.registry is not None
    with lease.held(of.mailboxes.home) as held:
        enrolled = Enrolled(of.site.fleet, of.registry, of.agents.wait_s)
        remote = of.remote(of.mailboxes, enrolled, of.agents.lease_s, held)
        yield remote
        remote.finish()


BACKENDS: dict[str, Callable[[Surroundings], AbstractContextManager[Backend]]] = {
    "in_process": lambda of: nullcontext(InProcess(of.site, of.devices)),
    "processes": lambda of: closing(Processes(of.site, of.devices, of.code, of.should_stop)),
    "kubernetes": _in_pods,
    "agents": _on_devices,
}
"""Map each value of `run.backend` to a context manager that returns the backend of a run."""

__all__ = ["BACKENDS", "InProcess", "Processes", "Remote", "Surroundings"]
