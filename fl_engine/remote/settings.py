"""The sections `agents` and `kubernetes` of a configuration."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from fl_engine.core.fields import Count, Fraction, Moves, Positive, Section, UserPath
from fl_engine.core.text import quantity

URL_S = 604_800
"""Seconds: seven days, the longest validity of a URL (AWS Signature Version 4)."""


class AgentsConfig(Section):
    """For run.backend=agents: enrolled devices (docs/guides/agents.md)."""

    lease_s: Positive = 60.0
    """Seconds of silence after which another device gets the assignment; a device sends six heartbeats in this time."""
    deadline_s: Count = 3600
    """Seconds after which an assignment without a result goes to another device."""
    attempts: Count = 3
    """Number of devices that may fail an assignment before its client counts as failed."""
    wait_s: Positive = 600.0
    """Seconds to wait while no device takes an assignment, before the run stops; it can be resumed."""
    endpoint: str | None = None
    """Address of the S3 server as devices reach it, if it is not AWS_ENDPOINT_URL."""
    observe: Annotated[Literal["simulated", "cgroup"], Moves.RESULT] = "simulated"
    """cgroup: a client prunes to the memory that its device has free (docs/guides/agents.md); simulated: as the fleet
    says (equal bits)."""

    @model_validator(mode="after")
    def _urls_live_as_long(self) -> AgentsConfig:
        if self.deadline_s + self.lease_s > URL_S:
            raise ValueError(
                f"agents.deadline_s + agents.lease_s must be at most {URL_S} seconds (seven days), as long as devices' "
                f"URLs are valid; got {self.deadline_s + self.lease_s:g}"
            )
        return self


LEASE_S = 60.0
"""Seconds of silence after which a pod's assignment goes to another one."""
NAME = "[a-z0-9]([a-z0-9.-]*[a-z0-9])?"


def _cpus(value: str) -> str:
    if not quantity(value):
        raise ValueError(f"must be more than 0, as 250m or 2; got {value!r}")
    return value


def _bytes(value: str) -> str:
    if value != "auto" and quantity(value) < 1:
        raise ValueError(f"must be at least one byte, as 512Mi or 1Gi; got {value!r}")
    return value


class NodePool(Section):
    """Where the pods of a device tier run, and what they get. Tiers with equal settings share their pods."""

    cpu: Annotated[str, AfterValidator(_cpus)] = "1"
    memory: Annotated[str, AfterValidator(_bytes)] = "1Gi"
    """Request and limit, in the notation of Kubernetes. auto, for lifetime=round: what the largest sub-model needs that
    the tier is sent in a round (docs/guides/kubernetes/devices.md)."""
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
    """cuda for pods with a GPU, which trains one client at a time."""
    image: str | None = None
    """null: kubernetes.image. Set it to an image with another PyTorch, e.g. for a GPU."""


class KubernetesConfig(Section):
    """For run.backend=kubernetes: pods of Indexed Jobs execute the clients' assignments, in the cluster that this
    process runs in, else the one of KUBECONFIG."""

    namespace: Annotated[str, Field(pattern="^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")] = "flexfleet-clients"
    """Namespace of the Jobs."""
    image: str | None = None
    """Image of the pods; null: FLEXFLEET_IMAGE, which the pipelines set."""
    template: UserPath | None = None
    """YAML file of the Job; null: fl_engine/remote/kubernetes/worker-job.yaml."""
    pools: dict[str, NodePool] = Field(default={})
    """Pods by device tier; a tier without an entry gets the defaults. A later file or --set changes only what it
    names."""
    placement: Literal["pool", "device"] = "pool"
    """device: each client's data is stored on one node, and the client's Job runs there."""
    hostname: str = "device-{client}"
    """With placement=device, the node of a client."""
    lifetime: Literal["round", "run"] = "run"
    """run: pods serve the whole run; round: each round starts its own pods."""
    clients_per_pod: Count = 1
    """Number of clients that a pod trains together, at most 100."""
    data: str | None = None
    """Where pods find the data files: pvc:<claim> or host:/<folder of the node>; null: in the image."""
    endpoint: str | None = None
    """Address of the S3 server as pods reach it, if it is not AWS_ENDPOINT_URL."""
    observe: Annotated[Literal["simulated", "cgroup"], Moves.RESULT] = "simulated"
    """cgroup: a client prunes to what is left of its pod's memory limit (docs/guides/kubernetes/devices.md); simulated:
    as the fleet says (equal bits)."""
    quorum: Annotated[Fraction, Moves.ANSWERS] = 1.0
    """Share of the wanted clients whose results end a round although other assignments failed."""
    attempts: Count = 2
    """Number of pods that may fail an assignment before its client counts as failed, without lost nodes and the first
    three evictions of a pod."""
    parallelism: Count | None = None
    """Largest number of pods at a time; null: as many as a round has assignments."""
    deadline_s: Count = 3600
    """Seconds after which an assignment without a result goes to another pod."""

    @field_validator("hostname")
    @classmethod
    def _names_a_node(cls, value: str) -> str:
        try:
            names = {value.format(client=client) for client in (0, 1)}
        except (LookupError, ValueError, AttributeError, TypeError):
            names = set()
        if len(names) < 2:
            raise ValueError(f"must be a name that contains {{client}}, and no other braces; got {value!r}")
        return value

    @field_validator("data")
    @classmethod
    def _names_a_place(cls, value: str | None) -> str | None:
        if value is not None and re.fullmatch(f"pvc:{NAME}|host:/.*", value) is None:
            raise ValueError("must be pvc:<claim> or host:/<folder of the node>")
        return value

    @model_validator(mode="after")
    def _limits_are_known(self) -> KubernetesConfig:
        auto = [tier for tier, pool in self.pools.items() if pool.memory == "auto"]
        if auto and self.lifetime == "run":
            raise ValueError(
                f"pools.{auto[0]}.memory=auto needs lifetime=round, because pods that stay for the run cannot change "
                "their memory. Set an amount, as 2Gi, or lifetime=round"
            )
        if auto and self.observe == "cgroup":
            raise ValueError(
                f"pools.{auto[0]}.memory must be the device's memory, as 2Gi, with observe=cgroup, because clients "
                "prune to the memory that their pod has"
            )
        return self

    @model_validator(mode="after")
    def _urls_live_as_long(self) -> KubernetesConfig:
        asked = self.deadline_s + math.ceil(LEASE_S)
        if asked > URL_S:
            raise ValueError(
                f"deadline_s must be at most {URL_S - math.ceil(LEASE_S)}, because the pods' URLs are valid for seven "
                f"days; got {self.deadline_s}"
            )
        return self
