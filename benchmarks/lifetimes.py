"""Compare `kubernetes.lifetime=run` and `kubernetes.lifetime=round` with worker processes and with a single process.

The table has the wall-clock seconds, CPU seconds and store requests per round, and the number of pods. The table also
has the memory of client processes early in the run and at the end.

The cluster is simulated by the fake API server of the tests, which runs the commands of pods as local processes. An S3
server runs in another process. A real cluster is slower because of its scheduler, network and images. Requires Linux.

Usage:
    python -m benchmarks.lifetimes --clients 3 --rounds 12
    python -m benchmarks.lifetimes --clients 50 --pods 2 --rounds 6 --only in_process,run --set training.epochs=20
    python -m benchmarks.lifetimes --clients 50 --pods 2 --rounds 6 --only processes,run --delay 0.02
    python -m benchmarks.lifetimes --clients 3 --pods 1 --rounds 1000 --only run
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3.session

from fl_engine.core.contracts import Tracker
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.s3 import open_store
from flexfleet.pipeline.federate import federate
from flexfleet.pipeline.model_pool import model_pool
from flexfleet.pipeline.partition import partition
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.pretrain import pretrain
from flexfleet.pipeline.resume import Attempt
from tests.harness.processes import QUICK
from tests.k8s import fake

ON_CLUSTER = ("run.backend=kubernetes", "kubernetes.image=flexfleet:latest")
SERVER = """
import sys, time
from moto import server

answer = server.DomainDispatcherApplication.__call__

def later(self, *about):
    time.sleep(float(sys.argv[2]))
    return answer(self, *about)

server.DomainDispatcherApplication.__call__ = later
server.main(["-p", sys.argv[1]])
"""
"""Python code of an S3 server. Its arguments are the port and the delay of each response in seconds."""
EARLY = 0.1
"""Fraction of the rounds after which the memory of clients is reported for the first time."""


def contestants(pods: int, clients: int) -> dict[str, tuple[str, ...]]:
    """Map each contestant to its settings. At most `pods` pods or worker processes run at the same time."""
    packed = f"kubernetes.clients_per_pod={-(-clients // pods)}"
    return {
        "in_process": ("run.strategy=single", "run.devices=[cpu]"),
        "processes": ("run.backend=processes", f"run.devices=[{', '.join(['cpu'] * pods)}]"),
        "run": (*ON_CLUSTER, packed, "kubernetes.lifetime=run"),
        "round": (*ON_CLUSTER, packed, "kubernetes.lifetime=round"),
    }


@dataclass
class Surroundings:
    cluster: fake.Cluster
    server: subprocess.Popen[bytes]
    log: Path
    """Log of the object store, with a line for each request."""

    def requests(self) -> int:
        return self.log.read_bytes().count(b" HTTP/1.1")


@contextmanager
def surroundings(folder: Path, delay_s: float) -> Iterator[Surroundings]:
    """Start a cluster and an object store with a bucket `runs`, and set the environment variables for both.

    Args:
        folder: Folder for the store's log and the cluster's files.
        delay_s: Delay of each response of the store in seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "FLEXFLEET_S3_UNCHECKED": "1", **keys}
    log = folder / "store.log"
    with log.open("wb") as out:
        command = [sys.executable, "-c", SERVER, str(port), str(delay_s)]
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        boto3.session.Session().client("s3").create_bucket(Bucket="runs")  # boto3 retries until the server has started
        cluster = fake.Cluster(folder / "cluster", slots=threading.Semaphore(1000))
        with fake.serving(cluster) as kubeconfig:
            os.environ["KUBECONFIG"] = str(kubeconfig)
            yield Surroundings(cluster, server, log)
    finally:
        server.terminate()
        server.wait()


