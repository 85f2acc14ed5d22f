"""The comparison graph, each task a process of its own, on the digits: two algorithms with two seeds give the models
that `flexfleet compare` gives, and one table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flexfleet.cli import main as cli
from flexfleet.experiments import compare as compare_module
from flexfleet.experiments.comparison_file import ComparisonFile
from flexfleet.files.artifacts import RunFile
from pipelines.compare import comparison
from tests.harness import graphs
from tests.harness.comparisons import in_this_process

PARAMETERS: dict[str, Any] = {"rounds": 2, "clients": 6, "client_fraction": 0.5, "local_epochs": 1}
ADVANCED = {"pretrain.epochs": 3, "training.batch_size": 20, "partition.minimum": 10, "flexfl:algorithm.kd_weight": 5}
SETS = ("rounds.stop=2", "partition.clients=6", "training.fraction=0.5", "training.epochs=1", "tracking.mlflow=null",
        *(f"{key}={value}" for key, value in ADVANCED.items()))  # fmt: skip
LINKED = {"FLEXFLEET_KUBEFLOW_UI": "http://kubeflow/", "FLEXFLEET_MLFLOW_UI": "http://mlflow/"}
WHAT = {"algorithms": "flexfl,all_large", "seeds": "0,3"}
NAMES = ("flexfl-s0", "all_large-s0", "flexfl-s3", "all_large-s3")

pytestmark = pytest.mark.filterwarnings("ignore:You may be attemping to run a task that uses custom:RuntimeWarning")


@dataclass(frozen=True)
class Ran:
    direct: Path
    """Folder of `flexfleet compare`."""
    store: Path
    tasks: Path
    """A folder for each task."""
    commands: list[list[str]]
    """Of all tasks of the comparison."""


@pytest.fixture(scope="module")
def scratch(scratch: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_module, "side_by_side", in_this_process)
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield scratch


@pytest.fixture(scope="module")
def ran(scratch: Path) -> Ran:
    argv = ["compare", *(word for key, value in WHAT.items() for word in (f"--{key}", value)), "--id", "same"]
    sets = [word for one in (*SETS, "run.store=direct") for word in ("--set", one)]
    assert cli.dispatch([*argv, *sets]) == 0
    given = {"store_uri": "store", "mlflow_uri": "sqlite:///mlflow.db", "comparison_id": "same",
             "advanced": ADVANCED}  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, graphs.commands() as commands:
        for name, address in LINKED.items():
            patch.setenv(name, address)
        comparison(**WHAT, **PARAMETERS, **given)
    (tasks,) = (scratch / "tasks").glob("compare-*")
    return Ran(scratch / "direct" / "same", scratch / "store" / "same", tasks, commands)


def test_models_have_the_bits_of_the_command_line(ran: Ran) -> None:
    direct = ComparisonFile.read(ran.direct / "comparison.json")
    graph = ComparisonFile.read(ran.tasks / "compare" / "comparison" / "comparison.json")
    assert (graph.id, graph.labels, graph.seeds) == (direct.id, direct.labels, direct.seeds)
    shas = [[one.model_sha256 for r in found.results.values() for one in r.runs] for found in (direct, graph)]
    assert shas[0] == shas[1]
    assert len(set(shas[0])) == 4
    for label in direct.labels:
        ours, theirs = graph.results[label], direct.results[label]
        assert (ours.last, ours.best, ours.waste, ours.mb_up) == (theirs.last, theirs.best, theirs.waste, theirs.mb_up)
        assert [r.rounds for r in ours.reached] == [r.rounds for r in theirs.reached]
    for name in NAMES:
        models = [(store / name / "model.safetensors").read_bytes() for store in (ran.store, ran.direct)]
        assert models[0] == models[1]


def test_every_pair_is_a_task_with_a_finished_run(ran: Ran) -> None:
    found = {}
    for folder in ran.tasks.glob("for-loop-*/run"):
        name = RunFile.read(folder / "run_folder" / "run.json").run_id
        told = json.loads((folder / "executor_output.json").read_text())
        found[name] = told["artifacts"]["metrics"]["artifacts"][0]["metadata"]
        assert (folder / "page").read_text() == (folder / "run_folder" / "report.html").read_text()
        assert not (folder / "run_folder" / "rounds").exists()
    assert found.keys() == set(NAMES)
    results = {name: json.loads((ran.direct / name / "result.json").read_text()) for name in NAMES}
    for name, metrics in found.items():
        assert metrics == {k: results[name]["metrics"][k] for k in ("avg", "full")} | {"waste": results[name]["waste"]}


def test_the_last_task_has_the_page_the_table_and_the_figures(ran: Ran) -> None:
    task = ran.tasks / "compare"
    for name, file in (("page", "comparison.html"), ("table", "comparison.md")):
        assert (task / name).read_text() == (task / "comparison" / file).read_text()
    assert "<svg" in (task / "page").read_text()
    told = json.loads((task / "executor_output.json").read_text())["artifacts"]["metrics"]["artifacts"][0]["metadata"]
    found = ComparisonFile.read(task / "comparison" / "comparison.json")
    assert told["full/flexfl"] == found.results["flexfl"].last.full.mean
    assert told["avg/all_large"] == told["full/all_large"]
