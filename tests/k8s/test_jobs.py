"""Generated Jobs: valid by the published schemas whatever the configuration, and what a restarted coordinator reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from fl_engine.backends.kubernetes import jobs, status
from fl_engine.backends.kubernetes.settings import KubernetesConfig, NodePool
from fl_engine.backends.kubernetes.status import pod_state
from fl_engine.core.errors import ConfigError
from fl_engine.core.types import SubmodelSpec, WorkOrder
from fl_engine.exchange.letters import Name
from fl_engine.fleet import devices
from tests.k8s import valid

BASE = Path(__file__).parents[2] / "k8s" / "base"
VERSIONS = ("1.33", "1.37")
FLEET = devices.fleet("4:3:3", 40, 0)
OWNER = {"apiVersion": "v1", "kind": "ConfigMap", "name": "run", "uid": "0"}


def orders(clients: list[int]) -> list[WorkOrder]:
    return [WorkOrder(3, client, SubmodelSpec(), {}, 0, 0) for client in clients]


TEMPLATE = jobs.template(None)


def made(options: KubernetesConfig, clients: list[int], run_id: str = "My Run_1") -> list[dict[str, Any]]:
    run = jobs.run_label(run_id, "s3://runs/x")
    found = jobs.groups(orders(clients), FLEET, options)
    return [jobs.job(TEMPLATE, options, run, 3, group, 0, OWNER, "/data") for group in found]


@pytest.mark.parametrize("path", sorted(set(BASE.glob("*.yaml")) - {BASE / "kustomization.yaml"}), ids=lambda p: p.name)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid(path: Path, version: str) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        valid.validate(document, version)


POOLS = st.builds(
    NodePool,
    memory=st.sampled_from(["512Mi", "2Gi"]),
    arch=st.sampled_from([None, "arm64", "amd64"]),
    device_type=st.sampled_from([None, "rpi4", "jetson-nano"]),
    selector=st.dictionaries(st.sampled_from(["zone", "disk"]), st.sampled_from(["a", "b"])),
    taint=st.sampled_from([None, "flexfleet.io/edge"]),
    runtime_class=st.sampled_from([None, "nvidia"]),
    image=st.sampled_from([None, "flexfleet:jetson"]),
)


@settings(max_examples=60)
@given(
    clients=st.sets(st.integers(0, 39), min_size=1),
    pools=st.dictionaries(st.sampled_from(["weak", "medium", "strong"]), POOLS),
    packed=st.integers(1, 5),
    placement=st.sampled_from(["pool", "device"]),
    data=st.sampled_from([None, "pvc:images", "host:/mnt/images"]),
    run_id=st.text(max_size=40),
)
def test_every_job_is_valid_and_names_each_client_once(
    clients: set[int], pools: dict[str, NodePool], packed: int, placement: Any, data: str | None,
    run_id: str,
) -> None:  # fmt: skip
    options = KubernetesConfig(pools=pools, clients_per_pod=packed, placement=placement, data=data)
    found = made(options, sorted(clients), run_id)
    named = [client for job in found for pod in jobs.pods_of(job) for client in pod]
    assert sorted(named) == sorted(clients)
    names = [job["metadata"]["name"] for job in found]
    assert len(set(names)) == len(names)
    for job in found:
        assert len(job["metadata"]["name"]) <= 57, "a pod's name adds an index and five characters"
        tiers = {FLEET[client].tier for pod in jobs.pods_of(job) for client in pod}
        assert tiers == {job["metadata"]["labels"]["flexfleet.io/tier"]}
        assert job["spec"]["completions"] == len(jobs.pods_of(job)) and jobs.attempt_of(job) == 0
        valid.validate(job, "1.33")
        job["metadata"]["uid"] = "3e2b"
        secret = jobs.secret(job, ["{}"] * job["spec"]["completions"], "{}")
        valid.validate(secret, "1.33")
        _restricted(job["spec"]["template"]["spec"], (data or "").startswith("host:"))


def _restricted(pod: dict[str, Any], host: bool) -> None:
    """What Pod Security `restricted` asks for (a folder of the node, which only tests mount, is not allowed there)."""
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
    assert not pod.get("hostNetwork") and not pod.get("hostPID")
    assert host == any("hostPath" in volume for volume in pod["volumes"])


def test_where_a_tiers_pods_may_run() -> None:
    pool = NodePool(arch="arm64", device_type="rpi4", selector={"room": "7"}, taint="flexfleet.io/edge", memory="700Mi")
    options = KubernetesConfig(pools={"weak": pool}, image="registry/flexfleet:1")
    found = {job["metadata"]["labels"]["flexfleet.io/tier"]: job for job in made(options, list(range(20)))}
    pod = found["weak"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {
        "kubernetes.io/arch": "arm64", "flexfleet.io/device-type": "rpi4", "room": "7",
    }  # fmt: skip
    assert pod["tolerations"][-1] == {"key": "flexfleet.io/edge", "operator": "Exists", "effect": "NoSchedule"}
    assert pod["containers"][0]["resources"]["limits"] == {"memory": "700Mi"}
    assert "nodeSelector" not in found["strong"]["spec"]["template"]["spec"]
    assert {job["spec"]["template"]["spec"]["containers"][0]["image"] for job in found.values()} == {options.image}


def test_a_tier_that_fills_a_secret_is_split() -> None:
    fleet = [replace(FLEET[0], client=client) for client in range(450)]
    (tier,) = jobs.groups(orders(list(range(450))), fleet, KubernetesConfig())
    assert jobs.parts(tier, ["x"] * 450, "{}") == [(tier, ["x"] * 450)]
    third = "é" * (jobs.SECRET_BYTES // 3 // 2)  # two bytes each
    found = jobs.parts(tier, [third] * 7 + ["x"] * 443, "x" * 100)
    assert [(group.part, len(group.pods), len(told)) for group, told in found] == [
        (0, 2, 2), (1, 2, 2), (2, 2, 2), (3, 444, 444),
    ]  # fmt: skip
    assert [pod for group, _ in found for pod in group.pods] == list(tier.pods)
    assert len({jobs.job_name("run", 0, group, 0) for group, _ in found}) == 4
    with pytest.raises(ConfigError, match=r"a pod of 1 clients is told takes .*clients_per_pod lower"):
        jobs.parts(tier, ["x"] * 449 + ["x" * jobs.SECRET_BYTES], "x")


@pytest.mark.parametrize(("said", "expected"), [("", set()), ("1", {1}), ("1,3-5,7", {1, 3, 4, 5, 7}), ("0-1", {0, 1})])
def test_failed_indexes(said: str, expected: set[int]) -> None:
    assert status.failed_indexes({"status": {"failedIndexes": said}}) == expected
    assert status.failed_indexes({}) == status.failed_indexes({"status": None}) == set()


def test_runs_of_one_name_in_two_stores_are_told_apart() -> None:
    one, two = (jobs.run_label("nightly", store) for store in ("s3://a", "s3://b"))
    assert one != two and one.startswith("nightly-") and len(jobs.run_label("x" * 80, "s3://a")) <= 24


def test_a_template_that_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        jobs.template(str(tmp_path / "none.yaml"))
    path = tmp_path / "job.yaml"
    empty = json.dumps({"kind": "Job", "spec": {"template": {"spec": {"containers": []}}}})
    for text in ("[]", "kind: Job", "{", empty):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"job\.yaml"):
            jobs.template(str(path))
    path.write_text(jobs.TEMPLATE.read_text().replace("subPath: common.json", "subPath: else.json"))
    with pytest.raises(ConfigError, match=r"does not mount common\.json"):
        jobs.template(str(path))


def test_a_template_whose_pods_tolerate_everything_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    template = yaml.safe_load(jobs.TEMPLATE.read_text())
    template["spec"]["template"]["spec"]["tolerations"] = [{"operator": "Exists"}]
    path.write_text(json.dumps(template))
    (group,) = jobs.groups(orders([0]), FLEET, KubernetesConfig())
    job = jobs.job(jobs.template(str(path)), KubernetesConfig(), "run", 3, group, 0, OWNER, "/data")
    assert jobs.wanted(job).endswith("tolerating every taint")


def leaves(of: Any, *path: str | int) -> dict[tuple[str | int, ...], Any]:
    """By path, what lies at the ends of a document."""
    inner = list(of.items()) if isinstance(of, dict) else list(enumerate(of)) if isinstance(of, list) else []
    if not inner:
        return {path: of}
    return {where: what for key, value in inner for where, what in leaves(value, *path, key).items()}


CLIENT = ("spec", "template", "spec", "containers", 1)
FILLED_IN = {
    ("metadata", "name"), ("spec", "completions"), ("spec", "parallelism"), ("spec", "activeDeadlineSeconds"),
    ("spec", "template", "spec", "volumes", 0, "secret", "secretName"), (*CLIENT, "image"),
    (*CLIENT, "resources", "requests", "memory"), (*CLIENT, "resources", "limits", "memory"),
}  # fmt: skip
"""Of `own_template`, which gives cpu and the node's label other values than the settings do."""


