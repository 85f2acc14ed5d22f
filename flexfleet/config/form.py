"""From a pipeline's parameters to the configuration, to the run's name and to the folder of its store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError, kind_of, nearest, together
from fl_engine.core.text import check_plain, write_yaml
from fl_engine.storage.s3 import check_place
from flexfleet.config import Config, load_config, public
from flexfleet.config.comparison_runs import Entry, by_label, entries, labels_of, seeds_of
from flexfleet.config.form_fields import LISTED, REMOTE, SHORT, STUDY, no_passwords, place, platform_uri
from flexfleet.config.overrides import MAPPINGS, Overrides, leaves
from flexfleet.config.run_names import plain

PARAMETERS = SHORT
"""The fields of a run form, and the parameters that they set. `advanced` sets all others by their dotted names."""
NOT_EVERYWHERE = {"algorithm", "seed", *STUDY}
"""Fields that some pipelines do not have."""
MOST_RUNS = 80
"""Largest number of runs of a pipeline, and of workers of a study. The last task's argument has about 1 KiB for each,
and Linux accepts no argument above 128 KiB."""


def config_from(parameters: Mapping[str, Any], advanced: Mapping[str, Any]) -> Config:
    """Return the checked configuration of a form. A `store_uri` with a scheme becomes `run.remote`; an empty one leaves
    the default, because only the pipeline's first task knows the platform's bucket. `advanced` cannot set a field of
    the form, except those in LISTED. Raises ConfigError, and SeveralErrors for more than one."""
    advanced = object_of(advanced)
    try:
        check_plain([parameters, advanced])
    except ValueError as error:
        raise ConfigError(f"the form or its `advanced` cannot be: {error}") from error
    no_passwords({**parameters, **advanced})
    known, wrong = PARAMETERS | STUDY, []
    overrides: Overrides = {}
    for name, value in parameters.items():
        if name not in known:
            wrong.append(f"unknown parameter {name!r}{nearest(name, known)}")
            continue
        value = mlflow_of(value) if name == "mlflow_uri" else whole(value)
        if name == "store_uri" and value == "":
            continue
        try:
            check_store(name, value)
        except ConfigError as error:
            wrong.append(str(error))
        else:
            overrides[place(name, value)] = value
    names = {path: name for name, path in known.items()} | REMOTE
    for path, value in advanced.items():
        if path in names and names[path] in NOT_EVERYWHERE and names[path] not in parameters:
            wrong.append(f"advanced: {path!r} cannot be set: this pipeline has no parameter {names[path]!r}")
        elif path in names and names[path] not in LISTED:
            wrong.append(f"advanced: {path!r} is the parameter {names[path]!r}, set it there")
        elif isinstance(value, Mapping) and path not in MAPPINGS:
            inner = next(iter(value), "name")
            wrong.append(f'advanced takes dotted names, {{"{path}.{inner}": value}}, got a mapping for {path!r}')
        else:
            overrides[path] = whole(value)
    try:
        config = load_config(None, overrides)
    except ConfigError as error:
        wrong.append(str(error))
    if wrong:
        raise together(map(ConfigError, wrong))
    return config


def object_of(advanced: Any) -> Mapping[str, Any]:
    """Return a form's `advanced`. Raises ConfigError if it is not an object, because Kubeflow accepts any JSON
    value."""
    if not isinstance(advanced, Mapping):
        raise ConfigError(
            'advanced is one JSON object of dotted names, as {"algorithm.kd_weight": 5}, or {} for none, got '
            + kind_of(advanced)
        )
    return advanced


def check_store(name: str, value: Any) -> None:
    """Raise ConfigError for a `store_uri` that is neither an address in S3 nor a folder."""
    if name == "store_uri" and isinstance(value, str):
        check_place(name, value)


def mlflow_of(uri: Any) -> Any:
    """Return the address of MLflow. An empty field means the MLflow that the platform gives its tasks, if any."""
    return platform_uri() if uri == "" else uri


def overrides_of(mlflow_uri: str, store_uri: str, advanced: Mapping[str, Any]) -> Overrides:
    """Return the values of a form by dotted name, for a suite, which has its other settings in a file. Raises
    ConfigError for a password, and if `advanced` sets a field of the form."""
    advanced = object_of(advanced)
    no_passwords({"mlflow_uri": mlflow_uri, "store_uri": store_uri, **advanced})
    check_store("store_uri", store_uri)
    names = {PARAMETERS[name]: name for name in ("mlflow_uri", "store_uri")} | REMOTE
    for path in advanced:
        if path in names:
            raise ConfigError(f"advanced: {path!r} is the parameter {names[path]!r}, set it there")
    values = {"tracking.mlflow": mlflow_of(mlflow_uri)}
    values |= {place("store_uri", store_uri): store_uri} if store_uri else {}
    return {**values, **whole(advanced)}


def form_of(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a form that give these overrides: the reverse of `overrides_of`."""
    advanced = dict(overrides)
    mlflow, folder = (advanced.pop(path, None) for path in ("tracking.mlflow", "run.store"))
    return {
        "mlflow_uri": mlflow or "",
        "store_uri": advanced.pop("run.remote", None) or folder or "",
        "advanced": advanced,
    }


