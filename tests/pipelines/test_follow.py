"""Following a run to its end: what is reported, outages of the server, and the exit code."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_engine.core.errors import Unreachable
from fl_engine.rounds.ledger import Ledger
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.s3 import open_store
from flexfleet.kubeflow import follow as following
from flexfleet.kubeflow.submit import submit
from tests.harness.moto_server import bucket as bucket  # a fixture
from tests.harness.processes import ForkServer, refused, until
from tests.pipelines.kubeflow import Spoil, drops, nodes, passes, pod_of, refuses

METRICS = {"avg": 0.5, "full": 0.6, "train_loss": 1.5, "clients_trained": 3.0, "clients_pruned": 0.0,
           "clients_failed": 0.0, "seconds_round": 2.0}  # fmt: skip


def commit(uri: str, *rounds: int) -> None:
    """Rounds of a run as its ledger has them."""
    ledger = Ledger(open_store(uri))
    for round in rounds:
        row = Row(round=round, metrics={**METRICS, "avg": 0.5 + round / 10}, clients=())
        ledger.checkpoints.commit(round, {"w": torch.zeros(1)}, {}, [row])


def details(*tasks: tuple[str, str, int]) -> dict[str, Any]:
    """Name, state and number of the pod of each task."""
    return {"run_details": {"task_details": nodes(*tasks)}}


def follow(host: str, run_id: str, **more: Any) -> tuple[following.Followed, list[str]]:
    lines: list[str] = []
    return following.follow(run_id, host=host, report=lines.append, pause_s=0.01, **more), lines


# ------------------------------------------------------------------------------------------------ tasks and their end
def test_follow_reports_each_task_once(kubeflow: tuple[Any, str]) -> None:
    """Kubeflow adds drivers and, in 2.17, a retry node around each template."""
    server, host = kubeflow
    run_id = submit("train", {}, host=host).run_id
    server.moves[run_id] = [
        {"state": "RUNNING", **details(("partition", "RUNNING", 1))},
        details(("partition", "SUCCEEDED", 1), ("pretrain", "RUNNING", 2)),
        {"state": "SUCCEEDED", **details(("partition", "SUCCEEDED", 1), ("pretrain", "SUCCEEDED", 2))},
    ]
    found, lines = follow(host, run_id)
    assert lines[0].endswith(f"{host}/#/runs/details/{run_id}")
    assert lines[2:-1] == ["partition: running", "partition: succeeded", "pretrain: running", "pretrain: succeeded"]
    assert "succeeded" in lines[-1] and (found.state, found.exit_code) == ("SUCCEEDED", 0)
    assert found.tasks == {"partition": {"SUCCEEDED": 1}, "pretrain": {"SUCCEEDED": 1}}


INPUT_ERROR = """starting
error, exit code 2 (config.unknown): unknown algorithm 'flexflx'. Did you mean flexfl?
  In the form: algorithm.name is algorithm.
  Correct the parameter, and start another run.
