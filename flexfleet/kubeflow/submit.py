"""Start a pipeline on Kubeflow, once or on a schedule. If the pipeline has changed, a new version is uploaded.

The name of a version contains a digest of its YAML, so an unchanged pipeline is not uploaded again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_engine import __version__
from fl_engine.core.errors import ConfigError, did_you_mean, nearest
from fl_engine.core.text import need_plain, object_names
from flexfleet.config import Config
from flexfleet.config import form as forms
from flexfleet.config.dotted import LISTED, SHORT, STUDY, no_passwords
from flexfleet.kubeflow.client import connected, link, pages, without_links
from flexfleet.kubeflow.follow import PIPELINES
from flexfleet.kubeflow.retarget import documents, names, retarget, shipped
from flexfleet.tracking.server import check_address

log = logging.getLogger("flexfleet")


@dataclass(frozen=True)
class Submitted:
    run_id: str
    url: str
    """URL of the run in the UI; empty if the URL of the UI is unknown."""
    pipeline: str
    version: str
    uploaded: bool
    """True if this call uploaded a new version of the pipeline."""


def form(name: str) -> dict[str, Any]:
    """Return the parameters of a shipped pipeline, with their defaults. Raises ConfigError for an unknown pipeline."""
    return {name: about.get("defaultValue") for name, about in _fields(name).items()}


def _fields(name: str) -> dict[str, Any]:
    if name not in names():
        raise ConfigError(f"pipeline must be one of {', '.join(names())}, got {name!r}{did_you_mean(name, names())}")
    spec, *_ = documents(shipped(name))
    given: dict[str, Any] = spec["root"]["inputDefinitions"]["parameters"]
    return given


TYPES: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "STRING": ("a text", str),
    "NUMBER_INTEGER": ("a whole number", int),
    "NUMBER_DOUBLE": ("a number", float),
}
"""Map each parameter type of Kubeflow to a tuple (readable name, function that parses a string)."""


def read(name: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """Parse the values of a pipeline's parameters from strings. Raises ConfigError if a parameter is unknown, or if a
    string does not match the type of the parameter."""
    fields, values = _fields(name), dict[str, Any]()
    for key, text in texts.items():
        _check_known(name, key, fields)
        kind, value = TYPES[fields[key]["parameterType"]]
        try:
            need_plain([text] if value is not str else [])
            values[key] = value(text)
            json.dumps(values[key], allow_nan=False)
        except ValueError:
            message = f"the parameter {key} of the pipeline {name} must be {kind}, got {text!r}"
            raise ConfigError(message, code="config.wrong_type", path=key) from None
    return values


def _check_known(name: str, key: str, fields: Collection[str]) -> None:
    if key not in fields:
        message = f"the pipeline {name} has no parameter {key!r}{nearest(key, fields)}"
        raise ConfigError(message, code="config.unknown", path=key)


def given(name: str, config: Config, named: Collection[str]) -> dict[str, Any]:
    """Convert a configuration to the values of a pipeline's form, including `advanced`.

    If a changed parameter has no field in the form, log a warning, or raise ConfigError if it is in `named`.
    """
    fields, (parameters, advanced), defaults = form(name), forms.parameters_of(config), forms.parameters_of(Config())[0]
    for key, path in SHORT.items():
        if key in fields or parameters[key] == defaults[key]:
            continue
        problem = f"the pipeline {name} has no field for {path} = {parameters[key]!r}"
        if any(f"{path}.".startswith(f"{each}.") for each in named):
            raise ConfigError(
                f"{problem}. Remove {path}, or set one of the fields ({', '.join(sorted(fields))}) with --param",
                path=path,
            )
        log.warning("%s, so this value of the configuration file is ignored", problem)
    return {key: value for key, value in parameters.items() if key in fields} | {"advanced": advanced}


def submit(
    name: str,
    parameters: Mapping[str, Any],
    *,
    host: str | None = None,
    namespace: str | None = None,
    experiment: str = "flexfleet",
    run_name: str | None = None,
) -> Submitted:
    """Start a run of the pipeline `name`.

    Args:
        name: A shipped pipeline: train, compare, tune or nightly.
        parameters: Values for the pipeline's form.
        host: Address of Kubeflow Pipelines. If None, the SDK gets the address from KF_PIPELINES_ENDPOINT, the pod's
            environment, or KUBECONFIG.
        namespace: Namespace of the profile, if Kubeflow has several users.
        experiment: Name of the Kubeflow experiment, which is created if it does not exist.
        run_name: Name of the Kubeflow run. If None, the name consists of the pipeline and its version.

    Raises:
        ConfigError: The pipeline or a parameter does not exist, or the first task would reject a value.
        EnvironmentFailure: The server rejects the request, or does not respond (Unreachable).
    """
    text, version, parameters = checked(name, parameters)
    with connected(host) as client, without_links():
        ids, uploaded = upload(client, name, version, text, namespace)
        experiment_id = client.create_experiment(experiment, namespace=namespace).experiment_id
        account = _service_account()
        run_name = run_name or f"{name}-{version}"
        run = client.run_pipeline(experiment_id, run_name, params=parameters, service_account=account, **ids)
    return Submitted(run.run_id, link(host, "runs", run.run_id), name, version, uploaded)


def _service_account() -> str | None:
    """Return the service account of the tasks' pods; None for Kubeflow's default."""
    return next(iter(object_names("FLEXFLEET_SERVICE_ACCOUNT", os.environ, most=1)), None)


def upload(client: Any, name: str, version: str, text: str, namespace: str | None) -> tuple[dict[str, str], bool]:
    """Upload a new pipeline or version. Return the IDs of the pipeline and the version, and whether it was new."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / f"{name}.yaml"
        path.write_text(text, encoding="utf-8")
        filter = json.dumps({"predicates": [{"operation": "EQUALS", "key": "display_name", "stringValue": name}]})
        existing = pages(client.list_pipelines, "pipelines", filter=filter, namespace=namespace)
        found = [each for each in existing if each.display_name == name]
        pipeline = found[0] if found else client.upload_pipeline(str(path), name, namespace=namespace)
        existing = pages(client.list_pipeline_versions, "pipeline_versions", pipeline_id=pipeline.pipeline_id)
        known = [each for each in existing if each.display_name == version]
        made = known[0] if known else client.upload_pipeline_version(str(path), version, pipeline.pipeline_id)
    return {"pipeline_id": pipeline.pipeline_id, "version_id": made.pipeline_version_id}, not known


