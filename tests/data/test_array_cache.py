"""The array cache is written once, and again if an input or the reader has changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fl_engine.core.errors import DataError
from fl_engine.data.array_files import cached


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
    return cached(reader.inputs[0].parent / "packed", version, reader.inputs, reader)


def test_files_are_read_once(reader: Reader) -> None:
    first, second = load(reader), load(reader)
    assert reader.times == 1
    assert bytes(first["x"].tolist()) == b"aaaaabbbbb" and first["y"].tolist() == [5, 5]
    assert all(torch.equal(first[name], second[name]) for name in "xy")


CHANGES: dict[str, Callable[[Path], object]] = {
    "an input of the same length and time": lambda root: (
        times := (root / "a.txt").stat(),
        (root / "a.txt").write_text("c" * 5),
        os.utime(root / "a.txt", ns=(times.st_atime_ns, times.st_mtime_ns)),
    ),
    "no index": lambda root: (root / "packed" / "pack.json").unlink(),
    "a damaged index": lambda root: (root / "packed" / "pack.json").write_text("{"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_files_are_read_again_after_a_change(reader: Reader, tmp_path: Path, change: Callable[[Path], object]) -> None:
    load(reader)
    change(tmp_path)
    found = load(reader)
    assert reader.times == 2
    assert bytes(found["x"].tolist()) == b"".join(path.read_bytes() for path in reader.inputs)
    load(reader)
    assert reader.times == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt", "packed"]


def test_another_version_of_the_reader_reads_again(reader: Reader) -> None:
    load(reader)
    load(reader, version=2)
    assert reader.times == 2


def test_changes_in_memory_do_not_reach_the_files(reader: Reader) -> None:
    load(reader)["x"].zero_()
    assert bytes(load(reader)["x"].tolist()) == b"aaaaabbbbb"
    assert reader.times == 1


def test_failed_reader_leaves_no_files(reader: Reader, tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        reader(folder)
        raise DataError("damaged")

    with pytest.raises(DataError):
        cached(tmp_path / "packed", 1, reader.inputs, fails)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt"]


def test_folder_that_cannot_be_written_is_read_every_time(reader: Reader, tmp_path: Path) -> None:
    folder = tmp_path / "a.txt" / "packed"  # below a file
    found = [cached(folder, 1, reader.inputs, reader) for _ in range(2)]
    assert reader.times == 2 and bytes(found[0]["x"].tolist()) == b"aaaaabbbbb"
