"""Shakespeare: the windows of a short text, and the real text if it exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_engine.core.errors import DataError
from fl_engine.core.samples import Data
from fl_engine.datasets import shakespeare
from fl_engine.tasks import NextToken
from tests.data import made

FIRST = ["Before we proceed any further,\n", "hear me speak.\n", "You are all resolved\n", "rather to die?\n"]
ALL = ["Speak, speak.\n", "Ay\n", "No\n", "Ay\n", "Resolved! & so\n"]
TEST = ["Resolved, a$\n", "Speak\n"]
LETTERS = "".join(sorted({*"".join(FIRST + ALL)} & {*"".join(TEST)} | {" "}))
"""The vocabulary in the order of the tokens."""


@pytest.fixture
def play(tmp_path: Path) -> Data:
    made.shakespeare_file(tmp_path)
    return shakespeare.load(tmp_path, None)


def test_each_character_follows_the_eighty_before_it(play: Data) -> None:
    assert play.task.outputs == len(LETTERS)

    def read(text: str) -> str:
        return "".join(character if character in LETTERS else " " for character in text)

    parts = ((play.train_x, play.train_y, FIRST + ALL), (play.test_x, play.test_y, TEST))
    for x, y, lines in parts:
        at = 0
        for line in lines:
            for k, character in enumerate(line):
                window = (" " * 80 + line)[k : k + 80]
                assert "".join(LETTERS[token] for token in x[at]) == read(window)
                assert LETTERS[y[at]] == read(character)
                at += 1
        assert len(x) == len(y) == at


def test_a_role_is_a_client_and_its_last_fifth_is_for_tests(play: Data) -> None:
    assert play.natural_client is not None
    counts = [sum(map(len, lines)) for lines in (FIRST, ALL)]
    assert play.natural_client.bincount().tolist() == counts
    assert play.natural_client.diff().min() >= 0


def test_what_one_part_lacks_is_unknown(play: Data) -> None:
    assert "$" not in LETTERS and "B" not in LETTERS and "&" not in LETTERS
    assert LETTERS[play.train_y[0]] == " ", "the B of Before"
    for y in (play.train_y, play.test_y):
        assert (y.bincount(minlength=len(LETTERS)) > 0).all()


# ----------------------------------------------------------------------------------- the next character everywhere
def test_each_character_follows_the_one_before_it(tmp_path: Path) -> None:
    """FIRST and ALL in pieces of 80; a role's training lines go on from piece to piece, its test lines begin anew."""
    made.shakespeare_file(tmp_path)
    data = shakespeare.load_text(tmp_path, None)
    assert isinstance(data.task, NextToken)
    letters = sorted({*"".join(FIRST + ALL)})
    unknown, begin = len(letters) + 1, len(letters) + 2
    assert (data.task.tokens, data.task.length, data.task.masked) == (len(letters) + 3, 80, (unknown, begin))

    def read(tokens: Tensor) -> str:
        names = ["", *letters, "?", "^"]
        return "".join(names[token] for token in tokens.tolist())

    first, all_ = "".join(FIRST), "".join(ALL)
    assert 80 < len(first) < 160 and len(all_) < 80
    assert [read(y) for y in data.train_y] == [first[:80], first[80:], all_]
    assert [read(x) for x in data.train_x] == ["^" + first[:79], first[79:-1], "^" + all_[:-1]]
    assert data.natural_client is not None and data.natural_client.tolist() == [0, 0, 1]
    assert [read(y) for y in data.test_y] == ["Resolved, a?\n", "Speak\n"], "no training line has a $"
    assert torch.equal(data.train_x == 0, data.train_y == 0)
    assert int((data.train_y != 0).sum()) == len(first) + len(all_), "each character is predicted once"


WRONG: dict[str, bytes] = {
    "a block without a role": b"A:\nx\n\ny\n",
    "too many characters": f"A:\n{(''.join(map(chr, range(0x4E00, 0x4F10))) + chr(10)) * 5}".encode(),
}


@pytest.mark.parametrize("load", [shakespeare.load, shakespeare.load_text])
@pytest.mark.parametrize("text", WRONG.values(), ids=list(WRONG))
def test_another_text_is_refused(tmp_path: Path, text: bytes, load: Any) -> None:
    path = made.write(tmp_path / "shakespeare" / "input.txt", text)
    with pytest.raises(DataError) as error:
        load(tmp_path, None)
    assert str(path) in str(error.value)


def test_a_text_that_is_missing_or_another_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        shakespeare.load(tmp_path)
    made.shakespeare_file(tmp_path)
    with pytest.raises(DataError):
        shakespeare.load(tmp_path)
