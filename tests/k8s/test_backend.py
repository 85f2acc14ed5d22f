"""Clients as pods, on a fake cluster whose kubelet really runs their commands, over a real HTTP S3 server."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_engine.core.errors import ConfigError, IntegrityError
from fl_engine.exchange.assignment import COMMON
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.places import open_store
from fl_engine.training.memory import Peaks
from flexfleet.files.artifacts import PoolFile
from flexfleet.steps.prepare import Resolved
from tests.k8s.fake import leftovers, telling

ROOT = Path(__file__).parents[2]

Rounds = Callable[..., Path]
Remote = tuple[str, ...]
Expected = Callable[[int], bytes]
Rows = Callable[[Remote, str], list[Row]]


def failures(row: Row) -> list[str]:
    return [line["failure"] for line in row.clients if "failure" in line]


def model(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def test_a_run_goes_on_elsewhere_after_its_end_with_the_store_and_the_cluster_alone(
    cluster: Any, rounds: Rounds, remote: Remote, expected: Expected, tmp_path: Path
) -> None:
    """Its key outlives it."""
    store = open_store(f"{remote[1].partition('=')[2]}/long")
    out = rounds("long", *remote)
    ((_, name),) = sorted(cluster.objects)
    key = base64.b64decode(cluster.objects["secrets", name]["data"]["key"])
    assert not [k for k in store.list("") if key in store.get(k)]
    shutil.rmtree(out)
    assert model(rounds("long", *remote, "rounds.stop=2", resume=True)) == expected(2)
    assert sorted(cluster.objects) == [("secrets", name)]
    assert base64.b64decode(cluster.objects["secrets", name]["data"]["key"]) == key
    # And without the key it says where that was.
    del cluster.objects["secrets", name]
    with pytest.raises(IntegrityError, match=f"kept in the Secret flexfleet-clients/{name}: bring it there"):
        rounds("long", *remote, "rounds.stop=3", resume=True)
    assert not cluster.objects, "none is made in its place"


def test_a_run_has_the_bits_of_one_without_a_cluster_and_leaves_nothing(
    cluster: Any, rounds: Rounds, remote: Remote, rows: Rows, expected: Expected, caplog: pytest.LogCaptureFixture
) -> None:
    """Also: every call is one that the Role allows, and every phase's seconds are told. Here pods start new
    interpreters, as they do in a cluster."""
    cluster.python = sys.executable
    caplog.set_level("INFO")
    out = rounds("plain", *remote, "rounds.stop=2")
    assert model(out) == expected(2), "\n".join(cluster.logs)
    assert not leftovers(cluster)
    pods = [o for o in cluster.created if o["kind"] == "Job"]
    assert sum(job["spec"]["completions"] for job in pods) == 6
    (told,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("median seconds of a round: ")]
    phases = ("plan", "merge", "train/upload", "train/create", "train/first_answer", "train/others", "train/tidy")
    assert all(f" {phase} " in told for phase in phases)
    for row in rows(remote, "plain"):
        inside = sum(s for name, s in row.metrics.items() if name.startswith("seconds_train/"))
        assert inside == pytest.approx(row.metrics["seconds_train"], rel=0.02), "the phases add up to the round"
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


@pytest.mark.parametrize("stop", [1, 2])
def test_a_killed_coordinator_finds_its_jobs_again(
    cluster: Any, rounds: Rounds, remote: Remote, expected: Expected, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, stop: int,
) -> None:  # fmt: skip
    """Where the run is to end has changed: pods that begin now would refuse what they are told of it, so their Jobs are
    made anew."""
    from fl_engine.backends.kubernetes.backend import Kubernetes
    from fl_engine.backends.kubernetes.round_jobs import RoundJobs

    caplog.set_level("INFO", logger="flexfleet")
    taken = 0
    while cluster.slots.acquire(blocking=False):  # no pod begins before the run is resumed
        taken += 1

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
    adopt = RoundJobs.adopt

    def adopted(self: RoundJobs, r: Any) -> None:
        adopt(self, r)
        if r.plan.round == 0:
            cluster.slots.release(taken)

    monkeypatch.setattr(RoundJobs, "adopt", adopted)
    assert model(rounds("killed", *remote, f"rounds.stop={stop}", resume=True)) == expected(stop)
    after = [job["metadata"]["name"] for job in cluster.created if job["kind"] == "Job"]
    assert after[: len(before)] == before and len(set(after)) == len(after), "no Job was made twice"
    anew = [name for name in before if f"the Job {name} was made with other settings: deleted" in caplog.text]
    assert anew == (before if stop > 1 else []) and "failed" not in caplog.text


def test_another_machine_goes_on_with_what_the_store_holds(
    cluster: Any, rounds: Rounds, remote: Remote, expected: Expected, tmp_path: Path
) -> None:
    rounds("moved", *remote)
    (tmp_path / "runs" / "moved").rename(tmp_path / "gone")
    with pytest.raises(ConfigError, match="holds a run already"):
        rounds("moved", *remote)
    assert model(rounds("moved", *remote, "rounds.stop=2", resume=True)) == expected(2)


MIB = 2**20


def test_a_device_prunes_to_what_its_pod_has_left_and_steps_down_after_it_was_killed(
    cluster: Any, rounds: Rounds, remote: Remote, rows: Rows, prepared: Path, peaks: Peaks
) -> None:
    pools = "{weak: {memory: 180Mi}, medium: {memory: 180Mi}, strong: {memory: 2Gi}}"
    settings = ("training.fraction=1.0", "kubernetes.observe=cgroup", f"kubernetes.pools={pools}")
    settings += ("kubernetes.clients_per_pod=6", "run.strategy=single")
    pool = PoolFile.read(prepared / "pool" / "pool.json").levels
    names = [level.name for level in pool]

    def trained(run: str, room: int) -> list[str]:
        """What the pods of 180 MiB trained, where they have so many MiB left: checked against the peaks."""
        (row,) = rows(remote, run)
        tiers = {}
        for job in cluster.created:
            if job["kind"] == "Job":
                for pod in json.loads(job["metadata"]["annotations"]["flexfleet.io/clients"]):
                    tiers |= dict.fromkeys(pod, job["metadata"]["labels"]["flexfleet.io/tier"])
        found = []
        for line in (line for line in row.clients if "failure" not in line):
            limited = tiers[line["client"]] != "strong"
            fitting = [n for n, need in zip(names, peaks.needs, strict=True) if not limited or need <= room * MIB]
            most = min(names.index(fitting[-1]), names.index(line["sent"]))
            assert line["trained"] == names[most]
            found += [line["trained"]] if limited else []
        return found

    rounds("limits", *remote, *settings)
    first = trained("limits", 80)
    cluster.cgroup = {"memory.current": str(150 * MIB), "memory.stat": f"inactive_file {30 * MIB}\n"}
    rounds("used", *remote, *settings)
    second = trained("used", 60)
    assert set(first) != set(second), "what is free now decides, and not the limit alone"
    cluster.cgroup = {}
    cluster.script = lambda job, index, before: "run" if before else "oom"
    rounds("down", *remote, *settings)
    (row,) = rows(remote, "down")
    stepped = {line["trained"] for line in row.clients if "failure" not in line and line["free"] < 80}
    assert stepped and max(map(names.index, stepped)) < max(map(names.index, first))
    assert not any("pod" in failure for failure in failures(row))


def test_a_pod_gets_the_memory_that_its_largest_sub_model_needs(
    cluster: Any, rounds: Rounds, remote: Remote, rows: Rows, prepared: Path, peaks: Peaks
) -> None:
    pools = "{weak: {memory: auto}, medium: {memory: auto}}"
    own = ("training.fraction=1.0", "kubernetes.clients_per_pod=2", f"kubernetes.pools={pools}")
    rounds("auto", *remote, *own)
    (row,) = rows(remote, "auto")
    sent = {line["client"]: line["sent"] for line in row.clients}
    shares = {level.name: level.share for level in PoolFile.read(prepared / "pool" / "pool.json").levels}
    asked = {}
    for job in (job for job in cluster.created if job["kind"] == "Job"):
        (container,) = job["spec"]["template"]["spec"]["containers"]
        memory = container["resources"]["requests"]["memory"]
        assert container["resources"]["limits"] == {"memory": memory}
        tier = job["metadata"]["labels"]["flexfleet.io/tier"]
        pods = json.loads(job["metadata"]["annotations"]["flexfleet.io/clients"])
        most = max(sum(40 + 60 * shares[sent[client]] for client in pod) for pod in pods)
        asked[tier] = memory
        assert memory == ("1Gi" if tier == "strong" else f"{math.ceil(1.25 * (100 + most) - 1e-4)}Mi")
    assert asked["weak"] != asked["medium"]


def test_a_coordinator_measures_what_training_takes_and_tells_every_level(
    cluster: Any, rounds: Rounds, remote: Remote, rows: Rows, prepared: Path
) -> None:
    """Nothing is made up: the levels' peaks are those of this machine."""
    pools = "{weak: {memory: 2Gi}, medium: {memory: 2Gi}, strong: {memory: 2Gi}}"
    sets = ("kubernetes.observe=cgroup", f"kubernetes.pools={pools}", "kubernetes.clients_per_pod=6")
    rounds("measured", *remote, *sets)
    (row,) = rows(remote, "measured")
    assert all(line["free"] > 100 for line in row.clients)
    told = [
        json.loads(text)
        for secret in cluster.created
        if secret["kind"] == "Secret"
        for text in secret.get("stringData", {}).values()
        if "schema_version" in text
    ]
    assert told
    for each in told:
        levels, base = each["memory"]["levels"], each["memory"]["base"]
        assert len(levels) == len(PoolFile.read(prepared / "pool" / "pool.json").levels)
        assert 50 * MIB < base < min(levels) and max(levels) < 2048 * MIB


