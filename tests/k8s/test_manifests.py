"""The manifests in k8s/ are valid, restricted and complete, and the Role grants exactly what the backend calls."""

from __future__ import annotations

import ast
import ipaddress
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_engine.remote.kubernetes import jobs
from flexfleet.config import Config, load_config
from flexfleet.kubeflow import retarget
from flexfleet.tracking.prometheus import RunMetrics
from tests.k8s import valid

ROOT = Path(__file__).parents[2]
OVERLAYS = ("kind", "cluster", "edge")
VERSIONS = ("1.33", "1.37")

Resource = dict[str, Any]


@cache
def rendered(overlay: str) -> list[Resource]:
    return built(ROOT / "k8s" / "overlays" / overlay)


def built(folder: Path) -> list[Resource]:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl, which renders the overlays")
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def first_run() -> Resource:
    found: Resource = yaml.safe_load((ROOT / "k8s/overlays/kind/run.yaml").read_text())
    return found


def pods(resources: list[Resource]) -> Iterator[tuple[str, Resource]]:
    for resource in resources:
        if resource["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield f"{resource['kind']} {resource['metadata']['name']}", resource["spec"]["template"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_are_valid(overlay: str, version: str) -> None:
    for resource in rendered(overlay):
        valid.validate(resource, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_first_run_is_valid(version: str) -> None:
    job = first_run()
    valid.validate(job, version)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    config = load_config(None, [word.removeprefix("--set=") for word in container["args"]])
    assert (config.run.backend, config.run.remote) == ("kubernetes", "s3://flexfleet/runs")


def test_edge_settings_use_the_labels_of_the_script() -> None:
    config = load_config(ROOT / "k8s/overlays/edge/params.yaml", [])
    script = (ROOT / "k8s/overlays/edge/label-nodes").read_text()
    for tier, pool in config.kubernetes.pools.items():
        assert pool.selector == {"flexfleet.io/tier": tier} and "flexfleet.io/tier=$tier" in script
        assert pool.device_type is not None and "flexfleet.io/device-type=$type" in script
        assert f"{pool.taint}=true:NoSchedule" in script


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_is_restricted(overlay: str) -> None:
    """Pod Security's level `restricted`, a numeric user, a read-only root and a memory limit."""
    given = [*pods(rendered(overlay)), *pods([first_run(), jobs.template(None)])]
    assert len(given) > 2
    for name, template in given:
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), name
        assert all(set(v) & {"secret", "configMap", "emptyDir"} for v in spec.get("volumes", [])), name
        assert all(v["emptyDir"].get("sizeLimit") for v in spec.get("volumes", []) if "emptyDir" in v), name
        assert "serviceAccountName" in spec or spec["automountServiceAccountToken"] is False, name
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False and security["readOnlyRootFilesystem"], name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            # The backend fills in those of the clients' Jobs.
            assert "memory" in container.get("resources", {}).get("limits", {}) or name == "Job filled-in", name


def test_pods_leave_a_lost_node_after_a_minute() -> None:
    for name, template in pods([first_run(), jobs.template(None)]):
        left = {t["key"]: t["tolerationSeconds"] for t in template["spec"]["tolerations"] if t["effect"] == "NoExecute"}
        assert left == {"node.kubernetes.io/unreachable": 60, "node.kubernetes.io/not-ready": 60}, name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_namespaces_are_restricted_and_closed(overlay: str) -> None:
    resources = rendered(overlay)
    for namespace in (r for r in resources if r["kind"] == "Namespace"):
        assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    closed = {
        (r["metadata"]["namespace"], direction)
        for r in resources
        if r["kind"] == "NetworkPolicy" and r["spec"]["podSelector"] == {}
        for direction in r["spec"]["policyTypes"]
        if direction.lower() not in r["spec"]
    }
    assert closed == {("flexfleet-clients", "Ingress"), ("flexfleet-clients", "Egress"), ("flexfleet", "Ingress")}


def test_servers_without_calls_have_no_egress() -> None:
    policies = [r for r in rendered("kind") if r["kind"] == "NetworkPolicy"]
    shut = {
        r["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/name"]
        for r in policies
        if r["metadata"]["namespace"] == "flexfleet" and "Egress" in r["spec"]["policyTypes"]
        if "egress" not in r["spec"]
    }
    assert shut == {"postgres", "s3"}


STORE = ipaddress.ip_network("192.0.2.0/24")
"""TEST-NET-1 of RFC 5737: addresses for documentation, which nobody has."""
RESOLVERS = {ipaddress.ip_network("169.254.20.10/32"), ipaddress.ip_network("169.254.169.254/32")}


def test_clients_reach_only_names_and_the_store() -> None:
    """Reads all files, also those that no overlay uses. The user fills in the store's address."""
    blocks = []
    for path in sorted((ROOT / "k8s").rglob("*.yaml")):
        for policy in yaml.safe_load_all(path.read_text()):
            if not isinstance(policy, dict) or policy.get("kind") != "NetworkPolicy":
                continue
            if policy["metadata"]["namespace"] != "flexfleet-clients":
                continue
            for rule in policy["spec"].get("egress", []):
                assert rule.get("ports") and rule.get("to"), f"{path}: a rule without is open"
                ports = {port["port"] for port in rule["ports"]}
                for to in rule["to"]:
                    assert to != {} and to.get("namespaceSelector") != {}, f"{path}: everywhere"
                    if "ipBlock" in to:
                        blocks.append((path.parent.name, ipaddress.ip_network(to["ipBlock"]["cidr"]), ports))
    for overlay, block, ports in blocks:
        assert (block in RESOLVERS and ports == {53}) or (block.subnet_of(STORE) and ports == {443}), (overlay, block)
    assert [overlay for overlay, block, _ in blocks if block.subnet_of(STORE)] == ["cluster"]
    guide = (ROOT / "docs/guides/kubernetes.md").read_text()
    assert "192.0.2.1" in guide and "k8s/overlays/cluster/network.yaml" in guide


def named(value: Any) -> Iterator[str]:
    """Secrets that a manifest refers to."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("secretRef", "secretKeyRef"):
                yield inner["name"]
            if key == "secretName":
                yield inner
            yield from named(inner)
    if isinstance(value, list):
        for inner in value:
            yield from named(inner)


def test_kind_overlay_has_everything_it_refers_to() -> None:
    resources = rendered("kind")
    secrets = {r["metadata"]["name"] for r in resources if r["kind"] == "Secret"}
    for name, template in [*pods(resources), *pods([first_run()])]:
        assert set(named(template)) <= secrets, name
        for container in template["spec"]["containers"]:
            assert not container["image"].startswith("ghcr.io/flexfleet"), f"{name} runs an image that kind cannot load"
            own = container["image"].startswith("flexfleet")
            assert not own or container["imagePullPolicy"] == "IfNotPresent", f"{name} would be pulled: it is :latest"
    templates = [t["metadata"]["labels"] for _, t in pods(resources) if "metadata" in t]
    for service in (r for r in resources if r["kind"] == "Service"):
        assert any(service["spec"]["selector"].items() <= labels.items() for labels in templates)


def test_role_is_bound_to_existing_accounts() -> None:
    accounts = {("flexfleet", "flexfleet-coordinator"), ("kubeflow", "pipeline-runner")}
    for overlay in OVERLAYS:
        bound = [r for r in rendered(overlay) if r["kind"] == "RoleBinding"]
        assert {r["roleRef"]["name"] for r in bound} == {"flexfleet-coordinator"}
        assert {(s["namespace"], s["name"]) for r in bound for s in r["subjects"]} <= accounts


VERBS = {"create": "create", "delete": "delete", "get": "get", "patch": "patch", "select": "list"}
"""Methods of fl_engine.remote.kubernetes.cluster.Cluster."""


def test_role_grants_exactly_what_the_backend_calls() -> None:
    called = set()
    callers = (
        ("fl_engine/remote/kubernetes/objects.py", "self._cluster."),
        ("fl_engine/remote/kubernetes/provisioner.py", "self._cluster."),
        ("fl_engine/remote/kubernetes/objects.py", "Cluster(options.namespace)."),
        ("flexfleet/pipeline/keys.py", "self.cluster."),
    )
    for path, cluster in callers:
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(cluster):
                assert isinstance(node.args[0], ast.Constant), "what is asked for is written out"
                called.add((VERBS[ast.unparse(node.func).rpartition(".")[2]], node.args[0].value))
    (role,) = (d for d in yaml.safe_load_all((ROOT / "k8s/base/role.yaml").read_text()) if d["kind"] == "Role")
    granted = {(verb, kind) for rule in role["rules"] for verb in rule["verbs"] for kind in rule["resources"]}
    assert granted == called


# ------------------------------------------------------------------------------------------------- monitoring
MONITORING = ROOT / "k8s" / "components" / "monitoring"


def test_monitoring_component_finds_every_coordinator() -> None:
    monitor, policy = yaml.safe_load_all((MONITORING / "pod-monitor.yaml").read_text())
    valid.validate(policy, VERSIONS[0])
    labels = monitor["spec"]["selector"]["matchLabels"]
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    (endpoint,), (rule,) = monitor["spec"]["podMetricsEndpoints"], policy["spec"]["ingress"]
    keep, address = endpoint["relabelings"]
    assert address["replacement"] == f"$1:{rule['ports'][0]['port']}"
    template = first_run()["spec"]["template"]
    found = {template["spec"]["containers"][0]["name"]: template["metadata"]["labels"]}
    for name in retarget.names():
        executors = retarget.documents(retarget.shipped(name))[1]["platforms"]["kubernetes"]["deploymentSpec"][
            "executors"
        ]
        (found["main"], *_) = (each["podMetadata"]["labels"] for each in executors.values() if "podMetadata" in each)
    for container, of_pod in found.items():
        assert re.fullmatch(keep["regex"], container) and labels.items() <= of_pod.items()


def test_dashboard_shows_metrics_that_a_coordinator_exports() -> None:
    families, ends = RunMetrics(Config(), "a").registry.collect(), {"counter": "_total", "info": "_info"}
    exported = {family.name + ends.get(family.type, "") for family in families}
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [each["query"] for each in dashboard["templating"]["list"]]
    used = {name for query in queries for name in re.findall("(?:flexfleet|process)_[a-z_]+", query)}
    assert len(used) > 5 and used <= exported


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_with_monitoring_has_dashboard_and_monitor(overlay: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    file = tmp_path / "k8s" / "overlays" / overlay / "kustomization.yaml"
    file.write_text(file.read_text() + "components:\n  - ../../components/monitoring\n")
    new = [r for r in built(file.parent) if r not in rendered(overlay)]
    assert sorted(r["kind"] for r in new) == ["ConfigMap", "NetworkPolicy", "PodMonitor"]
