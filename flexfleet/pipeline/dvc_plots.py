"""Run step 5 (the evaluation) for DVC, and write the files that `dvc metrics` and `dvc plots` show.

All values are reproducible, so that `dvc metrics diff` shows only changes of the experiment. Wall-clock times are
therefore left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from fl_engine.rounds.timing import waste
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.store import FolderStore
from flexfleet.files.artifacts import ConfusionFile, EvaluationFile, History
from flexfleet.pipeline.evaluate import evaluate
from flexfleet.pipeline.prepare import Resolved

METRICS, ROUNDS, SAMPLES = "metrics.json", "rounds.json", "samples.json"


def evaluate_for_dvc(resolved: Resolved, run: Path, partition: Path, pool: Path, out: Path) -> Path:
    """Write the files of `evaluate`, and METRICS, ROUNDS and SAMPLES, into `out`. Raises the errors of `evaluate`."""
    written = evaluate(resolved, run, partition, pool, out)
    rows = History.read(run / "history.json").rounds
    confusion = ConfusionFile.read(out / "confusion.json")
    files = {
        METRICS: metrics(EvaluationFile.read(written), rows),
        ROUNDS: curves(rows),
        # DVC cannot read an empty list, but it accepts an object without a list.
        SAMPLES: {"samples": samples} if (samples := list(predictions(confusion))) else {},
    }
    for name, content in files.items():
        FolderStore(out).put(name, json.dumps(content).encode())
    return written


def metrics(evaluation: EvaluationFile, rows: Sequence[Row]) -> dict[str, float | None]:
    """Return the result and the cost of a run. `seconds_simulated` is None if the fleet has no clock, and `loss` is the
    test loss of the largest level."""
    rounds = [row.metrics for row in rows]
    best = max((each for each in rounds if "avg" in each), key=lambda each: each["avg"])
    seconds = [each["seconds_simulated"] for each in rounds if "seconds_simulated" in each]
    return {
        "avg": evaluation.avg,
        "full": evaluation.full,
        "loss": list(evaluation.levels.values())[-1].loss,
        "best_avg": best["avg"],
        "best_full": best["full"],
        "bytes_down": int(sum(each["bytes_down"] for each in rounds)),
        "bytes_up": int(sum(each["bytes_up"] for each in rounds)),
        "waste": waste(rounds),
        "seconds_simulated": sum(seconds) if seconds else None,
        "clients_failed": int(sum(each["clients_failed"] for each in rounds)),
    }


def curves(rows: Sequence[Row]) -> list[dict[str, float]]:
    """Return the scores after each evaluated round, and the megabytes that were sent in both directions until then."""
    sent = accumulate((row.metrics["bytes_down"] + row.metrics["bytes_up"]) / 1e6 for row in rows)
    return [
        {"round": row.round + 1, "mb": mb, "avg": row.metrics["avg"], "full": row.metrics["full"]}
        for row, mb in zip(rows, sent, strict=True)
        if "avg" in row.metrics
    ]


def predictions(confusion: ConfusionFile) -> Iterator[dict[str, Any]]:
    """Yield the true and the predicted class of each test sample, for the largest level. DVC's template counts them."""
    matrix = list(confusion.levels.values())[-1] if confusion.levels else ()
    names = confusion.names or range(len(matrix))
    for actual, counts in zip(names, matrix, strict=True):
        for predicted, count in zip(names, counts, strict=True):
            yield from [{"actual": actual, "predicted": predicted}] * count
