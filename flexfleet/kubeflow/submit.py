"""Starts a pipeline on Kubeflow, once or every night: uploads a new version if the graph has changed, then creates a
run or a recurring run.

A version is named after its text, so the same code and image never make a second version.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_engine import __version__
from fl_engine.core.errors import ConfigError, did_you_mean, nearest
from fl_engine.core.quantities import need_plain
from fl_engine.storage.places import check_place
from flexfleet.config import Config
from flexfleet.config.overrides import (
    PARAMETERS,
    STUDY,
    comparison_from,
    config_from,
    parameters_of,
    run_name,
    sets_of,
)
from flexfleet.config.passwords import no_passwords
from flexfleet.kubeflow.retarget import documents, names, retarget, shipped
from flexfleet.kubeflow.server import connected, link, pages
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
    """Whether the version was new."""


def form(name: str) -> dict[str, Any]:
    """The parameters of a pipeline, with their defaults. Raises ConfigError for one that is not shipped."""
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
"""By Kubeflow's name of a parameter's type: the type for people, and what reads a value of it."""


def read(name: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """The values of a pipeline's parameters that are given as texts. Raises ConfigError for a parameter that it does
    not have, and for a text that is no value of the parameter's type."""
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
            raise ConfigError(f"the parameter {key} of the pipeline {name} is {what}, got {text!r}") from None
    return values


def _unknown(name: str, key: str, known: Collection[str]) -> ConfigError:
    return ConfigError(f"the pipeline {name} has no parameter {key!r}{nearest(key, known)}")


def given(name: str, config: Config, named: Collection[str]) -> dict[str, Any]:
    """The values of the pipeline's form, `advanced` among them, that make this configuration there. Where the form has
    no field for a value: raises ConfigError if it is of the parameters that the user has `named`, else warns."""
    asked, (parameters, advanced), plain = form(name), parameters_of(config), parameters_of(Config())[0]
    for key, path in PARAMETERS.items():
        if key in asked or parameters[key] == plain[key]:
            continue
        said = f"the pipeline {name} has no field for {path} = {parameters[key]!r}"
        if any(f"{path}.".startswith(f"{each}.") for each in named):
            raise ConfigError(
                f"{said}: leave it out, or say it by one of its fields ({', '.join(sorted(asked))}) with --param"
            )
        log.warning("%s, which the configuration's file says", said)
    return {key: value for key, value in parameters.items() if key in asked} | {"advanced": advanced}


def submit(
    name: str,
    parameters: Mapping[str, Any],
    *,
    host: str | None = None,
    namespace: str | None = None,
    experiment: str = "flexfleet",
    run_name: str | None = None,
    service_account: str | None = None,
) -> Submitted:
    """Starts a run of the pipeline `name`. `host`: None means the server that the KFP SDK finds (KF_PIPELINES_ENDPOINT,
    its own configuration). `namespace`: of the profile, if there are several users.

    Raises ConfigError for an unknown pipeline or parameter and for a value that its first task would refuse,
    EnvironmentFailure if the server refuses or cannot be reached.
    """
    text, version = _checked(name, parameters)
    with connected(host) as client:
        pipeline_id, version_id, uploaded = _uploaded(client, name, version, text, namespace)
        where = client.create_experiment(experiment, namespace=namespace)
        run = client.run_pipeline(
            where.experiment_id,
            run_name or f"{name}-{version}",
            params=dict(parameters),
            pipeline_id=pipeline_id,
            version_id=version_id,
            service_account=service_account,
        )
        url = link(client, "runs", run.run_id)
    return Submitted(run.run_id, url, name, version, uploaded)


MOST = 2**53
"""The largest number up to which a parameter of Kubeflow, a floating-point number, holds every whole one."""
ONCE = {"night_id", "run_id", "comparison_id", "study_id"}
"""Parameters that name what a pipeline makes."""


@dataclass(frozen=True)
class Scheduled:
    recurring_run_id: str
    url: str
    name: str
    cron: str
    version: str
    replaced: int
    """How many recurring runs of that name it replaced."""


