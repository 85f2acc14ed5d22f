"""The configuration sections `agents` and `kubernetes`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from fl_engine.core.fields import Count, Fraction, Moves, Positive, Section, ServerAddress, UserPath
from fl_engine.core.text import quantity

URL_S = 604_800
"""Maximum validity of a URL in seconds (seven days, AWS Signature Version 4)."""
LONGEST_LEASE_S = 3600


class AgentsConfig(Section):
    """For run.backend=agents: enrolled devices execute the clients' assignments (docs/guides/agents.md)."""

    lease_s: Annotated[Positive, Field(le=LONGEST_LEASE_S)] = 60.0
    """Seconds without a heartbeat after which a lease ends. A device sends six heartbeats in this time."""
    deadline_s: Annotated[Count, Field(le=URL_S - LONGEST_LEASE_S)] = 3600
    """Seconds after which an assignment without a result is leased to another device."""
    attempts: Count = 3
    """Number of failed attempts on different devices after which a client counts as failed."""
    wait_s: Positive = 600.0
    """Seconds without a working device after which the run stops. The run can be resumed."""
    endpoint: ServerAddress | None = None
    """Address at which devices reach the S3 server, if it differs from AWS_ENDPOINT_URL."""
    observe: Annotated[Literal["simulated", "cgroup"], Moves.RESULT] = "simulated"
    """cgroup: prune the model to the device's free memory (docs/guides/agents.md). simulated: as in `kubernetes`."""


LEASE_S = 60
"""Seconds without a heartbeat after which a pod's assignment is leased to another pod."""
NAME = "[a-z0-9]([a-z0-9.-]*[a-z0-9])?"


def _cpus(value: str) -> str:
    if not quantity(value):
        raise ValueError(f"must be greater than 0, for example 250m or 2; got {value!r}")
    return value


def _bytes(value: str) -> str:
    if quantity(value) < 1:
        raise ValueError(f"must be at least one byte, for example 512Mi or 1Gi; got {value!r}")
    return value


class NodePool(Section):
    """Resources and nodes for the pods of a device tier. Tiers with equal settings use the same pods."""

    cpu: Annotated[str, AfterValidator(_cpus)] = "1"
    memory: Annotated[str, AfterValidator(_bytes)] = "1Gi"
    """Memory request and limit as a Kubernetes quantity."""
    arch: Literal["amd64", "arm64"] | None = None
    """Required value of the node label kubernetes.io/arch; null: any."""
    device_type: str | None = None
    """Required value of the node label flexfleet.io/device-type, e.g. rpi4, rpi5, jetson-nano."""
    selector: dict[str, str] = Field(default={})
    """Further labels that the nodes must have."""
    taint: str | None = None
    """Key of a NoSchedule taint that the pods tolerate, e.g. flexfleet.io/edge."""
    runtime_class: str | None = None
    torch_device: str = "cpu"
    """Torch device of the pods. Set cuda for pods with a GPU. A GPU trains one client at a time."""
    image: str | None = None
    """Image for these pods, e.g. with a PyTorch build for GPUs; null: kubernetes.image."""


class KubernetesConfig(Section):
    """For run.backend=kubernetes: pods of Indexed Jobs execute the clients' assignments. The pods run in the cluster
    that KUBECONFIG specifies, or in the cluster of this process if KUBECONFIG is not set."""

    namespace: Annotated[str, Field(pattern="^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")] = "flexfleet-clients"
    """Namespace for the Jobs."""
    image: str | None = None
    """Image for the pods; null: the value of FLEXFLEET_IMAGE, which the pipelines set automatically."""
    template: UserPath | None = None
    """YAML file with the template of the Jobs; null: fl_engine/remote/kubernetes/worker-job.yaml."""
    pools: dict[str, NodePool] = Field(default={})
    """Pod settings for each device tier. A tier without an entry gets the defaults. Another file or --set changes only
    its own entries."""
    placement: Literal["pool", "device"] = "pool"
    """device: each client's Job runs only on the node with the client's data."""
    hostname: Annotated[str, Field(pattern=r"^[^{}]*\{client\}[^{}]*$")] = "device-{client}"
    """Name of a client's node for placement=device."""
    lifetime: Literal["round", "run"] = "run"
    """run: pods run for the whole run. round: each round starts its own pods."""
    clients_per_pod: Count = 1
    """Number of clients that a pod trains together, at most 100."""
    data: Annotated[str, Field(pattern=f"^(pvc:{NAME}|host:/.*)$")] | None = None
    """Location of the data files: pvc:<claim> or host:/<folder on the node>; null: in the image."""
    endpoint: ServerAddress | None = None
    """Address at which pods reach the S3 server, if it differs from AWS_ENDPOINT_URL."""
    observe: Annotated[Literal["simulated", "cgroup"], Moves.RESULT] = "simulated"
    """cgroup: a client prunes its model to the free part of its pod's memory limit (docs/guides/kubernetes/devices.md).
    simulated: free memory is computed from `fleet` and the seed, so results are equal on every machine."""
    quorum: Annotated[Fraction, Moves.ANSWERS] = 1.0
    """Minimum fraction of the required results in a round. With fewer results, the run stops."""
    attempts: Count = 2
    """Number of failed attempts on pods after which a client counts as failed. Lost nodes and the first three evictions
    of a pod do not count as failed attempts."""
    parallelism: Count | None = None
    """Maximum number of concurrent pods; null: the number of assignments in a round."""
    deadline_s: Annotated[Count, Field(le=URL_S - LEASE_S)] = 3600
    """Seconds after which an assignment without a result is leased to another pod."""
