"""In a task of a Kubeflow that has MLflow built in: our runs are children of the pipeline's, and the task's own run is
left alone."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import pytest

from fl_engine.storage.store import FolderStore
from flexfleet.config import Config, comparison_runs, load_config
from flexfleet.config.form import config_from, overrides_from
from flexfleet.experiments import compare, nightly
from flexfleet.tracking import record as track
from flexfleet.tracking import server
from flexfleet.tracking.server import PARENT


@pytest.fixture(autouse=True)
def _on_no_platform(own_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRACKING_URI", "EXPERIMENT_ID", "EXPERIMENT_NAME", "RUN_ID"):
        monkeypatch.delenv(f"MLFLOW_{name}", raising=False)


@dataclass(frozen=True)
class Platform:
    """The MLflow runs of a Kubeflow with MLflow built in: of the pipeline's run, and its child, of the task."""

    client: mlflow.MlflowClient
    experiment: str
    pipeline: str
    task: str
    """Only Kubeflow may write this run."""
    before: Any
    """The task's run as Kubeflow left it."""

    def untouched(self) -> bool:
        """Return whether the task's run has its status, parameters, figures, tags, inputs and artifacts of before."""
        now = self.client.get_run(self.task)
        return bool(now.to_dictionary() == self.before and not self.client.list_artifacts(self.task))

    def ours(self) -> list[Any]:
        """Return the runs of the experiment that Kubeflow has not created."""
        found = self.client.search_runs([self.experiment])
        return [run for run in found if "kfp" not in run.data.tags]


@pytest.fixture
def at(mlflow_uri: str, monkeypatch: pytest.MonkeyPatch) -> Platform:
    """The environment variables name the task's MLflow run."""
    client = mlflow.MlflowClient(tracking_uri=mlflow_uri)
    experiment = client.create_experiment("kubeflow")
    pipeline = client.create_run(experiment, run_name="pipeline", tags={"kfp": "pipeline"}).info.run_id
    task = client.create_run(experiment, run_name="task", tags={"kfp": "task", PARENT: pipeline}).info.run_id
    for name, value in {"TRACKING_URI": mlflow_uri, "EXPERIMENT_ID": experiment, "RUN_ID": task}.items():
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    return Platform(client, experiment, pipeline, task, client.get_run(task).to_dictionary())


def form() -> Config:
    return config_from({"mlflow_uri": ""}, {})


# ---------------------------------------------------------------------------------------------- the address
def test_an_empty_address_is_the_platforms_and_a_given_one_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert form().tracking.mlflow is None
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.kubeflow:5000")
    assert form().tracking.mlflow == "http://mlflow.kubeflow:5000"
    assert config_from({"mlflow_uri": "http://mine:5000"}, {}).tracking.mlflow == "http://mine:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    assert form().tracking.mlflow is None


def test_environment_counts_if_nothing_else_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.yaml").write_text("tracking: {mlflow: null, experiment: own}")
    assert load_config().tracking.mlflow == "sqlite:///mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://them:5000")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    assert load_config().tracking.mlflow == "http://them:5000" and track.experiment(load_config()) == "theirs"
    assert load_config(None, ["tracking.mlflow=sqlite:///mlflow.db"]).tracking.mlflow == "sqlite:///mlflow.db"
    own = load_config(tmp_path / "own.yaml")
    assert own.tracking.mlflow is None and track.experiment(own) == "own"


def test_configuration_has_no_password_of_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    given = "https://me:pl4nted@mlflow.kubeflow/"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", given)
    config = form()
    assert config.tracking.mlflow == "https://mlflow.kubeflow" and "pl4nted" not in str(config)
    for same in ("https://mlflow.kubeflow", "https://mlflow.kubeflow/"):
        assert server.address(same) == given, "which MLflow is called by"
    for other in ("https://mlflow.kubeflow/b", "https://mlflow", "https://you:x@mlflow.kubeflow"):
        assert server.address(other) == other


