"""Digests of what a matrix of short runs computes: record them before a refactoring, compare after it.

    python -m tests.harness.same_bits --record       writes same_bits.json beside this file
    python -m tests.harness.same_bits                compares; exit code 1 if a run computes something else

Each run has a digest of its model, and one of its history without measured seconds and memory.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_suffix(".json")
ALGORITHMS = (
    "adaptivefl", "all_large", "decoupled", "depthfl", "federated_dropout", "fedopt", "fedprox", "fedrolex", "fjord",
    "flexfl", "heterofl", "scalefl",
)  # fmt: skip
BASE = (
    "dataset.train_samples=600", "dataset.test_samples=100", "partition.clients=8", "partition.minimum=10",
    "partition.proxy=0.1", "pretrain.epochs=2", "training.epochs=1", "training.fraction=0.5", "model.width=0.5",
    "rounds.stop=4", "tracking.mlflow=null",
)  # fmt: skip
NETWORKS = ("mobilenetv2", "preresnet18", "resnet18", "resnet34", "small_cnn", "vgg16")


def cases() -> dict[str, tuple[str, ...]]:
    """Settings of each case, added to BASE, by its name."""
    found: dict[str, tuple[str, ...]] = {}
    for name in ALGORITHMS:
        for backend in ("in_process", "processes"):
            found[f"{name} {backend}"] = (f"algorithm.name={name}", f"run.backend={backend}", *_epsilon(name))
    for name in ("flexfl", "adaptivefl"):
        found[f"{name} kubernetes"] = (f"algorithm.name={name}", *_epsilon(name), *_pods())
    for server in ("average", "adagrad", "adam", "yogi"):
        found[f"server {server}"] = ("algorithm.name=heterofl", f"algorithm.server.name={server}")
    for how in ("mean", "median", "trimmed_mean"):
        found[f"aggregation {how}"] = (
            "algorithm.name=heterofl", f"algorithm.aggregation.name={how}", "training.fraction=1.0",
        )  # fmt: skip
    for name in ("uniform", "resource_table", "curiosity"):
        found[f"selection {name}"] = ("algorithm.name=flexfl", f"algorithm.selection.name={name}", *_epsilon("flexfl"))
    found["bf16"] = ("algorithm.name=flexfl", "run.precision=bf16", *_epsilon("flexfl"))
    for network in NETWORKS:
        narrow = () if network == "mobilenetv2" else ("model.width=0.25",)
        found[f"network {network}"] = (
            "algorithm.name=heterofl", f"model.name={network}", *narrow, "rounds.stop=2", "dataset.train_samples=300",
            "partition.clients=4",
        )  # fmt: skip
    found["faults, deadline, over-provisioning"] = (
        "algorithm.name=flexfl", *_epsilon("flexfl"), "rounds.faults=drop=0.2,slow=0.2x5,nan=0.1",
        "rounds.over_provision=1.5", "rounds.deadline_s=0.2", "rounds.quorum=0.25", "rounds.stop=6",
    )  # fmt: skip
    return found


def _epsilon(name: str) -> tuple[str, ...]:
    return ("algorithm.epsilon=5.0",) if name == "flexfl" else ()


def _pods() -> tuple[str, ...]:
    return (
        "run.backend=kubernetes", "run.remote=s3://runs/all", "kubernetes.poll_s=0.1",
        "kubernetes.image=flexfleet:latest",
    )  # fmt: skip


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    p.add_argument("--record", action="store_true")
    p.add_argument("--only", default="", help="run only cases whose name contains this")
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        wanted = {name: sets for name, sets in cases().items() if args.only in name}
        env = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
        if any("kubernetes" in name for name in wanted):
            env |= stack.enter_context(_cluster(Path(scratch)))
        with ThreadPoolExecutor(2) as pool:
            jobs = {name: pool.submit(_run, sets, Path(scratch), env) for name, sets in wanted.items()}
            found = {name: job.result() for name, job in jobs.items() if print(name, *job.result().values()) is None}
    if args.record:
        before = json.loads(RECORD.read_text()) if RECORD.exists() and args.only else {}
        RECORD.write_text(json.dumps(before | found, indent=1) + "\n")
        return 0
    known = json.loads(RECORD.read_text())
    others = [name for name in found if found[name] != known.get(name)]
    for name in others:
        print(f"DIFFERENT: {name}: {known.get(name)} before, {found[name]} now")
    print(f"{len(found) - len(others)} of {len(found)} are the same")
    return 1 if others else 0


def _run(sets: tuple[str, ...], scratch: Path, env: dict[str, str]) -> dict[str, str]:
    """Makes a run on the command line; returns its digests."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    words = [Path(sys.executable).with_name("flexfleet"), "run", "--run-id", folder.name, "--json"]
    for pair in (*BASE, *sets):
        words += ["--set", pair]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:300]}
    history = json.loads((folder / "runs" / folder.name / "history.json").read_text())
    told = {"model": history["model_sha256"][:16], "history": _digest(_computed(history["rounds"]))}
    shutil.rmtree(folder)
    return told


def _computed(value: Any) -> Any:
    if isinstance(value, dict):
        measured = ("seconds", "peak_mb")
        return {k: _computed(v) for k, v in value.items() if k == "seconds_simulated" or not k.startswith(measured)}
    return [_computed(each) for each in value] if isinstance(value, list) else value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def _cluster(scratch: Path) -> Iterator[dict[str, str]]:
    """Starts the tests' cluster and an S3 server; yields the environment variables that name them."""
    import logging

    import boto3.session
    from moto.server import ThreadedMotoServer

    path = Path(__file__).parents[1] / "k8s" / "fake.py"
    spec = importlib.util.spec_from_file_location("same_bits_cluster", path)
    assert spec is not None and spec.loader is not None
    fake = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = fake
    spec.loader.exec_module(fake)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    given = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1", "FLEXFLEET_S3_UNCHECKED": "1",
    }  # fmt: skip
    os.environ.update(given)
    boto3.session.Session().client("s3").create_bucket(Bucket="runs")
    with fake.serving(fake.Cluster(scratch / "cluster")) as kubeconfig:
        yield {**given, "KUBECONFIG": str(kubeconfig)}
    server.stop()


if __name__ == "__main__":
    sys.exit(main())
