"""Starts workers as pods: one elastic Indexed Job per class of pods, for the run or for a round.

Each index of a Job has a mailbox, whose invitation is in the Job's Secret. The Job's controller replaces pods that end
or are lost; a pod is known by its UID, so two pods of one index do not collide. What Kubernetes says ends a lease only
for facts (a container has terminated, a pod is gone); all else explains why pods do not start.
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
from fl_engine.remote.provisioner import Lost, Need
from fl_engine.remote.registry import Member
from fl_engine.remote.settings import KubernetesConfig
from fl_engine.storage import probe
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.store import Store
from fl_engine.training.memory import Peaks, needed

MAILBOXES = "agents"
"""In the run's store."""
MOST_ORDERS = 100
"""Of a pod."""
FIRST_LOOK_S = 5.0
"""How long a round waits for the first look at the cluster, which finds the pods of an earlier coordinator."""


def check_reach(uri: str) -> None:
    """Raises ConfigError if pods cannot get URLs of the store at `uri`."""
    if not uri.startswith("s3://"):
        raise ConfigError(
            f"pods reach the run's store by URLs of an S3 server, but the store is {uri}: set "
            "run.remote=s3://bucket/prefix"
        )


def image_for(options: KubernetesConfig) -> str:
    """The image of the pods. Raises ConfigError if none is named."""
    image = options.image or os.environ.get("FLEXFLEET_IMAGE")
    if not image:
        raise ConfigError("kubernetes.image must name the image of the pods, or set FLEXFLEET_IMAGE")
    return image


def reach(options: KubernetesConfig, run_id: str, store: Store) -> None:
    """Before anything trains: raises what `check_reach` and `image_for` raise, and EnvironmentFailure for a cluster
    that does not answer or refuses what a run asks first."""
    check_reach(store.uri())
    image_for(options)
    Cluster(options.namespace).get("configmaps", jobs.run_label(run_id, store.uri()))


class Pods:
    """A `Provisioner`. `store`: the run's; `home`: of its mailboxes; `lock`: the key in `home` of the coordinator's
    lock. `patience_s`: how long the API may be away, and how long pods may take to start."""

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
        """Ask Kubernetes inside, in a thread."""
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

    def enroll(self, member: Member) -> None:
        """Pods do not enroll."""

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
        kubectl, of = f"kubectl -n {self.options.namespace}", f"-l {jobs.RUN}={self._run}"
        return (
            f"{reasons}To look at the pods: {kubectl} describe jobs,pods {of}, and {kubectl} logs --prefix {of}. Mend "
            "the cause"
        )

    def _is_auto(self, name: str) -> bool:
        return self._classes[name].pool.memory == "auto"

    def _memory_of(self, plan: RoundPlan, clients: Sequence[int]) -> str:
        """What a pod needs that gets the largest of these clients' orders."""
        if self._memory is None:
            raise ConfigError("memory=auto needs what training takes, which was not measured")
        peaks, levels = self._memory, [plan.order_of[client].level for client in clients]
        largest = sorted(levels, key=lambda level: peaks.levels[level], reverse=True)[: self.room]
        return f"{math.ceil(needed(peaks, largest) / 2**20)}Mi"

    def clear(self) -> None:
        """Delete all objects of the run in the cluster."""
        self._objects.clear()

    def what_is_left(self) -> str:
        """How to remove what a stopped run leaves in the cluster."""
        return (
            "pods finish their assignments, --resume finds them, and after 10 minutes they end by themselves. To end "
            f"them now: kubectl -n {self.options.namespace} delete jobs,configmaps -l {jobs.RUN}={self._run}"
        )
