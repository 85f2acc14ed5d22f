"""Nodes that are lost: their pods stay, and say nothing any more."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fl_engine.backends.kubernetes import backend as kubernetes
from fl_engine.backends.kubernetes import waiting
from fl_engine.backends.kubernetes.round_jobs import RoundJobs
from fl_engine.core.errors import Stopped
from fl_engine.storage.checkpoints import Row

Rounds = Callable[..., Path]
Remote = tuple[str, ...]
Expected = Callable[[int], bytes]
Rows = Callable[[Remote, str], list[Row]]

LOST = pytest.mark.parametrize("how", ["unreachable", "terminating"])


def model(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def jobs_of(cluster: Any) -> list[str]:
    return [job["metadata"]["name"] for job in cluster.created if job["kind"] == "Job"]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "TERMINATING_S", 0.5)


@LOST
def test_its_clients_are_asked_again_at_once_and_no_attempt_is_used_up(
    quick_cluster: Any, rounds: Rounds, remote: Remote, expected: Expected, how: str
) -> None:
    """Though there is an hour to its deadline."""
    seen: list[tuple[str, int]] = []

    def script(job: Any, index: int, before: int) -> str:
        seen.append((job["metadata"]["name"], index))
        return how if len(seen) == 1 else "run"

    quick_cluster.script = script
    settings = ("kubernetes.attempts=1", "kubernetes.deadline_s=3600", "kubernetes.pending_s=3600")
    assert model(rounds("node", *remote, *settings)) == expected(1)
    (later,) = (name for name in jobs_of(quick_cluster) if name.endswith("-a1"))
    assert later.removesuffix("-a1") == seen[0][0].removesuffix("-a0")
    (job,) = (j for j in quick_cluster.created if j["kind"] == "Job" and j["metadata"]["name"] == later)
    assert job["spec"]["completions"] == 1, "its clients alone"


@LOST
def test_clients_whose_turn_would_come_after_its_pods_are_asked_again_too(
    quick_cluster: Any, rounds: Rounds, remote: Remote, how: str
) -> None:
    """A Job that may have one pod at a time makes no other while that one is on the lost node."""
    first: list[str] = []

    def script(job: Any, index: int, before: int) -> str:
        first[:] = first or [job["metadata"]["name"]]
        return how if job["metadata"]["name"] == first[0] else "run"

    quick_cluster.script = script
    settings = ("kubernetes.attempts=1", "kubernetes.pending_s=3600", "kubernetes.parallelism=3")
    everyone = "training.fraction=1.0"
    assert model(rounds("turn", *remote, *settings, everyone)) == model(rounds("here", everyone))
    made = {job["metadata"]["name"]: job["spec"] for job in quick_cluster.created if job["kind"] == "Job"}
    (later,) = (spec for name, spec in made.items() if name.endswith("-a1"))
    assert (made[first[0]]["completions"], made[first[0]]["parallelism"], later["completions"]) == (2, 1, 2)


def test_one_that_comes_back_and_answers_late_does_no_harm(
    quick_cluster: Any, rounds: Rounds, remote: Remote, expected: Expected
) -> None:
    """Its client has two pods then, and both answer the same order."""
    first: list[tuple[str, int]] = []

    def script(job: Any, index: int, before: int) -> str:
        first[:] = first or [(job["metadata"]["name"], index)]
        if job["metadata"]["name"].endswith("-a1"):
            quick_cluster.back.set()
        return "unreachable" if (job["metadata"]["name"], index) == first[0] else "run"

    quick_cluster.script = script
    assert model(rounds("back", *remote, "kubernetes.attempts=1", "rounds.stop=2")) == expected(2)


def test_a_client_is_asked_again_so_many_times_and_then_fails(
    quick_cluster: Any, rounds: Rounds, remote: Remote, rows: Rows
) -> None:
    quick_cluster.script = lambda job, index, before: "unreachable" if index == 0 else "run"
    rounds("gone", *remote, "kubernetes.attempts=1", "kubernetes.quorum=0.1", "training.fraction=1.0")
    asked = Counter(name.rpartition("-a")[0] for name in jobs_of(quick_cluster))
    assert set(asked.values()) == {1 + waiting.LOST_NODES}
    found = [line["failure"] for line in rows(remote, "gone")[0].clients if "failure" in line]
    assert len(found) == len(asked) and all("its node does not answer any more" in failure for failure in found)


def test_a_client_whose_data_is_on_that_node_fails(quick_cluster: Any, rounds: Rounds, remote: Remote) -> None:
    first: list[str] = []

    def script(job: Any, index: int, before: int) -> str:
        first[:] = first or [job["metadata"]["name"]]
        return "unreachable" if job["metadata"]["name"] == first[0] else "run"

    quick_cluster.script = script
    settings = ("kubernetes.placement=device", "kubernetes.attempts=1")
    with pytest.raises(Stopped, match=r"2 of 3 clients have answered, .*its node does not answer any more"):
        rounds("bound", *remote, *settings)
    assert len(jobs_of(quick_cluster)) == 3


def test_a_coordinator_that_starts_again_waits_for_the_later_job_of_a_client(
    quick_cluster: Any, rounds: Rounds, remote: Remote, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one on the lost node is there too, and says that it is lost."""

    class Killed(BaseException):
        pass

    launch = RoundJobs.launch

    def killed(self: Any, r: Any, clients: set[int]) -> None:
        launch(self, r, clients)
        if r.nodes:
            raise Killed

    first: list[tuple[str, int]] = []
    go = threading.Event()

    def script(job: Any, index: int, before: int) -> str:
        first[:] = first or [(job["metadata"]["name"], index)]
        if job["metadata"]["name"].endswith("-a1"):
            go.wait(60)
        return "unreachable" if (job["metadata"]["name"], index) == first[0] else "run"

    say = kubernetes.Kubernetes._say_new

    def looked(self: Any, r: Any) -> None:
        say(self, r)
        if next(looks) > 2:
            go.set()

    quick_cluster.script = script
    with monkeypatch.context() as patch:
        patch.setattr(RoundJobs, "launch", killed)
        with pytest.raises(Killed):
            rounds("twice", *remote)
    before = jobs_of(quick_cluster)
    assert any(name.endswith("-a1") for name in before)
    looks = itertools.count()
    monkeypatch.setattr(kubernetes.Kubernetes, "_say_new", looked)
    assert model(rounds("twice", *remote, resume=True)) == expected(1)
    assert jobs_of(quick_cluster) == before
