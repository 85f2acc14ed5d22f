"""What happens to pods, to the API server and to updates, and what becomes of the round then."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3.session
import pytest

from fl_engine.backends.kubernetes import waiting
from fl_engine.core.errors import ConfigError, EnvironmentFailure, Refused, Stopped
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.s3 import S3Store
from flexfleet.files.artifacts import History
from tests.k8s.fake import leftovers

Rounds = Callable[..., Path]
Remote = tuple[str, ...]
Expected = Callable[[int], bytes]
Rows = Callable[[Remote, str], list[Row]]


def failures(row: Row) -> list[str]:
    return [line["failure"] for line in row.clients if "failure" in line]


def model(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def test_clients_that_misbehave_on_purpose_do_so_in_pods_as_elsewhere(
    cluster: Any, rounds: Rounds, remote: Remote, rows: Rows
) -> None:
    """A slow one really takes its time, so that deadlines by the clock on the wall can be tried."""
    settings = ("training.fraction=1.0", "rounds.faults='drop=0.2,slow=0.2x2,nan=0.2,flip=0.2,corrupt=0.2,always'")
    out = rounds("struck", *remote, *settings, "kubernetes.clients_per_pod=3")
    assert model(out) == model(rounds("here", *settings))
    (row,) = rows(remote, "struck")
    found = {failure.partition(",")[0][:20] for failure in failures(row)}
    assert found == {"drop: dropped out (r", "validate: finite: co", "validate: checksum: "}
    assert not leftovers(cluster)


def test_a_trace_decides_on_the_coordinator_and_pods_give_the_same_bits(
    cluster: Any, rounds: Rounds, remote: Remote, rows: Rows
) -> None:
    """A pod has no file of a trace, and needs none."""
    drawn = "{name: lognormal, online_s: 2, offline_s: 2, bandwidth_s: 1, speed: 0.001, bandwidth: 0.5, repeat_s: 90}"
    settings = (f"fleet.trace={drawn}", "training.fraction=0.5", "rounds.stop=3")
    out = rounds("traced", *remote, *settings, "kubernetes.clients_per_pod=3")
    here = rounds("here", *settings)
    assert model(out) == model(here)
    found, expected = rows(remote, "traced"), History.read(here / "history.json").rounds
    for row, other in zip(found, expected, strict=True):
        for name in ("seconds_simulated", "simulated_wait", "clients_online"):
            assert row.metrics[name] == other["metrics"][name]
        assert failures(row) == [line["failure"] for line in other["clients"] if "failure" in line]
    assert any(failure.startswith("drop: went offline") for row in found for failure in failures(row))
    assert not leftovers(cluster)


def test_a_client_that_makes_its_update_unreadable_stops_nobody(
    cluster: Any, rounds: Rounds, remote: Remote, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, refused, lock = S3Store.get, set[str](), threading.Lock()

    def get(self: S3Store, key: str, limit: int | None = None) -> bytes:
        with lock:
            refuses = key.endswith(".safetensors") and "/updates/" in key and refused <= {key}
            if refuses:
                refused.add(key)
        if refuses:
            raise Refused(f"{key}: the server refuses GetObject with InvalidObjectState")
        return read(self, key, limit)

    monkeypatch.setattr(S3Store, "get", get)
    rounds("archived", *remote)
    (row,) = rows(remote, "archived")
    (failure,) = failures(row)
    assert failure.startswith("validate: unreadable: ") and row.metrics["rejected/unreadable"] == 1.0
    assert row.metrics["clients_trained"] == 2.0


def test_eviction_a_lost_node_and_one_kill_for_memory_cost_nothing(
    cluster: Any, rounds: Rounds, remote: Remote, expected: Expected
) -> None:
    fates = iter(["evict", "vanish", "oom"])
    lock = threading.Lock()

    def script(job: Any, index: int, before: int) -> str:
        with lock:
            return next(fates, "run")

    cluster.script = script
    out = rounds("bumpy", *remote)
    assert model(out) == expected(1)
    assert next(fates, "") == ""


def test_an_api_server_that_is_busy_or_breaks_off_is_asked_again(
    cluster: Any, rounds: Rounds, remote: Remote, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fl_engine.backends.kubernetes import cluster as api

    monkeypatch.setattr(api, "FIRST_WAIT_S", 0.01)
    cluster.faults[:] = [429, 500, 0, 503]
    seen: list[int] = []

    def script(job: Any, index: int, before: int) -> str:
        if not seen:
            seen.append(index)
            cluster.faults[:] = [0, 500, 0, 429]
        return "run"

    cluster.script = script
    assert model(rounds("busy", *remote)) == expected(1)
    assert seen and not cluster.faults


def test_a_client_that_is_killed_for_memory_twice_fails_with_that_reason(
    cluster: Any, rounds: Rounds, remote: Remote, rows: Rows
) -> None:
    first: list[tuple[str, int]] = []

    def script(job: Any, index: int, before: int) -> str:
        if not first:
            first.append((job["metadata"]["name"], index))
        return "oom" if (job["metadata"]["name"], index) == first[0] else "run"

    cluster.script = script
    rounds("heavy", *remote, "kubernetes.quorum=0.5")
    (row,) = rows(remote, "heavy")
    (failure,) = failures(row)
    assert "OOMKilled (exit code 137)" in failure and row.metrics["clients_trained"] == 2


def test_a_client_that_is_killed_beside_a_proxy_that_goes_on_fails_before_the_deadline(
    quick_cluster: Any, rounds: Rounds, remote: Remote, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "TERMINATING_S", 0.5)
    quick_cluster.mesh, first = True, list[tuple[str, int]]()

    def script(job: Any, index: int, before: int) -> str:
        first[:] = first or [(job["metadata"]["name"], index)]
        return "oom" if (job["metadata"]["name"], index) == first[0] else "run"

    quick_cluster.script = script
    rounds("mesh", *remote, "kubernetes.quorum=0.5")
    (row,) = rows(remote, "mesh")
    (failure,) = failures(row)
    assert "OOMKilled (exit code 137); another container of its pod does not end" in failure


@pytest.mark.parametrize(
    ("fate", "said"),
    [("image", "ImagePullBackOff: Back-off pulling image"), ("unschedulable", "0/3 nodes are available")],
)
def test_a_pod_that_cannot_start_is_given_up_and_the_log_says_what_its_tier_waits_for(
    cluster: Any, rounds: Rounds, remote: Remote, rows: Rows, fate: str, said: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    from fl_engine.backends.kubernetes import backend as kubernetes

    caplog.set_level("INFO")
    monkeypatch.setattr(kubernetes, "SAY_EVERY_S", 0.3)
    stuck: list[str] = []

    def script(job: Any, index: int, before: int) -> str:
        stuck[:] = stuck or [job["metadata"]["labels"]["flexfleet.io/tier"]]
        return fate if job["metadata"]["labels"]["flexfleet.io/tier"] == stuck[0] else "run"

    cluster.script = script
    rounds("stuck", *remote, "kubernetes.quorum=0.1", "kubernetes.pending_s=4")
    found = failures(rows(remote, "stuck")[0])
    assert found and all(said in failure and stuck[0] in failure for failure in found)
    assert f"tier {stuck[0]} waits for" in caplog.text and said in caplog.text


def test_below_the_quorum_clients_are_asked_again_then_the_run_stops_and_goes_on_later(
    cluster: Any, rounds: Rounds, remote: Remote, expected: Expected
) -> None:
    cluster.script = lambda job, index, before: "oom"
    with pytest.raises(Stopped, match=r"0 of 3 clients have answered, 3 are needed .*OOMKilled"):
        rounds("again", *remote)
    names = [job["metadata"]["name"] for job in cluster.created if job["kind"] == "Job"]
    assert {name[-3:] for name in names} == {"-a0", "-a1"}
    cluster.script = lambda job, index, before: "run"
    assert model(rounds("again", *remote, resume=True)) == expected(1)
    assert not leftovers(cluster)


def test_a_run_whose_objects_somebody_deletes_makes_new_ones(
    quick_cluster: Any, rounds: Rounds, remote: Remote, expected: Expected
) -> None:
    """Jobs and ConfigMaps. What names the old ConfigMap as its owner is deleted too."""
    deleted: list[str] = []

    def script(job: Any, index: int, before: int) -> str:
        if deleted:
            return "run"
        for group, kind in (("apis/batch/v1", "jobs"), ("api/v1", "configmaps")):
            names = [name for of, name in quick_cluster.objects if of == kind]
            deleted.extend(names)
            for name in names:
                quick_cluster.ask("DELETE", f"/{group}/namespaces/flexfleet-clients/{kind}/{name}", {}, None)
        return "hang"

    quick_cluster.script = script
    assert model(rounds("swept", *remote)) == expected(1)
    assert len(deleted) >= 2 and not leftovers(quick_cluster)


def test_a_round_ends_at_its_deadline(cluster: Any, rounds: Rounds, remote: Remote, rows: Rows) -> None:
    cluster.script = lambda job, index, before: "hang" if index == 0 else "run"
    settings = ("kubernetes.deadline_s=20", "kubernetes.quorum=0.1", "training.fraction=1.0")
    rounds("late", *remote, *settings)
    found = rows(remote, "late")[0]
    assert found.metrics["clients_trained"] >= 1
    assert failures(found) and all("DeadlineExceeded" in failure for failure in failures(found))


def test_more_clients_are_asked_and_the_round_ends_with_as_many_as_are_wanted(
    cluster: Any, rounds: Rounds, remote: Remote, rows: Rows
) -> None:
    first: list[tuple[str, int]] = []

    def script(job: Any, index: int, before: int) -> str:
        me = (job["metadata"]["name"], index)
        if len(first) < 2 and me not in first:
            first.append(me)
        return "hang" if me in first else "run"

    cluster.script = script
    rounds("more", *remote, "rounds.over_provision=2.0")
    (row,) = rows(remote, "more")
    assert row.metrics["clients_trained"] == 3 and len(row.clients) == 6
    assert all("straggle" in failure for failure in failures(row))
    assert not leftovers(cluster)


def test_updates_that_were_tampered_with_are_rejected_counted_and_shown(
    cluster: Any, rounds: Rounds, remote: Remote, rows: Rows, s3: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A thief of one client's URLs and keys is one client; without the key, nothing is."""
    prefix = remote[1].partition("=")[2].removeprefix("s3://runs/")
    receive = Mailbox.receive
    tampers = threading.Lock()

    def tampered(self: Mailbox, plan: Any, client: int) -> Any:
        if tampers.acquire(blocking=False):  # once
            key = f"{prefix}/forged/rounds/00000/updates/{client}.json"
            client_of = boto3.session.Session().client("s3")
            manifest = json.loads(client_of.get_object(Bucket="runs", Key=key)["Body"].read())
            manifest["metrics"]["loss"] += 1.0
            client_of.put_object(Bucket="runs", Key=key, Body=json.dumps(manifest).encode())
        return receive(self, plan, client)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mailbox, "receive", tampered)
        rounds("forged", *remote)
    (row,) = rows(remote, "forged")
    assert row.metrics["rejected/signature"] == 1.0 and row.metrics["clients_trained"] == 2
    assert failures(row) == ["validate: signature: not signed with the key that came with the order"]
    assert "nothing to merge: validate: signature" in caplog.text


def test_a_store_that_pods_cannot_reach_and_a_cluster_that_is_not_there_are_said(
    cluster: Any, rounds: Rounds, remote: Remote, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"set run\.remote=s3://bucket/prefix"):
        rounds("folder", "run.backend=kubernetes")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(EnvironmentFailure, match="no cluster"):
        rounds("nowhere", *remote)


def test_what_the_role_forbids_names_the_role(cluster: Any, rounds: Rounds, remote: Remote) -> None:
    cluster.faults[:] = [403]
    with pytest.raises(EnvironmentFailure, match=r"403 injected\. The service account needs .*role\.yaml"):
        rounds("denied", *remote)