def schedule(
    pipeline: str,
    parameters: Mapping[str, Any],
    name: str,
    cron: str,
    *,
    host: str | None = None,
    namespace: str | None = None,
    experiment: str = "flexfleet",
    service_account: str | None = None,
) -> Scheduled:
    """Makes Kubeflow start the pipeline at fixed times: one run at a time, without repeating missed nights. A recurring
    run cannot be changed: so this makes a new one, then deletes those of the same name.

    `cron`: six fields, seconds first. Raises what `submit` raises.
    """
    if len(cron.split()) != 6:
        raise ConfigError(
            "cron has six fields in Kubeflow, seconds first: '0 0 2 * * *' is two o'clock every night (UTC); got "
            f"{cron!r}"
        )
    if named := sorted(parameters.keys() & ONCE):
        raise ConfigError(f"{', '.join(named)}: every night would go on with the same finished runs; leave it out")
    text, version = _checked(pipeline, parameters)
    with connected(host) as client:
        pipeline_id, version_id, _ = _uploaded(client, pipeline, version, text, namespace)
        where = client.create_experiment(experiment, namespace=namespace)
        known = [r for r in _recurring(client, where.experiment_id) if r.display_name == name]
        made = client.create_recurring_run(
            where.experiment_id,
            name,
            cron_expression=cron,
            max_concurrency=1,
            no_catchup=True,
            params=dict(parameters),
            pipeline_id=pipeline_id,
            version_id=version_id,
            service_account=service_account,
        )
        for old in known:
            client.delete_recurring_run(old.recurring_run_id)
        url = link(client, "recurringrun", made.recurring_run_id)
    return Scheduled(made.recurring_run_id, url, name, cron, version, len(known))


def _checked(name: str, parameters: Mapping[str, Any]) -> tuple[str, str]:
    """The pipeline for this environment's cluster, and its version. Refuses a password in a parameter, which Kubeflow
    would store, and what the pipeline's first task would refuse."""
    asked = form(name)
    advanced = dict(parameters.get("advanced") or {})
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
    """Checks the values of a whole form, as the pipeline's first task does there; an empty `mlflow_uri` is the tasks'
    own MLflow, of which nothing is known here. Raises ConfigError."""
    advanced = values["advanced"]
    check_place("store_uri", str(values["store_uri"]))
    if values["mlflow_uri"]:
        check_address(str(values["mlflow_uri"]), here=False)
    if name == "nightly":
        _check_night(values["suite"], values["night_id"], sets_of("", values["store_uri"], advanced))
        return
    known = {key: values[key] for key in PARAMETERS | STUDY if key in values}
    known["mlflow_uri"] = known["mlflow_uri"] or None
    if name == "compare":
        id = values["comparison_id"] or "compare"
        comparison_from(known, advanced, values["algorithms"], values["seeds"], id)
    else:
        run_name(values["study_id" if name == "tune" else "run_id"], "job", config_from(known, advanced))


def _check_night(name: str, id: str, sets: list[str]) -> None:
    from flexfleet.nightly import suite
    from flexfleet.nightly.regress import prepare

    suite.path_of(name)  # raises for a name that nobody knows
    if name not in suite.names():
        raise ConfigError(
            f"only a suite that comes with flexfleet ({', '.join(suite.names())}) can be started from here, got "
            f"{name!r}: a file of this machine is not in the image; start a suite of your own image in Kubeflow's "
            "UI, or run it here with `flexfleet regress`"
        )
    prepare(name, id or "night", [*sets, "tracking.mlflow=null"])


def _uploaded(client: Any, name: str, version: str, text: str, namespace: str | None) -> tuple[str, str, bool]:
    """Ids of pipeline and version; whether the version had to be uploaded."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / f"{name}.yaml"
        path.write_text(text, encoding="utf-8")
        # (The SDK's own look-up by name does not take a namespace.)
        same = json.dumps({"predicates": [{"operation": "EQUALS", "key": "display_name", "stringValue": name}]})
        pipelines = client.list_pipelines(filter=same, namespace=namespace).pipelines or []
        pipeline_id = pipelines[0].pipeline_id if pipelines else None
        if pipeline_id is None:
            pipeline_id = client.upload_pipeline(str(path), name, namespace=namespace).pipeline_id
        for known in _versions(client, pipeline_id):
            if known.display_name == version:
                return pipeline_id, known.pipeline_version_id, False
        made = client.upload_pipeline_version(str(path), version, pipeline_id=pipeline_id)
    return pipeline_id, made.pipeline_version_id, True


def _versions(client: Any, pipeline_id: str) -> Iterator[Any]:
    return pages(lambda token: client.list_pipeline_versions(pipeline_id, page_token=token, page_size=100),
                  "pipeline_versions")  # fmt: skip


def _recurring(client: Any, experiment_id: str) -> Iterator[Any]:
    return pages(lambda token: client.list_recurring_runs(token, 100, experiment_id=experiment_id), "recurring_runs")