F1129 02:00:00.000000 1 main.go:57] failed to execute component: exit status 2
"""


def test_follow_reads_the_cause_of_a_failure_from_the_log(kubeflow: tuple[Any, str]) -> None:
    """`task.error` is null in 2.17, and a pod's log has the launcher's line at its end."""
    server, host = kubeflow
    server.namespace = "profile"
    run_id = submit("train", {"store_uri": "/volume/runs"}, host=host).run_id
    server.moves[run_id] = [{"state": "FAILED", **details(("partition", "FAILED", 1))}]
    server.logs[pod_of(1, template="system-container-impl")] = INPUT_ERROR
    found, lines = follow(host, run_id, retries=3)
    assert (found.exit_code, found.retried) == (1, 0), "a retry does not cure a wrong parameter"
    assert found.error.startswith("partition: error, exit code 2 (config.unknown): unknown algorithm 'flexflx'")
    assert "In the form: algorithm.name is algorithm." in found.error and "main.go" not in found.error
    assert lines[-1] == found.error, "the task has said what to do"


KILLED = "round 2\nF1129 main.go:57] failed to execute component: signal: killed\n"
DRAINED = "a client pod: exit status 1\n" + "round 3\n" * 9
STOPPED = "error, exit code 3 (stopped): stopped on request\n  To continue: retry this run.\nexit status 3\n"


@pytest.mark.parametrize(
    ("log", "retried", "said"),
    [
        (KILLED, 3, "federate: exit code 137"),
        (STOPPED, 3, "federate: error, exit code 3 (stopped)"),
        (None, 3, "federate: its pod and log are gone"),
        (DRAINED, 3, "federate: its pod and log are gone"),
        ("error, exit code 6 (environment): s3://b cannot be reached\n", 0, "federate: error, exit code 6"),
    ],
    ids=["killed", "stopped", "no log", "drained", "environment"],
)
def test_follow_retries_what_a_retry_may_cure(
    kubeflow: tuple[Any, str], log: str | None, retried: int, said: str
) -> None:
    server, host = kubeflow
    run_id = submit("train", {"run_id": "mine", "store_uri": "/volume/runs"}, host=host).run_id
    failed = {"state": "FAILED", **details(("federate", "FAILED", 4))}

    def fail() -> None:
        if log is not None:
            server.logs[pod_of(4)] = log

    server.moves[run_id] = Growing(*((failed, fail) for _ in range(4)))
    found, lines = follow(host, run_id, retries=3)
    assert (found.state, found.retried, server.retried) == ("FAILED", retried, [run_id] * retried)
    assert found.error.startswith(said)
    again = (
        f"`flexfleet submit --retry {run_id}`, or `flexfleet submit train --param run_id=mine` with the same settings"
    )
    assert again in lines[-1]


def test_follow_ends_well_if_a_retry_cures_the_run(kubeflow: tuple[Any, str]) -> None:
    server, host = kubeflow
    run_id = submit("train", {}, host=host).run_id
    server.moves[run_id] = [{"state": "FAILED", **details(("federate", "FAILED", 4))}, {"state": "SUCCEEDED"}]
    server.logs[pod_of(4)] = KILLED
    found, lines = follow(host, run_id, retries=3)
    assert (found.exit_code, found.retried) == (0, 1)
    assert any("retrying the run (1 of 3)" in line for line in lines)


def test_follow_recognises_a_terminated_run(kubeflow: tuple[Any, str]) -> None:
    """2.17 ends it as FAILED; only the history has CANCELING."""
    server, host = kubeflow
    run_id = submit("nightly", {"store_uri": "/volume/runs"}, host=host).run_id
    server.ask("POST", f"/apis/v2beta1/runs/{run_id}:terminate", {}, b"")
    found, lines = follow(host, run_id, retries=3)
    assert (found.state, found.exit_code, server.runs[0]["state"]) == ("CANCELED", 3, "FAILED")
    assert any("terminated" in line for line in lines) and not server.retried
    assert f"--param night_id=night-{run_id}` with the same settings" in lines[-1]


# ------------------------------------------------------------------------------------------------- the command's end
@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("FAILED", 1), ("CANCELED", 3)])
@pytest.mark.parametrize("json", [True, False])
def test_submit_waits_and_ends_as_the_run_did(
    kubeflow: tuple[Any, str], flexfleet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, code: int,
    json: bool,
) -> None:  # fmt: skip
    server, host = kubeflow
    monkeypatch.chdir(tmp_path)
    server.moves["r1"] = [{"state": state, **details(("federate", "RUNNING", 4))}]
    done = flexfleet("submit", "train", "--host", host, "--wait", *(["--json"] if json else []))
    assert done.code == code, done.err
    told = done.err if json else done.out
    assert "federate: running" in told and f"{host}/#/runs/details/r1" in told
    if json:
        assert (done.json["run_id"], done.json["state"], done.json["uploaded"]) == ("r1", state, True)
    again = flexfleet("submit", "--follow", "r1", "--host", host, *(["--json"] if json else []))
    assert again.code == code
    assert not json or again.json == {key: done.json[key] for key in again.json}


def test_submit_terminates_retries_and_prints_logs(kubeflow: tuple[Any, str], flexfleet: Any) -> None:
    server, host = kubeflow
    run_id = submit("train", {}, host=host).run_id
    names = ("partition", "pretrain", "model-pool", "federate", "evaluate", "report")
    running = details(*((name, "RUNNING", number) for number, name in enumerate(names, 1)))
    server.moves[run_id] = [{"state": "RUNNING", **running}]
    assert "no logs" in refused(flexfleet("submit", "--logs", run_id, "--host", host), 6)
    server.logs = {pod_of(number): f"of {name}\n" for number, name in enumerate(names, 1)}
    shown = flexfleet("submit", "--logs", run_id, "--host", host)
    for number, name in enumerate(names, 1):
        assert f"==> {name} ({pod_of(number)}) <==\nof {name}" in shown.out, shown.out
    del server.moves[run_id]
    ended = flexfleet("submit", "--terminate", run_id, "--wait", "--host", host)
    assert ended.code == 3, ended.err
    again = flexfleet("submit", "--retry", run_id, "--wait", "--host", host)
    assert again.code == 0 and server.retried == [run_id], again.err
    assert "takes no retry" in refused(flexfleet("submit", "--retry", run_id, "--host", host))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_stop_following_and_not_the_run(
    kubeflow: tuple[Any, str], fork_server: ForkServer, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    server, host = kubeflow
    run_id = submit("train", {}, host=host).run_id
    server.moves[run_id] = []
    child = fork_server.start("flexfleet", "submit", "--follow", run_id, "--host", host, cwd=tmp_path)
    until(lambda: "GET runs/*" in server.heard, "the run is followed")
    child.send(number)
    done = child.wait(60)
    assert done.code == code
    assert f"flexfleet submit --follow {run_id} --host {host}" in done.err
    assert server.runs[0]["state"] == "PENDING"


# ------------------------------------------------------------------------------------------------------------- outages
# The SDK's own transport makes four attempts if the connection breaks.
@pytest.mark.parametrize("faults", [[refuses(503, 14, "gone"), refuses(429, 8, "busy")], [drops] * 4])
def test_follow_waits_for_a_server_that_does_not_respond(
    kubeflow: tuple[Any, str], caplog: pytest.LogCaptureFixture, faults: list[Spoil]
) -> None:
    server, host = kubeflow
    run_id = submit("train", {}, host=host).run_id
    server.moves[run_id] = [{"state": "RUNNING"}, {"state": "SUCCEEDED"}]

    def report(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:  # it is followed by now
            server.spoils["GET runs/*"] = [*faults, passes]

    lines: list[str] = []
    assert following.follow(run_id, host=host, report=report, pause_s=0.01).exit_code == 0
    assert server.spoils["GET runs/*"] == [passes]
    assert sum("is reachable again" in each.getMessage() for each in caplog.records) <= 1
    assert not [each for each in caplog.records if each.name.startswith("urllib3")]


def test_endless_outage_ends_with_an_error(kubeflow: tuple[Any, str], flexfleet: Any) -> None:
    server, host = kubeflow
    server.spoils["GET runs/*"] = [refuses(503, 14, "upstream connect error")]
    with pytest.raises(Unreachable):
        follow(host, "r1", patience_s=0.2)
    server.spoils.clear()
    done = flexfleet("submit", "--follow", "unknown", "--host", host)
    assert done.code == 6 and f"flexfleet submit --follow unknown --host {host}" in done.err


# --------------------------------------------------------------------------------------------------------- the rounds
class Growing(list[dict[str, Any]]):
    """Moves of a run, during each of which something else happens too."""

    def __init__(self, *steps: tuple[dict[str, Any], Callable[[], None]]) -> None:
        super().__init__(move for move, _ in steps)
        self.happens = [happens for _, happens in steps]

    def pop(self, *at: Any) -> dict[str, Any]:
        self.happens.pop(0)()
        return super().pop(*at)


def test_follow_reports_rounds_of_the_ledger(kubeflow: tuple[Any, str], bucket: str) -> None:
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
def test_follow_names_the_run_of_each_round(
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
