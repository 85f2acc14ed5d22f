"""What clients in pods get: the settings of `run.backend=kubernetes`."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from fl_engine.core.fields import Count, Fraction, Moves, Positive, Section, UserPath
from fl_engine.core.quantities import quantity

GRACE_S = 30
"""Seconds after its deadline at which the coordinator deletes a client Job that is still there."""
URL_S = 604_800
"""Seconds that a presigned URL can live (AWS Signature Version 4)."""
DATA = re.compile("pvc:[a-z0-9]([a-z0-9.-]*[a-z0-9])?|host:/.*")
"""The forms of `kubernetes.data`."""


def _cpus(value: str) -> str:
    if not quantity(value):
        raise ValueError(f"more than 0 is expected (250m, 2), got {value!r}")
    return value


def _bytes(value: str) -> str:
    if value != "auto" and quantity(value) < 1:
        raise ValueError(f"a byte at least is expected (512Mi, 1Gi), got {value!r}")
    return value


class NodePool(Section):
    """Where the pods of one device tier run, and what they get."""

    cpu: Annotated[str, AfterValidator(_cpus)] = "1"
    memory: Annotated[str, AfterValidator(_bytes)] = "1Gi"
    """Request and limit, as Kubernetes writes quantities; auto: what the largest sub-model needs that the Job's clients
    are sent (docs/guides/kubernetes/devices.md)."""
    arch: Literal["amd64", "arm64"] | None = None
    """kubernetes.io/arch; null: any."""
    device_type: str | None = None
    """flexfleet.io/device-type, e.g. rpi4, rpi5, jetson-nano."""
    selector: dict[str, str] = Field(default={})
    """More node labels."""
    taint: str | None = None
    """Key of a NoSchedule taint that the pods tolerate, e.g. flexfleet.io/edge."""
    runtime_class: str | None = None
    torch_device: str = "cpu"
    """cuda where the pods have a GPU, which trains one client at a time."""
    image: str | None = None
    """null: kubernetes.image. E.g. one built for a GPU."""


class KubernetesConfig(Section):
    """For `run.backend=kubernetes`: one Indexed Job per device tier, for a round or for the run. The cluster is the one
    that this process runs in, else KUBECONFIG's."""

    namespace: Annotated[str, Field(pattern="^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")] = "flexfleet-clients"
    """Of the clients' Jobs."""
    image: str | None = None
    """null: that of the environment variable FLEXFLEET_IMAGE, which the pipelines set to the one that tasks run in."""
    template: UserPath | None = None
    """The Job's YAML; null: fl_engine/backends/kubernetes/client-job.yaml, which says what is filled in."""
    pools: dict[str, NodePool] = Field(default={})
    """By device tier. A tier without an entry gets the defaults of a pool. A later file or --set changes only the tiers
    and keys that it names."""
    placement: Literal["pool", "device"] = "pool"
    """device: each client's data lies on one node; a Job of its own is bound to it by `hostname`."""
    hostname: str = "device-{client}"
    """The node of a client, for placement=device."""

    @field_validator("hostname")
    @classmethod
    def _names_a_node(cls, value: str) -> str:
        try:
            value.format(client=0)
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            raise ValueError("a name with {client} in it is expected, and no other braces") from error
        return value

    lifetime: Literal["round", "run"] = "round"
    """round: a pod answers its orders and ends; run: pods stay, and take orders as long as there are rounds."""
    lease_s: Positive = 60.0
    """With lifetime=run, seconds of silence after which a pod's order goes to another one."""
    silence_s: Annotated[float, Field(ge=120, allow_inf_nan=False)] = 300.0
    """With lifetime=run, seconds after which pods end by themselves that see no sign of the coordinator."""
    recycle: Count = 200
    """With lifetime=run, orders after which a pod starts its process anew."""
    clients_per_pod: Count = 1
    """Simulated clients that share a pod, which trains them side by side where it can; 1: each client is one. With
    lifetime=run, how many orders a pod may hold at once (100 at most)."""
    data: str | None = None
    """Where pods find the data files: pvc:<claim> or host:<folder of the node>, mounted read-only; null: the data set
    comes with the image."""
    access: Literal["presigned", "ambient"] = "presigned"
    """presigned: clients get URLs, and hold no keys; ambient: their pods have credentials of their own."""
    endpoint: str | None = None
    """What pods call the S3 server, where that differs from AWS_ENDPOINT_URL."""
    observe: Annotated[Literal["simulated", "cgroup"], Moves.RESULT] = "simulated"
    """cgroup: a client prunes to what its pod has left of its memory limit (docs/guides/kubernetes/devices.md);
    simulated: as the fleet says (equal bits)."""
    require_numerics: bool = False
    """A node that would compute other bits than the coordinator refuses to train."""
    quorum: Annotated[Fraction, Moves.ANSWERS] = 1.0
    """When no more answers can come, the round ends if this share of the wanted clients has answered. With fewer, those
    that are missing are asked again (`attempts`); if that does not help, the run stops and can be resumed."""
    attempts: Count = 2
    """How often a client is asked in a round that misses the quorum; with lifetime=run, how many pods may fail an order
    before its client counts as failed, and how often a tier's pods are made in a round that needs them for its quorum.
    Lost nodes do not count, nor a pod's first three drains."""
    parallelism: Count | None = None
    """Pods of a round at a time, divided over its Jobs, at least one for each; null: all at once."""
    deadline_s: Count = 3600
    """Seconds after which a round's pods are ended; with lifetime=run, after which what a pod has not answered of the
    orders that it was given together goes to others."""
    pending_s: Count = 600
    """A pod that has not started after so many seconds counts as failed (no node fits, the image cannot be pulled). For
    one that waits for room, quota or a queue alone they begin anew whenever a pod of the round starts or ends."""
    poll_s: Positive = 1.0
    """Seconds between two looks at Jobs, pods and answers."""

    @field_validator("data")
    @classmethod
    def _names_a_place(cls, value: str | None) -> str | None:
        if value is not None and DATA.fullmatch(value) is None:
            raise ValueError("pvc:<claim> or host:/<folder of the node> is expected")
        return value

    @model_validator(mode="after")
    def _pods_that_stay_fit_every_order(self) -> KubernetesConfig:
        if self.lifetime == "round":
            return self
        if auto := [tier for tier, pool in self.pools.items() if pool.memory == "auto"]:
            raise ValueError(
                f"lifetime=run keeps pods for all rounds, and pools.{auto[0]}.memory=auto makes each round's for what "
                "it is sent: name the memory, as 2Gi, or leave lifetime=round"
            )
        return self

    @model_validator(mode="after")
    def _limits_are_known(self) -> KubernetesConfig:
        auto = [tier for tier, pool in self.pools.items() if pool.memory == "auto"]
        if auto and self.observe == "cgroup":
            raise ValueError(
                f"with observe=cgroup clients prune to the memory that their pod has, so pools.{auto[0]}.memory is the "
                "device's, as 2Gi, and not auto"
            )
        return self

    @model_validator(mode="after")
    def _urls_live_as_long(self) -> KubernetesConfig:
        asked, terms = self.deadline_s + self.pending_s + GRACE_S, f"deadline_s + pending_s + {GRACE_S}"
        if self.lifetime == "run":
            asked, terms = asked + math.ceil(self.lease_s), f"{terms} + lease_s"
        if self.access == "presigned" and asked > URL_S:
            raise ValueError(
                f"{terms} is {asked} seconds, but the URLs that clients get live for {URL_S} (seven days) at most: "
                "lower them, or set access=ambient"
            )
        return self
