"""A lost answer creates no second run, and a new nightly regression run leaves the one in progress alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fl_engine.core.errors import Unreachable
from flexfleet.kubeflow import follow as following
from flexfleet.kubeflow import schedule as schedule_module
from flexfleet.kubeflow import submit as submit_module
from flexfleet.kubeflow.schedule import Scheduled, schedule
from flexfleet.kubeflow.submit import submit
from tests.pipelines.kubeflow import answers, drops, says, takes_and

LOST = {"reset": takes_and(drops), "504": takes_and(says(504, b"upstream request timeout", "text/plain")),
        "no id": takes_and(says(200, b"{}"))}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, checked: Callable[..., Any]) -> None:
    for module in (submit_module, schedule_module):
        monkeypatch.setattr(module, "checked", checked)
    monkeypatch.setattr(following, "EVERY_S", 0.01)


# -------------------------------------------------------------------------------------------------- one run
@pytest.mark.parametrize("lost", LOST)
def test_submit_finds_its_run_if_the_answer_is_lost(kubeflow: tuple[Any, str], lost: str) -> None:
    server, host = kubeflow
    server.spoils["POST runs"] = [LOST[lost], answers]
    found = submit("train", {}, host=host)
    assert (found.run_id, found.started, len(server.runs)) == ("r1", True, 1)


def test_submit_names_the_key_if_the_outcome_is_unknown(
    kubeflow: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, host = kubeflow
    monkeypatch.setattr(submit_module, "LOST_ANSWER_S", 0.0)
    server.spoils["POST runs"] = [takes_and(drops)]
    with pytest.raises(Unreachable, match="may have been started") as error:
        submit("train", {}, host=host)
    key = str(error.value).split("--key ")[1].split(",")[0]
    server.spoils.clear()
    found = submit("train", {}, host=host, key=key)
    assert (found.run_id, found.started, len(server.runs)) == ("r1", False, 1)


def test_a_key_starts_one_run(kubeflow: tuple[Any, str], flexfleet: Any, tmp_path: Any, monkeypatch: Any) -> None:
    server, host = kubeflow
    monkeypatch.chdir(tmp_path)
    argv = ("submit", "train", "--host", host, "--key", "build-7")
    first, second = (flexfleet(*argv, "--json") for _ in range(2))
    assert (first.json["run_id"], first.json["started"], first.json["key"]) == ("r1", True, "build-7")
    assert (second.json["run_id"], second.json["started"]) == ("r1", False)
    other = flexfleet(*argv, "--set", "seed=1")
    assert other.code == 2 and "key build-7 belongs to another start" in other.err and len(server.runs) == 1
    longer = flexfleet(*argv[:-1], "build-77", "--json")
    assert longer.json["run_id"] == "r2", "another key that begins alike"
    assert submit("train", {}, host=host).run_id == "r3", "without a key each start is a new one"


# -------------------------------------------------------------------------------------------- recurring runs
NAME, OLD, NEW = "mine", "0 0 1 * * *", "0 0 2 * * *"


def nightly(host: str, cron: str) -> Scheduled:
    return schedule("nightly", {}, NAME, cron, host=host)


def enabled(server: Any) -> list[str]:
    """The cron fields of the recurring runs that Kubeflow starts."""
    mine = [job for job in server.recurring if job["display_name"] == NAME and job["mode"] == "ENABLE"]
    return [job["trigger"]["cron_schedule"]["cron"] for job in mine]


def test_nightly_lets_the_run_in_progress_finish(kubeflow: tuple[Any, str], flexfleet: Any) -> None:
    """Kubernetes deletes the Workflows of a recurring run with it, and their runs would stay RUNNING for ever."""
    server, host = kubeflow
    nightly(host, OLD)
    server.moves[server.fire(server.recurring[0])["run_id"]] = [{"state": "RUNNING"}, {"state": "SUCCEEDED"}]
    for said in ("new", "unchanged"):
        done = flexfleet("nightly", "--host", host, "--name", NAME)
        assert f"(UTC), {said}: http" in done.out, done.err
    assert done.code == 0 and "in progress" in done.out and "r1" in done.out, done.err
    assert enabled(server) == [NEW] and [job["recurring_run_id"] for job in server.recurring] == ["j1", "j2"]
    assert following.follow("r1", host=host).exit_code == 0
    again = flexfleet("nightly", "--host", host, "--name", NAME, "--json").json
    assert (again["made"], again["replaced"], again["active_runs"]) == (False, 1, [])
    assert [job["recurring_run_id"] for job in server.recurring] == ["j2"]


@pytest.mark.parametrize("state", ["SUCCEEDED", "FAILED", "CANCELED"])
def test_nightly_deletes_an_ended_old_recurring_run(kubeflow: tuple[Any, str], state: str) -> None:
    server, host = kubeflow
    nightly(host, OLD)
    server.fire(server.recurring[0])["state"] = state
    assert nightly(host, NEW).active_runs == []
    assert [job["recurring_run_id"] for job in server.recurring] == ["j2"]


@pytest.mark.parametrize("call", ["POST recurringruns", "POST recurringruns/*", "DELETE recurringruns/*"])
@pytest.mark.parametrize("taken", [True, False])
def test_interrupted_nightly_is_completed_by_the_next_call(kubeflow: tuple[Any, str], call: str, taken: bool) -> None:
    server, host = kubeflow
    other = schedule("nightly", {}, "another", OLD, host=host).recurring_run_id
    nightly(host, OLD)
    server.spoils[call] = [takes_and(drops) if taken else drops]
    with pytest.raises(Unreachable):
        nightly(host, NEW)
    assert enabled(server), "at no time is there no recurring run"
    server.spoils.clear()
    nightly(host, NEW)
    assert enabled(server) == [NEW]
    assert [job["recurring_run_id"] for job in server.recurring if job["display_name"] != NAME] == [other]


def test_nightly_keeps_a_recurring_run_with_the_same_settings(kubeflow: tuple[Any, str], flexfleet: Any) -> None:
    server, host = kubeflow
    first, again = (flexfleet("nightly", "--host", host, "--name", NAME, "--json") for _ in range(2))
    assert (first.json["made"], again.json["made"]) == (True, False)
    assert [job["recurring_run_id"] for job in server.recurring] == ["j1"]


@pytest.mark.parametrize("off", [{"mode": "DISABLE"}, {"status": "DISABLED"}])
def test_nightly_replaces_a_disabled_recurring_run(kubeflow: tuple[Any, str], off: dict[str, str]) -> None:
    server, host = kubeflow
    nightly(host, NEW)
    server.recurring[0] |= off
    found = nightly(host, NEW)
    assert (found.made, found.replaced) == (True, 1)
    assert [job["recurring_run_id"] for job in server.recurring] == ["j2"]
