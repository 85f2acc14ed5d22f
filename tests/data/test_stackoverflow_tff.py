"""Stack Overflow from HDF5 files in TensorFlow Federated's format."""

from __future__ import annotations

import sys
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_engine.core.errors import DataError, EnvironmentFailure
from fl_engine.core.samples import Data
from fl_engine.data.downloads import Remote
from fl_engine.data.files import digest
from fl_engine.datasets import stackoverflow_tff
from fl_engine.tasks import NextToken
from fl_engine.testing.datasets import DatasetSuite

h5py = pytest.importorskip("h5py", reason="h5py is not installed: pip install 'flexfleet[hdf5]'")

VOCABULARY = "the 900\nto 800\na 700\nlist 60\nsort 50\nrarely 1\n"
"""With five words the last one is out of the vocabulary."""
THE, TO, A, LIST, SORT, OOV, BEGIN, END = range(1, 9)
USERS = {"10022": ["to sort a list", "sort rarely"], "00000001": ["the list"], "99": ["a list to sort"]}
TESTED = {"10023": ["the list to sort"], "00000001": ["sort the haystack", ""]}


def write(root: Path, users: dict[str, list[str]] = USERS, file: str = stackoverflow_tff.TRAIN) -> Path:
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
    write(tmp_path, TESTED, stackoverflow_tff.TEST)
    (tmp_path / stackoverflow_tff.WORD_COUNT).write_text(VOCABULARY)
    return tmp_path


def told(tokens: torch.Tensor) -> list[list[int]]:
    """Return the tokens without padding, which must be at the end."""
    rows = [row[: next((at for at, token in enumerate(row) if token == 0), 20)] for row in tokens.tolist()]
    assert all(len(row) == 20 and not any(row[len(kept) :]) for row, kept in zip(tokens.tolist(), rows, strict=True))
    return rows


def test_sentences_become_tokens_and_the_tokens_that_follow(root: Path) -> None:
    data = stackoverflow_tff.load(root, words=5)
    assert data.task == NextToken(9, 20, padding=0, masked=(OOV, BEGIN, END))
    sentences = [[THE, LIST], [TO, SORT, A, LIST], [SORT, OOV], [A, LIST, TO, SORT]]
    assert told(data.train_y) == [[*sentence, END] for sentence in sentences]
    assert told(data.train_x) == [[BEGIN, *sentence, END] for sentence in sentences]
    assert data.natural_client is not None and data.natural_client.tolist() == [0, 1, 1, 2], "users by their names"
    assert told(data.test_y) == [[SORT, THE, OOV, END], [END], [THE, LIST, TO, SORT, END]]


def test_a_long_sentence_is_cut_and_has_no_end(root: Path) -> None:
    write(root, {"1": [" ".join(["the", "to"] * 10), " ".join(["the", "to"] * 9 + ["the"]), "a " * 30]})
    data = stackoverflow_tff.load(root, words=5)
    assert data.train_y[0].tolist() == [THE, TO] * 10 and data.train_x[0].tolist() == [BEGIN, *[THE, TO] * 9, THE]
    assert data.train_y[1].tolist() == [*[THE, TO] * 9, THE, END]
    assert data.train_y[2].tolist() == [A] * 20


def test_accuracy_leaves_out_what_is_no_word(root: Path) -> None:
    """Answers of LIST everywhere: one of six test words is right; the others are OOV, three ends, padding."""
    data = stackoverflow_tff.load(root, words=5)
    answers = torch.zeros(3, 9, 20)
    answers[:, LIST] = 1
    found = data.task.measure([data.task.observe(answers, data.test_y)]).values
    assert found == {"accuracy": pytest.approx(1 / 6), "accuracy_all": pytest.approx(1 / 10)}


def test_users_and_sentences_are_capped(root: Path) -> None:
    data = stackoverflow_tff.load(root, words=5, users=2, sentences=1)
    assert told(data.train_y) == [[THE, LIST, END], [TO, SORT, A, LIST, END]]
    assert data.natural_client is not None and data.natural_client.tolist() == [0, 1]


def put(file: Any, values: Any) -> None:
    del file["examples/00000001/tokens"]
    file["examples/00000001/tokens"] = values


def _times(file: Any) -> None:
    """Store elements of a type that NumPy does not support."""
    del file["examples/00000001/tokens"]
    space = h5py.h5s.create_simple((2,))
    h5py.h5d.create(file["examples/00000001"].id, b"tokens", h5py.h5t.UNIX_D32LE, space)


BROKEN: dict[str, Callable[[Any], object]] = {
    "no examples": lambda f: f.move("examples", "others"),
    "no users": lambda f: (f.pop("examples"), f.create_group("examples")),
    "no tokens": lambda f: f["examples/00000001"].pop("tokens"),
    "numbers": lambda f: put(f, [1, 2]),
    "long sentences": lambda f: put(f, np.zeros(1, dtype="S70000")),
    "times": _times,
    "a table": lambda f: put(f, [[b"a", b"b"]]),
}


@pytest.mark.parametrize("how", BROKEN.values(), ids=list(BROKEN))
def test_what_is_wrong_is_named(root: Path, how: Callable[[Any], object]) -> None:
    with h5py.File(root / stackoverflow_tff.TEST, "a") as file:
        how(file)
    with pytest.raises(DataError) as error:
        stackoverflow_tff.load(root, words=5)
    assert "stackoverflow_test.h5" in str(error.value)


@pytest.mark.parametrize("text", ["the 9\nto\n", "the many\n", "the 9\n" * 5])
def test_other_word_counts_are_refused(root: Path, text: str) -> None:
    (root / stackoverflow_tff.WORD_COUNT).write_text(text)
    with pytest.raises(DataError):
        stackoverflow_tff.load(root, words=5)


def test_fetch_checks_and_unpacks_the_archives(root: Path, tmp_path: Path) -> None:
    remotes = []
    for name, files in (("data", stackoverflow_tff.FILES[:2]), ("counts", stackoverflow_tff.FILES[2:])):
        archive = tmp_path / f"{name}.tar.bz2"
        with tarfile.open(archive, "w:bz2") as tar:
            for file in files:
                tar.add(root / file, Path(file).name)
        remotes.append(Remote(archive.as_uri(), archive.name, f"sha256:{digest(archive)}"))
    with pytest.raises(DataError):
        stackoverflow_tff.load(tmp_path / "copy")
    stackoverflow_tff.fetch(tmp_path / "copy", *remotes)
    found, wanted = (stackoverflow_tff.load(each, words=5) for each in (tmp_path / "copy", root))
    assert torch.equal(found.train_x, wanted.train_x) and torch.equal(found.test_y, wanted.test_y)


def test_without_h5py_it_says_what_to_install(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(EnvironmentFailure):
        stackoverflow_tff.load(root, words=5)


class TestStackOverflowByTff(DatasetSuite):
    @pytest.fixture(scope="module")
    def load(self, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Data]:
        root = tmp_path_factory.mktemp("tff")
        write(root)
        write(root, TESTED, stackoverflow_tff.TEST)
        (root / stackoverflow_tff.WORD_COUNT).write_text(VOCABULARY)
        return partial(stackoverflow_tff.load, root, words=5)
