"""params.yaml as typed, frozen, self-checking configuration.

The defaults are the embedded job: FlexFL on scikit-learn's handwritten digits, with the paper's fleet. Every field
carries its explanation; an unknown key is an error that names the nearest one; nothing is converted silently.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, field_validator, model_validator

from fl_engine import privacy
from fl_engine.algorithms.pooled import Training
from fl_engine.backends.settings import KubernetesConfig
from fl_engine.devices import FLEETS, Tier, named
from fl_engine.errors import ConfigError, FlexfleetError, masked, nearest
from fl_engine.fields import Count, Positive, Section
from fl_engine.numerics import Precision, Strategy
from fl_engine.plain import check_plain, read_yaml
from fl_engine.terms import RoundsConfig
from fl_engine.types import Algorithm, ChoosesNetwork, ModelFamily

T = TypeVar("T")

class DatasetConfig(Section):
    name: str = "digits"
    """A registered data set, or package.module:NAME."""
    root: str | None = None
    """Folder of the data files; `repo@rev:path`, or a .dvc file, of a DVC repository; null: FLEXFLEET_DATA, else
    ~/.cache/flexfleet/data."""
    train_samples: Count | None = None
    """Use this many training samples; null: all."""
    test_samples: Count | None = None
    """Use this many test samples; null: all."""
    pad: Literal["auto", "none"] | Count = "auto"
    """Pad images with zeros to this side; auto: up to the smallest side that the network takes."""


class PartitionConfig(Section):
    rule: Literal["iid", "dirichlet", "quantity", "disjoint_labels", "natural"] = "dirichlet"
    clients: Count = 20
    alpha: float = 0.6
    """Concentration of dirichlet and quantity; smaller is more heterogeneous."""
    labels_per_client: Count = 2
    """For disjoint_labels."""
    minimum: Count = 20
    """Samples that each client gets at least (dirichlet, quantity)."""
    proxy: float = 0.05
    """Share of the training data kept by the server: 80 % to pre-train, 20 % to measure APoZ."""
    seed: int | None = None
    """Of the cut alone; null: the run's, so that runs of several seeds have as many partitions."""


class FleetConfig(Section):
    tiers: tuple[Tier, ...] = FLEETS["4:3:3"]
    """A list of tiers (share of the fleet, memory r_M in % of the full model, spreads sigma, ...), or the name of one
    of `fl_engine.devices.FLEETS`; the default is FlexFL's Table I."""


class PretrainConfig(Section):
    epochs: Count = 100
    lr: Positive = 1e-3
    """Adam."""
    batch_size: Count = 50
    reference: bool = False
    """Also pre-train on all training data, to report how alike the pool is (FlexFL Sec. IV-C1). Costs 1/proxy times
    as much, and is for studies only: a server does not see its clients' data."""


class RunConfig(Section):
    store: str = "runs"
    """Folder of all runs."""

    @field_validator("store")
    @classmethod
    def _a_folder(cls, value: str) -> str:
        if "://" in value:
            raise ValueError("a folder of this machine is expected; for ledgers in S3 set run.remote=s3://bucket/prefix")
        return value

    remote: str | None = None
    """s3://bucket/prefix for the ledgers of all runs, where another coordinator finds them; null: in `store`."""
    secrets: str | None = None
    """Where the run's key is kept, from which noise and signatures follow: a folder, or s3://bucket/prefix in another
    bucket than `remote`, with credentials of its own (FLEXFLEET_SECRETS_AWS_ACCESS_KEY_ID and so on); null: a Secret of
    the cluster where clients are pods, else a file in the run's folder (not for private runs with `remote`: that
    outlives the folder)."""
    backend: Literal["in_process", "processes", "kubernetes"] = "in_process"
    """Where clients live: in threads of this process, in worker processes that get orders through the store, or in
    pods (see `kubernetes`)."""
    devices: tuple[str, ...] = ("cpu",)
    """Torch devices that train clients at the same time, e.g. [cpu, cpu] or [cuda:0, cuda:1]."""
    strategy: Literal["auto"] | Strategy = "auto"
    """single: a device trains one client at a time; batched: several side by side, for small networks; auto: what
    suits the size of the network."""
    precision: Precision = "fp32"
    """bf16: forward and backward pass in bfloat16, which CPUs with AMX and recent GPUs do several times faster."""


