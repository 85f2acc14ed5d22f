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
from fl_engine.rounds.ledger import Ledger
from fl_engine.storage.checkpoints import Checkpoints, Row
from fl_engine.storage.store import FolderStore
from fl_engine.testing.tiny import Memory
from flexfleet.files.artifacts import History, history_of
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
    made = Ledger(FolderStore(tmp_path / "run"))
    for round in range(12):
        made.checkpoints.commit(round, WEIGHTS, {}, [row(round)])
    return made


def test_the_end_of_a_run_holds_the_lines_of_a_round_at_a_time(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlflow_uri: str
) -> None:
    given = list[weakref.ref[Row]]()

    class Watched(Checkpoints):
        def each_row(self, lines: bool = True) -> Iterator[Row]:
            for found in super().each_row(lines):
                given.append(weakref.ref(found))
                assert sum(ref() is not None for ref in given) <= 3, "this one, the one before it, one being dropped"
                yield found

    ledger.checkpoints = Watched(FolderStore(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)  # MLflow puts artifacts under ./mlruns
    mlflow = MLflow(mlflow_uri, "a", "a", {})
    path = _finish(tmp_path / "run", ledger, SimpleNamespace(params=WEIGHTS), Memory(), mlflow, bytes(32))
    told = json.loads(path.read_text())
    assert [len(each["clients"]) for each in told["rounds"]] == [2] * 12 and told["seconds"] == 1.2
    assert [each["round"] for each in told["rounds"]] == list(range(1, 13)), "rounds count from 1"
    (table,) = tmp_path.glob("mlruns/**/clients.json")
    found: dict[str, Any] = json.loads(table.read_text())
    assert found["columns"] == ["round", "client", "loss", "sent"]
    assert found["data"][:2] == [[1, 0, 0.1, 'M"1\n'], [1, 1, None, 'M"1\n']] and len(found["data"]) == 24


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_a_reader_checks_lines_about_clients_and_leaves_them_out(tmp_path: Path, rounds: int) -> None:
    path = tmp_path / "history.json"
    path.write_bytes(bytes(history_of(map(row, range(rounds)), "0" * 64)))
    whole, rows = History.read(path), tuple(row(r, clients=0) for r in range(rounds))
    assert whole.to_bytes() == History(rounds=rows, model_sha256="0" * 64, seconds=round(0.1 * rounds, 3)).to_bytes()
    assert sum(whole.results.values()) == sum(len(row(r).clients) for r in range(rounds))
    for old, new in (('"client":0', '"client" 0'), ('"clients":[', '"clients":[3, ')) if rounds else ():
        path.write_bytes(bytes(history_of([row(0)], "0" * 64)).replace(old.encode(), new.encode(), 1))
        with pytest.raises(IntegrityError, match=r"history\.json"):
            History.read(path)
