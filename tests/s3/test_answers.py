"""A pod's answer on a real server; and that a client which makes its own unreadable fails, and stops nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fl_engine.core.errors import EnvironmentFailure
from fl_engine.core.types import ClientUpdate, RoundPlan, SubmodelSpec, WorkOrder
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import key_of, manifest_bytes
from fl_engine.exchange.updates import payload_bytes
from fl_engine.remote.messages import Assignment
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.urls import Verb

PLAN = RoundPlan(0, tuple(WorkOrder(0, client, SubmodelSpec(), {"w": torch.zeros(4)}, client, 0) for client in (0, 1)))


LEASE = "11" * 8


@pytest.mark.parametrize("verb", ["POST", "PUT"])
def test_a_pods_answer_arrives_either_way(server: str, verb: Verb, tmp_path: Path) -> None:
    """By PUT at the one length that was signed, however much shorter it is."""
    store, order = S3Store(f"s3://runs/{tmp_path.name}"), PLAN.orders[1]
    ledger, key = Mailbox(store, key=key_of(b"secret"), lease=LEASE), key_of(b"secret")(order)
    keys = dict(zip(ledger.outcome_keys(0, 1), (payload_bytes(order), manifest_bytes(order)), strict=True))
    writes = {name: store.upload(name, size, 60, verb) for name, size in keys.items()}
    told = Assignment(round=0, clients=(1,), writes=writes)
    pod = Mailbox(told.open(), key=lambda _: key, lengths=told.lengths, lease=LEASE)
    pod.put_outcome(PLAN, ClientUpdate(0, 1, order.spec, {"w": torch.arange(4.0)}, 1, {}))
    found = ledger.receive(PLAN, 1)
    assert isinstance(found, ClientUpdate) and found.payload["w"].tolist() == [0, 1, 2, 3]
    sizes = {name: len(store.get(name)) for name in keys}
    assert sizes == keys if verb == "PUT" else all(sizes[name] < keys[name] for name in keys)


def test_server_that_refuses_all_is_an_environment_failure(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if server == "moto":
        pytest.skip("moto takes any secret")
    store = S3Store(f"s3://runs/{tmp_path.name}")
    Mailbox(store, key=key_of(b"secret")).put_outcome(
        PLAN, ClientUpdate(0, 1, SubmodelSpec(), {"w": torch.ones(4)}, 1, {})
    )
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "revoked")
    with pytest.raises(EnvironmentFailure, match="SignatureDoesNotMatch"):
        Mailbox(S3Store(store.uri()), key=key_of(b"secret")).receive(PLAN, 1)
