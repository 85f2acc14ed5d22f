"""What Kubeflow's pages *Artifacts* and *Compare runs* tell of an artifact: a few facts, as plain values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fl_engine.data.partitioning import MANIFEST, read_manifest
from flexfleet.files.artifacts import EvaluationFile, History, PoolFile, RunFile


def of_partition(folder: Path) -> dict[str, Any]:
    """Of what the partition step wrote."""
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
    """Of what the model_pool step wrote: the levels and their sizes."""
    pool = PoolFile.read(folder / "pool.json")
    return {"algorithm": pool.algorithm, "network": pool.model} | {
        f"{level.name}/{what}": value
        for level in pool.levels
        for what, value in (("parameters", level.params), ("share", level.share), ("bytes", level.bytes))
    }


def of_model(folder: Path, evaluation: Path | None = None) -> dict[str, Any]:
    """Of a run's outcome; its metrics where it is evaluated."""
    run, history = RunFile.read(folder / "run.json"), History.read(folder / "history.json")
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
