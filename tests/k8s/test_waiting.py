"""Which pods queue, are stuck, or are on a lost node, and what the log says of many: pods and times are made up."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_engine.backends.kubernetes import jobs, waiting
from fl_engine.backends.kubernetes.settings import KubernetesConfig, NodePool
from fl_engine.backends.kubernetes.waiting import Live, Loss
from fl_engine.core.types import SubmodelSpec, WorkOrder
from fl_engine.fleet import devices

FLEET = devices.fleet("4:3:3", 40, 0)
PENDING_S = 600.0
FULL = "0/4 nodes are available: 1 node(s) had untolerated taint {a: }, 3 Insufficient cpu. preemption: none."
NOWHERE = "0/4 nodes are available: 4 node(s) didn't match Pod's node affinity/selector."


def job_of(pods: int, at_once: int | None = None, **options: Any) -> dict[str, Any]:
    found = KubernetesConfig(**options)
    clients = [device.client for device in FLEET if device.tier == "weak"][:pods]
    orders = [WorkOrder(0, client, SubmodelSpec(), {}, 0, 0) for client in clients]
    (group,) = jobs.groups(orders, FLEET, found)
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "run", "uid": "0"}
    job = jobs.job(jobs.template(None), found, "run", 0, group, 0, owner, "/data")
    job["metadata"]["uid"] = "the Job's"
    job["spec"]["parallelism"] = at_once or pods
    return job


def watched(pods: int, at_once: int | None = None, **options: Any) -> Live:
    return waiting.live(job_of(pods, at_once, **options), now=0.0, lasts=1e9)


def pod(job: Live, index: int, phase: str = "Pending", **status: Any) -> dict[str, Any]:
    meta = {
        "uid": f"{index}",
        "labels": {"batch.kubernetes.io/job-name": job.name},
        "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
        "creationTimestamp": "1",
    }
    return {"metadata": meta, "status": {"phase": phase, **status}}


def unschedulable(job: Live, index: int, message: str, reason: str = "Unschedulable") -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    return pod(job, index, conditions=[condition])


def client(**state: Any) -> list[dict[str, Any]]:
    return [{"name": "client", "state": state}]


def running(job: Live, index: int, **conditions: str) -> dict[str, Any]:
    said = [{"type": name, "status": status} for name, status in conditions.items()]
    return pod(job, index, "Running", containerStatuses=client(running={}), conditions=said)


def hear(job: Live, pods: list[dict[str, Any]], now: float, suspend: bool = False, **status: Any) -> set[int]:
    spec = {"parallelism": job.at_once, "suspend": suspend}
    return waiting.hear(job, {"spec": spec, "status": status}, pods, now)


def lost(job: Live, now: float, moved: float = 0.0, **status: Any) -> dict[int, Loss]:
    """By index."""
    found = waiting.lost(job, {"status": status}, now, moved, PENDING_S)
    return {job.clients[client]: loss for client, loss in found.items()}


def test_the_clock_of_what_queues_begins_anew_when_a_pod_starts_or_ends_that_of_what_is_stuck_does_not() -> None:
    job = watched(4)
    pods = [
        running(job, 0), unschedulable(job, 1, FULL), unschedulable(job, 2, NOWHERE),
        pod(job, 3, containerStatuses=client(waiting={"reason": "ImagePullBackOff", "message": "no"})),
    ]  # fmt: skip
    assert hear(job, pods, 1.0)
    assert not hear(job, pods, 2.0), "nothing has moved"
    assert lost(job, 599.0) == {}
    pods[0] = pod(job, 0, "Succeeded")
    assert hear(job, pods, 599.0)
    assert set(lost(job, 601.0, moved=599.0)) == {2, 3}
    assert set(lost(job, 1198.0, moved=599.0)) == {2, 3}
    assert set(lost(job, 1200.0, moved=599.0)) == {1, 2, 3}, "nothing moves any more"


def test_what_a_queue_has_admitted_has_all_the_time_to_start() -> None:
    job = watched(2)
    hear(job, [unschedulable(job, 0, "", "SchedulingGated"), unschedulable(job, 1, "Too many pods")], 1.0)
    stuck = client(waiting={"reason": "ErrImagePull", "message": "no"})
    hear(job, [pod(job, 0, containerStatuses=stuck), unschedulable(job, 1, "Too many pods")], 500.0)
    assert set(lost(job, 1099.0, moved=1000.0)) == set()
    assert {index: loss.reason for index, loss in lost(job, 1101.0, moved=1000.0).items()} == {
        0: "weak: not started after 600 s: ErrImagePull: no"
    }


def test_a_pod_whose_turn_has_not_come_or_that_a_quota_holds_back_queues_and_no_other_that_was_not_made() -> None:
    turn = watched(3, at_once=1)
    hear(turn, [running(turn, 0)], 1.0)
    assert set(lost(turn, 700.0, moved=650.0)) == set()
    held, silent = watched(2), watched(2)
    event = {"involvedObject": {"uid": "the Job's"}, "message": "exceeded quota: clients, used: pods=9"}
    other = {"involvedObject": {"uid": "another Job's"}, "lastTimestamp": "9", "message": "violates PodSecurity"}
    waiting.hear_refusals(held, [event, other])
    for job in (held, silent):
        hear(job, [running(job, 0)], 1.0)
    assert lost(held, 700.0, moved=650.0) == {}
    assert lost(held, 1300.0, moved=650.0)[1].reason.endswith("exceeded quota: clients, used: pods=9")
    assert lost(silent, 700.0, moved=650.0)[1].reason == (
        "weak: not started after 600 s: no pod was made, and no event says why"
    )


def test_a_pod_that_is_gone_without_having_been_seen_to_end_is_waited_for_again() -> None:
    """A deadline ends a Job when all its pods have ended: the first are gone while the last still end."""
    job = watched(2)
    ending = {"metadata": {**running(job, 0)["metadata"], "uid": "p", "deletionTimestamp": "now",
                           "deletionGracePeriodSeconds": 5}}  # fmt: skip
    hear(job, [running(job, 0) | ending, running(job, 1)], 1.0)
    assert hear(job, [running(job, 1)], 2.0), "a pod has ended"
    assert lost(job, 100.0, moved=2.0) == {} and job.since == {0: 2.0}
    assert set(lost(job, 603.0, moved=2.0)) == {0}


def test_what_pod_security_refuses_is_given_up_at_once_by_the_last_event() -> None:
    job = watched(2)
    events = [
        {"involvedObject": {"uid": "the Job's"}, "lastTimestamp": at, "message": message}
        for at, message in (("2", 'violates PodSecurity "restricted:latest": hostPath'), ("1", "exceeded quota: q"))
    ]
    waiting.hear_refusals(job, events)
    assert {loss.reason for loss in lost(job, 1.0).values()} == {
        'weak: no pod was made: violates PodSecurity "restricted:latest": hostPath'
    }


@pytest.mark.parametrize(
    "said",
    [
        'pods "a" is forbidden: [maximum memory usage per Container is 512Mi, but limit is 1Gi]',
        'pods "a" is forbidden: minimum nvidia.com/gpu usage per Pod is 1. No request is specified',
        'pods "a" is forbidden: cpu max limit to request ratio per Container is 2, but provided ratio is 4.000000',
        'pods "a" is forbidden: failed quota: team: must specify limits.cpu for: client',
        'Pod "a" is invalid: spec.containers[0].resources.requests: Invalid value: "1": must be less than or equal to '
        "cpu limit of 500m",
    ],
    ids=["maximum", "minimum", "ratio", "quota", "default"],
)
def test_what_a_namespace_never_admits_is_given_up_at_once(said: str) -> None:
    """As the API server says it: of a LimitRange, of a quota on something that the template leaves out, and of a
    LimitRange's default that is put into the pod and is less than the pod requests."""
    job = watched(1)
    waiting.hear_refusals(job, [refused(f"Error creating: {said}")])
    assert lost(job, 1.0)[0].reason == f"weak: no pod was made: Error creating: {said}"