class TrackingConfig(Section):
    mlflow: str | None = "sqlite:///mlflow.db"
    """MLflow tracking URI; null: off."""
    experiment: str | None = None
    """null: <dataset>-<model>-<partition>; where Kubeflow gives tasks an MLflow (MLFLOW_TRACKING_URI), its own."""
    ui: str | None = None
    """Where people open MLflow, if that is another address than `mlflow`; for links."""
    kubeflow: str | None = None
    """Where people open Kubeflow Pipelines, for links from MLflow to a pipeline's run; null: what FLEXFLEET_KUBEFLOW_UI
    says, else no links."""


class Range(Section):
    """What a parameter may be in a search: from `low` to `high`, or one of `choices`."""

    low: float | None = None
    high: float | None = None
    log: bool = False
    """As likely between 1 and 10 as between 10 and 100."""
    whole: bool = False
    """Whole numbers only."""
    choices: tuple[Any, ...] = ()

    @model_validator(mode="after")
    def _one_or_the_other(self) -> Range:
        if self.choices:
            if self.low is not None or self.high is not None or self.log or self.whole:
                raise ValueError("choices stand alone: without low, high, log and whole")
        elif self.low is None or self.high is None or not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError("low and high are expected, low below high, and above 0 for log; or choices")
        return self


class TuneConfig(Section):
    """For `flexfleet tune`."""

    trials: Count = 30
    metric: Literal["avg", "full"] = "avg"
    """Of the last round, over all `seeds`."""
    seeds: tuple[int, ...] = (0,)
    """Of each trial's runs."""
    held_out: tuple[int, ...] = (100, 101, 102)
    """Seeds on which the best setting and the default are compared in the end."""
    space: dict[str, Range] = Field(default={})
    """By dotted name (`algorithm.gammas.0`: the first of a list); empty, for flexfl: gamma of every level around what
    its target size gives, lambda (kd_weight) and Gamma (adaptive_size)."""
    workers: Count = 1
    """How many work on the trials at the same time: as processes side by side, in the pipeline as pods, which then need
    `storage`. `trials` are those of all together."""
    storage: str | None = None
    """URL of a data base for workers on several machines; null: that of the environment's FLEXFLEET_TUNE_STORAGE, else
    a journal in the study's folder."""


class PublishConfig(Section):
    """What becomes of a finished run."""

    models: bool = False
    """Export each reported level (safetensors, ONNX) and register it in MLflow, with one model that answers for any."""
    name: str | None = None
    """Of the registered models; null: <experiment>-<algorithm>."""
    onnx: bool = True
    dvc: str | None = None
    """Remote (s3://bucket/prefix, or a folder) to which DVC pushes partition, pool, model and report; null: none."""


class Config(Section):
    schema_version: Literal[1] = 1
    seed: int = 0
    dataset: DatasetConfig = DatasetConfig()
    partition: PartitionConfig = PartitionConfig()
    model: dict[str, Any] = Field(default={"name": "small_cnn"})
    """name (registered, or package.module:NAME) and the network's own options."""
    fleet: FleetConfig = FleetConfig()
    pretrain: PretrainConfig = PretrainConfig()
    algorithm: dict[str, Any] = Field(default={"name": "flexfl"})
    """name (registered, or package.module:NAME) and the algorithm's own hyper-parameters."""
    training: Training = Training(fraction=0.3, epochs=5, batch_size=10, lr=0.05)
    rounds: RoundsConfig = RoundsConfig()
    run: RunConfig = RunConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    tracking: TrackingConfig = TrackingConfig()
    publish: PublishConfig = PublishConfig()
    tune: TuneConfig = TuneConfig()


