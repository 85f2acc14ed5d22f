"""Adapts a compiled pipeline to its cluster: image, Secrets, data, nodes, resources.

The files in `compiled/` have the defaults of this module. `retarget` sets the values of the environment in such a text;
it compiles nothing and does not need the SDK's compiler.
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
from fl_engine.core.text import quantity

DEFAULT_IMAGE = f"ghcr.io/flexfleet/flexfleet:{__version__}"
SECRETS = {
    "FLEXFLEET_S3_SECRET": "flexfleet-s3",
    "FLEXFLEET_MLFLOW_SECRET": "flexfleet-mlflow",
    "FLEXFLEET_TUNE_SECRET": "flexfleet-tune",
    "FLEXFLEET_WEBHOOK_SECRET": "flexfleet-webhook",
}
"""The Secrets in the namespace that pipelines run in, by the variable that names another Secret."""
SIZES = {
    "TASK": {"CPU": "250m:2", "MEMORY": "1Gi:4Gi"},
    "TRAIN": {"CPU": "500m:8", "MEMORY": "1Gi:16Gi"},
}
"""request:limit; TRAIN: of tasks that train networks. `retarget` tells the two sorts of tasks apart by these values."""
DATA = "/data"
"""The folder of the data sets in tasks, if FLEXFLEET_DATA_CLAIM names a volume claim with them."""

LINKS = ("FLEXFLEET_KUBEFLOW_UI", "FLEXFLEET_MLFLOW_UI")
"""Addresses for links."""
VARIABLES = (
    *SECRETS,
    *LINKS,
    *(f"FLEXFLEET_{name}" for name in ("IMAGE", "DATA_CLAIM", "TASK_NODES", "TRAIN_GPU")),
    *(f"FLEXFLEET_{kind}_{what}" for kind, sizes in SIZES.items() for what in sizes),
)
ADAPTED = "# Adapted to its cluster by "
"""Begins the line that shows people by which variables a text was adapted."""


def names() -> list[str]:
    """The shipped pipelines."""
    folder = resources.files("flexfleet.kubeflow").joinpath("compiled")
    return sorted(each.name.removesuffix(".yaml") for each in folder.iterdir() if each.name.endswith(".yaml"))


def shipped(name: str) -> str:
    """The compiled pipeline `name`, with the defaults."""
    return resources.files("flexfleet.kubeflow").joinpath("compiled").joinpath(f"{name}.yaml").read_text("utf-8")


def documents(text: str) -> list[Any]:
    """What a compiled pipeline holds: its specification, and what of it only Kubernetes knows. Read with libyaml where
    PyYAML has it, which takes a tenth of the time."""
    return list(yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def retarget(text: str, environment: Mapping[str, str]) -> str:
    """Return the pipeline for the cluster that `environment` (FLEXFLEET_IMAGE, ...) describes, the same text if
    `environment` sets nothing. `text` has the defaults. Raises ConfigError for a malformed value."""
    asked = {name: environment[name] for name in VARIABLES if environment.get(name)}
    spec, platform = documents(text)
    named = {default: environment.get(variable) or default for variable, default in SECRETS.items()}
    nodes = _pairs(environment.get("FLEXFLEET_TASK_NODES", ""))
    claim = environment.get("FLEXFLEET_DATA_CLAIM")
    links = {name: environment[name] for name in LINKS if environment.get(name)}
    tasks = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    for key, executor in spec["deploymentSpec"]["executors"].items():
        if "container" not in executor:
            continue
        container, settings = executor["container"], tasks[key]
        image = container["image"] = environment.get("FLEXFLEET_IMAGE") or container["image"]
        variables = {each["name"]: each["value"] for each in container["env"]} | {"FLEXFLEET_IMAGE": image}
        variables |= links
        variables |= {"FLEXFLEET_DATA": DATA} if claim else {}
        container["env"] = [{"name": name, "value": value} for name, value in variables.items()]
        container["resources"] = _resources(container["resources"], environment)
        for secret in settings.get("secretAsEnv", ()):
            secret["secretName"] = named.get(secret["secretName"], secret["secretName"])
            secret["secretNameParameter"] = _constant(secret["secretName"])
        if claim:
            mount = {"constant": claim, "mountPath": DATA, "pvcNameParameter": _constant(claim)}
            settings["pvcMount"] = [mount]
        if nodes:
            settings["nodeSelector"] = {"labels": dict(nodes)}
    told = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    if asked:
        told += f"{ADAPTED}{json.dumps(asked, sort_keys=True)}\n"
    return told + yaml.safe_dump_all([spec, platform], sort_keys=True, allow_unicode=True)


def _constant(value: str) -> dict[str, Any]:
    return {"runtimeValue": {"constant": value}}


def _pairs(text: str) -> dict[str, str]:
    """`label=value,label=value`."""
    pairs = {}
    for pair in filter(str.strip, text.split(",")):
        label, sign, value = pair.partition("=")
        if not sign or not label.strip():
            raise ConfigError(f"FLEXFLEET_TASK_NODES: label=value,... is expected, got {text!r}")
        pairs[label.strip()] = value.strip()
    return pairs


def _resources(compiled: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """The resources for a task that was compiled with these values of SIZES; other values stay. Kubeflow has each
    amount twice: as a number (CPUs, or 10^9 bytes) for old back ends, and in Kubernetes' notation."""
    limit = f":{compiled['resourceMemoryLimit']}"
    kind = next((kind for kind, sizes in SIZES.items() if sizes["MEMORY"].endswith(limit)), None)
    if kind is None:
        return dict(compiled)
    resources = dict[str, Any]()
    for what, unit in (("cpu", 1), ("memory", 10**9)):
        variable = f"FLEXFLEET_{kind}_{what.upper()}"
        asked = environment.get(variable) or SIZES[kind][what.upper()]
        least, _, most = (amount.strip() for amount in asked.partition(":"))
        for bound, amount in (("Request", least), ("Limit", most or least)):
            resources[f"{what}{bound}"] = found = _amount(amount, variable) / unit
            if bound == "Limit" and not found:
                raise ConfigError(f"{variable}: a limit above 0 is expected, got {amount!r}")
            resources[f"resource{what.capitalize()}{bound}"] = amount
        if resources[f"{what}Request"] > resources[f"{what}Limit"]:
            raise ConfigError(f"{variable}: request:limit with a request up to the limit is expected, got {asked!r}")
    if kind == "TRAIN" and (accelerator := environment.get("FLEXFLEET_TRAIN_GPU")):
        what, _, count = (part.strip() for part in accelerator.partition("="))
        if "/" not in what or not re.fullmatch("[1-9][0-9]*|", count):
            raise ConfigError(f"FLEXFLEET_TRAIN_GPU: kind=number is expected (nvidia.com/gpu=1), got {accelerator!r}")
        resources["accelerator"] = {
            "count": count or "1", "resourceCount": count or "1", "resourceType": what, "type": what
        }  # fmt: skip
    return resources


def _amount(text: str, variable: str) -> float:
    try:
        return float(quantity(text))
    except ValueError as error:
        raise ConfigError(f"{variable}: {error}") from None
