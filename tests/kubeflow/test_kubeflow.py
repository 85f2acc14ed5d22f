"""The pipelines on a real Kubeflow (conftest.py lists what it needs): to their end, with killed and deleted pods.

Kubeflow itself starts some failed pods again: 2.16 those whose process was killed, 2.17 usually those that vanished. In
every other case `follow` retries the run, as `flexfleet submit --wait` does. The model is that of an undisturbed run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

import pytest

from flexfleet.kubeflow.client import connected
from flexfleet.kubeflow.follow import RETRIES
from tests.kubeflow import steps
from tests.kubeflow.steps import Place

LONG = 200
"""Rounds of a run that something befalls."""


Expected = Callable[[dict[str, Any]], str]


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """The model's sha256 of the same parameters in one process; each once."""
    known: dict[str, str] = {}

    def of(parameters: dict[str, Any]) -> str:
        key = str({name: value for name, value in parameters.items() if name != "run_id"})
        if key not in known:
            known[key] = steps.expected_sha256(parameters, tmp_path_factory.mktemp("expected"))
        return known[key]

    return of


def befallen(
    place: Place, pipeline: str, parameters: dict[str, Any], task: str, how: Literal["killed", "deleted"]
) -> str:
    """Return the ID of a run that succeeds although the process in one of its pods was killed, or the pod deleted."""
    run_id = place.start(pipeline, parameters)
    pod = place.running(run_id, task)
    steps.first_round(parameters, run_id)
    if how == "killed":
        place.kill_process(pod)
    else:
        place.cluster.delete("pods", pod["metadata"]["name"])
    found = place.ended(run_id, retries=RETRIES)
    assert found.state == "SUCCEEDED", found.error
    return run_id


# --------------------------------------------------------------------------------------------------- to their end
def test_a_trained_model_has_the_bits_of_one_process(place: Place, expected: Expected) -> None:
    parameters = place.parameters("plain")
    run_id = place.finish("train", parameters)
    assert place.model_sha256(run_id) == expected(parameters)
    assert b"<html" in place.output(run_id, "report", "page").lower()


def test_a_comparison_compares(place: Place) -> None:
    given = place.parameters("compared", "comparison_id", algorithms="flexfl,all_large", seeds="0,1")
    run_id = place.finish("compare", given)
    assert len(place.pods_of(run_id, "run")) == 4
    table = place.output(run_id, "compare", "table").decode()
    assert "flexfl" in table and "all_large" in table


def test_a_study_ends_with_a_best_trial(place: Place) -> None:
    """It has one worker. Several workers would need a database."""
    given = place.parameters("tuned", "study_id", trials=2)
    given["advanced"] = {**given["advanced"], "tune.held_out": [100]}
    assert place.output(place.finish("tune", given), "report", "best_settings")


def test_nightly_run_passes_and_failed_one_keeps_its_report(place: Place) -> None:
    advanced = {"publish.onnx": False}
    given = {"store_uri": place.store, "mlflow_uri": place.mlflow, "suite": "digits", "advanced": advanced}
    place.finish("nightly", {**given, "night_id": f"{place.name}-first"})
    if not place.mlflow:
        pytest.skip("the first night has passed; for one that fails set FLEXFLEET_KF_MLFLOW")
    here = os.environ.get("MLFLOW_TRACKING_URI", place.mlflow)
    with steps.passed_raised(here, 0.3):
        run_id = place.start("nightly", {**given, "night_id": f"{place.name}-second"})
        found = place.ended(run_id)
    assert found.exit_code == 1
    page = place.output(run_id, "gate", "page").decode()
    assert "passed runs" in page and "skewed/flexfl" in page


# ----------------------------------------------------------------------------------------------- what befalls them
def test_a_deleted_pod_changes_no_bit(place: Place, expected: Expected) -> None:
    parameters = place.parameters("deleted", rounds=LONG)
    run_id = befallen(place, "train", parameters, "federate", "deleted")
    assert place.model_sha256(run_id) == expected(parameters)


def test_a_process_killed_in_a_loop_changes_no_bit(place: Place, expected: Expected) -> None:
    given = place.parameters("killed", "comparison_id", algorithms="flexfl", seeds="3", rounds=LONG)
    run_id = befallen(place, "compare", given, "run", "killed")
    same = {**given, "algorithm": "flexfl", "seed": 3}
    assert place.model_sha256(run_id, "run", "run_folder") == expected(same)


def test_a_terminated_run_goes_on_by_its_name(place: Place, expected: Expected) -> None:
    parameters = place.parameters("terminated", rounds=LONG)
    first = place.start("train", parameters)
    place.running(first, "federate")
    steps.first_round(parameters, first)
    place.terminate(first)
    assert place.ended(first).exit_code == 3
    second = place.finish("train", parameters)
    assert place.model_sha256(second) == expected(parameters)


def test_a_recurring_run_fires(place: Place) -> None:
    made = place.schedule(place.parameters("recurring"), place.name, "*/20 * * * * *")
    with connected(place.host) as kubeflow:
        try:
            run_id = place.fired(made.recurring_run_id)
            kubeflow.disable_recurring_run(made.recurring_run_id)
            found = place.ended(run_id)
        finally:
            kubeflow.delete_recurring_run(made.recurring_run_id)  # and with it the Workflows of its runs
    assert found.exit_code == 0, found.error


def test_a_new_nightly_run_lets_the_one_in_progress_finish(place: Place) -> None:
    given, name = place.parameters("renewed"), f"{place.name}-renewed"
    run_id = place.fired(place.schedule(given, name, "*/20 * * * * *").recurring_run_id)
    second = place.schedule(given, name, "0 0 0 1 1 *")
    try:
        assert second.replaced == 1
        assert place.ended(run_id).exit_code == 0
    finally:
        with connected(place.host) as kubeflow:
            kubeflow.delete_recurring_run(second.recurring_run_id)


def test_a_wrong_parameter_is_named_with_its_cure(place: Place) -> None:
    """`submit` refuses such a value, so the run is started as from the UI."""
    found = place.ended(place.start_unchecked(place.parameters("wrong", run_id="not/plain")))
    assert found.exit_code == 1 and "exit code 2" in found.error and "run_id" in found.error
