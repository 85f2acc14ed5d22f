"""`flexfleet check --connect` contacts all servers, and changes nothing on them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_engine.core.errors import EnvironmentFailure
from fl_engine.remote.settings import KubernetesConfig
from fl_engine.storage.s3 import S3Store
from flexfleet.pipeline.survey import RIGHTS, survey
from tests.harness.moto_server import bucket as bucket  # a fixture
from tests.harness.web import answering
from tests.k8s.fake import Resource

ROOT = Path(__file__).parents[2]
OPTIONS = KubernetesConfig(image="registry/flexfleet", pools={"edge": {"arch": "arm64", "taint": "edge"}})  # type: ignore[dict-item]


def node(name: str, ready: str = "True", memory: str = "8Gi", taint: str = "", **labels: str) -> Resource:
    status = {"conditions": [{"type": "Ready", "status": ready}], "allocatable": {"cpu": "4", "memory": memory}}
    status["images"] = [{"names": [f"docker.io/registry/flexfleet:{name}"]}]
    taints = [{"key": taint, "effect": "NoSchedule"}] if taint else []
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/arch": "amd64", **labels}},
        "spec": {"taints": taints},
        "status": status,
    }


EDGE = node("edge", taint="edge", **{"kubernetes.io/arch": "arm64"})


def test_survey_counts_nodes_that_accept_the_pods_of_a_tier(cluster: Any) -> None:
    cluster.nodes = [node("latest"), node("small", memory="512Mi"), node("gone", "Unknown"), node("x", taint="x"), EDGE]
    found = survey(OPTIONS, ["cloud", "edge"])
    assert found.nodes == {"cloud": 1, "edge": 1} and found.with_image == {"registry/flexfleet": 1}
    assert cluster.created == []


def test_survey_without_rights_on_nodes_leaves_nodes_unchecked(cluster: Any) -> None:
    assert survey(OPTIONS, ["cloud"]).nodes is None


@pytest.mark.parametrize(
    ("nodes", "denied", "namespace", "text"),
    [
        ([node("latest")], set(), "flexfleet-clients", "edge"),
        ([EDGE], {("patch", "jobs")}, "flexfleet-clients", "patch jobs"),
        ([EDGE], set(), "elsewhere", "elsewhere"),
    ],
)
def test_survey_reports_what_is_missing(cluster: Any, nodes: Any, denied: Any, namespace: str, text: str) -> None:
    cluster.nodes, cluster.denied = nodes, denied
    with pytest.raises(EnvironmentFailure, match=text):
        survey(OPTIONS.model_copy(update={"namespace": namespace}), ["edge"])


def test_survey_asks_for_the_rights_of_the_role() -> None:
    rules = yaml.safe_load((ROOT / "k8s" / "base" / "role.yaml").read_text())["rules"]
    assert {kind: tuple(rule["verbs"]) for rule in rules for kind in rule["resources"]} == RIGHTS


def test_connect_reports_each_server(
    flexfleet: Any, quick: Sequence[str], cluster: Any, bucket: str, kubeflow: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", kubeflow[1])
    remote = f"{bucket}/connect"  # other tests leave objects in the bucket
    sets = [*quick[1:], "run.backend=kubernetes", "kubernetes.image=x", f"run.remote={remote}"]
    with answering(200, "{}") as mlflow:
        done = flexfleet(
            "check", "--connect", "--json", sets=[*sets, f"tracking.mlflow={mlflow.url}", f"publish.dvc={tmp_path}/dvc"]
        )
    found = {each["name"]: each["ok"] for each in done.json["connections"]}
    assert done.code == 0 and found == dict.fromkeys(
        ["run.remote", "tracking.mlflow", "publish.dvc", "kubernetes", "kubeflow"], True
    )
    assert cluster.created == [] and S3Store(remote).list("") == [] and not (tmp_path / "dvc").exists()


def test_connect_reports_all_servers_if_some_fail(
    flexfleet: Any, quick: Sequence[str], bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections and never responds
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("KF_PIPELINES_ENDPOINT", address)
        sets = [*quick[1:], f"run.remote={bucket}", f"tracking.mlflow={address}", "publish.dvc=s3://no-such-bucket/x"]
        done = flexfleet("check", "--connect", "--json", sets=sets)
    found = {each["name"]: each["ok"] for each in done.json["connections"]}
    assert (done.code, done.json["ok"]) == (6, False)
    assert found == {"run.remote": True, "tracking.mlflow": False, "publish.dvc": False, "kubeflow": False}
    assert all(each["seconds"] <= 5.1 for each in done.json["connections"])
