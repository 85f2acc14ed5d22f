"""Shakespeare: predict the next character in a line of a play; the clients are the speaking roles.

The task is from LEAF (Caldas et al., 2018, arXiv:1812.01097; data/shakespeare) and McMahan et al., AISTATS 2017. A
model predicts a character from the 80 preceding characters of the same line. As in LEAF, each line of a role's speech
is processed separately. Repeated spaces become one space. Each line gets 80 spaces at the start and a line feed at the
end. Each character of the line, including the line feed, is the target of one sample. Each role is a natural client.
The last fifth of a role's lines are test lines.

The text is tiny Shakespeare (https://github.com/karpathy/char-rnn, data/tinyshakespeare/input.txt). The text consists
of blocks, which begin with "ROLE:" and are separated by empty lines. The file must match the SHA-256 checksum in
TensorFlow Datasets. Departs from LEAF, which uses the whole Gutenberg edition and separates the roles of different
plays. Tiny Shakespeare does not mark the ends of plays, so roles with the same name are one role. Characters that do
not occur in both training and test targets are replaced by a space, as LEAF does with unknown characters. Characters
are numbered in Unicode order.

`load_text` returns the same lines for networks that predict the next character at every position. The training lines of
a role are joined and cut into pieces of 80 characters. The test lines are joined and cut separately. The target of each
position is the next character. Token 0 pads the last piece. Tokens 1, 2, ... stand for the characters of the training
lines. The last two tokens stand for any other character (OOV) and for the start of a role's joined lines.
"""

from __future__ import annotations

import re
from collections.abc import Sized
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch

from fl_engine.core.samples import Data
from fl_engine.data.downloads import RemoteFile, download
from fl_engine.data.files import damaged, read_text, require
from fl_engine.tasks import Classification, NextToken