def own_template() -> dict[str, Any]:
    """With something of its own wherever something is filled in."""
    found: dict[str, Any] = yaml.safe_load(jobs.TEMPLATE.read_text())
    found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "team"
    found["metadata"]["annotations"] = {"kueue.x-k8s.io/job-min-parallelism": "1", jobs.ATTEMPT: "ours counts"}
    found["spec"] |= {"suspend": True, "activeDeadlineSeconds": 7}
    pod = found["spec"]["template"]
    pod["metadata"]["annotations"] = {"sidecar.istio.io/inject": "false"}
    client, sidecar = pod["spec"]["containers"][0], {"name": "proxy", "image": "proxy:1", "resources": {}}
    client["resources"] = {
        "requests": {"cpu": "ours counts", "memory": "1", "ephemeral-storage": "1Gi"},
        "limits": {"cpu": "2", "memory": "1", "ephemeral-storage": "2Gi", "nvidia.com/gpu": "1"},
        "claims": [{"name": "gpu"}],
    }
    client["args"] = ["--of-its-own"]
    client["volumeMounts"].append({"name": "cache", "mountPath": "/cache"})
    pod["spec"] |= {
        "containers": [sidecar, client],
        "initContainers": [{"name": "fetch", "image": "fetch:1"}],
        "nodeSelector": {"disk": "ssd", "room": "ours counts"},
        "runtimeClassName": "gvisor",
        "imagePullSecrets": [{"name": "registry"}],
        "priorityClassName": "low",
        "affinity": {"nodeAffinity": {}},
    }
    pod["spec"]["volumes"].append({"name": "cache", "emptyDir": {}})
    return found


