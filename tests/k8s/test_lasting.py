"""Pods that stay for the run (kubernetes.lifetime=run), on the fake cluster over a real HTTP S3 server."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
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
from fl_engine.core.errors import ClientError, Stopped
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
from tests.k8s import kueue
from tests.k8s.fake import leftovers, telling
from tests.k8s.staying import Drained, Mortal, Staying, threads_on

ROOT = Path(__file__).parents[2]
STAY = ("kubernetes.lifetime=run", "rounds.stop=3")
EVERYBODY = ("training.fraction=1.0", "rounds.stop=2")
SHARED = ("kubernetes.lifetime=run", "kubernetes.clients_per_pod=2", *EVERYBODY)
"""Of six clients in three tiers, two share a pod."""

Rounds = Callable[..., Path]
Remote = tuple[str, ...]
Expected = Callable[[int], bytes]
Rows = Callable[[Remote, str], list[Row]]


def model(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def jobs_of(cluster: Any) -> list[dict[str, Any]]:
    return [each for each in cluster.created if each["kind"] == "Job"]


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


# ---------------------------------------------------------------------------------- pods that are threads
class Killed(BaseException):
    pass


@pytest.fixture
def pods(cluster: Any) -> Iterator[type[Staying]]:
    with threads_on(cluster) as here:
        yield here


def test_pods_that_are_killed_again_and_again_end_no_index(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, expected: Expected
) -> None:
    """Each order's first pod is killed, nine times in all: more than a Job of a round would bear."""
    seen = set[tuple[int, int]]()

    def at_work(pod: Staying, told: Any) -> None:
        order = (told.round, told.clients[0])
        if order not in seen:
            seen.add(order)
            pod.kill()

    pods.at_work = staticmethod(at_work)
    assert model(rounds("killed", *remote, *STAY, "kubernetes.lease_s=5")) == expected(3)
    assert len(seen) == 9 and len(jobs_of(cluster)) == 3, "the Jobs stay what they were"


def test_a_pod_that_is_killed_with_several_orders_loses_them_to_others(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote
) -> None:
    """Each pod once in the first round, with both of its orders: none has failed yet."""
    killed = set[str]()

    def at_work(pod: Staying, told: Any) -> None:
        if pod.line.known.name not in killed and len(told.clients) == 2:
            killed.add(pod.line.known.name)
            pod.kill()

    pods.at_work = staticmethod(at_work)
    sets = (*SHARED, "kubernetes.attempts=1", "kubernetes.lease_s=5")
    assert model(rounds("killed", *remote, *sets)) == model(rounds("here", *EVERYBODY))
    assert len(killed) == 3 == len(jobs_of(cluster))


@pytest.mark.parametrize("befalls", ["killed", "exit 42"])
def test_an_order_that_spoils_its_pod_does_not_take_those_that_share_it(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, rows: Rows, befalls: str
) -> None:
    """Whatever holds it is killed, as for its memory, or says that trying again will not help."""
    bad: list[int] = []

    def at_work(pod: Staying, told: Any) -> None:
        bad[:] = bad or [told.clients[-1]]
        if bad[0] in told.clients and befalls == "killed":
            pod.kill()
        elif bad[0] in told.clients:
            raise ClientError("no data here")

    pods.at_work = staticmethod(at_work)
    sets = (*SHARED, "rounds.stop=1", "kubernetes.quorum=0.5", "kubernetes.lease_s=5")
    rounds("bad", *remote, *sets)
    (row,) = rows(remote, "bad")
    assert [line["client"] for line in row.clients if "failure" in line] == bad
    assert len(row.clients) == 6


def test_a_pod_that_is_drained_uses_up_no_attempt(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, expected: Expected
) -> None:
    cluster.script = lambda job, index, before: "run" if before >= 3 else "evict"
    sets = (*STAY, "rounds.stop=1", "kubernetes.attempts=1")
    assert model(rounds("drained", *remote, *sets)) == expected(1)
    assert len(jobs_of(cluster)) == 3


def test_an_order_that_drained_pods_give_back_uses_up_no_attempt(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, expected: Expected
) -> None:
    """Three times the same one, to the pod of the same index."""
    given_back: list[tuple[str, int]] = []

    def at_work(pod: Staying, told: Any) -> None:
        client = told.clients[0]
        if all(client == other for _, other in given_back) and len(given_back) < 3:
            given_back.append((pod.line.known.name, client))
            raise Drained

    pods.at_work = staticmethod(at_work)
    cluster.script = lambda job, index, before: "run" if before >= 3 else "vanish"
    sets = (*STAY, "rounds.stop=1", "kubernetes.attempts=1", "kubernetes.lease_s=3")
    assert model(rounds("given", *remote, *sets)) == expected(1)
    assert len(given_back) == 3 and len(set(given_back)) == 1


