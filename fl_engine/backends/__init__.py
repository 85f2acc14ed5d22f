"""How orders reach clients. Each backend gives the same bits for the same plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from fl_engine.backends.agents.backend import Agents
from fl_engine.backends.agents.post import Post
from fl_engine.backends.agents.settings import AgentsConfig
from fl_engine.backends.in_process import InProcess
from fl_engine.backends.kubernetes.backend import Kubernetes
from fl_engine.backends.kubernetes.lasting import LETTERS, Lasting
from fl_engine.backends.kubernetes.settings import KubernetesConfig
from fl_engine.backends.processes import Processes
from fl_engine.core.contracts import Backend
from fl_engine.core.errors import ConfigError, FlexfleetError, Replaced
from fl_engine.exchange.client import Site
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.storage import lease
from fl_engine.storage.places import open_store
from fl_engine.training.memory import Peaks

log = logging.getLogger("flexfleet")

P = TypeVar("P", Kubernetes, Lasting)


@dataclass(frozen=True)
class Surroundings:
    """What backends are made from; each takes what it needs."""

    site: Site
    mailbox: Mailbox
    devices: tuple[str, ...] = ("cpu",)
    run_id: str = ""
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    memory: Peaks | None = None
    """What training each level takes: for observe=cgroup, and pools with memory=auto."""
    should_stop: Callable[[], bool] = lambda: False
    code: tuple[Path, str] | None = None
    """The wheel of one's own code in the run's folder, and its sha256."""
    agents: AgentsConfig = field(default_factory=AgentsConfig)
    post: Post | None = None
    """Where the letters of invited devices are."""
    site_sums: Mapping[str, str] = field(default_factory=dict)
    """By name, the sha256 of what the run has put under `site/` in the store (`Assignment.site`)."""


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
        site_sums=of.site_sums,
    )
    with _tidied(pods) as pods:
        yield pods


@contextmanager
def _in_pods_that_stay(of: Surroundings) -> Iterator[Backend]:
    """As `_in_pods`. Whoever has the run has its letters too: no other holder of their lease is waited for."""
    home, code = open_store(of.mailbox.store.uri(LETTERS)), None if of.code is None else of.code[1]
    with lease.held(home, 0) as held:
        pods = Lasting(
            of.kubernetes,
            of.run_id,
            of.site.fleet,
            of.mailbox,
            home,
            held,
            should_stop=of.should_stop,
            code=code,
            memory=of.memory,
            site_sums=of.site_sums,
            befalls=of.site.befalls,
        )
        with _tidied(pods) as pods:
            yield pods


@contextmanager
def _tidied(pods: P) -> Iterator[P]:
    try:
        yield pods
        pods.finish()
    except Replaced:
        raise  # the objects belong to the other coordinator now
    except (FlexfleetError, KeyboardInterrupt):
        log.warning(pods.what_is_left())
        raise


LIFETIMES = {"round": _in_pods, "run": _in_pods_that_stay}


@contextmanager
def _on_devices(of: Surroundings) -> Iterator[Backend]:
    """One run at a time has the invited devices. After a failure they finish what they hold, and wait."""
    if of.post is None:
        raise ConfigError("run.backend=agents needs a place for the devices' letters")
    code = None if of.code is None else of.code[1]
    with lease.held(of.post.home) as held:
        devices = Agents(
            of.agents,
            of.run_id,
            of.site.fleet,
            of.mailbox,
            of.post,
            of.should_stop,
            code,
            held.check,
            memory=of.memory,
            site_sums=of.site_sums,
            befalls=of.site.befalls,
        )
        yield devices
        devices.finish()


BACKENDS: dict[str, Callable[[Surroundings], AbstractContextManager[Backend]]] = {
    "in_process": lambda of: nullcontext(InProcess(of.site, of.devices)),
    "processes": lambda of: closing(Processes(of.site, of.devices, of.mailbox, of.code, of.should_stop)),
    "kubernetes": lambda of: LIFETIMES[of.kubernetes.lifetime](of),
    "agents": _on_devices,
}
"""By the name that `run.backend` takes: a context manager that gives the backend for one run."""

__all__ = ["BACKENDS", "Agents", "InProcess", "Kubernetes", "Processes", "Surroundings"]
