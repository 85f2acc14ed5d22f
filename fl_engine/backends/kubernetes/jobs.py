"""A round's Jobs: which clients share one, and its manifest, filled into the template. Pure."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from fl_engine.backends.kubernetes.settings import KubernetesConfig, NodePool
from fl_engine.core.errors import ConfigError, did_you_mean
from fl_engine.core.plain import read_yaml
from fl_engine.core.types import Device, WorkOrder
from fl_engine.exchange.assignment import COMMON

log = logging.getLogger("flexfleet")

Resource = dict[str, Any]

CLIENT = "client"
"""The container of a pod that is the client; webhooks may put others beside it, as a service mesh does."""
TEMPLATE = Path(__file__).with_name("client-job.yaml")
RUN, ROUND, TIER = "flexfleet.io/run", "flexfleet.io/round", "flexfleet.io/tier"
CLIENTS, ATTEMPT, SETTINGS = "flexfleet.io/clients", "flexfleet.io/attempt", "flexfleet.io/settings"
SITE = "flexfleet.io/site"
"""Annotation: the checksum of what the pods are told of the run (`Assignment.site`)."""
LIFETIME, PLACE = "flexfleet.io/lifetime", "flexfleet.io/place"
"""Of Jobs whose pods stay for the run: a label, and an annotation with the tier or the node of their clients."""
FAILURES = 100
"""Of an index whose pods stay, after which no other pod comes in their stead: without a coordinator that makes the Job
anew, or takes an order back that kills them, they would start and fail for ever."""
SECRET_BYTES = 3 * 2**18
"""The most bytes that a Job's pods can be told: a Secret holds 1 MiB, and base64 makes four bytes of three."""


@dataclass(frozen=True)
class Group:
    """A Job to be: the clients of each of its pods, all of one tier."""

    tier: str
    pods: tuple[tuple[int, ...], ...]
    part: int
    """Numbers a tier's Jobs, where it needs more than one."""
    host: str | None = None


def groups(orders: Sequence[WorkOrder], fleet: Sequence[Device], options: KubernetesConfig) -> list[Group]:
    """Clients in order of their numbers, `clients_per_pod` to a pod; with placement=device a Job for each."""
    tiers: dict[str, list[int]] = {}
    for client in sorted(o.client for o in orders):
        tiers.setdefault(fleet[client].tier, []).append(client)
    found = []
    for tier, clients in tiers.items():
        if options.placement == "device":
            hosts = ((client, options.hostname.format(client=client)) for client in clients)
            found += [Group(tier, ((client,),), client, host) for client, host in hosts]
            continue
        n = options.clients_per_pod
        found.append(Group(tier, tuple(tuple(clients[i : i + n]) for i in range(0, len(clients), n)), 0))
    return found


def parts(group: Group, told: Sequence[str], common: str) -> list[tuple[Group, Sequence[str]]]:
    """The group as Jobs whose Secrets hold what their pods are told, each its own and all `common`. Raises ConfigError
    where one pod is told too much for any."""
    sizes, cuts, held = [len(text.encode()) for text in told], [0], 0
    for i, size in enumerate(sizes):
        if size + len(common) > SECRET_BYTES:
            raise ConfigError(
                f"what a pod of {len(group.pods[i])} clients is told takes {size + len(common):,} bytes, and a Secret "
                f"holds {SECRET_BYTES:,}: set kubernetes.clients_per_pod lower"
            )
        if held + size + len(common) > SECRET_BYTES:
            cuts.append(i)
            held = 0
        held += size
    if len(cuts) == 1:
        return [(group, told)]
    ends = zip(cuts, [*cuts[1:], len(told)], strict=True)
    return [(replace(group, pods=group.pods[a:b], part=part), told[a:b]) for part, (a, b) in enumerate(ends)]


def shares(sizes: Sequence[int], most: int | None) -> list[int]:
    """How many pods each of several Jobs of these sizes runs at a time: together at most `most` (None: all), shared
    in proportion to size, at least one for each Job."""
    if most is None or most >= sum(sizes):
        return list(sizes)
    found = [1] * len(sizes)
    for _ in range(most - len(sizes)):
        found[max(range(len(sizes)), key=lambda i: sizes[i] / found[i])] += 1
    return found


def run_label(run_id: str, store_uri: str) -> str:
    """At most 24 characters that a label and a name can hold, different for runs of equal name in other stores."""
    plain = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")[:17].strip("-")
    return f"{plain or 'run'}-{hashlib.sha256(f'{store_uri}/{run_id}'.encode()).hexdigest()[:6]}"


