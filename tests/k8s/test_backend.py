"""Clients as pods, on a fake cluster whose kubelet really runs their commands, over a real HTTP S3 server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_engine.errors import ConfigError
from fl_engine.ledger import Row

ROOT = Path(__file__).parents[2]

Rounds = Callable[..., Path]
Remote = tuple[str, ...]
Expected = Callable[[int], bytes]
Rows = Callable[[Remote, str], list[Row]]


def failures(row: Row) -> list[str]:
    return [line["failure"] for line in row.clients if "failure" in line]


def model(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def test_a_run_has_the_bits_of_one_without_a_cluster_and_leaves_nothing(
    cluster: Any, rounds: Rounds, remote: Remote, rows: Rows, expected: Expected, caplog: pytest.LogCaptureFixture
) -> None:
    """Also: every call is one that the Role allows, and every phase's seconds are told."""
    caplog.set_level("INFO")
    out = rounds("plain", *remote, "rounds.stop=2")
    assert model(out) == expected(2), "\n".join(cluster.logs)
    assert not cluster.objects
    pods = [o for o in cluster.created if o["kind"] == "Job"]
    assert sum(job["spec"]["completions"] for job in pods) == 6
    (told,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("median seconds of a round: ")]
    phases = ("plan", "merge", "train/upload", "train/create", "train/first_answer", "train/others", "train/tidy")
    assert all(f" {phase} " in told for phase in phases)
    for row in rows(remote, "plain"):
        inside = sum(s for name, s in row.metrics.items() if name.startswith("seconds_train/"))
        assert 0 < inside <= row.metrics["seconds_train"]
    role = next(d for d in yaml.safe_load_all((ROOT / "k8s/base/role.yaml").read_text()) if d["kind"] == "Role")
    allowed = {(verb, kind) for rule in role["rules"] for verb in rule["verbs"] for kind in rule["resources"]}
    assert set(cluster.calls) <= allowed
    # A client's pod holds no credentials and no name of a service account.
    (container,) = pods[0]["spec"]["template"]["spec"]["containers"]
    assert not any(variable["name"].startswith("AWS") for variable in container["env"])
    assert pods[0]["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_several_clients_share_a_pod(cluster: Any, rounds: Rounds, remote: Remote, expected: Expected) -> None:
    assert model(rounds("packed", *remote, "kubernetes.clients_per_pod=4")) == expected(1)
    assert all(job["spec"]["completions"] == 1 for job in cluster.created if job["kind"] == "Job")


def test_a_killed_coordinator_finds_its_jobs_again(
    cluster: Any, rounds: Rounds, remote: Remote, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fl_engine.backends.kubernetes import Kubernetes

    class Killed(BaseException):
        pass

    def collect(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Kubernetes, "_collect", collect)
        with pytest.raises(Killed):
            rounds("killed", *remote)
    before = [job["metadata"]["name"] for job in cluster.created if job["kind"] == "Job"]
    assert before
    assert model(rounds("killed", *remote, resume=True)) == expected(1)
    after = [job["metadata"]["name"] for job in cluster.created if job["kind"] == "Job"]
    assert after[: len(before)] == before and len(set(after)) == len(after), "no Job was made twice"


def test_another_machine_goes_on_with_what_the_store_holds(
    cluster: Any, rounds: Rounds, remote: Remote, expected: Expected, tmp_path: Path
) -> None:
    rounds("moved", *remote)
    (tmp_path / "runs" / "moved").rename(tmp_path / "gone")
    with pytest.raises(ConfigError, match="holds a run already"):
        rounds("moved", *remote)
    assert model(rounds("moved", *remote, "rounds.stop=2", resume=True)) == expected(2)


def test_a_device_prunes_to_its_memory_limit_and_steps_down_after_it_was_killed(
    cluster: Any, rounds: Rounds, remote: Remote, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    from components import federate as step

    monkeypatch.setattr(step, "training_peak", lambda *_: (100 * 2**20, 200 * 2**20))
    pools = "{weak: {memory: 160Mi}, medium: {memory: 160Mi}, strong: {memory: 2Gi}}"
    settings = ("training.fraction=1.0", "kubernetes.observe=cgroup", f"kubernetes.pools={pools}")
    settings += ("kubernetes.clients_per_pod=6",)
    rounds("limits", *remote, *settings)
    (row,) = rows(remote, "limits")
    tiers = {}
    for job in cluster.created:
        if job["kind"] == "Job":
            for pod in json.loads(job["metadata"]["annotations"]["flexfleet.io/clients"]):
                tiers |= dict.fromkeys(pod, job["metadata"]["labels"]["flexfleet.io/tier"])
    for line in row.clients:
        assert line["free"] == pytest.approx(60.0 if tiers[line["client"]] != "strong" else 1948.0)
    cluster.script = lambda job, index, before: "run" if before else "oom"
    rounds("down", *remote, *settings)
    (row,) = rows(remote, "down")
    assert all(line["free"] < 60.0 for line in row.clients if tiers[line["client"]] != "strong" and "free" in line)
    assert not any("pod" in failure for failure in failures(row))


def test_clients_of_one_device_each_run_where_their_data_is(cluster: Any, rounds: Rounds, remote: Remote) -> None:
    rounds("bound", *remote, "kubernetes.placement=device", "kubernetes.hostname=pi-{client}")
    found = [job for job in cluster.created if job["kind"] == "Job"]
    assert len(found) == 3
    for job in found:
        ((client,),) = json.loads(job["metadata"]["annotations"]["flexfleet.io/clients"])
        assert job["spec"]["template"]["spec"]["nodeSelector"] == {"kubernetes.io/hostname": f"pi-{client}"}


def test_with_a_device_for_each_client_no_node_holds_what_another_is_told(
    cluster: Any, rounds: Rounds, remote: Remote
) -> None:
    """Who is root on a node reads every Secret that its pods mount, whole. With placement=pool that is the tier's."""
    rounds("apart", *remote, "kubernetes.placement=device", "kubernetes.hostname=pi-{client}")
    jobs = {each["metadata"]["name"]: each for each in cluster.created if each["kind"] == "Job"}
    told = {each["metadata"]["name"]: each["stringData"] for each in cluster.created if each["kind"] == "Secret"}
    assert len(jobs) == len(told) == 3, "no Secret besides those"
    for name, job in jobs.items():
        pod = job["spec"]["template"]["spec"]
        assert [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume] == [name]
        assert name not in json.dumps([other for key, other in jobs.items() if key != name])
        (client,) = (int(host.removeprefix("pi-")) for host in pod["nodeSelector"].values())
        (text,) = told[name].values()
        assert json.loads(text)["clients"] == [client] and list(json.loads(text)["keys"]) == [str(client)]
        named = set(re.findall(r"(?:orders/|updates/)(\d+)\.", text))
        assert named == {str(client)}, "it reads its own order, and writes its own answer"
    everyone = rounds("together", *remote)
    assert everyone and any(
        len(json.loads(text)["clients"]) + len(each["stringData"]) > 2
        for each in cluster.created if each["kind"] == "Secret" for text in each["stringData"].values()
    ), "in a pool they share a Secret: the look is a real one"  # fmt: skip
