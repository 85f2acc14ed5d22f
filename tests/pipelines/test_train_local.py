"""The whole graph, each task a process of its own, on the digits: it goes on with a run that was interrupted, and
gives what the same steps give in one process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flexfleet.config import load_config
from flexfleet.config.form import config_from
from flexfleet.files.artifacts import EvaluationFile, History, RunResult
from flexfleet.kubeflow.retarget import documents
from flexfleet.pipeline.federate import federate
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.run import run
from pipelines.compile import COMPILED
from pipelines.train import train

ROOT = Path(__file__).parents[2]

PARAMETERS: dict[str, Any] = {"rounds": 2, "clients": 6, "client_fraction": 0.5, "local_epochs": 1, "seed": 5}
ADVANCED = {"pretrain.epochs": 3, "training.batch_size": 20, "algorithm.kd_weight": 5, "partition.minimum": 10}

pytestmark = pytest.mark.filterwarnings("ignore:You may be attemping to run a task that uses custom:RuntimeWarning")


@dataclass(frozen=True)
class Ran:
    direct: Path
    """Run folder of `flexfleet run`."""
    interrupted: History
    store: Path
    """The ledger that the graph went on with."""
    tasks: Path
    """A folder for each task."""
    mlflow: str


@pytest.fixture(scope="module")
def ran(scratch: Path, mlflow_with_password: str) -> Ran:
    given = PARAMETERS | {"mlflow_uri": "", "store_uri": str(scratch / "direct")}
    run(Resolved.of(config_from(given, ADVANCED)), "same")
    direct, store = scratch / "direct" / "same", scratch / "store" / "same"
    once = Resolved.of(config_from(given | {"rounds": 1}, ADVANCED))
    federate(once, direct / "partition", direct / "pool", store)
    interrupted = History.read(store / "history.json")
    mlflow = mlflow_with_password
    advanced = ADVANCED | {"publish.dvc": str(scratch / "remote"), "publish.models": True, "publish.onnx": False}
    train(**PARAMETERS, run_id="same", store_uri="store", mlflow_uri=mlflow, advanced=advanced)
    (tasks,) = (scratch / "tasks").glob("train-*")
    return Ran(direct, interrupted, store, tasks, mlflow)


def test_the_model_is_bit_identical_to_that_of_one_process(ran: Ran) -> None:
    history = History.read(ran.tasks / "federate" / "run" / "history.json")
    assert len(history.rounds) == 2
    assert history.model_sha256 == History.read(ran.direct / "history.json").model_sha256
    assert (ran.store / "model.safetensors").read_bytes() == (ran.direct / "model.safetensors").read_bytes()


def test_evaluation_and_its_metrics(ran: Ran) -> None:
    found = EvaluationFile.read(ran.tasks / "evaluate" / "evaluation" / "evaluation.json")
    direct = EvaluationFile.read(ran.direct / "evaluation.json")
    assert (found.avg, found.full, found.rounds) == (direct.avg, direct.full, direct.rounds)
    for name, score in direct.levels.items():
        # A loss is a sum over the test set, and may be summed by another number of threads.
        loss = pytest.approx(score.loss, rel=1e-5)
        assert (found.levels[name].value, found.levels[name].loss) == (score.value, loss)
    told = json.loads((ran.tasks / "evaluate" / "executor_output.json").read_text())
    metrics = told["artifacts"]["evaluation"]["artifacts"][0]["metadata"]
    levels = {f"accuracy/{name}": score.value for name, score in found.levels.items()}
    local = {f"local/{name}": each.mean for name, each in found.local.items()}
    assert metrics == {"avg": found.avg, "full": found.full} | levels | local
    assert found.local == direct.local and len(local) == len(levels)


def test_federate_begins_the_mlflow_run_and_links_to_it(ran: Ran) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=ran.mlflow)
    (experiment,) = client.search_experiments(filter_string="name = 'digits-small_cnn-dirichlet'")
    (run,) = client.search_runs([experiment.experiment_id])
    card = (ran.tasks / "partition" / "links").read_text()
    assert f"| MLflow | {ran.mlflow}" in card and "| algorithm | `flexfl` |" in card
    told = json.loads((ran.tasks / "federate" / "executor_output.json").read_text())
    page = f"{ran.mlflow}/#/experiments/{experiment.experiment_id}/runs/{run.info.run_id}"
    assert told["artifacts"]["run"]["artifacts"][0]["metadata"]["mlflow"] == page
    assert json.loads((ran.store / "run.json").read_text())["mlflow_run_id"] == run.info.run_id
    assert (run.info.status, run.data.tags["flexfleet.run_id"]) == ("FINISHED", "same")
    assert run.data.tags["kfp.job_id"] and run.data.metrics["final/full"] > 0
    assert {m.step for m in client.get_metric_history(run.info.run_id, "train_loss")} == {1, 2}
    data, partition = run.inputs.dataset_inputs
    parts = json.loads((ran.direct / "partition" / "partition.json").read_text())
    assert (data.dataset.name, data.dataset.digest) == ("digits", parts["data_sha256"][:36])
    assert partition.dataset.name.startswith("partition: dirichlet, 6 clients")


def test_publishing_tasks_hand_on_pointers(ran: Ran, tmp_path: Path) -> None:
    from flexfleet.tracking import dvc_remote

    pointers = {path.stem: path.read_text() for path in (ran.tasks / "report" / "dvc_pointers").iterdir()}
    assert set(pointers) == set(dvc_remote.OF_RUN)
    for task, name in (("partition", "partition"), ("model-pool", "pool")):
        assert (ran.tasks / task / "dvc_pointer").read_text() == pointers[name]
    name, remote = "model.safetensors", str(ran.store.parents[1] / "remote")
    (model,) = dvc_remote.pull({name: pointers[name]}, remote, tmp_path / "back")
    assert model.read_bytes() == (ran.direct / "model.safetensors").read_bytes()


def test_the_report_and_the_finished_run_folder(ran: Ran) -> None:
    page = (ran.tasks / "report" / "page").read_text()
    assert page.lstrip().lower().startswith("<!doctype html") and "</html>" in page
    folder = ran.tasks / "report" / "run_folder"
    assert page == (folder / "report.html").read_text()
    ours, direct = (RunResult.read(folder / "result.json") for folder in (folder, ran.direct))
    assert (ours.run_id, ours.model_sha256, ours.metrics) == ("same", direct.model_sha256, direct.metrics)
    assert (ours.bytes, ours.waste) == (direct.bytes, direct.waste)


def test_mlflows_password_is_in_no_artifact_and_no_file(ran: Ran, telling: Any) -> None:
    assert telling(ran.tasks, ran.store) == []


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ({"mlflow_uri": "http://me:pl4nted-secret@127.0.0.1:9"}, "mlflow_uri must not contain a password.*LOW_SECRET"),
        (
            {"advanced": {"tracking.experiment": "https://me:pl4nted-secret@ui"}},
            "tracking.experiment must not contain a password",
        ),
    ],
    ids=["form", "advanced"],
)
def test_password_in_a_parameter_is_refused_and_not_written(
    scratch: Path, capsys: pytest.CaptureFixture[str], telling: Any, given: dict[str, Any], instead: str
) -> None:
    with pytest.raises(RuntimeError, match="partition"):
        train(store_uri="store", **given)
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(rf"error, exit code 2 \(config\S*\): .*{instead}", said)
    assert telling(scratch) == []


def executed(name: str, parameters: dict[str, Any], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A task of the compiled pipeline as Kubeflow's launcher starts it."""
    spec = documents((COMPILED / "train.yaml").read_text())[0]
    component, container = spec["components"][f"comp-{name}"], spec["deploymentSpec"]["executors"][f"exec-{name}"]

    def artifacts(way: str) -> dict[str, Any]:
        about = component[f"{way}Definitions"].get("artifacts", {})
        types = {each: given["artifactType"] for each, given in about.items()}
        return {
            each: {"artifacts": [{"name": each, "type": kind, "uri": str(folder / each), "metadata": {}}]}
            for each, kind in types.items()
        }

    given: dict[str, Any] = {"inputs": {"parameterValues": parameters, "artifacts": {}}}
    if "inputDefinitions" in component:
        given["inputs"]["artifacts"] = artifacts("input")
    given["outputs"] = {"artifacts": artifacts("output"), "outputFile": str(folder / "output.json")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    argv = [*container["container"]["command"], *container["container"]["args"]]
    argv = [json.dumps(given) if word == "{{$}}" else word for word in argv]
    whole = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path} | env
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, env=whole)


