"""history.json: what it holds, and that a round's lines about single clients do not pile up in memory."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fl_engine.core.errors import IntegrityError
from fl_engine.rounds.ledger import Ledger, ledger_in
from fl_engine.storage.checkpoints import Checkpoints, Row
from fl_engine.storage.store import FolderStore
from fl_engine.testing.tiny import Memory
from flexfleet.files.artifacts import BareHistory, History, history_of, rows_of
from flexfleet.pipeline.federate import _finish
from flexfleet.tracking.trackers import MLflow

WEIGHTS = {"a": torch.zeros(2)}


def row(round: int, clients: int = 2) -> Row:
    lines = tuple({"client": c, "sent": 'M"1\n', "loss": math.inf if c else 0.1} for c in range(clients))
    return Row(
        round=round,
        metrics={"avg": 0.1 * round, "seconds_round": 0.1, "clients_trained": 2, "clients_failed": 0},
        clients=lines,
    )


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    made = ledger_in(FolderStore(tmp_path / "run"))
    for round in range(12):
        made.checkpoints.commit(round, WEIGHTS, {}, [row(round)])
    return made


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_it_is_written_in_parts_as_it_is_as_a_whole(rounds: int) -> None:
    rows = [row(r, clients=r) for r in range(rounds)]
    seconds = round(sum(r.metrics["seconds_round"] for r in rows), 3)
    whole = History(rounds=tuple(r.model_dump(mode="json") for r in rows), model_sha256="0" * 64, seconds=seconds)
    assert bytes(history_of(iter(rows), "0" * 64)) == (whole.model_dump_json(indent=1) + "\n").encode()


def test_the_end_of_a_run_holds_the_lines_of_a_round_at_a_time(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlflow_uri: str
) -> None:
    given, each_row = list[weakref.ref[Row]](), Checkpoints.each_row

    def watched(self: Checkpoints, lines: bool = True) -> Iterator[Row]:
        for found in each_row(self, lines):
            given.append(weakref.ref(found))
            assert sum(ref() is not None for ref in given) <= 3, "this one, the one before it, one being dropped"
            yield found

    monkeypatch.setattr(Checkpoints, "each_row", watched)
    monkeypatch.chdir(tmp_path)  # MLflow puts artifacts under ./mlruns
    mlflow = MLflow(mlflow_uri, "a", "a", {})
    path = _finish(tmp_path / "run", ledger, SimpleNamespace(params=WEIGHTS), Memory(), mlflow)
    told = json.loads(path.read_text())
    assert [len(each["clients"]) for each in told["rounds"]] == [2] * 12 and told["seconds"] == 1.2
    (table,) = tmp_path.glob("mlruns/**/clients.json")
    found: dict[str, Any] = json.loads(table.read_text())
    assert found["columns"] == ["round", "client", "loss", "sent"]
    assert found["data"][:2] == [[1, 0, 0.1, 'M"1\n'], [1, 1, None, 'M"1\n']] and len(found["data"]) == 24


def test_what_it_says_of_clients_is_checked_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    path.write_bytes(bytes(history_of([row(0), row(1)], "0" * 64)))
    assert [each.clients for each in rows_of(BareHistory.read(path))] == [(), ()]
    assert [len(each.clients) for each in rows_of(History.read(path))] == [2, 2]
    old = path.read_text().replace('"schema_version": 1,', "")  # of a round, it may be left out
    assert [each.clients for each in rows_of(BareHistory.of(old.encode(), "old"))] == [(), ()]
    for old, new in (('"client": 0', '"client" 0'), ('"clients": [', '"clients": [3, ')):
        damaged = tmp_path / "damaged.json"
        damaged.write_text(path.read_text().replace(old, new, 1))
        with pytest.raises(IntegrityError, match=r"damaged\.json"):
            BareHistory.read(damaged)