def seconds_of(process: int) -> float:
    """Return the CPU seconds that a process has used; 0 if it has ended."""
    with suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def resident_mb(process: int) -> float:
    with suppress(OSError):
        return int(Path(f"/proc/{process}/statm").read_text("utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return 0.0


def below(process: int) -> set[int]:
    """Return the descendants of a process."""
    parents: dict[int, list[int]] = {}
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((each / "stat").read_text("utf-8").rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(each.name))
    found, new = set[int](), parents.get(process, [])
    while new:
        found |= {*new}
        new = [child for one in new for child in parents.get(one, [])]
    return found


@dataclass
class Mark:
    """Resources that a run used between its start and the end of a round."""

    round: int
    here_s: float
    """CPU seconds of this process, which runs the coordinator and the cluster's API."""
    store_s: float
    clients_s: float
    """CPU seconds of all client processes, including ended processes."""
    requests: int
    largest_mb: float


class Marks(Tracker):
    """Tracker that records the resource usage at every commit."""

    def __init__(self, around: Surroundings) -> None:
        self._around, self.found = around, list[Mark]()
        self._others = below(os.getpid())

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        if not rows:
            return
        store = self._around.server.pid
        clients = below(os.getpid()) - self._others
        ended = os.times()
        spent = ended.children_user + ended.children_system + sum(map(seconds_of, clients))
        largest = max(map(resident_mb, clients), default=0.0)
        where = time.process_time(), seconds_of(store), spent, self._around.requests()
        self.found.append(Mark(rows[-1][0], *where, largest))


def measured(around: Surroundings, folder: Path, name: str, sets: Sequence[str]) -> tuple[list[float], list[Mark]]:
    """Run a contestant. Return the seconds of each round, and a `Mark` for each commit."""
    marks = Marks(around)
    resolved = Resolved.load(None, tuple(sets))
    federate(resolved, folder / "partition", folder / "pool", folder / name, Attempt(observer=marks), run_id=name)
    rows = Checkpoints(open_store(f"s3://runs/{name}")).rows()
    return [row.metrics["seconds_round"] for row in rows], marks.found


def table_row(name: str, seconds: Sequence[float], marks: Sequence[Mark], pods: int) -> str:
    """Format a row of the table. The first round has a separate column, because it includes the start of processes."""
    _, *rest = seconds
    line = f"{name:12}{seconds[0]:9.2f}{statistics.median(rest):9.2f}{min(rest):9.2f}{max(rest):9.2f}"
    first, last = marks[0], marks[-1]
    if rounds := last.round - first.round:
        spent = last.here_s - first.here_s, last.clients_s - first.clients_s, last.store_s - first.store_s
        line += "".join(f"{each / rounds:9.2f}" for each in spent)
        line += f"{(last.requests - first.requests) / rounds:10.0f}"
        early = next(mark for mark in marks if mark.round >= EARLY * last.round)
        line += f"{pods:7}"
        if last.largest_mb:
            line += f"   {early.largest_mb:.0f} MB in round {early.round}, {last.largest_mb:.0f} in {last.round}"
    return line


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--clients", type=int, default=3, metavar="N", help="clients of the fleet, which all train in each round"
    )
    p.add_argument("--pods", type=int, metavar="N", help="pods or worker processes at a time (default: one per client)")
    p.add_argument("--rounds", type=int, default=12, metavar="N")
    p.add_argument(
        "--delay", type=float, default=0.0, metavar="S", help="delay of the S3 server's responses in seconds"
    )
    p.add_argument("--only", default="in_process,processes,run,round", metavar="NAME,...")
    p.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="sets", help="a setting for all contestants"
    )
    args = p.parse_args(argv)
    chosen = contestants(args.pods or args.clients, args.clients)
    if unknown := set(args.only.split(",")) - chosen.keys():
        p.error(f"--only must contain only names from {', '.join(chosen)}, got {', '.join(sorted(unknown))}")
    if args.rounds < 2:
        p.error("--rounds must be at least 2, because the first round is reported separately")
    tiers = "fleet.tiers=[{name: one, share: 1.0, memory: 100.0, sigma: [0.0]}]"
    samples = f"dataset.train_samples={max(240, 24 * args.clients)}"
    asked = (f"partition.clients={args.clients}", "training.fraction=1.0", f"rounds.stop={args.rounds}")
    common = (*QUICK, "rounds.commit_every=1", samples, tiers, *asked, *args.sets)
    with tempfile.TemporaryDirectory() as name, surroundings(Path(name), args.delay) as around:
        folder = Path(name)
        resolved = Resolved.load(None, common)
        partition(resolved, folder / "partition")
        pretrain(resolved, folder / "partition", folder / "pretrain")
        model_pool(resolved, folder / "pretrain", folder / "pool")
        print(
            f"{'':12}{'seconds of a round':>36}{'of the processor, a round':>27}{'requests':>10}{'pods':>7}   clients'"
        )
        head = ("first", "median", "fastest", "slowest", "here", "clients", "store")
        print(f"{'':12}{''.join(f'{each:>9}' for each in head)}{'a round':>10}{'made':>7}   memory", flush=True)
        for each in args.only.split(","):
            sets = (*common, "run.remote=s3://runs", *chosen[each])
            print(table_row(each, *measured(around, folder, each, sets), pods_of(around.cluster, each)), flush=True)
    return 0


def pods_of(cluster: Any, run: str) -> int:
    made = [job for job in cluster.created if job["kind"] == "Job" and job["metadata"]["name"].startswith(f"{run}-")]
    return sum(job["spec"]["completions"] for job in made)


if __name__ == "__main__":
    raise SystemExit(main())