# ----------------------------------------------------------------------------------------------- reading it
def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The defaults, a YAML file on top (None: no file), `a.b=value` overrides on top of that; checked.

    The order of overrides does not matter: a model's or an algorithm's name counts before its options.
    """
    values: Any = {}
    if path is not None:
        try:
            values = read_yaml(Path(path).read_text()) or {}
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"the configuration {path} is no text: {error}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a mapping of sections is expected, got {type(values).__name__}")
    values = _merge(Config().model_dump(mode="json"), values)
    pairs = [pair_of(override) for override in overrides]
    for key, value in sorted(pairs, key=lambda pair: pair[0] not in ("model.name", "algorithm.name")):
        set_path(values, key, value)
    return parse(values)


def pair_of(override: str) -> tuple[str, Any]:
    """`a.b=value`, as after --set."""
    key, sign, text = override.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"--set takes a.b=value, got {_short(override)}")
    try:
        return key.strip(), read_yaml(text)
    except yaml.YAMLError as error:
        said = masked(f"--set {override[:200]}: the value is not valid YAML: {error}")
        raise ConfigError(said) from error


def set_path(values: dict[str, Any], path: str, value: Any) -> None:
    """Sets a dotted path in nested mappings. A new `name` of the model or algorithm drops the old one's options."""
    *parents, last = path.split(".")
    here = values
    for part in parents:
        here = here.setdefault(part, {})
        if not isinstance(here, dict):
            raise ConfigError(f"{path}: {part!r} is a value, not a section")
    if parents in (["model"], ["algorithm"]) and last == "name" and here.get("name") != value:
        here.clear()
    here[last] = value


def parse(values: Mapping[str, Any]) -> Config:
    """The defaults with `values` on top, section by section. Raises ConfigError for what is wrong: what arrived, what
    was expected, what to do."""
    try:
        check_plain(values)
        values = _merge(Config().model_dump(mode="json"), values)
        config = Config.model_validate_json(json.dumps(_with_named_fleet(values)))
    except ValidationError as error:
        raise ConfigError("; ".join([_explain(error, Config), *_unknown_names(values)])) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the configuration holds a value that is not plain data: {error}") from error
    wrong = _unknown_names(values)
    for look in (algorithm, _check_model_options):
        try:
            look(config)
        except ConfigError as error:
            wrong.append(str(error))
    if not config.run.devices:
        wrong.append("run.devices is empty: name at least one torch device, e.g. [cpu]")
    if wrong:
        raise ConfigError("; ".join(dict.fromkeys(wrong)))
    return config


def _unknown_names(values: Mapping[str, Any]) -> list[str]:
    """What is said of a data set, network or algorithm that nobody has, whatever else is wrong."""
    from fl_engine.algorithms import ALGORITHMS
    from fl_engine.datasets import DATASETS
    from fl_engine.models import MODELS

    known: dict[str, tuple[Mapping[str, Any], str]] = {
        "dataset": (DATASETS, "data set"), "model": (MODELS, "model"), "algorithm": (ALGORITHMS, "algorithm")
    }  # fmt: skip
    wrong = []
    for section, (registry, what) in known.items():
        name = values[section].get("name") if isinstance(values.get(section), Mapping) else None
        if isinstance(name, str) and ":" not in name:
            try:
                resolve(registry, name, what)
            except ConfigError as error:
                wrong.append(str(error))
    return wrong


def _with_named_fleet(values: dict[str, Any]) -> dict[str, Any]:
    """`fleet.tiers: 8:1:1` written out, so that a run's record says what its fleet was."""
    section = values.get("fleet")
    if not isinstance(section, Mapping) or not isinstance(section.get("tiers"), str):
        return values
    tiers = TypeAdapter(tuple[Tier, ...]).dump_python(named(section["tiers"]), mode="json")
    return {**values, "fleet": {**section, "tiers": tiers}}


