"""FedX through `flexfleet`: its preparation's files, its pool, the same model on any backend and after a stop."""

from __future__ import annotations

import json
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
from flexfleet.files.artifacts import History, PoolFile
from flexfleet.pipeline.partition import partition
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.pretrain import inputs_of

pytestmark = pytest.mark.usefixtures("own_folder", "no_drawings")

OPTIONS = (
    "algorithm.name=fedx", "partition.proxy=0.3", "pretrain.epochs=12", "pretrain.lr=0.005",
    "algorithm.bits=[4, 8, 12]", "algorithm.delta=0.0", "algorithm.fine_tuning.lr=0.02", "training.fraction=1.0",
)  # fmt: skip


@pytest.fixture
def sets(quick: Sequence[str]) -> list[str]:
    return [*quick, *OPTIONS]


def test_a_run_sends_what_was_searched_and_starts_from_what_was_trained(flexfleet: Any, sets: list[str]) -> None:
    done = flexfleet("run", "--json", "--run-id", "a", sets=sets)
    assert done.code == 0, done.err
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
    row = History.read(run / "history.json").rounds[-1]["metrics"]
    assert 0 < row["bytes_down"] < row["bytes_up"], "quantised down, as trained up"
    fleet = devices.fleet(load_config(None, sets).fleet.tiers, 6, 0)
    own = [pool[level_of(device, pool) or 0].name for device in fleet]
    assert row["accuracy_devices"] == pytest.approx(sum(row[f"accuracy/{name}"] for name in own) / 6, rel=1e-12)


@pytest.mark.parametrize("up", ["identity", "quantised"])
def test_it_ends_in_the_same_model_on_any_backend_and_after_a_stop(flexfleet: Any, sets: list[str], up: str) -> None:
    sets = [*sets, f"algorithm.up={up}"]
    ways = {
        "whole": (),
        "threads": ("run.devices=[cpu, cpu]",),
        "processes": ("run.backend=processes", "run.devices=[cpu, cpu]"),
    }
    found = {}
    for name, more in ways.items():
        done = flexfleet("run", "--json", "--run-id", name, sets=[*sets, *more])
        assert done.code == 0, done.err
        found[name] = (done.json["model_sha256"], str(done.json["bytes"]))
    assert flexfleet("run", "--run-id", "stopped", sets=[*sets, "rounds.stop=1"]).code == 0
    done = flexfleet("run", "--json", "--resume", "--run-id", "stopped", sets=sets)
    found["stopped"] = (done.json["model_sha256"], str(done.json["bytes"]))
    assert len(set(found.values())) == 1, found


