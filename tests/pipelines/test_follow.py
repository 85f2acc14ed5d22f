"""Following a run to its end: what is told, what a server that stumbles does to it, and the exit code."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3.session
import pytest
import torch

from fl_engine.core.errors import EnvironmentFailure
from fl_engine.rounds.ledger import ledger_in
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.places import open_store
from flexfleet.kubeflow import follow as following
from flexfleet.kubeflow.submit import submit
from flexfleet.tracking.trackers import MLflow
from tests.harness.moto_server import moto
from tests.pipelines import hostile
from tests.pipelines.kubeflow import task

METRICS = {"avg": 0.5, "full": 0.6, "train_loss": 1.5, "clients_trained": 3.0, "clients_pruned": 0.0,
           "clients_failed": 0.0, "seconds_round": 2.0}  # fmt: skip


def commit(uri: str, *rounds: int) -> None:
    """Rounds of a run as its ledger has them."""
    ledger = ledger_in(open_store(uri))
    for round in rounds:
        row = Row(round=round, metrics={**METRICS, "avg": 0.5 + round / 10}, clients=())
        ledger.checkpoints.commit(round, {"w": torch.zeros(1)}, {}, [row])


def details(*tasks: dict[str, Any]) -> dict[str, Any]:
    return {"run_details": {"task_details": list(tasks)}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"EVERY_S": 0.01, "SLOWEST_S": 0.01, "FIRST_WAIT_S": 0.01}.items():
        monkeypatch.setattr(following, name, seconds)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def follow(host: str, run_id: str, **more: Any) -> tuple[following.Followed, list[str]]:
    lines: list[str] = []
    return following.follow(run_id, host=host, tell=lines.append, **more), lines


# ------------------------------------------------------------------------------------------------ tasks and their end
def test_the_states_of_the_tasks_are_told_as_they_change_and_steps_of_the_workflow_are_not(
    kubeflow: tuple[Any, str],
) -> None:
    server, host = kubeflow
    run_id = submit("compare", {"algorithms": "flexfl,fedprox"}, host=host).run_id
    steps = ("root", "run-driver", "executor(0)", "for-loop-1", "iteration-item(1)")
    inner = [task("compare-ab12c", "RUNNING", "compare-ab12c"), *(task(step, "RUNNING") for step in steps)]
    begun = task("prepare", "SUCCEEDED")
    server.moves[run_id] = [
        {"state": "RUNNING", **details(*inner, task("prepare", "RUNNING"))},
        {**details(*inner, begun, task("run", "RUNNING", "a"), task("run", "RUNNING", "b"))},
        {**details(*inner, begun, task("run", "SUCCEEDED", "a"), task("run", "RUNNING", "b"))},
        {**details(*inner, begun, task("run", "SUCCEEDED", "a"), task("run", "RUNNING", "b"))},
        {"state": "SUCCEEDED", **details(begun, task("run", "SUCCEEDED", "a"), task("run", "SUCCEEDED", "b"))},
    ]
    found, lines = follow(host, run_id)
    assert lines[0].endswith(f"{host}/#/runs/details/{run_id}")
    assert lines[1].startswith("no rounds can be read from here")
    assert lines[2:-1] == [
        "prepare: running", "prepare: succeeded", "run: 2 running", "run: 1 running, 1 succeeded", "run: 2 succeeded",
    ]  # fmt: skip
    assert "succeeded" in lines[-1] and host in lines[-1]
    assert (found.state, found.exit_code) == ("SUCCEEDED", 0)
    assert found.tasks == {"prepare": {"SUCCEEDED": 1}, "run": {"SUCCEEDED": 2}}


def test_a_run_that_fails_says_why_and_how_to_go_on(kubeflow: tuple[Any, str]) -> None:
    server, host = kubeflow
    run_id = submit("train", {"run_id": "mine", "store_uri": "/volume/runs"}, host=host).run_id
    server.moves[run_id] = [
        {"state": "RUNNING"},
        {"state": "FAILED", **details(task("federate", "FAILED", error="exit code 137"), task("report", "SKIPPED"))},
    ]
    found, lines = follow(host, run_id)
    assert (found.state, found.exit_code) == ("FAILED", 1)
    assert lines[-2] == "federate: exit code 137" == found.error
    assert "flexfleet submit train --param run_id=mine, with the same settings, goes on" in lines[-1]


def test_a_run_that_kept_nothing_is_not_said_to_go_on(kubeflow: tuple[Any, str]) -> None:
    """The form's default is a folder, and each task has a pod with one of its own."""
    server, host = kubeflow
    run_id = submit("train", {}, host=host).run_id
    server.moves[run_id] = [{"state": "FAILED"}]
    _, lines = follow(host, run_id)
    assert "what is done is lost with the tasks' pods" in lines[-1] and "s3://bucket/prefix" in lines[-1]


