"""The surroundings of runs: S3 servers, a cluster, and for each run a folder with its own database."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3.session

from flexfleet.pipeline.prepare import Resolved
from tests.harness import invited
from tests.harness.invited import Devices
from tests.harness.prepared import prepare
from tests.harness.processes import QUICK, ROOT, Child, ForkServer
from tests.harness.way import Way
from tests.k8s import fake

RADOSGW = ROOT / "tests" / "s3" / "radosgw"
BUCKET = "runs"
SMALL = {
    "fl_engine.storage.checkpoints.PACKED": 1,
    "fl_engine.remote.provisioner.Provisioner.lease_s": 4.0,
    "fl_engine.remote.kubernetes.provisioner.POLL_S": 0.2,
}
"""With these constants, even a quick run packs its measurements, and leases end within seconds."""
ON_CLUSTER = ("run.backend=kubernetes", "kubernetes.image=flexfleet:latest", "kubernetes.attempts=100")
ROUND = ("kubernetes.lifetime=round",)
STAYING = ("kubernetes.lifetime=run", "kubernetes.clients_per_pod=3")
"""Clients of one class share a pod."""
WORKERS = ("run.backend=processes", "run.devices=[cpu, cpu]")


PODS = 8
"""The most pods at a time."""


@dataclass(frozen=True)
class Variant:
    """A configuration whose runs are killed. `clients`: what runs clients: "" (the coordinator), worker, pod, staying
    (a pod that stays), or device (an agent that was invited)."""

    name: str
    store: str
    clients: str
    sets: tuple[str, ...]
    whole: bool = False
    """True: all steps, by `flexfleet run`; False: only the rounds."""


def _on(store: str) -> tuple[Variant, ...]:
    return (
        Variant(f"{store}-in_process", store, "", ("rounds.keep_updates=true",)),
        Variant(f"{store}-processes", store, "worker", WORKERS),
        Variant(f"{store}-kubernetes", store, "pod", (*ON_CLUSTER, *ROUND)),
        Variant(f"{store}-staying", store, "staying", (*ON_CLUSTER, *STAYING)),
        Variant(f"{store}-agents", store, "device", invited.SETTINGS),
    )


VARIANTS = (
    Variant("folder-in_process", "folder", "", ("rounds.commit_every=1",)),
    Variant("folder-sparse", "folder", "", ("rounds.commit_every=3", "run.devices=[cpu, cpu]")),
    Variant("folder-processes", "folder", "worker", WORKERS),
    Variant("folder-whole", "folder", "", ("rounds.keep_updates=true",), whole=True),
    *_on("moto"),
    *_on("radosgw"),
)


@dataclass
class World:
    folder: Path
    fork_server: ForkServer
    rounds: int
    servers: ExitStack = field(default_factory=ExitStack)
    _known: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def sets(self) -> tuple[str, ...]:
        return (*QUICK, f"rounds.stop={self.rounds}", "run.patience_s=30")

    def environment(self, store: str) -> dict[str, str]:
        """The variables that tell boto3 where the server is. The first call starts the server."""
        if store not in self._known:
            self._known[store] = self.servers.enter_context(START[store](self.folder / store))
            if store != "folder":
                s3_of(self._known[store]).create_bucket(Bucket=BUCKET)
        return self._known[store]

    @cached_property
    def cluster(self) -> fake.Cluster:
        """The cluster, whose kubelet forks clients from the fork server."""

        def start(command: list[str], env: dict[str, str], log: Path) -> Child:
            assert command[1:3] == ["-m", "flexfleet.worker"], command
            return self.fork_server.start("worker", *command[3:], cwd=ROOT, env=env, log=log)

        return fake.Cluster(self.folder / "cluster", start=start, slots=threading.Semaphore(PODS))

    @cached_property
    def kubeconfig(self) -> Path:
        return self.servers.enter_context(fake.serving(self.cluster))

    @cached_property
    def prepared(self) -> Path:
        """The folder with the partition and the pool of all runs."""
        return prepare(Resolved.load(None, self.sets), self.folder / "prepared")

    @cached_property
    def data_base(self) -> Path:
        """MLflow's database without runs. Each run gets a copy, because MLflow takes seconds to create its tables."""
        import mlflow

        mlflow.MlflowClient(f"sqlite:///{self.folder / 'empty.db'}").search_experiments()
        return self.folder / "empty.db"


