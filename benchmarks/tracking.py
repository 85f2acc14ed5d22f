"""Measure how MLflow's time grows with the number of rounds and with the number of clients per round.

The script measures MLflow with an SQLite file, and an MLflow server that uses an SQLite file. `benchmarks.growth
--mlflow` prints the results.
"""

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
"""Number of rounds that are logged together. A run logs every two seconds, which is the time of 100 rounds of 20 ms."""
START_S = 120.0


def of_rounds(uri: str, metrics: Mapping[str, float], counts: Sequence[int]) -> Iterator[dict[str, float]]:
    """Measure how the time grows with the number of rounds.

    For each number of rounds in `counts`, yield two durations: `round_ms` (milliseconds) is the time to log a round.
    `resume_s` (seconds) is the time to resume the run and log all rounds again.
    """
    names = {"flexfleet.token": "growth"}
    tracker, logged = MLflow(uri, "growth", "rounds", names), 0
    for count in counts:
        started = time.perf_counter()
        for first in range(logged, count, COMMIT):
            tracker.metrics([(step + 1, metrics) for step in range(first, min(first + COMMIT, count))])
        seconds = time.perf_counter() - started
        started = time.perf_counter()
        MLflow(uri, "growth", "rounds", names, tracker.run_id).metrics([(step + 1, metrics) for step in range(count)])
        resume = time.perf_counter() - started
        yield {"rounds": count, "round_ms": 1000 * seconds / (count - logged), "resume_s": resume}
        logged = count


def of_clients(uri: str, line: Mapping[str, Any], lines: Sequence[int]) -> Iterator[dict[str, float]]:
    """Measure the table of clients, which is logged at the end of a run. The table has a line for each assignment of
    each round."""
    tracker = MLflow(uri, "growth", "clients", {})
    for count in lines:
        started = time.perf_counter()
        tracker.table(["round", *line], ({"round": 1, **line} for _ in range(count)), "clients.json")
        yield {"lines": count, "table_s": time.perf_counter() - started}


@contextmanager
def places() -> Iterator[dict[str, str]]:
    """Map names to the URIs of an SQLite file and of an MLflow server. The server has one process."""
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
            with suppress(ProcessLookupError):  # the server has already ended
                os.killpg(server.pid, signal.SIGTERM)  # the process group includes the server's child processes
            server.wait()


def _wait_for(server: subprocess.Popen[bytes], health: str, log: Path) -> None:
    end = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < end:
        with suppress(requests.RequestException):
            if requests.get(health, timeout=5).ok:
                return
        time.sleep(0.5)
    raise SystemExit(f"mlflow server does not respond: {log.read_text('utf-8', 'replace')[-2000:]}")
