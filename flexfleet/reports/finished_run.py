"""Read the folders of finished runs, and compare the runs' parameters.

avg is the mean of the main metric (accuracy, R2) over the reported levels, and full is the metric of the largest model.
`best` is the round with the highest avg. This round is selected on test data, as in the papers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError, IntegrityError, masked
from fl_engine.core.fields import Moves
from fl_engine.data.partition import PartitionManifest, read_manifest
from fl_engine.datasets import stored_data
from fl_engine.models.onnx_precisions import Precisions
from fl_engine.rounds.timing import means, waste
from fl_engine.storage.checkpoints import Row
from flexfleet.config import moves
from flexfleet.config.dotted import leaves
from flexfleet.files.artifacts import Apoz, ConfusionFile, EvaluationFile, Forecast, History, PoolFile, RunFile
from flexfleet.files.measure import Measure
from flexfleet.files.run_folder import check_inputs, check_is_folder, check_manifest
from flexfleet.files.run_status import Tally, tally_of
from flexfleet.reports import precisions

COMPARED = (Moves.RESULT, Moves.LENGTH, Moves.ANSWERS)
"""Kinds of parameters that should have the same value in compared runs. Parameters of the algorithm are excluded."""


@dataclass(frozen=True)
class FinishedRun:
    """Contents of a run folder. `best` is the row of the round with the highest avg."""

    file: RunFile
    config: dict[str, Any]
    """Map the dotted names of all parameters to their values."""
    rows: tuple[Row, ...]
    history: History
    pool: PoolFile
    apoz: Apoz
    partition: PartitionManifest
    evaluation: EvaluationFile
    precisions: tuple[Precisions, ...]
    """Measurements of the exported levels, from the smallest to the largest level."""
    confusion: ConfusionFile | None
    forecast: Forecast | None
    best: Row

    def total(self, metric: str) -> float:
        """Return the sum of a metric over all rounds."""
        return sum(row.metrics[metric] for row in self.rows)

    @property
    def dataset(self) -> str:
        """Name of the data set for display."""
        return stored_data.display_name(str(self.config.get("dataset.name", "?")), self.config.get("dataset.root"))

    @property
    def measure(self) -> Measure:
        return Measure(self.evaluation.metric)

    @property
    def uniformity(self) -> float | None:
        """Mean spread of the clients' finishing times in simulated seconds; None if it was not measured."""
        return means([row.metrics for row in self.rows], ("uniformity",)).get("uniformity")

    @property
    def tally(self) -> Tally:
        return tally_of(row.metrics for row in self.rows)

    @property
    def waste(self) -> float:
        """Fraction of the weights sent to clients that clients did not send back."""
        return waste([row.metrics for row in self.rows])


def load(folder: Path) -> FinishedRun:
    """Read a finished run. Raises ConfigError if `folder` is not a folder, and IntegrityError if a file is missing or
    invalid."""
    check_is_folder(folder)
    check_manifest(folder)
    if not (folder / "evaluation.json").is_file():
        raise IntegrityError(
            f"{folder} is not a finished run: evaluation.json does not exist. Finish the run with "
            "`flexfleet run --resume` and the same --run-id"
        )
    file, history = RunFile.read(folder / "run.json"), History.read(folder / "history.json")
    evaluation = EvaluationFile.read(folder / "evaluation.json")
    check_inputs(folder, file)
    scores = folder / "pretrain" / "apoz.json"
    rows = history.rounds
    config = {k: masked(v) if isinstance(v, str) else v for k, v in leaves(file.config).items()}
    if evaluation.rounds != len(rows):
        raise IntegrityError(
            f"{folder / 'evaluation.json'} is from round {evaluation.rounds}, but history.json has {len(rows)} rounds. "
            "Run the evaluate step again"
        )
    return FinishedRun(
        file=file,
        config=config,
        rows=rows,
        history=history,
        pool=PoolFile.read(folder / "pool" / "pool.json"),
        apoz=Apoz.read(scores) if scores.is_file() else Apoz(layers=()),
        partition=read_manifest(folder / "partition" / "partition.json"),
        evaluation=evaluation,
        precisions=precisions.of_run(folder, list(evaluation.levels), history.model_sha256),
        forecast=Forecast.read(folder / "forecast.json") if (folder / "forecast.json").is_file() else None,
        confusion=ConfusionFile.read(folder / "confusion.json") if (folder / "confusion.json").is_file() else None,
        best=max((r for r in rows if "avg" in r.metrics), key=lambda r: r.metrics["avg"]),
    )


def load_all(folders: Sequence[Path]) -> list[FinishedRun]:
    """Read the folders of finished runs for a report. Raises the errors of `load`, and ConfigError if `folders`
    contains a run twice, or if the runs have different metrics."""
    twice = [str(f) for f, n in Counter(f.resolve() for f in folders).items() if n > 1]
    if twice:
        raise ConfigError(f"run folders must not be repeated, got {', '.join(twice)}", code="config.given_twice")
    runs = [load(folder) for folder in folders]
    measure_of(runs)
    return runs


def measure_of(runs: Sequence[FinishedRun]) -> Measure:
    """Return the main metric of the runs. Raises ConfigError if the runs have different main metrics."""
    metrics = {run.evaluation.metric: run.file.run_id for run in runs}
    if len(metrics) > 1:
        found = ", ".join(f"{metric} ({run_id})" for metric, run_id in metrics.items())
        raise ConfigError(f"the runs must have the same metric, got {found}", code="config.not_comparable")
    return runs[0].measure


def labels(runs: Sequence[FinishedRun]) -> list[str]:
    """Return a display name for each run. The names are the algorithms' names if all runs have different algorithms,
    otherwise the run IDs. Run IDs that occur more than once are numbered."""
    names = [r.pool.algorithm for r in runs]
    if len(set(names)) < len(names):
        names = [r.file.run_id for r in runs]
    many, out = Counter(names), []
    for i, name in enumerate(names):
        out.append(name if many[name] == 1 else f"{name} #{names[: i + 1].count(name)}")
    return out


def is_compared(key: str) -> bool:
    """Return whether a parameter should have the same value in all compared runs."""
    return key not in ("seed", "schema_version") and moves(key) in COMPARED


def differences(runs: Sequence[FinishedRun]) -> list[str]:
    """Describe the parameters, seeds and partitions that differ between the runs, with one line for each difference.
    Parameters of the algorithm, and parameters that only affect rounding errors, are not compared."""
    named = dict(zip(labels(runs), runs, strict=True))
    lines, seeds = [], [plain(run.config.get("seed")) for run in runs]
    for key in dict.fromkeys(key for run in runs for key in run.config):
        if not is_compared(key) or key.startswith("algorithm"):
            continue
        names: dict[str, list[str]] = {}
        for name, run in named.items():
            names.setdefault(plain(run.config.get(key)), []).append(name)
        if len(names) > 1:
            lines.append(f"{key}: " + "; ".join(f"{value} ({', '.join(own)})" for value, own in names.items()))
    if len(set(seeds)) > 1:
        lines.append("seed: " + ", ".join(f"{seed} ({name})" for seed, name in zip(seeds, named, strict=True)))
    if not lines and len({run.file.partition_sha256 for run in runs}) > 1:
        digests = ", ".join(f"{run.file.partition_sha256[:12]} ({name})" for name, run in named.items())
        lines.append(f"partition (sha256): {digests}")
    return lines


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
