"""Adapt a compiled pipeline to a cluster, by changing its image, Secrets, data, nodes and resources.

The compiled files in `compiled/` contain the defaults that this module defines. `retarget` replaces the defaults in a
compiled file with values from the environment, so the SDK's compiler is not needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

import yaml

from fl_engine import __version__
from fl_engine.core.errors import ConfigError
from fl_engine.core.text import object_names, quantity

DEFAULT_IMAGE = f"ghcr.io/flexfleet/flexfleet:{__version__}"
SECRETS = {
    "FLEXFLEET_S3_SECRET": "flexfleet-s3",
    "FLEXFLEET_MLFLOW_SECRET": "flexfleet-mlflow",
    "FLEXFLEET_TUNE_SECRET": "flexfleet-tune",
    "FLEXFLEET_WEBHOOK_SECRET": "flexfleet-webhook",
}
"""Map environment variables that name Secrets in the pipelines' namespace to the Secrets' default names."""
SIZES = {"TASK": {"CPU": "250m:2", "MEMORY": "1Gi:4Gi"}, "TRAIN": {"CPU": "500m:8", "MEMORY": "1Gi:16Gi"}}
"""Resources as `request:limit` for ordinary tasks and for tasks that train networks. `retarget` identifies both kinds
of tasks by these values."""
DATA = "/data"
"""Mount path of the data sets. FLEXFLEET_DATA_CLAIM names the volume claim that contains the data sets."""

PASSED = tuple(
    f"FLEXFLEET_{name}" for name in ("KUBEFLOW_UI", "MLFLOW_UI", "PULL_SECRETS", "PRIORITY_CLASS", "LOG_FORMAT")
)
"""Environment variables that the tasks also get: the addresses of web UIs, settings of the clients' pods, and the
format of log lines."""
VARIABLES = (
    *SECRETS,
    *PASSED,
    *(f"FLEXFLEET_{name}" for name in ("IMAGE", "DATA_CLAIM", "TASK_NODES", "TRAIN_GPU")),
    *(f"FLEXFLEET_{kind}_{what}" for kind, sizes in SIZES.items() for what in sizes),
)


def names() -> list[str]:
    """Return the names of the shipped pipelines."""
    folder = resources.files("flexfleet.kubeflow").joinpath("compiled")
    return sorted(each.name.removesuffix(".yaml") for each in folder.iterdir() if each.name.endswith(".yaml"))


def shipped(name: str) -> str:
    """Return the YAML of a shipped pipeline, which was compiled with the defaults."""
    return resources.files("flexfleet.kubeflow").joinpath("compiled").joinpath(f"{name}.yaml").read_text("utf-8")


def documents(text: str) -> list[Any]:
    """Parse a compiled pipeline, and return its two documents: the specification and the Kubernetes settings. The
    parser of libyaml is used if available, because it is ten times as fast."""
    return list(yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def retarget(text: str, environment: Mapping[str, str]) -> str:
    """Return a copy of the pipeline `text` in which values from `environment`, such as FLEXFLEET_IMAGE, replace
    defaults. The pipeline does not change if no variable is set. Raises ConfigError for a malformed value."""
    given = {name: environment[name] for name in VARIABLES if environment.get(name)}
    spec, platform = documents(text)
    named = {default: environment.get(variable) or default for variable, default in SECRETS.items()}
    nodes = _nodes(environment.get("FLEXFLEET_TASK_NODES", ""))
    pull_secrets = object_names("FLEXFLEET_PULL_SECRETS", environment)
    object_names("FLEXFLEET_PRIORITY_CLASS", environment, most=1)
    claim = environment.get("FLEXFLEET_DATA_CLAIM")
    passed = {name: value for name, value in given.items() if name in PASSED}
    tasks = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    for key, executor in spec["deploymentSpec"]["executors"].items():
        if "container" not in executor:
            continue
        container, settings = executor["container"], tasks[key]
        image = container["image"] = environment.get("FLEXFLEET_IMAGE") or container["image"]
        variables = {each["name"]: each["value"] for each in container["env"]} | {"FLEXFLEET_IMAGE": image}
        variables |= passed
        variables |= {"FLEXFLEET_DATA": DATA} if claim else {}
        container["env"] = [{"name": name, "value": value} for name, value in variables.items()]
        container["resources"] = _resources(container["resources"], environment)
        for secret in settings.get("secretAsEnv", ()):
            secret["secretName"] = named.get(secret["secretName"], secret["secretName"])
            secret["secretNameParameter"] = {"runtimeValue": {"constant": secret["secretName"]}}
        if claim:
            name = {"runtimeValue": {"constant": claim}}
            settings["pvcMount"] = [{"constant": claim, "mountPath": DATA, "pvcNameParameter": name}]
        if pull_secrets:
            settings["imagePullSecret"] = [
                {"secretName": name, "secretNameParameter": {"runtimeValue": {"constant": name}}}
                for name in pull_secrets
            ]
        if nodes:
            settings["nodeSelector"] = {"labels": dict(nodes)}
    comments = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    if given:
        comments += f"# Adapted to its cluster by {json.dumps(given, sort_keys=True)}\n"
    return comments + yaml.safe_dump_all([spec, platform], sort_keys=True, allow_unicode=True)


def _nodes(text: str) -> dict[str, str]:
    """Parse node labels: `label=value,label=value`."""
    pairs = [[part.strip() for part in pair.partition("=")] for pair in text.split(",") if pair.strip()]
    if not all(label and sign for label, sign, _ in pairs):
        raise ConfigError(f"FLEXFLEET_TASK_NODES must be a list of the form label=value,label=value, got {text!r}")
    return {label: value for label, _, value in pairs}


def _resources(compiled: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the requests and limits of a task. Resources are only replaced if `compiled` contains amounts from SIZES.

    Kubeflow stores each amount twice: in Kubernetes notation, and as a number of CPUs or GB for old back ends.
    """
    limit = f":{compiled['resourceMemoryLimit']}"
    kind = next((kind for kind, sizes in SIZES.items() if sizes["MEMORY"].endswith(limit)), None)
    if kind is None:
        return dict(compiled)
    resources = dict[str, Any]()
    for what, unit in (("cpu", 1), ("memory", 10**9)):
        variable = f"FLEXFLEET_{kind}_{what.upper()}"
        value = environment.get(variable) or SIZES[kind][what.upper()]
        request, _, limit = (amount.strip() for amount in value.partition(":"))
        amounts = {"Request": request, "Limit": limit or request}
        try:
            numbers = {bound: float(quantity(amount)) / unit for bound, amount in amounts.items()}
        except ValueError as error:
            raise ConfigError(f"{variable}: {error}") from None
        if not 0 <= numbers["Request"] <= numbers["Limit"] > 0:
            raise ConfigError(f"{variable} must be request:limit, with limit > 0 and request <= limit, got {value!r}")
        resources |= {f"{what}{bound}": number for bound, number in numbers.items()}
        resources |= {f"resource{what.capitalize()}{bound}": amount for bound, amount in amounts.items()}
    if kind == "TRAIN" and (accelerator := environment.get("FLEXFLEET_TRAIN_GPU")):
        name, _, count = (part.strip() for part in accelerator.partition("="))
        if "/" not in name or not re.fullmatch("[1-9][0-9]*|", count):
            raise ConfigError(f"FLEXFLEET_TRAIN_GPU must be a resource like nvidia.com/gpu=1, got {accelerator!r}")
        count = count or "1"
        resources["accelerator"] = {"count": count, "resourceCount": count, "resourceType": name, "type": name}
    return resources
