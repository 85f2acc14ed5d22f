"""A pod's worker: its checks before an assignment, its memory, and its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_engine.algorithms import FlexFL
from fl_engine.core.allowed import ALLOWED
from fl_engine.core.errors import ClientError, IntegrityError
from fl_engine.core.types import RoundPlan, SubmodelSpec, WorkOrder
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.remote.messages import SITE_FILES, Assignment, Lease
from fl_engine.storage import code
from fl_engine.storage.run_files import sum_of
from fl_engine.storage.s3 import open_store
from fl_engine.storage.store import MemoryStore, Store, check_size
from fl_engine.testing.tiny import tiny_site
from fl_engine.training import memory
from fl_engine.training.memory import Peaks
from fl_engine.training.numerics import SINGLE, Numerics
from flexfleet.files.artifacts import RunFile
from flexfleet.pipeline.federate import federate
from flexfleet.pipeline.model_pool import model_pool
from flexfleet.pipeline.prepare import Resolved
from flexfleet.worker import __main__ as program
from flexfleet.worker import execute as execution
from flexfleet.worker import server
from flexfleet.worker.execute import Prepared, execute, prepare
from tests.harness.own_package import SETS, write
from tests.k8s.pods import Pod, Remote, model

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _imports_as_before() -> Iterator[None]:
    yield
    code.disable()


@pytest.fixture
def run(tiny: tuple[str, ...], prepared: Path, tmp_path: Path) -> Callable[..., Path]:
    """A run with code of its own."""
    sets = (*tiny, *SETS, f"run.code={write(tmp_path / 'source')}")

    def started(name: str, *more: str) -> Path:
        resolved, pool, out = Resolved.load(None, (*sets, *more)), tmp_path / "pool", tmp_path / "runs" / name
        model_pool(resolved, prepared / "pretrain", pool)
        federate(resolved, prepared / "partition", pool, out, run_id=name)
        return out

    return started


@pytest.fixture
def given(pods: type[Pod], run: Callable[..., Path], remote: Remote, monkeypatch: pytest.MonkeyPatch) -> Assignment:
    """The assignment of a pod of a finished run, whose store still has the site."""
    seen = list[Assignment]()
    pods.at_work = staticmethod(lambda pod, given: seen.append(given))
    run("pods", *remote)
    code.disable()
    monkeypatch.delenv("FLEXFLEET_DATA", raising=False)
    return seen[0]


class Tampered:
    """A store that returns other bytes."""

    def __init__(self, inner: Store, change: Callable[[str, bytes], bytes]) -> None:
        self.inner, self.change = inner, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def get(self, key: str, limit: int | None = None) -> bytes:
        value = self.change(key, self.inner.get(key))
        check_size(key, len(value), limit)
        return value


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is installed here and ends whoever imports it."""
    (tmp_path / "installed_here.py").write_text("raise SystemExit('it was imported')\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_pods_import_the_wheel_of_the_run(
    cluster: Any, run: Callable[..., Path], remote: Remote, tmp_path: Path
) -> None:
    """New interpreters in another folder. The owner of the devices allows this wheel."""
    alone = run("alone")
    digest = RunFile.read(alone / "run.json").code_sha256
    assert digest is not None
    cluster.python, began = sys.executable, cluster.start
    cluster.start = lambda command, env, log: began(command, {**env, ALLOWED: f"{'0' * 64},{digest}"}, log)
    assert model(run("pods", *remote)) == model(alone)
    store = open_store(f"{remote[1].partition('=')[2]}/pods")
    assert store.get(code.store_key(digest)) == code.pack(tmp_path / "source" / "theirs23").value


