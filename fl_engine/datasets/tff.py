"""FEMNIST and Stack Overflow from TensorFlow Federated, in HDF5 files with a group for each client. Requires h5py.

https://www.tensorflow.org/federated/api_docs/python/tff/simulation/datasets. The archives must match the SHA-256
checksums in TensorFlow Federated. Each client in a file is a natural client. Clients are sorted by name.

`femnist_tff` (`emnist` with only_digits=False) has the same characters as `femnist`, and a published split. The set has
671,585 training and 77,483 test images. Each of the 3,400 writers has at least one training and one test image. The
files are fed_emnist_train.h5 and fed_emnist_test.h5. The array `examples/<writer>/pixels` is float32 (n, 28, 28) in
[0, 1], with black ink (0) on a white background (1). The array `examples/<writer>/label` is int32 (n,). Labels 0 to 9
are digits, 10 to 35 are upper-case letters, and 36 to 61 are lower-case letters.

`stackoverflow_tff` predicts the next word of a sentence. The set has 135,818,730 training sentences of 342,477 users
and 16,586,035 test sentences of 204,088 users. The files are stackoverflow_train.h5 and stackoverflow_test.h5. The
array `examples/<user>/tokens` has one sentence per string, with spaces between words. Other arrays are not read. The
file stackoverflow.word_count has a line of the form `word count` for each word, with the most frequent word first.
Words are converted to tokens as in google-research/federated (stackoverflow_word_prediction.py). FedRolex's baseline
has the same vocabulary and sentence length. Token 0 is padding, and tokens 1 to 10,000 are the most frequent words. The
last three tokens stand for any other word (OOV), and for the beginning and the end of a sentence. A sample consists of
the begin token and 20 words. If a sentence is shorter, the end token and padding follow. The model predicts the next
word at all 20 positions. Departs from the full published set, which does not fit into memory. Here the reader uses only
the first 1,000 users of each file, sorted by name, and the first 128 sentences of each user.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl_engine.core.errors import EnvironmentFailure
from fl_engine.core.samples import Data
from fl_engine.core.system import install_command
from fl_engine.data.downloads import RemoteFile, download_members
from fl_engine.data.files import check_labels, damaged, expecting, require
from fl_engine.data.transforms import as_tensors, byte_statistics
from fl_engine.datasets.femnist import CLASSES, SIDE
from fl_engine.tasks import Classification, NextToken


def _remote(name: str, checksum: str) -> RemoteFile:
    return RemoteFile(f"https://storage.googleapis.com/tff-datasets-public/{name}", f"sha256:{checksum}")


ABOUT_FEMNIST = (
    "FEMNIST by TensorFlow Federated, 28x28 grey, 62 classes, 671,585 + 77,483 of 3,400 writers; no licence stated, "
    "cite Caldas et al. 2018; 170 MB; needs h5py"
)
FEMNIST = _remote("fed_emnist.tar.bz2", "fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0")
FEMNIST_FILES = ("femnist-tff/fed_emnist_train.h5", "femnist-tff/fed_emnist_test.h5")
MOST_SAMPLES = 10_000
"""Maximum number of samples of a writer in a file. Writers in the set have at most a few hundred samples."""

ABOUT_STACKOVERFLOW = (
    "Stack Overflow by TensorFlow Federated, the next of 10,000 words after up to 20, 1,000 of 342,477 users; "
    "CC BY-SA 3.0; several GB; needs h5py"
)
STACKOVERFLOW = _remote("stackoverflow.tar.bz2", "99eca2f8b8327a09e5fc123979df2d237acbc5e52322f6d86bf523ee47b961a2")
COUNTS = _remote("stackoverflow.word_count.tar.bz2", "1dc00256d6e527c54b9756d968118378ae14e6692c0b3b6cad470cdd3f0c519c")
STACKOVERFLOW_FILES = tuple(f"stackoverflow-tff/stackoverflow{end}" for end in ("_train.h5", "_test.h5", ".word_count"))
WORDS, LENGTH = 10_000, 20
USERS, SENTENCES = 1000, 128
"""Number of users that are read from a file, and maximum number of sentences per user."""
PADDING = 0
LONGEST = 2**16
"""Maximum size in bytes of a line in the word list, and of a sentence in an array of fixed-length strings."""


def load_femnist(root: Path) -> Data:
    """Load `root`/femnist-tff. Mean and standard deviation are computed from the training images.

    Raises DataError if a file is missing or damaged, images or labels are invalid, or the training and test parts have
    different writers. Raises EnvironmentFailure if h5py is not installed.
    """
    require("femnist_tff", root, FEMNIST_FILES, FEMNIST.url)
    train, test = (_clients(root / file, ("pixels", "label"), _samples) for file in FEMNIST_FILES)
    if odd := sorted(set(train) ^ set(test)):
        expected = f"the writers of {Path(FEMNIST_FILES[0]).name}"
        raise damaged(root / FEMNIST_FILES[1], expected, f"{len(odd)} others, {odd[0][:80]!r} first")
    arrays = [np.concatenate(each) for part in (train, test) for each in zip(*part.values(), strict=True)]
    source = _numbered([len(labels) for _, labels in train.values()])
    return Data("femnist_tff", Classification(CLASSES), *as_tensors(*arrays), *byte_statistics(arrays[0]), source)


def fetch_femnist(root: Path, archive: RemoteFile = FEMNIST) -> None:
    """Download the archive and unpack the files that do not exist. Raises as `download_members` does."""
    _fetch(root, archive, FEMNIST_FILES)


def load_stackoverflow(root: Path, words: int = WORDS, users: int = USERS, sentences: int = SENTENCES) -> Data:
    """Load `root`/stackoverflow-tff as tokens (N, 20) and next tokens (N, 20). The vocabulary has `words` + 4 tokens.

    Raises DataError if a file is missing or damaged, or if the word list has fewer than `words` words. Raises
    EnvironmentFailure if h5py is not installed.
    """
    require("stackoverflow_tff", root, STACKOVERFLOW_FILES, f"{STACKOVERFLOW.url} and {COUNTS.url}")
    paths = [root / file for file in STACKOVERFLOW_FILES]
    numbers, special = _vocabulary(paths[2], words), (words + 1, words + 2, words + 3)
    read = partial(_sentences, numbers=numbers, special=special, most=sentences)
    found = [list(_clients(path, ("tokens",), read, users).values()) for path in paths[:2]]
    whole = [np.concatenate(part) for part in found]
    tensors = as_tensors(*(np.ascontiguousarray(part) for each in whole for part in (each[:, :-1], each[:, 1:])))
    source = _numbered([len(each) for each in found[0]])
    return Data("stackoverflow_tff", NextToken(words + 4, LENGTH, PADDING, special), *tensors, natural_client=source)


def fetch_stackoverflow(root: Path, archive: RemoteFile = STACKOVERFLOW, counts: RemoteFile = COUNTS) -> None:
    """Download the archives and unpack the files that do not exist. Raises as `download_members` does."""
    _fetch(root, archive, STACKOVERFLOW_FILES[:2])
    _fetch(root, counts, STACKOVERFLOW_FILES[2:])


def _fetch(root: Path, archive: RemoteFile, files: tuple[str, ...]) -> None:
    paths = [root / file for file in files]
    download_members(archive, paths[0].parent, {path.name: path for path in paths})


def _numbered(counts: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.repeat(np.arange(len(counts)), counts))


def _clients(path: Path, arrays: tuple[str, ...], read: Callable[..., Any], most: int | None = None) -> dict[str, Any]:
    """Map each client to the result of `read`. `read` is called with a description of the client for error messages,
    and with the client's arrays, whose values are not loaded yet.

    Raises DataError if h5py cannot read the file, or if the file is malformed or has no clients. Raises
    EnvironmentFailure if h5py is not installed.
    """
    try:
        import h5py
    except ImportError as error:
        raise EnvironmentFailure(f"{path} requires h5py. Run `{install_command('hdf5')}`") from error
    found = {}
    with expecting(path, "an HDF5 file"), h5py.File(path, "r") as file:
        examples = file.get("examples")
        if not isinstance(examples, h5py.Group) or not len(examples):
            raise damaged(path, "a group 'examples' with a group for each client", "none")
        for name in heapq.nsmallest(most or len(examples), examples):
            client, who = examples.get(name), f"{path}: client {name[:80]!r}"
            members = [client.get(each) if isinstance(client, h5py.Group) else None for each in arrays]
            if not all(isinstance(each, h5py.Dataset) for each in members):
                raise damaged(who, f"the arrays {', '.join(arrays)}", "none")
            found[name] = read(who, *members)
    return found


def _samples(who: str, pixels: Any, label: Any) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return a writer's images and labels. Shapes and types are checked before the values are loaded."""
    count = pixels.shape[0] if pixels.shape else 0
    if pixels.dtype.kind != "f" or pixels.shape != (count, SIDE, SIDE) or not 0 < count <= MOST_SAMPLES:
        raise damaged(who, f"pixels of floats, (1 to {MOST_SAMPLES}, {SIDE}, {SIDE})", f"{pixels.dtype} {pixels.shape}")
    if label.dtype.kind not in "iu" or label.shape not in ((count,), (count, 1)):
        raise damaged(who, f"{count} labels, integers", f"{label.dtype} {label.shape}")
    images, labels = pixels[()], label[()].reshape(-1).astype(np.int64)
    check_labels(who, labels, CLASSES)
    low, high = images.min(), images.max()
    if not (low >= 0 and high <= 1):  # false for NaN
        raise damaged(who, "pixels in 0..1", f"{low:g} to {high:g}")
    return (images * np.float32(255)).round().astype(np.uint8)[:, None], labels


def _vocabulary(path: Path, words: int) -> dict[bytes, int]:
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


def _sentences(
    who: str, texts: Any, numbers: dict[bytes, int], special: tuple[int, int, int], most: int
) -> NDArray[np.int64]:
    """Return a user's sentences as tokens, (n, 21)."""
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