def _merge(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A section that is given in part keeps the other defaults, but not those of another model or algorithm."""
    out = dict(defaults)
    for key, value in values.items():
        old = defaults.get(key)
        if not isinstance(old, dict) or not isinstance(value, Mapping):
            out[key] = value
        elif key in ("model", "algorithm") and value.get("name", old["name"]) != old["name"]:
            out[key] = dict(value)
        else:
            out[key] = _merge(old, value)
    return out


def _explain(error: ValidationError, root: Any, prefix: str = "") -> str:
    """One clause for each thing that is wrong, by its dotted name below `prefix`."""
    lines = []
    for e in error.errors():
        *parents, last = e["loc"] or ("",)
        names, known = _walk(root, parents)
        path = prefix + ".".join([*names, str(last)])
        if e["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            lines.append(f"unknown parameter {path!r}{nearest(str(last), known)}")
        elif e["type"] == "union_tag_not_found":
            lines.append(f"{path}.name is missing: say which one, got {_short(e['input'])}")
        elif e["type"] == "union_tag_invalid":
            tag, tags = e["ctx"]["tag"], e["ctx"]["expected_tags"].replace("'", "")
            lines.append(f"{path}.name: no {tag!r}{nearest(tag, tags.split(', '))}; there are {tags}")
        else:
            lines.append(f"{path}: {e['msg'][:1].lower()}{e['msg'][1:]}, got {_short(e['input'])}")
    return "; ".join(dict.fromkeys(lines))


def _short(value: Any) -> str:
    text = masked(repr(value))
    return text if len(text) <= 200 else f"{text[:200]}..."


def _walk(root: Any, location: Sequence[Any]) -> tuple[list[str], list[str]]:
    """The dotted name of a place in a configuration, and the parameters that exist there. A union's tag (the `name` of
    a selection) is a step of pydantic's path, and none of what a person writes."""
    here, names = root, []
    for part in location:
        members = [m for m in get_args(here) if is_dataclass(m)]
        tagged = [m for m in members if getattr(m, "name", None) == part]
        if tagged:
            here = tagged[0]
            continue
        names.append(str(part))
        if isinstance(part, int):
            here = next(iter(members), None)
        elif isinstance(here, type) and (is_dataclass(here) or issubclass(here, BaseModel)):
            here = get_type_hints(here).get(str(part))
        else:
            here = None
        if get_origin(here) is Annotated:
            here = get_args(here)[0]
    if is_dataclass(here):
        return names, [f.name for f in fields(here)]
    return names, list(here.model_fields) if isinstance(here, type) and issubclass(here, BaseModel) else []


# ------------------------------------------------------------------------------------------- what it names
def resolve(registry: Mapping[str, T], name: str, what: str) -> T:
    """A registered thing, or the object that `package.module:NAME` points to."""
    if name in registry:
        return registry[name]
    module, sign, attribute = name.partition(":")
    if not sign:
        hint = nearest(name, registry)
        raise ConfigError(f"no {what} named {name!r}{hint}; your own is given as package.module:NAME")
    if os.getcwd() not in sys.path:  # a module of one's own lies where the command is typed
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]
    except Exception as error:  # of somebody else's code
        raise ConfigError(f"{what} {name!r} cannot be imported: {type(error).__name__}: {error}") from error


def algorithm(config: Config) -> Algorithm:
    """The configured algorithm with its hyper-parameters checked."""
    from fl_engine.algorithms import ALGORITHMS

    kind = _kind(ALGORITHMS, config.algorithm, "algorithm", ("pool", "init", "plan", "task", "merge"))
    options = {k: v for k, v in config.algorithm.items() if k != "name"}
    known = [f.name for f in fields(kind) if f.name != "training"]  # type: ignore[arg-type]
    _check_names("algorithm", options, known)
    training = TypeAdapter(Training).dump_python(config.training, mode="json")
    training["fraction"] *= config.rounds.over_provision
    if training["fraction"] > 1:
        raise ConfigError(
            f"training.fraction = {config.training.fraction} of the clients, times rounds.over_provision = "
            f"{config.rounds.over_provision}, is more than all: lower one of them"
        )
    try:
        found: Algorithm = TypeAdapter(kind).validate_json(json.dumps({**options, "training": training}))
    except ValidationError as error:
        raise ConfigError(_explain(error, kind, "algorithm.")) from error
    privacy.check_terms(found, config.rounds)
    ambient = config.run.backend == "kubernetes" and config.kubernetes.access == "ambient"
    ours = kind in ALGORITHMS.values()
    stranded = config.run.remote is not None and config.run.backend != "kubernetes" and config.run.secrets is None
    privacy.check_run(found, known=ours, reference=config.pretrain.reference, ambient=ambient, stranded=stranded)
    return found


