"""The run store: a write is whole or not there, and durable when it returns."""

from __future__ import annotations

import os
import posix
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.core.errors import IntegrityError, TooLarge
from fl_engine.storage.store import FolderStore, decode, encode

SIZE = 1 << 20


def test_get_reads_no_more_than_the_limit(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.put("a", b"x" * 10)
    assert store.get("a", 10) == b"x" * 10
    with pytest.raises(TooLarge):
        store.get("a", 9)


def test_folder_removed_during_a_write_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, removed = os.open, list[str]()

    def open_late(path: str, *given: int) -> int:
        if str(path).endswith(".part") and len(removed) < 2:
            removed.append(path)
            Path(path).parent.rmdir()
        return opened(path, *given)

    monkeypatch.setattr(os, "open", open_late)
    FolderStore(tmp_path).put("states/a", b"x")
    assert len(removed) == 2 and FolderStore(tmp_path).get("states/a") == b"x"


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(("put", "delete")), st.sampled_from(("a", "b/a", "b/c/a", "b/c/d")), st.binary()),
        max_size=20,
    )
)
def test_a_folder_store_is_a_mapping(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, str, bytes]]
) -> None:
    root, model = tmp_path_factory.mktemp("store"), dict[str, bytes]()
    store = FolderStore(root / "new")
    for operation, key, value in operations:
        if operation == "put":
            store.put(key, value)
            model[key] = value
        else:
            store.delete(key)
            model.pop(key, None)
    assert {key: store.get(key) for key in store.list("")} == model
    for prefix in ("", "a", "b", "b/", "b/c", "b/c/a", "no/", "no"):
        assert store.list(prefix) == sorted(key for key in model if key.startswith(prefix))
    folders = {path.relative_to(store.root).as_posix() for path in store.root.rglob("*") if path.is_dir()}
    assert folders == {str(parent) for key in model for parent in Path(key).parents} - {"."}, "no empty folder is left"


def test_a_reader_never_sees_a_part(tmp_path: Path) -> None:
    store, done = FolderStore(tmp_path), threading.Event()
    store.put("key", b"a" * SIZE)

    def write() -> None:
        for i in range(40):
            store.put("key", b"ab"[i % 2 : i % 2 + 1] * SIZE)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        value = store.get("key")
        assert len(value) == SIZE
        assert value == value[:1] * SIZE
        assert store.list("") == ["key"]
        seen.add(value[:1])
    writer.join()
    assert seen == {b"a", b"b"}


def test_a_write_is_durable_when_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str]] = []
    fsync, replace = posix.fsync, os.replace  # the real one, which other tests go without

    def recorded_fsync(fd: int) -> None:
        events.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def recorded_replace(source: Path, target: Path) -> None:
        events.append(("replace", str(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    store = FolderStore(tmp_path.resolve())
    store.put("key", b"x")
    assert [what for what, _ in events] == ["fsync", "replace", "fsync"]
    assert events[1:] == [("replace", str(store.root / "key")), ("fsync", str(store.root))]

    # A folder that is new is itself an entry of its parent; without it the file is not there after a power cut.
    events.clear()
    store.put("rounds/00000/key", b"x")
    synced = {path for what, path in events if what == "fsync"}
    assert {str(store.root / "rounds" / "00000"), str(store.root / "rounds"), str(store.root)} <= synced


@pytest.mark.parametrize("keep", [0, 4, 8, 40, -1])
def test_truncated_tensors_name_their_file(keep: int) -> None:
    value = encode({"a": torch.arange(30.0)})
    with pytest.raises(IntegrityError, match=r"rounds/00003/state\.safetensors"):
        decode(value[:keep], "rounds/00003/state.safetensors")