def job_name(run: str, round: int | str | None, group: Group, attempt: int) -> str:
    """At most 57 characters: a pod's name adds its index and five more. Different for different tiers. `round` as
    `RoundPlan.label` has it; None: the Job lasts for the run."""
    tier = re.sub(r"[^a-z0-9]+", "-", group.tier.lower()).strip("-")[:8].strip("-")
    if tier != group.tier or "-" in tier:  # a part's number follows after one
        tier += hashlib.sha256(group.tier.encode()).hexdigest()[:5]
    part = f"-{group.part}" if group.part or group.host else ""
    return f"{run}{'' if round is None else f'-r{round}'}-{tier}{part}-a{attempt}"


def template(path: str | None) -> Resource:
    """Raises ConfigError where the file is missing or holds no Job with a container `client` that can be filled in."""
    file = Path(path) if path else TEMPLATE
    try:
        found: Resource = read_yaml(file.read_text("utf-8"))
        names = [c["name"] for c in found["spec"]["template"]["spec"]["containers"]]
        if found["kind"] != "Job" or CLIENT not in names:
            raise ConfigError(f"{file}: a Job with a container `client` is expected, got {found['kind']} with {names}")
        wanted(job(found, KubernetesConfig(data="host:/"), "run", 0, Group("tier", ((0,),), 0), 0, {}, "/data"))
    except OSError as error:
        raise ConfigError(f"the client Job's template {file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, TypeError, KeyError, AttributeError, ValueError, StopIteration, RecursionError) as error:
        raise ConfigError(f"{file} is no Job of clients: {type(error).__name__} {error}") from error
    return found


def check(options: KubernetesConfig, tiers: Sequence[str]) -> None:
    """Raises ConfigError for a template that is none, and for a pool whose tier seems to be misspelt; warns of one that
    none of the fleet's `tiers` has, as where the rows of a comparison have other fleets."""
    template(options.template)
    for name in sorted(options.pools.keys() - set(tiers)):
        said = f"kubernetes.pools: the fleet has no tier {name!r}"
        if hint := did_you_mean(name, set(tiers) - options.pools.keys()):
            raise ConfigError(said + hint)
        log.warning("%s (its tiers: %s)", said, ", ".join(sorted(tiers)))


WHEN = {"quorum", "attempts", "parallelism", "deadline_s", "pending_s", "poll_s", "lease_s"}
"""Settings that say how long to wait and for how many pods, and not what a pod is."""


def settings_sum(of: Resource, options: KubernetesConfig) -> str:
    """A checksum of all that decides what a pod is: the template and the settings."""
    said = json.dumps([of, options.model_dump(mode="json", exclude=WHEN)], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def labels(run: str, round: int | str | None, tier: str) -> dict[str, str]:
    of = {LIFETIME: "run"} if round is None else {ROUND: str(round)}
    return {RUN: run, **of, TIER: re.sub(r"[^A-Za-z0-9._-]+", "-", tier)[:63].strip("-._")}


def job(
    of: Resource,
    options: KubernetesConfig,
    run: str,
    round: int | str | None,
    group: Group,
    attempt: int,
    owner: Resource,
    data_folder: str,
    memory: str | None = None,
    site: str = "",
) -> Resource:
    """The manifest. Its Secret has its name. `round` None: its pods stay for the whole run (`staying`). `memory`: of a
    pod; None: what its node pool says. `site`: see SITE; empty for pods that stay, which are told by letter."""
    out = copy.deepcopy(of)
    name, own = job_name(run, round, group, attempt), labels(run, round, group.tier)
    pool = options.pools.get(group.tier, NodePool())
    said = {CLIENTS: json.dumps(group.pods), ATTEMPT: str(attempt), SETTINGS: settings_sum(of, options), SITE: site}
    out["metadata"] |= {
        "name": name,
        "namespace": options.namespace,
        "labels": _with(out["metadata"].get("labels"), own),
        "annotations": _with(out["metadata"].get("annotations"), said),
        "ownerReferences": [owner],
    }
    spec = out["spec"]
    spec |= {
        "completions": len(group.pods),
        "parallelism": len(group.pods),
        "activeDeadlineSeconds": options.deadline_s,
    }
    if round is None:
        staying(out, options, group)
    pod = spec["template"]
    meta = pod.get("metadata") or {}
    pod["metadata"] = {**meta, "labels": _with(meta.get("labels"), own)}
    _place(pod["spec"], pool, group.host)
    container = next(c for c in pod["spec"]["containers"] if c["name"] == CLIENT)
    memory = memory or pool.memory
    container["image"] = pool.image or options.image
    resources = container.get("resources") or {}
    container["resources"] = {
        **resources,
        "requests": _with(resources.get("requests"), {"cpu": pool.cpu, "memory": memory}),
        "limits": _with(resources.get("limits"), {"memory": memory}),
    }
    secret = next(v for v in pod["spec"]["volumes"] if v["name"] == "assignment")
    secret["secret"]["secretName"] = name
    if not any(mount.get("subPath") == COMMON for mount in container["volumeMounts"]):
        raise ConfigError(
            f"the Job's template does not mount {COMMON} of the volume `assignment` beside the assignment: see "
            "fl_engine/backends/kubernetes/client-job.yaml"
        )
    if options.data is not None:
        pod["spec"]["volumes"].append({"name": "data", **_data_volume(options.data)})
        container["volumeMounts"].append({"name": "data", "mountPath": data_folder, "readOnly": True})
        container["env"].append({"name": "FLEXFLEET_DATA", "value": data_folder})
    return out


def _with(of: Resource | None, own: Resource) -> Resource:
    """What the template has, and our own, which counts where both name a key."""
    return {**(of or {}), **own}


def staying(out: Resource, options: KubernetesConfig, group: Group) -> None:
    """Changes a Job so that its pods wait for orders as long as the run lasts: no deadline ends them, and hardly a
    number of failures ends an index, for it is orders that fail."""
    del out["spec"]["activeDeadlineSeconds"]
    out["spec"]["backoffLimitPerIndex"] = FAILURES
    out["metadata"]["annotations"][PLACE] = group.host or group.tier
    container = next(c for c in out["spec"]["template"]["spec"]["containers"] if c["name"] == CLIENT)
    own = ["--stay", f"--silence={options.silence_s:g}", f"--recycle={options.recycle}"]
    container["args"] = [*container.get("args", []), *own]


def _place(pod: Resource, pool: NodePool, host: str | None) -> None:
    where = {
        "kubernetes.io/arch": pool.arch,
        "flexfleet.io/device-type": pool.device_type,
        "kubernetes.io/hostname": host,
        **pool.selector,
    }
    selector = {key: value for key, value in where.items() if value is not None}
    if selector:
        pod["nodeSelector"] = _with(pod.get("nodeSelector"), selector)
    if pool.taint:
        toleration = {"key": pool.taint, "operator": "Exists", "effect": "NoSchedule"}
        pod["tolerations"] = [*pod.get("tolerations", []), toleration]
    if pool.runtime_class:
        pod["runtimeClassName"] = pool.runtime_class


def _data_volume(data: str) -> Resource:
    kind, _, what = data.partition(":")
    if kind == "pvc":
        return {"persistentVolumeClaim": {"claimName": what, "readOnly": True}}
    return {"hostPath": {"path": what, "type": "Directory"}}


def secret(job: Resource, told: Sequence[str], common: str) -> Resource:
    """What the pods of a Job that is there are told, by index, and what all of them are. It goes with the Job; the pods
    start when it is there."""
    meta = {key: job["metadata"][key] for key in ("name", "namespace", "labels")}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {**meta, "ownerReferences": [reference(job)]},
        "type": "Opaque",
        "stringData": {str(index): text for index, text in enumerate(told)} | {COMMON: common},
    }


def pods_of(job: Resource) -> list[list[int]]:
    """The clients of each index of a Job that is there already."""
    found: list[list[int]] = json.loads(job["metadata"]["annotations"][CLIENTS])
    return found


def attempt_of(job: Resource) -> int:
    return int(job["metadata"]["annotations"][ATTEMPT])


def reference(job: Resource) -> Resource:
    """To a Job that is there, for what goes with it."""
    meta = job["metadata"]
    return {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"]}


def wanted(job: Resource) -> str:
    """The resources that the Job's pods ask a node for."""
    pod = job["spec"]["template"]["spec"]
    container = next(c for c in pod["containers"] if c["name"] == CLIENT)
    requests, limits = container["resources"]["requests"], container["resources"]["limits"]
    of_limits = {name: amount for name, amount in limits.items() if name not in requests}  # Kubernetes requests as much
    asked = [f"{name} {amount}" for name, amount in (requests | of_limits).items()]
    asked += [f"{label}={value}" for label, value in pod.get("nodeSelector", {}).items()]
    tolerated = [t.get("key", "every taint") for t in pod.get("tolerations", []) if t.get("effect") != "NoExecute"]
    asked += [f"tolerating {key}" for key in tolerated]
    return ", ".join(asked)
