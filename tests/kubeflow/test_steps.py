"""What the suite for a real Kubeflow does, on stand-ins for its API server and its cluster."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import pytest

from fl_engine.remote.kubernetes.cluster import Cluster
from flexfleet.experiments import nightly, nightly_suite
from flexfleet.kubeflow import follow as following
from flexfleet.kubeflow.schedule import schedule
from flexfleet.kubeflow.submit import submit
from tests.kubeflow import steps
from tests.kubeflow import test_kubeflow as real
from tests.pipelines.kubeflow import nodes, pod_of


@pytest.fixture
def cluster(fake_cluster: Any) -> Cluster:
    return Cluster("kubeflow")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "EVERY_S", 0.01)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def pod(name: str, run_id: str, node: str, outputs: dict[str, str] | None = None) -> dict[str, Any]:
    """As Argo makes one of a step of Kubeflow's."""
    artifacts = {key: {"artifacts": [{"name": key, "uri": uri}]} for key, uri in (outputs or {}).items()}
    told = json.dumps({"inputs": {}, "outputs": {"artifacts": artifacts, "outputFile": "/tmp/kfp_outputs.json"}})
    launcher = ["/var/run/argo/argoexec", "emissary", "--", "/kfp-launcher/launch", "--run_id", run_id]
    main = {"name": "main", "image": "flexfleet:1", "command": [*launcher, "--executor_input", told, "--"],
            "args": ["sh", "-ec", "python3 -m kfp.dsl.executor_main"],
            "env": [{"name": "KFP_POD_NAME", "value": name}]}  # fmt: skip
    metadata = {
        "name": name,
        "namespace": "kubeflow",
        "labels": {steps.RUN: run_id, steps.WORKFLOW: node.partition(".")[0]},
        "annotations": {steps.NODE: node},
        "creationTimestamp": f"2026-01-01T00:00:0{len(name) % 10}Z",
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [main]}}


FAILED = {"state": "FAILED", "run_details": {"task_details": nodes(("run", "FAILED", 1))}}
"""A run whose task has failed, and whose pod and log are gone."""
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]  # for longer than a busy machine takes to come to it
LOOP = "compare-x(0).root(0).for-loop-1(0).iteration-iterations(0:0)(0).iteration-item(0)"


def test_a_tasks_pods_are_found_also_in_a_loop_and_drivers_are_not(fake_cluster: Any, cluster: Cluster) -> None:
    for name, run_id, node in [
        ("a", "r1", f"{LOOP}.run(0).executor(0)"),
        ("b", "r1", "compare-x.root.for-loop-1.iteration-item.run.executor"),
        ("c", "r1", f"{LOOP}.run-driver"),
        ("d", "r1", "compare-x.root.compare.executor"),
        ("e", "r2", f"{LOOP}.run.executor"),
    ]:
        fake_cluster.place(pod(name, run_id, node), SLEEP)
    assert [each["metadata"]["name"] for each in steps.pods_of(cluster, "r1", "run")] == ["a", "b"]
    assert [each["metadata"]["name"] for each in steps.pods_of(cluster, "r1", "compare", "Running")] == ["d"]
    assert steps.pods_of(cluster, "r1", "compare", "Succeeded") == []
    with pytest.raises(TimeoutError, match="a pod of gate runs: not after"):
        steps.running(cluster, "r1", "gate", seconds=0.1)


def test_the_process_is_killed_and_neither_its_launcher_nor_another_pods(
    fake_cluster: Any, cluster: Cluster, tmp_path: Path
) -> None:
    python = f"{sys.executable} -c 'import time; time.sleep(60)' -m kfp.dsl.executor_main"
    launcher = ["sh", "-c", f"{python}; echo $? > {tmp_path}/code; sleep 60", "kfp.dsl.executor_main"]
    mine = fake_cluster.place(pod("mine", "r1", f"{LOOP}.run.executor"), launcher)
    other = fake_cluster.place(pod("other", "r1", f"{LOOP}.run.executor"), [*SLEEP, "kfp.dsl.executor_main"])
    (found,) = (each for each in steps.pods_of(cluster, "r1", "run") if each["metadata"]["name"] == "mine")
    steps.kill_process(cluster, found, seconds=20)
    end = time.monotonic() + 20
    while not (tmp_path / "code").exists() or not (tmp_path / "code").read_text():
        assert time.monotonic() < end
        time.sleep(0.02)
    assert (tmp_path / "code").read_text().strip() == "137"
    assert mine.poll() is None and other.poll() is None
    with pytest.raises(TimeoutError, match="the process of mine is killed"):
        steps.kill_process(cluster, found, seconds=0.1)


