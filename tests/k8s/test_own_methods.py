"""Methods that ask more of their clients than the package's own do: in pods as in one process, and after a kill."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fl_engine.backends.kubernetes.backend import Kubernetes
from fl_engine.storage.checkpoints import Checkpoints, Row
from fl_engine.storage.store import FolderStore

ASKING = (
    "algorithm.name=all_large",
    "algorithm.eligible=all",
    "algorithm.selection={name: fl_engine.testing.utility:LargestUtility}",
    "training.fraction=0.3",
    "rounds.stop=2",
)

Rounds = Callable[..., Path]
Remote = tuple[str, ...]


class Killed(BaseException):
    """Stands for SIGKILL."""


def killed_while_waiting(rounds: Rounds, name: str, sets: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts a run whose coordinator is killed when the first round's pods are under way."""

    def collect(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Kubernetes, "_collect", collect)
        with pytest.raises(Killed):
            rounds(name, *sets)


def lines(rows: list[Row]) -> list[list[dict[str, Any]]]:
    """Of each round's clients, less what differs between equal runs."""
    return [[{k: v for k, v in line.items() if k != "seconds"} for line in row.clients] for row in rows]


def test_what_clients_measure_in_pods_is_what_they_measure_in_one_process(
    quick_cluster: Any, rounds: Rounds, remote: Remote, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = rounds("alone", *ASKING)
    killed_while_waiting(rounds, "pods", (*remote, *ASKING), monkeypatch)
    pods = rounds("pods", *remote, *ASKING, resume=True)
    assert (pods / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()
    found, expected = rows(remote, "pods"), Checkpoints(FolderStore(alone)).rows()
    assert lines(found) == lines(expected)
    assert all(0 < line["utility"] < math.inf for row in found for line in row.clients)
