"""The nightly pipeline with a process for each task: a run that passes, and a run that fails the gate."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

from components.nightly_tasks import gate
from flexfleet.experiments import nightly as step
from flexfleet.experiments.nightly_verdict import REFERENCE, Verdict
from pipelines.nightly import nightly
from tests.harness.web import Server, answering

pytestmark = pytest.mark.filterwarnings("ignore:You may be attemping to run a task that uses custom:RuntimeWarning")


@dataclass(frozen=True)
class Ran:
    passed: Path
    """A folder for each task of the night that passes."""
    failed: Path
    said: str
    mlflow: str
    hook: Server
    """The webhook."""


@pytest.fixture(scope="module")
def ran(scratch: Path, tiny_suite: dict[str, Any], python: Path) -> Ran:
    """A run that passes, and one whose reference is beyond reach."""
    path = scratch / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_suite))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "REFERENCE_SEEDS", (0, 1, 2))
        patch.setattr(sys, "executable", str(python))
        step.update(step.prepare(str(path), "reference", {"tracking.mlflow": None}, update=True), jobs=2)
    mlflow = f"sqlite:///{scratch}/mlflow.db"
    given = {"suite": str(path), "mlflow_uri": mlflow, "store_uri": "store", "night_id": "one"}
    with answering() as hook, pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXFLEET_WEBHOOK", hook.url)
        patch.setenv("FLEXFLEET_KUBEFLOW_UI", "https://kubeflow.example.com/pipeline")
        nightly(**given, advanced={"publish.onnx": False})
        (passed,) = (scratch / "tasks").glob("nightly-*")
        reference = json.loads(path.with_suffix(".json").read_text())
        values = reference["labels"]["quick/flexfl"]["values"]
        values["full"] = [value + 5 for value in values["full"]]  # beyond any noise
        path.with_suffix(".json").write_text(json.dumps(reference))
        with pytest.raises(RuntimeError) as told:
            nightly(**given | {"night_id": "two"}, advanced={"publish.onnx": False})
    (failed,) = (each for each in (scratch / "tasks").glob("nightly-*") if each != passed)
    return Ran(passed, failed, str(told.value), mlflow, hook)


def test_run_that_passes_is_registered_and_reported(ran: Ran) -> None:
    verdict = Verdict.read(ran.passed / "gate" / "night" / "regression.json")
    assert verdict.passed and {c.label for c in verdict.checks} == {"quick/flexfl"}
    assert "passed" in (ran.passed / "gate" / "verdict").read_text()
    assert (ran.passed / "gate" / "page").read_text() == (ran.passed / "gate" / "night" / "regression.html").read_text()
    told = json.loads((ran.passed / "gate" / "executor_output.json").read_text())
    metrics = told["artifacts"]["metrics"]["artifacts"][0]["metadata"]
    assert metrics["passed"] == 1 and "full/quick/flexfl" in metrics
    client = MlflowClient(tracking_uri=ran.mlflow)
    assert str(client.get_model_version_by_alias("tiny-quick-flexfl", "champion").version) == "1"


def test_mlflow_runs_are_children_of_the_nightly_run(ran: Ran) -> None:
    client = MlflowClient(tracking_uri=ran.mlflow)
    (experiment,) = client.search_experiments(filter_string="name = 'regression-tiny'")
    runs = client.search_runs([experiment.experiment_id])
    nights = {run.info.run_name: run for run in runs if "mlflow.parentRunId" not in run.data.tags}
    assert {name: run.info.status for name, run in nights.items()} == {"one": "FINISHED", "two": "FAILED"}
    verdict = Verdict.read(ran.passed / "gate" / "night" / "regression.json")
    assert verdict.mlflow_run_id == nights["one"].info.run_id
    of = [run.data.tags["mlflow.parentRunId"] for run in runs if run not in nights.values()]
    assert sorted(of) == sorted(night.info.run_id for night in nights.values() for _ in range(3))
    assert all("kfp.job_id" in run.data.tags for run in runs)


def test_failed_run_calls_webhook_with_figure_limit_and_link(ran: Ran) -> None:
    ((_, _, body),) = ran.hook.seen
    told = json.loads(body)["text"]
    assert "accuracy of the full model" in told and "limit" in told
    assert "report: https://kubeflow.example.com/pipeline/#/runs/details/" in told


@pytest.mark.parametrize(
    ("task", "said"),
    [("prepare", "error, exit code 2 (config"), ("gate", "job-7: error, exit code 4 (integrity): ")],
)
def test_failed_task_calls_the_webhook(
    ran: Ran, scratch: Path, monkeypatch: pytest.MonkeyPatch, task: str, said: str
) -> None:
    """Nothing comes after it that could judge the night."""
    suite = scratch / "tiny.yaml"
    given = {"suite": str(suite), "mlflow_uri": ran.mlflow, "store_uri": "store", "night_id": "one"}
    if task == "prepare":
        given |= {"suite": "nope"}
    with answering() as hook:
        monkeypatch.setenv("FLEXFLEET_WEBHOOK", hook.url)
        if task == "prepare":
            with pytest.raises(RuntimeError, match="prepare"):
                nightly(**given)
        else:
            missing = SimpleNamespace(path=str(scratch / "missing"))
            with pytest.raises(SystemExit):
                gate.python_func(str(suite), ran.mlflow, "store", "one", "job-7", {}, missing, [], *[missing] * 4)
    ((_, _, body),) = hook.seen
    told = json.loads(body)["text"]
    assert told.startswith(
        "A task of the nightly regression run failed. There is no verdict unless a retry succeeds. Pipeline run "
    )
    assert said in told


def test_run_that_fails_the_gate_leaves_its_report(ran: Ran) -> None:
    assert "decide" in ran.said
    verdict = Verdict.read(ran.failed / "gate" / "night" / "regression.json")
    assert {c.metric for c in verdict.failed if c.against == REFERENCE} == {"full"}
    card = (ran.failed / "gate" / "verdict").read_text()
    assert "failed" in card and "accuracy of the full model" in card
    assert "What is worse" in (ran.failed / "gate" / "page").read_text()
    client = MlflowClient(tracking_uri=ran.mlflow)
    aliases = client.get_registered_model("tiny-quick-flexfl").aliases
    assert {alias: str(version) for alias, version in aliases.items()} == {"champion": "1", "candidate": "1"}