def test_a_deleted_pod_is_gone_and_its_process_with_it(fake_cluster: Any, cluster: Cluster) -> None:
    process = fake_cluster.place(pod("a", "r1", "train-x.root.federate.executor"), SLEEP)
    cluster.delete("pods", steps.running(cluster, "r1", "federate")["metadata"]["name"])
    assert process.wait(20) == -9 and steps.pods_of(cluster, "r1", "federate") == []


def test_a_run_whose_pod_vanished_is_retried(kubeflow: tuple[Any, str]) -> None:
    server, host = kubeflow
    moves = [{"state": "RUNNING"}, FAILED, {"state": "RUNNING"}, {"state": "SUCCEEDED"}]
    for retries, state in ((0, "FAILED"), (2, "SUCCEEDED")):
        run_id = submit("train", {}, host=host).run_id
        server.moves[run_id] = list(moves)
        assert steps.ended(host, run_id, retries).state == state


def test_a_terminated_run_ends_as_such(kubeflow: tuple[Any, str]) -> None:
    _, host = kubeflow
    run_id = submit("train", {}, host=host).run_id
    steps.end(host, run_id)
    assert steps.ended(host, run_id, retries=1).exit_code == 3


def test_the_runs_of_a_recurring_run_are_its_own(kubeflow: tuple[Any, str]) -> None:
    server, host = kubeflow
    made, other = (schedule("train", {}, name, "0 * * * * *", host=host) for name in ("a", "b"))
    submit("train", {}, host=host)
    assert steps.fired(host, made.recurring_run_id) == []
    run = server.fire(server.recurring[0])
    server.fire(server.recurring[1])
    assert steps.fired(host, made.recurring_run_id) == [run["run_id"]]
    steps.forget(host, made.recurring_run_id)
    assert [job["recurring_run_id"] for job in server.recurring] == [other.recurring_run_id]


def test_an_artifact_is_read_where_the_last_pod_has_put_it(
    kubeflow: tuple[Any, str], fake_cluster: Any, cluster: Cluster
) -> None:
    server, host = kubeflow
    for name in ("a", "later"):
        uri = f"minio://mlpipeline/v2/artifacts/train/r1/federate/{name}/run"
        server.artifacts[f"{uri}/model.safetensors"] = name.encode()
        outputs = {"run": uri, "page": f"{uri}.html"}
        fake_cluster.place(pod(name, "r1", "train-x.root.federate.executor", outputs), SLEEP)
    assert steps.output(host, cluster, "r1", "federate", "run", "model.safetensors") == b"later"
    assert steps.model_sha256(host, cluster, "r1") == hashlib.sha256(b"later").hexdigest()
    with pytest.raises(AssertionError, match="404"):
        steps.output(host, cluster, "r1", "federate", "page")


def test_the_expected_model_is_that_of_a_run_of_the_same_parameters(
    flexfleet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_drawings: None
) -> None:
    monkeypatch.chdir(tmp_path)
    short = steps.SHORT
    parameters = {**short, "store_uri": "s3://elsewhere/runs", "run_id": "x", "mlflow_uri": "http://mlflow:5000"}
    sets = [f"{path}={json.dumps(value)}" for path, value in short["advanced"].items()]
    sets += ["partition.clients=6", "training.fraction=0.5", "training.epochs=1", "rounds.stop=3"]
    done = flexfleet("run", "--run-id", "same", "--json", sets=[*sets, "tracking.mlflow=null"])
    assert done.code == 0, done.err
    expected = steps.expected_sha256(parameters, tmp_path / "one")
    assert expected == done.json["model_sha256"]
    assert expected != steps.expected_sha256({**parameters, "seed": 1}, tmp_path / "another")