def test_what_a_webhook_denies_is_waited_for() -> None:
    """Its own words say nothing of whether it will do so again."""
    job = watched(1)
    said = 'admission webhook "quota.team.io" denied the request: the label team is invalid: try later'
    waiting.hear_refusals(job, [refused(f"Error creating: {said}")])
    assert lost(job, 1.0) == {}


PROXY = {"name": "proxy", "state": {"running": {}}}
"""A container that a webhook has put into the pod, as a service mesh does. Its pod is Pending until all have begun."""


def test_a_client_whose_image_cannot_be_pulled_is_given_up_though_its_proxy_runs() -> None:
    job = watched(1)
    hear(job, [pod(job, 0, containerStatuses=[PROXY, *client(waiting={"reason": "ErrImagePull"})])], 1.0)
    assert lost(job, 601.0)[0].reason == "weak: not started after 600 s: ErrImagePull"


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"waiting": {"reason": "ImagePullBackOff", "message": "no"}}, "ImagePullBackOff: no"),
        (
            {"terminated": {"exitCode": 255, "reason": "Error", "message": "iptables"}},
            "Error (exit code 255): iptables",
        ),
    ],
)
def test_what_keeps_a_proxy_from_starting_is_what_the_client_waits_for(state: dict[str, Any], said: str) -> None:
    """One that runs before the client does: a native sidecar, or what sets up the network."""
    job = watched(1)
    first = [{"name": "proxy-init", "state": state}]
    pulled = client(waiting={"reason": "PodInitializing"})
    hear(job, [pod(job, 0, initContainerStatuses=first, containerStatuses=pulled)], 1.0)
    assert job.reason(0) == said
    hear(job, [pod(job, 0, "Running", initContainerStatuses=first, containerStatuses=client(running={}))], 2.0)
    assert job.reason(0) == "" and lost(job, 9999.0) == {}, "the client is at work"


