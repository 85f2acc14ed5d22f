"""What pods are told fits into Secrets, each URL said once, however long the signing credentials make it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_engine.algorithms import FlexFL
from fl_engine.backends.kubernetes.backend import Kubernetes, jobs
from fl_engine.backends.kubernetes.open_round import OpenRound
from fl_engine.backends.kubernetes.settings import KubernetesConfig
from fl_engine.core.errors import ClientError, ConfigError
from fl_engine.core.types import RoundPlan, SubmodelSpec, WorkOrder
from fl_engine.exchange.assignment import COMMON, Assignment
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.updates import key_of, manifest_bytes, payload_bytes
from fl_engine.fleet import devices
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.store import MemoryStore
from fl_engine.testing.tiny import tiny_site
from fl_engine.training import cgroup, memory
from fl_engine.training.memory import Peaks
from fl_engine.training.numerics import SINGLE, Numerics
from flexfleet.steps import answer as steps
from flexfleet.steps.answer import _free

TOKEN = "FwoGZXIvYXdzE" + "a/B+" * 370
"""Of 1.5 kB, as Amazon's are."""


class Recorder:
    """A cluster that takes everything down."""

    def __init__(self) -> None:
        self.made: dict[str, list[dict[str, Any]]] = {"configmaps": [], "secrets": [], "jobs": []}

    def create(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        self.made[kind].append(body)
        return {**body, "metadata": {**body["metadata"], "uid": "0"}}

    def delete(self, kind: str, name: str) -> None:
        assert name not in {body["metadata"]["name"] for body in self.made[kind]}, "of an earlier Job, not of this one"


@pytest.mark.long
@pytest.mark.parametrize("clients_per_pod", [1, 7])
def test_two_hundred_pods_with_session_tokens_fit_into_secrets(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clients_per_pod: int
) -> None:
    monkeypatch.setenv("FLEXFLEET_S3_UNCHECKED", "1")
    store = S3Store(f"s3://runs/{tmp_path.name}")
    ledger = Mailbox(store, key=key_of(b"secret"))
    half, whole = ({"w": torch.full((n,), float(n))} for n in (50, 100))
    orders = tuple(WorkOrder(0, c, SubmodelSpec(), half if c < 10 else whole, c, 0) for c in range(200))
    plan, fleet = RoundPlan(0, orders), [replace(devices.fleet("4:3:3", 1, 0)[0], client=c) for c in range(200)]
    names = ledger.put_orders(plan)
    options = KubernetesConfig(image="i", clients_per_pod=clients_per_pod)
    cluster = Recorder()
    for name, value in {"ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s", "SESSION_TOKEN": TOKEN}.items():
        monkeypatch.setenv(f"FLEXFLEET_SIGNING_AWS_{name}", value)
    backend = Kubernetes(options, "run", fleet, ledger, cluster=cluster)  # type: ignore[arg-type]
    backend._jobs.launch(OpenRound(plan, names, set(range(200))), set(range(200)))

    asked: list[int] = []
    assert len(cluster.made["secrets"]) == len(cluster.made["jobs"]) > 1
    for secret, job in zip(cluster.made["secrets"], cluster.made["jobs"], strict=True):
        assert secret["metadata"]["name"] == job["metadata"]["name"]
        told = dict(secret["stringData"])
        assert sum(len(text.encode()) for text in told.values()) <= jobs.SECRET_BYTES < 2**20
        common = json.loads(told[COMMON])
        assert any(TOKEN[:13] in url for url in common.values()), "it is the tokens that make them long"
        assert len(told) == 1 + job["spec"]["completions"]
        for index, clients in enumerate(jobs.pods_of(job)):
            place = tmp_path / job["metadata"]["name"] / str(index)
            place.mkdir(parents=True)
            (place / "assignment.json").write_text(told[str(index)])
            (place / COMMON).write_text(told[COMMON])
            assert not common.keys() & json.loads(told[str(index)])["reads"].keys(), "what all may read is said once"
            found = Assignment.read(place / "assignment.json")
            asked += found.clients
            assert list(found.clients) == clients
            site = [f"site/{name}" for name in ("run.json", "pool.json", "partition.json", "partition.safetensors")]
            assert found.reads.keys() == {*site, *(key for client in clients for key in names[client])}
            sizes = {key: upload.size for key, upload in found.writes.items()}
            expected = {}
            for client in clients:
                order, (payload, manifest) = orders[client], ledger.outcome_keys(0, client)
                expected |= {payload: payload_bytes(order), manifest: manifest_bytes(order)}
            assert sizes == expected and found.lengths == {}, "a form names the most, and takes less"
    assert sorted(asked) == list(range(200))


@pytest.mark.parametrize("version", [1, 3])
def test_an_assignment_of_another_version_says_so(tmp_path: Path, version: int) -> None:
    """Version 1 told the full model's peak alone."""
    told = Assignment(round=0, clients=(4,), keys={4: "ab"}, observe="cgroup", memory=Peaks(10, (15, 20)))
    path = tmp_path / "assignment.json"
    path.with_name(COMMON).write_text("{}")
    path.write_text(told.model_dump_json())
    assert Assignment.read(path) == told
    path.write_text(json.dumps(json.loads(told.model_dump_json()) | {"schema_version": version, "memory": [10, 20]}))
    with pytest.raises(ConfigError, match=rf"of version {version}, this client reads version 2: give the coordinator"):
        Assignment.read(path)


def test_peaks_of_another_pool_are_refused() -> None:
    told = Assignment(round=0, clients=(4,), keys={4: "ab"}, observe="cgroup", memory=Peaks(10, (15, 20)))
    pool = tiny_site(FlexFL()).pool
    with pytest.raises(ClientError, match="how much memory 2 levels take, the run's pool has 5: start the run anew"):
        _free(told, pool, 1, 0, cgroup.room)
    with pytest.raises(ClientError, match="does not say how much memory training takes"):
        _free(told.model_copy(update={"memory": None}), pool, 1, 0, cgroup.room)


@pytest.mark.parametrize(
    ("numerics", "turns"),
    [(SINGLE, (1, 1, 1, 1)), (Numerics("batched", 3), (3, 1)), (Numerics("batched", 64), (4,))],
)
def test_orders_side_by_side_share_the_room_and_others_look_when_it_is_their_turn(
    numerics: Numerics, turns: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So those that wait hold nothing that nobody counts. What is free is another thing each time."""
    peaks, site = Peaks(10, (20, 30, 40, 50, 60)), replace(tiny_site(FlexFL()), numerics=numerics)
    told = Assignment(
        round=0, clients=(5, 1, 2, 8), keys=dict.fromkeys((5, 1, 2, 8), "ab"), observe="cgroup", memory=peaks
    )
    looks = iter([100, 60, 31, 7])
    trained: list[tuple[tuple[int, ...], float | None]] = []
    monkeypatch.setattr(steps, "carry_out", lambda _a, site, _b, _r, clients, *_: trained.append((clients, site.free)))
    steps.carry_out_all(told, MemoryStore(), FlexFL(), site, 0, lambda base: next(looks) if base == 10 else 0)
    assert [len(clients) for clients, _ in trained] == list(turns)
    assert [client for clients, _ in trained for client in clients] == [5, 1, 2, 8]
    rooms = [100, 60, 31, 7]
    assert [free for _, free in trained] == [
        memory.free(room // count, peaks, site.pool) for room, count in zip(rooms, turns, strict=False)
    ]
    simulated = told.model_copy(update={"observe": "simulated"})
    trained.clear()
    steps.carry_out_all(simulated, MemoryStore(), FlexFL(), site)
    assert trained == [((5, 1, 2, 8), None)], "as before: what several are sent is read once"
