"""Pods that stay for the run (kubernetes.lifetime=run), on the fake cluster over a real HTTP S3 server: that they are
made once, what they are told, and when the run stops for want of them."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_engine.backends.agents.backend import Agents
from fl_engine.backends.agents.loans import key_under, reachable
from fl_engine.backends.agents.post import Post
from fl_engine.backends.agents.roster import Member, Roster
from fl_engine.backends.agents.settings import AgentsConfig
from fl_engine.backends.kubernetes import crew, jobs, lasting, waiting
from fl_engine.backends.kubernetes.backend import Kubernetes
from fl_engine.backends.kubernetes.cluster import Cluster
from fl_engine.backends.kubernetes.ground import Ground
from fl_engine.backends.kubernetes.settings import KubernetesConfig
from fl_engine.core.errors import Stopped
from fl_engine.core.types import Device, RoundPlan, SubmodelSpec, WorkOrder
from fl_engine.exchange.assigning import assignment
from fl_engine.exchange.assignment import SITE_FILES
from fl_engine.exchange.letters import LETTER_BYTES, Letter, Loan
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.updates import key_of
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.places import open_store
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.store import MemoryStore
from tests.k8s.fake import leftovers, telling
from tests.k8s.staying import EVERYBODY, SHARED, STAY, Drained, Killed, Mortal, Staying, jobs_of, model

ROOT = Path(__file__).parents[2]

Rounds = Callable[..., Path]
Remote = tuple[str, ...]
Expected = Callable[[int], bytes]
Rows = Callable[[Remote, str], list[Row]]


def test_a_run_of_several_rounds_has_the_bits_of_one_without_a_cluster_and_makes_its_pods_once(
    cluster: Any, rounds: Rounds, remote: Remote, expected: Expected
) -> None:
    """New interpreters of the pods' own command. Also: every call is one that the Role allows, pods hold no
    credentials, and nothing is left."""
    cluster.python = sys.executable
    cluster.slots = threading.Semaphore(100)
    started: list[tuple[str, int, int]] = []

    def script(job: Any, index: int, before: int) -> str:
        started.append((job["metadata"]["name"], index, before))
        return "run"

    cluster.script = script
    out = rounds("stays", *remote, *STAY)
    assert model(out) == expected(3), "\n".join(cluster.logs)
    made = jobs_of(cluster)
    assert len(made) == len({job["metadata"]["labels"]["flexfleet.io/tier"] for job in made}), "one for each tier"
    assert len(started) == len(set(started)) == sum(job["spec"]["completions"] for job in made) == 3
    assert {before for _, _, before in started} == {0}, "no pod was started again"
    assert not leftovers(cluster)
    role = next(d for d in yaml.safe_load_all((ROOT / "k8s/base/role.yaml").read_text()) if d["kind"] == "Role")
    allowed = {(verb, kind) for rule in role["rules"] for verb in rule["verbs"] for kind in rule["resources"]}
    assert set(cluster.calls) <= allowed
    for job in made:
        spec = job["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        assert not any(variable["name"].startswith("AWS") for variable in container["env"])
        assert spec["automountServiceAccountToken"] is False
        assert "activeDeadlineSeconds" not in job["spec"] and job["spec"]["backoffLimitPerIndex"] == jobs.FAILURES
    for secret in telling(cluster.created):
        for name, text in secret["stringData"].items():
            told = json.loads(text)
            assert name == "common.json" or (told["folder"] is None and "X-Amz-Signature" in told["letter"])
    left = open_store(f"{remote[1].partition('=')[2]}/stays").list("agents/")
    assert [key for key in left if "/lease/" not in key] == [], "letters and beats are gone"


@pytest.mark.parametrize("strategy", ["batched", "single"])
def test_clients_that_share_a_pod_have_the_bits_of_those_that_are_alone(
    cluster: Any, rounds: Rounds, remote: Remote, strategy: str
) -> None:
    """Real processes. Side by side in the pod, or one after the other."""
    cluster.slots = threading.Semaphore(100)
    how = (*EVERYBODY, f"run.strategy={strategy}")
    assert model(rounds("shared", *remote, *SHARED, *how)) == model(rounds("here", *how)), "\n".join(cluster.logs)
    assert sum(job["spec"]["completions"] for job in jobs_of(cluster)) == 3
    together = re.findall(r"client (\d+), (\d+): answered", "\n".join(cluster.logs))
    assert len(together) == 6, "each pod has two orders at once, in both rounds"


def test_a_letter_holds_as_many_orders_as_a_pod_may(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the longest URLs: temporary credentials sign each with their token."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", "+/" * 750)
    box = Mailbox(open_store("s3://runs/a-run-with-a-name-that-is-quite-long"), None, key_of(b"k" * 32))
    orders = [WorkOrder(7, 10**6 + i, SubmodelSpec.of({}), {}, seed=i, level=0) for i in range(crew.MOST_ORDERS)]
    names = {o.client: [f"rounds/00007/orders/{o.client}.{kind}" for kind in ("json", "a" * 64)] for o in orders}
    key = key_under(key_of(b"k" * 32), "site", "ab" * 8)
    box.order_sums = {o.client: "d" * 64 + ":9999" for o in orders}
    told = assignment(box, orders, key, AgentsConfig(), {name: "e" * 64 + ":99999" for name in SITE_FILES}, "c" * 64)
    told = reachable(told, box, orders, names, "ab" * 8, AgentsConfig(), "POST")
    letter = Letter(name="run-0", number=1, loan=Loan(id="ab" * 8, seconds=60.0, assignment=told)).signed("ab" * 32)
    assert LETTER_BYTES / 4 < len(letter.text()) < LETTER_BYTES / 1.5


@pytest.mark.parametrize("token", [0, 1000, 1500])
def test_a_secret_holds_the_invitations_of_all_pods_of_a_job(monkeypatch: pytest.MonkeyPatch, token: int) -> None:
    """Each URL that temporary credentials sign holds their token, and a form holds it twice."""
    for name, value in {"ACCESS_KEY_ID": "some", "SECRET_ACCESS_KEY": "some", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    if token:
        monkeypatch.setenv("AWS_SESSION_TOKEN", "+/" * (token // 2))
    home = S3Store("s3://bucket/a-prefix/of-runs/a-run/agents", "https://s3.example.com")
    post = Post(home, Roster(MemoryStore(), rotates=False), "POST", None, "lease/00001.json")
    options = KubernetesConfig(lifetime="run")
    ground = Ground.__new__(Ground)
    ground.options, ground.cluster, ground.run = options, Cluster("clients"), "a-run-of-24-character-abc"
    fleet = [Device(client, "medium", 100.0, 0.0) for client in range(1000)]
    orders = tuple(WorkOrder(0, each.client, SubmodelSpec.of({}), {}, seed=0, level=0) for each in fleet)
    (group,) = crew.Crew(ground, fleet, post)._groups_of(RoundPlan(0, orders))
    name = jobs.job_name(ground.run, None, group, 12)
    told = [post.invitation(Member.new(f"{name}-{i}", "medium"), plain=True) for i in range(len(group.pods))]
    assert sum(len(each.model_dump_json()) for each in told) <= 2**20 * 3 / 4
    assert 50 < len(group.pods) <= crew.MOST_PODS


class Nowhere(Cluster):
    """Takes what it is sent, and makes no pods."""

    def create(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "metadata": {**body["metadata"], "uid": body["metadata"]["name"]}}

    def select(self, *_: Any) -> list[dict[str, Any]]:
        return []

    def delete(self, *_: Any) -> None:
        """Gone."""


def test_an_order_that_is_answered_counts_as_a_pod_that_ends_for_those_that_wait_for_room() -> None:
    """A pod of a round would have ended, and made room."""
    ground = Ground.__new__(Ground)
    ground.options = KubernetesConfig(lifetime="run", image="flexfleet:latest", poll_s=1e-9)
    ground.cluster, ground.run, ground.store, ground._owner = Nowhere("clients"), "run", "memory", None
    ground.template = jobs.template(None)
    fleet = [Device(client, "medium", 100.0, 0.0) for client in range(3)]
    orders = tuple(WorkOrder(0, each.client, SubmodelSpec.of({}), {}, seed=0, level=0) for each in fleet)
    found = crew.Crew(ground, fleet, Post(MemoryStore(), Roster(MemoryStore(), rotates=False)))
    found.begin(RoundPlan(0, orders))
    moved = []
    for asked in (3, 3, 2, 2):
        found.keep({"medium": asked}, {"medium": asked}, {})
        moved.append(found.moved)
    assert moved[0] == moved[1] < moved[2] == moved[3]


# ---------------------------------------------------------------------------------- pods that are threads
def test_a_run_whose_jobs_are_never_admitted_stops_and_says_why(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, in_a_queue: str
) -> None:
    cluster.admits = lambda job: False
    with pytest.raises(Stopped, match=f"no pod takes orders: .*not started after 1 s: {waiting.SUSPENDED}"):
        rounds("never", *remote, *STAY, "kubernetes.attempts=1", "kubernetes.pending_s=1", in_a_queue)


def test_idle_pods_give_way_to_a_tier_that_waits_for_room(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(crew, "YIELD_S", 0.5)
    cluster.room = threading.Semaphore(1)
    assert model(rounds("room", *remote, *STAY, "rounds.stop=2")) == expected(2)


def test_a_coordinator_that_is_killed_finds_its_pods_and_their_orders(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, expected: Expected, caplog: Any
) -> None:
    caplog.set_level("INFO")
    go, began = threading.Event(), threading.Event()

    def at_work(pod: Staying, told: Any) -> None:
        began.set()
        go.wait(60)

    def killed(*_: Any) -> Any:
        if began.is_set():
            raise Killed
        return iter(())

    pods.at_work = staticmethod(at_work)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agents, "_answered", killed)
        with pytest.raises(Killed):
            rounds("again", *remote, *STAY)
    before = len(jobs_of(cluster))
    go.set()
    assert model(rounds("again", *remote, *STAY, resume=True)) == expected(3)
    assert len(jobs_of(cluster)) == before == len(pods.all), "no pod was made twice"
    assert "are there already" in caplog.text
    orders = [order for pod in pods.all for order in pod.orders]
    assert len(orders) == len(set(orders)), "no order was carried out twice"


def test_pods_of_other_settings_and_those_of_rounds_are_not_taken_over(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, expected: Expected
) -> None:
    def collect(*_: object) -> None:
        raise Killed

    cluster.script = lambda job, index, before: "hang"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kubernetes, "_collect", collect)
        with pytest.raises(Killed):
            rounds("other", *remote, "rounds.stop=1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agents, "_answered", collect)
        with pytest.raises(Killed):
            rounds("other", *remote, *STAY, "rounds.stop=1", resume=True)
    there = [name for kind, name in cluster.objects if kind == "jobs"]
    assert len(there) == 3 and not any("-r0-" in name for name in there), "those of the round are gone"
    cluster.script = lambda job, index, before: "run"
    sets = (*STAY, "rounds.stop=1", "kubernetes.recycle=7")
    assert model(rounds("other", *remote, *sets, resume=True)) == expected(1)
    assert {pod.options.recycle for pod in pods.all} == {7}


def test_a_run_that_goes_on_with_fewer_pods_at_a_time_keeps_no_more(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote
) -> None:
    def killed(*_: object) -> None:
        raise Killed

    there = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agents, "_answered", killed)
        for most in (5, 3):
            with pytest.raises(Killed):
                rounds("fewer", *remote, *STAY, *EVERYBODY, f"kubernetes.parallelism={most}", resume=most == 3)
            found = [each for (kind, _), each in cluster.objects.items() if kind == "jobs"]
            there.append(sum(job["spec"]["completions"] for job in found))
    assert there == [5, 3]


def test_pods_that_stay_make_room_where_the_run_goes_on_with_pods_for_each_round(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote
) -> None:
    def killed(*_: object) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agents, "_answered", killed)
        with pytest.raises(Killed):
            rounds("back", *remote, *STAY)
        patch.setattr(Kubernetes, "_collect", killed)
        with pytest.raises(Killed):
            rounds("back", *remote, "rounds.stop=3", resume=True)
    there = [name for kind, name in cluster.objects if kind == "jobs"]
    assert there and all("-r0-" in name for name in there)


def test_a_run_whose_objects_somebody_deletes_makes_them_anew(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The ConfigMap too, which owns them: Jobs of an owner that is gone would be deleted as soon as they are made."""
    real, deleted = cluster._create, threading.Event()

    def create(kind: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        status, made = real(kind, body)
        owners = {owner["uid"] for owner in body["metadata"].get("ownerReferences", ())}
        if kind == "jobs" and not owners & {each["metadata"]["uid"] for each in cluster.objects.values()}:
            cluster._delete(kind, body["metadata"]["name"])
        if kind == "jobs" and len(jobs_of(cluster)) == 31:  # so that the test ends
            os.kill(os.getpid(), signal.SIGTERM)
        return status, made

    def at_work(pod: Staying, told: Any) -> None:
        with cluster.lock:
            if not deleted.is_set():
                deleted.set()
                for name in [name for kind, name in cluster.objects if kind == "configmaps"]:
                    cluster._delete("configmaps", name)

    monkeypatch.setattr(cluster, "_create", create)
    pods.at_work = staticmethod(at_work)
    assert model(rounds("deleted", *remote, *STAY, "rounds.stop=1")) == expected(1)
    assert len(jobs_of(cluster)) <= 7


def test_without_pods_the_run_stops_and_says_why(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote
) -> None:
    cluster.refuse = lambda job, index: 'violates PodSecurity "restricted:latest"'
    with pytest.raises(Stopped, match=r"takes orders: .*violates PodSecurity.*kubectl -n flexfleet-clients") as stopped:
        rounds("refused", *remote, *STAY)
    tier = str(stopped.value).split("takes orders: ")[1].split(":")[0]
    there = [each["metadata"] for (kind, _), each in cluster.objects.items() if kind == "jobs"]
    assert tier in [meta["labels"][jobs.TIER] for meta in there], "what it says to describe is there"


def test_what_was_refused_before_a_coordinator_started_again_may_have_been_mended(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The event is still there; the Job's pods are made now, though it takes its controller a while to try again."""
    monkeypatch.setattr(crew, "EVENTS_EVERY_S", 0.1)
    sets, looks, go, keep = (
        (*STAY, "rounds.stop=1", "kubernetes.attempts=1"),
        list[int](),
        threading.Event(),
        crew.Crew.keep,
    )
    cluster.refuse = lambda job, index: 'violates PodSecurity "restricted:latest"'
    with pytest.raises(Stopped, match="violates PodSecurity"):
        rounds("mended", *remote, *sets)
    before = len(jobs_of(cluster))

    def looked(self: Any, *asked: Any) -> bool:
        looks.append(1)
        if len(looks) > 10:
            go.set()
        return keep(self, *asked)

    cluster.refuse = lambda job, index: "" if go.wait(60) else "late"
    monkeypatch.setattr(crew.Crew, "keep", looked)
    assert model(rounds("mended", *remote, *sets, resume=True)) == expected(1)
    assert len(jobs_of(cluster)) == before


def test_with_a_node_for_each_client_no_order_goes_elsewhere(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, expected: Expected
) -> None:
    sets = ("kubernetes.placement=device", "kubernetes.hostname=pi-{client}")
    assert model(rounds("bound", *remote, *STAY, "rounds.stop=2", *sets)) == expected(2)
    hosts = {
        job["metadata"]["name"]: job["spec"]["template"]["spec"]["nodeSelector"]["kubernetes.io/hostname"]
        for job in jobs_of(cluster)
    }
    assert len(set(hosts.values())) == len(hosts), "a client that is asked again has its pod still"
    for pod in pods.all:
        assert {f"pi-{client}" for _, client in pod.orders} == {hosts[pod.name.rsplit("-", 2)[0]]}


@pytest.mark.parametrize("how", ["takes none", "unschedulable"])
@pytest.mark.parametrize("quorum", [1.0, 0.5])
def test_with_a_node_for_each_client_the_quorum_decides_whether_one_is_waited_for(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, rows: Rows,
    monkeypatch: pytest.MonkeyPatch, how: str, quorum: float,
) -> None:  # fmt: skip
    """Its pod beats and never takes its order, or its node is off."""
    monkeypatch.setattr(lasting, "GRACE_S", 0)
    chosen: list[str] = []
    read = Mortal.read

    def deaf(line: Mortal) -> Any:
        letter = read(line)
        if letter.loan is not None:
            chosen[:] = chosen or [line.known.name]
        return letter.model_copy(update={"loan": None}) if line.known.name in chosen else letter

    def script(job: Any, index: int, before: int) -> str:
        host = job["spec"]["template"]["spec"]["nodeSelector"]["kubernetes.io/hostname"]
        chosen[:] = chosen or [host]
        return how if host in chosen else "run"

    if how == "takes none":
        monkeypatch.setattr(Mortal, "read", deaf)
    else:
        cluster.script = script
    sets = (*STAY, "rounds.stop=1", "kubernetes.placement=device", "kubernetes.hostname=pi-{client}")
    sets += ("kubernetes.pending_s=4", "kubernetes.attempts=1", "kubernetes.lease_s=3", f"kubernetes.quorum={quorum}")
    if quorum == 1.0:
        said = r"2 of 3 clients have answered, 3 are needed \(kubernetes.quorum\): no device of pi-"
        with pytest.raises(
            Stopped, match=said if how == "takes none" else "no pod takes orders: .*not started after 4 s"
        ):
            rounds("bound", *remote, *sets)
        return
    rounds("bound", *remote, *sets)
    (row,) = rows(remote, "bound")
    (failure,) = [line["failure"] for line in row.clients if "failure" in line]
    why = "has taken the order for 4 s" if how == "takes none" else "takes orders: not started after 4 s"
    assert failure.startswith("pod") and why in failure and len(row.clients) == 3


@pytest.mark.parametrize(("quorum", "how"), [(0.3, "unschedulable"), (0.3, "hang"), (0.5, "image")])
def test_the_quorum_decides_whether_a_tier_is_waited_for_whose_pods_take_no_orders(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, rows: Rows, quorum: float, how: str
) -> None:
    """As in a round's Jobs: once, where the others' answers do. The tier has two of the round's three orders. Its pods
    do not start, or hang before they say a word."""
    cluster.script = lambda job, index, before: how if job["metadata"]["labels"][jobs.TIER] == "strong" else "run"
    sets = (*STAY, "rounds.stop=1", "kubernetes.pending_s=1", "kubernetes.lease_s=1", f"kubernetes.quorum={quorum}")
    if quorum == 0.5:
        said = (
            r"1 of 3 clients have answered, 2 are needed \(kubernetes.quorum\): .*ImagePullBackOff.* describe jobs,pods"
        )
        with pytest.raises(Stopped, match=said):
            rounds("without", *remote, *sets)
    else:
        rounds("without", *remote, *sets)
        (row,) = rows(remote, "without")
        first, second = (line["failure"] for line in row.clients if "failure" in line)
        assert first == second and first.startswith("pod: no device of strong takes orders: ")
        assert first.endswith("its pods hang") == (how == "hang") != ("Unschedulable" in first)
    made = [job for job in jobs_of(cluster) if job["metadata"]["labels"][jobs.TIER] == "strong"]
    assert len(made) == (1 if how == "unschedulable" else 2)


def test_tiers_without_which_the_quorum_is_missed_get_other_pods(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote
) -> None:
    """Neither of two whose pods did not start waits for the other's answers."""

    def script(job: Any, index: int, before: int) -> str:
        first = job["metadata"]["labels"][jobs.TIER] != "weak" and len(jobs_of(cluster)) <= 3
        return "unschedulable" if first else "run"

    cluster.script = script
    sets = (*STAY, *EVERYBODY, "rounds.stop=1", "kubernetes.pending_s=1", "kubernetes.quorum=0.5")
    assert model(rounds("two", *remote, *sets)) == model(rounds("here", *EVERYBODY, "rounds.stop=1"))
    assert len(jobs_of(cluster)) == 5


@pytest.mark.parametrize("first", ["at its start", "after it was drained"])
def test_a_pod_that_hangs_before_its_first_word_is_replaced(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, expected: Expected, first: str
) -> None:
    hung: list[tuple[str, int]] = []

    def script(job: Any, index: int, before: int) -> str:
        if first != "at its start" and before == 0 and not hung:
            return "vanish"
        if not hung:
            hung.append((job["metadata"]["name"], index))
        return "hang" if (job["metadata"]["name"], index) == hung[0] else "run"

    def at_work(pod: Staying, told: Any) -> None:
        if first != "at its start" and not hung:
            raise Drained

    pods.at_work, cluster.script = staticmethod(at_work), script
    sets = (*STAY, "rounds.stop=1", "kubernetes.lease_s=1.5", "kubernetes.pending_s=2")
    assert model(rounds("hung", *remote, *sets)) == expected(1)
    assert len(jobs_of(cluster)) == 4


def test_the_others_are_called_off_once_enough_updates_are_there(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, rows: Rows
) -> None:
    """Over-provisioning: the pod that would never answer is back at work in the next round, as a new process."""
    slow: list[Staying] = []

    def at_work(pod: Staying, told: Any) -> None:
        if not slow:
            slow.append(pod)
            pod.dead.wait(60)  # until it reads that the order is not its own any more

    pods.at_work = staticmethod(at_work)
    sets = (*STAY, "rounds.stop=2", "rounds.over_provision=2.0", "training.fraction=0.5", "kubernetes.lease_s=6")
    rounds("more", *remote, *sets)
    first, second = rows(remote, "more")
    assert [line["client"] for line in first.clients if "failure" in line and "straggle" in line["failure"]]
    assert (
        sum("failure" not in line for line in first.clients)
        == 3
        == sum("failure" not in line for line in second.clients)
    )
    assert slow[0].dead.is_set()