@dataclass
class Place:
    """The folder of one run, and the command that starts and resumes it."""

    world: World
    variant: Variant
    folder: Path
    token: str
    """Marks all processes of the run, in their environment, but for its devices, which may outlive it."""
    starts: int = 0
    devices: Devices | None = None
    """Invited and started with the first start."""
    coordinator: Child | None = None
    """The last one."""

    @property
    def out(self) -> Path:
        return self.folder / "runs" / "a"

    @property
    def prefix(self) -> str:
        """Prefix of the run's keys in the bucket."""
        return f"{self.folder.name}/"

    @cached_property
    def s3(self) -> Any:
        """A boto3 client of the server that has the run's ledger; None if the ledger is in the folder."""
        return s3_of(self.world.environment(self.variant.store)) if self.variant.store != "folder" else None

    @cached_property
    def way(self) -> Way | None:
        """By which coordinators, pods that stay and devices reach the server; None if the ledger is in the folder."""
        if self.variant.store == "folder":
            return None
        server = urlsplit(self.world.environment(self.variant.store)["AWS_ENDPOINT_URL"])
        assert server.hostname and server.port
        return Way((server.hostname, server.port), self._on_the_way)

    def _on_the_way(self) -> list[int]:
        """The processes that may be cut off."""
        found = [] if self.coordinator is None else [self.coordinator]
        if self.devices is not None:
            found += list(self.devices.running.values())
        if self.variant.clients == "staying":
            found += list(self.world.cluster.running.values())
        return [child.pid for child in found]

    def start(self, faults: Mapping[str, Any] | None = None) -> Child:
        v, world = self.variant, self.world
        env = {"FLEXFLEET_COMMIT": "0" * 40, "FLEXFLEET_STARTED_BY": self.token, **world.environment(v.store)}
        sets = [*world.sets, *v.sets, f"tracking.mlflow=sqlite:///{self.folder / 'mlflow.db'}"]
        if self.way is not None:
            env["AWS_ENDPOINT_URL"] = self.way.url
            sets.append(f"run.remote=s3://{BUCKET}/{self.prefix.rstrip('/')}")
            if v.clients == "device":
                self.devices = self.devices or Devices(world.fork_server, self.folder, sets, env, self.way)
        if v.clients in ("pod", "staying"):
            env["KUBECONFIG"] = str(world.kubeconfig)
        if v.whole:
            argv = ["flexfleet", "run", "--json", "--run-id", "a"]
        else:
            made = world.prepared
            argv = ["federate", "--partition", str(made / "partition"), "--pool", str(made / "pool")]
            argv += ["--out", str(self.out)]
        self.starts += 1
        given = {"constants": SMALL, **(faults or {})}
        log = self.folder / "logs" / f"{self.starts}.err"
        self.coordinator = world.fork_server.start(
            *argv, "--resume", cwd=self.folder, sets=sets, env=env, log=log, faults=given
        )
        return self.coordinator

    def read_mailbox(self, key: str) -> bytes:
        """Return the value of a key in the devices' mailboxes."""
        found = self.s3.get_object(Bucket=BUCKET, Key=f"{self.prefix}.agents/{key}")["Body"].read()
        assert isinstance(found, bytes)
        return found

    def close(self) -> None:
        """Ends its devices, and closes the way."""
        if self.devices is not None:
            self.devices.end()
        if self.way is not None:
            self.way.close()

    def remove(self) -> None:
        self.close()
        shutil.rmtree(self.folder)


def place(world: World, variant: Variant) -> Place:
    token = uuid.uuid4().hex
    folder = world.folder.parent / f"{variant.name}-{token[:8]}"
    (folder / "logs").mkdir(parents=True)
    shutil.copy(world.data_base, folder / "mlflow.db")
    return Place(world, variant, folder, token)


@contextmanager
def opened(rounds: int) -> Iterator[World]:
    """A world in a temporary folder. The folders of runs stay unless they are removed."""
    folder = Path(tempfile.mkdtemp(prefix="flexfleet-kills-"))
    own = folder / "world"
    own.mkdir()
    world = World(own, ForkServer(own), rounds)
    try:
        with world.servers:
            yield world
    finally:
        world.fork_server.close()
        shutil.rmtree(own)
        with suppress(OSError):
            folder.rmdir()


# ------------------------------------------------------------------------------------------------ S3 servers
def s3_of(environment: Mapping[str, str]) -> Any:
    """A boto3 client of the server that these variables name."""
    keys = environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"]
    session = boto3.session.Session(*keys, region_name="us-east-1")
    return session.client("s3", endpoint_url=environment["AWS_ENDPOINT_URL"])


def missing(store: str) -> str | None:
    """Why this machine cannot serve such a store; None: it can."""
    if store == "radosgw" and shutil.which("radosgw") is None:
        return "radosgw is not installed (tests/s3/radosgw says how to install it)"
    return None


@contextmanager
def _moto(_: Path) -> Iterator[dict[str, str]]:
    import moto.s3.models

    from tests.harness import moto_server

    smallest, moto.s3.models.S3_UPLOAD_PART_MIN_SIZE = moto.s3.models.S3_UPLOAD_PART_MIN_SIZE, 1
    try:
        keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
        with moto_server.moto() as endpoint:
            logging.getLogger("werkzeug").setLevel(logging.CRITICAL)  # requests that are cut off make it complain
            # moto does not check signatures.
            yield {"AWS_ENDPOINT_URL": endpoint, **keys, "FLEXFLEET_S3_UNCHECKED": "1"}
    finally:
        moto.s3.models.S3_UPLOAD_PART_MIN_SIZE = smallest


def two_free_ports(first: int) -> int:
    """A port at which nobody listens, nor at the one after it; not the same as of another process that asks now."""
    begin = first + os.getpid() % 400 * 2
    for port in range(begin, begin + 800, 2):
        with (
            suppress(OSError),
            socket.create_server(("127.0.0.1", port)),
            socket.create_server(("127.0.0.1", port + 1)),
        ):
            return port
    raise AssertionError(f"no two free ports from {begin} on")


@contextmanager
def _radosgw(folder: Path) -> Iterator[dict[str, str]]:
    port = two_free_ports(8000)
    try:
        started = subprocess.run([RADOSGW, "start", folder, str(port)], capture_output=True, text=True)
        assert started.returncode == 0, f"radosgw does not start: {started.stderr}"
        yield dict(pair.split("=", 1) for pair in started.stdout.removeprefix("export ").split())
    finally:
        subprocess.run([RADOSGW, "stop", folder], check=True)


@contextmanager
def _nowhere(_: Path) -> Iterator[dict[str, str]]:
    yield {}


START = {"folder": _nowhere, "moto": _moto, "radosgw": _radosgw}
"""By kind of store: serves it in a folder, and yields the environment variables that lead to it."""
