"""A pod's answer on a real server; and that a client which makes its own unreadable fails, and stops nobody else."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3.session
import pytest
import torch

from fl_engine.core.errors import EnvironmentFailure
from fl_engine.core.types import ClientFailure, ClientUpdate, RoundPlan, SubmodelSpec, WorkOrder
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import key_of, manifest_bytes
from fl_engine.exchange.updates import payload_bytes
from fl_engine.remote.messages import Assignment
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.urls import Verb

PLAN = RoundPlan(0, tuple(WorkOrder(0, client, SubmodelSpec(), {"w": torch.zeros(4)}, client, 0) for client in (0, 1)))
GLACIER = {"Error": {"Code": "InvalidObjectState"}, "ResponseMetadata": {"HTTPStatusCode": 403}}

Trick = Callable[[Any, str, bytes, pytest.MonkeyPatch, S3Store], None]


def given_away(client: Any, key: str, value: bytes, patch: pytest.MonkeyPatch, store: S3Store) -> None:
    """Its ACL then lets a stranger read the ACL, and nobody the object."""
    given = ("--uid=stranger", "--display-name=stranger")
    subprocess.run(["radosgw-admin", "user", "create", *given], capture_output=True)
    client.put_object(Bucket="runs", Key=key, Body=value, GrantReadACP="id=stranger")


def encrypted(client: Any, key: str, value: bytes, patch: pytest.MonkeyPatch, store: S3Store) -> None:
    client.put_object(Bucket="runs", Key=key, Body=value, SSECustomerAlgorithm="AES256", SSECustomerKey=b"k" * 32)


def archived(client: Any, key: str, value: bytes, patch: pytest.MonkeyPatch, store: S3Store) -> None:
    """As Amazon answers for storage class GLACIER."""
    from botocore.exceptions import ClientError

    real = store._client.get_object

    def get_object(**given: Any) -> Any:
        if given["Key"] == key:
            raise ClientError(GLACIER, "GetObject")
        return real(**given)

    patch.setattr(store._client, "get_object", get_object)


LEASE = "11" * 8


@pytest.mark.parametrize("kind", ["json", "safetensors"])
@pytest.mark.parametrize("trick", [given_away, encrypted, archived])
def test_unreadable_object_is_its_clients_failure(
    server: str, trick: Trick, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if server == "moto" and trick is not archived:
        pytest.skip("moto gives every object to everybody")
    store = S3Store(f"s3://runs/{tmp_path.name}")
    ledger = Mailbox(store, key=key_of(b"secret"), lease=LEASE)
    ledger.open_round(PLAN)
    pod = Mailbox(store, key=key_of(b"secret"), lease=LEASE)
    for order in PLAN.orders:
        pod.put_outcome(PLAN, ClientUpdate(0, order.client, order.spec, {"w": torch.ones(4)}, 1, {}))
    key = f"rounds/00000/leases/{LEASE}/1.{kind}"
    whole = store.uri(key).removeprefix("s3://runs/")
    good, bad = (ledger.receive(PLAN, client) for client in (0, 1))
    assert isinstance(good, ClientUpdate) and isinstance(bad, ClientUpdate)
    client = boto3.session.Session(region_name="us-east-1").client("s3")
    trick(client, whole, store.get(key), monkeypatch, store)
    failed = ledger.receive(PLAN, 1)
    assert isinstance(failed, ClientFailure) and failed.stage == "validate"
    assert failed.reason.startswith("unreadable: ")
    assert [outcome.client for outcome in ledger.finished(PLAN)] == [0]
    # The coordinator says in its place that it failed, and tidies it away.
    ledger.put_outcome(PLAN, ClientFailure(0, 1, "validate", "unreadable"))
    store.delete(*store.list("rounds/"))
    assert store.list("") == []


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
