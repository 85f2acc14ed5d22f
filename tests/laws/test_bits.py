"""Numbers in few bits, and Elias's omega code, against codewords written by hand and by a definition in four lines."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.codecs import bits, elias
from fl_engine.core.errors import IntegrityError

BY_HAND = {
    1: "0", 2: "100", 3: "110", 4: "101000", 5: "101010", 6: "101100", 7: "101110", 8: "1110000", 9: "1110010",
    10: "1110100", 11: "1110110", 12: "1111000", 13: "1111010", 14: "1111100", 15: "1111110", 16: "10100100000",
    17: "10100100010", 31: "10100111110", 32: "101011000000", 63: "101011111110", 64: "1011010000000",
    99: "1011011000110", 100: "1011011001000", 255: "10111111111110", 256: "1110001000000000",
    65535: "11111111111111111111110", 65536: "1010010000100000000000000000",
    1_000_000: "1010010011111101000010010000000",
}  # fmt: skip
"""With pencil and paper: 100 is 1100100, 7 bits; 6 is 110, 3 bits; 2 is 10, 2 bits: 10 110 1100100 0."""
BEFORE = ("", "", "10", "11", "10100", "10101", "10110")
"""What stands before a number of 1, 2, ... 7 bits."""
WHOLE = st.integers(1, 20) | st.integers(1, 2**16) | st.integers(1, 2**53 - 1)


def codeword(number: int) -> str:
    """As Elias writes it: a 0, before it the number, before it the number of its bits less one, until that is 1."""
    found = "0"
    while number > 1:
        found = f"{number:b}{found}"
        number = number.bit_length() - 1
    return found


def text(parts: list[bits.Bits]) -> str:
    return "".join(str(bit) for part in parts for bit in part.tolist())


@pytest.mark.parametrize("number", sorted({*range(1, 101), *BY_HAND}))
def test_a_number_s_bits_are_its_codeword(number: int) -> None:
    found = text(elias.encode(np.array([number])))
    assert found == codeword(number) == BY_HAND.get(number, found)
    if number <= 100:
        assert found == (f"{BEFORE[number.bit_length() - 1]}{number:b}0" if number > 1 else "0")
    assert elias.size(np.array([number])) == len(found)


@settings(max_examples=80)
@given(st.lists(WHOLE, max_size=40), st.integers(0, 9))
def test_many_take_the_bits_of_their_codewords_and_come_back(values: list[int], before: int) -> None:
    given, lead = np.array(values, np.int64), np.ones(before, np.uint8)
    made = elias.encode(given)
    assert sorted(text(made)) == sorted("".join(map(codeword, values))), "the same bits in another order"
    assert elias.size(given) == len(text(made))
    stream = np.concatenate([lead, *made, lead])
    found, at = elias.decode(stream, before, len(values), max(values, default=1))
    assert found.tolist() == values and at == len(stream) - before


@settings(max_examples=80)
@given(st.lists(WHOLE, min_size=1, max_size=40), st.data())
def test_elias_refuses_short_streams_and_large_numbers(values: list[int], data: st.DataObject) -> None:
    stream = np.concatenate(elias.encode(np.array(values)))
    cut = data.draw(st.integers(0, len(stream) - 1))
    with pytest.raises(IntegrityError):
        elias.decode(stream[:cut], 0, len(values), max(values))
    if max(values) > 1:
        with pytest.raises(IntegrityError):
            elias.decode(stream, 0, len(values), max(values) - 1)


def test_a_number_of_a_million_bits_is_refused_before_it_is_read() -> None:
    """A group of 2^19 bits is announced, and they are there."""
    stream = np.concatenate([*elias.encode(np.array([2**19]))[:-1], np.ones(2**20, np.uint8)])
    with pytest.raises(IntegrityError):
        elias.decode(stream, 0, 1, 2**20)


@settings(max_examples=80)
@given(st.integers(1, 17), st.lists(st.integers(0, 2**17 - 1), max_size=40), st.data())
def test_packed_numbers_take_their_bits_and_come_back(width: int, drawn: list[int], data: st.DataObject) -> None:
    given = np.array([each % 2**width for each in drawn], np.int32)
    made = bits.pack(given, width)
    assert len(made) == bits.packed_size(len(given), width) == -(-len(given) * width // 8)
    assert bits.unpack(made, len(given), width).tolist() == given.tolist()
    assert np.unpackbits(made).sum() == sum(each.bit_count() for each in given.tolist())
    with pytest.raises(IntegrityError):
        bits.unpack(np.append(made, np.uint8(0)), len(given), width)
    if len(made):
        with pytest.raises(IntegrityError):
            bits.unpack(made[:-1], len(given), width)
    if len(given) * width % 8:
        made[-1] |= 1
        with pytest.raises(IntegrityError):
            bits.unpack(made, len(given), width)
