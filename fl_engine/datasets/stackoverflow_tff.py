"""Stack Overflow as published by TensorFlow Federated: predict the next word of a sentence; the clients are users.

https://www.tensorflow.org/federated/api_docs/python/tff/simulation/datasets/stackoverflow/load_data: 135,818,730
training sentences of 342,477 users, 16,586,035 test sentences of 204,088. The archives must match the SHA-256 in
TensorFlow Federated. stackoverflow_train.h5 and stackoverflow_test.h5 hold for each user:

    examples/<user>/tokens string (n,), a sentence each, its words separated by spaces

and other arrays, which are not read. stackoverflow.word_count has a line `word count` for each word, the most frequent
first. Words become tokens as in google-research/federated (stackoverflow_word_prediction.py), whose vocabulary and
length FedRolex's baseline uses: 0 is padding, 1 to 10,000 are the most frequent words, then follow a word out of the
vocabulary (OOV), the begin and the end of a sentence. A sentence is the begin and 20 words; a shorter one has the end
behind it, then padding. Next words are predicted at all 20 positions.

Departs from the published set, which no memory holds: the first 1,000 users of each file, by name, with their first 128
sentences each. A user is the natural client. Needs h5py: `pip install 'flexfleet[hdf5]'`.
"""

from __future__ import annotations

import heapq
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl_engine.core.samples import Data
from fl_engine.data.array_files import tff_arrays, tff_examples
from fl_engine.data.downloads import Remote, download_members
from fl_engine.data.files import damaged, require
from fl_engine.tasks import NextToken

ABOUT = (
    "Stack Overflow by TensorFlow Federated, the next of 10,000 words after up to 20, 1,000 of 342,477 users; "
    "CC BY-SA 3.0; several GB; needs h5py"
)
FOLDER = "stackoverflow-tff"
ARCHIVE = Remote(
    "https://storage.googleapis.com/tff-datasets-public/stackoverflow.tar.bz2",
    "stackoverflow.tar.bz2",
    "sha256:99eca2f8b8327a09e5fc123979df2d237acbc5e52322f6d86bf523ee47b961a2",
)
COUNTS = Remote(
    "https://storage.googleapis.com/tff-datasets-public/stackoverflow.word_count.tar.bz2",
    "stackoverflow.word_count.tar.bz2",
    "sha256:1dc00256d6e527c54b9756d968118378ae14e6692c0b3b6cad470cdd3f0c519c",
)
TRAIN, TEST, WORD_COUNT = (
    f"{FOLDER}/{name}" for name in ("stackoverflow_train.h5", "stackoverflow_test.h5", "stackoverflow.word_count")
)
FILES = (TRAIN, TEST, WORD_COUNT)
WORDS, LENGTH = 10_000, 20
USERS, SENTENCES = 1000, 128
"""How many users of a file are read, and how many sentences of each at most."""
PADDING = 0
LONGEST = 2**16
"""Bytes of the longest line of words and counts, and of a sentence where sentences have a fixed length."""


def load(root: Path, words: int = WORDS, users: int = USERS, sentences: int = SENTENCES) -> Data:
    """Load `root`/stackoverflow-tff: tokens (N, 20) and the tokens that follow (N, 20), of words + 4 kinds.

    Raises DataError for a file that is missing, damaged or of another form, or with fewer than `words` words;
    EnvironmentFailure if h5py is not installed.
    """
    require("stackoverflow_tff", root, FILES, f"{ARCHIVE.url} and {COUNTS.url}")
    numbers = _vocabulary(root / WORD_COUNT, words)
    unknown, begin, end = words + 1, words + 2, words + 3
    (train_x, train_y, source), (test_x, test_y, _) = (
        _part(root / file, numbers, (unknown, begin, end), users, sentences) for file in (TRAIN, TEST)
    )
    task = NextToken(words + 4, LENGTH, PADDING, (unknown, begin, end))
    return Data("stackoverflow_tff", task, train_x, train_y, test_x, test_y, natural_client=source)


def fetch(root: Path, archive: Remote = ARCHIVE, counts: Remote = COUNTS) -> None:
    """Download the archives and unpack the files that do not exist. Raises as `download_members` does."""
    for remote, files in ((archive, (TRAIN, TEST)), (counts, (WORD_COUNT,))):
        download_members(remote, root / FOLDER, {Path(file).name: root / file for file in files})


def _vocabulary(path: Path, words: int) -> dict[bytes, int]:
    """The most frequent words and their tokens, from 1 on."""
    numbers: dict[bytes, int] = {}
    try:
        with path.open("rb") as file:
            for line in islice(iter(lambda: file.readline(LONGEST), b""), words):
                word, count = line.split()
                int(count)
                numbers[word] = len(numbers) + 1
    except (OSError, ValueError) as error:
        raise damaged(f"{path}: line {len(numbers) + 1}", "a word and how often it occurs", error) from error
    if len(numbers) < words:
        raise damaged(path, f"at least {words} different words", len(numbers))
    return numbers


def _part(
    path: Path, numbers: dict[bytes, int], special: tuple[int, int, int], users: int, sentences: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens (N, 20), the tokens that follow (N, 20), and the user of each sentence (N,)."""
    found: list[NDArray[np.int64]] = []
    with tff_examples(path, "stackoverflow_tff") as examples:
        for name in heapq.nsmallest(users, examples):
            who = f"{path}: user {name[:80]!r}"
            (texts,) = tff_arrays(who, examples.get(name), ("tokens",))
            found.append(_sentences(who, texts, numbers, special, sentences))
    if not found:
        raise damaged(path, "users with sentences", "none")
    tokens = torch.from_numpy(np.concatenate(found))
    source = torch.from_numpy(np.repeat(np.arange(len(found)), [len(each) for each in found]))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), source


def _sentences(
    who: str, texts: Any, numbers: dict[bytes, int], special: tuple[int, int, int], most: int
) -> NDArray[np.int64]:
    """A user's sentences as tokens, (n, 21)."""
    count = texts.shape[0] if texts.shape else 0
    fits = texts.dtype.kind == "O" or (texts.dtype.kind == "S" and texts.dtype.itemsize <= LONGEST)
    if not fits or texts.shape not in ((count,), (count, 1)) or not count:
        raise damaged(who, "tokens, at least one string", f"{texts.dtype} {texts.shape}")
    unknown, begin, end = special
    tokens = np.full((min(most, count), LENGTH + 1), PADDING, dtype=np.int64)
    for row, text in zip(tokens, texts[:most].reshape(-1), strict=True):
        if not isinstance(text, bytes):
            raise damaged(who, "tokens of strings", type(text).__name__)
        sentence = [begin, *(numbers.get(word, unknown) for word in text.split()[:LENGTH]), end]
        row[: len(sentence)] = sentence[: LENGTH + 1]
    return tokens