@pytest.mark.parametrize(
    ("code", "said"), [(137, "OOMKilled (exit code 137)"), (0, "its client left no update")], ids=["killed", "well"]
)
def test_a_client_that_has_ended_in_a_pod_that_goes_on_is_given_up_after_a_minute(code: int, said: str) -> None:
    """Native sidecars end after it, within the pod's grace period. Others do not."""
    job = watched(1)
    ended = client(terminated={"exitCode": code, "reason": "OOMKilled" if code else "Completed"})
    for now in (100.0, 160.0):
        hear(job, [pod(job, 0, "Running", containerStatuses=[PROXY, *ended])], now)
    assert lost(job, 160.0) == {}
    assert lost(job, 160.1)[0] == Loss(f"weak: {said}; another container of its pod does not end", False)


def failed(job: Live, index: int) -> dict[str, Any]:
    over = {"exitCode": 137, "reason": "OOMKilled"}
    return pod(job, index, "Failed", containerStatuses=client(terminated=over))


def refused(message: str) -> dict[str, Any]:
    return {"involvedObject": {"uid": "the Job's"}, "lastTimestamp": "1", "message": message}


def test_a_pod_that_is_never_made_after_one_that_failed_is_given_up() -> None:
    """A Job of one retry waits ten seconds before it, and twenty at most."""
    job = watched(2)
    hear(job, [failed(job, 0), running(job, 1)], 100.0)
    assert job.lacks_pods() and lost(job, 719.0) == {}
    assert {index: loss.reason for index, loss in lost(job, 721.0).items()} == {
        0: "weak: no pod was made in 620 s after one that failed: OOMKilled (exit code 137)"
    }
    hear(job, [running(job, 1)], 720.0)
    assert lost(job, 719.0) == {} and set(lost(job, 721.0)) == {0}, "somebody has deleted it"
    again = failed(job, 0)
    again["metadata"] |= {"uid": "the second", "creationTimestamp": "2"}
    hear(job, [again, running(job, 1)], 721.0)
    assert lost(job, 1340.0) == {}, "the time is that of the last one"


def test_why_no_pod_is_made_after_one_that_failed_is_told_and_decides_how_long_is_waited() -> None:
    job = watched(2)
    hear(job, [failed(job, 0), running(job, 1)], 100.0)
    waiting.hear_refusals(job, [refused("exceeded quota: clients, used: pods=9")])
    assert lost(job, 1000.0, moved=500.0) == {}
    assert lost(job, 1121.0, moved=500.0)[0].reason == (
        "weak: no pod was made: exceeded quota: clients, used: pods=9, after one that failed: OOMKilled (exit code 137)"
    )
    waiting.hear_refusals(job, [refused('violates PodSecurity "restricted:latest": hostPath')])
    assert set(lost(job, 101.0)) == {0}


def test_what_was_refused_before_all_pods_were_there_explains_nothing_later() -> None:
    job, event = watched(2), refused("exceeded quota: clients, used: pods=9")
    hear(job, [running(job, 0)], 1.0)
    waiting.hear_refusals(job, [event])
    assert job.reason(1) == "no pod was made: exceeded quota: clients, used: pods=9"
    hear(job, [running(job, 0), running(job, 1)], 2.0)
    hear(job, [failed(job, 0), running(job, 1)], 100.0)
    waiting.hear_refusals(job, [event])
    assert lost(job, 721.0, moved=700.0)[0].reason == (
        "weak: no pod was made in 620 s after one that failed: OOMKilled (exit code 137)"
    )
    waiting.hear_refusals(job, [event | {"lastTimestamp": "2"}])
    assert lost(job, 721.0, moved=700.0) == {}, "a new event"


