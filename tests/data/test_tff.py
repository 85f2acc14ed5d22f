"""FEMNIST and Stack Overflow from HDF5 files in TensorFlow Federated's format."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_engine.core.errors import DataError
from fl_engine.data.downloads import RemoteFile
from fl_engine.datasets import tff
from fl_engine.tasks import NextToken
from tests.data.made import remote

h5py = pytest.importorskip("h5py", reason="h5py is not installed: pip install -e '.[hdf5]'")


def packed(files: tuple[str, ...], root: Path, archive: Path) -> RemoteFile:
    with tarfile.open(archive, "w:bz2") as tar:
        for file in files:
            tar.add(root / file, Path(file).name)
    return remote(archive, "sha256")


def put(file: Any, array: str, values: Any) -> None:
    del file[array]
    file[array] = values


# ----------------------------------------------------------------------------------------------------- FEMNIST
WRITERS = {"f3408_26": range(0, 31), "f0000_14": range(20, 62)}
"""Map each writer to its labels. Files list writers by name."""


def images(writer: str, count: int, part: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([part, *writer.encode()]).integers(0, 256, (count, 28, 28)).astype(np.uint8)


def write_femnist(root: Path, part: int, writers: dict[str, Any] = WRITERS, column: bool = False) -> Path:
    path = root / tff.FEMNIST_FILES[part]
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for writer, labels in writers.items():
            group = file.create_group(f"examples/{writer}")
            group["pixels"] = images(writer, len(labels), part).astype(np.float32) / np.float32(255)
            label = np.array(labels, dtype=np.int32)
            group["label"] = label[:, None] if column else label
    return path


@pytest.fixture
def femnist(tmp_path: Path) -> Path:
    for part in (0, 1):
        write_femnist(tmp_path, part)
    return tmp_path


def test_femnist_tff_reads_images_labels_and_writers(tmp_path: Path) -> None:
    for part in (0, 1):
        write_femnist(tmp_path, part, column=part == 1)
    data = tff.load_femnist(tmp_path)
    for part, (x, y) in enumerate(((data.train_x, data.train_y), (data.test_x, data.test_y))):
        assert y.tolist() == [*range(20, 62), *range(0, 31)], "f0000_14 comes first"
        assert np.array_equal(x[:42, 0], images("f0000_14", 42, part))
        assert np.array_equal(x[42:, 0], images("f3408_26", 31, part))
    assert data.natural_client is not None
    assert data.natural_client.tolist() == [0] * 42 + [1] * 31


BROKEN_FEMNIST: dict[str, Callable[[Any], object]] = {
    "no examples": lambda f: f.move("examples", "others"),
    "no writers": lambda f: (f.pop("examples"), f.create_group("examples")),
    "no label": lambda f: f["examples/f0000_14"].pop("label"),
    "a small image": lambda f: put(f, "examples/f0000_14/pixels", np.zeros((42, 28, 27), "f4")),
    "more than fits": lambda f: huge(f),
    "not a number": lambda f: put(f, "examples/f0000_14/pixels", np.full((42, 28, 28), np.nan, "f4")),
    "a label too few": lambda f: put(f, "examples/f0000_14/label", np.zeros(41, "i4")),
    "a label too high": lambda f: put(f, "examples/f0000_14/label", np.full(42, 62, "i4")),
    "another writer": lambda f: f.move("examples/f0000_14", "examples/x"),
}


def huge(file: Any) -> None:
    """Create a data set that declares a petabyte and occupies nothing."""
    del file["examples/f0000_14/pixels"]
    file.create_dataset("examples/f0000_14/pixels", (2**40, 28, 28), "f4", chunks=(1, 28, 28))


@pytest.mark.parametrize("how", BROKEN_FEMNIST.values(), ids=list(BROKEN_FEMNIST))
def test_femnist_tff_names_the_damaged_file(femnist: Path, how: Callable[[Any], object]) -> None:
    with h5py.File(femnist / tff.FEMNIST_FILES[1], "a") as file:
        how(file)
    with pytest.raises(DataError) as error:
        tff.load_femnist(femnist)
    assert "fed_emnist_test.h5" in str(error.value)


def test_femnist_tff_refuses_a_truncated_file(femnist: Path) -> None:
    path = femnist / tff.FEMNIST_FILES[1]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError):
        tff.load_femnist(femnist)


def test_femnist_tff_fetch_checks_and_unpacks_the_archive(femnist: Path, tmp_path: Path) -> None:
    archive = packed(tff.FEMNIST_FILES, femnist, tmp_path / "there.tar.bz2")
    tff.fetch_femnist(tmp_path / "copy", archive)
    assert torch.equal(tff.load_femnist(tmp_path / "copy").train_x, tff.load_femnist(femnist).train_x)
    with pytest.raises(DataError):
        tff.fetch_femnist(tmp_path / "other", replace(archive, checksum=f"sha256:{'0' * 64}"))


# ---------------------------------------------------------------------------------------------- Stack Overflow
VOCABULARY = "the 900\nto 800\na 700\nlist 60\nsort 50\nrarely 1\n"
"""With five words the last one is out of the vocabulary."""
THE, TO, A, LIST, SORT, OOV, BEGIN, END = range(1, 9)
USERS = {"10022": ["to sort a list", "sort rarely"], "00000001": ["the list"], "99": ["a list to sort"]}
TESTED = {"10023": ["the list to sort"], "00000001": ["sort the haystack", ""]}


def write(root: Path, users: dict[str, list[str]] = USERS, file: str = tff.STACKOVERFLOW_FILES[0]) -> Path:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as made:
        for user, sentences in users.items():
            group = made.create_group(f"examples/{user}")
            group["tokens"] = sentences
            group["score"] = np.zeros(len(sentences), dtype=np.int64)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path)
    write(tmp_path, TESTED, tff.STACKOVERFLOW_FILES[1])
    (tmp_path / tff.STACKOVERFLOW_FILES[2]).write_text(VOCABULARY)
    return tmp_path


def without_padding(tokens: torch.Tensor) -> list[list[int]]:
    """Return the tokens without padding, which must be at the end."""
    rows = [row[: next((at for at, token in enumerate(row) if token == 0), 20)] for row in tokens.tolist()]
    assert all(len(row) == 20 and not any(row[len(kept) :]) for row, kept in zip(tokens.tolist(), rows, strict=True))
    return rows


def test_sentences_become_tokens_and_the_tokens_that_follow(root: Path) -> None:
    data = tff.load_stackoverflow(root, words=5)
    assert data.task == NextToken(9, 20, padding=0, masked=(OOV, BEGIN, END))
    sentences = [[THE, LIST], [TO, SORT, A, LIST], [SORT, OOV], [A, LIST, TO, SORT]]
    assert without_padding(data.train_y) == [[*sentence, END] for sentence in sentences]
    assert without_padding(data.train_x) == [[BEGIN, *sentence, END] for sentence in sentences]
    assert data.natural_client is not None and data.natural_client.tolist() == [0, 1, 1, 2], "users by their names"
    assert without_padding(data.test_y) == [[SORT, THE, OOV, END], [END], [THE, LIST, TO, SORT, END]]


def test_a_long_sentence_is_cut_and_has_no_end(root: Path) -> None:
    write(root, {"1": [" ".join(["the", "to"] * 10), " ".join(["the", "to"] * 9 + ["the"]), "a " * 30]})
    data = tff.load_stackoverflow(root, words=5)
    assert data.train_y[0].tolist() == [THE, TO] * 10 and data.train_x[0].tolist() == [BEGIN, *[THE, TO] * 9, THE]
    assert data.train_y[1].tolist() == [*[THE, TO] * 9, THE, END]
    assert data.train_y[2].tolist() == [A] * 20


def test_users_and_sentences_are_capped(root: Path) -> None:
    data = tff.load_stackoverflow(root, words=5, users=2, sentences=1)
    assert without_padding(data.train_y) == [[THE, LIST, END], [TO, SORT, A, LIST, END]]
    assert data.natural_client is not None and data.natural_client.tolist() == [0, 1]


BROKEN_STACKOVERFLOW: dict[str, Callable[[Any], object]] = {
    "no examples": lambda f: f.move("examples", "others"),
    "no users": lambda f: (f.pop("examples"), f.create_group("examples")),
    "no tokens": lambda f: f["examples/00000001"].pop("tokens"),
    "numbers": lambda f: put(f, "examples/00000001/tokens", [1, 2]),
    "long sentences": lambda f: put(f, "examples/00000001/tokens", np.zeros(1, dtype="S70000")),
    "a table": lambda f: put(f, "examples/00000001/tokens", [[b"a", b"b"]]),
}


@pytest.mark.parametrize("how", BROKEN_STACKOVERFLOW.values(), ids=list(BROKEN_STACKOVERFLOW))
def test_stackoverflow_names_the_damaged_file(root: Path, how: Callable[[Any], object]) -> None:
    with h5py.File(root / tff.STACKOVERFLOW_FILES[1], "a") as file:
        how(file)
    with pytest.raises(DataError) as error:
        tff.load_stackoverflow(root, words=5)
    assert "stackoverflow_test.h5" in str(error.value)


@pytest.mark.parametrize("text", ["the 9\nto\n", "the many\n", "the 9\n" * 5])
def test_other_word_counts_are_refused(root: Path, text: str) -> None:
    (root / tff.STACKOVERFLOW_FILES[2]).write_text(text)
    with pytest.raises(DataError):
        tff.load_stackoverflow(root, words=5)


def test_stackoverflow_fetch_unpacks_both_archives(root: Path, tmp_path: Path) -> None:
    files = tff.STACKOVERFLOW_FILES
    remotes = [packed(part, root, tmp_path / f"{len(part)}.tar.bz2") for part in (files[:2], files[2:])]
    tff.fetch_stackoverflow(tmp_path / "copy", *remotes)
    found, expected = (tff.load_stackoverflow(each, words=5) for each in (tmp_path / "copy", root))
    assert torch.equal(found.train_x, expected.train_x) and torch.equal(found.test_y, expected.test_y)
