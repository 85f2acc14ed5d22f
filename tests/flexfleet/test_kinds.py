"""Tables of numbers, sequences of tokens, text and images with boxes through the whole of `flexfleet run`: every
backend, killed, reported."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn

from fl_engine.core.errors import PartitionError
from fl_engine.core.pool import member
from fl_engine.core.slicing import initial_params
from fl_engine.core.types import FULL, SubmodelSpec
from fl_engine.models import export
from fl_engine.testing.kinds import (
    VOCABULARY,
    TinyLSTM,
    TinyMLP,
    tiny_boxes,
    tiny_sequences,
    tiny_series,
    tiny_table,
    tiny_text,
)
from flexfleet.files.artifacts import EvaluationFile, History, RunFile
from flexfleet.pipeline.evaluate import evaluate
from flexfleet.pipeline.prepare import Resolved
from flexfleet.reports.report import table

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
def test_what_is_told_speaks_of_the_tasks_metric(flexfleet: Any, sets: list[str], kind: str, tmp_path: Path) -> None:
    done = flexfleet("run", "--json", "--run-id", "a", sets=sets)
    assert done.code == 0, done.err
    run = tmp_path / "runs" / "a"
    evaluation = EvaluationFile.read(run / "evaluation.json")
    assert [list(level.metrics) for level in evaluation.levels.values()] == [METRICS[kind]] * len(evaluation.levels)
    assert done.json["metrics"]["levels"] == {name: level.value for name, level in evaluation.levels.items()}
    levels = evaluation.levels.items()
    further = {metric: {name: level.metrics[metric] for name, level in levels} for metric in METRICS[kind][1:]}
    told = {metric: {"full": list(of.values())[-1], "levels": of} for metric, of in further.items()}
    assert done.json["metrics"].get("further", {}) == told
    last = History.read(run / "history.json").rounds[-1]["metrics"]
    for name, level in evaluation.levels.items():
        assert {metric: last[f"{metric}/{name}"] for metric in METRICS[kind]} == level.metrics
    page, words = (run / "report.html").read_text(), table([run])
    percent = kind in ("tokens", "next_token")
    assert [metric for metric in ("mae", "accuracy_all") if metric in page] == METRICS[kind][1:]
    cells = [f"{100 * v:.2f}" if percent else f"{v:.4f}" for of in further.values() for v in of.values()]
    assert all(f"<td>{each}</td>" in page for each in cells)
    figures = (
        (f"{100 * evaluation.full:.2f}", "avg %") if percent else (f"{evaluation.full:.4f}", f"test {METRICS[kind][0]}")
    )
    assert figures[0] in page and figures[0] in words
    assert figures[1] in (words if percent else page)
    assert ("ccuracy" in page) == percent
    assert f"full {figures[0]}" in (status := flexfleet("status").out) and ("%" in status) == percent
    confusion = json.loads((run / "confusion.json").read_text())["levels"]
    assert list(confusion) == (list(evaluation.levels) if kind == "tokens" else [])
    local = json.loads((run / "evaluation.json").read_text()).get("local", {})
    assert list(local) == list(confusion) == list(done.json["metrics"].get("local", {})), "where there are classes"


@pytest.mark.parametrize("sets", ["regression"], indirect=True)
def test_evaluate_refuses_other_data_than_were_trained_on(
    flexfleet: Any, sets: list[str], tmp_path: Path, no_drawings: None
) -> None:
    """Also where no client's classes are looked at."""
    assert flexfleet("run", "--run-id", "a", sets=sets).code == 0
    run, resolved = tmp_path / "runs" / "a", Resolved.load(None, [*sets, "dataset.test_samples=20"])
    with pytest.raises(PartitionError, match="this partition was cut from other data"):
        evaluate(resolved, run, run / "partition", run / "pool", tmp_path / "out")
    with pytest.raises(PartitionError, match="no partition in nowhere"):
        evaluate(Resolved.load(None, sets), run, Path("nowhere"), run / "pool", tmp_path / "out")


@dataclass(frozen=True)
class Unwritable(TinyMLP):
    """Ends with a function that ONNX does not have."""

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        module = super().module(spec)
        module.register_forward_hook(lambda _, __, out: torch.special.i0e(out))
        return module


