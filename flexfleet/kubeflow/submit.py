"""Start a pipeline on Kubeflow: upload a new version if the graph has changed, then create a run.

A version is named after its text, so the same code and image never create a second version.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_engine import __version__
from fl_engine.core.errors import ConfigError, Unreachable, did_you_mean, nearest
from fl_engine.core.text import need_plain
from fl_engine.storage.outage import waiting
from flexfleet.config import Config, Overrides
from flexfleet.config.form import (
    PARAMETERS,
    check_workers,
    comparison_from,
    config_from,
    object_of,
    overrides_of,
    parameters_of,
    run_name,
)
from flexfleet.config.form_fields import LISTED, STUDY, no_passwords
from flexfleet.kubeflow.client import api_of, connected, equal, link, pages, translated, without_links
from flexfleet.kubeflow.retarget import documents, names, retarget, shipped
from flexfleet.tracking.server import check_address

log = logging.getLogger("flexfleet")


@dataclass(frozen=True)
class Submitted:
    run_id: str
    url: str
    """Address of the run in the UI; empty if the UI's address is not known."""
    pipeline: str
    version: str
    uploaded: bool
    """True if the version was new."""
    key: str
    started: bool
    """False if an earlier start with the same key created the run."""


KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LOST_ANSWER_S = 5.0
"""Seconds for which a start is tried again if its answer is lost."""


def form(name: str) -> dict[str, Any]:
    """Return the parameters of a shipped pipeline, with their defaults. Raises ConfigError for an unknown pipeline."""
    return {name: about.get("defaultValue") for name, about in _fields(name).items()}


def _fields(name: str) -> dict[str, Any]:
    if name not in names():
        raise ConfigError(f"no pipeline is named {name!r}{did_you_mean(name, names())}: {', '.join(names())}")
    spec, *_ = documents(shipped(name))
    given: dict[str, Any] = spec["root"]["inputDefinitions"]["parameters"]
    return given


READ: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "STRING": ("a text", str),
    "NUMBER_INTEGER": ("a whole number", int),
    "NUMBER_DOUBLE": ("a number", float),
}
"""Map Kubeflow's name of a parameter's type to a name for people and a function that reads a value from text."""