def model(config: Config, input_chw: tuple[int, int, int], classes: int) -> ModelFamily:
    """The configured network for these images, with what the configured algorithm changes in it (early exits). Raises
    ConfigError, ModelError or PoolError."""
    chosen = algorithm(config)
    family = build_model(config.model, input_chw, classes)
    return chosen.network(family) if isinstance(chosen, ChoosesNetwork) else family


def build_model(model: Mapping[str, Any], input_chw: tuple[int, int, int], classes: int) -> ModelFamily:
    """The network of a `model` section, for these images. Raises ConfigError or ModelError."""
    values = {**{k: v for k, v in model.items() if k != "name"}, "input_chw": input_chw, "classes": classes}
    try:
        family: ModelFamily = TypeAdapter(_model_kind(model)).validate_json(json.dumps(values), strict=True)
        return family
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, FlexfleetError):
            raise cause from error
        raise ConfigError(f"model.{'.'.join(str(p) for p in first['loc'])}: {first['msg']}") from error


def cut_seed(config: Config) -> int:
    """The seed of which samples are used, and of who holds them."""
    return config.seed if config.partition.seed is None else config.partition.seed


def min_side(config: Config) -> int:
    """The smallest image side that the configured network takes."""
    return _model_kind(config.model).min_hw


def _model_kind(section: Mapping[str, Any]) -> type[ModelFamily]:
    from fl_engine.models import MODELS

    return _kind(MODELS, section, "model", ("min_hw", "layout", "module", "prunable"))


def _kind(registry: Mapping[str, T], section: Mapping[str, Any], what: str, wanted: Sequence[str]) -> T:
    """What a section names. Raises ConfigError unless it has what is asked of it."""
    kind = resolve(registry, _name_in(section, what), what)
    if not (isinstance(kind, type) and is_dataclass(kind) and all(hasattr(kind, name) for name in wanted)):
        raise ConfigError(
            f"{what}.name = {section['name']!r} is {kind!r}; a dataclass is expected, with the options as its fields "
            f"and with {', '.join(wanted)}"
        )
    return kind


def _check_model_options(config: Config) -> None:
    kind: Any = _model_kind(config.model)
    known = [f.name for f in fields(kind) if f.name not in ("input_chw", "classes")]
    _check_names("model", {k: v for k, v in config.model.items() if k != "name"}, known)


def _check_names(section: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in options:
        if key not in known:
            raise ConfigError(f"unknown parameter {f'{section}.{key}'!r}{nearest(key, known)}")


def _name_in(section: Mapping[str, Any], what: str) -> str:
    name = section.get("name")
    if not isinstance(name, str):
        raise ConfigError(f"{what}.name is missing: name one, e.g. {what}: {{name: ...}}")
    return name


PRIVATE = ("tracking", "tune", "publish")
"""Sections whose addresses are for whoever runs a run, and for nobody who reads its files."""


def public(config: Config) -> Config:
    """The configuration as files may hold it that others read: the addresses of PRIVATE say no user and no password."""

    def hidden(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: hidden(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [hidden(inner) for inner in value]
        return masked(value) if isinstance(value, str) else value

    values = config.model_dump(mode="json")
    return Config.model_validate_json(json.dumps(values | {name: hidden(values[name]) for name in PRIVATE}))


def shown(config: Config) -> dict[str, Any]:
    """`flatten` for others to read: no address shows who asks."""
    return {key: masked(value) if isinstance(value, str) else value for key, value in flatten(config).items()}


def flatten(config: Config) -> dict[str, Any]:
    """Dotted names to plain values, for MLflow's parameters and for saying what differs between two runs."""
    out: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else key, inner)
        elif not isinstance(value, dict):
            out[prefix] = value

    walk("", config.model_dump(mode="json"))
    return out
