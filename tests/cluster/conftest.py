"""A real cluster, by KUBECONFIG. What the suite needs besides:

--image NAME                     an image with flexfleet in it, or
--client-python hostpath:DIR     a folder of the nodes with the repository in DIR/src and a virtual environment in
                                 DIR/venv (for clusters without a registry; `--image` is then any image with a libc
                                 that the environment runs on, by default python:3.11-slim)
--lose-node CMD, --restore-node CMD
                                 what makes the node $NODE vanish, e.g. 'docker pause $NODE' for kind, and what brings
                                 it back; without them that test is skipped
AWS_ENDPOINT_URL and credentials of an S3 server that pods reach under --pods-endpoint (default: the same address)

    KUBECONFIG=... .venv/bin/python -m pytest tests/cluster --image registry/flexfleet:1
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3.session
import pytest
import yaml

from fl_engine.remote.kubernetes import jobs
from fl_engine.remote.kubernetes.cluster import Cluster, _connect
from flexfleet.config import Config, load_config
from flexfleet.pipeline.federate import federate
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.resume import Attempt
from tests.harness.prepared import model_of, prepare

NAMESPACE = f"flexfleet-test-{uuid.uuid4().hex[:6]}"
Model = Callable[..., bytes]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and "KUBECONFIG" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="no cluster: set KUBECONFIG (see tests/cluster/conftest.py)"))


Api = Callable[..., Any]


@pytest.fixture(scope="session")
def api() -> Api:
    """`api("GET", "/api/v1/nodes", body=None, missing=None)`: one request; `missing` is a status that gives None."""
    client = _connect()
    config, pool = client.configuration, client.rest_client.pool_manager

    def ask(method: str, path: str, body: Any = None, missing: int | None = None) -> Any:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        token = config.get_api_key_with_prefix("authorization") or ""
        headers = {"Content-Type": kind, "Accept": "application/json", "Authorization": token}
        sent = None if body is None else json.dumps(body)
        answer = pool.request(method, config.host + path, body=sent, headers=headers)
        if answer.status == missing:
            return None
        assert answer.status < 300, (method, path, answer.status, answer.data)
        return json.loads(answer.data)

    return ask


@pytest.fixture(scope="session")
def client_python(request: pytest.FixtureRequest) -> str | None:
    """The nodes' folder with the code and its environment; None: both are in the image."""
    given = request.config.getoption("--client-python")
    if given is None:
        return None
    kind, _, folder = str(given).partition(":")
    assert kind == "hostpath" and folder.startswith("/"), f"--client-python is hostpath:/folder, got {given!r}"
    return folder


@pytest.fixture(scope="session")
def namespace(api: Api, client_python: str | None) -> Iterator[str]:
    """A temporary namespace with the coordinator's account and Role; `restricted`, unless a folder of the nodes is
    mounted."""
    level = "privileged" if client_python else "restricted"
    labels = {"pod-security.kubernetes.io/enforce": level}
    metadata = {"name": NAMESPACE, "labels": labels}
    api("POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    name = "flexfleet-coordinator"
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}
    api("POST", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", account)
    role = yaml.safe_load((Path(__file__).parents[2] / "k8s/base/role.yaml").read_text())
    role["metadata"]["namespace"] = NAMESPACE
    group = "rbac.authorization.k8s.io"
    api("POST", f"/apis/{group}/v1/namespaces/{NAMESPACE}/roles", role)
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": NAMESPACE}],
    }
    api("POST", f"/apis/{group}/v1/namespaces/{NAMESPACE}/rolebindings", binding)
    yield NAMESPACE
    api("DELETE", f"/api/v1/namespaces/{NAMESPACE}")


@pytest.fixture(scope="session")
def template(client_python: str | None, tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """The Job's template that runs the nodes' own Python; None: the repository's."""
    if client_python is None:
        return None
    job = jobs.template(None)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    container["command"][0] = f"{client_python}/venv/bin/python"
    container["workingDir"] = f"{client_python}/src"
    container["volumeMounts"].append({"name": "code", "mountPath": client_python, "readOnly": True})
    pod["volumes"].append({"name": "code", "hostPath": {"path": client_python, "type": "Directory"}})
    path = tmp_path_factory.mktemp("template") / "worker-job.yaml"
    path.write_text(yaml.safe_dump(job))
    return str(path)


@pytest.fixture(scope="session", params=["run", "round"])
def lifetime(request: pytest.FixtureRequest) -> str:
    """Every test of runs runs with both values."""
    return str(request.param)


@pytest.fixture(scope="session")
def settings(
    request: pytest.FixtureRequest, quick: tuple[str, ...], namespace: str, template: str | None, lifetime: str
) -> tuple[str, ...]:
    """Settings of every run of the suite, whose bucket exists."""
    assert "AWS_ENDPOINT_URL" in os.environ, "the suite needs an S3 server: AWS_ENDPOINT_URL and credentials"
    client = boto3.session.Session(region_name=os.environ.get("AWS_DEFAULT_REGION", "us-east-1")).client("s3")
    if "flexfleet-tests" not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket="flexfleet-tests")
    found = [
        *quick,
        "run.backend=kubernetes",
        f"run.remote=s3://flexfleet-tests/{namespace}/{lifetime}",
        "run.patience_s=240",
        f"kubernetes.lifetime={lifetime}",
        f"kubernetes.namespace={namespace}",
        f"kubernetes.image={request.config.getoption('--image')}",
        "kubernetes.deadline_s=600",
    ]
    endpoint = request.config.getoption("--pods-endpoint")
    found += [f"kubernetes.endpoint={endpoint}"] if endpoint else []
    found += [f"kubernetes.template={template}"] if template else []
    return tuple(found)


@pytest.fixture(scope="session")
def cluster(namespace: str) -> Cluster:
    return Cluster(namespace)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Config], Path]:
    """Partition and pool of a configuration."""
    known: dict[str, Path] = {}

    def of(config: Config) -> Path:
        key = config.model_dump_json(include={"dataset", "partition", "model", "seed"})
        if key not in known:
            out = known[key] = tmp_path_factory.mktemp("prepared")
            prepare(Resolved.of(config), out)
        return known[key]

    return of


@pytest.fixture
def expected(settings: tuple[str, ...], prepared: Callable[[Config], Path], tmp_path: Path) -> Model:
    """`expected("a.b=c", ...)`: the model of a run without a cluster."""

    def of(*sets: str) -> bytes:
        own = (s for s in settings if not s.startswith(("run.", "kubernetes.")))
        config = load_config(None, (*own, *sets))
        return model_of(Resolved.of(config), prepared(config), tmp_path / "expected")

    return of


@pytest.fixture
def rounds(settings: tuple[str, ...], prepared: Callable[[Config], Path], tmp_path: Path) -> Callable[..., Path]:
    """`rounds("name", "a.b=c", ..., resume=False)`: the rounds of a run of that name; gives its folder."""

    def run(name: str, *sets: str, resume: bool = False) -> Path:
        config = load_config(None, (*settings, *sets))
        inputs, out = prepared(config), tmp_path / name
        federate(Resolved.of(config), inputs / "partition", inputs / "pool", out, Attempt(resume), run_id=name)
        return out

    return run