def test_an_order_that_a_pod_gives_back_again_and_again_is_its_client_s_failure(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, rows: Rows
) -> None:
    """To each pod of its index, which says that it was ended. No other one may have the order. Where the coordinator is
    slow to look, several pods meet one loan of it."""
    bad, loans = list[int](), set[str | None]()
    cluster.script = lambda job, index, before: "vanish"

    def at_work(pod: Staying, told: Any) -> None:
        bad[:] = bad or [told.clients[0]]
        if told.clients[0] == bad[0]:
            loans.add(pod.line.loan)
            raise Drained

    pods.at_work = staticmethod(at_work)
    bound = ("kubernetes.placement=device", "kubernetes.hostname=pi-{client}", "kubernetes.quorum=0.5")
    rounds("gone", *remote, *STAY, "rounds.stop=1", "kubernetes.attempts=1", "kubernetes.lease_s=3", *bound)
    (row,) = rows(remote, "gone")
    assert [line["client"] for line in row.clients if "failure" in line] == bad
    assert None not in loans and len(loans) == waiting.LOST_NODES + 1


def test_an_order_of_a_pod_that_a_queue_has_stopped_for_others_uses_up_no_attempt(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, expected: Expected, in_a_queue: str
) -> None:
    """Though the Job is suspended for longer than the lease. It stays, and its pod says that it was killed for as long
    as it takes to end."""
    cluster.grace_s, stopped, since = 1.0, list[str](), list[float]()

    def at_work(pod: Staying, told: Any) -> None:
        with cluster.lock:
            if not stopped:
                stopped.extend(kueue.preempt(cluster, cluster.objects["jobs", pod.name.rsplit("-", 2)[0]]))
                since.append(time.monotonic())
        if pod.name in stopped:
            pod.dead.wait(60)

    pods.at_work = staticmethod(at_work)
    cluster.admits = lambda job: not since or time.monotonic() > since[0] + 8
    sets = (*STAY, "rounds.stop=1", "kubernetes.attempts=1", "kubernetes.lease_s=5", in_a_queue)
    assert model(rounds("stopped", *remote, *sets)) == expected(1)
    assert len(stopped) == 1 and len(jobs_of(cluster)) == 3


def test_a_run_whose_jobs_are_never_admitted_stops_and_says_why(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, in_a_queue: str
) -> None:
    cluster.admits = lambda job: False
    with pytest.raises(Stopped, match=f"no pod takes orders: .*not started after 1 s: {waiting.SUSPENDED}"):
        rounds("never", *remote, *STAY, "kubernetes.attempts=1", "kubernetes.pending_s=1", in_a_queue)


@pytest.mark.parametrize("how", ["unreachable", "terminating"])
def test_the_pods_of_a_lost_node_come_back_elsewhere(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, expected: Expected,
    how: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(waiting, "TERMINATING_S", 0.5)
    monkeypatch.setattr(lasting, "GONE_S", 0.1)  # the pod stays as long as its node is lost
    first: list[str] = []

    def script(job: Any, index: int, before: int) -> str:
        first[:] = first or [job["metadata"]["name"]]
        return how if job["metadata"]["name"] == first[0] else "run"

    cluster.script = script
    sets = (*STAY, "rounds.stop=2", "kubernetes.attempts=1", "kubernetes.pending_s=3600")
    assert model(rounds("node", *remote, *sets)) == expected(2)
    assert len(jobs_of(cluster)) == 4, "the one of the lost node's pod, anew"


def test_a_pod_that_hangs_is_replaced_and_its_order_goes_to_another(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, expected: Expected, caplog: Any
) -> None:
    hung: list[Staying] = []

    def at_work(pod: Staying, told: Any) -> None:
        if not hung:
            hung.append(pod)
            pod.hang()

    pods.at_work = staticmethod(at_work)
    assert model(rounds("hung", *remote, *STAY, "rounds.stop=1", "kubernetes.lease_s=1.5")) == expected(1)
    assert "is silent for" in caplog.text and len(jobs_of(cluster)) == 4
    assert sum(order == hung[0].orders[0] for pod in pods.all for order in pod.orders) == 2


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


@pytest.mark.parametrize("coordinator", ["gone", "there"])
def test_pods_that_an_order_kills_do_not_start_for_ever(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, expected: Expected,
    monkeypatch: pytest.MonkeyPatch, coordinator: str,
) -> None:  # fmt: skip
    """Without a coordinator nobody takes the order back. With one, the Job is made anew where its pods ended."""
    monkeypatch.setattr(jobs, "FAILURES", 3)
    began = threading.Event()

    def at_work(pod: Staying, told: Any) -> None:
        began.set()
        if coordinator == "gone" or len(jobs_of(cluster)) == 3:
            pod.kill()

    def killed(*_: Any) -> Any:
        if began.is_set():
            raise Killed
        return iter(())

    pods.at_work = staticmethod(at_work)
    if coordinator == "there":
        cluster.script = lambda job, index, before: "oom" if len(jobs_of(cluster)) == 3 else "run"
        assert model(rounds("kills", *remote, *STAY, "rounds.stop=1")) == expected(1)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agents, "_answered", killed)
        with pytest.raises(Killed):
            rounds("kills", *remote, *STAY)
    until = time.monotonic() + 20
    while not any("over" in job for (kind, _), job in cluster.objects.items() if kind == "jobs"):
        assert time.monotonic() < until, "those of the order are started still"
        time.sleep(0.1)


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
    with pytest.raises(Stopped, match=r"no pod takes orders: .*violates PodSecurity.*kubectl -n flexfleet-clients"):
        rounds("refused", *remote, *STAY)