def test_it_ends_in_the_same_model_after_a_kill_in_the_middle_of_a_round(
    flexfleet: Any, nursery: Any, sets: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed with an update of the second round in the store, and the others not."""
    sets = [*sets, "algorithm.up=quantised", "rounds.keep_updates=true"]
    whole = flexfleet("run", "--json", "--run-id", "whole", sets=sets)
    assert whole.code == 0, whole.err
    argv, counts = ("flexfleet", "run", "--run-id", "killed"), tmp_path / "counts.json"
    first = nursery.start(*argv, cwd=tmp_path, sets=[*sets, "rounds.stop=1"], faults={"counts": str(counts)}).wait(120)
    assert first.code == 0, first.err
    # `put` writes a round's plan and orders, then for each client its update and the manifest.
    for number in range(1, json.loads(counts.read_text())["put"]):
        at = {"operation": "put", "when": "after", "number": number}
        child = nursery.start(*argv, "--resume", cwd=tmp_path, sets=sets, faults=at).wait(120)
        assert child.code == -9, child.err
        if len(list(Path("runs/killed/rounds/00001/updates").glob("*.json"))) == 1:
            break
    else:
        pytest.fail("no kill left one update of the second round")
    with caplog.at_level("INFO"):
        done = flexfleet("run", "--json", "--run-id", "killed", "--resume", sets=sets)
    assert "round 2: adopting 1 answers of" in caplog.text
    assert (done.json["model_sha256"], done.json["bytes"]) == (whole.json["model_sha256"], whole.json["bytes"])


@pytest.mark.usefixtures("warm_starts")
def test_the_ablations_differ_and_share_what_was_prepared(flexfleet: Any, sets: list[str]) -> None:
    """Without fine-tuning, without its regulariser, both; the preparation depends on neither."""
    labels = "fedx,plain=fedx,free=fedx"
    apart = [
        "plain:algorithm.fine_tuning.gamma=0.0",
        "free:algorithm.fine_tuning=null",
        "algorithm.fine_tuning.gamma=10",
    ]
    given = [each for each in sets if not each.startswith(("algorithm.name", "algorithm.fine_tuning"))]
    argv = ("compare", "--json", "--id", "c", "--algorithms", labels, "--seeds", "0")
    done = flexfleet(*argv, sets=[*given, *apart])
    assert done.code == 0, done.err
    runs = Path("runs/c")
    models = {label: (runs / f"{label}-s0" / "model.safetensors").read_bytes() for label in ("fedx", "plain", "free")}
    assert len(set(models.values())) == 3
    indices = {(runs / f"{label}-s0" / "pretrain" / prepared.INDEX).read_bytes() for label in models}
    assert len(indices) == 1


def test_the_pool_is_listed_without_data_and_with_what_was_searched(flexfleet: Any, sets: list[str]) -> None:
    argv = ("pool", "--algorithm", "fedx", "--model", "small_cnn", "--json")
    done = flexfleet(*argv, "--input", "1x8x8", "--classes", "10")
    assert done.code == 0, done.err
    assert [level["name"] for level in done.json["levels"]] == ["small", "medium", "large"]
    assert all("tiers" not in level for level in done.json["levels"]), "as before there were any"
    assigned = "algorithm.assigned={weak: {level: small, bits: 11}, medium: {level: medium, bits: 9}}"
    told = flexfleet(*argv, "--input", "1x8x8", "--classes", "10", "--set", assigned).json["levels"]
    assert told[0]["tiers"]["weak"]["down"] == {
        "name": "qsgd", "bits": 11, "levels": None, "bucket": 512, "coding": "shorter",
    }  # fmt: skip
    assert [level["dispatched"] for level in told] == [True, True, False]
    found = flexfleet("pool", "--json", sets=sets)
    assert {tier for level in found.json["levels"] for tier in level.get("tiers", {})} == {"weak", "medium", "strong"}


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ("partition.proxy=0.0", 2, "the preparation supernet needs data on the server"),
        ("algorithm.seconds=1e-9", 2, "no sub-network trains a local round within algorithm.seconds = 1e-09"),
        ("algorithm.bits=[0]", 2, "algorithm.bits.0: input should be greater than or equal to 1"),
        ("algorithm.assigned={weak: {level: small, bit: 8}}", 2, "algorithm.assigned.weak.bit"),
        ("algorithm.assigned={weak: {level: small, bits: 17}}", 2, "algorithm.assigned.weak.bits"),
        ("algorithm.assigned={weak: {level: small, bits: 8}}", 2, "of the fleet has no sub-network"),
    ],
)
def test_what_cannot_be_is_refused(flexfleet: Any, sets: list[str], change: str, code: int, message: str) -> None:
    done = flexfleet("run", "--json", "--run-id", "a", sets=[*sets, change])
    assert (done.code, message in done.err) == (code, True), done.err


INPUTS = {
    "fleet.tiers=conf1": True, "training.epochs=2": True, "algorithm.delta=0.5": True, "algorithm.bucket=null": True,
    "algorithm.q_max={weak: 8}": True, "algorithm.level=small": True, "partition.proxy=0.2": True,
    "training.lr=0.2": False, "algorithm.fine_tuning=null": False, "algorithm.up=quantised": False,
    "rounds.stop=9": False,
}  # fmt: skip


@pytest.mark.parametrize("change", INPUTS)
def test_what_the_preparation_depends_on(sets: list[str], change: str) -> None:
    told = []
    for i, more in enumerate(([], [change])):
        resolved = Resolved.load(None, [*sets, *more])
        partition(resolved, Path(f"p{i}"))
        told.append(inputs_of(resolved, "supernet", Path(f"p{i}")))
    assert (told[0] != told[1]) == INPUTS[change]


def test_a_search_of_hyper_parameters_varies_the_fine_tuning(flexfleet: Any, sets: list[str]) -> None:
    done = flexfleet("tune", "--json", "--id", "t", sets=[*sets, "tune.trials=2", "tune.held_out=[7]"])
    assert done.code == 0, done.err
    assert set(json.dumps(done.json).split('"')) >= {"algorithm.fine_tuning.gamma", "algorithm.fine_tuning.lr"}
