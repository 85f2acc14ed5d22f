"""A cluster and an S3 server on this machine, and a run that is ready for its rounds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_engine.remote.kubernetes.jobs import TEMPLATE
from fl_engine.training.memory import Peaks
from flexfleet.files.artifacts import PoolFile
from flexfleet.pipeline.federate import federate
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.resume import Attempt
from tests.harness.moto_server import opened
from tests.harness.prepared import model_of, prepare
from tests.k8s import fake, kueue
from tests.k8s.pods import Runs, threads_on

MIB = 2**20


@pytest.fixture(scope="session")
def tiny(quick: tuple[str, ...]) -> tuple[str, ...]:
    return (*quick, "rounds.stop=1", "kubernetes.image=flexfleet:latest")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of an S3 server with the bucket `runs`."""
    with pytest.MonkeyPatch.context() as patch, opened(patch, "runs") as endpoint:
        yield endpoint


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: Path) -> Iterator[Any]:
    """A fake cluster that KUBECONFIG points to. Its pods are forked from a process that has imported everything."""
    found = fake.Cluster(tmp_path / "cluster", python=str(python))
    with fake.serving(found) as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        yield found


@pytest.fixture(scope="session")
def prepared(tiny: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Partition and pool of the run."""
    return prepare(Resolved.load(None, tiny), tmp_path_factory.mktemp("prepared"))


@pytest.fixture(scope="session")
def expected(tiny: tuple[str, ...], prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], bytes]:
    """Return the model after so many rounds without a cluster."""

    @cache
    def after(rounds: int) -> bytes:
        resolved = Resolved.load(None, (*tiny, f"rounds.stop={rounds}"))
        return model_of(resolved, prepared, tmp_path_factory.mktemp("expected"))

    return after


@pytest.fixture
def in_processes(
    cluster: Any, s3: str, tiny: tuple[str, ...], prepared: Path, tmp_path: Path, expected: Callable[[int], bytes]
) -> Runs:
    """Runs whose pods are processes."""

    def alone(name: str, *sets: str, resume: bool = False, watcher: Any = None) -> Path:
        resolved = Resolved.load(None, (*tiny, *sets))
        out, (parts, pool) = tmp_path / "runs" / name, (prepared / "partition", prepared / "pool")
        federate(resolved, parts, pool, out, Attempt(resume, watcher=watcher), run_id=name)
        return out

    return Runs(cluster, f"s3://runs/{tmp_path.name}-{os.getpid()}", alone, expected)


@pytest.fixture
def runs(in_processes: Runs) -> Iterator[Runs]:
    """Runs whose pods are threads."""
    with threads_on(in_processes.cluster) as in_processes.pods:
        yield in_processes


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_engine.remote.provisioner.Provisioner.lease_s", 3.0)


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
