"""The phases of a round add up to it, on the server's clock and on the simulated one; bits are those that travel."""

from __future__ import annotations

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
from fl_engine.fleet.uniformity import measured
from fl_engine.rounds import phases
from fl_engine.rounds.phases import ON_THE_SERVER, SIMULATED
from fl_engine.rounds.run import Run
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.storage.store import FolderStore
from fl_engine.testing import played
from fl_engine.testing.tiny import TRAINING, tiny_fleet, tiny_site

ALGORITHM = FedAvg(training=replace(TRAINING, fraction=0.25), eligible="all")
FLEET = tuple(
    replace(d, memory=200.0, speed=1e6 * (1 + d.client), bandwidth=1e6 / (1 + d.client)) for d in tiny_fleet()
)
SITE = tiny_site(ALGORITHM, fleet=FLEET)
NAP = 0.01
CLIENTS = 5
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


def federate(folder: Path, codecs: Codecs = PLAIN, **terms: Any) -> list[Any]:
    config = RoundsConfig(**({"stop": 3, "evaluate_every": 2, "commit_every": 1} | terms))
    return played.federated(Run(ALGORITHM, SITE, config, codecs=codecs), FolderStore(folder))[1]


def of_the_server(metrics: dict[str, float]) -> float:
    return sum(metrics.get(name, 0.0) for name in ON_THE_SERVER)


@pytest.mark.parametrize(
    "terms", [{}, {"keep_updates": True}, {"mode": "buffered", "buffer": 2}], ids=["memory", "stored", "buffered"]
)
@pytest.mark.parametrize("codecs", [Codecs(), Codecs(Slow(), Slow())], ids=["plain", "coded"])
def test_the_phases_add_up_to_the_round(tmp_path: Path, codecs: Codecs, terms: dict[str, Any]) -> None:
    rows = federate(tmp_path, codecs, **terms)
    for row in rows:
        assert of_the_server(row.metrics) == pytest.approx(row.metrics["seconds_round"], abs=1e-9)
        assert ("seconds_evaluate" in row.metrics) == ("full" in row.metrics)
        assert all(seconds >= 0 for name, seconds in row.metrics.items() if name.startswith("seconds_"))
        assert row.metrics["seconds_decode"] <= row.metrics["seconds_train"]
    assert {"full" in row.metrics for row in rows} == {True, False}


def test_every_metric_of_a_round_is_in_the_reference(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
    said = {*re.findall(r"`([a-z_/]+)(?:<level>)?`", f"{page}{phases.__doc__}{measured.__doc__}")}
    late = {"faults": "drop=0.5", "deadline_s": 1e-3}
    for name, terms in {"plain": {}, "late": late, "buffered": {"mode": "buffered", "buffer": 2}}.items():
        for row in federate(tmp_path / name, **terms):
            named = {re.sub(f"/({'|'.join(m.name for m in SITE.pool)})$", "/", name) for name in row.metrics}
            assert named - said == set()


def test_what_coding_takes_on_the_server_is_its_own_phase(tmp_path: Path) -> None:
    ENCODED.clear()
    plain, coded = federate(tmp_path / "plain"), federate(tmp_path / "coded", Codecs(Slow(), Slow()))
    assert len(ENCODED) == len(coded) * (1 + CLIENTS)
    one_way = federate(tmp_path / "up", Codecs(up=Slow()))
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