def test_a_pod_after_one_that_failed_queues_for_its_turn() -> None:
    job = watched(2, at_once=1)
    hear(job, [failed(job, 0), running(job, 1)], 100.0)
    assert not job.lacks_pods() and lost(job, 2000.0, moved=1500.0) == {}
    assert set(lost(job, 2121.0, moved=1500.0)) == {0}


def test_a_pod_that_a_node_has_taken_is_not_said_to_have_none() -> None:
    job = watched(2)
    creating = pod(job, 0, containerStatuses=client(waiting={"reason": "ContainerCreating"}))
    hear(job, [creating | {"spec": {"nodeName": "pi-3"}}, pod(job, 1)], 1.0)
    taken, free = (lost(job, 700.0)[index].reason for index in (0, 1))
    assert taken.startswith("weak: not started after 600 s: the node pi-3 has not made its container: the image may be")
    assert free == "weak: not started after 600 s: no node took it"


@pytest.mark.parametrize(
    ("ready", "containers", "expected"),
    [("False", "True", True), ("True", "True", False), ("False", "False", False), ("True", "False", False)],
)
def test_a_running_pod_whose_node_does_not_answer_is_lost(ready: str, containers: str, expected: bool) -> None:
    job = watched(1)
    hear(job, [running(job, 0, Ready=ready, ContainersReady=containers)], 1.0)
    assert {index: loss.node for index, loss in lost(job, 2.0).items()} == ({0: True} if expected else {})


def test_a_pod_that_does_not_end_is_lost_a_minute_after_it_had_to() -> None:
    """Seen from the first sight of it, by a clock of one's own: that of the API server may go wrong."""
    job = watched(1)
    ending = running(job, 0, Ready="True", ContainersReady="True")
    ending["metadata"] |= {"deletionTimestamp": "2001-01-01T00:00:00Z", "deletionGracePeriodSeconds": 5}
    for now in (100.0, 160.0):
        hear(job, [ending], now)
    assert lost(job, 165.0) == {}
    assert lost(job, 165.1)[0].node
    after = running(job, 0)
    after["metadata"] |= {"uid": "another", "creationTimestamp": "2"}
    hear(job, [after], 170.0)
    assert lost(job, 1000.0) == {}, "it ended, and its Job has made another"
    hear(job, [{**ending, "status": {"phase": "Failed"}}], 1000.0)
    assert lost(job, 1600.0) == {}, "one that has ended is its Job's to replace"


def test_why_a_pod_could_not_start_is_forgotten_when_it_does() -> None:
    job = watched(1)
    hear(job, [pod(job, 0, containerStatuses=client(waiting={"reason": "ImagePullBackOff"}))], 1.0)
    assert job.reason(0) == "ImagePullBackOff"
    hear(job, [running(job, 0)], 2.0)
    over = {"conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]}
    assert lost(job, 3.0, **over)[0].reason == "weak: DeadlineExceeded"


def test_what_no_node_takes_says_what_was_asked_for() -> None:
    pool = NodePool(arch="arm64", selector={"flexfleet.io/tier": "weak"}, taint="flexfleet.io/edge", memory="700Mi")
    job = watched(1, pools={"weak": pool})
    hear(job, [unschedulable(job, 0, NOWHERE)], 1.0)
    assert job.reason(0) == (
        f"Unschedulable: {NOWHERE} (the pod asks for cpu 1, memory 700Mi, kubernetes.io/arch=arm64, "
        "flexfleet.io/tier=weak, tolerating flexfleet.io/edge)"
    )


def test_many_pods_of_a_tier_are_one_line() -> None:
    found = [watched(10), watched(10)]
    for job in found:
        pods = [unschedulable(job, index, f"0/4 nodes: {index + 1} Insufficient cpu") for index in range(9)]
        hear(job, [*pods, running(job, 9)], 1.0)
    counts = waiting.reasons(found)
    assert list(counts) == ["weak"] and sum(counts["weak"].values()) == 18
    assert waiting.told(counts["weak"]).startswith("18 x Unschedulable: 0/4 nodes: 1 Insufficient cpu (the pod asks")
    assert waiting.waiting_pods(found) == {"weak": (20, 18)}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.none() | st.integers(1, 500))
