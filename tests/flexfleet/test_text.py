"""Two rounds of methods with sub-models of the Transformer and of the LSTM on a play whose roles are the clients, and
of the same networks where only the last character is asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_engine.core import seeds
from fl_engine.core.samples import Data
from fl_engine.datasets import Source, shakespeare
from flexfleet.files.artifacts import EvaluationFile
from tests.data import made
from tests.harness.run_folders import rounds_of

pytestmark = pytest.mark.usefixtures("own_folder")

ROLES, LINES = 6, 12
PLAY_TOKENS = 21
"""Letters of the words, space and line feed, padding, OOV and begin."""
WORDS = ("to", "be", "or", "not", "that", "is", "the", "question", "whether", "nobler", "in", "mind")


def play() -> str:
    """Each role says lines of six words."""
    rng = seeds.rng(0, "play")
    said = ["\n".join(" ".join(rng.choice(WORDS, 6)) for _ in range(LINES)) for _ in range(ROLES)]
    return "\n\n".join(f"ROLE {role}:\n{lines}" for role, lines in enumerate(said)) + "\n"


def _next(root: Path) -> Data:
    made.shakespeare_file(root, play())
    return shakespeare.load_text(root, None)


def _last(root: Path) -> Data:
    made.shakespeare_file(root, play())
    return shakespeare.load(root, None)


NEXT, LAST = Source("the next character everywhere", _next), Source("the next character after 80", _last)
TRANSFORMER = (
    "model.name=text_transformer", "model.layers=2", "model.heads=4", "model.head_size=4", "model.embedding=16",
    "model.hidden=64", "training.lr=0.2",
)  # fmt: skip
LSTM = ("model.name=text_lstm", "model.hidden=24", "training.lr=2.0")


def sets(
    quick: Sequence[str], tmp_path: Path, data: str, algorithm: str, network: Sequence[str] = TRANSFORMER
) -> list[str]:
    dropped = ("dataset.", "model.", "algorithm.", "rounds.", "tracking.", "partition.")
    kept = [each for each in quick if not each.startswith(dropped)]
    kept += ["rounds.stop=2", "tracking.mlflow=null", f"algorithm.name={algorithm}"]
    kept += [f"dataset.name={__name__}:{data}", f"dataset.root={tmp_path / 'data'}", *network]
    return [*kept, "partition.rule=natural", f"partition.clients={ROLES}", "partition.proxy=0.2", "partition.minimum=1"]


@pytest.mark.parametrize("network", [TRANSFORMER, LSTM], ids=["transformer", "lstm"])
@pytest.mark.parametrize("algorithm", ["adaptivefl", "fedrolex", "flexfl", "heterofl"])
def test_two_rounds_of_text(
    flexfleet: Any, quick: Sequence[str], algorithm: str, network: Sequence[str], tmp_path: Path, no_drawings: None
) -> None:
    flexfleet("run", "--json", "--run-id", "a", sets=sets(quick, tmp_path, "NEXT", algorithm, network)).ok()
    run = tmp_path / "runs" / "a"
    levels = EvaluationFile.read(run / "evaluation.json").levels
    assert len(levels) >= (1 if algorithm == "fedrolex" else 3), "FedRolex reports the whole network alone"
    largest = list(levels)[-1]
    first, second = (each["metrics"][f"loss/{largest}"] for each in rounds_of(run))
    assert second < first < np.log(PLAY_TOKENS)
    for level in levels.values():
        assert list(level.metrics) == ["accuracy", "accuracy_all"]
        assert 0 <= level.metrics["accuracy"] == level.metrics["accuracy_all"] <= 1, "no test character is unknown"
    if algorithm == "flexfl":
        scores = json.loads((run / "pretrain" / "apoz.json").read_text())["layers"]
        of = {layer["group"]: layer["apoz"] for layer in scores}
        relus = {f"layer{n}.hidden" for n in (1, 2)} & of.keys()
        assert {of[group] for group in of.keys() - relus} == {0.5}
        assert len(relus) == (0 if network == LSTM else 2)
        assert all(0 < of[group] < 1 and of[group] != 0.5 for group in relus)


@pytest.mark.parametrize("network", [TRANSFORMER, LSTM], ids=["transformer", "lstm"])
def test_a_task_with_one_answer_takes_the_last(
    flexfleet: Any, quick: Sequence[str], network: Sequence[str], tmp_path: Path, no_drawings: None
) -> None:
    given = sets(quick, tmp_path, "LAST", "fedrolex", network)
    given += ["dataset.train_samples=100", "dataset.test_samples=40"]
    done = flexfleet("run", "--json", "--run-id", "a", sets=given)
    assert done.code == 2
    assert done.json["error"]["code"] == "model"
    done = flexfleet("run", "--json", "--run-id", "b", sets=[*given, "model.answers=last"]).ok()
    assert np.isfinite(done.json["metrics"]["full"])
