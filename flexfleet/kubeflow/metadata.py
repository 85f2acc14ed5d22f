"""A few facts about an artifact, as plain values, for Kubeflow's pages *Artifacts* and *Compare runs*."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fl_engine.data.partition_files import MANIFEST, read_manifest
from flexfleet.files.artifacts import BareHistory, EvaluationFile, PoolFile, Result, RunFile


def of_partition(folder: Path) -> dict[str, Any]:
    """Facts about the output of the partition step."""
    manifest = read_manifest(folder / MANIFEST)
    sizes = manifest.client_samples
    return {
        "rule": manifest.rule,
        "clients": len(sizes),
        "samples": sum(sizes),
        "smallest_client": min(sizes),
        "largest_client": max(sizes),
        "data_sha256": manifest.data_sha256,
    }


def of_pool(folder: Path) -> dict[str, Any]:
    """Facts about the output of the model_pool step: the levels and their sizes."""
    pool = PoolFile.read(folder / "pool.json")
    return {"algorithm": pool.algorithm, "network": pool.model} | {
        f"{level.name}/{what}": value
        for level in pool.levels
        for what, value in (("parameters", level.params), ("share", level.share), ("bytes", level.bytes))
    }


def of_finished(folder: Path) -> dict[str, Any]:
    """Facts about a run of a comparison or a night. They are few and short: the task that gathers all runs is started
    with those of every run in one argument (`overrides.MOST_RUNS`)."""
    result = Result.read(folder / "result.json")
    told = {"run_id": result.run_id, "model_sha256": result.model_sha256}
    return told | {name: result.metrics[name] for name in ("avg", "full")}


def of_model(folder: Path, evaluation: Path | None = None) -> dict[str, Any]:
    """Facts about a run's outcome; with its metrics if it is evaluated."""
    run, history = RunFile.read(folder / "run.json"), BareHistory.read(folder / "history.json")
    told: dict[str, Any] = {
        "run_id": run.run_id, "algorithm": run.config["algorithm"]["name"], "dataset": run.config["dataset"]["name"],
        "network": run.config["model"]["name"], "seed": run.config["seed"], "rounds": len(history.rounds),
        "model_sha256": history.model_sha256, "partition_sha256": run.partition_sha256, "pool_sha256": run.pool_sha256,
    }  # fmt: skip
    if evaluation is not None:
        scores = EvaluationFile.read(evaluation / "evaluation.json")
        told |= {"avg": scores.avg, "full": scores.full}
        for name, score in scores.levels.items():
            told |= {f"{metric}/{name}": value for metric, value in score.metrics.items()}
    return told