# ------------------------------------------------------------------------------------------------- the tree
def test_run_is_a_child_of_the_pipelines_mlflow_run(at: Platform) -> None:
    run = at.client.get_run(track.begin(form(), "a", FolderStore("runs/a"), {"kfp.job_id": "job"}))
    assert (run.info.experiment_id, run.info.status) == (at.experiment, "SCHEDULED")
    assert (run.data.tags[PARENT], run.data.tags["kfp.job_id"]) == (at.pipeline, "job")
    assert [run.info.run_id for run in at.ours()] == [run.info.run_id]
    assert {e.name for e in at.client.search_experiments()} == {"Default", "kubeflow"}, "none of our own"
    assert at.untouched()


def test_a_given_server_knows_nothing_of_the_platforms_runs(
    at: Platform, mlflow_template: Path, tmp_path: Path
) -> None:
    shutil.copy(mlflow_template, tmp_path / "mine.db")
    uri = f"sqlite:///{tmp_path}/mine.db"
    client, run_id = (
        server.Client(uri), track.begin(config_from({"mlflow_uri": uri}, {}), "a", FolderStore("runs/a"), {})
    )  # fmt: skip
    run = client.get_run(run_id)
    assert client.get_experiment(run.info.experiment_id).name == "digits-small_cnn-dirichlet"
    assert PARENT not in run.data.tags and at.ours() == []


def test_retried_first_task_continues_its_mlflow_run(at: Platform) -> None:
    config, of_job = form(), {"kfp.job_id": "first"}
    first = track.begin(config, "a", FolderStore("runs/a"), of_job)
    assert track.begin(config, "a", FolderStore("runs/a"), of_job) == first
    assert at.client.get_run(first).info.status == "SCHEDULED"
    others = [track.begin(config, name, FolderStore(f"runs/{name}"), {"kfp.job_id": job})
              for name, job in (("b", "first"), ("a", "second"))]  # fmt: skip
    assert len({first, *others}) == 3 == len(at.ours())

    runs = comparison_runs.entries_from({"flexfl": {}, "all_large": {}}, (0,), lambda _: config, "c")
    begun = []
    for job in ("first", "first", "second"):
        comparison = compare.begin(runs, "c", {"kfp.job_id": job})
        assert comparison is not None
        begun.append(comparison.run_id)
        shutil.rmtree("runs/c")
    assert begun[0] == begun[1] != begun[2] and len(at.ours()) == 5


def test_published_run_leaves_the_tasks_mlflow_run_alone(
    at: Platform, flexfleet: Any, quick: Sequence[str], mlflow_uri: str, no_drawings: None
) -> None:
    sets = [*quick, f"tracking.mlflow={mlflow_uri}", "publish.models=true", "publish.onnx=false", "rounds.stop=1"]
    done = flexfleet("run", "--json", "--run-id", "a", sets=sets).ok()
    (run,) = at.ours()
    assert (run.info.run_id, run.info.status) == (done.json["mlflow_run_id"], "FINISHED")
    assert run.data.tags[PARENT] == at.pipeline and run.data.metrics["final/full"] >= 0
    assert at.untouched()
    assert at.client.get_run(at.pipeline).data.params == {}


def test_a_night_is_flat_below_the_pipeline(at: Platform, tiny_suite: dict[str, Any], tmp_path: Path) -> None:
    import yaml

    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_suite))
    night = nightly.prepare(
        str(tmp_path / "tiny.yaml"), "n", overrides_from({"mlflow_uri": "", "store_uri": "runs"}, {}), update=True
    )
    mlflow = nightly.begin(night, {})
    assert mlflow is not None and (mlflow.experiment_id, mlflow.parent) == (at.experiment, at.pipeline)
    runs = next(iter(night.runs.values()))
    ours = compare.begin(runs, "n-quick", {PARENT: mlflow.root})
    assert ours is not None and (ours.experiment_id, ours.parent) == (at.experiment, at.pipeline)
    again = nightly.begin(night, {}, mlflow.run_id), nightly.begin(night, {})
    assert {each.run_id for each in again if each} == {mlflow.run_id}
    assert len(at.ours()) == 2 and at.untouched()
    tried = []
    for job in ("a", "a", "b"):  # a first task in a new pod
        shutil.rmtree(night.folder)
        begun = nightly.begin(night, {"kfp.job_id": job})
        tried.append(begun and begun.run_id)
    assert tried[0] == tried[1] != tried[2] and len(at.ours()) == 4
