"""Samples that are no images, a task that is no classification, samples that are drawn and changed, and labels that are
wrong, as pods on the fake cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = "fl_engine.testing.kinds"


NAMED = ("dataset.", "model.")
KINDS: dict[str, tuple[str, ...]] = {
    "regression": (f"dataset.name={HERE}:TABLE", f"model.name={HERE}:TinyMLP", "algorithm.epsilon=40.0"),
    "tokens": (f"dataset.name={HERE}:SEQUENCES", f"model.name={HERE}:TinyTokens", "algorithm.epsilon=40.0"),
    "next_token": (
        f"dataset.name={HERE}:TEXT",
        "model.name=text_transformer",
        "model.layers=1",
        "model.heads=4",
        "model.head_size=3",
        "model.embedding=12",
        "model.hidden=32",
        "partition.rule=iid",
        "algorithm.epsilon=40.0",
    ),
    "detection": (
        f"dataset.name={HERE}:BOXES",
        f"model.name={HERE}:TinyDetector",
        "algorithm.epsilon=40.0",
        "training.augment=[{name: flip, vertical: 0.5}, {name: scale}, {name: mixup}]",
    ),
    "drawn and changed": (
        "algorithm.name=heterofl",
        "training.sampler.name=balanced",
        "training.augment=[{name: crop, padding: 2}, {name: flip}]",
        "training.schedule={name: cosine, floor: 0.1, restart: 1}",
    ),
    "wrong labels": ("algorithm.name=heterofl", "noise.labels=0.5", "noise.epochs=1", "noise.sure=1.0"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_pods_give_the_bits_of_a_run_without_a_cluster(
    flexfleet: Any,
    quick_cluster: Any,
    remote: Sequence[str],
    tiny: Sequence[str],
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    names = KINDS[kind]
    kept = [each for each in tiny if not (names[0].startswith(NAMED) and each.startswith(NAMED))]
    ways = {"alone": (), "pods": tuple(remote)}
    done = {
        name: flexfleet("run", "--json", "--run-id", name, sets=[*kept, *names, *more]) for name, more in ways.items()
    }
    assert {name: each.code for name, each in done.items()} == {"alone": 0, "pods": 0}, done["pods"].err
    assert done["pods"].json["model_sha256"] == done["alone"].json["model_sha256"]
    assert [o for o in quick_cluster.created if o["kind"] == "Job"]