def test_pods_at_a_time_are_divided_over_jobs(sizes: list[int], most: int | None) -> None:
    found = jobs.shares(sizes, most)
    assert all(1 <= share <= size for share, size in zip(found, sizes, strict=True))
    assert sum(found) == (sum(sizes) if most is None else min(max(most, len(sizes)), sum(sizes)))


def test_shares_follow_sizes() -> None:
    assert jobs.shares([12, 9, 9], 10) == [4, 3, 3]
    assert jobs.shares([1, 40], 10) == [1, 9]


def test_a_suspended_job_queues_says_so_and_has_its_whole_time_when_it_is_admitted() -> None:
    job = waiting.live(job_of(2) | {"status": {}}, now=0.0, lasts=900.0)
    hear(job, [], 1.0, suspend=True)
    assert {job.reason(index) for index in (0, 1)} == {"the Job is suspended: its queue does not admit it"}
    assert not job.lacks_pods(), "no event says why pods are missing that should not be there"
    assert waiting.told(waiting.reasons([job])["weak"]) == f"2 x {waiting.SUSPENDED}"
    hear(job, [], 5000.0, suspend=True)
    assert lost(job, 5000.0, moved=4500.0) == {}, "the others move, and its deadline stands still"
    assert {loss.reason for loss in lost(job, 5000.0, moved=4300.0).values()} == {
        f"weak: not started after 600 s: {waiting.SUSPENDED}"
    }
    began = {"conditions": [{"type": "Suspended", "status": "True"}]}
    hear(job, [], 5001.0, **began)
    assert job.reason(0) == waiting.SUSPENDED, "its queue has let it begin, Kubernetes has not begun yet"
    hear(job, [], 5002.0, conditions=[{"type": "Suspended", "status": "False"}])
    assert lost(job, 5601.0, moved=4500.0) == {}, "its pods have all the time to come"
    assert {loss.reason for loss in lost(job, 5603.0, moved=5600.0).values()} == {
        "weak: not started after 600 s: no pod was made, and no event says why"
    }
    hear(job, [running(job, 0), running(job, 1)], 5604.0)
    assert lost(job, 5900.0) == {}
    assert {loss.reason for loss in lost(job, 5902.0).values()} == {"weak: DeadlineExceeded"}


def test_a_job_that_was_made_suspended_is_known_to_be_before_anybody_looks() -> None:
    made = job_of(1)
    made["spec"]["suspend"] = True
    assert waiting.live(made, now=0.0, lasts=900.0).reason(0) == waiting.SUSPENDED


def test_the_pods_of_a_job_that_was_stopped_for_others_have_not_failed() -> None:
    """While they end they say that they were killed, as does one that failed before and has no successor yet. One that
    has ended well, and an index that has failed for good, stay what they are."""
    job = watched(4)
    done, bad = pod(job, 2, "Succeeded"), failed(job, 3)
    hear(job, [running(job, 0), failed(job, 1), done, bad], 100.0, failedIndexes="3")
    ending = failed(job, 0)
    ending["metadata"] |= {"deletionTimestamp": "now", "deletionGracePeriodSeconds": 5}
    assert hear(job, [ending, failed(job, 1), done, bad], 200.0, suspend=True, failedIndexes="3") == {0, 1}
    assert job.reason(0) == job.reason(1) == waiting.SUSPENDED and job.reason(3) == "OOMKilled (exit code 137)"
    assert set(job.since) == {0, 1} and set(job.states) == {2, 3}
    assert set(lost(job, 790.0, moved=200.0, failedIndexes="3")) == {3}
    assert set(lost(job, 801.0, moved=200.0, failedIndexes="3")) == {0, 1, 3}
    hear(job, [running(job, 0), running(job, 1), done, bad], 810.0, failedIndexes="3")
    assert set(lost(job, 5000.0, moved=810.0, failedIndexes="3")) == {3}


def test_a_job_that_its_queue_admits_with_fewer_pods_at_a_time_lacks_none() -> None:
    job = watched(3)
    found = {"spec": {"parallelism": 1}, "status": {}}
    waiting.hear(job, found, [running(job, 0)], 1.0)
    assert not job.lacks_pods() and lost(job, 700.0, moved=650.0) == {}