def parameters_of(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the `parameters` and `advanced` from which `config_from` makes this configuration. An MLflow database in a
    file of this machine and the default folder of runs are left out, because tasks of a cluster cannot use them."""
    values, plain = leaves(config.model_dump(mode="json")), leaves(Config().model_dump(mode="json"))
    known = PARAMETERS | STUDY
    parameters = {name: values.pop(path) for name, path in known.items()}
    if str(parameters["mlflow_uri"] or "").partition(":")[0] not in ("http", "https"):
        parameters["mlflow_uri"] = ""
    folder = parameters["store_uri"]
    parameters["store_uri"] = values.pop("run.remote") or ("" if folder == plain["run.store"] else folder)
    return parameters, {path: v for path, v in values.items() if path not in plain or plain[path] != v}


def comparison_from(
    parameters: Mapping[str, Any], advanced: Mapping[str, Any], algorithms: str, seeds: str, id: str
) -> list[Entry]:
    """Return the runs of a comparison. `advanced` may hold `label:a.b` for one label, also for fields of the form.
    Raises ConfigError."""
    labels, numbers = labels_of(algorithms), seeds_of(seeds)
    check_count(len(labels) * len(numbers), f"{len(labels)} algorithms with {len(numbers)} seeds")
    given = by_label(object_of(advanced), labels)
    names = {path: name for name, path in PARAMETERS.items() if name not in LISTED}

    def configure(label: str, seed: int) -> Config:
        own = {names[path]: value for path, value in given[label].items() if path in names}
        rest = {path: value for path, value in given[label].items() if path not in names}
        asked = {"algorithm": labels[label], "seed": seed}
        return config_from({**parameters, **own, **asked}, {**given[None], **rest})

    return entries(labels, numbers, configure, id)


def check_count(runs: int, what: str) -> None:
    """Raise ConfigError for more runs than a pipeline can gather. `what` they come from."""
    if runs > MOST_RUNS:
        raise ConfigError(
            f"{what} are {runs} runs, and a pipeline makes at most {MOST_RUNS}. Make several comparisons, or use "
            "`flexfleet compare`, which has no limit"
        )


def check_workers(workers: int) -> None:
    """Raise ConfigError for more workers of a study than a pipeline can gather."""
    if workers > MOST_RUNS:
        raise ConfigError(
            f"tune.workers is {workers}, and a pipeline has at most {MOST_RUNS}. Each worker runs one trial after "
            "another, so fewer workers run as many trials"
        )


def whole(value: Any) -> Any:
    """Undo what protobuf does to numbers inside structs: 5.0 becomes 5, at any depth."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {k: whole(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [whole(v) for v in value]
    return value


def write_config(config: Config, path: Path) -> Path:
    """Write the whole configuration as YAML; `load_config` reads back an equal one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_yaml(config), encoding="utf-8")
    return path


def hand_over(config: Config, path: Path) -> tuple[str, str]:
    """Return the value of another process's --config, and its stdin. The file `path` holds no password; if the
    configuration has one, the process reads it from stdin."""
    told = public(config)
    write_config(told, path)
    return (str(path), "") if told == config else ("/dev/stdin", _yaml(config))


def _yaml(config: Config) -> str:
    return write_yaml(config.model_dump(mode="json"))


def run_name(wanted: str, job_id: str, config: Config) -> str:
    """Return the wanted name of the run, else a name with the pipeline run's id. Raises ConfigError if it is not
    plain."""
    return plain(wanted or f"{config.algorithm['name']}-s{config.seed}-{job_id}", "run_id")


def run_folder(config: Config, name: str) -> Path:
    """Return `<run.store>/<name>`. If the ledger is in `run.remote`, a pod may lose everything in this folder."""
    return Path(config.run.store) / name
