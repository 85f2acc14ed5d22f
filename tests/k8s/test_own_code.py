"""`run.code` in pods: the wheel of the run is verified before it is imported, and its owner's word counts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_engine.core.allowed import ALLOWED
from fl_engine.core.errors import ClientError, IntegrityError
from fl_engine.core.types import RoundPlan, SubmodelSpec, WorkOrder
from fl_engine.exchange import code
from fl_engine.exchange.assignment import SITE_FILES, Assignment
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.storage.places import open_store
from fl_engine.storage.store import MemoryStore, Store, check_size
from fl_engine.storage.sums import sum_of
from fl_engine.testing.own_package import SETS, write
from fl_engine.training.numerics import flushes_now
from flexfleet.files.artifacts import RunFile
from flexfleet.steps.answer import answer, carry_out_all, prepared
from flexfleet.steps.federate import federate
from flexfleet.steps.model_pool import model_pool
from flexfleet.steps.prepare import Resolved

Remote = tuple[str, ...]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    code.disable()


@pytest.fixture
def sets(tiny: tuple[str, ...], tmp_path: Path) -> tuple[str, ...]:
    return (*tiny, *SETS, f"run.code={write(tmp_path / 'source')}")


@pytest.fixture
def run(sets: tuple[str, ...], prepared: Path, tmp_path: Path) -> Callable[..., Path]:
    def started(name: str, *more: str) -> Path:
        resolved, pool, out = Resolved.load(None, (*sets, *more)), tmp_path / "pool", tmp_path / "runs" / name
        model_pool(resolved, prepared / "pretrain", pool)
        federate(resolved, prepared / "partition", pool, out, run_id=name)
        return out

    return started


def owned_by(cluster: Any, allowed: str) -> None:
    """The owner of the cluster's devices allows these hashes."""
    began = cluster.start
    cluster.start = lambda command, env, log: began(command, {**env, ALLOWED: allowed}, log)


def store_of(remote: Remote, name: str) -> Store:
    return open_store(f"{remote[1].partition('=')[2]}/{name}")


