"""Methods that ask more of their clients than the package's own do: in pods as in one process, and after a kill."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fl_engine.backends.kubernetes.backend import Kubernetes
from fl_engine.core.slicing import initial_params
from fl_engine.storage.checkpoints import Checkpoints, Row
from fl_engine.storage.client_states import ClientStates, named
from fl_engine.storage.places import open_store
from fl_engine.storage.store import FolderStore, Store, encode
from fl_engine.testing.tiny import assert_same_bits, measured_alike
from flexfleet.steps.federate import federate
from flexfleet.steps.model_pool import model_pool
from flexfleet.steps.prepare import Resolved

OWN = (
    "algorithm.name=fl_engine.testing.personal:PersonalHeads",
    "algorithm.selection={name: fl_engine.testing.utility:LargestUtility}",
    "training.fraction=0.7",
)

Rounds = Callable[..., Path]
Remote = tuple[str, ...]


class Killed(BaseException):
    """Stands for SIGKILL."""


def killed(*_: object) -> None:
    """What befalls a coordinator when a round's pods are under way."""
    raise Killed


def killed_in_a_round(monkeypatch: pytest.MonkeyPatch, rounds: Rounds, *sets: str) -> None:
    """The run `pods` goes on, and its coordinator is killed in the next round."""
    with monkeypatch.context() as patch:
        patch.setattr(Kubernetes, "_collect", killed)
        with pytest.raises(Killed):
            rounds("pods", *sets, resume=True)


def lines(rows: list[Row]) -> list[list[dict[str, Any]]]:
    """Of each round's clients, less what differs between equal runs."""
    return [[measured_alike(line) for line in row.clients] for row in rows]


def heads(store: Store) -> dict[int, Any]:
    checkpoints = Checkpoints(store)
    files = named(checkpoints.rest(checkpoints.commits()[-1]))
    return {client: ClientStates(checkpoints).get(name) for client, name in files.items()}


def test_what_clients_measure_and_keep_in_pods_is_what_they_do_in_one_process(
    quick_cluster: Any, rounds: Rounds, remote: Remote, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second coordinator is killed where clients have been handed what they kept in the round before."""
    alone = rounds("alone", *OWN, "rounds.stop=2")
    rounds("pods", *remote, *OWN)
    killed_in_a_round(monkeypatch, rounds, *remote, *OWN, "rounds.stop=2")
    pods = rounds("pods", *remote, *OWN, "rounds.stop=2", resume=True)
    assert (pods / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()
    found, expected = rows(remote, "pods"), Checkpoints(FolderStore(alone)).rows()
    assert lines(found) == lines(expected)
    assert all(0 < line["utility"] < math.inf for row in found for line in row.clients)
    assert [row.metrics["bytes_down"] for row in found] == [row.metrics["bytes_down"] for row in expected]
    assert len({row.metrics["bytes_down"] for row in found}) == 2, "some took part again"
    there, here = heads(open_store(f"{remote[1].partition('=')[2]}/pods")), heads(FolderStore(alone))
    assert there.keys() == here.keys()
    for client, head in here.items():
        assert_same_bits(there[client], head)


def test_an_objective_an_optimiser_and_a_warm_start_in_pods(
    quick_cluster: Any, tiny: tuple[str, ...], rounds: Rounds, remote: Remote, prepared: Path, tmp_path: Path
) -> None:
    """Pods get their orders' weights and resolve the functions themselves: the start is the coordinator's alone."""
    pool, resolved = tmp_path / "pool", Resolved.load(None, tiny)
    start = tmp_path / "start.safetensors"
    start.write_bytes(encode(initial_params(resolved.family, 99)))
    sets = ("algorithm.kd_weight=0.0", f"model.init={start}", "training.objective=fl_engine.testing.own:loss",
            "training.optimiser=fl_engine.testing.own:sgd")  # fmt: skip
    model_pool(Resolved.load(None, (*tiny, *sets)), prepared / "pretrain", pool)
    found = {}
    for name, more in {"alone": (), "pods": remote}.items():
        out = tmp_path / "runs" / name
        federate(Resolved.load(None, (*tiny, *sets, *more)), prepared / "partition", pool, out, run_id=name)
        found[name] = (out / "model.safetensors").read_bytes()
    assert found["pods"] == found["alone"] != (rounds("fresh", *sets[:1]) / "model.safetensors").read_bytes()


def test_asynchronous_rounds_in_pods_are_those_of_one_process(
    quick_cluster: Any, rounds: Rounds, remote: Remote, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second coordinator is killed while updates of the first wait for their time."""
    sets = ("rounds.mode=buffered", "rounds.buffer=1", "training.fraction=0.7")
    alone = rounds("alone", *sets, "rounds.stop=4")
    rounds("pods", *remote, *sets, "rounds.stop=2")
    killed_in_a_round(monkeypatch, rounds, *remote, *sets, "rounds.stop=4")
    pods = rounds("pods", *remote, *sets, "rounds.stop=4", resume=True)
    assert (pods / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()
    found, expected = rows(remote, "pods"), Checkpoints(FolderStore(alone)).rows()
    assert lines(found) == lines(expected)
    assert max(line.get("staleness", 0) for row in found for line in row.clients) > 0