def checked(name: str, parameters: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Check the parameters, and return the YAML of the adapted pipeline, its version and the parameters. Names of the
    user's own classes are moved to `advanced`, because form fields accept only listed names.

    Raises ConfigError if the first task of the pipeline would reject a parameter, or if a parameter contains a
    password, which Kubeflow would store.
    """
    fields = _fields(name)
    advanced = dict(forms.object_of(parameters.get("advanced", {})))
    no_passwords({**parameters, **advanced})
    for key in parameters:
        _check_known(name, key, fields)
    _check_values(name, {**form(name), **parameters, "advanced": advanced})
    names = {field: fields.get(field, {}).get("literals") for field in LISTED}
    own = [field for field, known in names.items() if known and parameters.get(field, known[0]) not in known]
    values = {field: value for field, value in parameters.items() if field not in own}
    if own:
        values["advanced"] = {LISTED[field]: parameters[field] for field in own} | advanced
    return *exported(name), values


def exported(name: str) -> tuple[str, str]:
    """Return the YAML of a shipped pipeline, adapted to the cluster in the environment variables, and its version.
    Raises ConfigError if the pipeline does not exist, or if a variable is malformed."""
    _fields(name)
    text = retarget(shipped(name), os.environ)
    return text, f"{__version__}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _check_values(name: str, values: Mapping[str, Any]) -> None:
    """Check the values of a form with the same checks as the first task of the pipeline. Raises ConfigError.

    If `mlflow_uri` is empty, the platform's MLflow is used, which cannot be checked on this machine.
    """
    advanced = values["advanced"]
    if values["mlflow_uri"]:
        check_address(str(values["mlflow_uri"]))
    if name == "nightly":
        from flexfleet.experiments import nightly, nightly_suite, published_suites

        suite, known_suites = values["suite"], published_suites.names(nightly_suite.FOLDER)
        if suite not in known_suites:  # the image contains only the built-in suites
            message = f"suite must be a suite of flexfleet ({', '.join(known_suites)}), got {suite!r}"
            raise ConfigError(message, code="config.unknown", path="suite")
        overrides = forms.overrides_from({"mlflow_uri": "", "store_uri": values["store_uri"]}, advanced)
        nightly.prepare(suite, values["night_id"] or "night", {**overrides, "tracking.mlflow": None})
        return
    known = {key: values[key] for key in SHORT | STUDY if key in values}
    known["mlflow_uri"] = known["mlflow_uri"] or None
    if name == "compare":
        id = values["comparison_id"] or "compare"
        forms.comparison_from(known, advanced, values["algorithms"], values["seeds"], id)
        return
    config = forms.config_from(known, advanced)
    forms.run_name(values["study_id" if name == "tune" else "run_id"], "job", config)
    if name == "tune":
        forms.check_count(config.tune.workers, "tune.workers", "tune.workers")


@dataclass(frozen=True)
class Scheduled:
    recurring_run_id: str
    url: str
    name: str
    cron: str
    version: str
    made: bool
    """True if this call created the recurring run. False if a recurring run with the same settings already existed."""
    replaced: int
    """Number of recurring runs with the same name that this call disabled."""


def schedule(
    pipeline: str,
    parameters: Mapping[str, Any],
    name: str,
    cron: str,
    *,
    host: str | None = None,
    namespace: str | None = None,
    experiment: str = "flexfleet",
) -> Scheduled:
    """Create a recurring run of the pipeline. At most one run is active, and missed runs are skipped.

    Kubeflow cannot change recurring runs, so existing recurring runs with this name are disabled. Disabled recurring
    runs are not deleted, because Kubernetes would also delete their active runs. If an enabled recurring run with the
    same settings exists, it is reused, so an interrupted call can be repeated.

    Args:
        pipeline: Name of a shipped pipeline. For the other arguments, see `submit`.
        parameters: Values for the pipeline's form.
        name: Name of the recurring run.
        cron: Schedule in UTC with six fields, starting with the seconds.

    Raises: As `submit`.
    """
    if len(cron.split()) != 6:
        raise ConfigError(
            f"cron must have six fields, the first for seconds, such as '0 0 2 * * *' for 02:00 UTC, got {cron!r}"
        )
    if named := sorted(parameters.keys() & PIPELINES.keys()):
        raise ConfigError(
            f"{', '.join(named)} must not be set in a schedule, because all scheduled runs would continue the same run"
        )
    text, version, parameters = checked(pipeline, parameters)
    account = _service_account()
    settings = json.dumps([pipeline, version, parameters, cron, *([account] if account else [])], sort_keys=True)
    description = f"flexfleet nightly, settings {hashlib.sha256(settings.encode()).hexdigest()[:12]}"
    with connected(host) as client, without_links():
        ids, _ = upload(client, pipeline, version, text, namespace)
        experiment_id = client.create_experiment(experiment, namespace=namespace).experiment_id
        existing = pages(client.list_recurring_runs, "recurring_runs", experiment_id=experiment_id)
        own = [each for each in existing if each.display_name == name]
        enabled = [each for each in own if "DISABLE" not in f"{each.mode} {each.status}"]
        same = next((each for each in enabled if each.description == description), None)
        new = same or client.create_recurring_run(
            experiment_id, name, description, cron_expression=cron, no_catchup=True, max_concurrency=1,
            params=parameters, service_account=account, **ids,
        )  # fmt: skip
        others = [each for each in enabled if each.recurring_run_id != new.recurring_run_id]
        for each in others:
            client.disable_recurring_run(each.recurring_run_id)
    url = link(host, "recurringrun", new.recurring_run_id)
    return Scheduled(new.recurring_run_id, url, name, cron, version, same is None, len(others))
