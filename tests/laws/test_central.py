"""Central training is the local loop with one client that holds everything, reported epoch by epoch, stopped or not."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from fl_engine.core.augmentation import Crop, Flip
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ModelError
from fl_engine.core.samples import Data
from fl_engine.core.slicing import initial_params
from fl_engine.core.steps import Balanced, Cosine
from fl_engine.core.types import FULL, SGD, Adam, Distillation, ExitLoss, LocalTask, Sandwich, SubmodelSpec
from fl_engine.models.chains import SmallCNN
from fl_engine.storage.store import decode, encode
from fl_engine.testing.kinds import KINDS
from fl_engine.testing.tiny import TinyNet, assert_same_bits, tiny_data
from fl_engine.training.central import train_centrally, weights_in
from fl_engine.training.local import TrainingJob, train
from fl_engine.training.numerics import Numerics, Precision

TASK = LocalTask(FULL, SGD(0.05, 0.5), epochs=3, batch_size=16, drop_last=False, seed=5)
HALF = SubmodelSpec.of({"conv": 4, "hidden": 16})
DATA = tiny_data(clients=8)
NETWORK = TinyNet(dropout=0.5)

CASES: dict[str, tuple[ModelFamily, Data, dict[str, Any]]] = {
    "momentum, dropout": (NETWORK, DATA, {}),
    "adam": (NETWORK, DATA, {"optimizer": Adam(0.01)}),
    "teachers": (NETWORK, DATA, {"distillation": Distillation((HALF,), 10.0, 3.0)}),
    "ordered dropout": (NETWORK, DATA, {"widths": (HALF, FULL)}),
    "sandwich": (NETWORK, DATA, {"widths": (HALF, FULL), "sandwich": Sandwich(1, 1.0, 1.0)}),
    "exits": (TinyNet(exits=("conv",)), DATA, {"exits": ExitLoss((0.5, 0.5), 0.5, 2.0, "last")}),
    "running statistics": (SmallCNN((1, 8, 8), 4, 0.25, norm="static"), tiny_data((1, 8, 8), clients=8), {}),
    "balanced, augmented, cosine": (
        NETWORK,
        DATA,
        {"sampler": Balanced(), "augment": (Crop(padding=1), Flip()), "schedule": Cosine(restart=2)},
    ),
    "regression": (*KINDS["regression"], {"distillation": Distillation((SubmodelSpec.of({"fc1": 4}),), 1.0, 1.0)}),
    "tokens": (*KINDS["tokens"], {}),
}


@pytest.mark.parametrize("case", CASES)
def test_central_training_is_one_client_and_resumes_exactly(case: str) -> None:
    family, data, changes = CASES[case]
    task, start = replace(TASK, **changes), initial_params(family, 1)
    epochs = list(train_centrally(family, data, task, start))
    (alone,) = train(family, data.task, [TrainingJob(task, start, data.normalise(data.train_x), data.train_y)])
    assert_same_bits(epochs[-1].params, alone.params)
    assert_same_bits(weights_in(epochs[-1].snapshot), alone.params)
    assert [each.number for each in epochs] == [1, 2, 3]
    for stop in (1, 2):
        begun = list(islice(train_centrally(family, data, task, start), stop))
        assert_same_bits(begun[-1].params, epochs[stop - 1].params)
        kept = decode(encode(begun[-1].snapshot), "a file")
        again = list(train_centrally(family, data, task, start, since=kept))
        assert [each.number for each in again] == list(range(stop + 1, 4))
        for found, expected in zip(again, epochs[stop:], strict=True):
            assert_same_bits(found.params, expected.params)
            assert (found.loss, found.score) == (expected.loss, expected.score)
        assert_same_bits(again[-1].snapshot, epochs[-1].snapshot)


@pytest.mark.parametrize("precision", ["bf16", "amp", "fp16"])
def test_half_precision_resumes_with_the_same_bits(precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Numerics, "scales", lambda self, device: self.precision == "amp")
    numerics, start = Numerics(precision=precision), initial_params(NETWORK, 1)
    whole = list(train_centrally(NETWORK, DATA, TASK, start, numerics))
    assert_same_bits(weights_in(whole[-1].snapshot), whole[-1].params)
    kept = decode(encode(whole[0].snapshot), "a file")
    again = list(train_centrally(NETWORK, DATA, TASK, start, numerics, since=kept))
    assert_same_bits(again[-1].snapshot, whole[-1].snapshot)
    if precision == "amp":
        with pytest.raises(ModelError):
            next(iter(train_centrally(NETWORK, DATA, TASK, start, since=kept)))


def test_divergence_and_snapshots_of_other_tasks_are_refused() -> None:
    start = initial_params(NETWORK, 1)
    with pytest.raises(ModelError):
        list(train_centrally(NETWORK, DATA, replace(TASK, optimizer=SGD(1e30)), start))
    with pytest.raises(ModelError):
        adam = replace(TASK, optimizer=Adam(0.001))
        list(train_centrally(NETWORK, DATA, adam, start, Numerics(precision="fp16")))
    with pytest.raises(ModelError):
        family, data = KINDS["regression"]
        list(train_centrally(family, data, replace(TASK, augment=(Flip(),)), initial_params(family, 1)))
    snapshot = next(iter(train_centrally(NETWORK, DATA, TASK, start))).snapshot
    narrow = TinyNet(dropout=0.5, hidden=16)

    with pytest.raises(ModelError):
        next(iter(train_centrally(narrow, DATA, TASK, initial_params(narrow, 1), since=snapshot)))
