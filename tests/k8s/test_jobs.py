"""Classes of pods, and the manifests of their Jobs: valid by the published schemas whatever the configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from fl_engine.core.errors import ConfigError
from fl_engine.fleet import devices
from fl_engine.remote.kubernetes import jobs
from fl_engine.remote.kubernetes.jobs import PodClass
from fl_engine.remote.messages import Name
from fl_engine.remote.settings import KubernetesConfig, NodePool
from tests.harness.settings import refused
from tests.k8s import valid

BASE = Path(__file__).parents[2] / "k8s" / "base"
VERSIONS = ("1.33", "1.37")
FLEET = devices.fleet("4:3:3", 40, 0)
OWNER = {"apiVersion": "v1", "kind": "ConfigMap", "name": "run", "uid": "0"}
TEMPLATE = jobs.template(None)
TIERS = ("weak", "medium", "strong")


def names(**pools: NodePool) -> set[str]:
    return {of.name for of in jobs.classes(FLEET, KubernetesConfig(pools=pools)).values()}


def made(options: KubernetesConfig, of: PodClass, round: str | None = None, **more: Any) -> dict[str, Any]:
    return jobs.job(jobs.template(options.template), options, "run-1", round, of, 0, 3, OWNER, **more)


@pytest.mark.parametrize("path", sorted(set(BASE.glob("*.yaml")) - {BASE / "kustomization.yaml"}), ids=lambda p: p.name)
@pytest.mark.parametrize("version", VERSIONS)
def test_base_manifest_is_valid(path: Path, version: str) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        valid.validate(document, version)


def test_tiers_with_equal_settings_share_a_class() -> None:
    own = NodePool(memory="2Gi")
    assert names() == {"+".join(dict.fromkeys(device.tier for device in FLEET))}
    assert names(weak=own) == {"weak", "+".join(dict.fromkeys(d.tier for d in FLEET if d.tier != "weak"))}
    assert names(weak=NodePool(cpu="1")) == names(), "as the defaults are"


@pytest.mark.parametrize("version", VERSIONS)
def test_pods_get_the_settings_of_the_platform(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXFLEET_PULL_SECRETS", "registry,mirror")
    monkeypatch.setenv("FLEXFLEET_PRIORITY_CLASS", "batch-low")
    monkeypatch.setenv("FLEXFLEET_LOG_FORMAT", "json")
    job = made(KubernetesConfig(image="i"), PodClass("weak", NodePool()))
    valid.validate(job, version)
    pod = job["spec"]["template"]["spec"]
    assert (pod["imagePullSecrets"], pod["priorityClassName"]) == (
        [{"name": "registry"}, {"name": "mirror"}],
        "batch-low",
    )
    assert {"name": "FLEXFLEET_LOG_FORMAT", "value": "json"} in pod["containers"][0]["env"]
    monkeypatch.setenv("FLEXFLEET_PRIORITY_CLASS", "Low")
    with pytest.raises(ConfigError):
        jobs.template(None)


def test_client_of_one_device_has_a_class_bound_to_its_node() -> None:
    options = KubernetesConfig(placement="device", hostname="pi-{client}")
    for client, of in jobs.classes(FLEET, options).items():
        assert of.name == of.host == f"pi-{client}"
        assert made(options, of)["spec"]["template"]["spec"]["nodeSelector"] == {"kubernetes.io/hostname": of.host}


@pytest.mark.parametrize(
    ("own", "other", "more", "expected"),
    [
        ({"memory": "2Gi"}, {"memory": "1Gi"}, {}, True),
        ({"memory": "1Gi"}, {"memory": "2Gi"}, {}, False),
        ({"memory": "2Gi", "selector": {"room": "7"}}, {}, {}, True),
        ({"memory": "2Gi"}, {"selector": {"room": "7"}}, {}, False),
        ({"memory": "2Gi", "torch_device": "cuda"}, {}, {}, False),
        ({"memory": "2Gi", "image": "other:1"}, {}, {}, False),
        ({"memory": "2Gi"}, {}, {"observe": "cgroup"}, False),
    ],
)
def test_larger_pods_execute_what_waits_for_smaller_ones(
    own: dict[str, Any], other: dict[str, Any], more: dict[str, Any], expected: bool
) -> None:
    mine, its = PodClass("strong", NodePool(**own)), PodClass("weak", NodePool(**other))
    assert mine.includes(its, KubernetesConfig(**more)) is expected
    assert mine.includes(mine, KubernetesConfig(**more))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.none() | st.integers(1, 500))
def test_shares_add_up_to_the_parallelism(sizes: list[int], most: int | None) -> None:
    found = jobs.shares(sizes, most)
    assert all(1 <= share <= size for share, size in zip(found, sizes, strict=True))
    assert sum(found) == (sum(sizes) if most is None else min(max(most, len(sizes)), sum(sizes)))


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


@settings(max_examples=50)
@given(
    pool=POOLS,
    name=st.text(min_size=1, max_size=80).filter(str.isprintable),
    size=st.integers(1, jobs_most := 200),
    number=st.integers(0, 99_999),
    round=st.sampled_from([None, "3", "99999-e"]),
    data=st.sampled_from([None, "pvc:images", "host:/mnt/images"]),
    run_id=st.text(max_size=40),
)
def test_job_is_valid_restricted_and_has_workers_names(
    pool: NodePool, name: str, size: int, number: int, round: str | None, data: str | None, run_id: str
) -> None:
    options, run = KubernetesConfig(data=data, image="i"), jobs.run_label(run_id, "s3://runs/x")
    job = jobs.job(TEMPLATE, options, run, round, PodClass(name, pool), number, size, OWNER)
    for version in VERSIONS:
        valid.validate(job, version)
    title, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert len(title) <= 57, "a pod's name adds an index and five characters"
    assert TypeAdapter(Name).validate_python(f"{title}-{jobs_most - 1}")
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == size
    (container,) = pod["containers"]
    assert ("--once" in container.get("args", [])) == (round is not None) == (jobs.ROUND in job["metadata"]["labels"])
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"] == pool.memory
    assert not any(variable["name"].startswith("AWS") for variable in container["env"])
    assert (data or "").startswith("host:") == any("hostPath" in volume for volume in pod["volumes"])
    job["metadata"]["uid"] = "3e2b"
    valid.validate(jobs.secret(job, ["{}"] * size), "1.33")


def test_job_names_of_classes_that_begin_alike_differ() -> None:
    tiers = ("jetson-nano-2gb", "jetson-nano-4gb", "Weak", "weak", "a b", "a-b")
    assert len({jobs.job_name("run", None, PodClass(tier, NodePool()), 0) for tier in tiers}) == len(tiers)


def test_run_labels_of_two_stores_differ() -> None:
    one, two = (jobs.run_label("nightly", store) for store in ("s3://a", "s3://b"))
    assert one != two and one.startswith("nightly-") and len(jobs.run_label("x" * 80, "s3://a")) <= 24


def test_settings_sum_changes_with_the_pod_and_not_with_waiting() -> None:
    one = jobs.settings_sum(TEMPLATE, KubernetesConfig())
    assert one == jobs.settings_sum(TEMPLATE, KubernetesConfig(attempts=7, parallelism=3, quorum=0.5, lifetime="round"))
    for change in ({"image": "other"}, {"clients_per_pod": 2}, {"pools": {"weak": NodePool(cpu="2")}}):
        assert jobs.settings_sum(TEMPLATE, KubernetesConfig(**change)) != one
    assert jobs.settings_sum(TEMPLATE | {"kind": "other"}, KubernetesConfig()) != one


def leaves(of: Any, *path: str | int) -> dict[tuple[str | int, ...], Any]:
    """Map each path to the value at its end."""
    inner = list(of.items()) if isinstance(of, dict) else list(enumerate(of)) if isinstance(of, list) else []
    if not inner:
        return {path: of}
    return {where: what for key, value in inner for where, what in leaves(value, *path, key).items()}


CLIENT = ("spec", "template", "spec", "containers", 1)
FILLED_IN = {
    ("metadata", "name"), ("spec", "completions"), ("spec", "parallelism"), (*CLIENT, "image"),
    ("spec", "template", "spec", "volumes", 0, "secret", "secretName"),
}  # fmt: skip


def test_own_template_keeps_all_that_is_not_filled_in(tmp_path: Path) -> None:
    own: dict[str, Any] = yaml.safe_load(jobs.TEMPLATE.read_text())
    own["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "team"
    own["metadata"]["annotations"] = {"kueue.x-k8s.io/job-min-parallelism": "1", jobs.NUMBER: "ours counts"}
    own["spec"] |= {"suspend": True, "activeDeadlineSeconds": 7, "backoffLimitPerIndex": 3}
    pod = own["spec"]["template"]
    pod["metadata"]["annotations"] = {"sidecar.istio.io/inject": "false"}
    client, sidecar = pod["spec"]["containers"][0], {"name": "proxy", "image": "proxy:1", "resources": {}}
    client["resources"] = {
        "requests": {"cpu": "ours counts", "memory": "ours counts", "ephemeral-storage": "1Gi"},
        "limits": {"cpu": "2", "memory": "ours counts", "ephemeral-storage": "2Gi", "nvidia.com/gpu": "1"},
        "claims": [{"name": "gpu"}],
    }
    client["args"] = ["--of-its-own"]
    client["volumeMounts"].append({"name": "cache", "mountPath": "/cache"})
    pod["spec"] |= {
        "containers": [sidecar, client],
        "initContainers": [{"name": "fetch", "image": "fetch:1"}],
        "nodeSelector": {"disk": "ssd", "room": "ours counts"},
        "tolerations": [{"operator": "Exists"}],
        "runtimeClassName": "gvisor",
        "imagePullSecrets": [{"name": "registry"}],
        "affinity": {"nodeAffinity": {}},
    }
    pod["spec"]["volumes"].append({"name": "cache", "emptyDir": {}})
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(own))
    of = PodClass("weak", NodePool(selector={"room": "7"}, taint="flexfleet.io/edge", cpu="500m", memory="3Gi"))
    job = made(KubernetesConfig(data="pvc:images", image="ours:1", template=str(path)), of, "3")
    there = leaves(job)
    kept = {at: what for at, what in leaves(own).items() if at not in FILLED_IN and what != "ours counts"}
    assert {at: there.get(at) for at in kept} == kept
    found, client = job["spec"]["template"]["spec"], job["spec"]["template"]["spec"]["containers"][1]
    assert found["nodeSelector"] == {"disk": "ssd", "room": "7"} and job["metadata"]["annotations"][jobs.NUMBER] == "0"
    assert found["tolerations"][1] == {"key": "flexfleet.io/edge", "operator": "Exists", "effect": "NoSchedule"}
    assert client["args"] == ["--of-its-own", "--once"] and client["image"] == "ours:1"
    assert client["resources"]["requests"] == {"cpu": "500m", "memory": "3Gi", "ephemeral-storage": "1Gi"}
    assert client["resources"]["limits"]["memory"] == "3Gi"
    valid.validate(job, "1.33")


def test_pool_of_a_misspelt_tier_is_refused() -> None:
    options = KubernetesConfig(pools={"weak": NodePool(), "strog": NodePool()})
    with pytest.raises(ConfigError) as error:
        jobs.check(options, TIERS)
    assert error.value.path == "kubernetes.pools"
    jobs.check(options, ["weak", "strog"])
    jobs.check(KubernetesConfig(pools=dict.fromkeys((*TIERS, "pi-4b"), NodePool())), ["pi-4b"])  # of another fleet


@pytest.mark.parametrize(
    "setting",
    [
        *(f"pools={{weak: {{memory: '{amount}'}}}}" for amount in ("1GB", "-1Gi")),
        "pools={weak: {memory: auto}}",
        "data=nfs:x",
        "namespace=Bad_NS",
        "hostname=pi",
        "deadline_s=604741",
    ],
)
def test_what_kubernetes_would_refuse_is_refused_at_once(setting: str) -> None:
    assert "kubernetes" in refused(f"kubernetes={setting}" if setting.startswith("{") else f"kubernetes.{setting}")
