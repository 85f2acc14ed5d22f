"""Read the suite of a nightly regression run from `<name>.yaml`. The reference is `<name>.json` in the same folder.

Settings of the suite override the defaults, and settings of a case override the suite. params.yaml is not read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from fl_engine.core.errors import ConfigError
from fl_engine.core.fields import Moves
from fl_engine.core.records import Strict
from fl_engine.storage.s3 import open_store
from fl_engine.storage.store import FolderStore, Store
from flexfleet.config import Config, load_config, moves
from flexfleet.config.comparison_runs import PlannedRun, by_label, entries_from, label_overrides, labels_of
from flexfleet.config.dotted import Overrides, on_top
from flexfleet.config.run_names import check_name
from flexfleet.experiments.published_suites import read_suite
from flexfleet.tracking.server import named_experiment, platform_experiment

FOLDER = Path(__file__).with_name("nightly_suites")
METRICS = {
    "avg": "accuracy, mean over the levels",
    "full": "accuracy of the full model",
    "rounds": "rounds to the accuracy",
    "mb": "MB sent to the accuracy",
    "peak_mb_rounds": "peak memory of the rounds, MB",
    "pace": "seconds of a round",
}
MAY_SET = (Moves.EXECUTION, Moves.PLACE)
"""Kinds of parameters that `--set` may change, because these parameters do not affect metrics. `run.backend` affects
the memory, but memory is only compared between runs with the same backend."""


class NightlyCase(Strict, strict=True):
    """A case of a suite: several algorithms on one task."""

    algorithms: str
    """Algorithms in the same syntax as `flexfleet compare --algorithms`."""
    to: float = Field(gt=0, le=1)
    """Target accuracy of the full model. The metrics rounds and mb are counted until this accuracy is reached."""
    settings: dict[str, Any] = Field(default={})
    """Settings by dotted name. A setting `label:a.b` applies only to the variant with this label."""


class NightlySuite(Strict):
    seeds: tuple[int, ...] = Field(min_length=3)
    settings: dict[str, Any] = Field(default={})
    cases: dict[str, NightlyCase] = Field(min_length=1)
    thresholds: dict[str, float]
    """Map each metric to its threshold. A smaller difference always passes."""

    @field_validator("thresholds")
    @classmethod
    def _each(cls, value: dict[str, float]) -> dict[str, float]:
        if value.keys() != METRICS.keys() or not all(v > 0 for v in value.values()):
            raise ValueError(f"`thresholds` must have a value greater than 0 for each of {', '.join(METRICS)}")
        return value


@dataclass(frozen=True)
class NightlyRun:
    """A nightly regression run: the suite and its runs."""

    path: Path
    suite: NightlySuite
    id: str
    runs: Mapping[str, list[PlannedRun]]
    """Map cases to runs in the order of the seeds."""

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(entry.seed for entry in next(iter(self.runs.values()))))

    @property
    def tasks(self) -> dict[str, str]:
        """Map `<case>/<label>` to the digest of its settings (see `task_of`)."""
        return {
            f"{case}/{entry.label}": task_of(self.suite, case, entry.label)
            for case, entries in self.runs.items()
            for entry in entries
        }

    @property
    def config(self) -> Config:
        """Configuration of the first run, which determines the stores and the tracking of all runs."""
        return next(iter(self.runs.values()))[0].config

    @property
    def folder(self) -> Path:
        return Path(self.config.run.store).with_name(self.id)

    @property
    def store(self) -> Store:
        """Store of the nightly regression run: its folder, or a prefix in `run.remote` if `run.remote` is set."""
        remote = self.config.run.remote
        return FolderStore(self.folder) if remote is None else open_store(f"{remote.rpartition('/')[0]}/{self.id}")

    @property
    def reference(self) -> Path:
        return self.path.with_suffix(".json")


def nightly_run(path: Path, id: str, overrides: Mapping[str, Any], more_seeds: tuple[int, ...] = ()) -> NightlyRun:
    """Read a suite and plan its runs. Raises ConfigError if the suite or an override is invalid."""
    for name in overrides:
        if "." not in name or moves(name) not in MAY_SET:
            raise ConfigError(
                f"`{name}` cannot be set for a nightly regression run, because it would change the results. Change the "
                "suite, or set only parameters for storage and execution",
                path=name,
            )
    suite = read_suite(path, NightlySuite)

    def load_one(given: Overrides) -> Config:
        config = load_config(None, given, stored=True)
        if config.publish.models:
            raise ConfigError.at(
                "`publish.models` must be false in a nightly regression run. Models are registered only if the "
                "run passes. Remove the setting"
            )
        tracking = config.tracking
        if not (tracking.experiment or named_experiment() or platform_experiment(tracking.mlflow)):
            tracking = tracking.model_copy(update={"experiment": f"regression-{path.stem}"})
        return config.model_copy(update={"tracking": tracking})

    runs, seeds = {}, tuple(sorted({*suite.seeds, *more_seeds})) if more_seeds else suite.seeds
    for name, case in suite.cases.items():
        settings = label_overrides(labels_of(case.algorithms), suite.settings | case.settings)
        labels = {label: on_top(own, overrides) for label, own in settings.items()}
        runs[name] = entries_from(labels, seeds, load_one, f"{id}-{name}")
    return NightlyRun(path, suite, check_name(id, "the id of a nightly regression run"), runs)


def task_of(suite: NightlySuite, case: str, label: str) -> str:
    """Return a digest of the target accuracy and the variant's settings. Options of the algorithm are excluded, because
    the gate must detect whether a change of these options makes a metric worse. The algorithm's name is included if it
    differs from the label."""
    labels = labels_of(suite.cases[case].algorithms)
    given = by_label(suite.settings | suite.cases[case].settings, labels)
    settings = given[None] | {path: v for path, v in given[label].items() if not path.startswith("algorithm.")}
    own: dict[str, Any] = {"settings": settings, "to": suite.cases[case].to}
    if labels[label] != label:
        own["algorithm"] = labels[label]
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:16]
