"""The array cache is written once, and again if an input, the reader or an array has changed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fl_engine.core.errors import DataError
from fl_engine.data import array_cache
from fl_engine.data.array_cache import packed


class Reader:
    """Counts how often it reads: `x` are the bytes of all inputs, `y` their lengths."""

    def __init__(self, *inputs: Path) -> None:
        self.inputs, self.times = inputs, 0

    def __call__(self, folder: Path) -> None:
        self.times += 1
        contents = [path.read_bytes() for path in self.inputs]
        np.save(folder / "x.npy", np.frombuffer(b"".join(contents), dtype=np.uint8))
        np.save(folder / "y.npy", np.array([len(content) for content in contents]))


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 5)
    return Reader(tmp_path / "a.txt", tmp_path / "b.txt")


def load(reader: Reader, version: int = 1) -> dict[str, torch.Tensor]:
    return packed(reader.inputs[0].parent / "packed", version, reader.inputs, reader)


def test_it_is_read_once(reader: Reader) -> None:
    first, second = load(reader), load(reader)
    assert reader.times == 1
    assert bytes(first["x"].tolist()) == b"aaaaabbbbb" and first["y"].tolist() == [5, 5]
    assert all(torch.equal(first[name], second[name]) for name in "xy")


def test_files_that_nobody_wrote_to_are_not_read_again(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    load(reader)
    digests: list[Path] = []
    whole = array_cache.digest
    monkeypatch.setattr(array_cache, "digest", lambda path: digests.append(path) or whole(path))
    load(reader)
    assert digests == []
    (touched := reader.inputs[0]).touch()
    load(reader)
    assert digests == [touched] and reader.times == 1, "another time alone makes nothing anew"


CHANGES: dict[str, Callable[[Path], object]] = {
    "an input of the same length and time": lambda root: (
        times := (root / "a.txt").stat(),
        (root / "a.txt").write_text("c" * 5),
        os.utime(root / "a.txt", ns=(times.st_atime_ns, times.st_mtime_ns)),
    ),
    "a byte of an array": lambda root: flip(root / "packed" / "x.npy", -1),
    "an array that is gone": lambda root: (root / "packed" / "y.npy").unlink(),
    "no index": lambda root: (root / "packed" / "pack.json").unlink(),
    "a damaged index": lambda root: (root / "packed" / "pack.json").write_text("{"),
}


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_it_is_read_anew_after_a_change(reader: Reader, tmp_path: Path, change: Callable[[Path], object]) -> None:
    load(reader)
    change(tmp_path)
    found = load(reader)
    assert reader.times == 2
    assert bytes(found["x"].tolist()) == b"".join(path.read_bytes() for path in reader.inputs)
    load(reader)
    assert reader.times == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt", "packed"]


def test_another_version_of_the_reader_reads_anew(reader: Reader) -> None:
    load(reader)
    load(reader, version=2)
    assert reader.times == 2


def test_what_is_changed_in_memory_stays_there(reader: Reader) -> None:
    load(reader)["x"].zero_()
    assert bytes(load(reader)["x"].tolist()) == b"aaaaabbbbb"
    assert reader.times == 1


def test_what_fails_keeps_nothing(reader: Reader, tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        reader(folder)
        raise DataError("damaged")

    with pytest.raises(DataError):
        packed(tmp_path / "packed", 1, reader.inputs, fails)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt"]


def test_an_input_that_changes_while_it_is_read_is_refused(reader: Reader, tmp_path: Path) -> None:
    """The files may still be being copied, so the arrays would mix old and new content."""

    def slow(folder: Path) -> None:
        (tmp_path / "a.txt").write_text("aaaaa and more")
        reader(folder)

    with pytest.raises(DataError):
        packed(tmp_path / "packed", 1, reader.inputs, slow)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt"]
    assert bytes(load(reader)["x"].tolist()) == b"aaaaa and morebbbbb"


def test_where_nothing_can_be_written_it_is_read_every_time(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mkdir = Path.mkdir

    def read_only(self: Path, *args: object, **more: object) -> None:
        if self.parent == tmp_path:
            raise OSError(30, "Read-only file system")
        mkdir(self, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", read_only)
    with caplog.at_level(logging.WARNING):
        found = [load(reader) for _ in range(2)]
    assert reader.times == 2 and "Read-only" in caplog.text
    assert bytes(found[0]["x"].tolist()) == b"aaaaabbbbb"

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError):
        packed(tmp_path / "packed", 1, reader.inputs, full)


def test_a_pack_behind_a_link_is_replaced_where_it_is(reader: Reader, tmp_path: Path) -> None:
    (tmp_path / "disk" / "mine").mkdir(parents=True)
    (tmp_path / "packed").symlink_to(tmp_path / "disk" / "mine")
    for version in (1, 2, 2):
        load(reader, version)
    assert reader.times == 2 and (tmp_path / "packed").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt", "disk", "packed"]
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["mine"]


def test_a_process_that_packs_at_the_same_time_does_no_harm(reader: Reader, tmp_path: Path) -> None:
    """It puts its own folder in place while this process is still at work."""

    def slow(folder: Path) -> None:
        load(reader)
        reader(folder)

    found = packed(tmp_path / "packed", 1, reader.inputs, slow)
    assert torch.equal(found["x"], load(reader)["x"]) and reader.times == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt", "packed"]
