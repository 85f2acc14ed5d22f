"""A coordinator serves Prometheus metrics and its health, without changing a bit of the model."""

from __future__ import annotations

import socket
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import flexfleet as ff
from fl_engine.core.errors import EnvironmentFailure
from tests.harness import from_python

pytestmark = pytest.mark.usefixtures("own_folder")

OPTIONS = {**from_python.OPTIONS, "rounds.faults": "drop=0.3", "rounds.commit_every": 1, "training.fraction": 1.0}
SMALL = {**from_python.SMALL, "algorithm": "heterofl", "rounds": 3, "seed": 0, "options": OPTIONS}
"""Settings of a run in which a client fails."""


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def run(port: int, *callbacks: ff.Callback, **more: Any) -> ff.Result:
    return ff.run(**SMALL | {"options": OPTIONS | {"run.metrics_port": port}}, callbacks=callbacks, **more)


def scraped(port: int) -> dict[tuple[str, ...], float]:
    """Map each sample of flexfleet, by its name and the values of its labels except `run_id`, to its value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        families = text_string_to_metric_families(response.read().decode())
    samples = [sample for family in families for sample in family.samples if sample.name.startswith("flexfleet_")]
    return {(s.name, *(v for k, v in sorted(s.labels.items()) if k != "run_id")): s.value for s in samples}


class Scraping(ff.Callback):
    def __init__(self, port: int, stop: int = 0) -> None:
        self.port, self.stop = port, stop
        self.seen: list[dict[tuple[str, ...], float]] = []

    def on_round(self, round: ff.Round) -> Any:
        self.seen.append(scraped(self.port))
        return ff.STOP if round.number == self.stop else None


def test_metrics_count_committed_rounds_and_change_no_bit(port: int) -> None:
    scraping = Scraping(port)
    plain, result = ff.run(**SMALL), run(port, scraping)
    assert result.model_sha256 == plain.model_sha256
    before, _, last = scraping.seen
    assert before["flexfleet_rounds_total",] == 0 and ("flexfleet_last_commit_timestamp_seconds",) not in before
    rounds = result.history[:2]  # the last scrape is before the commit of the third round
    assert last["flexfleet_rounds_total",] == last["flexfleet_committed_rounds",] == 2
    assert last["flexfleet_planned_rounds",] == 3
    for way in ("down", "up"):
        assert last["flexfleet_transferred_bytes_total", way] == rounds[f"bytes_{way}"].sum()
    for kind in ("trained", "failed"):
        counts = [value for name, value in last.items() if name[:2] == ("flexfleet_clients_total", kind)]
        assert sum(counts) == rounds[f"clients_{kind}"].sum() > 0
    seconds = sum(value for name, value in last.items() if name[0] == "flexfleet_phase_seconds_total")
    assert seconds == pytest.approx(rounds["seconds_round"].sum())
    with pytest.raises(OSError):
        scraped(port)


def test_resumed_run_counts_only_its_own_rounds(port: int) -> None:
    run(port, Scraping(port, stop=1), run_id="a")
    resumed = Scraping(port)
    run(port, resumed, run_id="a", resume=True)
    first, last = resumed.seen
    assert (first["flexfleet_rounds_total",], first["flexfleet_committed_rounds",]) == (0, 1)
    assert (last["flexfleet_rounds_total",], last["flexfleet_committed_rounds",]) == (1, 2)


def test_health_responds_from_the_start_of_the_run(port: int) -> None:
    class Asking(ff.Callback):
        def on_start(self, result: ff.Result) -> None:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as response:
                self.found = response.status, response.read()

    asking = Asking()
    run(port, asking)
    assert asking.found[0] == 200 and b'"status": "ok"' in asking.found[1]


def test_port_in_use_is_refused_before_the_run_has_a_folder(port: int) -> None:
    with socket.create_server(("0.0.0.0", port)), pytest.raises(EnvironmentFailure) as error:
        run(port, run_id="a")
    assert error.value.path == "run.metrics_port"
    assert run(port, run_id="a").status == "finished"


def test_parallel_runs_with_the_same_port_are_refused(flexfleet: Any) -> None:
    argv = ("compare", "--algorithms", "flexfl,all_large", "--seeds", "0", "--jobs", "2", "--json")
    done = flexfleet(*argv, sets=["run.metrics_port=9464"])
    assert (done.code, done.json["error"]["path"]) == (2, "run.metrics_port")