VALUES = {"avg": [0.5, 0.6], "full": [0.7, 0.8], "mb": [1.0, 1.0]}


@pytest.fixture
def passed(mlflow_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The MLflow run of a nightly regression run that passed, with VALUES."""
    monkeypatch.chdir(tmp_path)
    of = {"task": "t", "values": VALUES, "curve": []}
    about = {"suite": "digits", "id": "n", "when": "now", "commit": None, "machine": {}, "seeds": [0, 1]}
    figures = nightly_suite.NightFigures.model_validate({**about, "labels": {"skewed/flexfl": of}}).model_dump(
        mode="json"
    )
    client = mlflow.MlflowClient(mlflow_uri)
    run_id: str = client.create_run(client.create_experiment("nights")).info.run_id
    client.log_dict(run_id, figures, "figures.json")
    client.set_tag(run_id, nightly.PASSED, "True")
    return run_id


def test_passed_raised_restores_the_figures(passed: str, mlflow_uri: str) -> None:
    def now() -> dict[str, list[float]]:
        return steps.figures_of(passed, mlflow_uri)["labels"]["skewed/flexfl"]["values"]

    with pytest.raises(ZeroDivisionError), steps.passed_raised(mlflow_uri, 0.25):
        assert now() == {"avg": [0.75, 0.85], "full": [0.95, 1.05], "mb": [1.0, 1.0]}
        raise ZeroDivisionError
    assert now() == VALUES


# ------------------------------------------------------------------------ the suite itself, as far as stand-ins go
@pytest.fixture
def place(kubeflow: tuple[Any, str], cluster: Cluster) -> steps.Place:
    return steps.Place(kubeflow[1], cluster, "runs", "", "suite")


def ready(kubeflow: tuple[Any, str], fake_cluster: Any, run_id: str, task: str, name: str, value: bytes) -> Any:
    """A pod that runs a task of a run whose id is this, and what the task puts out; gives its process."""
    uri = f"minio://mlpipeline/v2/artifacts/x/{run_id}/{task}/{name}"
    kubeflow[0].artifacts |= {uri: value, f"{uri}/model.safetensors": value}
    made = pod(f"{run_id}-{task}-{name}", run_id, f"x(0).root(0).{task}(0).executor(0)", {name: uri})
    return fake_cluster.place(made, [*SLEEP, "kfp.dsl.executor_main"])


def sha256_of(value: bytes) -> Callable[..., str]:
    return lambda parameters: hashlib.sha256(value).hexdigest()


@pytest.mark.parametrize("made", [b"expected", b"another"])
def test_the_suite_sees_another_model(
    kubeflow: tuple[Any, str], fake_cluster: Any, place: steps.Place, made: bytes
) -> None:
    ready(kubeflow, fake_cluster, "r1", "federate", "run", made)
    ready(kubeflow, fake_cluster, "r1", "report", "page", b"<!doctype html><html></html>")
    with nullcontext() if made == b"expected" else pytest.raises(AssertionError):
        real.test_a_trained_model_has_the_bits_of_one_process(place, sha256_of(b"expected"))


def test_the_suite_sees_a_killed_step_retried(kubeflow: tuple[Any, str], fake_cluster: Any, place: steps.Place) -> None:
    server, _ = kubeflow
    process = ready(kubeflow, fake_cluster, "r1", "run", "run_folder", b"model")
    server.moves["r1"] = [{"state": "RUNNING"}, FAILED, {"state": "RUNNING"}, {"state": "SUCCEEDED"}]
    real.test_a_process_killed_in_a_loop_changes_no_bit(place, sha256_of(b"model"))
    assert process.wait(10) == -9 and server.retried == ["r1"]
    given = server.runs[0]["runtime_config"]["parameters"]
    assert (given["algorithms"], given["comparison_id"]) == ("flexfl", "suite-killed")


def test_the_suite_deletes_terminates_and_goes_on(
    kubeflow: tuple[Any, str], fake_cluster: Any, place: steps.Place
) -> None:
    server, _ = kubeflow
    for run_id in ("r1", "r2"):
        ready(kubeflow, fake_cluster, run_id, "federate", "run", b"model")
    real.test_a_terminated_run_goes_on_by_its_name(place, sha256_of(b"model"))
    assert [run["state"] for run in server.runs] == ["FAILED", "SUCCEEDED"]
    assert {run["runtime_config"]["parameters"]["run_id"] for run in server.runs} == {"suite-terminated"}
    process = ready(kubeflow, fake_cluster, "r3", "federate", "run", b"model")
    with pytest.raises(ValueError, match="max"):  # nobody starts the pod again here, so that none has the model
        real.test_a_deleted_pod_changes_no_bit(place, sha256_of(b"model"))
    assert process.wait(10) == -9 and server.runs[2]["state"] == "SUCCEEDED"


def test_the_suite_waits_for_a_recurring_run_and_forgets_it(
    kubeflow: tuple[Any, str], place: steps.Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = kubeflow
    ask = server.ask

    def firing(method: str, path: str, *rest: Any) -> Any:
        answer = ask(method, path, *rest)
        if method == "POST" and path.endswith("/recurringruns"):
            server.fire(server.recurring[0])
        return answer

    monkeypatch.setattr(server, "ask", firing)
    real.test_a_recurring_run_fires(place)
    assert server.recurring == [] and [run["state"] for run in server.runs] == ["SUCCEEDED"]
    assert not server.lost


def test_the_suite_sees_a_nightly_run_that_finishes(
    kubeflow: tuple[Any, str], place: steps.Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = kubeflow
    ask = server.ask

    def firing(method: str, path: str, *rest: Any) -> Any:
        answer = ask(method, path, *rest)
        if method == "POST" and path.endswith("/recurringruns") and len(server.recurring) == 1:
            server.fire(server.recurring[0])
        return answer

    monkeypatch.setattr(server, "ask", firing)
    real.test_a_new_nightly_run_lets_the_one_in_progress_finish(place)
    assert server.recurring == [] and not server.lost


def test_the_suite_reads_the_cause_of_a_wrong_parameter(kubeflow: tuple[Any, str], place: steps.Place) -> None:
    server, _ = kubeflow
    server.moves["r1"] = [{"state": "FAILED", "run_details": {"task_details": nodes(("partition", "FAILED", 1))}}]
    server.logs[pod_of(1)] = "error, exit code 2 (wrong parameter): run_id must be a plain name\n"
    real.test_a_wrong_parameter_is_named_with_its_cure(place)


def test_the_suite_sees_comparisons_and_studies_to_their_end(
    kubeflow: tuple[Any, str], fake_cluster: Any, place: steps.Place
) -> None:
    server, _ = kubeflow
    ready(kubeflow, fake_cluster, "r1", "compare", "table", b"| flexfl | all_large |")
    for number in range(4):
        fake_cluster.place(pod(f"run-{number}", "r1", f"{LOOP}.run.executor"), SLEEP)
    real.test_a_comparison_compares(place)
    ready(kubeflow, fake_cluster, "r2", "report", "best_settings", b"best")
    real.test_a_study_ends_with_a_best_trial(place)
    assert server.runs[1]["runtime_config"]["parameters"]["trials"] == 2


def test_the_suite_reads_the_report_of_a_night_that_fails(
    kubeflow: tuple[Any, str], fake_cluster: Any, place: steps.Place, passed: str, mlflow_uri: str
) -> None:
    server, _ = kubeflow
    server.moves["r2"] = [{"state": "FAILED"}]
    ready(kubeflow, fake_cluster, "r2", "gate", "page", b"skewed/flexfl is worse than the passed runs")
    real.test_a_night_passes_and_one_that_fails_keeps_its_report(replace(place, mlflow=mlflow_uri))
    assert [run["state"] for run in server.runs] == ["SUCCEEDED", "FAILED"]
