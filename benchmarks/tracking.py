"""How long MLflow takes as a run gets longer and a round has more clients: a file of SQLite, and MLflow's own server
with such a file. `benchmarks.growth --mlflow` prints it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import requests

from flexfleet.tracking.trackers import MLflow

COMMIT = 100
"""Rounds that are told at a time: a run commits every two seconds, and the shortest rounds take some 20 ms."""
START_S = 120.0


def of_rounds(uri: str, metrics: Mapping[str, float], counts: Sequence[int]) -> Iterator[dict[str, float]]:
    """A run that gets longer. For each of `counts`: `round_ms`, what telling a round took since the count before, and
    `resume_s`, what it takes to open the run again with all its rounds told."""
    names = {"flexfleet.token": "growth"}
    tracker, told = MLflow(uri, "growth", "rounds", names), 0
    for count in counts:
        started = time.perf_counter()
        for first in range(told, count, COMMIT):
            tracker.metrics([(step + 1, metrics) for step in range(first, min(first + COMMIT, count))])
        seconds = time.perf_counter() - started
        started = time.perf_counter()
        MLflow(uri, "growth", "rounds", names, tracker.run_id).metrics([(step + 1, metrics) for step in range(count)])
        resume = time.perf_counter() - started
        yield {"rounds": count, "round_ms": 1000 * seconds / (count - told), "resume_s": resume}
        told = count


def of_clients(uri: str, line: Mapping[str, Any], lines: Sequence[int]) -> Iterator[dict[str, float]]:
    """The table of the clients' lines, one for each order of each round, which a run tells at its end."""
    tracker = MLflow(uri, "growth", "clients", {})
    for count in lines:
        started = time.perf_counter()
        tracker.table(["round", *line], ({"round": 1, **line} for _ in range(count)), "clients.json")
        yield {"lines": count, "table_s": time.perf_counter() - started}


@contextmanager
def places() -> Iterator[dict[str, str]]:
    """The addresses of a file of SQLite and of a server, by what they are called. The server is MLflow's own, with one
    process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
        argv += ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", f"{folder}/files"]
        with open(Path(folder) / "log", "wb") as log:
            server = subprocess.Popen(argv, cwd=folder, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait_for(server, f"http://127.0.0.1:{port}/health", Path(folder) / "log")
            yield {"sqlite": f"sqlite:///{folder}/mlflow.db", "server": f"http://127.0.0.1:{port}"}
        finally:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(server.pid, signal.SIGTERM)  # it has processes of its own
            server.wait()


def _wait_for(server: subprocess.Popen[bytes], health: str, log: Path) -> None:
    end = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < end:
        with suppress(requests.RequestException):
            if requests.get(health, timeout=5).ok:
                return
        time.sleep(0.5)
    raise SystemExit(f"mlflow server does not answer: {log.read_text('utf-8', 'replace')[-2000:]}")
