"""The Jobs of a run's workers: classes of equal pods, and the manifests, filled into the template. Pure.

The pods of a *class* have equal resources and places: image, cpu, memory, selector, taint, runtime class, torch device.
Device tiers of one class share its pods, so by default a run has one class. With placement=device each client is a
class of its own, bound to its node.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fl_engine.core.errors import ConfigError, did_you_mean
from fl_engine.core.text import quantity, read_yaml
from fl_engine.core.types import Device
from fl_engine.remote.settings import KubernetesConfig, NodePool

log = logging.getLogger("flexfleet")

Resource = dict[str, Any]

CLIENT = "client"
"""The container of the worker. Webhooks may add other containers, as a service mesh does."""
TEMPLATE = Path(__file__).with_name("worker-job.yaml")
DATA_FOLDER = "/data"
RUN, ROUND = "flexfleet.io/run", "flexfleet.io/round"
"""Labels. Only Jobs with lifetime=round have the second."""
CLASS, NUMBER, SETTINGS = "flexfleet.io/class", "flexfleet.io/number", "flexfleet.io/settings"
"""Annotations."""
SECRET_BYTES = 3 * 2**18
"""The most bytes of a Job's invitations: a Secret holds 1 MiB in base64."""
WHEN = {"quorum", "attempts", "parallelism", "deadline_s", "lifetime"}
"""Settings that do not change a pod."""


@dataclass(frozen=True)
class PodClass:
    name: str
    pool: NodePool
    host: str | None = None

    def includes(self, other: PodClass, options: KubernetesConfig) -> bool:
        """Whether its pods may execute assignments of `other`: they are at least as large and otherwise equal, and
        `other` is not bound to nodes."""
        if self == other:
            return True
        mine, its = self.pool, other.pool
        bound = self.host, other.host, its.arch, its.device_type, its.taint, its.runtime_class
        if any(bound) or its.selector or options.observe == "cgroup" or "auto" in (mine.memory, its.memory):
            return False
        same = (mine.image, mine.torch_device, mine.runtime_class) == (its.image, its.torch_device, its.runtime_class)
        return same and quantity(mine.cpu) >= quantity(its.cpu) and quantity(mine.memory) >= quantity(its.memory)


def classes(fleet: Sequence[Device], options: KubernetesConfig) -> Mapping[int, PodClass]:
    """Map each client to its class, which is named after its tiers or its node."""
    if options.placement == "device":
        hosts = {device.client: options.hostname.format(client=device.client) for device in fleet}
        pools = {device.client: options.pools.get(device.tier, NodePool()) for device in fleet}
        return {client: PodClass(host, pools[client], host) for client, host in hosts.items()}
    tiers: dict[str, list[str]] = {}
    for tier in dict.fromkeys(device.tier for device in fleet):
        tiers.setdefault(options.pools.get(tier, NodePool()).model_dump_json(), []).append(tier)
    by_tier = {t: PodClass("+".join(ts), options.pools.get(t, NodePool())) for ts in tiers.values() for t in ts}
    return {device.client: by_tier[device.tier] for device in fleet}


def shares(sizes: Sequence[int], most: int | None) -> list[int]:
    """Return the number of pods of each class: in proportion to `sizes`, at least one each, and otherwise at most
    `most` together (None: no limit)."""
    if most is None or most >= sum(sizes):
        return list(sizes)
    found = [1] * len(sizes)
    for _ in range(most - len(sizes)):
        found[max(range(len(sizes)), key=lambda i: sizes[i] / found[i])] += 1
    return found


def run_label(run_id: str, store_uri: str) -> str:
    """Return at most 24 characters for labels and names, which differ for runs of equal name in other stores."""
    plain = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")[:17].strip("-")
    return f"{plain or 'run'}-{hashlib.sha256(f'{store_uri}/{run_id}'.encode()).hexdigest()[:6]}"


def job_name(run: str, round: str | None, of: PodClass, number: int) -> str:
    """Return at most 57 characters, which differ between classes. A pod's name adds its index and five characters."""
    plain = re.sub(r"[^a-z0-9]+", "-", of.name.lower()).strip("-")[:8].strip("-")
    if plain != of.name:
        plain += f"-{hashlib.sha256(of.name.encode()).hexdigest()[:5]}"
    return f"{run}{'' if round is None else f'-r{round}'}-{plain}-{number}"