ABOUT = "Shakespeare, the next character after 80, 62 classes, 827,298 + 200,539 of 299 roles; public domain; 1 MB"
ABOUT_TEXT = "Shakespeare, the next character at each of 80 positions, 299 roles; public domain; 1 MB"
FOLDER = "shakespeare"
REMOTE = RemoteFile(
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
URL = REMOTE.url
FILES = (f"{FOLDER}/{REMOTE.filename}",)
WINDOW = 80
"""Number of characters in a sample."""
TEST_SHARE = 5
"""A role with n lines gets n // TEST_SHARE test lines."""
PADDING = 0
"""Padding token after the last character of a piece in `load_text`."""
MOST_BYTES = 2**23
"""Maximum size of the text in bytes. In memory, every character becomes a sample of 80 numbers."""
MOST_CHARACTERS = 256
"""Maximum number of different characters. The text has 65."""
ROLE = re.compile(r"\S.{0,80}:")


def load(root: Path, checksum: str | None = REMOTE.checksum) -> Data:
    """Load `root`/shakespeare/input.txt as tokens (N, 80). If `checksum` is None, any text in the same format is
    accepted.

    Raises DataError if the text is missing, has a wrong checksum, is not UTF-8, has a different format, or does not
    contain a role with at least five lines.
    """
    require("shakespeare", root, FILES, REMOTE.url)
    path = root / FILES[0]
    parts = _parts(path, checksum)
    train, test = ("".join(line for _, line in part) for part in parts)
    known = sorted({*train} & {*test} | {" "})
    _check(path, test, known)
    (train_x, train_y, source), (test_x, test_y, _) = (_windows(part, known) for part in parts)
    task = Classification(max(2, len(known)))
    return Data("shakespeare", task, train_x, train_y, test_x, test_y, natural_client=source)


def load_text(root: Path, checksum: str | None = REMOTE.checksum) -> Data:
    """Load the same text as `load`, but as tokens (N, 80) and next tokens (N, 80). Raises the same errors as `load`."""
    require("shakespeare_text", root, FILES, REMOTE.url)
    path = root / FILES[0]
    parts = _parts(path, checksum)
    characters = sorted({*"".join(line for _, line in parts[0])})
    _check(path, parts[1], characters)
    numbers = {character: at for at, character in enumerate(characters, 1)}
    unknown, begin = len(characters) + 1, len(characters) + 2
    (train_x, train_y, source), (test_x, test_y, _) = (_pieces(part, numbers, unknown, begin) for part in parts)
    task = NextToken(len(characters) + 3, WINDOW, PADDING, (unknown, begin))
    return Data("shakespeare_text", task, train_x, train_y, test_x, test_y, natural_client=source)


def fetch(root: Path, remote: RemoteFile = REMOTE) -> None:
    """Download the text if it does not exist. Raises the same errors as `downloads.download`."""
    download(remote, root / FOLDER)


def _check(path: Path, test: Sized, characters: Sized) -> None:
    if not test:
        raise damaged(path, f"roles of at least {TEST_SHARE} lines", "none")
    if len(characters) > MOST_CHARACTERS:
        raise damaged(path, f"at most {MOST_CHARACTERS} different characters", len(characters))


Lines = list[tuple[int, str]]
"""Lines of the text, each with the number of the role that speaks it."""


def _parts(path: Path, checksum: str | None) -> tuple[Lines, Lines]:
    """Return the training lines and the test lines. As in LEAF, repeated spaces become one space, and each line ends
    with a line feed."""
    roles: dict[str, list[str]] = {}
    role: list[str] | None = None
    for number, line in enumerate(read_text(path, MOST_BYTES, checksum).split("\n"), 1):
        if not line:
            role = None
        elif role is not None:
            role.append(re.sub("  +", " ", line) + "\n")
        elif ROLE.fullmatch(line):
            role = roles.setdefault(line[:-1], [])
        else:
            raise damaged(f"{path}: line {number}", "a role such as `ROMEO:` at the start of a block", f"{line[:80]!r}")
    parts: tuple[Lines, Lines] = ([], [])
    for client, role_lines in enumerate(filter(None, roles.values())):
        cut = len(role_lines) - len(role_lines) // TEST_SHARE
        for part, chosen in zip(parts, (role_lines[:cut], role_lines[cut:]), strict=True):
            part += [(client, line) for line in chosen]
    return parts


def _pieces(
    lines: Lines, numbers: dict[str, int], unknown: int, begin: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return int64 tensors for all pieces: tokens (N, 80), next tokens (N, 80), and the client (N,)."""
    x, y, source = [], [], []
    for client, role_lines in groupby(lines, key=itemgetter(0)):
        tokens = [begin, *(numbers.get(character, unknown) for _, line in role_lines for character in line)]
        padded = np.pad(tokens, (0, -(len(tokens) - 1) % WINDOW), constant_values=PADDING)
        x.append(np.where(padded[1:] == PADDING, PADDING, padded[:-1]).reshape(-1, WINDOW))
        y.append(padded[1:].reshape(-1, WINDOW))
        source.append(np.full(len(y[-1]), client))
    whole = [torch.from_numpy(np.concatenate(each).astype(np.int64)) for each in (x, y, source)]
    return whole[0], whole[1], whole[2]


def _windows(lines: Lines, known: list[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return int64 tensors for all characters in `lines`: the 80 preceding characters (N, 80), the character (N,) and
    its client (N,)."""
    lengths = [len(line) for _, line in lines]
    text = "".join(" " * WINDOW + line for _, line in lines)
    number = {character: at for at, character in enumerate(known)}
    table = {ord(character): number.get(character, number[" "]) for character in {*text}}
    tokens = np.frombuffer(text.translate(table).encode("latin-1"), dtype=np.uint8)  # latin-1 encodes 0-255 as one byte
    # The window before character k of line i begins at `starts[i]` + k. Each line is preceded by 80 spaces.
    starts = np.cumsum([0, *(WINDOW + length for length in lengths[:-1])])
    at = np.concatenate([start + np.arange(length) for start, length in zip(starts, lengths, strict=True)])
    windows = np.lib.stride_tricks.sliding_window_view(tokens, WINDOW)[at].astype(np.int64)
    sources = np.repeat(np.array([client for client, _ in lines]), lengths)
    return torch.from_numpy(windows), torch.from_numpy(tokens[at + WINDOW].astype(np.int64)), torch.from_numpy(sources)
