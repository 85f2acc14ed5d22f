"""Shakespeare: predict the next character in a line of a play; the clients are the speaking roles.

The task of LEAF (Caldas et al., 2018, arXiv:1812.01097; data/shakespeare) and of McMahan et al., AISTATS 2017: predict
a character from the 80 before it in the same line. As in LEAF, a line is what a role says on one line of the text, with
runs of spaces reduced to one, 80 spaces before it and a line feed behind it; each position gives a sample; a role is
the natural client. The last fifth of a role's lines are its test lines.

The text is tiny Shakespeare (https://github.com/karpathy/char-rnn, data/tinyshakespeare/input.txt): blocks of "ROLE:"
and lines, with an empty line between. It must match the SHA-256 in TensorFlow Datasets. Departs from LEAF, which takes
the whole Gutenberg edition and separates the roles of different plays: this text does not say where a play ends, so
roles of the same name are one. A character that is missing in the training or the test targets becomes a space, LEAF's
unknown character, so every class occurs in both. Characters are numbered in the order of Unicode.

`load_text` has the same lines for networks that predict at every position: all that a role says, its training lines and
its test lines by themselves, is cut into pieces of 80 characters, and each character follows the one before it. Tokens:
0 is padding behind the last piece, then the characters of the training lines, any other (OOV), and the begin of a part.
"""

from __future__ import annotations

import re
from collections.abc import Sized
from pathlib import Path

import numpy as np
import torch

from fl_engine.core.samples import Data
from fl_engine.data.downloads import Remote, download
from fl_engine.data.files import damaged, read, require
from fl_engine.tasks import Classification, NextToken

ABOUT = "Shakespeare, the next character after 80, 62 classes, 827,298 + 200,539 of 299 roles; public domain; 1 MB"
ABOUT_TEXT = "Shakespeare, the next character at each of 80 positions, 299 roles; public domain; 1 MB"
FOLDER = "shakespeare"
REMOTE = Remote(
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "input.txt",
    "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
FILES = (f"{FOLDER}/{REMOTE.filename}",)
WINDOW = 80
"""The number of characters in a sample."""
TEST_SHARE = 5
"""The number of a role's lines for one test line."""
PADDING = 0
"""The token behind the last character of a piece in `load_text`."""
MOST_BYTES = 2**23
"""The largest text. Each character takes a window of 80 numbers in memory."""
MOST_CHARACTERS = 256
"""The most different characters. The text has 65."""
ROLE = re.compile(r"\S.{0,80}:")


def load(root: Path, checksum: str | None = REMOTE.checksum) -> Data:
    """Load `root`/shakespeare/input.txt: tokens (N, 80). With `checksum` None, any text of that form is accepted.

    Raises DataError for a text that is missing, has another checksum, is not UTF-8 or not in blocks of a role and its
    lines, or has no role of five lines.
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
    """Load the same text as tokens (N, 80) and the tokens that follow (N, 80). Raises DataError as `load` does."""
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


def fetch(root: Path, remote: Remote = REMOTE) -> None:
    """Download the text if it does not exist. Raises as `downloads.download` does."""
    download(remote, root / FOLDER)


def _check(path: Path, test: Sized, characters: Sized) -> None:
    if not test:
        raise damaged(path, f"roles of at least {TEST_SHARE} lines", "none")
    if len(characters) > MOST_CHARACTERS:
        raise damaged(path, f"at most {MOST_CHARACTERS} different characters", len(characters))


def _roles(path: Path, checksum: str | None) -> dict[str, list[str]]:
    """The lines of each role in the order of the text, as in LEAF: with single spaces and a line feed at the end."""
    try:
        text = read(path, checksum, MOST_BYTES).decode()
    except UnicodeDecodeError as error:
        raise damaged(path, "UTF-8", error) from error
    roles: dict[str, list[str]] = {}
    role: list[str] | None = None
    for number, line in enumerate(text.split("\n"), 1):
        if not line:
            role = None
        elif role is not None:
            role.append(re.sub("  +", " ", line) + "\n")
        elif ROLE.fullmatch(line):
            role = roles.setdefault(line[:-1], [])
        else:
            raise damaged(f"{path}: line {number}", "a role at the start of a block, as `ROMEO:`", f"{line[:80]!r}")
    return {name: lines for name, lines in roles.items() if lines}


Lines = list[tuple[int, str]]
"""The number of a role, and a line of it."""


def _parts(path: Path, checksum: str | None) -> tuple[Lines, Lines]:
    """The training and the test lines."""
    parts: tuple[Lines, Lines] = ([], [])
    for client, said in enumerate(_roles(path, checksum).values()):
        cut = len(said) - len(said) // TEST_SHARE
        for part, chosen in zip(parts, (said[:cut], said[cut:]), strict=True):
            part += [(client, line) for line in chosen]
    return parts


def _pieces(
    lines: Lines, numbers: dict[str, int], unknown: int, begin: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of all that each client says: tokens (N, 80), those that follow (N, 80), and the client (N,), all int64."""
    texts: dict[int, list[str]] = {}
    for client, line in lines:
        texts.setdefault(client, []).append(line)
    x, y, source = [], [], []
    for client, said in texts.items():
        tokens = [begin, *(numbers.get(character, unknown) for character in "".join(said))]
        padded = np.pad(tokens, (0, -(len(tokens) - 1) % WINDOW), constant_values=PADDING)
        x.append(np.where(padded[1:] == PADDING, PADDING, padded[:-1]).reshape(-1, WINDOW))
        y.append(padded[1:].reshape(-1, WINDOW))
        source.append(np.full(len(y[-1]), client))
    whole = [torch.from_numpy(np.concatenate(each).astype(np.int64)) for each in (x, y, source)]
    return whole[0], whole[1], whole[2]


def _windows(lines: Lines, known: list[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For all characters of `lines` (client, line): the 80 characters before each (N, 80), the character (N,) and its
    client (N,), all int64."""
    lengths = [len(line) for _, line in lines]
    text = "".join(" " * WINDOW + line for _, line in lines)
    number = {character: at for at, character in enumerate(known)}
    table = {ord(character): number.get(character, number[" "]) for character in {*text}}
    tokens = np.frombuffer(text.translate(table).encode("latin-1"), dtype=np.uint8)  # at most 256 different characters
    # Line i begins with its 80 spaces at `starts[i]`; the window before its k-th character begins at `starts[i]` + k.
    starts = np.cumsum([0, *(WINDOW + length for length in lengths[:-1])])
    at = np.concatenate([start + np.arange(length) for start, length in zip(starts, lengths, strict=True)])
    windows = np.lib.stride_tricks.sliding_window_view(tokens, WINDOW)[at].astype(np.int64)
    sources = np.repeat(np.array([client for client, _ in lines]), lengths)
    return torch.from_numpy(windows), torch.from_numpy(tokens[at + WINDOW].astype(np.int64)), torch.from_numpy(sources)
