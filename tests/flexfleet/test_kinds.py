"""Tables of numbers, sequences of tokens, text and images with boxes through the whole of `flexfleet run`: every
backend, killed, reported."""

from __future__ import annotations

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
from fl_engine.testing import kinds
from flexfleet.files.artifacts import EvaluationFile, RunFile
from tests.harness.alike import alike
from tests.harness.processes import until

pytestmark = pytest.mark.usefixtures("own_folder")

HERE = "fl_engine.testing.kinds"
KINDS = {
    "regression": (f"dataset.name={HERE}:TABLE", f"model.name={HERE}:TinyMLP"),
    "tokens": (f"dataset.name={HERE}:SEQUENCES", "model={name: casas_bilstm, width: 0.25, vocabulary: 12}"),
    "next_token": (
        f"dataset.name={HERE}:TEXT",
        "model={name: text_transformer, layers: 1, heads: 4, head_size: 3, embedding: 12, hidden: 32}",
        "partition.rule=iid",
    ),
    "detection": (
        f"dataset.name={HERE}:BOXES",
        f"model.name={HERE}:TinyDetector",
        "training.augment=[{name: flip, vertical: 0.5}, {name: scale}, {name: mixup}]",
    ),
}
METRICS = {"regression": "r2", "tokens": "accuracy", "next_token": "accuracy", "detection": "map50"}


@pytest.fixture
def sets(quick: Sequence[str], request: pytest.FixtureRequest) -> list[str]:
    kept = [each for each in quick if not each.startswith(("dataset.", "model."))]
    return [*kept, "algorithm.epsilon=40.0", *KINDS[request.param]]


@pytest.mark.parametrize(("sets", "kind"), [(kind, kind) for kind in KINDS], indirect=["sets"])
def test_every_backend_and_a_resumed_run_give_the_same_model(
    flexfleet: Any, sets: list[str], kind: str, tmp_path: Path, no_drawings: None
) -> None:
    alike(flexfleet, sets)
    strategy = RunFile.read(tmp_path / "runs" / "one" / "run.json").numerics["strategy"]
    assert strategy == ("single" if kind in ("tokens", "next_token") else "batched")


@pytest.mark.parametrize(("sets", "kind"), [(kind, kind) for kind in KINDS], indirect=["sets"])
def test_levels_are_exported_whatever_the_samples_are(
    flexfleet: Any, sets: list[str], kind: str, tmp_path: Path, no_drawings: None
) -> None:
    flexfleet("run", "--json", "--run-id", "a", sets=[*sets, "publish.models=true"]).ok()
    scores = EvaluationFile.read(tmp_path / "runs" / "a" / "evaluation.json").levels
    _, data = kinds.KINDS[kind]
    for level, score in scores.items():
        folder = tmp_path / "runs" / "a" / "export" / level
        about, network = export.read(folder), export.load(folder)
        assert (about.metric, about.samples) == (METRICS[kind], str(data.train_x.dtype).removeprefix("torch."))
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
    family, data = kinds.KINDS["series"]
    small = member(family, "small", SubmodelSpec.of({"lstm": [0, 3, 4, 9]}), dispatched=True, reported=True)
    _, network = export.export(
        f"{HERE}:TinyLSTM", family, initial_params(family, 1), small, data, torch.arange(0), 0.3, tmp_path
    )
    export.to_onnx(network, data, tmp_path / export.ONNX)  # compares its answers on test samples
    with torch.no_grad():
        assert torch.equal(export.load(tmp_path)(data.test_x), network(data.test_x))


@pytest.mark.parametrize("sets", ["regression", "tokens", "detection"], indirect=True)
def test_a_run_that_is_killed_ends_with_the_same_model(fork_server: Any, sets: list[str], tmp_path: Path) -> None:
    long = [*sets, "rounds.stop=8", "rounds.commit_every=1", "training.epochs=20", "rounds.keep_updates=true"]

    def start(name: str, *more: str) -> Any:
        return fork_server.start("flexfleet", "run", "--json", "--run-id", name, *more, cwd=tmp_path, sets=long)

    whole = start("whole").wait().ok()
    child = start("cut")
    until(lambda: list((tmp_path / "runs" / "cut" / "rounds").glob("00002/updates/*")), "an update of the third round")
    child.kill()
    assert child.wait().code == -9
    assert start("cut", "--resume").wait().json["model_sha256"] == whole.json["model_sha256"]
