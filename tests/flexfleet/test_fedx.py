"""FedX through `flexfleet`: its preparation's files, its pool, the same model on any backend and after a stop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fl_engine.codecs.qsgd import Qsgd
from fl_engine.fleet import devices
from fl_engine.preparation.supernet import Supernet
from fl_engine.selection.capacity import level_of
from fl_engine.storage.store import decode
from fl_engine.testing.tiny import assert_same_bits
from flexfleet.config import load_config
from flexfleet.files import prepared
from flexfleet.files.artifacts import PoolFile
from tests.harness.alike import alike
from tests.harness.processes import refused
from tests.harness.run_folders import rounds_of

pytestmark = pytest.mark.usefixtures("own_folder", "no_drawings")

OPTIONS = (
    "algorithm.name=fedx", "partition.proxy=0.3", "pretrain.epochs=12", "pretrain.lr=0.005",
    "algorithm.bits=[4, 8, 12]", "algorithm.delta=0.0", "algorithm.fine_tuning.lr=0.02", "training.fraction=1.0",
)  # fmt: skip


@pytest.fixture
def sets(quick: Sequence[str]) -> list[str]:
    return [*quick, *OPTIONS]


def test_run_sends_the_searched_levels_of_the_trained_supernet(flexfleet: Any, sets: list[str]) -> None:
    flexfleet("run", "--json", "--run-id", "a", sets=sets).ok()
    run = Path("runs/a")
    made: Supernet = prepared.read(run / "pretrain", ["supernet"])["supernet"]
    assert [(each.level, each.bits) for each in made.table] == [
        (name, bits) for name in ("small", "medium", "large") for bits in (4, 8, 12)
    ]
    pool = PoolFile.read(run / "pool" / "pool.json").pool()
    told = {tier: (m.name, codecs) for m in pool for tier, codecs in m.tiers}
    assert {tier: name for tier, (name, _) in told.items()} == {t: each.level for t, each in made.chosen.items()}
    for tier, (_, codecs) in told.items():
        assert codecs is not None and codecs.down == Qsgd(bits=made.chosen[tier].bits) and codecs.up is None
    assert [m.name for m in pool] == ["small", "medium", "large"] and all(m.reported for m in pool)
    assert_same_bits(decode((run / "pool" / "weights.safetensors").read_bytes(), "weights"), made.weights)
    row = rounds_of(run)[-1]["metrics"]
    assert 0 < row["bytes_down"] < row["bytes_up"], "quantised down, as trained up"
    fleet = devices.fleet(load_config(None, sets).fleet.tiers, 6, 0)
    own = [pool[level_of(device, pool) or 0].name for device in fleet]
    assert row["accuracy_devices"] == pytest.approx(sum(row[f"accuracy/{name}"] for name in own) / 6, rel=1e-12)


TUNING = "algorithm.fine_tuning"


@pytest.mark.parametrize(
    "options",
    [("algorithm.up=quantised",), (f"{TUNING}.sub_networks=true", f"{TUNING}.lr_schedule=inverse_sqrt")],
    ids=["quantised", "sub_networks"],
)
def test_model_is_the_same_on_any_backend_and_after_a_stop(flexfleet: Any, sets: list[str], options: Any) -> None:
    alike(flexfleet, [*sets, *options])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("partition.proxy=0.0", "partition.proxy"),
        ("algorithm.seconds=1e-9", "algorithm.seconds must be at least"),
        ("algorithm.bits=[0]", "algorithm.bits.0: input should be greater than or equal to 1"),
        ("algorithm.assigned={weak: {level: small, bit: 8}}", "algorithm.assigned.weak.bit"),
        ("algorithm.assigned={weak: {level: small, bits: 17}}", "algorithm.assigned.weak.bits"),
        ("algorithm.assigned={weak: {level: small, bits: 8}}", "algorithm.assigned must have an entry for tier"),
    ],
)
def test_what_cannot_be_is_refused(flexfleet: Any, sets: list[str], change: str, message: str) -> None:
    assert message in refused(flexfleet("run", "--json", "--run-id", "a", sets=[*sets, change]))