def test_a_run_that_is_terminated_has_an_exit_code_of_its_own(kubeflow: tuple[Any, str]) -> None:
    server, host = kubeflow
    found_id = submit("nightly", {"store_uri": "/volume/runs"}, host=host).run_id
    server.ask("POST", f"/apis/v2beta1/runs/{found_id}:terminate", {}, b"")
    found, lines = follow(host, found_id)
    assert (found.state, found.exit_code) == ("CANCELED", 3)
    assert any("terminated" in line for line in lines)
    assert f"--param night_id=night-{found_id}, with the same settings and the same image, goes on" in lines[-1]


# ------------------------------------------------------------------------------------------------- the command's end
@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("FAILED", 1), ("CANCELED", 3)])
@pytest.mark.parametrize("json", [True, False])
def test_the_command_waits_and_ends_as_the_run_did(
    kubeflow: tuple[Any, str], flexfleet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, code: int,
    json: bool,
) -> None:  # fmt: skip
    server, host = kubeflow
    monkeypatch.chdir(tmp_path)
    server.moves["r1"] = [{"state": "RUNNING", **details(task("federate", "RUNNING"))}, {"state": state}]
    done = flexfleet("submit", "train", "--host", host, "--wait", *(["--json"] if json else []))
    assert done.code == code, done.err
    told = done.err if json else done.out
    assert "federate: running" in told and f"{host}/#/runs/details/r1" in told
    if json:
        assert (done.json["run_id"], done.json["state"], done.json["uploaded"]) == ("r1", state, True)
    again = flexfleet("submit", "--follow", "r1", "--host", host, *(["--json"] if json else []))
    assert again.code == code
    assert not json or again.json == {key: done.json[key] for key in again.json}


