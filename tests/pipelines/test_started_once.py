"""A lost answer makes no second run, pipeline or recurring run, at whatever instant it is lost and whoever repeats."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError, EnvironmentFailure
from flexfleet.kubeflow import making, transport
from flexfleet.kubeflow import submit as submit_module
from flexfleet.kubeflow.submit import Scheduled, schedule, submit
from flexfleet.kubeflow.transport import Undecided
from tests.pipelines import hostile

MADE = ("POST pipelines/upload", "POST pipelines/upload_version", "POST experiments", "POST runs")
LOST: dict[str, hostile.Spoil] = {
    "the connection breaks": hostile.takes_and_drops,
    "a proxy gives up": hostile.takes_and_says(hostile.says(504, b"upstream request timeout", "text/plain")),
    "the session ends": hostile.takes_and_says(hostile.says(200, hostile.PAGE, "text/html")),
    "silence": hostile.takes_and_says(hostile.hangs),
    "no id": hostile.takes_and_says(hostile.sends({})),
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, checked: Callable[..., Any]) -> None:
    monkeypatch.setattr(submit_module, "_checked", checked)
    monkeypatch.setattr(making, "LOOKS_S", (0.0, 0.05))
    monkeypatch.setattr(transport, "ANSWER_S", 0.3)


# -------------------------------------------------------------------------------------------------- runs
@pytest.mark.parametrize("call", MADE)
@pytest.mark.parametrize("lost", LOST)
def test_what_was_made_is_found_where_the_answer_is_lost(kubeflow: tuple[Any, str], call: str, lost: str) -> None:
    server, host = kubeflow
    server.spoils[call] = [LOST[lost], hostile.answers]
    found = submit("train", {}, host=host)
    assert (found.run_id, found.started, found.uploaded) == ("r1", True, True)
    assert len(server.runs) == len(server.versions) == len(server.pipelines) == len(server.experiments) == 1
    assert server.heard.count(call) == 1


def test_a_run_that_comes_after_its_answer_is_lost_is_waited_for(kubeflow: tuple[Any, str]) -> None:
    server, host = kubeflow

    def later(handler: Any, answer: hostile.Answer) -> None:
        threading.Timer(0.02, answer).start()
        hostile.drops(handler, answer)

    server.spoils["POST runs"] = [later]
    assert submit("train", {}, host=host).run_id == "r1" and len(server.runs) == 1


def test_what_another_made_at_the_same_time_is_taken(kubeflow: tuple[Any, str]) -> None:
    """Names of pipelines, versions and experiments are the server's to keep apart."""
    server, host = kubeflow
    submit("train", {}, host=host)
    lists = {"GET pipelines": "pipelines", "GET pipelines/*/versions": "pipeline_versions", "GET experiments": "x"}
    for call, field in lists.items():
        server.spoils[call] = [hostile.sends({field: []}), hostile.answers]
    for call in MADE[:3]:
        server.spoils[call] = [hostile.refuses(409, 6, "already exists")]
    assert submit("train", {}, host=host).run_id == "r2"
    assert len(server.versions) == len(server.pipelines) == len(server.experiments) == 1


@pytest.mark.parametrize("taken", [False, True])
def test_where_it_cannot_be_said_the_key_makes_the_next_try_safe(kubeflow: tuple[Any, str], taken: bool) -> None:
    server, host = kubeflow
    server.spoils = {"POST runs": [hostile.takes_and_drops if taken else hostile.drops],
                     "GET runs": [hostile.says(503, b"")]}  # fmt: skip
    with pytest.raises(Undecided, match=r"The run 'train-.*' may have been started all the same: see http") as error:
        submit("train", {}, host=host)
    key = str(error.value).split("--key ")[1].split()[0]
    server.spoils.clear()
    found = submit("train", {}, host=host, key=key)
    assert (found.run_id, found.started, len(server.runs)) == ("r1", not taken, 1)


