"""What MLflow has of `flexfleet compare`: a run of the comparison itself, and those of its runs below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlflow
import pytest

from fl_engine.core.errors import Stopped
from flexfleet.experiments import compare as compare_module
from flexfleet.experiments import comparison_report, executor
from flexfleet.tracking.server import PARENT
from tests.harness.comparisons import LABELS, SEEDS, TWO, Compared

pytestmark = pytest.mark.usefixtures("quick_comparisons")


@pytest.fixture
def sets(quick: Sequence[str]) -> list[str]:
    return [given for given in quick if not given.startswith("algorithm.name=")]


def test_mlflow_groups_the_runs_and_has_the_comparison_itself(compared_template: Compared) -> None:
    client = mlflow.MlflowClient(compared_template.uri)
    experiment = client.get_experiment_by_name("digits-small_cnn-dirichlet")
    assert experiment is not None
    assert [e.name for e in client.search_experiments() if e.name != "Default"] == [experiment.name]
    of_id = client.search_runs([experiment.experiment_id], "tags.`flexfleet.comparison` = 'both'")
    assert {run.info.status for run in of_id} == {"FINISHED"}
    runs = [run for run in of_id if "flexfleet.kind" not in run.data.tags]
    assert {(run.data.tags["algorithm"], run.data.tags["seed"]) for run in runs} == {
        (label, str(seed)) for label in LABELS for seed in SEEDS
    }
    assert {run.info.run_name for run in runs} == {f"{label}-s{seed}" for label in LABELS for seed in SEEDS}
    (summary,) = [run for run in of_id if run not in runs]
    assert (summary.info.run_name, summary.data.tags["flexfleet.kind"]) == ("both", "comparison")
    assert summary.info.run_id == compared_template.json["mlflow_run_id"]
    full = compared_template.json["results"]["all_large"]["last"]["full"]
    assert summary.data.metrics["full/all_large"] == full["mean"]
    assert summary.data.metrics["full_std/all_large"] == full["std"]
    for one in compared_template.json["results"]["all_large"]["reached"]:
        assert summary.data.metrics[f"seeds_to_{one['accuracy']:g}/all_large"] == len(one["seeds"])
        if one["seeds"]:
            took = summary.data.metrics[f"seconds_simulated_to_{one['accuracy']:g}/all_large"]
            assert took == one["seconds_simulated"]["mean"]
    (one,) = [run for run in runs if run.info.run_name == "all_large-s0"]
    assert (
        one.data.metrics["final/uniformity"] == compared_template.json["results"]["all_large"]["runs"][0]["uniformity"]
    )
    assert "avg/all_large" not in summary.data.metrics and "avg/flexfl" in summary.data.metrics
    assert {file.path for file in client.list_artifacts(summary.info.run_id)} == set(comparison_report.FILES)
    assert {run.data.tags[PARENT] for run in runs} == {summary.info.run_id}
    assert PARENT not in summary.data.tags, "one level of nesting"


def test_tabulating_again_is_the_same_mlflow_run(
    compared_template: Compared, flexfleet: Any, sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(compared_template.cwd)
    before = len(mlflow.MlflowClient(compared_template.uri).search_runs(["1"]))
    sets = [*sets, "tracking.mlflow=sqlite:///mlflow.db"]
    done = flexfleet("compare", *TWO, "--id", "both", "--resume", "--json", sets=sets)
    assert done.json == compared_template.json
    assert len(mlflow.MlflowClient(compared_template.uri).search_runs(["1"])) == before == 5


def test_mlflow_run_of_a_comparison_has_its_status(
    flexfleet: Any, sets: list[str], mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, seen = mlflow.MlflowClient(mlflow_uri), []

    def stopped(jobs: Sequence[executor.Command], at_once: int) -> dict[str, int]:
        seen.extend((run.info.run_name, run.info.status) for run in client.search_runs(["1"]))
        raise Stopped("")

    argv, given = ("compare", "--algorithms", "all_large", "--id", "a"), [*sets, f"tracking.mlflow={mlflow_uri}"]
    with monkeypatch.context() as patch:
        patch.setattr(compare_module, "side_by_side", stopped)
        assert flexfleet(*argv, sets=given).code == 3
    (run,) = client.search_runs(["1"])
    assert (seen, run.info.status) == ([("a", "RUNNING")], "KILLED")
    done = flexfleet(*argv, "--resume", "--json", sets=given)
    assert (done.json["mlflow_run_id"], len(client.search_runs(["1"]))) == (run.info.run_id, 2)
    assert client.get_run(run.info.run_id).info.status == "FINISHED"