@pytest.mark.parametrize("code", [0, 1])
def test_pods_that_end_before_they_take_an_order_are_not_waited_for_without_end(
    cluster: Any, rounds: Rounds, remote: Remote, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Each time others start in their stead: they cannot read letters and end (0), or something kills them (1)."""
    monkeypatch.setattr(lasting, "GRACE_S", 0)
    began, ended = time.monotonic(), threading.Event()

    class Ends:
        def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
            log.write_text("no letter")
            self._started = time.monotonic()
            if self._started > began + 60 and not ended.is_set():  # so that the test ends
                ended.set()
                os.kill(os.getpid(), signal.SIGTERM)

        def poll(self) -> int | None:
            return code if time.monotonic() > self._started + 0.3 else None

        def kill(self) -> None:
            self._started = 0.0

    def script(job: Any, index: int, before: int) -> str:
        time.sleep(0.5 if before else 0.0)  # as the Job controller waits before it makes another one
        return "run"

    cluster.start, cluster.slots, cluster.script = Ends, threading.Semaphore(100), script
    with pytest.raises(Stopped, match=r"no device has taken an order for \d+ s; 3 of 3 clients"):
        rounds("ends", *remote, *STAY, "kubernetes.pending_s=2", "kubernetes.attempts=1")


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
        said = r"2 of 3 clients have answered, 3 are needed \(kubernetes.quorum\): the device"
        with pytest.raises(
            Stopped, match=said if how == "takes none" else "no pod takes orders: .*not started after 4 s"
        ):
            rounds("bound", *remote, *sets)
        return
    rounds("bound", *remote, *sets)
    (row,) = rows(remote, "bound")
    (failure,) = [line["failure"] for line in row.clients if "failure" in line]
    assert failure.startswith("pod") and "has not taken the order for 4 s" in failure and len(row.clients) == 3


def test_a_secret_is_renewed_for_pods_that_start_again(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With the keys that the pods have."""
    monkeypatch.setattr(crew, "RENEW_S", 0.1)
    killed: list[Staying] = []

    def at_work(pod: Staying, told: Any) -> None:
        if not killed:
            time.sleep(1.0)  # the URLs of the second are others
            killed.append(pod)
            pod.kill()

    pods.at_work = staticmethod(at_work)
    assert model(rounds("renewed", *remote, *STAY, "rounds.stop=1")) == expected(1)
    first, *_, last = (
        json.loads(secret["stringData"]["0"])
        for secret in telling(cluster.created)
        if killed[0].name.startswith(secret["metadata"]["name"])
    )
    assert first["key"] == last["key"] and first["letter"] != last["letter"]
    (again,) = (pod for pod in pods.all if pod is not killed[0] and pod.line.known.name == killed[0].line.known.name)
    assert again.line.known.invited == killed[0].line.known.invited and len(jobs_of(cluster)) == 3


@pytest.mark.parametrize("quorum", [1.0, 0.5])
def test_an_order_that_kills_every_pod_is_its_client_s_failure(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, rows: Rows, quorum: float
) -> None:
    """Or the run stops, where the quorum misses it. The pods that it killed are there for the others."""
    bad: list[int] = []

    def at_work(pod: Staying, told: Any) -> None:
        bad[:] = bad or [told.clients[0]]
        if told.clients[0] == bad[0]:
            pod.kill()

    pods.at_work = staticmethod(at_work)
    sets = (*STAY, "rounds.stop=1", f"kubernetes.quorum={quorum}", "kubernetes.lease_s=5")
    if quorum == 1.0:
        with pytest.raises(Stopped, match=r"2 of 3 clients have answered, 3 are needed \(kubernetes.quorum\): .*-0 "):
            rounds("bad", *remote, *sets)
        return
    rounds("bad", *remote, *sets)
    (row,) = rows(remote, "bad")
    assert [line["client"] for line in row.clients if "failure" in line] == bad
    assert sum(order == (0, bad[0]) for pod in pods.all for order in pod.orders) >= 2
    assert len(jobs_of(cluster)) == 3


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
