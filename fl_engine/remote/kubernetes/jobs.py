"""Group a run's pods into classes with equal settings, and create the manifests of their Jobs from the template.

The pods of a *class* have the same settings: image, cpu, memory, selector, taint, runtime class, torch device. Device
tiers with the same settings share a class, so by default a run has one class. With placement=device each client has its
own class, which is bound to the client's node.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from fl_engine.core.errors import ConfigError, did_you_mean
from fl_engine.core.text import object_names, quantity, read_yaml
from fl_engine.core.types import Device
from fl_engine.remote.kubernetes.cluster import Resource
from fl_engine.remote.settings import KubernetesConfig, NodePool

CLIENT = "client"
"""Name of the worker's container. A webhook may add other containers, for example for a service mesh."""
TEMPLATE = Path(__file__).with_name("worker-job.yaml")
DATA_FOLDER = "/data"
RUN, ROUND = "flexfleet.io/run", "flexfleet.io/round"
"""Names of labels. Jobs have the label ROUND only if `lifetime` is `round`."""
CLASS, NUMBER, SETTINGS = "flexfleet.io/class", "flexfleet.io/number", "flexfleet.io/settings"
"""Names of annotations."""
SECRET_BYTES = 3 * 2**18
"""Maximum total size of a Job's invitations in bytes, because a Secret can store 1 MiB in base64."""
WHEN = {"quorum", "attempts", "parallelism", "deadline_s", "lifetime"}
"""Options that do not affect the pods."""


@dataclass(frozen=True)
class PodClass:
    name: str
    pool: NodePool
    host: str | None = None

    def includes(self, other: PodClass, options: KubernetesConfig) -> bool:
        """Return whether pods of this class may execute assignments of `other`. If `other` is a different class, it
        must not be bound to nodes and must not need more CPU or memory, and all other settings must be the same."""
        if self == other:
            return True
        mine, its = self.pool, other.pool
        bound = self.host, other.host, its.arch, its.device_type, its.taint, its.runtime_class
        if any(bound) or its.selector or options.observe == "cgroup":
            return False
        same = (mine.image, mine.torch_device, mine.runtime_class) == (its.image, its.torch_device, its.runtime_class)
        return same and quantity(mine.cpu) >= quantity(its.cpu) and quantity(mine.memory) >= quantity(its.memory)


def classes(fleet: Sequence[Device], options: KubernetesConfig) -> Mapping[int, PodClass]:
    """Map each client to its pod class. The name of a class is the hostname of its node, or lists its tiers."""
    pools = {device.tier: options.pools.get(device.tier, NodePool()) for device in fleet}
    if options.placement == "device":
        hosts = {device: options.hostname.format(client=device.client) for device in fleet}
        return {device.client: PodClass(host, pools[device.tier], host) for device, host in hosts.items()}
    names = {tier: "+".join(t for t, other in pools.items() if other == pool) for tier, pool in pools.items()}
    return {device.client: PodClass(names[device.tier], pools[device.tier]) for device in fleet}


def shares(sizes: Sequence[int], most: int | None) -> list[int]:
    """Return the number of pods for each class, in proportion to `sizes`. Each class has at least one pod, even if the
    total then exceeds the limit `most`. If `most` is None, return `sizes`."""
    if most is None or most >= sum(sizes):
        return list(sizes)
    found = [1] * len(sizes)
    for _ in range(most - len(sizes)):
        found[max(range(len(sizes)), key=lambda i: sizes[i] / found[i])] += 1
    return found


def run_label(run_id: str, store_uri: str) -> str:
    """Return a label of at most 24 characters that identifies the run by its name and by the address of its store."""
    plain = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")[:17].strip("-")
    return f"{plain or 'run'}-{hashlib.sha256(f'{store_uri}/{run_id}'.encode()).hexdigest()[:6]}"


def job_name(run: str, round: str | None, of: PodClass, number: int) -> str:
    """Return a Job name of at most 57 characters. Kubernetes appends the index and 5 characters to name a pod."""
    plain = re.sub(r"[^a-z0-9]+", "-", of.name.lower()).strip("-")[:8].strip("-")
    if plain != of.name:
        plain += f"-{hashlib.sha256(of.name.encode()).hexdigest()[:5]}"
    return f"{run}{'' if round is None else f'-r{round}'}-{plain}-{number}"


def template(path: str | None) -> Resource:
    """Read the Jobs' template (default: `TEMPLATE`), and add the platform's settings. Raises ConfigError."""
    file = Path(path) if path else TEMPLATE
    try:
        found: Resource = read_yaml(file.read_text("utf-8"))
        if found["kind"] != "Job":
            raise ConfigError(f"kubernetes.template {file} must describe a Job, got {found['kind']}")
        job(found, KubernetesConfig(data="host:/"), "run", None, PodClass("weak", NodePool()), 0, 1, {})
    except (OSError, yaml.YAMLError, TypeError, LookupError, AttributeError, ValueError, StopIteration) as error:
        needs = "a Job with a container `client` and a volume `invitation`"
        text = f"kubernetes.template {file} must be {needs}: {type(error).__name__} {error}"
        raise ConfigError(text, path="kubernetes.template") from error
    _add_platform(found["spec"]["template"]["spec"], os.environ)
    return found


def _add_platform(pod: Resource, environment: Mapping[str, str]) -> None:
    """Add the settings that `flexfleet.kubeflow.retarget` passes to the coordinator's task."""
    if pull_secrets := [{"name": name} for name in object_names("FLEXFLEET_PULL_SECRETS", environment)]:
        pod["imagePullSecrets"] = [*pod.get("imagePullSecrets", []), *pull_secrets]
    for name in object_names("FLEXFLEET_PRIORITY_CLASS", environment, most=1):
        pod["priorityClassName"] = name
    if log_format := environment.get("FLEXFLEET_LOG_FORMAT"):
        container = next(c for c in pod["containers"] if c["name"] == CLIENT)
        container["env"].append({"name": "FLEXFLEET_LOG_FORMAT", "value": log_format})


def check(options: KubernetesConfig, tiers: Sequence[str]) -> None:
    """Raise ConfigError if the template is invalid, or if `kubernetes.pools` contains a misspelt tier. Other unknown
    tiers are ignored, because the runs of a comparison may have different fleets."""
    template(options.template)
    for name in sorted(options.pools.keys() - set(tiers)):
        if hint := did_you_mean(name, set(tiers) - options.pools.keys()):
            raise ConfigError.at(f"kubernetes.pools: {name!r} is not a tier of the fleet{hint}")


def settings_sum(of: Resource, options: KubernetesConfig) -> str:
    """Return a checksum of the template and all options that affect the pods."""
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
) -> Resource:
    """Return the manifest of a Job. The Job and its Secret have the same name. `round` is the round's label
    (`RoundPlan.label`), or None if the pods run for the whole run."""
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
    memory = pods.pool.memory
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
        kind, _, what = options.data.partition(":")
        claim, folder = {"claimName": what, "readOnly": True}, {"path": what, "type": "Directory"}
        source = {"persistentVolumeClaim": claim} if kind == "pvc" else {"hostPath": folder}
        pod["spec"]["volumes"].append({"name": "data", **source})
        container["volumeMounts"].append({"name": "data", "mountPath": DATA_FOLDER, "readOnly": True})
        container["env"].append({"name": "FLEXFLEET_DATA", "value": DATA_FOLDER})
    return out


def _with(of: Resource | None, own: Resource) -> Resource:
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


def secret(job: Resource, invitations: Iterable[str]) -> Resource:
    """Return the Secret that maps each index of a Job to the worker's invitation. The Job owns the Secret."""
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
