"""The train graph on a Kubeflow that has MLflow built in: nobody gives an address, the environment of the tasks does.
Its server wants a password, which here is in that address; the Secret's variables are not there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flexfleet.files.artifacts import RunFile
from pipelines.train import train
from tests.harness import platform
from tests.harness.platform import PARENT, Platform
from tests.pipelines.conftest import PASSWORD

GIVEN: dict[str, Any] = {
    "algorithm": "all_large", "rounds": 1, "clients": 6, "client_fraction": 0.5, "local_epochs": 1, "run_id": "same",
    "store_uri": "store", "advanced": {
        "training.batch_size": 20, "partition.minimum": 10, "publish.models": True, "publish.onnx": False},
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:You may be attemping to run a task that uses custom:RuntimeWarning")


@dataclass(frozen=True)
class Ran:
    at: Platform
    scratch: Path
    tasks: Path
    """A folder for each task."""


@pytest.fixture(scope="module")
def ran(scratch: Path, mlflow_with_password: str) -> Iterator[Ran]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("USERNAME", "PASSWORD"):
            patch.delenv(f"MLFLOW_TRACKING_{name}")
        patch.setenv("FLEXFLEET_KUBEFLOW_UI", "https://kubeflow/pipeline")
        at = platform.begin(mlflow_with_password.replace("://", f"://me:{PASSWORD}@"), patch)
        train(**GIVEN)
        (tasks,) = (scratch / "tasks").glob("train-*")
        yield Ran(at, scratch, tasks)


def test_the_run_is_a_child_of_the_pipelines_run_in_its_experiment(ran: Ran) -> None:
    (run,) = ran.at.ours()
    tags = run.data.tags
    assert (run.info.status, tags[PARENT], tags["flexfleet.run_id"]) == ("FINISHED", ran.at.pipeline, "same")
    assert tags["kfp.run"] == f"https://kubeflow/pipeline/#/runs/details/{tags['kfp.job_id']}"
    assert run.data.metrics["final/full"] > 0 and run.data.params["algorithm.name"] == "all_large"
    assert RunFile.read(ran.scratch / "store" / "same" / "run.json").mlflow_run_id == run.info.run_id
    experiments = {experiment.name for experiment in ran.at.client.search_experiments()}
    assert experiments == {"Default", "kubeflow"}
    told = json.loads((ran.tasks / "federate" / "executor_output.json").read_text())
    link = told["artifacts"]["run"]["artifacts"][0]["metadata"]["mlflow"]
    assert link.endswith(f"/#/experiments/{ran.at.experiment}/runs/{run.info.run_id}")


def test_the_tasks_own_run_is_as_kubeflow_left_it(ran: Ran) -> None:
    assert ran.at.untouched()
    pipeline = ran.at.client.get_run(ran.at.pipeline)
    assert (pipeline.data.params, pipeline.data.metrics, pipeline.info.status) == ({}, {}, "RUNNING")


def test_the_platforms_password_is_in_no_artifact_and_no_file(ran: Ran, telling: Any) -> None:
    assert telling(ran.tasks, ran.scratch / "store") == []


def test_a_job_that_goes_on_with_it_is_told_in_a_tag(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    from fl_engine.storage.store import FolderStore
    from flexfleet.config import form
    from flexfleet.tracking import record as track

    (before,) = ran.at.ours()
    other = platform.begin(str(ran.at.uri), monkeypatch, ran.at.experiment)
    store = FolderStore(ran.scratch / "store" / "same")
    config = form.config_from({"mlflow_uri": ""}, {})
    assert track.begin(config, "same", store, {}) == before.info.run_id
    track.start(config, RunFile.read(store.root / "run.json"), store.root, {})
    (run,) = ran.at.ours()
    assert run.data.tags[PARENT] == ran.at.pipeline and other.pipeline in run.data.tags.values()
    assert other.untouched()
