"""A run that is stopped, or killed, while pods are awaited: when it is seen, and what is left."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fl_engine.backends import _tidied
from fl_engine.backends.kubernetes.backend import Kubernetes, jobs
from fl_engine.backends.kubernetes.round_jobs import RoundJobs
from fl_engine.core.errors import Diverged, EnvironmentFailure, IntegrityError, Replaced, Stopped
from tests.k8s.fake import leftovers, telling

Rounds = Callable[..., Path]
Remote = tuple[str, ...]
Expected = Callable[[int], bytes]


class Killed(BaseException):
    pass


def model(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def jobs_of(cluster: Any) -> list[str]:
    return [job["metadata"]["name"] for job in cluster.created if job["kind"] == "Job"]


@pytest.mark.parametrize("error", [Stopped, EnvironmentFailure, IntegrityError, Diverged, KeyboardInterrupt, Replaced])
def test_whatever_ends_a_run_the_log_says_how_to_remove_what_is_left(
    caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    """Pods that stay are there between rounds too. What another coordinator has taken over is not left."""

    class Pods:
        def what_is_left(self) -> str:
            return "delete what is left"

    with pytest.raises(error), _tidied(Pods()):  # type: ignore[type-var]
        raise error
    assert ("delete what is left" in caplog.text) == (error is not Replaced)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, Stopped), (signal.SIGINT, KeyboardInterrupt)])
def test_it_is_seen_while_pods_are_awaited_and_the_log_says_how_to_remove_what_is_left(
    quick_cluster: Any, rounds: Rounds, remote: Remote, expected: Expected, caplog: pytest.LogCaptureFixture,
    number: signal.Signals, raised: type[BaseException],
) -> None:  # fmt: skip
    """Or the run is resumed, and finds its pods again."""
    sent: list[int] = []

    def script(job: Any, index: int, before: int) -> str:
        if not sent:
            sent.append(index)
            os.kill(os.getpid(), number)
        return "hang"

    quick_cluster.script = script
    with pytest.raises(raised):
        rounds("stopped", *remote)
    found = re.search(r"kubectl -n flexfleet-clients delete (\S+) -l (\S+)$", caplog.text, re.MULTILINE)
    assert found is not None
    with quick_cluster.lock:
        kinds = {kind for kind, _ in quick_cluster.objects}
        assert {"jobs", "secrets", "configmaps"} <= kinds
        for kind in found[1].split(","):
            path = "/apis/batch/v1" if kind == "jobs" else "/api/v1"
            where = f"{path}/namespaces/flexfleet-clients/{kind}"
            _, listed = quick_cluster.ask("GET", where, {"labelSelector": [found[2]]}, None)
            for item in listed["items"]:
                quick_cluster.ask("DELETE", f"{where}/{item['metadata']['name']}", {}, None)
        assert not leftovers(quick_cluster)
    quick_cluster.script = lambda job, index, before: "run"
    assert model(rounds("stopped", *remote, resume=True)) == expected(1)


def test_a_jobs_secret_goes_with_it(
    quick_cluster: Any, rounds: Rounds, remote: Remote, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when its time to live is over. A coordinator that was killed before it made one makes it when it starts again,
    and does not make the Job twice."""
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "secret", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            rounds("secret", *remote)
    before = jobs_of(quick_cluster)
    assert before and not telling(quick_cluster.created)
    with monkeypatch.context() as patch:
        patch.setattr(Kubernetes, "_collect", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            rounds("secret", *remote, resume=True)
    secrets = telling(quick_cluster.created)
    assert sorted(s["metadata"]["name"] for s in secrets) == sorted(jobs_of(quick_cluster))
    for secret in secrets:
        (owner,) = secret["metadata"]["ownerReferences"]
        job = quick_cluster.objects["jobs", secret["metadata"]["name"]]
        assert (owner["kind"], owner["uid"]) == ("Job", job["metadata"]["uid"])
    assert model(rounds("secret", *remote, resume=True)) == expected(1)
    assert jobs_of(quick_cluster) == [s["metadata"]["name"] for s in secrets]


def test_a_secret_of_a_job_that_is_gone_is_not_taken_for_another_ones(
    quick_cluster: Any, rounds: Rounds, remote: Remote, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster takes a while to delete what a deleted Job owned; meanwhile the Job's name can be taken again."""
    with monkeypatch.context() as patch:
        patch.setattr(Kubernetes, "_collect", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            rounds("old", *remote)
    with quick_cluster.lock:
        for kind, name in list(quick_cluster.objects):
            if kind in ("jobs", "pods"):
                del quick_cluster.objects[kind, name]
        old = telling(quick_cluster.objects.values())
        assert old
        for secret in old:
            secret["stringData"] = dict.fromkeys(secret["stringData"], "{}")
    assert model(rounds("old", *remote, resume=True)) == expected(1)
    assert {name[-3:] for name in jobs_of(quick_cluster)} == {"-a0"}, "nobody had to be asked twice"


def test_the_jobs_of_a_round_whose_answers_were_all_there_go_before_the_next_round(
    quick_cluster: Any, rounds: Rounds, remote: Remote, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(RoundJobs, "tidy", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            rounds("answered", *remote)
    assert any(kind == "jobs" for kind, _ in quick_cluster.objects)
    before, old = len(jobs_of(quick_cluster)), list[str]()

    def script(job: Any, index: int, before: int) -> str:
        old.extend(name for kind, name in quick_cluster.objects if kind == "jobs" and "-r0-" in name)
        return "run"

    quick_cluster.script = script
    assert model(rounds("answered", *remote, "rounds.stop=2", resume=True)) == expected(2)
    assert old == [] and all("-r1-" in name for name in jobs_of(quick_cluster)[before:])
