"""The suite that a regression runs: a file in git, `<name>.yaml`, with its reference figures in `<name>.json` beside
it.

The settings are the defaults, overridden by the suite's and the case's settings: no params.yaml changes a figure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fl_engine.core.errors import ConfigError, masked
from fl_engine.core.fields import Moves
from fl_engine.core.text import read_yaml
from flexfleet.config import Config, load_config, moves
from flexfleet.config.comparison_runs import Entry, entries_from, label_overrides, labels_of
from flexfleet.config.explain import explain
from flexfleet.config.overrides import Overrides, on_top
from flexfleet.files.artifacts import Artifact
from flexfleet.tracking.server import platform_experiment

METRICS = {
    "avg": "accuracy, mean over the levels",
    "full": "accuracy of the full model",
    "rounds": "rounds to the accuracy",
    "mb": "MB sent to the accuracy",
    "peak_mb_rounds": "peak memory of the rounds, MB",
    "pace": "seconds by those of a plain loop",
}
HIGHER = ("avg", "full")
"""Metrics that are better when higher. Their thresholds are absolute; all other thresholds are shares of the earlier
figure."""
OF_MACHINE = ("peak_mb_rounds", "pace")
"""Metrics that can only be compared between equal machines."""
MAY_SET = (Moves.EXECUTION, Moves.PLACE)
"""What `--set` may change: nothing in it changes a figure, except that run.backend changes memory, which is compared
with figures of the same backend alone (`Figures.machine`)."""


class NightlyCase(BaseModel):
    """Algorithms on one task."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    algorithms: str
    """As `flexfleet compare --algorithms`."""
    to: float = Field(gt=0, le=1)
    """Accuracy of the full model until which rounds and MB are counted."""
    settings: dict[str, Any] = {}
    """Dotted names; `label:a.b` for one label alone."""


class NightlySuite(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    seeds: tuple[int, ...] = Field(min_length=3)
    settings: dict[str, Any] = {}
    cases: dict[str, NightlyCase] = Field(min_length=1)
    thresholds: dict[str, float]
    """The largest difference that never fails, by metric of METRICS."""

    @field_validator("thresholds")
    @classmethod
    def _each(cls, value: dict[str, float]) -> dict[str, float]:
        if value.keys() != METRICS.keys() or not all(v > 0 for v in value.values()):
            raise ValueError(f"a threshold above 0 is expected for each of {', '.join(METRICS)}, no other")
        return value


class OfLabel(BaseModel):
    """The measurements of one label; `values` by metric, one for each seed, for pace one for each turn."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    task: str
    """Digest of the settings without the label's own hyper-parameters: figures with other digests are not compared."""
    values: dict[str, Annotated[tuple[float, ...], Field(min_length=2)]]
    curve: tuple[tuple[int, float, tuple[float, ...], tuple[float, ...]], ...]
    """(round, mean MB sent so far, avg of each seed, full of each seed); no avg where one level is reported."""
    mlflow_runs: tuple[str, ...] = ()
    metric: str = "accuracy"
    """The task's, which avg and full are values of."""


class NightFigures(Artifact):
    """figures.json of a night, and a suite's reference."""

    suite: str
    id: str
    when: str
    commit: str | None
    machine: dict[str, str]
    """Machine, kind of process and backend: memory and pace are compared only where it is equal."""
    seeds: tuple[int, ...]
    labels: dict[str, OfLabel]
    """By `<case>/<label>`."""

    @model_validator(mode="after")
    def _a_value_for_each_seed(self) -> NightFigures:
        for label, of in self.labels.items():
            for metric, values in of.values.items():
                if metric != "pace" and len(values) != len(self.seeds):
                    raise ValueError(f"{metric} of {label} must have {len(self.seeds)} values, a value for each seed")
        return self


FOLDER = Path(str(resources.files("flexfleet.experiments").joinpath("nightly_suites")))


def path_of(suite: str) -> Path:
    """A file, or the name of a shipped suite. Raises ConfigError."""
    if suite.endswith((".yaml", ".yml")):
        return Path(suite)
    if suite not in names():
        raise ConfigError(f"no suite is named {suite!r}: {', '.join(names())}, or a file with .yaml")
    return FOLDER / f"{suite}.yaml"


def names() -> list[str]:
    """The names of the suites that come with flexfleet."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(path: Path) -> NightlySuite:
    """Raises ConfigError for what is wrong in the file."""
    try:
        return NightlySuite.model_validate(read_yaml(path.read_text(encoding="utf-8")) or {})
    except OSError as error:
        raise ConfigError(f"cannot read the suite {path}: {error.strerror}") from error
    except (ValidationError, yaml.YAMLError, UnicodeDecodeError) as error:
        said = explain(error, NightlySuite) if isinstance(error, ValidationError) else str(error)
        raise ConfigError(f"{path} is no suite: {masked(said)}") from error


def runs_of(
    suite: NightlySuite, name: str, seeds: tuple[int, ...], overrides: Mapping[str, Any], id: str
) -> dict[str, list[Entry]]:
    """Return every run, by case. Raises ConfigError."""
    for path in overrides:
        if "." not in path or moves(path) not in MAY_SET:
            raise ConfigError(
                f"--set {path}: a suite says what is measured; only what moves no figure can be set, as where things "
                "are kept (run.store, run.remote, tracking, publish, dataset.root) and how they are executed "
                "(kubernetes, and run.backend: memory and pace are compared with nights of the same backend alone). "
                "For another task write a suite of your own"
            )

    def load_one(overrides: Overrides) -> Config:
        config = load_config(None, overrides, stored=True)
        given = config.tracking
        if config.publish.models:
            raise ConfigError(
                "publish.models must be false in a nightly regression run, which registers its models itself if it "
                "passes. Remove the setting."
            )
        if given.experiment is None and platform_experiment(given.mlflow) is None:
            given = given.model_copy(update={"experiment": f"regression-{name}"})
        return config.model_copy(update={"tracking": given})

    out = {}
    for case, about in suite.cases.items():
        settings = label_overrides(labels_of(about.algorithms), suite.settings | about.settings)
        labels = {label: on_top(own, overrides) for label, own in settings.items()}
        out[case] = entries_from(labels, seeds, load_one, f"{id}-{case}")
    return out


def task_of(suite: NightlySuite, case: str, label: str) -> str:
    """The digest of what a label's figures are of: settings, accuracy, and the algorithm where its name is not the
    label (so the digests of labels without a name of their own are those of earlier versions)."""
    settings = {}
    for key, value in (suite.settings | suite.cases[case].settings).items():
        owner, sign, path = key.partition(":")
        if not sign:
            settings[key] = value
        elif owner.strip() == label and not path.strip().startswith("algorithm."):
            settings[path.strip()] = value
    own: dict[str, Any] = {"settings": settings, "to": suite.cases[case].to}
    if (name := labels_of(suite.cases[case].algorithms).get(label, label)) != label:
        own["algorithm"] = name
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:16]