def form(**given: Any) -> dict[str, Any]:
    """The parameters of the first task: the form's defaults, and `given` instead."""
    asked = documents((COMPILED / "train.yaml").read_text())[0]["root"]["inputDefinitions"]["parameters"]
    return {name: each["defaultValue"] for name, each in asked.items()} | {"job_id": "j", "store_uri": "store"} | given


def imported(done: subprocess.CompletedProcess[str]) -> set[str]:
    """The modules that a task imported that ran with PYTHONPROFILEIMPORTTIME."""
    assert done.returncode == 0, done.stderr[-2000:]
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


def test_tasks_before_the_rounds_import_no_mlflow(tmp_path: Path, mlflow_with_password: str) -> None:
    """Its import takes 2.5 seconds of CPU time."""
    given = form(algorithm="fedavg", mlflow_uri=mlflow_with_password)
    imported(executed("partition", given, tmp_path, PYTHONPROFILEIMPORTTIME="1"))
    imported(executed("pretrain", {}, tmp_path))
    done = imported(executed("model-pool", {}, tmp_path, PYTHONPROFILEIMPORTTIME="1"))
    assert "mlflow" not in done


def test_empty_store_uri_is_the_platforms_bucket(tmp_path: Path) -> None:
    done = executed("partition", form(store_uri=""), tmp_path, FLEXFLEET_S3_STORE=f"{tmp_path}/volume")
    assert done.returncode == 0, done.stderr
    assert load_config(tmp_path / "config").run.store == f"{tmp_path}/volume"


def test_every_mistake_of_a_form_is_reported_at_the_end(tmp_path: Path) -> None:
    wrong = {"clients": 0, "algorithm": "flexflx", "dataset": "digit", "advanced": {"seed": 3}}
    done = executed("partition", form(**wrong), tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr + done.stdout
    last = "error, exit code" + done.stderr.rpartition("error, exit code")[2]
    said = " ".join(last.split())
    for part in (
        "error, exit code 2 (config.several): ",
        "partition.clients",
        "partition.clients is clients",
        "did you mean 'flexfl'?",
        "did you mean 'digits'?",
        "'seed' is the parameter",
    ):
        assert part in said