def test_pods_import_the_wheel_of_the_run(
    cluster: Any, run: Callable[..., Path], remote: Remote, tmp_path: Path
) -> None:
    """New interpreters, in another folder, where no such package is."""
    cluster.python = sys.executable
    alone = run("alone")
    digest = RunFile.read(alone / "run.json").code_sha256
    assert digest is not None
    owned_by(cluster, f"{'0' * 64},{digest}")
    pods = run("pods", *remote)
    assert (pods / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()
    store = store_of(remote, "pods")
    assert store.get(code.store_key(digest)) == code.pack(tmp_path / "source" / "theirs23").value
    assert RunFile.of(store.get("site/run.json"), "run.json").code_sha256 == digest


@pytest.fixture
def told(
    quick_cluster: Any, run: Callable[..., Path], remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Assignment]:
    """The assignment of a pod of a finished run, whose store is as it was when the pod began."""
    seen: list[Assignment] = []
    read = Assignment.read

    def noted(path: Path) -> Assignment:
        seen.append(read(path))
        return seen[-1]

    monkeypatch.setattr(Assignment, "read", staticmethod(noted))
    run("pods", *remote)
    code.disable()
    yield seen[0]


class Tampered:
    """A store that gives another wheel."""

    def __init__(self, inner: Store, change: Callable[[str, bytes], bytes]) -> None:
        self.inner, self.change = inner, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def get(self, key: str, limit: int | None = None) -> bytes:
        value = self.change(key, self.inner.get(key))
        check_size(key, len(value), limit)
        return value


def flipped(key: str, value: bytes) -> bytes:
    return value[:-1] + bytes([value[-1] ^ 1]) if key.endswith(".whl") else value


def test_a_tampered_wheel_is_refused_by_name(told: Assignment, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = told.open()
    monkeypatch.setattr(Assignment, "open", lambda self: Tampered(opened, flipped))
    with pytest.raises(IntegrityError, match=f"code/{told.code}.whl is damaged: its sha256 is"):
        answer(told)
    assert not code.enabled(str(told.code))


def test_a_wheel_that_the_coordinator_did_not_sign_is_refused(told: Assignment) -> None:
    for wrong in ({"code_signature": None}, {"code_signature": "0" * 64}, {"round": told.round + 1}):
        with pytest.raises(ClientError, match=f"the code {told.code} is not signed by the coordinator"):
            answer(told.model_copy(update=wrong))
    with pytest.raises(ClientError, match=f"told of the code None, and the run's record names {told.code}"):
        answer(told.model_copy(update={"code": None}))
    other = "0" * 64
    with pytest.raises(ClientError, match=f"told of the code {other}, and the run's record names {told.code}"):
        answer(told.model_copy(update={"code": other}))
    assert not code.enabled(str(told.code))


def test_a_pod_counts_denormal_numbers_as_zero(told: Assignment) -> None:
    torch.set_flush_denormal(False)  # as in a new process
    prepared(told, told.open())
    code.disable()
    assert flushes_now()


def test_who_can_write_the_store_alone_makes_no_pod_import_anything(
    told: Assignment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file that a pod is told of is the coordinator's, to the bit."""
    (tmp_path / "installed_here.py").write_text("raise SystemExit('it was imported')\n")
    monkeypatch.syspath_prepend(tmp_path)

    def changed(name: str, key: str, value: bytes) -> bytes:
        if key != f"site/{name}":
            return value
        if name != "run.json":
            return value[:-1] + b" "
        run = json.loads(value)
        run["config"]["model"]["name"] = "installed_here:Net"
        return json.dumps(run).encode().ljust(len(value))[: len(value)]

    for name in SITE_FILES:
        store: Any = Tampered(told.open(), partial(changed, name))
        with pytest.raises(IntegrityError, match=f"site/{name} is not what the coordinator wrote"):
            prepared(told, store)
        with pytest.raises(IntegrityError, match=r"site/run.json: the coordinator has not told its sha256"):
            prepared(told.model_copy(update={"site": {}}), store)


def test_who_can_write_the_store_alone_has_no_pod_read_more_than_the_coordinator_wrote(told: Assignment) -> None:
    """Files of any size would fill a small device's memory, before their sha256 is known."""
    longer: Any = Tampered(told.open(), lambda key, value: value + bytes(1) if key == f"site/{name}" else value)
    for name in SITE_FILES:
        size = len(told.open().get(f"site/{name}")) + 1
        said = (
            rf"site/{name} is not what the coordinator wrote: site/{name} holds {size} bytes, at most .* resume the run"
        )
        with pytest.raises(IntegrityError, match=said):
            prepared(told, longer)
    store = MemoryStore()
    mailbox = Mailbox(store)
    (keys,) = mailbox.put_orders(RoundPlan(told.round, (order_of(told),))).values()
    mine = told.model_copy(update={"clients": told.clients[:1], "orders": mailbox.order_sums, "evaluates": False})
    site = prepared(told, told.open())
    for key in keys:
        longer = Tampered(store, lambda at, value: value + bytes(1) if at == key else value)  # noqa: B023
        with pytest.raises(IntegrityError, match=rf"{key} holds {len(store.get(key)) + 1} bytes, at most"):
            carry_out_all(mine, longer, *site)


def order_of(told: Assignment) -> WorkOrder:
    spec, payload = SubmodelSpec.of({}), {"w": torch.zeros(2)}
    return WorkOrder(told.round, told.clients[0], spec, payload, seed=1, level=0, hints={"said": "a" * 200})


def test_who_can_write_the_store_alone_changes_no_order(
    told: Assignment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An order names a codec, and with it what is imported; and the weights that its client starts from."""
    (tmp_path / "installed_here.py").write_text("raise SystemExit('it was imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    store = MemoryStore()
    mailbox, work = Mailbox(store), order_of(told)
    ((key, *_),) = mailbox.put_orders(RoundPlan(told.round, (work,))).values()
    mine = told.model_copy(update={"clients": told.clients[:1], "orders": mailbox.order_sums, "evaluates": False})
    codecs = {"down": {"name": "installed_here:X"}, "up": {"name": "half"}}
    order = json.dumps(json.loads(store.get(key)) | {"codecs": codecs, "hints": {}}).encode()
    store.put(key, order.ljust(len(store.get(key))))
    with pytest.raises(IntegrityError, match="is not what the coordinator wrote"):
        carry_out_all(mine, store, *prepared(told, told.open()))


def test_device_imports_no_package_that_a_configuration_names(
    told: Assignment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator itself names it. A pod of its own cluster imports it."""
    (tmp_path / "installed_here.py").write_text("Net = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    run = json.loads(told.open().get("site/run.json"))
    run["config"]["model"] = {"name": "installed_here:Net"}
    value = json.dumps(run).encode()
    store: Any = Tampered(told.open(), lambda key, had: value if key == "site/run.json" else had)
    named = told.model_copy(update={"site": told.site | {"run.json": sum_of(value)}})
    with pytest.raises(ClientError):
        prepared(named, store)
    assert "installed_here" not in sys.modules
    with pytest.raises(ClientError):
        prepared(named, store, in_cluster=True)
    assert sys.modules.pop("installed_here").Net == 1


def test_an_owner_who_allows_nothing_is_obeyed(told: Assignment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOWED, "none")
    with pytest.raises(ClientError, match=rf"the code {told.code} is not allowed on this device \({ALLOWED} = none"):
        answer(told)
    assert not code.enabled(str(told.code))