def read(name: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """Read the values of a pipeline's parameters from text. Raises ConfigError for an unknown parameter, and for text
    that is not a value of the parameter's type."""
    fields, values = _fields(name), dict[str, Any]()
    for key, text in texts.items():
        if key not in fields:
            raise _unknown(name, key, fields)
        what, value = READ[fields[key]["parameterType"]]
        try:
            need_plain([text] if value is not str else [])
            values[key] = value(text)
            json.dumps(values[key], allow_nan=False)
        except ValueError:
            raise ConfigError(f"the parameter {key} of the pipeline {name} must be {what}, got {text!r}") from None
    return values


def _unknown(name: str, key: str, known: Collection[str]) -> ConfigError:
    return ConfigError(f"the pipeline {name} has no parameter {key!r}{nearest(key, known)}")


def given(name: str, config: Config, named: Collection[str]) -> dict[str, Any]:
    """Return the values of the pipeline's form, with `advanced`, that give this configuration in the first task.

    If the form has no field for a value, raises ConfigError if the user has `named` its parameter, otherwise warns.
    """
    asked, (parameters, advanced), plain = form(name), parameters_of(config), parameters_of(Config())[0]
    for key, path in PARAMETERS.items():
        if key in asked or parameters[key] == plain[key]:
            continue
        said = f"the pipeline {name} has no field for {path} = {parameters[key]!r}"
        if any(f"{path}.".startswith(f"{each}.") for each in named):
            raise ConfigError(
                f"{said}. Leave it out, or set one of the fields ({', '.join(sorted(asked))}) with --param"
            )
        log.warning("%s, which the configuration file sets", said)
    return {key: value for key, value in parameters.items() if key in asked} | {"advanced": advanced}


def listed(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters with names that the form's lists do not have, as those of the user's own classes, moved to
    `advanced`: Kubeflow refuses them as values of the fields. Raises ConfigError if `advanced` is not an object."""
    fields, moved = _fields(name), dict[str, Any]()
    for field, path in LISTED.items():
        names = fields.get(field, {}).get("literals")
        if names and parameters.get(field, names[0]) not in names:
            moved[path] = parameters[field]
    if not moved:
        return dict(parameters)
    rest = {field: value for field, value in parameters.items() if LISTED.get(field) not in moved}
    return rest | {"advanced": moved | dict(object_of(parameters.get("advanced", {})))}


def submit(
    name: str,
    parameters: Mapping[str, Any],
    *,
    host: str | None = None,
    namespace: str | None = None,
    experiment: str = "flexfleet",
    run_name: str | None = None,
    service_account: str | None = None,
    key: str | None = None,
) -> Submitted:
    """Start a run of the pipeline `name`.

    Args:
        name: A shipped pipeline: train, compare, tune or nightly.
        parameters: Values of its form.
        host: Address of Kubeflow Pipelines. None: the server that the SDK finds by KF_PIPELINES_ENDPOINT, in a pod, or
            by KUBECONFIG.
        namespace: Namespace of the profile, if Kubeflow has several users.
        experiment: Name of the experiment in Kubeflow, which is created if it is missing.
        run_name: Name of the run in Kubeflow; None: the pipeline and its version.
        service_account: Account of the tasks' pods; None: Kubeflow's default.
        key: Your own name of this start. A second start with the same key returns the run of the first. None: a new
            key.

    Raises:
        ConfigError: The pipeline or a parameter does not exist, the first task would refuse a value, or the key belongs
            to a start with other settings.
        EnvironmentFailure: The server refuses; Unreachable if it does not answer. The run may then have been started,
            and the error says how to find out.
    """
    text, version = checked(name, parameters)
    parameters = listed(name, parameters)
    if key is not None and not KEY.fullmatch(key):
        raise ConfigError(f"key must have at most 64 letters, digits, dots, dashes and underscores, got {key!r}")
    key = key or uuid.uuid4().hex[:16]
    marker = f"flexfleet submit --key {key},"
    description = f"{marker} settings {digest([name, version, dict(parameters), service_account])}"
    with connected(host) as client, without_links():
        pipeline_id, version_id, new = upload(client, name, version, text, namespace)
        experiment_id = client.create_experiment(experiment, namespace=namespace).experiment_id
        found = _find(client, experiment_id, marker)
        run = found or _start(
            client, marker, experiment_id=experiment_id, display_name=run_name or f"{name}-{version}",
            description=description, service_account=service_account,
            pipeline_version_reference={"pipeline_id": pipeline_id, "pipeline_version_id": version_id},
            runtime_config={"parameters": dict(parameters)},
        )  # fmt: skip
    if run.description != description:
        raise ConfigError(
            f"the key {key} belongs to another start: the run {run.run_id} has other parameters or another version of "
            "the pipeline. Choose another key"
        )
    return Submitted(run.run_id, link(host, "runs", run.run_id), name, version, new, key, found is None)


def upload(client: Any, name: str, version: str, text: str, namespace: str | None) -> tuple[str, str, bool]:
    """Return the ids of the pipeline and its version; whether the version had to be uploaded."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / f"{name}.yaml"
        path.write_text(text, encoding="utf-8")
        existing = pages(client.list_pipelines, "pipelines", filter=equal("display_name", name), namespace=namespace)
        found = [each for each in existing if each.display_name == name]
        pipeline = found[0] if found else client.upload_pipeline(str(path), name, namespace=namespace)
        existing = pages(client.list_pipeline_versions, "pipeline_versions", pipeline_id=pipeline.pipeline_id)
        known = [each for each in existing if each.display_name == version]
        made = known[0] if known else client.upload_pipeline_version(str(path), version, pipeline.pipeline_id)
    return pipeline.pipeline_id, made.pipeline_version_id, not known


def _find(client: Any, experiment_id: str, marker: str) -> Any:
    """Return the run whose description has this marker, or None."""
    asked = equal("description", marker, "IS_SUBSTRING")
    found = pages(client.list_runs, "runs", experiment_id=experiment_id, filter=asked)
    return next((run for run in found if marker in (run.description or "")), None)


def _start(client: Any, marker: str, **fields: Any) -> Any:
    """Create a run. If the answer is lost, look for the run before the next try, so that no second one is created.
    (`kfp.Client.run_pipeline` takes no description.)"""
    import kfp_server_api

    api, tries = kfp_server_api.RunServiceApi(api_of(client)), 0

    def create() -> Any:
        nonlocal tries
        tries += 1
        with translated():
            before = _find(client, fields["experiment_id"], marker) if tries > 1 else None
            run = before or api.run_service_create_run(run=kfp_server_api.V2beta1Run(**fields))
        if not run.run_id:
            raise Unreachable("Kubeflow Pipelines answered without the id of the run")
        return run

    try:
        return waiting(create, LOST_ANSWER_S)
    except Unreachable as error:
        key = marker.rpartition(" ")[2].strip(",")
        raise Unreachable(
            f"{error}. The run {fields['display_name']!r} may have been started. Repeat the command with --key {key}, "
            "which does not start a second run"
        ) from error


def digest(settings: Any) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


MOST = 2**53
"""Kubeflow stores numbers as floats, which are exact up to this whole number."""


def checked(name: str, parameters: Mapping[str, Any]) -> tuple[str, str]:
    """Return the pipeline for this environment's cluster, and its version. Raises ConfigError for a password in a
    parameter, which Kubeflow would store, and for a value that the pipeline's first task would refuse."""
    asked = form(name)
    advanced = dict(object_of(parameters.get("advanced", {})))
    no_passwords({**parameters, **advanced})
    for key in parameters:
        if key not in asked:
            raise _unknown(name, key, asked)
    for key, value in {**parameters, **advanced}.items():
        if isinstance(value, int) and abs(value) > MOST:
            raise ConfigError(f"{key} = {value}: Kubeflow rounds whole numbers above {MOST:,}; choose a smaller one")
    _check_values(name, {**asked, **parameters, "advanced": advanced})
    text = retarget(shipped(name), os.environ)
    return text, f"{__version__}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _check_values(name: str, values: Mapping[str, Any]) -> None:
    """Check the values of a form as the pipeline's first task does. Raises ConfigError.

    An empty `mlflow_uri` is the MLflow of the tasks' platform, which cannot be checked on this machine.
    """
    advanced = values["advanced"]
    if values["mlflow_uri"]:
        check_address(str(values["mlflow_uri"]))
    if name == "nightly":
        _check_night(values["suite"], values["night_id"], overrides_of("", values["store_uri"], advanced))
        return
    known = {key: values[key] for key in PARAMETERS | STUDY if key in values}
    known["mlflow_uri"] = known["mlflow_uri"] or None
    if name == "compare":
        id = values["comparison_id"] or "compare"
        comparison_from(known, advanced, values["algorithms"], values["seeds"], id)
        return
    config = config_from(known, advanced)
    run_name(values["study_id" if name == "tune" else "run_id"], "job", config)
    if name == "tune":
        check_workers(config.tune.workers)


def _check_night(name: str, id: str, overrides: Overrides) -> None:
    from flexfleet.experiments import nightly_suite
    from flexfleet.experiments.nightly import prepare

    nightly_suite.path_of(name)  # raises for an unknown name
    if name not in nightly_suite.names():
        raise ConfigError(
            f"suite must be one that comes with flexfleet ({', '.join(nightly_suite.names())}), got {name!r}, because "
            "the image has no files of this machine. Start a suite of your own image in Kubeflow's UI, or run it on "
            "this machine with `flexfleet regress`"
        )
    prepare(name, id or "night", {**overrides, "tracking.mlflow": None})
