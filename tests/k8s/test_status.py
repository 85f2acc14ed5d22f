"""What the status of Jobs, pods and events says."""

from __future__ import annotations

from typing import Any

import pytest

from fl_engine.remote.kubernetes import objects

Resource = dict[str, Any]
DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "drained"}
PROXY = {"name": "proxy", "state": {"running": {}}}
"""A container that a webhook has put into the pod."""


def pod(phase: str = "Pending", deleted: bool = False, **status: Any) -> Resource:
    metadata = {"uid": "p", "deletionTimestamp": "now"} if deleted else {"uid": "p"}
    return {"metadata": metadata, "status": {"phase": phase, **status}}


def client(**state: Any) -> list[Resource]:
    return [PROXY, {"name": "client", "state": state}]


def ended(code: int, reason: str = "Error", message: str = "") -> list[Resource]:
    return client(terminated={"exitCode": code, "reason": reason, "message": message})


def unschedulable(message: str, reason: str = "Unschedulable") -> Resource:
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    return pod(conditions=[condition])


FULL = "0/4 nodes are available: 1 node(s) had untolerated taint {a: }, 3 Insufficient cpu."
NOWHERE = "0/4 nodes are available: 4 node(s) didn't match Pod's node affinity/selector."
LOW = {"reason": "Evicted", "message": "low on memory"}


@pytest.mark.parametrize(
    ("seen", "reason", "flags"),
    [
        (pod(), "", ""),
        (pod(containerStatuses=client(waiting={"reason": "ContainerCreating"})), "", ""),
        (pod(containerStatuses=client(waiting={"reason": "ErrImagePull", "message": "no"})), "ErrImagePull: no", ""),
        (pod(initContainerStatuses=[{"name": "mesh", "state": {"waiting": {"reason": "ImagePullBackOff"}}}]),
         "ImagePullBackOff", ""),
        (unschedulable(FULL), f"Unschedulable: {FULL}", "queued"),
        (unschedulable(NOWHERE), f"Unschedulable: {NOWHERE}", ""),
        (unschedulable("", "SchedulingGated"), "SchedulingGated", "queued"),
        (pod("Running", containerStatuses=client(running={})), "", "started"),
        (pod("Running", containerStatuses=client(running={}), conditions=[{"type": "Ready", "status": "False"}]),
         "", "started"),
        (pod("Running", deleted=True, containerStatuses=client(running={})), "the pod was deleted", "started"),
        (pod("Running", containerStatuses=ended(137, "OOMKilled", "Traceback")), "OOMKilled", "started over failed"),
        (pod("Failed", containerStatuses=ended(6, message="no data\n")), "no data", "started over failed"),
        (pod("Failed", containerStatuses=ended(1)), "Error (exit code 1)", "started over failed"),
        (pod("Failed", containerStatuses=ended(137), conditions=[DISRUPTED]), "EvictionByEvictionAPI: drained",
         "started over"),
        (pod("Failed", deleted=True, containerStatuses=ended(137)), "the pod was deleted", "started over"),
        (pod("Failed", **LOW), "Evicted: low on memory", "started over failed"),
        (pod("Running", containerStatuses=ended(143)), "Error (exit code 143)", "started over"),
        (pod("Succeeded", containerStatuses=ended(0, "Completed")), "", "started over"),
    ],
)  # fmt: skip
def test_pod_state_names_the_weightiest_reason(seen: Resource, reason: str, flags: str) -> None:
    found = objects.pod_state(seen)
    assert (found.uid, found.reason) == ("p", reason)
    names = ("started", "over", "failed", "queued")
    assert [name for name in names if getattr(found, name)] == [name for name in names if name in flags.split()]


@pytest.mark.parametrize(("text", "found"), [("", set()), ("1", {1}), ("1,3-5,7", {1, 3, 4, 5, 7}), ("0-1", {0, 1})])
def test_indexes_are_read_as_kubernetes_writes_them(text: str, found: set[int]) -> None:
    assert objects.spent({"status": {"failedIndexes": text, "completedIndexes": "9"}}) == found | {9}


@pytest.mark.parametrize(
    ("suspend", "said", "found"), [(True, "False", True), (False, "True", True), (False, "", False)]
)
def test_job_is_suspended_until_its_controller_says_otherwise(suspend: bool, said: str, found: bool) -> None:
    conditions = [{"type": "Suspended", "status": said}] if said else []
    assert objects.suspended({"spec": {"suspend": suspend}, "status": {"conditions": conditions}}) is found
