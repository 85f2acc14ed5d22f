"""Kubeflow with MLflow built in, as tasks see it: an MLflow run of the pipeline, a child run of the task, and the
environment variables that name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlflow
import pytest

PARENT = "mlflow.parentRunId"


@dataclass(frozen=True)
class Platform:
    uri: str
    client: Any
    experiment: str
    pipeline: str
    """The MLflow run of the pipeline's run."""
    task: str
    """The MLflow run of the task. Only Kubeflow may write it."""
    before: Any
    """The task's run as Kubeflow left it."""

    def untouched(self) -> bool:
        """Whether the task's run is as it was: status, parameters, figures, tags, inputs and artifacts."""
        now = self.client.get_run(self.task)
        return bool(now.to_dictionary() == self.before and not self.client.list_artifacts(self.task))

    def ours(self) -> list[Any]:
        """The runs of the experiment that Kubeflow did not make."""
        found = self.client.search_runs([self.experiment])
        return [run for run in found if "kfp" not in run.data.tags]


def begin(uri: str, patch: pytest.MonkeyPatch, experiment: str | None = None) -> Platform:
    """Creates the runs of a pipeline and its task, and sets the environment variables. `uri` may contain a password."""
    client = mlflow.MlflowClient(tracking_uri=uri)
    if experiment is None:
        experiment = client.create_experiment("kubeflow")
    pipeline = client.create_run(experiment, run_name="pipeline", tags={"kfp": "pipeline"}).info.run_id
    task = client.create_run(experiment, run_name="task", tags={"kfp": "task", PARENT: pipeline}).info.run_id
    patch.setenv("MLFLOW_TRACKING_URI", uri)
    patch.setenv("MLFLOW_EXPERIMENT_ID", experiment)
    patch.setenv("MLFLOW_RUN_ID", task)
    return Platform(uri, client, experiment, pipeline, task, client.get_run(task).to_dictionary())
