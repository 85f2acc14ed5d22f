"""QSGD: right on average, never further off than a level, as long as it says, and every other stream is refused."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.codecs import Qsgd, bits, elias
from fl_engine.core.errors import IntegrityError, ModelError
from fl_engine.core.types import ClientFailure, Codecs, Header, Params
from fl_engine.exchange import coding
from fl_engine.testing.tiny import assert_same_bits
from tests.laws.test_codecs import Case, at

CODINGS = ("fixed", "elias", "shorter")
CODECS = st.builds(
    Qsgd, st.integers(1, 16), st.none() | st.integers(1, 40), st.none() | st.integers(1, 9), st.sampled_from(CODINGS)
)
WEIGHTS = st.lists(st.floats(-100, 100, width=32) | st.sampled_from((0.0, 0.0, -0.0, 1e-30)), max_size=40)


def back(codec: Qsgd, x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    given = {"x": x}
    return coding.decoded(codec, coding.encoded(codec, given, seed), coding.header_of(given))["x"]


def steps(codec: Qsgd, x: torch.Tensor) -> torch.Tensor:
    """What a level is worth, for each element: another reading of the definition, float64."""
    found = torch.zeros(len(x), dtype=torch.float64)
    for start in range(0, len(x), codec.bucket or max(1, len(x))):
        part = slice(start, start + (codec.bucket or len(x)))
        found[part] = x[part].double().square().sum().sqrt() / codec.s
    return found


def normal(count: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal(count, dtype=np.float32))


# ------------------------------------------------------------------------------------------------------- rounding
def assert_unbiased(codec: Qsgd) -> None:
    """Of many roundings of the same numbers, each number's mean and the mean of all errors are where they have to be.
    Hoeffding: a bound that one in 10^9 exceeds."""
    x, rounds = normal(300), 400
    step, total = steps(codec, x), torch.zeros(300, dtype=torch.float64)
    for seed in range(rounds):
        total += back(codec, x, seed).double()
    off = (total / rounds - x.double()) / step
    one, all = (math.sqrt(math.log(2e9) / (2 * count)) for count in (rounds, rounds * 300))
    assert float(off.abs().max()) <= one, "a number's mean is elsewhere"
    assert abs(float(off.mean())) <= all, "all are off to one side"
    assert abs(float((off * x.sign()).mean())) <= all, "numbers become larger, or smaller"


@pytest.mark.parametrize(
    "codec",
    [Qsgd(bits=1), Qsgd(bits=4), Qsgd(), Qsgd(bits=16), Qsgd(levels=5, bucket=None), Qsgd(bucket=64, coding="elias")],
    ids=str,
)
def test_what_comes_back_is_right_on_average(codec: Qsgd) -> None:
    assert_unbiased(codec)


def test_tensors_and_seeds_have_random_numbers_of_their_own() -> None:
    x = normal(300)
    a, b = (Qsgd(bits=2).encode({"a": x, "b": x}, seed) for seed in (0, 1))
    assert len({made[name].numpy().tobytes() for made in (a, b) for name in "ab"}) == 4
    assert_same_bits(Qsgd(bits=2).encode({"b": x}, 0), {name: a[name] for name in ("b", "b/norm")})


@settings(max_examples=120)
@given(CODECS, WEIGHTS, st.integers(0, 2**62))
def test_nothing_is_further_off_than_a_level(codec: Qsgd, drawn: list[float], seed: int) -> None:
    x = torch.tensor(drawn, dtype=torch.float32)
    found, step = back(codec, x, seed), steps(codec, x)
    off = (found.double() - x.double()).abs()
    assert bool((off <= step * (1 + 1e-6) + x.double().abs() * 1e-6 + codec.s * 2.0**-125).all())
    assert bool((found[x == 0] == 0).all()) and not bool(torch.signbit(found[found == 0]).any())


@settings(max_examples=80)
@given(CODECS, WEIGHTS)
def test_the_coding_changes_the_length_alone(codec: Qsgd, drawn: list[float]) -> None:
    x = torch.tensor(drawn, dtype=torch.float32)
    made = {way: coding.encoded(replace(codec, coding=way), {"x": x}, 3) for way in ("fixed", "elias", "shorter")}
    first, second, third = (back(replace(codec, coding=way), x, 3) for way in ("fixed", "elias", "shorter"))
    assert_same_bits({"x": first}, {"x": second})
    assert_same_bits({"x": first}, {"x": third})
    lengths = {way: len(each["x"]) for way, each in made.items()}
    assert lengths["shorter"] == min(lengths["fixed"], lengths["elias"])
    assert lengths["fixed"] == 1 + -(-len(x) * codec.width // 8), "a byte that says the coding, and q + 1 bits each"


@pytest.mark.parametrize("s", [1, 2, 4, 5])
def test_no_stream_is_longer_than_its_header_says(s: int) -> None:
    codec = Qsgd(levels=s, coding="elias")
    most, longest = coding.header(codec, HEADER)["x"][1][0], 0
    for levels in itertools.product(sorted({0, 1, -s, s}), repeat=6):
        stream = codec._stream(np.array(levels, np.int32))
        longest = max(longest, len(stream))
        assert codec._read(stream, 6).tolist() == list(levels)
    assert longest == most, "and one is as long"


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


@pytest.mark.parametrize("coding_", CODINGS)
def test_nothing_and_a_single_number(coding_: Any) -> None:
    codec = Qsgd(bits=1, coding=coding_)
    assert back(codec, torch.zeros(0, 3)).shape == (0, 3)
    assert back(codec, torch.tensor(-2.5)) == -2.5
    assert back(codec, torch.tensor(0.0)) == 0
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        assert torch.equal(back(codec, torch.tensor([-2.5, 0.0], dtype=dtype)), torch.tensor([-2.5, 0.0], dtype=dtype))


def test_a_number_that_is_none_is_said() -> None:
    for wrong in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ModelError, match=r"^b"):
            Qsgd().encode({"a": torch.ones(3), "b": torch.tensor([1.0, wrong])}, 0)
    with pytest.raises(ModelError, match="norm of b"):
        Qsgd().encode({"b": torch.full((2,), 3e38)}, 0)
    assert bool((back(Qsgd(bits=16), torch.full((3,), 1e-40)) == 0).all()), "too small for a step"


# ------------------------------------------------------------------------------------------------------ strangers
HEADER: Header = {"x": (torch.float32, (6,))}
HONEST = torch.tensor([0.0, 0.0, 3.0, 0.0, -4.0, 0.0])


def omega(*parts: list[int], signs: list[int] = [1]) -> torch.Tensor:  # noqa: B006
    """A stream: the number of levels and 1, the levels, their signs, the runs and 1."""
    head, levels, runs = (elias.encode(np.array(part, np.int64)) for part in parts)
    return torch.from_numpy(np.append(np.uint8(1), bits.packed([*head, *levels, np.array(signs, np.uint8), *runs])))


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
def test_a_norm_that_is_none_is_refused(norm: float) -> None:
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


# ------------------------------------------------------------------------------------------------- through a store
QSGD = Codecs(Qsgd(bits=4), Qsgd(bits=4))
WEIGHT = "conv1.conv.weight"


def changed(name: str, value: float) -> Callable[[Params], Params]:
    return at(name, lambda tensor: torch.full_like(tensor, value))


LIES: dict[str, tuple[str, Callable[[Params], Params]]] = {
    "another flag": ("encoding", changed(WEIGHT, 7)),
    "half a stream": ("encoding", at(WEIGHT, lambda t: t[: len(t) // 2].clone())),
    "a level beyond": ("encoding", at(WEIGHT, lambda t: torch.cat([t[:1] * 0, torch.full_like(t[1:], 255)]))),
    "a norm of nan": ("encoding", changed(f"{WEIGHT}/norm", float("nan"))),
    "a norm of infinity": ("encoding", changed(f"{WEIGHT}/norm", float("inf"))),
    "a norm below zero": ("encoding", changed(f"{WEIGHT}/norm", -1.0)),
    "a norm beyond any weight": ("finite", changed(f"{WEIGHT}/norm", 1e37)),
    "buckets that do not divide": ("shape", at(f"{WEIGHT}/norm", lambda t: torch.cat([t, t]))),
    "a stream that is too long": ("shape", at(WEIGHT, lambda t: torch.cat([t] * 9))),
}


@pytest.mark.parametrize("lie", LIES)
def test_each_lie_is_its_client_s_failure_and_has_its_code(lie: str, tmp_path: Path) -> None:
    code, change = LIES[lie]
    found = Case.of(QSGD).told(tmp_path, change)
    assert isinstance(found, ClientFailure), "it is taken"
    assert (found.stage, found.code) == ("validate", code), found.reason


# ----------------------------------------------------------------------------------------------- bits and Elias's code
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


def bit_text(parts: list[bits.Bits]) -> str:
    return "".join(str(bit) for part in parts for bit in part.tolist())


@pytest.mark.parametrize("number", sorted({*range(1, 101), *BY_HAND}))
def test_a_number_s_bits_are_its_codeword(number: int) -> None:
    found = bit_text(elias.encode(np.array([number])))
    assert found == codeword(number) == BY_HAND.get(number, found)
    if number <= 100:
        assert found == (f"{BEFORE[number.bit_length() - 1]}{number:b}0" if number > 1 else "0")
    assert elias.size(np.array([number])) == len(found)


@settings(max_examples=80)
@given(st.lists(WHOLE, max_size=40), st.integers(0, 9))
def test_many_take_the_bits_of_their_codewords_and_come_back(values: list[int], before: int) -> None:
    given, lead = np.array(values, np.int64), np.ones(before, np.uint8)
    made = elias.encode(given)
    assert sorted(bit_text(made)) == sorted("".join(map(codeword, values))), "the same bits in another order"
    assert elias.size(given) == len(bit_text(made))
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
