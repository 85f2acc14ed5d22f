"""The image, really run: the training graph, worker processes, clients' pods. `make image e2e-containers`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flexfleet.config.form import config_from
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.run import run
from tests.k8s.pods import Runs, model

IMAGE = os.environ.get("FLEXFLEET_TEST_IMAGE", "")

pytestmark = pytest.mark.skipif(not IMAGE, reason="no image: `make image`, then `make e2e-containers`")

PARAMETERS: dict[str, Any] = {"rounds": 2, "clients": 6, "client_fraction": 0.5, "local_epochs": 1, "seed": 5}
ADVANCED = {"pretrain.epochs": 3, "training.batch_size": 20, "partition.minimum": 10}

GRAPH = """
import json, sys
from kfp import local
from pipelines.train import train

root, user, given = sys.argv[1:]
runner = local.DockerRunner(user=user, network_mode="host", read_only=True, tmpfs={"/tmp": ""})
local.init(runner=runner, pipeline_root=root)
train(**json.loads(given))
"""


def docker(*argv: str) -> str:
    done = subprocess.run(["docker", "run", "--rm", *argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the same settings give in this process."""
    given = PARAMETERS | {"mlflow_uri": "", "store_uri": str(tmp_path_factory.mktemp("plain"))}
    return run(Resolved.of(config_from(given, ADVANCED)), "same")


def test_image_runs_as_nobody_and_has_all_packages() -> None:
    said = docker("--read-only", "--tmpfs=/tmp", IMAGE, "sh", "-c", "id -u; flexfleet doctor --json")
    user, _, told = said.partition("\n")
    assert user == "10001"
    extras = json.loads(told)["extras"]
    assert extras["engine"]["missing"] == extras["tracking"]["missing"] == []


def test_the_graph_in_containers_gives_what_one_process_gives(plain: Any, tmp_path: Path) -> None:
    given = PARAMETERS | {"run_id": "same", "store_uri": str(tmp_path / "store"), "advanced": ADVANCED}
    # kfp mounts the pipeline's root alone, and containers write there as whoever runs this.
    argv = [str(tmp_path), f"{os.getuid()}:{os.getgid()}", json.dumps(given)]
    done = subprocess.run(
        [sys.executable, "-c", GRAPH, *argv],
        env=os.environ | {"FLEXFLEET_IMAGE": IMAGE}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    (found,) = tmp_path.glob("train-*/report/finished/result.json")
    result = json.loads(found.read_text())
    assert result["model_sha256"] == plain.model_sha256
    assert result["metrics"] == json.loads(plain.model_dump_json())["metrics"]


def test_worker_processes_in_the_image_give_it_too(plain: Any) -> None:
    config = {
        "rounds.stop": 2, "partition.clients": 6, "training.fraction": 0.5, "training.epochs": 1, "seed": 5,
        "tracking.mlflow": "null", "run.backend": "processes", "run.devices": "[cpu, cpu]", **ADVANCED,
    }  # fmt: skip
    sets = [word for key, value in config.items() for word in ("--set", f"{key}={value}")]
    said = docker("--read-only", "--tmpfs=/tmp", IMAGE, "flexfleet", "run", "--json", "--run-id", "a", *sets)
    assert json.loads(said)["model_sha256"] == plain.model_sha256


def test_pod_of_the_image_sees_its_memory_limit(in_processes: Runs) -> None:
    """The client's command, as user 10001, without capabilities, in a real cgroup."""
    runs = in_processes
    runs.cluster.image = IMAGE
    out = runs.start("image", "kubernetes.clients_per_pod=3")
    assert model(out) == runs.expected(1), "\n".join(runs.cluster.logs)
    pools = "{weak: {memory: 600Mi}, medium: {memory: 600Mi}, strong: {memory: 600Mi}}"
    settings = ("kubernetes.observe=cgroup", f"kubernetes.pools={pools}", "kubernetes.clients_per_pod=3")
    runs.start("limited", *settings)
    (row,) = runs.rows("limited")
    assert row.metrics["clients_trained"] == 3, "\n".join(runs.cluster.logs)
    assert all(line["free"] > 100 for line in row.clients)
