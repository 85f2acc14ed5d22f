"""Encoded weights to pods on the fake cluster and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

CODECS = {
    "half down, streams up": ("codec.down.name=half", "codec.up.name=fl_engine.testing.codecs:Deflated"),
    "fedx": (
        "algorithm.name=fedx", "algorithm.up=quantised", "algorithm.bits=[8, 12]", "partition.proxy=0.3",
        "pretrain.epochs=2",
    ),
    "qsgd": ("codec.down.name=qsgd", "codec.down.bits=9", "codec.up.name=qsgd", "codec.up.coding=elias"),
}  # fmt: skip


@pytest.mark.parametrize("way", CODECS)
def test_pods_give_the_bits_of_a_run_without_a_cluster(
    flexfleet: Any,
    quick_cluster: Any,
    remote: Sequence[str],
    tiny: Sequence[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    ways = {"alone": (), "pods": tuple(remote)}
    done = {
        name: flexfleet("run", "--json", "--run-id", name, sets=[*tiny, *CODECS[way], *more])
        for name, more in ways.items()
    }
    assert {name: each.code for name, each in done.items()} == {"alone": 0, "pods": 0}, done["pods"].err
    for said in ("model_sha256", "bytes", "waste"):
        assert done["pods"].json[said] == done["alone"].json[said]
    assert [o for o in quick_cluster.created if o["kind"] == "Job"]
