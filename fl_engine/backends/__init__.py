"""Backends execute the assignments of a round. All backends give bit-identical results for the same plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext

from fl_engine.backends.in_process import InProcess
from fl_engine.backends.processes import Processes
from fl_engine.core.contracts import Backend
from fl_engine.core.errors import FlexfleetError, Replaced
from fl_engine.remote.kubernetes.provisioner import MAILBOXES, Pods
from fl_engine.remote.leases import Surroundings
from fl_engine.remote.provisioner import Enrolled
from fl_engine.remote.scheduler import WorkerBackend
from fl_engine.storage.run_lock import hold
from fl_engine.storage.s3 import open_store

log = logging.getLogger("flexfleet")


@contextmanager
def _in_pods(of: Surroundings) -> Iterator[Backend]:
    """Yield a backend that trains clients in pods. The run's Kubernetes objects are deleted at the end, except after a
    failure. Holding the run's lock implies holding the mailboxes' lock, so do not wait for the latter."""
    home = open_store(of.mailbox.store.uri(MAILBOXES), patience_s=of.patience_s)
    with hold(home, 0) as lock:
        pods = Pods(of.kubernetes, of.run_id, of.site.fleet, of.mailbox.store, home, of.patience_s)
        with pods.watched():
            try:
                yield WorkerBackend(of, pods, lock.check)
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
        remote = WorkerBackend(of, Enrolled(of.site.fleet, of.registry, of.mailboxes, of.agents), lock.check)
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