@pytest.mark.parametrize("round", [3, None])
def test_a_template_of_ones_own_keeps_all_that_is_not_filled_in(tmp_path: Path, round: int | None) -> None:
    path, own = tmp_path / "job.yaml", own_template()
    path.write_text(json.dumps(own))
    pools = {FLEET[0].tier: NodePool(selector={"room": "7"}, taint="flexfleet.io/edge", cpu="500m", memory="3Gi")}
    options = KubernetesConfig(pools=pools, data="pvc:images", image="ours:1", template=str(path), deadline_s=900)
    (group,) = jobs.groups(orders([0]), FLEET, options)
    made = jobs.job(jobs.template(str(path)), options, "run", round, group, 0, OWNER, "/data")
    there, filled_in = leaves(made), set(FILLED_IN)
    if round is None:  # pods that stay
        filled_in.add(("spec", "backoffLimitPerIndex"))
    wanted = {where: what for where, what in leaves(own).items() if where not in filled_in and what != "ours counts"}
    assert {where: there.get(where) for where in wanted} == wanted
    pod = made["spec"]["template"]["spec"]
    client = pod["containers"][1]
    assert pod["nodeSelector"] == {"disk": "ssd", "room": "7"}
    assert made["metadata"]["annotations"][jobs.ATTEMPT] == "0"
    assert client["resources"]["requests"] == {"cpu": "500m", "memory": "3Gi", "ephemeral-storage": "1Gi"}
    assert client["resources"]["limits"]["memory"] == "3Gi" and client["image"] == "ours:1"
    assert made["spec"].get("activeDeadlineSeconds") == (None if round is None else 900)
    assert "ephemeral-storage 1Gi, nvidia.com/gpu 1" in jobs.wanted(made)
    valid.validate(made, "1.33")


def test_a_pool_of_a_misspelt_tier_is_refused_and_one_of_another_fleet_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = KubernetesConfig(pools={"weak": NodePool(), "strog": NodePool()})
    with pytest.raises(ConfigError, match=r"^kubernetes\.pools: the fleet has no tier 'strog' \(did you mean 'strong'"):
        jobs.check(options, ["weak", "medium", "strong"])
    jobs.check(options, ["weak", "strog"])
    assert not caplog.records
    jobs.check(KubernetesConfig(pools=dict.fromkeys(("weak", "medium", "strong", "pi-4b"), NodePool())), ["pi-4b"])
    assert "kubernetes.pools: the fleet has no tier 'medium' (its tiers: pi-4b)" in caplog.text


