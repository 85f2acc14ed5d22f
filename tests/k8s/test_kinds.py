"""Samples that are no images, and a task that is no classification, as pods on the fake cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = "fl_engine.testing.kinds"


@pytest.mark.parametrize("kind", [("TABLE", "TinyMLP"), ("SEQUENCES", "TinyTokens")], ids=["regression", "tokens"])
def test_pods_give_the_bits_of_a_run_without_a_cluster(
    flexfleet: Any,
    quick_cluster: Any,
    remote: Sequence[str],
    tiny: Sequence[str],
    kind: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    kept = [each for each in tiny if not each.startswith(("dataset.", "model."))]
    names = (f"dataset.name={HERE}:{kind[0]}", f"model.name={HERE}:{kind[1]}", "algorithm.epsilon=40.0")
    ways = {"alone": (), "pods": tuple(remote)}
    done = {
        name: flexfleet("run", "--json", "--run-id", name, sets=[*kept, *names, *more]) for name, more in ways.items()
    }
    assert {name: each.code for name, each in done.items()} == {"alone": 0, "pods": 0}, done["pods"].err
    assert done["pods"].json["model_sha256"] == done["alone"].json["model_sha256"]
    assert [o for o in quick_cluster.created if o["kind"] == "Job"]
