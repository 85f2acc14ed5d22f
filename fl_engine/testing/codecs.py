"""What every codec has to hold, for pytest: subclass `CodecSuite`, give it a `codec` fixture and its error, done.

class TestMine(CodecSuite):
    @pytest.fixture
    def codec(self): return Mine()

    def most_error(self, codec, tensor): return tensor.abs().max() / 100
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fl_engine.codecs import CONTRACT, Identity, codec_of, section_of
from fl_engine.core.errors import IntegrityError
from fl_engine.core.types import Codec, Params
from fl_engine.exchange import coding
from fl_engine.storage.store import encode, tensor_bytes
from fl_engine.testing.tiny import assert_same_bits

law = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors, HealthCheck.too_slow],
)

SHAPES = st.sampled_from(((), (1,), (7,), (0,), (3, 4), (2, 3, 3, 3), (64,), (70, 300)))
NUMBERS = st.floats(-100, 100, width=32) | st.sampled_from((0.0, -0.0, 1e-30, -1e-6, 1.0))
ROUNDS_UP = 12_472_536_318
"""A seed with which `qsgd` rounds one of 5,250 times 1e-30 up: of its draws one in 2^24 is exactly 0."""
NAMES = ("a.weight", "a.bias", "b.linear.weight", "c.weight")


@st.composite
def tensors(draw: st.DrawFn) -> Params:
    """Weights of a network, float32."""
    found: Params = {}
    for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True)):
        shape = draw(SHAPES)
        drawn = draw(st.lists(NUMBERS, min_size=4, max_size=4))
        count = int(np.prod(shape, dtype=int))
        found[name] = torch.tensor(drawn).repeat(-(-count // 4))[:count].reshape(shape)
    return found


class CodecSuite:
    """Needs a fixture `codec`, and `most_error`. `is_unbiased` may be overridden."""

    @pytest.fixture
    def codec(self) -> Codec:
        raise NotImplementedError("a CodecSuite needs a `codec` fixture")

    def most_error(self, codec: Codec, tensor: Tensor) -> Tensor:
        """How far each element may be from what it was, in the shape of the tensor or one that broadcasts."""
        raise NotImplementedError("a CodecSuite needs to know the error that the codec promises")

    def is_unbiased(self, codec: Codec) -> bool:
        """Whether what comes back is, on average over seeds, what was given."""
        return False

    def test_it_has_what_a_codec_must_have(self, codec: Codec) -> None:
        assert CONTRACT.misfits(type(codec)) == []
        assert hash(codec) == hash(codec)

    def test_a_configuration_names_it_and_it_names_itself(self, codec: Codec) -> None:
        expected = None if isinstance(codec, Identity) else codec
        assert codec_of(section_of(expected)) == expected

    @law
    @example(given={"a.weight": torch.linspace(-1, 1, 21000).view(70, 300)}, seed=0)  # drawn ones may all be small
    @example(given={"a.weight": torch.tensor([0.0, 1e-30, 0.0, 1.0]).repeat(5250).view(70, 300)}, seed=ROUNDS_UP)
    @given(given=tensors(), seed=st.integers(0, 2**62))
    def test_what_comes_back_is_within_its_error(self, codec: Codec, given: Params, seed: int) -> None:
        header = coding.header_of(given)
        found = coding.decoded(codec, coding.encoded(codec, given, seed), header)
        assert coding.header_of(found) == header and list(found) == list(given)
        for name, tensor in given.items():
            off = (found[name].double() - tensor.double()).abs()
            assert bool((off <= self.most_error(codec, tensor.double())).all()), name

    @law
    @given(given=tensors(), seed=st.integers(0, 2**62))
    def test_its_bits_follow_from_tensors_and_seed(self, codec: Codec, given: Params, seed: int) -> None:
        """Not from a global generator, nor from the order of the tensors, nor from how they lie in memory."""
        before = {name: tensor.clone() for name, tensor in given.items()}
        torch.manual_seed(1)
        first = coding.encoded(codec, given, seed)
        torch.manual_seed(2)
        turned = {name: given[name].t().contiguous().t() if given[name].dim() == 2 else given[name] for name in given}
        assert encode(coding.encoded(codec, dict(reversed(turned.items())), seed)) == encode(first)
        assert_same_bits(given, before)
        header = coding.header_of(given)
        assert_same_bits(coding.decoded(codec, first, header), coding.decoded(codec, first, header))

    def test_errors_cancel_out_where_it_says_so(self, codec: Codec) -> None:
        if not self.is_unbiased(codec):
            pytest.skip("this codec does not say that it is unbiased")
        given, rounds = {"a.weight": torch.cat([torch.linspace(-1, 1, 31), torch.logspace(-6, 0, 7)])}, 600
        header, total = coding.header_of(given), torch.zeros(38, dtype=torch.float64)
        for seed in range(rounds):
            total += coding.decoded(codec, coding.encoded(codec, given, seed), header)["a.weight"].double()
        exact = given["a.weight"].double()
        # Hoeffding: a mean of numbers that are at most an error away is so far off once in 10^7 elements.
        most = self.most_error(codec, exact) * (2 * np.log(2e7) / rounds) ** 0.5
        assert bool(((total / rounds - exact).abs() <= most + 1e-7).all())

    @law
    @given(given=tensors(), seed=st.integers(0, 2**62))
    def test_it_makes_what_its_header_says(self, codec: Codec, given: Params, seed: int) -> None:
        header = coding.header_of(given)
        made, said = coding.encoded(codec, given, seed), coding.header(codec, header)
        assert coding.misfit(made, said, coding.streams(codec, header)) is None
        assert tensor_bytes(made) <= coding.bytes_of(said)
        if not coding.streams(codec, header):
            assert tensor_bytes(made) == coding.bytes_of(said)
        assert all(name.startswith(NAMES) or "/" in name for name in made)

    @law
    @given(given=tensors())
    def test_less_makes_no_more(self, codec: Codec, given: Params) -> None:
        """A client that prunes sends a part of what it received, in a file of at most its size."""
        header = coding.header_of(given)
        most = coding.bytes_of(coding.header(codec, header))
        for name, (dtype, shape) in header.items():
            without = {other: each for other, each in header.items() if other != name}
            assert coding.bytes_of(coding.header(codec, without)) <= most
            for axis, size in enumerate(shape):
                smaller = (*shape[:axis], max(0, size - 1), *shape[axis + 1 :])
                assert coding.bytes_of(coding.header(codec, header | {name: (dtype, smaller)})) <= most

    @law
    @given(given=tensors(), data=st.data())
    def test_any_content_is_decoded_or_refused(self, codec: Codec, given: Params, data: st.DataObject) -> None:
        """Tensors of the right names, types and shapes, with any bytes, and streams of any length."""
        header = coding.header_of(given)
        made, shorter = coding.encoded(codec, given, 0), coding.streams(codec, header)
        name = data.draw(st.sampled_from(sorted(made)))
        spoilt = made[name].clone()
        if spoilt.numel():
            content = spoilt.reshape(-1).view(torch.uint8)
            keep, size = data.draw(st.integers(0, len(content))), len(content)
            few = min(size, 1000)  # drawn, and repeated: hypothesis draws a few kB at most
            raw = data.draw(st.binary(min_size=few, max_size=few)) * -(-size // few)
            content[keep:] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)[keep:size]
        if name in shorter:
            spoilt = spoilt[: data.draw(st.integers(0, len(spoilt)))]
        try:
            found = codec.decode({**made, name: spoilt}, header)
        except IntegrityError:
            return
        assert coding.header_of(found) == header

    @law
    @given(given=tensors(), data=st.data())
    def test_what_is_no_encoding_is_named(self, codec: Codec, given: Params, data: st.DataObject) -> None:
        header, made = coding.header_of(given), coding.encoded(codec, given, 0)
        name = data.draw(st.sampled_from(sorted(made)))
        others = {other: tensor for other, tensor in made.items() if other != name}
        wrong: tuple[Params, ...] = (
            others,
            {**made, "stray": torch.zeros(1)},
            {**made, name: made[name].to(torch.complex64)},
            {**made, name: torch.zeros((*made[name].shape, 2), dtype=made[name].dtype)},
        )
        for each in wrong:
            with pytest.raises(IntegrityError):
                coding.decoded(codec, each, header)

    @law
    @given(given=tensors())
    def test_statistics_and_integers_travel_as_they_are(self, codec: Codec, given: Params) -> None:
        rest: Params = {
            "a.running_mean": torch.tensor([1 / 3, -1e30]),
            "a.running_var": torch.tensor([1e9, 1e-9]),
            "a.num_batches_tracked": torch.tensor(2**40),
        }
        made = coding.encoded(codec, given | rest, 0)
        assert_same_bits({name: made[name] for name in rest}, rest)
        found = coding.decoded(codec, made, coding.header_of(given | rest))
        assert_same_bits({name: found[name] for name in rest}, rest)
        assert tensor_bytes(made) == tensor_bytes(coding.encoded(codec, given, 0)) + tensor_bytes(rest)
