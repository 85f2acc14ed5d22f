"""A pod's worker: its checks before an assignment, its memory, and its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_engine.algorithms import FlexFL
from fl_engine.core.errors import BadInput, ClientError, ConfigError, IntegrityError
from fl_engine.core.types import Assignment, RoundPlan, SubmodelSpec
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.remote.messages import AssignmentMessage, Lease, site_files
from fl_engine.storage import code
from fl_engine.storage.run_files import sum_of
from fl_engine.storage.store import Store, check_size
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
from flexfleet.worker.execute import Prepared, execute, prepare
from tests.harness.own_package import SETS, write
from tests.harness.stores import MemoryStore
from tests.k8s.pods import Runs, model

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
def given(runs: Runs, run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> AssignmentMessage:
    """The assignment of a pod of a finished run, whose store still has the site."""
    seen = list[AssignmentMessage]()
    runs.at_work(lambda pod, given: seen.append(given))
    run("pods", *runs.remote)
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


def test_pods_import_the_wheel_of_the_run(in_processes: Runs, run: Callable[..., Path], tmp_path: Path) -> None:
    """New interpreters in another folder."""
    alone = run("alone")
    digest = RunFile.read(alone / "run.json").code_sha256
    assert digest is not None
    in_processes.cluster.python = sys.executable
    assert model(run("pods", *in_processes.remote)) == model(alone)
    assert in_processes.store("pods").get(code.store_key(digest)) == code.pack(tmp_path / "source" / "theirs23")


def test_package_of_the_configuration_is_imported_by_pods_only(
    given: AssignmentMessage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "installed_here.py").write_text("Net = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assignment, store = lied(given, {"model": {"name": "installed_here:Net"}})
    for pod in (False, True):
        with pytest.raises(BadInput if pod else ClientError):
            prepare(assignment.model_copy(update={"code": assignment.code if pod else None}), store, pod)
        assert ("installed_here" in sys.modules) is pod
    del sys.modules["installed_here"]


def test_tampered_site_is_refused(given: AssignmentMessage, trap: None) -> None:
    """Each file has a sum of the coordinator, which limits its length too."""

    def changed(name: str, more: bytes, key: str, value: bytes) -> bytes:
        if key != f"site/{name}":
            return value
        if name != "run.json" or more:
            return value[:-1] + b" " + more
        run = json.loads(value)
        run["config"]["model"]["name"] = "installed_here:Net"
        return json.dumps(run).encode().ljust(len(value))[: len(value)]

    for name in site_files(False):
        for more in (b"", b"\0"):
            store: Any = Tampered(given.open(), partial(changed, name, more))
            with pytest.raises(IntegrityError):
                prepare(given, store, True)
    with pytest.raises(IntegrityError):
        prepare(given.model_copy(update={"site": {}}), given.open(), True)


def test_tampered_assignment_is_refused(given: AssignmentMessage, trap: None) -> None:
    """An assignment names a codec, which is imported, and the weights."""
    store, hints = MemoryStore(), {"said": "a" * 200}
    work = Assignment(given.round, given.clients[0], SubmodelSpec.of({}), {"w": torch.zeros(2)}, 1, 0, hints=hints)
    mailbox = Mailbox(store)
    ((key, *others),) = mailbox.put_assignments(RoundPlan(given.round, (work,))).values()
    mine = given.model_copy(update={"clients": given.clients[:1], "assignments": mailbox.assignment_sums})
    lease, prepared = Lease(id="ab" * 8, seconds=60, assignment=mine), prepare(given, given.open(), True)
    codecs = {"down": {"name": "installed_here:X"}, "up": {"name": "half"}}
    assignment = json.dumps(json.loads(store.get(key)) | {"codecs": codecs, "hints": {}}).encode()
    changes = {key: assignment.ljust(len(store.get(key)))} | {name: store.get(name) + b"\0" for name in (key, *others)}
    for name, value in [(key, assignment.ljust(len(store.get(key)))), *changes.items()]:
        tampered: Any = Tampered(store, lambda at, had: value if at == name else had)  # noqa: B023
        with pytest.raises(IntegrityError):
            execute(lease, "ab" * 32, "site", tampered, prepared, lambda base: 0)


def lied(given: AssignmentMessage, lies: dict[str, dict[str, Any]]) -> tuple[AssignmentMessage, Store]:
    """Return an assignment of a coordinator that has written `lies` into its run's configuration."""
    run = json.loads(given.open().get("site/run.json"))
    for section, values in lies.items():
        run["config"][section] |= values
    value = json.dumps(run).encode()
    store: Any = Tampered(given.open(), lambda key, had: value if key == "site/run.json" else had)
    return given.model_copy(update={"site": {**given.site, "run.json": sum_of(value)}}), store


def test_worker_calls_no_address_of_the_configuration(
    given: AssignmentMessage, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{evil.getsockname()[1]}"
    for root in (f"http://{address}/repo@main:data", f"git://{address}/repo@main:data"):
        with pytest.raises(ClientError, match=r"^dataset\.root"):
            prepare(*lied(given, {"dataset": {"root": root}}), True)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{address}")
    lies = {
        "model": {"init": f"http://{address}/model.safetensors"},
        "tracking": {"mlflow": f"http://{address}"},
        "publish": {"dvc": "s3://evil/dvc", "models": True},
        "tune": {"storage": f"postgresql://{address}/study"},
        "run": {"remote": "s3://evil/runs", "secrets": "s3://other/keys"},
        "agents": {"endpoint": f"http://{address}"},
        "kubernetes": {"endpoint": f"http://{address}", "image": f"{address}/image"},
    }
    prepare(*lied(given, lies), True)
    evil.setblocking(False)
    with evil, pytest.raises(BlockingIOError):  # no connection waits
        evil.accept()


@pytest.mark.parametrize(
    ("numerics", "turns"),
    [(SINGLE, (1, 1, 1, 1)), (Numerics("batched", 3), (3, 1)), (Numerics("batched", 64), (4,))],
)
def test_assignments_side_by_side_share_the_free_memory(
    numerics: Numerics, turns: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting assignments hold no memory that is not counted."""
    peaks, site = Peaks(10, (20, 30, 40, 50, 60)), replace(tiny_site(FlexFL()), numerics=numerics)
    given = AssignmentMessage(round=0, clients=(5, 1, 2, 8), observe="cgroup", memory=peaks)
    rooms, trained = [100, 60, 31, 7], list[tuple[tuple[int, ...], float | None]]()

    def train(given: AssignmentMessage) -> None:
        looks = iter(rooms)
        lease, all_of = Lease(id="ab" * 8, seconds=60, assignment=given), Prepared(FlexFL(), site, "")
        execute(lease, "ab" * 32, "site", MemoryStore(), all_of, lambda base: next(looks) if base == 10 else 0)

    monkeypatch.setattr(
        execution, "_train", lambda prepared, _b, _g, clients: trained.append((clients, prepared.site.free))
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


def test_reason_of_the_end_is_where_kubernetes_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXFLEET_TERMINATION_LOG", str(tmp_path / "log"))
    with pytest.raises(ConfigError):
        program.main([f"--invite={'x' * 5000}"])
    assert (tmp_path / "log").read_text().startswith("--invite: xxx") and (tmp_path / "log").stat().st_size <= 4096