def template(path: str | None) -> Resource:
    """Read the template of the Jobs; None: `TEMPLATE`. Raises ConfigError if it cannot be read or filled in."""
    file = Path(path) if path else TEMPLATE
    try:
        found: Resource = read_yaml(file.read_text("utf-8"))
        if found["kind"] != "Job":
            raise ConfigError(f"kubernetes.template {file} must be a Job, got {found['kind']}")
        job(found, KubernetesConfig(data="host:/"), "run", None, PodClass("weak", NodePool()), 0, 1, {})
    except OSError as error:
        raise ConfigError(f"kubernetes.template {file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, TypeError, KeyError, AttributeError, ValueError, StopIteration, RecursionError) as error:
        raise ConfigError(
            f"kubernetes.template {file} must be a Job with a container `client` and a volume `invitation`: "
            f"{type(error).__name__} {error}"
        ) from error
    return found


def check(options: KubernetesConfig, tiers: Sequence[str]) -> None:
    """Raise ConfigError for an invalid template and for a misspelt tier. Warn of another unknown tier, because the rows
    of a comparison may have other fleets."""
    template(options.template)
    for name in sorted(options.pools.keys() - set(tiers)):
        if hint := did_you_mean(name, set(tiers) - options.pools.keys()):
            raise ConfigError(f"kubernetes.pools: the fleet has no tier {name!r}{hint}")
        log.warning("kubernetes.pools: the fleet has no tier %r, only %s", name, ", ".join(sorted(tiers)))


def settings_sum(of: Resource, options: KubernetesConfig) -> str:
    """Return a checksum of the template and of all settings that change a pod."""
    content = json.dumps([of, options.model_dump(mode="json", exclude=WHEN)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def job(
    of: Resource,
    options: KubernetesConfig,
    run: str,
    round: str | None,
    pods: PodClass,
    number: int,
    size: int,
    owner: Resource,
    memory: str | None = None,
) -> Resource:
    """Return the manifest of a Job; its Secret has the same name. `round`: `RoundPlan.label`; None: its pods live for
    the run. `memory`: memory of a pod; None: that of its node pool."""
    out = copy.deepcopy(of)
    name, labels = job_name(run, round, pods, number), {RUN: run} | ({} if round is None else {ROUND: round})
    notes = {CLASS: pods.name, NUMBER: str(number), SETTINGS: settings_sum(of, options)}
    out["metadata"] |= {
        "name": name,
        "namespace": options.namespace,
        "labels": _with(out["metadata"].get("labels"), labels),
        "annotations": _with(out["metadata"].get("annotations"), notes),
        "ownerReferences": [owner],
    }
    out["spec"] |= {"completions": size, "parallelism": size}
    pod = out["spec"]["template"]
    meta = pod.get("metadata") or {}
    pod["metadata"] = {**meta, "labels": _with(meta.get("labels"), labels)}
    _place(pod["spec"], pods)
    container = next(c for c in pod["spec"]["containers"] if c["name"] == CLIENT)
    memory = memory or pods.pool.memory
    container["image"] = pods.pool.image or options.image
    resources = container.get("resources") or {}
    container["resources"] = {
        **resources,
        "requests": _with(resources.get("requests"), {"cpu": pods.pool.cpu, "memory": memory}),
        "limits": _with(resources.get("limits"), {"memory": memory}),
    }
    if round is not None:
        container["args"] = [*container.get("args", []), "--once"]
    secret = next(v for v in pod["spec"]["volumes"] if v["name"] == "invitation")
    secret["secret"]["secretName"] = name
    if options.data is not None:
        pod["spec"]["volumes"].append({"name": "data", **_data_volume(options.data)})
        container["volumeMounts"].append({"name": "data", "mountPath": DATA_FOLDER, "readOnly": True})
        container["env"].append({"name": "FLEXFLEET_DATA", "value": DATA_FOLDER})
    return out


def _with(of: Resource | None, own: Resource) -> Resource:
    """Merge the template's values with our own, which replace them."""
    return {**(of or {}), **own}


def _place(pod: Resource, of: PodClass) -> None:
    pool = of.pool
    where = {
        "kubernetes.io/arch": pool.arch,
        "flexfleet.io/device-type": pool.device_type,
        "kubernetes.io/hostname": of.host,
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


def secret(job: Resource, invitations: Iterable[str]) -> Resource:
    """Return the Secret with the invitations of a Job's pods by index. It is deleted with the Job."""
    meta = job["metadata"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"]}
    labels = {key: value for key, value in meta["labels"].items() if key in (RUN, ROUND)}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": meta["name"],
            "namespace": meta["namespace"],
            "labels": {"app.kubernetes.io/part-of": "flexfleet", **labels},
            "ownerReferences": [owner],
        },
        "type": "Opaque",
        "stringData": {str(index): text for index, text in enumerate(invitations)},
    }
