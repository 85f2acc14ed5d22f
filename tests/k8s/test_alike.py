"""Runs in pods end in the bits of runs in one process: other samples, tasks, codecs, methods and devices."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_engine.remote.kubernetes.provisioner import Pods
from fl_engine.rounds.ledger import Ledger
from fl_engine.storage.checkpoints import Checkpoints, Row
from fl_engine.storage.store import FolderStore, Store
from fl_engine.storage.tensor_files import named
from fl_engine.testing.tiny import assert_same_bits, measured_alike
from tests.k8s.pods import LIFETIMES, Killed, Runs, failures, killed, model

KINDS = "fl_engine.testing.kinds"
WAYS: dict[str, tuple[str, ...]] = {
    "detection": (
        f"dataset.name={KINDS}:BOXES", f"model.name={KINDS}:TinyDetector", "algorithm.epsilon=40.0",
        "training.augment=[{name: flip, vertical: 0.5}, {name: scale}, {name: mixup}]",
    ),
    "drawn and changed": (
        "algorithm.name=heterofl", "training.sampler.name=balanced",
        "training.augment=[{name: crop, padding: 2}, {name: flip}]",
        "training.schedule={name: cosine, floor: 0.1, restart: 1}",
    ),
    "wrong labels": ("algorithm.name=heterofl", "noise.labels=0.5", "noise.epochs=1", "noise.sure=1.0"),
    "fedx": (
        "algorithm.name=fedx", "algorithm.up=quantised", "algorithm.bits=[8, 12]", "partition.proxy=0.3",
        "pretrain.epochs=2",
    ),
    "own objective and optimizer": (
        "algorithm.kd_weight=0.0", "training.objective=tests.harness.plugins:loss",
        "training.optimizer=tests.harness.plugins:sgd",
    ),
    "qsgd": ("codec.down.name=qsgd", "codec.down.bits=9", "codec.up.name=qsgd", "codec.up.coding=elias"),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_pods_give_the_bits_of_one_process(
    runs: Runs, flexfleet: Any, tiny: Sequence[str], way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = WAYS[way]
    sets = [each for each in tiny if not (own[0].startswith("dataset.") and each.startswith(("dataset.", "model.")))]
    here, there = (
        flexfleet("run", "--json", "--run-id", name, sets=[*sets, *own, *more])
        for name, more in {"here": (), "pods": runs.remote}.items()
    )
    assert (here.code, there.code) == (0, 0), there.err
    for name in ("model_sha256", "bytes", "waste"):
        assert there.json[name] == here.json[name]
    assert runs.jobs()


def test_faults_are_those_of_one_process(runs: Runs) -> None:
    faults = "drop=0.2,slow=0.1x2,nan=0.1,flip=0.2,corrupt=0.1,uphill=0.1,backdoor=0.2,always"
    sets = ("training.fraction=1.0", f"rounds.faults='{faults}'")
    assert model(runs.start("struck", *sets)) == model(runs.alone("here", *sets))
    assert {failure.partition(":")[0] for failure in failures(runs.rows("struck")[0]).values()} >= {"drop"}


def lines(rows: list[Row]) -> list[list[dict[str, Any]]]:
    """Return the clients' lines of each round, without measured values."""
    return [[measured_alike(line) for line in row.clients] for row in rows]


def heads(store: Store) -> dict[int, Any]:
    ledger = Ledger(store)
    files = named(ledger.checkpoints.rest(ledger.checkpoints.commits()[-1]))
    return {client: ledger.states.get(name) for client, name in files.items()}


PERSONAL = (
    "algorithm.name=fedper",
    "algorithm.selection={name: tests.harness.plugins:LargestUtility}",
)
BUFFERED = ("rounds.mode=buffered", "rounds.buffer=1")


@pytest.mark.parametrize("own", [PERSONAL, BUFFERED], ids=["client state", "asynchronous"])
def test_killed_coordinator_changes_no_bit(runs: Runs, own: tuple[str, ...]) -> None:
    """It is killed while clients hold their stored state, or while updates are pending."""
    sets = (*own, "training.fraction=0.7")
    runs.start("pods", *sets, "rounds.stop=2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pods, "need", killed)
        with pytest.raises(Killed):
            runs.start("pods", *sets, "rounds.stop=4", resume=True)
    alone = runs.alone("alone", *sets, "rounds.stop=4")
    assert model(runs.start("pods", *sets, "rounds.stop=4", resume=True)) == model(alone)
    found, expected = runs.rows("pods"), Checkpoints(FolderStore(alone)).rows()
    assert lines(found) == lines(expected)
    if own is BUFFERED:
        assert max(line.get("staleness", 0) for row in found for line in row.clients) > 0
        return
    assert all(0 < line["utility"] < math.inf for row in found for line in row.clients)
    assert [row.metrics["bytes_down"] for row in found] == [row.metrics["bytes_down"] for row in expected]
    there, here = heads(runs.store("pods")), heads(FolderStore(alone))
    assert there.keys() == here.keys()
    for client, head in here.items():
        assert_same_bits(there[client], head)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("lifetime", LIFETIMES)
def test_pods_with_a_gpu_give_the_bits_of_one_process_with_it(in_processes: Runs, lifetime: str) -> None:
    """New interpreters, because a process that has used CUDA cannot be forked."""
    runs = in_processes
    runs.cluster.python, runs.cluster.slots = sys.executable, threading.Semaphore(100)
    pools = json.dumps({tier: {"torch_device": "cuda"} for tier in ("weak", "medium", "strong")})
    own = (f"kubernetes.lifetime={lifetime}", f"kubernetes.pools={pools}", "rounds.stop=2")
    found = model(runs.start("pods", *own))
    assert found == model(runs.alone("here", "run.devices=[cuda]", "rounds.stop=2")), "\n".join(runs.cluster.logs)
    assert found != model(runs.alone("cpu", "rounds.stop=2")), "a GPU rounds in another way"