def test_memory_cannot_follow_from_what_is_sent_where_that_follows_from_memory() -> None:
    sets = ("kubernetes.observe=cgroup", "kubernetes.pools={weak: {memory: auto}}")
    with pytest.raises(ConfigError, match=r"pools\.weak\.memory is the device's, as 2Gi, and not auto"):
        Resolved.load(None, sets)


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
    told = {each["metadata"]["name"]: each["stringData"] for each in telling(cluster.created)}
    assert len(jobs) == len(told) == 3, "no Secret besides those, and the run's key, which no pod mounts"
    for name, job in jobs.items():
        pod = job["spec"]["template"]["spec"]
        assert [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume] == [name]
        assert name not in json.dumps([other for key, other in jobs.items() if key != name])
        (client,) = (int(host.removeprefix("pi-")) for host in pod["nodeSelector"].values())
        assert told[name].keys() == {"0", COMMON}
        own = json.loads(told[name]["0"])
        assert own["clients"] == [client] and list(own["keys"]) == [str(client)]
        named = set(re.findall(r"(?:orders/|updates/)(\d+)\.", "".join(told[name].values())))
        assert named == {str(client)}, "it reads its own order, and writes its own answer"
    everyone = rounds("together", *remote)
    assert everyone and any(
        len(json.loads(text)["clients"]) + len(each["stringData"].keys() - {COMMON}) > 2
        for each in telling(cluster.created) for name, text in each["stringData"].items() if name != COMMON
    ), "in a pool they share a Secret: the look is a real one"  # fmt: skip