def test_without_wait_it_says_how_to_follow(
    kubeflow: tuple[Any, str], flexfleet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, host = kubeflow
    monkeypatch.chdir(tmp_path)
    done = flexfleet("submit", "train", "--host", host)
    assert done.code == 0 and f"flexfleet submit --follow r1 --host {host}" in done.out
    assert server.asked == 0, "nobody has asked how it goes"


@pytest.mark.parametrize("argv", [[], ["train", "--follow", "r1"]])
def test_a_pipeline_to_start_or_a_run_to_follow(kubeflow: tuple[Any, str], flexfleet: Any, argv: list[str]) -> None:
    server, host = kubeflow
    done = flexfleet("submit", *argv, "--host", host)
    assert done.code == 2 and "one of the two" in done.err and not server.runs


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_stop_following_and_not_the_run(
    kubeflow: tuple[Any, str], flexfleet: Any, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    server, host = kubeflow
    run_id = submit("train", {}, host=host).run_id
    server.moves[run_id] = []
    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(following, "EVERY_S", 0.05)

    def press() -> None:
        while server.asked < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=press, daemon=True).start()
    done = flexfleet("submit", "--follow", run_id, "--host", host)
    assert done.code == code
    assert "the run goes on" in done.err and f"flexfleet submit --follow {run_id} --host {host}" in done.err
    assert server.runs[0]["state"] == "PENDING"


# --------------------------------------------------------------------------------------------- a server that stumbles
@pytest.mark.parametrize("faults", [[503, 0, 502, 429], [0]])
def test_an_outage_is_waited_for_and_told_once(
    kubeflow: tuple[Any, str], caplog: pytest.LogCaptureFixture, faults: list[int]
) -> None:
    server, host = kubeflow
    run_id = submit("train", {}, host=host).run_id
    server.moves[run_id] = [{"state": "RUNNING"}, {"state": "SUCCEEDED"}]

    def tell(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:  # it is followed by now
            # The SDK's own transport makes four attempts where the connection breaks.
            server.faults = [fault for each in faults for fault in ([each] if each else [0] * 4)]

    lines: list[str] = []
    assert following.follow(run_id, host=host, tell=tell).exit_code == 0
    assert not server.faults
    assert sum("asked again" in line for line in lines) == 1
    assert sum("answers again" in line for line in lines) == 1
    assert not [each for each in caplog.records if each.name.startswith("urllib3")], "attempts are no news"


def test_an_outage_without_end_ends_with_how_to_come_back(
    kubeflow: tuple[Any, str], flexfleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, host = kubeflow
    run_id = submit("train", {}, host=host).run_id
    monkeypatch.setattr(following, "PATIENCE_S", 0.2)
    server.moves[run_id] = [{"state": "RUNNING"}]
    first = server.ask

    def down(method: str, path: str, *rest: Any) -> tuple[int, Any]:
        return (503, {}) if server.asked and path.endswith(run_id) else first(method, path, *rest)

    server.ask = down
    done = flexfleet("submit", "--follow", run_id, "--host", host)
    assert done.code == 6 and f"flexfleet submit --follow {run_id} --host {host}" in done.err


@pytest.mark.parametrize(
    ("fault", "said"), [(200, "is not the API of Kubeflow Pipelines"), (404, "refused: 404"), (401, "refused: 401")]
)
def test_what_another_question_would_not_mend_is_said_at_once(kubeflow: tuple[Any, str], fault: int, said: str) -> None:
    server, host = kubeflow
    run_id = submit("train", {}, host=host).run_id
    server.faults = [fault]
    with pytest.raises(EnvironmentFailure, match=said):
        follow(host, run_id)
    assert server.asked == 1


def test_defaults_that_the_server_does_not_tell_keep_no_run_from_being_followed(kubeflow: tuple[Any, str]) -> None:
    """The pipeline of a run may be gone, or somebody else's."""
    server, host = kubeflow
    run_id = submit("train", {}, host=host).run_id
    server.moves[run_id] = [{"state": "SUCCEEDED"}]
    server.spoils["GET pipelines/*/versions/v0"] = [hostile.says(400, b'{"code": 3, "error": "Invalid input error"}')]
    found, _ = follow(host, run_id)
    assert found.exit_code == 0 and "GET pipelines/*/versions/v0" in server.heard


def test_a_run_that_the_server_does_not_know(kubeflow: tuple[Any, str]) -> None:
    with pytest.raises(EnvironmentFailure, match=r"404 .*Run r9 not found"):
        follow(kubeflow[1], "r9")


# --------------------------------------------------------------------------------------------------------- the rounds
@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Any:
    given = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "us-east-1"}
    with moto() as endpoint:
        for name, value in {"AWS_ENDPOINT_URL": endpoint, **given}.items():
            monkeypatch.setenv(name, value)
        boto3.session.Session().client("s3").create_bucket(Bucket="runs")
        yield "s3://runs/all"


class Growing(list[dict[str, Any]]):
    """Moves of a run, during each of which something else happens too."""

    def __init__(self, *steps: tuple[dict[str, Any], Callable[[], None]]) -> None:
        super().__init__(move for move, _ in steps)
        self.happens = [happens for _, happens in steps]

    def pop(self, *at: Any) -> dict[str, Any]:
        self.happens.pop(0)()
        return super().pop(*at)


def test_the_rounds_are_the_ledgers_where_it_can_be_read(kubeflow: tuple[Any, str], bucket: str) -> None:
    server, host = kubeflow
    run_id = submit("train", {"store_uri": bucket, "rounds": 3, "seed": 7, "algorithm": "fedprox"}, host=host).run_id
    ledger = f"{bucket}/fedprox-s7-{run_id}"
    server.moves[run_id] = Growing(
        ({"state": "RUNNING"}, lambda: None),
        ({}, lambda: commit(ledger, 0)),
        ({}, lambda: None),
        ({"state": "SUCCEEDED"}, lambda: commit(ledger, 1, 2)),
    )
    found, lines = follow(host, run_id)
    assert [line for line in lines if "round" in line] == [
        f"round {n}/3  avg {50 + 10 * (n - 1)}.0 %  full 60.0 %  loss 1.500  3 trained  2.0 s" for n in (1, 2, 3)
    ]
    assert found.rounds == {"": {"round": 3, **METRICS, "avg": 0.7}}


@pytest.mark.parametrize(
    ("pipeline", "given", "folder"),
    [
        ("compare", {}, "compare-r1/skewed"),
        ("nightly", {"night_id": "n"}, "n-skewed"),
        ("tune", {"study_id": "s"}, "s/skewed"),
    ],
)
def test_the_rounds_of_several_runs_are_told_by_name(
    kubeflow: tuple[Any, str], tmp_path: Path, pipeline: str, given: dict[str, str], folder: str
) -> None:
    """In a volume that is mounted here at the same place, with a night beside it whose name begins alike."""
    _, host = kubeflow
    run_id = submit(pipeline, {"store_uri": str(tmp_path), **given}, host=host).run_id
    commit(f"{tmp_path}/{folder}/flexfl-s0", 0, 1)
    commit(f"{tmp_path}/{folder}/flexfl-s1", 0)
    commit(f"{tmp_path}/another/flexfl-s1", 0)
    commit(f"{tmp_path}/n-2-skewed/flexfl-s1", 0)
    found, lines = follow(host, run_id)
    assert [line.partition("  avg")[0].partition("/40")[0] for line in lines if "  round" in line] == [
        "skewed/flexfl-s0  round 1", "skewed/flexfl-s0  round 2", "skewed/flexfl-s1  round 1",
    ]  # fmt: skip
    assert {run: row["round"] for run, row in found.rounds.items()} == {"skewed/flexfl-s0": 2, "skewed/flexfl-s1": 1}


@pytest.mark.parametrize("earlier", [False, True], ids=["begun by this job", "begun by an earlier one"])
def test_the_rounds_are_mlflows_where_the_ledger_is_out_of_reach(
    kubeflow: tuple[Any, str], mlflow_uri: str, monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    """Tasks call the server by a name that this machine does not know."""
    server, host = kubeflow
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_uri)
    parameters = {"store_uri": "runs", "mlflow_uri": "http://mlflow.flexfleet:5000", "run_id": "mine"}
    run_id = submit("train", parameters, host=host).run_id
    tags = {"kfp.job_id": "r0" if earlier else run_id, "flexfleet.run_id": "mine"}
    tracked = MLflow(mlflow_uri, "digits", "flexfl-s0", tags)
    MLflow(mlflow_uri, "digits", "flexfl-s0", {"kfp.job_id": "else", "flexfleet.run_id": "x"}).metrics([(9, METRICS)])
    tracked.metrics([(1, METRICS)])
    server.moves[run_id] = Growing(
        ({"state": "RUNNING"}, lambda: None),
        ({"state": "RUNNING"}, lambda: None),
        ({"state": "SUCCEEDED"}, lambda: tracked.metrics([(2, {**METRICS, "avg": 0.75})])),
    )
    found, lines = follow(host, run_id)
    assert [line for line in lines if "round" in line] == [
        f"round {n}/40  avg {avg} %  full 60.0 %  loss 1.500  3 trained  2.0 s" for n, avg in ((1, "50.0"), (2, "75.0"))
    ]
    assert found.rounds[""]["round"] == 2


def test_where_neither_can_be_read_the_reasons_are_told(
    kubeflow: tuple[Any, str], bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, host = kubeflow
    parameters = {"store_uri": "s3://no-such-bucket/runs", "mlflow_uri": "http://127.0.0.1:9"}
    run_id = submit("train", parameters, host=host).run_id
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT", raising=False)
    found, lines = follow(host, run_id)
    assert found.exit_code == 0
    assert "MLFLOW_HTTP_REQUEST_TIMEOUT" not in os.environ, "a run in this process afterwards would give up early"
    assert "no-such-bucket" in lines[1] and "127.0.0.1:9: nothing answers" in lines[1]
    assert "states of the tasks" in lines[1]


# ------------------------------------------------------------------------------------------- a server that is odd
@pytest.mark.parametrize(
    "odd",
    [
        {"run_details": []},
        {"run_details": {"task_details": {"a": 1}}},
        {"run_details": {"task_details": [None]}},
        {"run_details": {"task_details": [{"display_name": 5.5}]}},
        {"run_details": {"task_details": [{"create_time": "yesterday"}]}},
        {"state": {"a": 1}},
        {"error": "out of luck"},
        {"finished_at": "2026-01-01T00:00:00"},
        {"runtime_config": {"parameters": [1]}},
        {"run_id": "another"},
    ],
    ids=str,
)
def test_a_run_of_another_shape_is_no_run(kubeflow: tuple[Any, str], odd: dict[str, Any]) -> None:
    server, host = kubeflow
    run_id = submit("train", {}, host=host).run_id
    server.spoils["GET runs/*"] = [hostile.sends({**server.runs[0], "state": "SUCCEEDED", **odd})]
    with pytest.raises(EnvironmentFailure, match="not the API of Kubeflow Pipelines"):
        follow(host, run_id)


@pytest.mark.parametrize(
    "odd",
    [
        {"runtime_config": {"parameters": {"run_id": "", "seed": "x", "store_uri": 5, "rounds": "many"}}},
        {"runtime_config": {"parameters": {"run_id": [], "seed": None, "mlflow_uri": {}, "algorithm": 7}}},
        {"runtime_config": {"parameters": {"night_id": None, "suite": ["digits"]}}},
        {"pipeline_spec": [1]},
        {"pipeline_spec": {"root": []}},
        {"pipeline_spec": {"root": {"inputDefinitions": {"parameters": {"rounds": 5}}}}},
        {"pipeline_version_reference": {}},
        {"created_at": "2026-01-01T00:00:00+05:00", "finished_at": "0001-01-01T00:00:00Z"},
        {"display_name": "\ud800\x1b[2J", "state": "SUCCEEDED"},
    ],
    ids=str,
)
def test_somebody_elses_run_is_followed_whatever_its_parameters(kubeflow: tuple[Any, str], odd: dict[str, Any]) -> None:
    server, host = kubeflow
    run_id = submit("train", {}, host=host).run_id
    server.spoils["GET runs/*"] = [hostile.sends({**server.runs[0], "state": "FAILED", **odd})]
    found, lines = follow(host, run_id)
    assert found.state in ("FAILED", "SUCCEEDED") and all(line.isprintable() for line in lines)