def test_what_a_pod_waits_for_and_why_it_failed() -> None:
    def state(**status: Any) -> str:
        pod = {"metadata": {"annotations": {"batch.kubernetes.io/job-completion-index": "4"}}, "status": status}
        found = pod_state(pod)
        assert found.index == 4
        return found.reason

    def container(**state: Any) -> list[dict[str, Any]]:
        return [{"name": "client", "state": state}]

    assert state(phase="Pending") == ""
    assert state(containerStatuses=container(waiting={"reason": "ContainerCreating"})) == ""
    assert state(containerStatuses=container(waiting={"reason": "ErrImagePull", "message": "no"})) == "ErrImagePull: no"
    assert state(containerStatuses=container(terminated={"exitCode": 137, "reason": "OOMKilled"})) == (
        "OOMKilled (exit code 137)"
    )
    failed = {"exitCode": 1, "reason": "Error", "message": "Traceback\nValueError: x\n"}
    assert state(containerStatuses=container(terminated=failed)) == "Error (exit code 1): ValueError: x"
    assert state(reason="Evicted", message="low on memory") == "Evicted: low on memory"
    assert state(reason="Evicted", message="\x1b[2Jall\nis \u202ewell\u2028") == r"Evicted: \x1b[2Jall is \u202ewell"


def test_of_the_pods_with_one_index_the_last_one_counts() -> None:
    def pod(index: int, at: str, phase: str, job: str = "a") -> dict[str, Any]:
        return {
            "metadata": {
                "labels": {"batch.kubernetes.io/job-name": job},
                "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
                "creationTimestamp": at,
            },
            "status": {"phase": phase},
        }

    pods = [pod(0, "2", "Failed"), pod(0, "2", "Pending"), pod(1, "3", "Running"), pod(1, "1", "Failed")]
    for order in (pods, pods[::-1]):
        found = {state.index: state.phase for state in status.newest([*order, pod(2, "1", "Running", "b")], "a")}
        assert found == {0: "Pending", 1: "Running"}


def test_tiers_that_begin_alike_have_jobs_of_their_own() -> None:
    tiers = ("jetson-nano-2gb", "jetson-nano-4gb", "Weak", "weak", "a b", "a-b")
    names = {jobs.job_name("run", 0, jobs.Group(tier, ((0,),), 0), 0) for tier in tiers}
    assert len(names) == len(tiers)


@settings(max_examples=30)
@given(
    pods=st.integers(1, 200),
    tier=st.text(min_size=1, max_size=80).filter(lambda tier: tier.isprintable()),
    host=st.sampled_from([None, "pi-3"]),
    run_id=st.text(max_size=40),
    attempt=st.integers(0, 99_999),
)
def test_every_job_of_pods_that_stay_is_valid_and_its_pods_names_are_those_of_devices(
    pods: int, tier: str, host: str | None, run_id: str, attempt: int
) -> None:
    group = jobs.Group(tier, ((),) * pods, 0 if host is None else 12_345, host)
    options = KubernetesConfig(lifetime="run", silence_s=600, recycle=50)
    run = jobs.run_label(run_id, "s3://runs/x")
    job = jobs.job(TEMPLATE, options, run, None, group, attempt, OWNER, "/data")
    for version in VERSIONS:
        valid.validate(job, version)
    name = job["metadata"]["name"]
    assert len(name) <= 57 and TypeAdapter(Name).validate_python(f"{name}-{pods - 1}")
    spec = job["spec"]
    assert spec["completions"] == spec["parallelism"] == pods == len(jobs.pods_of(job))
    assert "activeDeadlineSeconds" not in spec and spec["backoffLimitPerIndex"] == jobs.FAILURES
    (container,) = spec["template"]["spec"]["containers"]
    assert container["args"] == ["--stay", "--silence=600", "--recycle=50"]
    labels = job["metadata"]["labels"]
    assert labels["flexfleet.io/lifetime"] == "run" and "flexfleet.io/round" not in labels
    assert job["metadata"]["annotations"]["flexfleet.io/place"] == (host or tier)


def test_pods_that_stay_are_not_made_for_one_rounds_orders() -> None:
    auto = {"weak": NodePool(memory="auto")}
    with pytest.raises(ValueError, match=r"lifetime=run keeps pods for all rounds, and pools\.weak\.memory=auto makes"):
        KubernetesConfig(lifetime="run", pools=auto)
    KubernetesConfig(lifetime="round", pools=auto)
