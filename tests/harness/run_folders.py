"""Folders of finished runs, with numbers that a person can check."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fl_engine.data.partition import PartitionManifest
from fl_engine.preparation.apoz import ApozLayer
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.store import FolderStore, sha256
from flexfleet.files.artifacts import Apoz, EvaluationFile, Level, LevelScore, PoolFile, RunFile, history_of

GROUPS = {"conv1": 16, "conv2": 32, "fc1": 64}
# Widths per layer, share, gamma; M2' and M3' are made on devices and not reported.
POOL = {
    "M1": ((8, 12, 24), 0.25, 0.9),
    "M2'": ((11, 18, 40), 0.4, 1.1),
    "M2": ((13, 22, 48), 0.5, 1.3),
    "M3'": ((16, 30, 60), 0.9, 1.9),
    "M3": ((16, 32, 64), 1.0, None),
}
# Per round: accuracies of the reported levels, MB down, MB up, clients trained, pruned, failed.
FLEXFL = [
    ({"M1": 0.30, "M2": 0.40, "M3": 0.50}, 2.0, 2.0, 3, 0, 0),
    ({"M1": 0.60, "M2": 0.70, "M3": 0.80}, 2.0, 1.5, 3, 1, 0),
    ({"M1": 0.60, "M2": 0.60, "M3": 0.75}, 2.0, 1.0, 2, 1, 1),
]
# avg 40, 70, 65 %: the best is round 2. 6 MB down, 4.5 MB up: waste 25 %. 2 pruned, 1 failed.
ALL_LARGE = [
    ({"full": 0.55}, 4.0, 4.0, 3, 0, 0),
    ({}, 4.0, 0.0, 0, 0, 3),
    ({"full": 0.72}, 4.0, 2.0, 2, 0, 1),
]
# 12 MB down, 6 MB up: waste 50 %. 4 failed; round 2 is not evaluated.


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    value = bytearray(path.read_bytes())
    value[len(value) // 2] ^= 1
    path.write_bytes(value)


def rounds_of(run: Path) -> list[dict[str, Any]]:
    """Return the rounds in a run's history.json, with the lines about clients."""
    found: list[dict[str, Any]] = json.loads((run / "history.json").read_text())["rounds"]
    return found


def rows(measured: Sequence[tuple[dict[str, float], float, float, int, int, int]]) -> tuple[Row, ...]:
    out = []
    for i, (accuracy, down, up, trained, pruned, failed) in enumerate(measured):
        metrics = {"bytes_down": down * 1e6, "bytes_up": up * 1e6, "waste": 1 - up / down, "seconds_round": 2.0}
        metrics |= {"clients_trained": trained, "clients_pruned": pruned, "clients_failed": failed}
        if accuracy:
            metrics |= {"avg": sum(accuracy.values()) / len(accuracy), "full": list(accuracy.values())[-1]}
            metrics |= {f"accuracy/{k}": v for k, v in accuracy.items()}
            metrics |= {f"loss/{k}": 1 - v for k, v in accuracy.items()}
        out.append(Row(round=i, metrics=metrics, clients=({"client": 0, "sent": "", "loss": 0.5},)))
    return tuple(out)


def level(name: str, widths: Sequence[int], share: float, gamma: float | None) -> Level:
    aside = name.endswith("'")
    return Level(
        name=name,
        params=int(40_000 * share),
        share=share,
        macs=int(180_000 * share),
        bytes=int(160_000 * share),
        widths=dict(zip(GROUPS, widths, strict=True)),
        dispatched=not aside,
        reported=not aside,
        gamma=gamma,
        ratios=(share,) * 3,
        similarity=0.9925 if gamma else None,
        spec={},
    )


def write_run(folder: Path, algorithm: str, run_id: str | None = None, **config: Any) -> Path:
    """A finished run folder: flexfl with five levels of which three are reported, anything else with one."""
    flexfl = algorithm == "flexfl"
    history = rows(FLEXFL if flexfl else ALL_LARGE)
    levels = POOL if flexfl else {"full": (tuple(GROUPS.values()), 1.0, None)}
    scores = {k.removeprefix("accuracy/"): v for k, v in history[-1].metrics.items() if k.startswith("accuracy/")}
    layers = [ApozLayer(group=g, size=10 * n, apoz=a, adjustment=0.8)
              for (g, n), a in zip(GROUPS.items(), (0.4, 0.5, 0.6), strict=True)]  # fmt: skip
    pool = PoolFile(
        algorithm=algorithm,
        model="small_cnn",
        input_chw=(1, 8, 8),
        classes=2,
        groups=GROUPS,
        levels=tuple(level(name, *about) for name, about in levels.items()),
    ).write(folder / "pool" / "pool.json")
    partition = folder / "partition" / "partition.json"
    partition.parent.mkdir()
    manifest = PartitionManifest(
        rule="dirichlet",
        parameters={"clients": 3, "alpha": 0.6},
        data_sha256="d" * 64,
        proxy_train=8,
        proxy_test=2,
        client_samples=[30, 20, 10],
        class_counts=[[20, 5, 10], [10, 15, 0]],
        tensors_sha256="e" * 64,
        label="class",
        clusters=0,
        noise=None,
        server_classes=(),
    )
    partition.write_text(manifest.model_dump_json())
    Apoz(layers=tuple(layers) if flexfl else (), reference=(0.41, 0.49, 0.6) if flexfl else None,
         proxy_samples=10, proxy_accuracy=0.8).write(folder / "pretrain" / "apoz.json")  # fmt: skip
    data = {"name": "digits", "root": str(folder)}
    whole: dict[str, Any] = {"seed": 0, "dataset": data, "model": {"name": "small_cnn"}}
    RunFile(
        run_id=run_id or folder.name,
        config=whole | {"algorithm": {"name": algorithm}, "partition": {"alpha": 0.6}} | config,
        numerics={"torch": "2.13.0", "devices": ["cpu"]},
        pool_sha256=sha256(pool.read_bytes()),
        partition_sha256=sha256(partition.read_bytes()),
    ).write(folder / "run.json")
    FolderStore(folder).put("history.json", history_of(history, "a" * 64))
    EvaluationFile(
        rounds=3,
        test_samples=100,
        avg=sum(scores.values()) / len(scores),
        full=list(scores.values())[-1],
        levels={k: LevelScore(accuracy=v, loss=1 - v, params=40_000) for k, v in scores.items()},
    ).write(folder / "evaluation.json")
    return folder