def test_wheel_that_is_not_the_assigned_one_is_not_imported(given: Assignment, monkeypatch: pytest.MonkeyPatch) -> None:
    def flipped(key: str, value: bytes) -> bytes:
        return value[:-1] + bytes([value[-1] ^ 1]) if key.endswith(".whl") else value

    store: Any = Tampered(given.open(), flipped)
    with pytest.raises(IntegrityError, match=f"code/{given.code}.whl"):
        prepare(given, store, True)
    for other in (None, "0" * 64):
        with pytest.raises(ClientError):
            prepare(given.model_copy(update={"code": other}), given.open(), True)
    monkeypatch.setenv(ALLOWED, "none")
    with pytest.raises(ClientError, match=ALLOWED):
        prepare(given, given.open(), True)
    assert not code.enabled(str(given.code))


def test_package_of_the_configuration_is_imported_by_pods_only(
    given: Assignment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "installed_here.py").write_text("Net = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assignment, store = lied(given, {"model": {"name": "installed_here:Net"}})
    for pod in (False, True):
        with pytest.raises(ClientError):
            prepare(assignment.model_copy(update={"code": assignment.code if pod else None}), store, pod)
        assert ("installed_here" in sys.modules) is pod
    del sys.modules["installed_here"]


def test_tampered_site_is_refused(given: Assignment, trap: None) -> None:
    """Each file has a sum of the coordinator, which limits its length too."""

    def changed(name: str, more: bytes, key: str, value: bytes) -> bytes:
        if key != f"site/{name}":
            return value
        if name != "run.json" or more:
            return value[:-1] + b" " + more
        run = json.loads(value)
        run["config"]["model"]["name"] = "installed_here:Net"
        return json.dumps(run).encode().ljust(len(value))[: len(value)]

    for name in SITE_FILES:
        for more in (b"", b"\0"):
            store: Any = Tampered(given.open(), partial(changed, name, more))
            with pytest.raises(IntegrityError, match=f"site/{name}"):
                prepare(given, store, True)
    with pytest.raises(IntegrityError, match=r"site/run\.json"):
        prepare(given.model_copy(update={"site": {}}), given.open(), True)


def test_tampered_order_is_refused(given: Assignment, trap: None) -> None:
    """An assignment names a codec, which is imported, and the weights."""
    store, hints = MemoryStore(), {"said": "a" * 200}
    work = WorkOrder(given.round, given.clients[0], SubmodelSpec.of({}), {"w": torch.zeros(2)}, 1, 0, hints=hints)
    mailbox = Mailbox(store)
    ((key, *others),) = mailbox.put_orders(RoundPlan(given.round, (work,))).values()
    mine = given.model_copy(update={"clients": given.clients[:1], "orders": mailbox.order_sums})
    lease, prepared = Lease(id="ab" * 8, seconds=60, assignment=mine), prepare(given, given.open(), True)
    codecs = {"down": {"name": "installed_here:X"}, "up": {"name": "half"}}
    order = json.dumps(json.loads(store.get(key)) | {"codecs": codecs, "hints": {}}).encode()
    changes = {key: order.ljust(len(store.get(key)))} | {name: store.get(name) + b"\0" for name in (key, *others)}
    for name, value in [(key, order.ljust(len(store.get(key)))), *changes.items()]:
        tampered: Any = Tampered(store, lambda at, had: value if at == name else had)  # noqa: B023
        with pytest.raises(IntegrityError):
            execute(lease, "ab" * 32, "site", tampered, prepared, lambda base: 0)


@dataclass
class Listener:
    """Counts the connections to it, and closes them."""

    address: str
    connections: list[object] = field(default_factory=list)


@pytest.fixture
def evil() -> Iterator[Listener]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = Listener(f"127.0.0.1:{server.getsockname()[1]}")

        def listen() -> None:
            while True:
                try:
                    connection, peer = server.accept()
                except OSError:
                    return
                found.connections.append(peer)
                connection.close()

        threading.Thread(target=listen, daemon=True).start()
        yield found
        server.shutdown(socket.SHUT_RDWR)


def lied(given: Assignment, lies: dict[str, dict[str, Any]]) -> tuple[Assignment, Store]:
    """Return an assignment of a coordinator that has written `lies` into its run's configuration."""
    run = json.loads(given.open().get("site/run.json"))
    for section, values in lies.items():
        run["config"][section] |= values
    value = json.dumps(run).encode()
    store: Any = Tampered(given.open(), lambda key, had: value if key == "site/run.json" else had)
    return given.model_copy(update={"site": {**given.site, "run.json": sum_of(value)}}), store


def test_worker_calls_no_address_of_the_configuration(
    given: Assignment, evil: Listener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pointer = tmp_path / "data.dvc"
    pointer.write_text("outs: [{md5: 0123456789abcdef0123456789abcdef, path: data}]")
    for root in (f"http://{evil.address}/repo@main:data", f"git://{evil.address}/repo@main:data", str(pointer)):
        with pytest.raises(ClientError, match=r"^dataset\.root"):
            prepare(*lied(given, {"dataset": {"root": root}}), True)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{evil.address}")
    lies = {
        "model": {"init": f"http://{evil.address}/model.safetensors"},
        "tracking": {"mlflow": f"http://{evil.address}"},
        "publish": {"dvc": "s3://evil/dvc", "models": True},
        "tune": {"storage": f"postgresql://{evil.address}/study"},
        "run": {"remote": "s3://evil/runs", "secrets": "s3://other/keys"},
        "agents": {"endpoint": f"http://{evil.address}"},
        "kubernetes": {"endpoint": f"http://{evil.address}", "image": f"{evil.address}/image"},
    }
    prepare(*lied(given, lies), True)
    assert evil.connections == []


@pytest.mark.parametrize(
    ("numerics", "turns"),
    [(SINGLE, (1, 1, 1, 1)), (Numerics("batched", 3), (3, 1)), (Numerics("batched", 64), (4,))],
)
def test_orders_side_by_side_share_the_free_memory(
    numerics: Numerics, turns: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting assignments hold no memory that is not counted."""
    peaks, site = Peaks(10, (20, 30, 40, 50, 60)), replace(tiny_site(FlexFL()), numerics=numerics)
    given = Assignment(round=0, clients=(5, 1, 2, 8), observe="cgroup", memory=peaks)
    rooms, trained = [100, 60, 31, 7], list[tuple[tuple[int, ...], float | None]]()

    def train(given: Assignment) -> None:
        looks = iter(rooms)
        lease, all_of = Lease(id="ab" * 8, seconds=60, assignment=given), Prepared(FlexFL(), site, "")
        execute(lease, "ab" * 32, "site", MemoryStore(), all_of, lambda base: next(looks) if base == 10 else 0)

    monkeypatch.setattr(
        execution, "carry_out", lambda _a, site, _b, _r, clients, *_, **__: trained.append((clients, site.free))
    )
    train(given)
    assert [client for clients, _ in trained for client in clients] == [5, 1, 2, 8]
    assert [(len(clients), free) for clients, free in trained] == [
        (count, memory.free(room // count, peaks, site.pool)) for room, count in zip(rooms, turns, strict=False)
    ]
    trained.clear()
    train(given.model_copy(update={"observe": "simulated"}))
    assert trained == [((5, 1, 2, 8), None)], "what several are sent is read once"
    for wrong in (None, Peaks(10, (15, 20))):
        with pytest.raises(ClientError):
            train(given.model_copy(update={"memory": wrong}))


def test_worker_that_imports_torch_ends_at_sigterm(tmp_path: Path) -> None:
    """The first process of a container must handle SIGTERM itself. Importing torch never ends here."""
    (tmp_path / "torch.py").write_text("import time\nprint('importing torch', flush=True)\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "flexfleet.worker", f"--invite={tmp_path / 'none.json'}"]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "importing torch\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 143
        finally:
            process.kill()


@pytest.mark.parametrize("error", [ClientError, IntegrityError])
def test_reason_of_the_end_is_where_kubernetes_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def ends(_: Any) -> int:
        raise error("x" * 5000)

    monkeypatch.setenv("FLEXFLEET_TERMINATION_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(server, "run", ends)
    with pytest.raises(error):
        program.main(["--invite=none"])
    assert set((tmp_path / "log").read_text()) == {"x"} and (tmp_path / "log").stat().st_size <= 4096
