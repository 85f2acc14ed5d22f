"""A store that fails at any moment: the run stops with the cause, and a resumed run has the same bits."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import EnvironmentFailure, IntegrityError, Stopped
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.store import FolderStore, Store
from tests.harness.ledgers import after

MODE: dict[str, Any] = {"keep_updates": True, "stop": 3}
Rows = Callable[[Store], list[Any]]


@pytest.fixture(scope="module")
def undisturbed(job: Any, new_store: Callable[[], Store], timeless: Rows) -> tuple[bytes, list[Any]]:
    """The final model of a run whose store never fails, and what it measured."""
    store = new_store()
    return job.federate(store, **MODE), timeless(store)


class Failing:
    """Passes everything on to `inner`. `fail` executes the n-th operation."""

    def __init__(self, inner: Store, operations: int, fail: Callable[[Callable[[], Any]], Any]) -> None:
        self.inner, self.left, self.fail = inner, operations, fail

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)

        def operation(*args: Any) -> Any:
            self.left -= 1
            return self.fail(lambda: method(*args)) if self.left == -1 else method(*args)

        return method if name == "uri" else operation


def no_answer(act: Callable[[], Any]) -> Any:
    raise EnvironmentFailure("the server does not answer")


def lost_answer(act: Callable[[], Any]) -> Any:
    act()
    raise EnvironmentFailure("the server does not answer")


def half(act: Callable[[], Any]) -> Any:
    found = act()
    return found[: len(found) // 2] if isinstance(found, bytes | list) else found


@pytest.mark.parametrize("fail", [no_answer, lost_answer, half])
def test_run_reaches_the_same_bits_whichever_operation_fails(
    job: Any, new_store: Callable[[], Store], undisturbed: tuple[bytes, list[Any]], timeless: Rows,
    fail: Callable[[Callable[[], Any]], Any],
) -> None:  # fmt: skip
    stopped = 0
    for operations in range(1000):
        store = new_store()
        if fail is half:  # a run that begins reads no file
            with pytest.raises(Stopped):
                job.federate(store, after(4), **MODE)
        failing = Failing(store, operations, fail)
        try:
            assert job.federate(failing, **MODE) == undisturbed[0], f"operation {operations}"
        except EnvironmentFailure as error:
            stopped += 1
            assert "does not answer. Committed rounds are kept" in str(error)
        except IntegrityError as error:
            stopped += 1
            assert "memory/rounds/" in str(error) or "memory/metrics" in str(error)
        if failing.left >= 0:
            break
        good = Checkpoints(store).last_good()
        assert good == (Checkpoints(store).commits() or [None])[-1], "never a half-committed round"
        assert job.federate(store, **MODE) == undisturbed[0], f"operation {operations}"
        assert timeless(store) == undisturbed[1], f"operation {operations}"
    assert operations > 40 and stopped > 3


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    left, fsync = [10**9], os.fsync

    def filling(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", filling)
    return left


def test_a_full_disk_stops_the_run_and_leaves_no_half_file(
    job: Any, tmp_path: Path, undisturbed: tuple[bytes, list[Any]], timeless: Rows, full_disk: list[int]
) -> None:
    for writes in range(0, 1000, 3):
        store = FolderStore(tmp_path / str(writes))
        full_disk[0] = writes
        try:
            job.federate(store, **MODE)
            break
        except EnvironmentFailure as error:
            assert "No space left on device. Committed rounds are kept" in str(error)
        assert not list(store.root.rglob("*.part")), "what could not be written whole takes no room"
        full_disk[0] = 10**9
        assert job.federate(store, **MODE) == undisturbed[0], f"full at write {writes}"
        assert timeless(store) == undisturbed[1], f"full at write {writes}"
    assert writes > 30
