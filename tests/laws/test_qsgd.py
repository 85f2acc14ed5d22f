"""QSGD: right on average, never further off than a level, as long as it says, and every other stream is refused."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.codecs import Qsgd, bits
from fl_engine.core.errors import IntegrityError, ModelError
from fl_engine.core.types import Header
from fl_engine.exchange import coding
from fl_engine.testing.tiny import assert_same_bits

CODINGS = ("fixed", "elias", "shorter")
CODECS = st.builds(
    Qsgd, st.integers(1, 16), st.none() | st.integers(1, 40), st.none() | st.integers(1, 9), st.sampled_from(CODINGS)
)
WEIGHTS = st.lists(st.floats(-100, 100, width=32) | st.sampled_from((0.0, 0.0, -0.0, 1e-30)), max_size=40)


def back(codec: Qsgd, x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    given = {"x": x}
    return coding.decode(codec, coding.encode(codec, given, seed), coding.header_of(given))["x"]


def normal(count: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal(count, dtype=np.float32))


@settings(max_examples=80)
@given(CODECS, WEIGHTS)
def test_the_coding_changes_the_length_alone(codec: Qsgd, drawn: list[float]) -> None:
    x = torch.tensor(drawn, dtype=torch.float32)
    made = {way: coding.encode(replace(codec, coding=way), {"x": x}, 3) for way in ("fixed", "elias", "shorter")}
    first, second, third = (back(replace(codec, coding=way), x, 3) for way in ("fixed", "elias", "shorter"))
    assert_same_bits({"x": first}, {"x": second})
    assert_same_bits({"x": first}, {"x": third})
    lengths = {way: len(each["x"]) for way, each in made.items()}
    assert lengths["shorter"] == min(lengths["fixed"], lengths["elias"])
    assert lengths["fixed"] == 1 + -(-len(x) * codec.width // 8), "a byte that says the coding, and q + 1 bits each"


def test_levels_by_hand() -> None:
    """(3, 4) has norm 5: 0.6 and 0.8 are levels 3 and 4 of 5, and 9 and 12 of 15, in whole numbers."""
    x = torch.tensor([3.0, -4.0])
    for codec, levels in ((Qsgd(levels=5, coding="fixed"), (3, -4)), (Qsgd(bits=4, coding="fixed"), (9, -12))):
        made = codec.encode({"x": x}, 0)
        assert made["x/norm"].tolist() == [5.0]
        assert bits.unpack(made["x"].numpy()[1:], 2, codec.width).tolist() == [codec.s + level for level in levels]
        assert torch.allclose(back(codec, x), x)
    assert [Qsgd(bits=q).width for q in range(1, 17)] == [q + 1 for q in range(1, 17)]
    assert [Qsgd(levels=s).width for s in (1, 2, 3, 4, 7, 8, 2**16 - 1)] == [2, 3, 3, 4, 4, 5, 17]


def test_the_last_bucket_may_be_shorter() -> None:
    x = torch.tensor([3.0, 4.0, 0.0, 0.0, 7.0])
    codec = Qsgd(bucket=2)
    assert codec.encode({"x": x}, 0)["x/norm"].tolist() == [5.0, 0.0, 7.0]
    assert back(codec, x)[2:].tolist() == [0.0, 0.0, 7.0]
    assert Qsgd(bucket=None).encode({"x": x}, 0)["x/norm"].tolist() == [pytest.approx(74**0.5)]


def test_non_finite_number_is_refused() -> None:
    for wrong in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ModelError, match=r"^b"):
            Qsgd().encode({"a": torch.ones(3), "b": torch.tensor([1.0, wrong])}, 0)
    with pytest.raises(ModelError, match="norm of b"):
        Qsgd().encode({"b": torch.full((2,), 3e38)}, 0)
    assert bool((back(Qsgd(bits=16), torch.full((3,), 1e-40)) == 0).all()), "too small for a step"


HEADER: Header = {"x": (torch.float32, (6,))}
HONEST = torch.tensor([0.0, 0.0, 3.0, 0.0, -4.0, 0.0])


def omega(*parts: list[int], signs: list[int] = [1]) -> torch.Tensor:  # noqa: B006
    """A stream: the number of levels and 1, the levels, their signs, the runs and 1."""
    head, levels, runs = (bits.omega_encode(np.array(part, np.int64)) for part in parts)
    return torch.from_numpy(
        np.append(np.uint8(1), np.packbits(np.concatenate([*head, *levels, np.array(signs, np.uint8), *runs])))
    )


def fixed(*codes: int) -> torch.Tensor:
    return torch.from_numpy(np.append(np.uint8(0), bits.pack(np.array(codes, np.int32), 4)))


STREAMS: dict[str, torch.Tensor] = {
    "nothing": torch.zeros(0, dtype=torch.uint8),
    "another flag": torch.tensor([2, 0], dtype=torch.uint8),
    "a flag alone": torch.tensor([0], dtype=torch.uint8),
    "omega's flag alone": torch.tensor([1], dtype=torch.uint8),
    "a byte too few": fixed(7, 7, 7, 7),
    "a level beyond": fixed(7, 7, 15, 7, 7, 7),
    "more levels than elements": omega([8], [1] * 7, [1] * 7, signs=[0] * 7),
    "a level beyond, in omega": omega([2], [8], [1]),
    "a run beyond": omega([2], [3], [7]),
    "runs beyond": omega([3], [3, 3], [3, 4], signs=[0, 0]),
    "no runs": omega([3], [4, 4], [], signs=[0, 0])[:3],
    "a byte left over": torch.tensor([1, 0, 0], dtype=torch.uint8),
    "filled up with ones": torch.tensor([1, 1], dtype=torch.uint8),
    "a number of a billion bits": torch.tensor([1, 255, 255, 255], dtype=torch.uint8),
}


@pytest.mark.parametrize("lie", STREAMS)
def test_malformed_stream_is_refused(lie: str) -> None:
    codec = Qsgd(bits=3)
    made = {"x": STREAMS[lie], "x/norm": torch.tensor([5.0])}
    with pytest.raises(IntegrityError, match=r"^x: "):
        codec.decode(made, HEADER)
    assert_same_bits(codec.decode(codec.encode({"x": HONEST}, 1), HEADER), {"x": back(codec, HONEST, 1)})


def test_streams_by_hand() -> None:
    """Levels 0 0 4 0 -6 0 of 7: two of them, after runs of 2 and 1 zeros."""
    made = {"x/norm": torch.tensor([7.0])}
    expected = [0.0, 0.0, 4.0, 0.0, -6.0, 0.0]
    streams = (fixed(7, 7, 11, 7, 1, 7), omega([3], [4, 6], [3, 2], signs=[0, 1]))
    for stream, way in zip(streams, ("fixed", "elias"), strict=True):
        assert Qsgd(3, coding="shorter").decode({"x": stream, **made}, HEADER)["x"].tolist() == expected
        other = next(each for each in ("fixed", "elias") if each != way)
        with pytest.raises(IntegrityError, match=r"^x: "):
            Qsgd(3, coding=other).decode({"x": stream, **made}, HEADER)  # type: ignore[arg-type]


@pytest.mark.parametrize("norm", [float("nan"), float("inf"), -float("inf"), -1.0])
def test_non_finite_norm_is_refused(norm: float) -> None:
    made = Qsgd(bucket=3).encode({"x": HONEST}, 0)
    with pytest.raises(IntegrityError, match=r"^x: "):
        Qsgd(bucket=3).decode({**made, "x/norm": torch.tensor([1.0, norm])}, HEADER)


@settings(max_examples=60)
@given(st.builds(Qsgd, st.integers(1, 16), coding=st.sampled_from(CODINGS)), st.data())
def test_qsgd_decoding_never_exceeds_declared_memory(codec: Qsgd, data: st.DataObject) -> None:
    count = 3000
    header: Header = {"x": (torch.float32, (count,))}
    made = codec.encode({"x": normal(count) * (torch.arange(count) % data.draw(st.integers(1, 50)) == 0)}, 0)
    most = coding.header(codec, header)["x"][1][0]
    random = np.random.default_rng(data.draw(st.integers(0, 2**32))).integers(0, 256, most).astype(np.uint8)
    value = data.draw(st.sampled_from((made["x"].numpy().copy(), random)))
    for where in data.draw(st.lists(st.integers(0, len(value) - 1), max_size=3)):
        value[where] = data.draw(st.integers(0, 255))
    value[0] = data.draw(st.sampled_from((0, 1)))
    value = value[: data.draw(st.sampled_from((len(value), len(value), len(value) // 2)))]
    tracemalloc.start()
    try:
        codec.decode({**made, "x": torch.from_numpy(value)}, header)
    except IntegrityError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak <= 30 * (4 * count + most) + 100_000


BY_HAND = {1: "0", 2: "100", 3: "110", 4: "101000", 9: "1110010", 16: "10100100000", 100: "1011011001000"}
"""With pencil and paper: 100 is 1100100, 7 bits; 6 is 110, 3 bits; 2 is 10, 2 bits: 10 110 1100100 0."""
WHOLE = st.integers(1, 20) | st.integers(1, 2**16) | st.integers(1, 2**53 - 1)


def codeword(number: int) -> str:
    """As Elias writes it: a 0, before it the number, before it the number of its bits less one, until that is 1."""
    found = "0"
    while number > 1:
        found = f"{number:b}{found}"
        number = number.bit_length() - 1
    return found


def bit_text(parts: list[bits.Bits]) -> str:
    return "".join(str(bit) for part in parts for bit in part.tolist())


@pytest.mark.parametrize("number", BY_HAND)
def test_a_number_s_bits_are_its_codeword(number: int) -> None:
    found = bit_text(bits.omega_encode(np.array([number])))
    assert found == codeword(number) == BY_HAND[number]
    assert bits.omega_size(np.array([number])) == len(found)


@settings(max_examples=80)
@given(st.lists(WHOLE, max_size=40), st.integers(0, 9))
def test_many_take_the_bits_of_their_codewords_and_come_back(values: list[int], before: int) -> None:
    given, lead = np.array(values, np.int64), np.ones(before, np.uint8)
    made = bits.omega_encode(given)
    assert sorted(bit_text(made)) == sorted("".join(map(codeword, values))), "the same bits in another order"
    assert bits.omega_size(given) == len(bit_text(made))
    stream = np.concatenate([lead, *made, lead])
    found, at = bits.omega_decode(stream, before, len(values), max(values, default=1))
    assert found.tolist() == values and at == len(stream) - before


@settings(max_examples=80)
@given(st.lists(WHOLE, min_size=1, max_size=40), st.data())
def test_elias_refuses_short_streams_and_large_numbers(values: list[int], data: st.DataObject) -> None:
    stream = np.concatenate(bits.omega_encode(np.array(values)))
    cut = data.draw(st.integers(0, len(stream) - 1))
    with pytest.raises(IntegrityError):
        bits.omega_decode(stream[:cut], 0, len(values), max(values))
    if max(values) > 1:
        with pytest.raises(IntegrityError):
            bits.omega_decode(stream, 0, len(values), max(values) - 1)


def test_huge_omega_number_is_refused_before_reading() -> None:
    """A group of 2^19 bits is announced, and they are there."""
    stream = np.concatenate([*bits.omega_encode(np.array([2**19]))[:-1], np.ones(2**20, np.uint8)])
    with pytest.raises(IntegrityError):
        bits.omega_decode(stream, 0, 1, 2**20)


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
