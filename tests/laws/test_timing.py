"""The phases of a round add up to it, on the server's clock and on the simulated one; uniformity by hand, its laws, and
what a round says of it, whatever became of its clients."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fl_engine.algorithms.fedavg import FedAvg
from fl_engine.codecs import Half
from fl_engine.core.types import Codecs, Header, Params
from fl_engine.exchange.coding import PLAIN
from fl_engine.rounds import timing
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.rounds.timing import ON_THE_SERVER, SIMULATED, Times, of_clients, uniformity
from fl_engine.storage.store import FolderStore
from fl_engine.testing import rounds
from fl_engine.testing.tiny import TRAINING, tiny_fleet, tiny_site

ALGORITHM = FedAvg(training=replace(TRAINING, fraction=0.5), eligible="all")
FLEET = tuple(
    replace(d, memory=200.0, speed=1e6 * (1 + d.client), bandwidth=1e6 / (1 + d.client)) for d in tiny_fleet()
)
"""Each computes faster and sends slower than the one before, and has room for everything."""
SITE = tiny_site(ALGORITHM, fleet=FLEET)


def federate(folder: Path, stop: int = 2, codecs: Codecs = PLAIN, **options: Any) -> list[Any]:
    config = RoundsConfig(stop=stop, evaluate_every=2, commit_every=1, **options)
    return rounds.federated(Run(ALGORITHM, SITE, config, codecs=codecs), FolderStore(folder))[1]


NAP = 0.01
CLIENTS = 10
ENCODED: list[int] = []
"""The seed of each time that a slow codec encoded."""


@dataclass(frozen=True)
class Slow(Half):
    """A codec that takes its time."""

    def encode(self, tensors: Params, seed: int) -> Params:
        time.sleep(NAP)
        ENCODED.append(seed)
        return super().encode(tensors, seed)

    def decode(self, encoded: Params, header: Header) -> Params:
        time.sleep(2 * NAP)
        return super().decode(encoded, header)


def of_the_server(metrics: dict[str, float]) -> float:
    return sum(metrics.get(name, 0.0) for name in ON_THE_SERVER)


@pytest.mark.parametrize(
    "options", [{}, {"keep_updates": True}, {"mode": "buffered", "buffer": 2}], ids=["memory", "stored", "buffered"]
)
@pytest.mark.parametrize("codecs", [Codecs(), Codecs(Slow(), Slow())], ids=["plain", "coded"])
def test_the_phases_add_up_to_the_round(tmp_path: Path, codecs: Codecs, options: dict[str, Any]) -> None:
    rows = federate(tmp_path, codecs=codecs, **options)
    for row in rows:
        assert of_the_server(row.metrics) == pytest.approx(row.metrics["seconds_round"], abs=1e-9)
        assert ("seconds_evaluate" in row.metrics) == ("full" in row.metrics)
        assert all(seconds >= 0 for name, seconds in row.metrics.items() if name.startswith("seconds_"))
        assert row.metrics["seconds_decode"] <= row.metrics["seconds_train"]
    assert {"full" in row.metrics for row in rows} == {True, False}


def test_every_metric_of_a_round_is_in_the_reference(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
    said = {*re.findall(r"`([a-z_/]+)(?:<level>)?`", page + str(timing.__doc__))}
    late = {"faults": "drop=0.5", "deadline_s": 1e-3}
    for name, options in {"plain": {}, "late": late, "buffered": {"mode": "buffered", "buffer": 2}}.items():
        for row in federate(tmp_path / name, **options):
            named = {re.sub(f"/({'|'.join(m.name for m in SITE.pool)})$", "/", name) for name in row.metrics}
            assert named - said == set()


def test_coding_on_the_server_has_its_own_phase(tmp_path: Path) -> None:
    ENCODED.clear()
    plain, coded = federate(tmp_path / "plain"), federate(tmp_path / "coded", codecs=Codecs(Slow(), Slow()))
    assert len(ENCODED) == len(coded) * (1 + CLIENTS)
    one_way = federate(tmp_path / "up", codecs=Codecs(up=Slow()))
    for row, without, up in zip(coded, plain, one_way, strict=True):
        assert row.metrics["seconds_encode"] >= 3 * NAP
        assert row.metrics["seconds_decode"] >= 2 * NAP * CLIENTS
        assert without.metrics["seconds_encode"] == without.metrics["seconds_decode"] == 0
        assert CLIENTS * NAP <= row.metrics["seconds_encode_clients"] <= row.metrics["seconds_train"]
        assert [line["seconds_encode"] >= NAP for line in row.clients] == [True] * CLIENTS
        assert without.metrics["seconds_encode_clients"] == 0 and "seconds_encode" not in without.clients[0]
        assert up.metrics["seconds_encode"] == 0 and up.metrics["seconds_decode"] >= 2 * NAP * CLIENTS


def test_simulated_phases_are_those_of_the_slowest_client(tmp_path: Path) -> None:
    for row in federate(tmp_path):
        last = max(row.clients, key=lambda line: line["seconds_simulated"])
        assert row.metrics["simulated_compute"] == last["seconds_compute"] > 0
        assert row.metrics["simulated_communication"] == last["seconds_communication"] > 0
        assert sum(row.metrics[name] for name in SIMULATED) == row.metrics["seconds_simulated"]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((7.0,), 0.0),
        ((3.0, 3.0, 3.0), 0.0),
        ((0.0, 0.0), 0.0),
        ((1.0, 4.0), 3 / math.sqrt(2)),  # sqrt((0 + 9) / 2)
        ((10.0, 13.0, 14.0, 10.0), 2.5),  # sqrt((0 + 9 + 16 + 0) / 4)
        ((1e200, 0.0), 1e200 / math.sqrt(2)),
    ],
)
def test_the_formula_by_hand(seconds: tuple[float, ...], expected: float) -> None:
    assert uniformity(seconds) == pytest.approx(expected, rel=1e-15)


def test_the_figures_of_a_round_by_hand() -> None:
    """Two that answer, after 1 + 1 and 4 + 1 s, and one that is late, after 4 + 4 s."""
    in_time = [Times(2.0, 1.0, 1.0, 0.5), Times(5.0, 4.0, 1.0, 0.5)]
    late = Times(8.0, 4.0, 4.0, 3.5)
    found = of_clients([*in_time, late], in_time, alone=True)
    assert found == pytest.approx(
        {
            "uniformity": math.sqrt((0 + 9 + 36) / 3),
            "uniformity_compute": math.sqrt((0 + 9 + 9) / 3),
            "uniformity_communication": math.sqrt(9 / 3),
            "uniformity_real": math.sqrt(9 / 3),
            "uniformity_answered": math.sqrt(9 / 2),
            "time_variance": 6.0,  # around 5: (9 + 0 + 9) / 3
            "simulated_compute": 4.0,
            "simulated_communication": 1.0,
        }
    )
    assert "uniformity_real" not in of_clients(in_time, in_time, alone=False), "they share their steps"
    assert "uniformity_answered" not in of_clients([late], [], alone=True), "nobody answered in time"
    assert of_clients([], [], alone=True) == {}


def of_lines(row: Any) -> dict[str, float]:
    """A round's figures, computed from its lines about clients."""
    timed = [line for line in row.clients if "seconds_simulated" in line]
    total, compute, communication = (
        [line[f"seconds_{kind}"] for line in timed] for kind in ("simulated", "compute", "communication")
    )
    middle = sum(total) / len(total)
    return {
        "uniformity": uniformity(total),
        "uniformity_compute": uniformity(compute),
        "uniformity_communication": uniformity(communication),
        "time_variance": sum((t - middle) ** 2 for t in total) / len(total),
    }