def test_a_key_starts_one_run(kubeflow: tuple[Any, str], flexfleet: Any, tmp_path: Any, monkeypatch: Any) -> None:
    server, host = kubeflow
    monkeypatch.chdir(tmp_path)
    argv = ("submit", "train", "--host", host, "--key", "build-7")
    first, second = (flexfleet(*argv, "--json") for _ in range(2))
    assert (first.json["run_id"], first.json["started"], first.json["key"]) == ("r1", True, "build-7")
    assert (second.json["run_id"], second.json["started"]) == ("r1", False)
    assert "which the key build-7 has started before" in flexfleet(*argv).out
    assert len(server.runs) == 1 and "--key build-7," in server.runs[0]["description"]
    other = flexfleet(*argv, "--set", "seed=1")
    assert other.code == 2 and "the key build-7 was of another start: the run r1" in other.err
    assert len(server.runs) == 1
    longer = flexfleet(*argv[:-1], "build-77", "--json")
    assert longer.json["run_id"] == "r2", "another key, though it begins alike"
    assert submit("train", {}, host=host).run_id == "r3", "without a key each start is a new one"


def test_a_server_that_lists_all_runs_whatever_is_asked_for(kubeflow: tuple[Any, str]) -> None:
    server, host = kubeflow
    submit("train", {}, host=host, key="a")
    server.runs.append({"run_id": "r0", "display_name": "somebody's"})
    server.spoils["GET runs"] = [lambda handler, answer: hostile.sends({"runs": server.runs[::-1]})(handler, answer)]
    assert submit("train", {}, host=host, key="b").started and not submit("train", {}, host=host, key="a").started


@pytest.mark.parametrize("key", ["", "a b", "-x", "a/b", "x" * 65, "ключ", "a,b"])
def test_a_key_is_a_plain_name(kubeflow: tuple[Any, str], key: str) -> None:
    server, host = kubeflow
    with pytest.raises(ConfigError, match="key is at most 64 letters"):
        submit("train", {}, host=host, key=key)
    assert not server.heard


def test_ctrl_c_while_it_starts_says_which_run_there_may_be(
    kubeflow: tuple[Any, str], flexfleet: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, host = kubeflow
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transport, "ANSWER_S", 30.0)

    def press(handler: Any, answer: hostile.Answer) -> None:
        answer()
        os.kill(os.getpid(), signal.SIGINT)
        hostile.hangs(handler, answer)

    server.spoils["POST runs"] = [press, hostile.answers]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    done = flexfleet("submit", "train", "--host", host)
    assert done.code == 130 and done.err.count("\n") == 1, done.err
    assert "interrupted: the run 'train-" in done.err and "may have been started" in done.err
    key = done.err.split("--key ")[1].split()[0]
    again = flexfleet("submit", "train", "--host", host, "--key", key, "--json")
    assert (again.json["run_id"], again.json["started"], len(server.runs)) == ("r1", False, 1)


# -------------------------------------------------------------------------------------------- recurring runs
NAME, OLD, NEW = "mine", "0 0 1 * * *", "0 0 2 * * *"


def nightly(host: str, cron: str) -> Scheduled:
    return schedule("nightly", {}, NAME, cron, host=host)


def crons(server: Any) -> list[str]:
    return [job["trigger"]["cron_schedule"]["cron"] for job in server.recurring if job["display_name"] == NAME]


