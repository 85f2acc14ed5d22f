"""What a round takes with pods of a round and with pods that stay (`kubernetes.lifetime`), beside the same round in
worker processes and in this process: by the clock, in seconds of the processor, in requests to the object store; how
many pods were made, and the memory of the clients' processes early in the run and at its end. On the tests' cluster: a
fake API server whose kubelet runs the pods' own commands as processes here, over an S3 server in a process of its own.
No scheduler, no network, no image: a real cluster takes longer. Linux alone (/proc).

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
"""An S3 server on the first argument's port that answers so many seconds later as the second says."""
EARLY = 0.1
"""Of the rounds: when the clients' memory is looked at first."""


def contestants(pods: int, clients: int) -> dict[str, tuple[str, ...]]:
    """Settings by name. `pods`: how many there are at a time, and worker processes."""
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
    """A line for each request to the object store."""

    def requests(self) -> int:
        return self.log.read_bytes().count(b" HTTP/1.1")


@contextmanager
def surroundings(folder: Path, delay_s: float) -> Iterator[Surroundings]:
    """A cluster and a bucket `runs`, named by the environment. `delay_s`: how much later each request to it is
    answered."""
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
        boto3.session.Session().client("s3").create_bucket(Bucket="runs")  # tries again until the server is there
        cluster = fake.Cluster(folder / "cluster", slots=threading.Semaphore(1000))
        with fake.serving(cluster) as kubeconfig:
            os.environ["KUBECONFIG"] = str(kubeconfig)
            yield Surroundings(cluster, server, log)
    finally:
        server.terminate()
        server.wait()


def seconds_of(process: int) -> float:
    """Of the processor, that a process has taken; 0 where it is gone."""
    with suppress(OSError):
        told = Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()
        return (int(told[11]) + int(told[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def resident_mb(process: int) -> float:
    with suppress(OSError):
        return int(Path(f"/proc/{process}/statm").read_text("utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return 0.0


def below(process: int) -> set[int]:
    """The processes that a process has started, and theirs."""
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
    """Where a run stands after a round. Sums are since the start."""

    round: int
    here_s: float
    """Of the processor, in this process: the coordinator, and the cluster's API."""
    store_s: float
    clients_s: float
    """In the processes that it has started, ended ones included."""
    requests: int
    largest_mb: float
    """Resident memory of the largest of the clients' processes."""


class Marks(Tracker):
    """A tracker that looks around at every commit."""

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
    """Seconds of each round, and where the run stood after rounds."""
    marks = Marks(around)
    resolved = Resolved.load(None, tuple(sets))
    federate(resolved, folder / "partition", folder / "pool", folder / name, run_id=name, observer=marks)
    rows = Checkpoints(open_store(f"s3://runs/{name}")).rows()
    return [row.metrics["seconds_round"] for row in rows], marks.found


def told(name: str, seconds: Sequence[float], marks: Sequence[Mark], pods: int) -> str:
    """A line of the table. The first round is apart: it waits for processes that start."""
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
    p.add_argument("--clients", type=int, default=3, metavar="N", help="clients of the fleet, all asked in each round")
    p.add_argument("--pods", type=int, metavar="N", help="pods, or worker processes, at a time (default: one a client)")
    p.add_argument("--rounds", type=int, default=12, metavar="N")
    p.add_argument("--delay", type=float, default=0.0, metavar="S", help="how much later the S3 server answers")
    p.add_argument("--only", default="in_process,processes,run,round", metavar="NAME,...")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets", help="for all of them")
    args = p.parse_args(argv)
    chosen = contestants(args.pods or args.clients, args.clients)
    if unknown := set(args.only.split(",")) - chosen.keys():
        p.error(f"no contestant {', '.join(sorted(unknown))}; there are {', '.join(chosen)}")
    if args.rounds < 2:
        p.error("--rounds: at least 2, since the first is told apart")
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
            print(told(each, *measured(around, folder, each, sets), pods_of(around.cluster, each)), flush=True)
    return 0


def pods_of(cluster: Any, run: str) -> int:
    """Pods that were made for the run."""
    made = [job for job in cluster.created if job["kind"] == "Job" and job["metadata"]["name"].startswith(f"{run}-")]
    return sum(job["spec"]["completions"] for job in made)


if __name__ == "__main__":
    raise SystemExit(main())