@pytest.mark.parametrize(("sets", "kind"), [(kind, kind) for kind in KINDS], indirect=["sets"])
def test_levels_are_exported_whatever_the_samples_are(
    flexfleet: Any, sets: list[str], kind: str, tmp_path: Path, no_drawings: None
) -> None:
    """The folder alone gives the network back; the file alone answers raw test samples as the network does."""
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


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize("sets", ["regression"], indirect=True)
def test_numbers_are_compared(flexfleet: Any, sets: list[str]) -> None:
    own = [each for each in sets if not each.startswith("algorithm.")]
    done = flexfleet("compare", "--json", "--id", "c", "--algorithms", "all_large,fedprox", sets=own)
    assert done.code == 0, done.err
    assert done.json["metric"] == "r2"
    for name in ("comparison.md", "comparison.html"):
        page = (Path("runs") / "c" / name).read_text()
        assert "Test r2" in page and "full mae (better when lower)" in page
        for label in ("all_large", "fedprox"):
            result = json.loads((Path("runs") / "c" / f"{label}-s0" / "result.json").read_text())
            mae = result["metrics"]["further"]["mae"]
            assert f"{mae['full']:.4f}" in page


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


@pytest.mark.parametrize(
    ("sets", "wrong", "message"),
    [
        ("regression", ("algorithm.name=heterofl",), "no classes whose outputs could be masked: set algorithm.mask_la"),
        ("regression", ("dataset.pad=16",), "holds no images, and only images can be padded: set dataset.pad=none"),
        (
            "regression",
            ("publish.models=true", f"model.name={__name__}:Unwritable"),
            "Unwritable cannot be written as ONNX (",
        ),
        ("regression", (f"model.name={HERE}:TinyTokens",), "TinyTokens takes tokens and tiny_table holds numbers"),
        ("tokens", (f"model.name={HERE}:TinyMLP",), "TinyMLP takes numbers and tiny_sequences holds tokens: choose a"),
        (
            "tokens",
            ("model.vocabulary=5",),
            f"TinyTokens knows the tokens 0 to 4, tiny_sequences holds {VOCABULARY - 1}",
        ),
        (
            "regression",
            ("training.augment=[{name: flip}]",),
            "flip needs images or maps (C, H, W), got numbers of the shape (6,)",
        ),
        ("detection", ("training.augment=[{name: crop}]",), "training.augment: crop"),
        (
            "detection",
            ("training.augment=[{name: hsv}]",),
            "hsv needs pictures of 3 channels with values in 0..1",
        ),
        ("detection", ("algorithm.name=heterofl",), "no classes whose outputs could be masked (outputs are boxes too,"),
        ("detection", ("model.name=small_cnn",), "this one gives (1, 6): use model.name=point_detector"),
        (
            "detection",
            ("partition.rule=disjoint_labels", "partition.labels_per_client=1"),
            "a sample of tiny_boxes has several (detection): take one of iid",
        ),
        ("tokens", ("training.augment=[{name: crop}]",), "crop needs images or maps (C, H, W), got tokens of"),
        ("tokens", ("model.name=small_cnn",), "samples of the shape 5"),
    ],
    indirect=["sets"],
)
def test_what_does_not_fit_is_one_clear_line(
    flexfleet: Any, sets: list[str], wrong: Sequence[str], message: str
) -> None:
    names = {each.partition(".")[0] for each in wrong if each.startswith("algorithm.name")}
    kept = [each for each in sets if each.partition(".")[0] not in names]
    done = flexfleet("check", sets=[*kept, *wrong])
    assert done.code == 2 and message in done.err
    assert "Traceback" not in done.err and len(done.err.strip().splitlines()) == 1


def test_the_pool_of_a_network_for_other_samples_is_told(flexfleet: Any) -> None:
    for shape, told in (("18", [18]), ("7", [7])):
        argv = ("pool", "--json", "--algorithm", "all_large", "--model", f"{HERE}:TinyMLP", "--input", shape)
        done = flexfleet(*argv, "--classes", "1")
        assert done.code == 0, done.err
        assert (done.json["input_chw"], done.json["classes"]) == (told, 1)
        assert (
            f"TinyMLP, 1 output, input {shape}" in flexfleet(*(w for w in argv if w != "--json"), "--classes", "1").out
        )
        assert done.json["levels"][0]["params"] == 16 * told[0] + 16 + 16 * 16 + 16 + 16 + 1
    for wrong in ("18x", "0", "axb", "-3", "3 x 2"):
        refused = flexfleet("pool", "--model", f"{HERE}:TinyMLP", f"--input={wrong}", "--classes", "1")
        assert refused.code == 2 and "an input is the shape of a sample" in refused.err, wrong
