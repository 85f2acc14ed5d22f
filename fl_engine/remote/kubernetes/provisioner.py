"""Starts workers as pods: one elastic Indexed Job per class of pods, for the run or for a round.

Each index of a Job has a mailbox, whose invitation is in the Job's Secret. The Job's controller replaces pods that end
or are lost. A worker's id is its pod's UID, so two pods of one index do not collide. Pod states end a lease only for
facts (a container has terminated, a pod is gone); all others explain why pods do not start.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from fl_engine.core.errors import ConfigError
from fl_engine.core.types import Device, RoundPlan
from fl_engine.remote.kubernetes import jobs
from fl_engine.remote.kubernetes.cluster import Cluster
from fl_engine.remote.kubernetes.controller import Controller, Demand
from fl_engine.remote.kubernetes.objects import Objects
from fl_engine.remote.mailboxes import Mailboxes
from fl_engine.remote.provisioner import Lost, Need, Provisioner
from fl_engine.remote.registry import Member
from fl_engine.remote.settings import KubernetesConfig
from fl_engine.storage import probe
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.store import Store
from fl_engine.training.memory import Peaks, needed

MAILBOXES = "agents"
"""Folder of the mailboxes in the run's store."""
MOST_ORDERS = 100
"""The most assignments of a pod at a time."""
FIRST_LOOK_S = 5.0
"""How long a round waits until the pods of an earlier coordinator are found."""


def check_reach(uri: str) -> None:
    """Raise ConfigError if pods cannot get URLs of the store at `uri`."""
    if not uri.startswith("s3://"):
        raise ConfigError(f"run.remote must be an s3:// address with run.backend=kubernetes, got {uri}")


def image_for(options: KubernetesConfig) -> str:
    """Return the image of the pods. Raises ConfigError if it is not set."""
    image = options.image or os.environ.get("FLEXFLEET_IMAGE")
    if not image:
        raise ConfigError("kubernetes.image must name the image of the pods, or set FLEXFLEET_IMAGE")
    return image


def reach(options: KubernetesConfig, run_id: str, store: Store) -> None:
    """Check before the training that pods can be started. Raises ConfigError for store and image, and
    EnvironmentFailure if the cluster refuses the first request of a run or cannot be reached."""
    check_reach(store.uri())
    image_for(options)
    Cluster(options.namespace).get("configmaps", jobs.run_label(run_id, store.uri()))


class Pods(Provisioner):
    """The pods of a run.

    Args:
        options: The section `kubernetes`.
        run_id: The run.
        fleet: Its devices.
        store: Its store.
        home: The folder of the mailboxes.
        lock: The key of the coordinator's lock in `home`.
        patience_s: How long the API may be unavailable, and how long pods may take to start.
        memory: What training takes, for memory=auto.
        cluster: The cluster; None: the one of the environment.
    """

    strangers, drains = False, 3

    def __init__(
        self,
        options: KubernetesConfig,
        run_id: str,
        fleet: Sequence[Device],
        store: Store,
        home: Store,
        lock: str,
        patience_s: float,
        memory: Peaks | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self.options = options.model_copy(update={"image": image_for(options)})
        self._run, self._memory = jobs.run_label(run_id, store.uri()), memory
        verb = probe.upload_verb(home) if isinstance(home, S3Store) else None
        self.mailboxes = Mailboxes(home, verb, options.endpoint, lock)
        self._class_of = jobs.classes(fleet, options)
        self._classes = {of.name: of for of in self._class_of.values()}
        self.room = 1 if options.placement == "device" else min(options.clients_per_pod, MOST_ORDERS)
        self.quorum, self.wait_s = options.quorum, patience_s
        cluster = cluster or Cluster(options.namespace)
        self._objects = Objects(cluster, self.options, self._run, store.uri(), self.mailboxes)
        self._controller = Controller(
            self._objects, self._classes, self.room, options.attempts, patience_s, options.placement == "pool"
        )
        self._demand = Demand()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Poll Kubernetes inside, in a thread."""
        with self._controller.watched():
            yield

    @property
    def moved(self) -> float:
        return self._controller.moved

    def pool(self, client: int) -> str:
        return self._class_of[client].name

    def suits(self, own: str | None, pool: str) -> bool:
        return own is not None and self._classes[own].includes(self._classes[pool], self.options)

    def torch_device(self, client: int) -> str:
        return self._class_of[client].pool.torch_device

    def names(self) -> Collection[str]:
        return self._controller.members().keys()

    def member(self, name: str) -> Member:
        return self._controller.members()[name]

    def begin(self, plan: RoundPlan) -> None:
        clients: dict[str, list[int]] = {}
        for order in plan.orders:
            clients.setdefault(self.pool(order.client), []).append(order.client)
        wishes = [min(math.ceil(len(of) / self.room), self._objects.most) for of in clients.values()]
        counts = {name: len(of) for name, of in clients.items()}
        self._demand = Demand(
            plan.label if self.options.lifetime == "round" else None,
            dict(zip(clients, jobs.shares(wishes, self.options.parallelism), strict=True)),
            {name: self._memory_of(plan, of) for name, of in clients.items() if self._is_auto(name)},
            counts,
            counts,
        )
        self._controller.begin(self._demand)
        self._controller.looked.wait(FIRST_LOOK_S)

    def end(self) -> None:
        self._controller.end()

    def need(self, need: Need) -> None:
        self._demand = replace(self._demand, open=need.open, waiting=need.waiting, silent=need.silent)
        self._controller.update(self._demand, need.present.keys())

    def lost(self, name: str, worker: str) -> Lost | None:
        return self._controller.lost(worker)

    def hopeless(self, pool: str) -> bool:
        return self._controller.hopeless(pool)

    def why(self, pool: str) -> str:
        return self._controller.why(pool)

    def advice(self, names: Sequence[str], pools: Sequence[str]) -> str:
        reasons = "".join(f"{pool}: {why}. " for pool in pools if (why := self.why(pool)))
        return (
            f"{reasons}Look at the pods: kubectl -n {self.options.namespace} describe jobs,pods -l "
            f"{jobs.RUN}={self._run}. Fix the cause"
        )

    def _is_auto(self, name: str) -> bool:
        return self._classes[name].pool.memory == "auto"

    def _memory_of(self, plan: RoundPlan, clients: Sequence[int]) -> str:
        """Return the memory that a pod needs for the largest of these clients' assignments."""
        assert self._memory is not None, "memory=auto is measured at the start"
        peaks, levels = self._memory, [plan.order_of[client].level for client in clients]
        largest = sorted(levels, key=lambda level: peaks.levels[level], reverse=True)[: self.room]
        return f"{math.ceil(needed(peaks, largest) / 2**20)}Mi"

    def clear(self) -> None:
        """Delete all objects of the run in the cluster."""
        self._objects.clear()

    def what_is_left(self) -> str:
        """Return how to delete what a stopped run leaves in the cluster."""
        return (
            "the run's pods remain for --resume and end by themselves after 10 minutes. To end them now: "
            f"kubectl -n {self.options.namespace} delete jobs,configmaps -l {jobs.RUN}={self._run}"
        )
