"""Check whether a cluster can run the pods of clients: namespace, rights, admission of a Job, nodes and image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fl_engine.core.errors import EnvironmentFailure
from fl_engine.core.text import quantity
from fl_engine.remote.kubernetes import jobs
from fl_engine.remote.kubernetes.cluster import Cluster, Resource
from fl_engine.remote.kubernetes.jobs import PodClass
from fl_engine.remote.kubernetes.objects import image_for
from fl_engine.remote.settings import KubernetesConfig, NodePool

RIGHTS = {
    "jobs": ("create", "delete", "list", "patch"),
    "pods": ("list",),
    "events": ("list",),
    "secrets": ("create", "delete", "get"),
    "configmaps": ("create", "delete", "get"),
}
"""Verbs that the coordinator needs for each kind of object, as in k8s/base/role.yaml."""
BLOCKING = ("NoSchedule", "NoExecute")
"""Effects of taints that keep pods away from a node."""


@dataclass(frozen=True)
class Survey:
    """What a cluster offers to a run."""

    nodes: dict[str, int] | None
    """Map each tier to the number of nodes that accept its pods; None if this user may not list nodes."""
    with_image: dict[str, int]
    """Map each image to the number of these nodes that have already pulled it."""

    def __str__(self) -> str:
        if self.nodes is None:
            return "rights and a trial Job are accepted. This user may not list nodes, so nodes are unchecked"
        nodes = ", ".join(f"{tier} {count}" for tier, count in self.nodes.items())
        images = ", ".join(f"{image} is on {count} of these nodes" for image, count in self.with_image.items())
        return f"rights and a trial Job are accepted. Nodes for each tier: {nodes}. The image {images}"


def survey(options: KubernetesConfig, tiers: Sequence[str]) -> Survey:
    """Check the cluster without creating objects.

    Raises:
        ConfigError: The image is not set, or the template is invalid.
        EnvironmentFailure: The cluster is unreachable, the namespace or a right is missing, the API refuses the Job,
            or a tier has no node.
    """
    cluster, image = Cluster(options.namespace, retry_s=0.0), image_for(options)
    options = options.model_copy(update={"image": image})
    _check_rights(cluster)
    pools = {tier: options.pools.get(tier, NodePool()) for tier in tiers}
    pods: dict[str, Resource] = {}
    for number, (tier, pool) in enumerate(pools.items()):
        body = jobs.job(jobs.template(options.template), options, "check", None, PodClass(tier, pool), number, 1, {})
        del body["metadata"]["ownerReferences"]
        cluster.create("jobs", body, dry_run=True)
        pods[tier] = body["spec"]["template"]["spec"]
    try:
        nodes = cluster.select("nodes", {})
    except EnvironmentFailure as error:
        if "HTTP 403" not in str(error):
            raise
        return Survey(None, {})
    fitting = {tier: [node for node in nodes if _accepts(node, pod)] for tier, pod in pods.items()}
    if empty := [tier for tier, found in fitting.items() if not found]:
        raise EnvironmentFailure(
            f"no node accepts pods of {', '.join(empty)}. A node must be ready and have the labels, cpu and memory of "
            f"kubernetes.pools, and only tolerated taints. The cluster has {len(nodes)} nodes"
        )
    images = dict.fromkeys(pool.image or image for pool in pools.values())
    together = {node["metadata"]["name"]: node for found in fitting.values() for node in found}.values()
    counts = {name: sum(_has_image(node, name) for node in together) for name in images}
    return Survey({tier: len(found) for tier, found in fitting.items()}, counts)


def _check_rights(cluster: Cluster) -> None:
    missing = []
    for kind, verbs in RIGHTS.items():
        for verb in verbs:
            group = "batch" if kind == "jobs" else ""
            asked = {"namespace": cluster.namespace, "verb": verb, "group": group, "resource": kind}
            review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
            found = cluster.create("reviews", review | {"spec": {"resourceAttributes": asked}})
            if not ((found or {}).get("status") or {}).get("allowed"):
                missing.append(f"{verb} {kind}")
    if missing:
        raise EnvironmentFailure(
            f"the namespace {cluster.namespace} does not allow this user to {', '.join(missing)}. Grant the rights of "
            "k8s/base/role.yaml"
        )


def _accepts(node: Resource, pod: Resource) -> bool:
    """Return whether the node is ready and may run the pod. The pods that run there now are ignored."""
    spec, status = node.get("spec") or {}, node.get("status") or {}
    labels = node["metadata"].get("labels") or {}
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions") or ())
    taints = [taint for taint in spec.get("taints") or () if taint["effect"] in BLOCKING]
    client = next(each for each in pod["containers"] if each["name"] == jobs.CLIENT)
    room = status.get("allocatable") or {}
    wanted = client["resources"]["requests"]
    return (
        ready
        and not spec.get("unschedulable")
        and (pod.get("nodeSelector") or {}).items() <= labels.items()
        and all(any(_tolerates(each, taint) for each in pod.get("tolerations") or ()) for taint in taints)
        and all(quantity(room[name]) >= quantity(size) for name, size in wanted.items() if name in room)
    )


def _tolerates(toleration: Resource, taint: Resource) -> bool:
    is_equal = toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", "")
    named = toleration.get("key") in (None, taint["key"])
    return named and is_equal and toleration.get("effect") in (None, taint["effect"])


def _has_image(node: Resource, image: str) -> bool:
    """Return whether the node lists the image. Nodes add the registry and the default tag to names."""
    name = image if "@" in image or ":" in image.rpartition("/")[2] else f"{image}:latest"
    names = [each for image in (node.get("status") or {}).get("images") or () for each in image.get("names") or ()]
    return any(each == name or each.endswith(f"/{name}") for each in names)
