"""A cluster and an S3 server on this machine, and a run that is ready for its rounds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import boto3.session
import pytest
import yaml

from fl_engine.remote.kubernetes.jobs import TEMPLATE
from fl_engine.storage.checkpoints import Checkpoints, Row
from fl_engine.storage.s3 import open_store
from fl_engine.training.memory import Peaks
from flexfleet.files.artifacts import PoolFile
from flexfleet.pipeline.federate import federate
from flexfleet.pipeline.model_pool import model_pool
from flexfleet.pipeline.partition import partition
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.pretrain import pretrain
from tests.harness.moto_server import moto
from tests.k8s import fake, kueue
from tests.k8s.pods import Pod, threads_on

MIB = 2**20


@pytest.fixture(scope="session")
def tiny(quick: tuple[str, ...]) -> tuple[str, ...]:
    return (*quick, "rounds.stop=1", "kubernetes.image=flexfleet:latest")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of an S3 server with the bucket `runs`."""
    given = {
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "something",
        "AWS_DEFAULT_REGION": "us-east-1",
        "FLEXFLEET_S3_UNCHECKED": "1",  # moto holds nobody to what is signed
    }
    with moto() as endpoint, pytest.MonkeyPatch.context() as patch:
        for name, value in {"AWS_ENDPOINT_URL": endpoint, **given}.items():
            patch.setenv(name, value)
        boto3.session.Session().client("s3").create_bucket(Bucket="runs")
        yield endpoint


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: Path) -> Iterator[Any]:
    """A fake cluster that KUBECONFIG points to. Its pods are forked from a process that has imported everything."""
    found = fake.Cluster(tmp_path / "cluster", python=str(python))
    with fake.serving(found) as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        yield found


@pytest.fixture
def pods(cluster: Any) -> Iterator[type[Pod]]:
    """The cluster's pods, which are threads."""
    with threads_on(cluster) as here:
        yield here


@pytest.fixture(scope="session")
def prepared(tiny: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Partition and pool of the run."""
    out = tmp_path_factory.mktemp("prepared")
    resolved = Resolved.load(None, tiny)
    partition(resolved, out / "partition")
    pretrain(resolved, out / "partition", out / "pretrain")
    model_pool(resolved, out / "pretrain", out / "pool")
    return out


Rounds = Callable[..., Path]


@pytest.fixture
def rounds(tiny: tuple[str, ...], prepared: Path, tmp_path: Path) -> Rounds:
    """`rounds("name", "a.b=c", ..., resume=False, watcher=None)`: the rounds of a run of that name; gives its
    folder."""

    def run(name: str, *sets: str, resume: bool = False, watcher: Any = None) -> Path:
        resolved = Resolved.load(None, (*tiny, *sets))
        out, (parts, pool) = tmp_path / "runs" / name, (prepared / "partition", prepared / "pool")
        federate(resolved, parts, pool, out, run_id=name, resume=resume, watcher=watcher)
        return out

    return run


@pytest.fixture(scope="session")
def expected(tiny: tuple[str, ...], prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], bytes]:
    """Return the model after so many rounds without a cluster."""

    @cache
    def after(rounds: int) -> bytes:
        out = tmp_path_factory.mktemp("expected")
        resolved = Resolved.load(None, (*tiny, f"rounds.stop={rounds}"))
        federate(resolved, prepared / "partition", prepared / "pool", out)
        return (out / "model.safetensors").read_bytes()

    return after


@pytest.fixture
def remote(s3: str, tmp_path: Path) -> tuple[str, ...]:
    """Settings of a run on the cluster, its ledger under a prefix of its own."""
    return ("run.backend=kubernetes", f"run.remote=s3://runs/{tmp_path.name}-{os.getpid()}")


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_engine.backends.LEASE_S", 3.0)


@pytest.fixture
def in_a_queue(tmp_path: Path) -> str:
    """A setting with a template of Jobs in a queue of Kueue."""
    template = yaml.safe_load(TEMPLATE.read_text())
    template["metadata"]["labels"][kueue.LABEL] = "team"
    path = tmp_path / "queued.yaml"
    path.write_text(yaml.safe_dump(template))
    return f"kubernetes.template={path}"


@pytest.fixture
def peaks(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Peaks:
    """Peaks for a coordinator: 100 MiB for a client, and 40 to 100 MiB more for training a level."""
    from flexfleet.pipeline import federate as step

    levels = PoolFile.read(prepared / "pool" / "pool.json").levels
    found = Peaks(100 * MIB, tuple(140 * MIB + int(60 * MIB * level.share) for level in levels))
    monkeypatch.setattr(step, "peaks_of", lambda *_: found)
    return found


@pytest.fixture(scope="session")
def rows() -> Callable[[tuple[str, ...], str], list[Row]]:
    """`rows(remote, "name")`: what the ledger of a run holds of its rounds."""
    return lambda remote, name: Checkpoints(open_store(f"{remote[1].partition('=')[2]}/{name}")).rows()
