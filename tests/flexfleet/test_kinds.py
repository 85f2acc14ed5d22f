"""Tables of numbers, sequences of tokens, text and images with boxes through the whole of `flexfleet run`: every
backend, killed, reported."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch

from fl_engine.core.pool import member
from fl_engine.core.slicing import initial_params
from fl_engine.core.types import SubmodelSpec
from fl_engine.models import export
from fl_engine.testing.kinds import TinyLSTM, tiny_boxes, tiny_sequences, tiny_series, tiny_table, tiny_text
from flexfleet.files.artifacts import EvaluationFile, RunFile

pytestmark = pytest.mark.usefixtures("own_folder")

HERE = "fl_engine.testing.kinds"
KINDS = {
    "regression": (f"dataset.name={HERE}:TABLE", f"model.name={HERE}:TinyMLP", "algorithm.epsilon=40.0"),
    "tokens": (f"dataset.name={HERE}:SEQUENCES", f"model.name={HERE}:TinyTokens", "algorithm.epsilon=40.0"),
    "next_token": (
        f"dataset.name={HERE}:TEXT",
        "model.name=text_transformer",
        "model.layers=1",
        "model.heads=4",
        "model.head_size=3",
        "partition.rule=iid",
        "model.embedding=12",
        "model.hidden=32",
        "algorithm.epsilon=40.0",
    ),
    "detection": (
        f"dataset.name={HERE}:BOXES",
        f"model.name={HERE}:TinyDetector",
        "algorithm.epsilon=40.0",
        "training.augment=[{name: flip, vertical: 0.5}, {name: scale}, {name: mixup}]",
    ),
}
METRICS = {
    "regression": ["r2", "mae"],
    "tokens": ["accuracy"],
    "next_token": ["accuracy", "accuracy_all"],
    "detection": ["map50"],
}


@pytest.fixture
def sets(quick: Sequence[str], request: pytest.FixtureRequest) -> list[str]:
    kept = [each for each in quick if not each.startswith(("dataset.", "model."))]
    return [*kept, *KINDS[request.param]]


@pytest.mark.parametrize(("sets", "kind"), [(kind, kind) for kind in KINDS], indirect=["sets"])
def test_every_backend_and_a_resumed_run_give_the_same_model(
    flexfleet: Any, sets: list[str], kind: str, tmp_path: Path, no_drawings: None
) -> None:
    ways = {"one": (), "threads": ("run.devices=[cpu, cpu]",), "processes": ("run.backend=processes",)}
    done = {name: flexfleet("run", "--json", "--run-id", name, sets=[*sets, *more]) for name, more in ways.items()}
    assert {name: each.code for name, each in done.items()} == dict.fromkeys(ways, 0), done["one"].err
    assert flexfleet("run", "--run-id", "again", sets=[*sets, "rounds.stop=1"]).code == 0
    done["again"] = flexfleet("run", "--json", "--run-id", "again", "--resume", sets=sets)
    assert len({each.json["model_sha256"] for each in done.values()}) == 1
    strategy = RunFile.read(tmp_path / "runs" / "one" / "run.json").numerics["strategy"]
    assert strategy == ("single" if kind in ("tokens", "next_token") else "batched")


@pytest.mark.parametrize(("sets", "kind"), [(kind, kind) for kind in KINDS], indirect=["sets"])
def test_levels_are_exported_whatever_the_samples_are(
    flexfleet: Any, sets: list[str], kind: str, tmp_path: Path, no_drawings: None
) -> None:
    done = flexfleet("run", "--json", "--run-id", "a", sets=[*sets, "publish.models=true"])
    assert done.code == 0, done.err
    scores = EvaluationFile.read(tmp_path / "runs" / "a" / "evaluation.json").levels
    data = {
        "regression": tiny_table(),
        "tokens": tiny_sequences(),
        "next_token": tiny_text(),
        "detection": tiny_boxes(),
    }[kind]
    for level, score in scores.items():
        folder = tmp_path / "runs" / "a" / "export" / level
        about, network = export.read(folder), export.load(folder)
        assert (about.metric, about.samples) == (METRICS[kind][0], str(data.train_x.dtype).removeprefix("torch."))
        assert about.accuracy_exported == pytest.approx(score.value, abs=1e-6)
        with torch.no_grad():
            outputs = network(data.test_x)
        values, _ = data.task.measure([data.task.observe(outputs, data.test_y)])
        assert values[about.metric] == pytest.approx(score.value, abs=1e-6)
        session = onnxruntime.InferenceSession(str(folder / export.ONNX), providers=["CPUExecutionProvider"])
        names = [each.name for each in (*session.get_inputs(), *session.get_outputs())]
        given = "images" if kind == "detection" else "samples"
        assert names == [given, "logits" if kind == "tokens" else "outputs"]
        (answer,) = session.run(None, {given: data.test_x[:7].numpy()})
        torch.testing.assert_close(torch.from_numpy(answer), outputs[:7], rtol=1e-4, atol=1e-4)


def test_an_lstm_is_exported_with_its_gates_and_window(tmp_path: Path) -> None:
    family, data = TinyLSTM(), tiny_series()
    small = member(family, "small", SubmodelSpec.of({"lstm": [0, 3, 4, 9]}), dispatched=True, reported=True)
    made = export.export(
        f"{HERE}:TinyLSTM", family, initial_params(family, 1), small, data, torch.arange(0), 0.3, tmp_path
    )
    export.to_onnx(made, data, tmp_path / export.ONNX)  # compares its answers on test samples
    with torch.no_grad():
        assert torch.equal(export.load(tmp_path)(data.test_x), made.network(data.test_x))


@pytest.mark.parametrize("sets", ["regression", "tokens", "detection"], indirect=True)
def test_a_run_that_is_killed_ends_with_the_same_model(nursery: Any, sets: list[str], tmp_path: Path) -> None:
    long = [*sets, "rounds.stop=8", "rounds.commit_every=1", "training.epochs=20", "rounds.keep_updates=true"]

    def start(name: str, *more: str) -> Any:
        return nursery.start("flexfleet", "run", "--json", "--run-id", name, *more, cwd=tmp_path, sets=long)

    whole = start("whole").wait()
    assert whole.code == 0, whole.err
    child = start("cut")
    until = time.monotonic() + 60
    while not list((tmp_path / "runs" / "cut" / "rounds").glob("00002/updates/*")):
        assert time.monotonic() < until and child.poll() is None, child.err
        time.sleep(0.002)
    child.kill()
    assert child.wait().code == -9
    assert start("cut", "--resume").wait().json["model_sha256"] == whole.json["model_sha256"]
