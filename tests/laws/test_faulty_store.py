"""A store that fails at any moment: the run stops with the cause and how to go on, and going on changes no bit."""

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
    """Passes everything on to `inner`, but for its n-th operation, of which it makes what `fail` says."""

    def __init__(self, inner: Store, operations: int, fail: Callable[[Callable[[], Any]], Any]) -> None:
        self.inner = inner
        self.left = operations
        self.fail = fail

    def _do(self, act: Callable[[], Any]) -> Any:
        self.left -= 1
        return self.fail(act) if self.left == -1 else act()

    def put(self, key: str, value: bytes) -> None:
        self._do(lambda: self.inner.put(key, value))

    def create(self, key: str, value: bytes) -> bool:
        return bool(self._do(lambda: self.inner.create(key, value)))

    def get(self, key: str, limit: int | None = None) -> bytes:
        return bytes(self._do(lambda: self.inner.get(key, limit)))

    def list(self, prefix: str) -> list[str]:
        return list(self._do(lambda: self.inner.list(prefix)))

    def delete(self, *keys: str) -> None:
        self._do(lambda: self.inner.delete(*keys))

    def sweep(self, prefix: str) -> None:
        self._do(lambda: self.inner.sweep(prefix))

    def uri(self, key: str = "") -> str:
        return self.inner.uri(key)


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
            assert "does not answer. What was committed stays: mend the cause, then go on with --resume" in str(error)
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
            assert "No space left on device. What was committed stays" in str(error)
        assert not list(store.root.rglob("*.part")), "what could not be written whole takes no room"
        full_disk[0] = 10**9
        assert job.federate(store, **MODE) == undisturbed[0], f"full at write {writes}"
        assert timeless(store) == undisturbed[1], f"full at write {writes}"
    assert writes > 30


def test_a_folder_that_may_not_be_written_is_named(job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "replace", denied)
    with pytest.raises(EnvironmentFailure, match=rf"{tmp_path}/rounds/00000/.*: Permission denied\. What was comm"):
        job.federate(FolderStore(tmp_path), **MODE)
