"""Starts a pipeline on Kubeflow, once or every night: uploads a new version if the graph has changed, then creates a
run or a recurring run.

A version is named after its text, so the same code and image never make a second version.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fl_engine import __version__
from fl_engine.core.errors import ConfigError, did_you_mean, nearest
from fl_engine.core.quantities import need_plain
from flexfleet.config import Config
from flexfleet.config.overrides import (
    LISTED,
    PARAMETERS,
    STUDY,
    check_workers,
    comparison_from,
    config_from,
    object_of,
    parameters_of,
    run_name,
    sets_of,
)
from flexfleet.config.passwords import no_passwords
from flexfleet.kubeflow import making
from flexfleet.kubeflow.retarget import documents, names, retarget, shipped
from flexfleet.kubeflow.server import connected, id_of, link
from flexfleet.kubeflow.transport import Undecided
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
    key: str
    started: bool
    """False: the run was there, started before with the same key."""


KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


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
    """Starts a run of the pipeline `name`. `host`: None means the server that the KFP SDK finds (KF_PIPELINES_ENDPOINT,
    its own configuration). `namespace`: of the profile, if there are several users. `key`: names this start, so that
    the same start again makes no second run but gives the first; None: a new one. It stands in the run's description.

    Raises ConfigError for an unknown pipeline or parameter, for a value that its first task would refuse and for the
    key of another start; EnvironmentFailure if the server refuses or cannot be reached, Undecided where it cannot be
    said whether the run was started.
    """
    text, version = _checked(name, parameters)
    parameters = listed(name, parameters)
    if key is not None and not KEY.fullmatch(key):
        raise ConfigError(f"key is at most 64 letters, digits, dots, dashes and underscores, got {key!r}")
    began, key = key is not None, key or uuid.uuid4().hex[:16]
    settings = making.fingerprint([name, version, dict(parameters), service_account])
    marked = f"flexfleet submit --key {key},"
    with connected(host) as client:
        pipeline_id, version_id, new = making.uploaded(client, name, version, text, namespace)
        where = making.experiment(client, experiment, namespace)
        asked = making.run(
            making.job(pipeline_id, version_id, parameters, service_account=service_account, experiment_id=where,
                       display_name=run_name or f"{name}-{version}", description=f"{marked} settings {settings}")
        )  # fmt: skip

        def find() -> str | None:
            for run in making.runs(client, where, marked):
                if run.description != asked.description:
                    raise ConfigError(
                        f"the key {key} was of another start: the run {run.run_id} has other parameters or another "
                        "version of a pipeline; choose another key"
                    )
                return id_of(client, run, "run_id")
            return None

        run_id = find() if began else None
        started = run_id is None
        if run_id is None:
            run_id = _begun(client, asked, find, key)
        url = link(client, "runs", run_id)
    return Submitted(run_id, url, name, version, new, key, started)


def _begun(client: Any, asked: Any, find: making.Find, key: str) -> str:
    page = link(client, "experiments", asked.experiment_id) or f"the experiment {asked.experiment_id}"
    perhaps = (
        f"the run {asked.display_name!r} may have been started all the same: see {page}. The same command with "
        f"--key {key} starts no second one"
    )
    try:
        with making.told_if_interrupted(perhaps):
            return making.begun(client, asked, find)
    except Undecided as error:
        raise Undecided(f"{error}. {perhaps[0].upper()}{perhaps[1:]}") from error


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
    made: bool
    """False: the same was there already."""
    replaced: int
    """How many other recurring runs of that name were deleted."""


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
    run cannot be changed: so this makes a new one, then deletes those of the same name. What is there with the same
    settings stays, so that the same call again mends what an interrupted one has left.

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
    parameters = listed(pipeline, parameters)
    settings = making.fingerprint([pipeline, version, dict(parameters), cron, service_account])
    with connected(host) as client:
        pipeline_id, version_id, _ = making.uploaded(client, pipeline, version, text, namespace)
        where = making.experiment(client, experiment, namespace)
        job = making.job(pipeline_id, version_id, parameters, service_account=service_account, experiment_id=where,
                         display_name=name, description=f"flexfleet nightly, settings {settings}")  # fmt: skip
        id, new, replaced = making.replacing(client, making.recurring_run(job, cron))
        url = link(client, "recurringrun", id)
    return Scheduled(id, url, name, cron, version, new, replaced)


def _checked(name: str, parameters: Mapping[str, Any]) -> tuple[str, str]:
    """The pipeline for this environment's cluster, and its version. Refuses a password in a parameter, which Kubeflow
    would store, and what the pipeline's first task would refuse."""
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
    """Checks the values of a whole form, as the pipeline's first task does there; an empty `mlflow_uri` is the tasks'
    own MLflow, of which nothing is known here. Raises ConfigError."""
    advanced = values["advanced"]
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
        return
    config = config_from(known, advanced)
    run_name(values["study_id" if name == "tune" else "run_id"], "job", config)
    if name == "tune":
        check_workers(config.tune.workers)


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
