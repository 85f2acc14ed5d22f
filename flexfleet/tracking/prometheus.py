"""Serve the Prometheus metrics and the health of a coordinator over HTTP, on the port `run.metrics_port`.

Only committed rounds are counted. Counters start at 0 in each process, as Prometheus expects. All metrics have the
label `run_id`, so a query can add the counters of all coordinators that continued a run.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fl_engine.core.contracts import Tracker, Watcher
from fl_engine.core.errors import EnvironmentFailure
from fl_engine.core.types import Assignment, ClientUpdate, Device
from fl_engine.rounds.timing import ON_THE_SERVER
from flexfleet.config import Config

RESULTS = ("trained", "late", "failed")
"""Values of the label `result`. A late client returned a result after the deadline, or after enough other clients."""


class RunMetrics(Tracker):
    """Prometheus metrics of a run. The round loop calls `round` before a commit, and `metrics` after the commit."""

    def __init__(self, config: Config, run_id: str) -> None:
        from prometheus_client import CollectorRegistry, Gauge, Info, ProcessCollector
        from prometheus_client import Counter as Total

        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

        def made(kind: Any, name: str, about: str, *labels: str) -> Any:
            return kind(f"flexfleet_{name}", about, ("run_id", *labels), registry=self.registry)

        self._run_id = run_id
        self._rounds = made(Total, "rounds", "Rounds that this process committed.").labels(run_id)
        self._committed = made(Gauge, "committed_rounds", "Committed rounds of the run, including earlier processes.")
        self._commit = made(Gauge, "last_commit_timestamp_seconds", "Unix time of the last commit of this process.")
        self._seconds = made(Total, "phase_seconds", "Real seconds of committed rounds, by phase.", "phase")
        self._clients = made(
            Total, "clients", "Clients in committed rounds, by device tier and result.", "tier", "result"
        )
        self._bytes = made(Total, "transferred_bytes", "Bytes sent to clients (down) and merged (up).", "direction")
        made(Gauge, "planned_rounds", "Value of rounds.stop.").labels(run_id).set(config.rounds.stop)
        names = {section: str(getattr(config, section)["name"]) for section in ("algorithm", "model")}
        names |= {"dataset": config.dataset.name, "backend": config.run.backend}
        made(Info, "run", "Names in the configuration of the run.").labels(run_id).info(names)
        self._tiers: Mapping[int, str] = {}
        self._watcher: Watcher | None = None
        self._uncommitted: dict[int, Counter[tuple[str, str]]] = {}
        """Map each uncommitted round to its number of clients by tier and result."""

    def begin(self, fleet: Iterable[Device], watcher: Watcher | None) -> None:
        """Set the devices before the first round, and the watcher to which all calls are passed on."""
        self._tiers, self._watcher = {device.client: device.tier for device in fleet}, watcher
        for tier in sorted(set(self._tiers.values())):
            for result in RESULTS:
                self._clients.labels(self._run_id, tier, result)

    def update(self, assignment: Assignment, update: ClientUpdate) -> None:
        if self._watcher is not None:
            self._watcher.update(assignment, update)

    def round(
        self, number: int, metrics: Mapping[str, float], clients: Sequence[Mapping[str, Any]], state: Any
    ) -> bool:
        self._uncommitted[number] = Counter((self._tiers[line["client"]], _result(line)) for line in clients)
        return self._watcher is not None and self._watcher.round(number, metrics, clients, state)

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        for number, values in rows:
            self._committed.labels(self._run_id).set(number)
            clients = self._uncommitted.pop(number, None)
            if clients is None:
                continue  # an earlier process committed this round
            self._rounds.inc()
            for name in ON_THE_SERVER:
                self._seconds.labels(self._run_id, name.removeprefix("seconds_")).inc(max(0.0, values.get(name, 0.0)))
            for (tier, result), count in clients.items():
                self._clients.labels(self._run_id, tier, result).inc(count)
            for way in ("down", "up"):
                self._bytes.labels(self._run_id, way).inc(values[f"bytes_{way}"])
            self._commit.labels(self._run_id).set(time.time())


def _result(line: Mapping[str, Any]) -> str:
    if "failure" not in line:
        return "trained"
    return "late" if line["failure"].startswith("straggle:") else "failed"


@contextmanager
def serving(config: Config, run_id: str) -> Iterator[RunMetrics | None]:
    """Serve /metrics and /healthz in the context, and yield the run's metrics; None if `run.metrics_port` is null.
    Raises EnvironmentFailure if the port is in use."""
    port = config.run.metrics_port
    if port is None:
        yield None
        return
    from prometheus_client import start_http_server

    metrics = RunMetrics(config, run_id)
    try:
        server, _ = start_http_server(port, registry=metrics.registry)
    except OSError as error:
        raise EnvironmentFailure(
            f"run.metrics_port: port {port} cannot be opened: {error.strerror}. Choose another port, or null for no "
            "metrics. Parallel runs on one machine cannot use the same port",
            path="run.metrics_port",
        ) from error
    server.set_app(_with_health(server.get_app(), run_id))
    try:
        yield metrics
    finally:
        server.shutdown()
        server.server_close()


def _with_health(metrics: Any, run_id: str) -> Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]:
    """Return a WSGI application that serves `metrics` and a health check. The process is healthy if it responds."""
    bodies = {"/healthz": ("200 OK", {"status": "ok", "run_id": run_id})}

    def respond(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/metrics":
            found: Iterable[bytes] = metrics(environ, start)
            return found
        status, body = bodies.get(environ["PATH_INFO"], ("404 Not Found", {"paths": ["/metrics", "/healthz"]}))
        start(status, [("Content-Type", "application/json")])
        return [json.dumps(body).encode()]

    return respond
