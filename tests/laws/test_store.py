"""The run store: a write is whole or not there, and durable when it returns."""

from __future__ import annotations

import multiprocessing
import os
import posix
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.core.errors import EnvironmentFailure, IntegrityError, TooLarge
from fl_engine.storage.store import FolderStore, decode, encode

SIZE = 1 << 20


def test_put_then_get(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "not" / "there" / "yet")
    store.put("rounds/00000/state.json", b"{}")
    store.put("empty", b"")
    assert store.get("rounds/00000/state.json") == b"{}"
    assert store.get("empty") == b""
    store.put("empty", b"no more")
    assert store.get("empty") == b"no more"


def test_get_reads_no_more_than_the_limit(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.put("a", b"x" * 10)
    assert store.get("a", 10) == b"x" * 10
    with pytest.raises(TooLarge):
        store.get("a", 9)


def test_list_gives_sorted_keys_by_prefix(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    for key in ("rounds/00010/b", "rounds/00002/updates/3.json", "rounds/00002/a", "run.json"):
        store.put(key, b"x")
    assert store.list("rounds/") == ["rounds/00002/a", "rounds/00002/updates/3.json", "rounds/00010/b"]
    assert store.list("rounds/0000") == ["rounds/00002/a", "rounds/00002/updates/3.json"]
    assert store.list("rounds/00002/a") == ["rounds/00002/a"]
    assert store.list("ru") == ["run.json"]
    assert store.list("") == [*store.list("rounds/"), "run.json"]
    assert store.list("nothing/") == store.list("no") == []
    assert FolderStore(tmp_path / "nowhere").list("rounds/") == []


def test_delete_removes_a_file_and_the_folder_that_it_empties(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.put("rounds/00000/a", b"x")
    store.put("rounds/00000/b", b"x")
    store.delete("rounds/00000/a")
    assert store.list("") == ["rounds/00000/b"]
    store.delete("rounds/00000/b")
    assert store.list("") == []
    assert not (tmp_path / "rounds" / "00000").exists()
    assert tmp_path.is_dir()


def test_folder_removed_during_a_write_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by who deletes the last file in it at the same time."""
    opened, removed = os.open, list[str]()

    def open_late(path: str, *given: int) -> int:
        if str(path).endswith(".part") and len(removed) < 2:
            removed.append(path)
            Path(path).parent.rmdir()
        return opened(path, *given)

    monkeypatch.setattr(os, "open", open_late)
    FolderStore(tmp_path).put("states/a", b"x")
    assert len(removed) == 2 and FolderStore(tmp_path).get("states/a") == b"x"


def test_concurrent_writers_may_make_one_folder(tmp_path: Path) -> None:
    def put(round: int, client: int) -> None:
        FolderStore(tmp_path).put(f"rounds/{round}/updates/{client}", b"x")

    with ThreadPoolExecutor(8) as threads:
        for round in range(50):
            list(threads.map(put, [round] * 8, range(8)))
    assert len(FolderStore(tmp_path).list("rounds/")) == 400


@pytest.mark.parametrize("above", [False, True])
def test_what_is_no_folder_is_said(tmp_path: Path, above: bool) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"")
    for name in ("link", "file"):
        with pytest.raises(EnvironmentFailure, match=name):
            FolderStore(tmp_path).put(f"{name}/b/c" if above else f"{name}/c", b"x")


def test_a_folder_that_is_written_into_while_it_is_removed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, remove = FolderStore(tmp_path), Path.rmdir

    def rmdir(folder: Path) -> None:
        store.put("states/b", b"new")
        remove(folder)

    store.put("states/a", b"x")
    monkeypatch.setattr(Path, "rmdir", rmdir)
    store.delete("states/a")
    assert store.list("") == ["states/b"]


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
    store, model = FolderStore(tmp_path_factory.mktemp("store")), dict[str, bytes]()
    for operation, key, value in operations:
        if operation == "put":
            store.put(key, value)
            model[key] = value
        else:
            store.delete(key)
            model.pop(key, None)
    assert {key: store.get(key) for key in store.list("")} == model
    assert store.list("b/") == sorted(key for key in model if key.startswith("b/"))


# --------------------------------------------------------------------------------------- whole or not at all
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


class PowerCut(BaseException):
    pass


def test_a_kill_before_the_replacement_leaves_the_old_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path)
    store.put("folder/key", b"old")

    def cut(*_: object) -> None:
        raise PowerCut

    monkeypatch.setattr(os, "replace", cut)
    for key in ("folder/key", "folder/new"):
        with pytest.raises(PowerCut):
            store.put(key, b"new and longer")
    assert store.get("folder/key") == b"old"
    assert store.list("") == ["folder/key"]
    with pytest.raises(IntegrityError):
        store.get("folder/new")


def test_ctrl_c_within_a_write_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`flexfleet init` writes into a folder that nobody sweeps."""
    store = FolderStore(tmp_path)
    store.put("key", b"old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.put("key", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["key"] and store.get("key") == b"old"


def _put(root: Path, value: bytes) -> None:
    FolderStore(root).put("rounds/00000/state.safetensors", value)


def test_two_processes_may_put_the_same_key(tmp_path: Path) -> None:
    values = [bytes([65 + i]) * SIZE for i in range(2)]
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_put, args=(tmp_path, value)) for value in values for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert FolderStore(tmp_path).get("rounds/00000/state.safetensors") in values


def test_a_write_is_durable_when_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes before the name, then the folder that holds the name."""
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


# ---------------------------------------------------------------------------------------------------- tensors
def test_tensors_come_back_bit_for_bit() -> None:
    odd = torch.tensor([0.1, -0.0, float("inf"), float("nan"), 1e-45])
    whole = torch.arange(24.0).view(4, 6)
    # Prefix sub-models are views of the global model: a view must be stored as what it shows.
    tensors = {"odd": odd, "view": whole[:2, :3], "prefix": whole[:2], "count": torch.tensor(7), "half": odd.half()}
    back = decode(encode(tensors), "name")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert back[name].numpy().tobytes() == tensor.contiguous().numpy().tobytes()


@pytest.mark.parametrize("keep", [0, 4, 8, 40, -1])
def test_truncated_tensors_name_their_file(keep: int) -> None:
    value = encode({"a": torch.arange(30.0)})
    with pytest.raises(IntegrityError, match=r"rounds/00003/state\.safetensors"):
        decode(value[:keep], "rounds/00003/state.safetensors")