@pytest.mark.parametrize("before", [True, False], ids=["before the request", "after its answer"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, EnvironmentFailure])
def test_at_no_instant_is_there_no_recurring_run_and_the_next_try_leaves_one(
    kubeflow: tuple[Any, str], monkeypatch: pytest.MonkeyPatch, before: bool, error: type[BaseException]
) -> None:
    """The process ends at any of its requests, with two of that name left by some earlier end."""
    server, host = kubeflow
    other = schedule("nightly", {}, "another", OLD, host=host).recurring_run_id
    nightly(host, OLD)
    server.recurring.append(server.recurring[-1] | {"recurring_run_id": "older"})
    whole, ends = 0, transport.Pool.request

    def ending_at(number: int) -> Callable[..., Any]:
        def request(self: Any, *asked: Any, **given: Any) -> Any:
            nonlocal number
            number -= 1
            if number == 0 and before:
                raise error
            answer = ends(self, *asked, **given)
            assert crons(server), "there is one"
            if number == 0:
                raise error
            return answer

        return request

    for instant in range(1, 20):
        state = list(server.recurring)
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt, EnvironmentFailure):
            patch.setattr(transport.Pool, "request", ending_at(instant))
            nightly(host, NEW)
            whole = instant
        assert len(crons(server)) >= 1
        assert nightly(host, NEW) and crons(server) == [NEW], f"after the end at request {instant}"
        assert [job["recurring_run_id"] for job in server.recurring if job["display_name"] == "another"] == [other]
        if whole:
            break
        server.recurring = state
    assert whole > 8, "healthz, pipelines, versions, experiments, list, create, two deletes; then it is done"


@pytest.mark.parametrize("lost", LOST)
def test_a_recurring_run_whose_answer_is_lost_is_taken(kubeflow: tuple[Any, str], lost: str) -> None:
    server, host = kubeflow
    nightly(host, OLD)
    server.spoils["POST recurringruns"] = [LOST[lost], hostile.answers]
    found = nightly(host, NEW)
    assert (found.recurring_run_id, found.made, found.replaced, crons(server)) == ("j2", True, 1, [NEW])


def test_the_same_stays_as_it_is(kubeflow: tuple[Any, str], flexfleet: Any) -> None:
    server, host = kubeflow
    first = flexfleet("nightly", "--host", host, "--name", NAME)
    again = flexfleet("nightly", "--host", host, "--name", NAME)
    assert first.code == again.code == 0 and "as it was" in again.out and "as it was" not in first.out
    assert [job["recurring_run_id"] for job in server.recurring] == ["j1"]


@pytest.mark.parametrize("off", [{"mode": "DISABLE"}, {"status": "DISABLED"}])
def test_one_that_is_disabled_is_replaced(kubeflow: tuple[Any, str], off: dict[str, str]) -> None:
    server, host = kubeflow
    nightly(host, NEW)
    server.recurring[0] |= off
    found = nightly(host, NEW)
    assert (found.made, found.replaced) == (True, 1)
    assert [(job["recurring_run_id"], job["mode"]) for job in server.recurring] == [("j2", "ENABLE")]


def test_one_that_cannot_be_deleted_is_named(kubeflow: tuple[Any, str], flexfleet: Any) -> None:
    server, host = kubeflow
    argv = ("nightly", "--host", host, "--name", NAME)
    assert flexfleet(*argv).code == 0
    server.spoils["DELETE recurringruns/*"] = [hostile.refuses(403, 7, "no such right"), hostile.answers]
    done = flexfleet(*argv, "--cron", NEW.replace("2", "3"))
    assert done.code == 6 and "mine is there as j2, and beside it, to start at its hours too, j1" in done.err
    assert "no such right" in done.err
    assert flexfleet(*argv, "--cron", NEW.replace("2", "3")).code == 0
    assert [job["recurring_run_id"] for job in server.recurring] == ["j2"]


@pytest.mark.parametrize("lost", [hostile.takes_and_drops, hostile.refuses(404, 5, "not found")])
def test_what_is_deleted_already_is_no_error(kubeflow: tuple[Any, str], lost: hostile.Spoil) -> None:
    server, host = kubeflow
    nightly(host, OLD)
    gone = hostile.refuses(404, 5, "not found")
    server.spoils["DELETE recurringruns/*"] = [lost, gone]
    assert nightly(host, NEW).replaced == 1