def test_a_line_of_a_client_has_the_two_parts_of_its_time(tmp_path: Path) -> None:
    rows = federate(tmp_path)
    for row in rows:
        assert {k: row.metrics[k] for k in of_lines(row)} == pytest.approx(of_lines(row))
        assert row.metrics["uniformity_answered"] == row.metrics["uniformity"] > 0
        assert row.metrics["uniformity_real"] >= 0
        for line in row.clients:
            device = FLEET[line["client"]]
            assert line["seconds_compute"] == line["macs"] / device.speed
            assert line["seconds_communication"] == 2 * 4 * SITE.pool[-1].params / device.bandwidth
            assert line["seconds_simulated"] == line["seconds_compute"] + line["seconds_communication"]


def test_energy_of_a_round_is_power_times_time_of_all_valid_updates(tmp_path: Path) -> None:
    powered = tuple(replace(device, watts=(5.0, 2.0 + device.client)) for device in FLEET)
    config = RoundsConfig(stop=2, evaluate_every=2, commit_every=1, over_provision=2.0)
    run = Run(ALGORITHM, tiny_site(ALGORITHM, fleet=powered), config)
    for row in rounds.federated(run, FolderStore(tmp_path / "powered"))[1]:
        assert any("failure" in line for line in row.clients), "a straggler needs energy, too"
        parts = ((line["seconds_compute"], line["seconds_communication"], line["client"]) for line in row.clients)
        assert row.metrics["joules"] == pytest.approx(sum(5 * a + (2 + client) * b for a, b, client in parts))
    assert not any("joules" in row.metrics for row in federate(tmp_path / "unknown"))


@pytest.mark.parametrize(
    ("options", "stage"),
    [
        ({"over_provision": 2.0}, "straggle"),
        ({"deadline_s": 0.2}, "straggle"),
        ({"faults": "slow=0.3x50", "deadline_s": 1.0}, "straggle"),
        ({"norm_bound": 1e-9}, "validate"),
        ({"deadline_s": 1e-9, "quorum": 1.0}, "straggle"),
    ],
)
def test_stragglers_count_in_uniformity_but_not_in_answered(
    tmp_path: Path, options: dict[str, Any], stage: str
) -> None:
    rows = federate(tmp_path, **options)
    for row in rows:
        refused = [line for line in row.clients if "failure" in line]
        assert {k: row.metrics[k] for k in of_lines(row)} == pytest.approx(of_lines(row))
        assert all("seconds_simulated" in line and line["failure"].startswith(stage) for line in refused)
        answered = [line["seconds_simulated"] for line in row.clients if "failure" not in line]
        assert row.metrics.get("uniformity_answered") == (uniformity(answered) if answered else None)
    assert any("failure" in line for row in rows for line in row.clients), "some were refused"


@pytest.mark.parametrize(
    ("options", "waits"),
    [
        ({"norm_bound": 0.9}, False),
        ({"faults": "slow=0.3x1000"}, True),
        ({"faults": "drop=0.3"}, True),
        ({"faults": "nan=0.3"}, True),  # what cannot be read has no time
    ],
)
def test_round_lasts_until_deadline_only_if_an_update_is_missing(
    tmp_path: Path, options: dict[str, Any], waits: bool
) -> None:
    rows = federate(tmp_path, **options, deadline_s=20.0)
    short = [row for row in rows if any("failure" in line for line in row.clients)]
    assert short, "some are not merged"
    for row in short:
        merged = [line["seconds_simulated"] for line in row.clients if "failure" not in line]
        assert row.metrics["seconds_simulated"] == (20.0 if waits else max(merged))
