"""Convert the values of a pipeline's form to a configuration and the name of a run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError, FlexfleetError, kind_of, nearest, together
from fl_engine.core.text import check_plain, write_yaml
from fl_engine.storage.s3 import check_place
from flexfleet.config import Config, dotted, flatten, load_config, public
from flexfleet.config.comparison_runs import PlannedRun, entries_from, label_overrides, labels_of, seeds_of
from flexfleet.config.dotted import Overrides
from flexfleet.config.run_names import check_name

NOT_EVERYWHERE = {"algorithm", "seed", *dotted.STUDY}
"""Form fields that some pipelines do not have."""
MOST_RUNS = 80
"""Maximum number of runs in a pipeline, and maximum number of workers in a study. Each run or worker adds about 1 KiB
to an argument of the last task, and Linux limits an argument to 128 KiB."""


def config_from(parameters: Mapping[str, Any], advanced: Mapping[str, Any]) -> Config:
    """Convert the values of a form to a checked configuration. Raises ConfigError or SeveralErrors."""
    overrides, wrong = _read(parameters, advanced)
    try:
        config = load_config(None, overrides)
    except ConfigError as error:
        wrong.append(error)
    if wrong:
        raise together(wrong)
    return config


def overrides_from(parameters: Mapping[str, Any], advanced: Mapping[str, Any]) -> Overrides:
    """Convert the values of a form to overrides by dotted name. `advanced` can only set the fields in LISTED and
    parameters without a form field. If `store_uri` is empty, the default is used. Raises ConfigError or
    SeveralErrors."""
    overrides, wrong = _read(parameters, advanced)
    if wrong:
        raise together(wrong)
    return overrides


def _read(parameters: Mapping[str, Any], advanced: Mapping[str, Any]) -> tuple[Overrides, list[FlexfleetError]]:
    """Check the values of a form; return the valid values by dotted name, and the errors for all other values."""
    advanced = object_of(advanced)
    try:
        check_plain(advanced)
    except ValueError as error:
        raise ConfigError.at(f"advanced must contain only values with a JSON type: {error}") from error
    dotted.no_passwords({**parameters, **advanced})
    known = dotted.SHORT | dotted.STUDY
    wrong: list[FlexfleetError] = []
    overrides: Overrides = {}
    for name, value in parameters.items():
        if name not in known:
            hint = nearest(name, known)
            wrong.append(ConfigError(f"unknown parameter {name!r}{hint}", code="config.unknown", path=name))
        elif name == "mlflow_uri":  # an empty field selects the platform's MLflow, if available
            overrides[known[name]] = dotted.platform_uri() if value == "" else value
        elif name == "store_uri" and isinstance(value, str):
            try:
                check_place(name, value)
                overrides |= {dotted.place(name, value): value} if value else {}
            except ConfigError as error:
                wrong.append(error)
        else:
            overrides[known[name]] = restore_integers(value)
    for path, value in advanced.items():
        message = ""
        name = dotted.FIELDS.get(path, "")
        if name in NOT_EVERYWHERE and name not in parameters:
            message = f"cannot be set, because this pipeline has no parameter {name!r}"
        elif name in parameters and name not in dotted.LISTED:
            message = f"is the parameter {name!r}. Set it there"
        elif isinstance(value, Mapping) and path.rpartition(":")[2] not in dotted.MAPPINGS:
            message = f'must be given by dotted names, {{"{path}.{next(iter(value), "name")}": value}}, got a mapping'
        if message:
            wrong.append(ConfigError(f"advanced: {path!r} {message}", path=path))
        else:
            overrides[path] = restore_integers(value)
    return overrides, wrong


def object_of(advanced: Any) -> Mapping[str, Any]:
    """Return the form's field `advanced`. Raises ConfigError if the JSON value in this field is not an object."""
    if not isinstance(advanced, Mapping):
        raise ConfigError.at(
            f'advanced must be a JSON object, such as {{"algorithm.kd_weight": 5}}, got {kind_of(advanced)}'
        )
    return advanced


def parameters_of(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert a configuration to the `parameters` and `advanced` from which `config_from` builds it again. The default
    run folder and MLflow addresses other than http(s) are left out, because tasks in a cluster cannot use them."""
    values, defaults = flatten(config), flatten(Config())
    parameters = {name: values.pop(path) for name, path in (dotted.SHORT | dotted.STUDY).items()}
    if str(parameters["mlflow_uri"] or "").partition(":")[0] not in ("http", "https"):
        parameters["mlflow_uri"] = ""
    folder = parameters["store_uri"]
    parameters["store_uri"] = values.pop("run.remote") or ("" if folder == defaults["run.store"] else folder)
    return parameters, {path: v for path, v in values.items() if path not in defaults or defaults[path] != v}


def comparison_from(
    parameters: Mapping[str, Any], advanced: Mapping[str, Any], algorithms: str, seeds: str, id: str
) -> list[PlannedRun]:
    """Plan the runs of a comparison. A key `label:a.b` in `advanced` sets `a.b` for one variant. Raises ConfigError."""
    labels, numbers = labels_of(algorithms), seeds_of(seeds)
    check_count(len(labels) * len(numbers), f"the number of runs of {len(labels)} algorithms with {len(numbers)} seeds")
    overrides = overrides_from(parameters, advanced)
    return entries_from(label_overrides(labels, overrides), numbers, partial(load_config, None), id)


def check_count(count: int, what: str, path: str | None = None) -> None:
    """Raise ConfigError if a pipeline cannot have `count` runs or workers. `path`: the invalid parameter."""
    if count > MOST_RUNS:
        raise ConfigError(
            f"{what} must be at most {MOST_RUNS} in a pipeline, got {count}. Lower the number, or use the command line",
            code="config.out_of_range",
            path=path,
        )


def restore_integers(value: Any) -> Any:
    """Convert whole-numbered floats such as 5.0 back to integers, because Protobuf stores all numbers as floats."""
    return dotted.mapped(value, lambda each: int(each) if isinstance(each, float) and each.is_integer() else each)


def write_config(config: Config, path: Path) -> Path:
    """Write all parameters to a YAML file, which `load_config` can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(write_yaml(config.model_dump(mode="json")), encoding="utf-8")
    return path


def hand_over(config: Config, path: Path) -> tuple[str, str]:
    """Write the configuration without passwords to `path`. Return the --config value and the stdin text for a new
    process. If there is a password, the process reads the full configuration from stdin instead of `path`."""
    without_passwords = public(config)
    write_config(without_passwords, path)
    if without_passwords == config:
        return str(path), ""
    return "/dev/stdin", write_yaml(config.model_dump(mode="json"))


def run_name(wanted: str, job_id: str, config: Config) -> str:
    """Return the name of the run. If `wanted` is empty, the name contains the ID of the pipeline run. Raises
    ConfigError if the name cannot be a folder name."""
    return check_name(wanted or f"{config.algorithm['name']}-s{config.seed}-{job_id}", "run_id")
