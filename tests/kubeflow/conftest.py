"""Tests on a real Kubeflow Pipelines, 2.16 or newer. They need

KF_PIPELINES_ENDPOINT    its UI's address, which also gives out artifacts:
                         kubectl -n kubeflow port-forward svc/ml-pipeline-ui 8080:80, http://localhost:8080
KUBECONFIG               its cluster, with permission to list, get and delete pods of the tasks' namespace, to run
                         commands in them (pods/exec), and to read its ConfigMaps
FLEXFLEET_IMAGE          the image of every task, built from this code; the nodes can pull it
FLEXFLEET_KF_STORE       store_uri of all runs, as tasks have it: s3://bucket/prefix. The Secret `flexfleet-s3` of the
                         tasks' namespace has its address and keys

and may have

FLEXFLEET_KF_MLFLOW      mlflow_uri, as tasks have it: an MLflow of the tests' own, because a test changes figures in it
                         for a while. Without it that test is skipped
MLFLOW_TRACKING_URI      the same MLflow, as it is reached from here (default: FLEXFLEET_KF_MLFLOW)
FLEXFLEET_KF_NAMESPACE   the tasks' namespace (default: kubeflow)
AWS_ENDPOINT_URL         and credentials of the store: processes are then killed between rounds, not when they start

    KF_PIPELINES_ENDPOINT=http://localhost:8080 KUBECONFIG=... FLEXFLEET_IMAGE=registry/flexfleet:1 \\
        FLEXFLEET_KF_STORE=s3://flexfleet/tests .venv/bin/python -m pytest tests/kubeflow -s

Models are compared with those of one process here, so the nodes must have this machine's kind of CPU and torch build.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest

from fl_engine.remote.kubernetes.cluster import Cluster
from tests.kubeflow.steps import Place

NEEDED = ("KF_PIPELINES_ENDPOINT", "KUBECONFIG", "FLEXFLEET_IMAGE", "FLEXFLEET_KF_STORE")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in NEEDED if not os.environ.get(name)]
    for item in items:
        if item.path == Path(__file__).with_name("test_kubeflow.py") and missing:
            reason = f"no Kubeflow: set {', '.join(missing)} (see tests/kubeflow/conftest.py)"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def place() -> Place:
    namespace = os.environ.get("FLEXFLEET_KF_NAMESPACE", "kubeflow")
    host, store = os.environ["KF_PIPELINES_ENDPOINT"], os.environ["FLEXFLEET_KF_STORE"]
    mlflow = os.environ.get("FLEXFLEET_KF_MLFLOW", "")
    return Place(host, Cluster(namespace), store, mlflow, f"suite-{uuid.uuid4().hex[:6]}")
