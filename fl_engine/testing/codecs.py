"""Test suite for codecs. Subclass `CodecSuite` and define the fixture `codec` and the method `most_error`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fl_engine.codecs import CONTRACT, Identity, codec_of, section_of
from fl_engine.core.errors import IntegrityError
from fl_engine.core.types import Codec, Params
from fl_engine.exchange import coding
from fl_engine.storage.store import encode, tensor_bytes
from fl_engine.testing import law
from fl_engine.testing.tiny import assert_same_bits

law = settings(law, max_examples=25)

SHAPES = st.sampled_from(((), (1,), (7,), (0,), (3, 4), (2, 3, 3, 3), (64,), (70, 300)))
NUMBERS = st.floats(-100, 100, width=32) | st.sampled_from((0.0, -0.0, 1e-30, -1e-6, 1.0))
ROUNDS_UP = 12_472_536_318
"""Seed for which one random number of `qsgd` is 0, so that `qsgd` rounds one of 5,250 values of 1e-30 up."""
NAMES = ("a.weight", "a.bias", "b.linear.weight", "c.weight")


@st.composite
def tensors(draw: st.DrawFn) -> Params:
    """Draw random float32 weights of a network."""
    found: Params = {}
    for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True)):
        shape = draw(SHAPES)
        drawn = draw(st.lists(NUMBERS, min_size=4, max_size=4))
        count = int(np.prod(shape, dtype=int))
        found[name] = torch.tensor(drawn).repeat(-(-count // 4))[:count].reshape(shape)
    return found


class CodecSuite:
    """Test suite that requires a fixture `codec` and a method `most_error`. Subclasses may override `is_unbiased`."""

    def most_error(self, codec: Codec, tensor: Tensor) -> Tensor:
        """Return the maximum error of each element. The result must broadcast to the shape of `tensor`."""
        raise NotImplementedError("subclasses of CodecSuite must define `most_error`")

    def is_unbiased(self, codec: Codec) -> bool:
        """Return True if the mean of the decoded tensors over many seeds converges to the original tensor."""
        return False

    def test_codec_fits_the_contract_and_the_configuration(self, codec: Codec) -> None:
        assert CONTRACT.missing(type(codec)) == []
        assert hash(codec) == hash(codec)
        expected = None if isinstance(codec, Identity) else codec
        assert codec_of(section_of(expected)) == expected

    @law
    @example(given={"a.weight": torch.linspace(-1, 1, 21000).view(70, 300)}, seed=0)  # This tensor is large.
    @example(given={"a.weight": torch.tensor([0.0, 1e-30, 0.0, 1.0]).repeat(5250).view(70, 300)}, seed=ROUNDS_UP)
    @given(given=tensors(), seed=st.integers(0, 2**62))
    def test_encoded_tensors_match_their_header_and_decode(self, codec: Codec, given: Params, seed: int) -> None:
        header = coding.header_of(given)
        made, expected = coding.encode(codec, given, seed), coding.header(codec, header)
        streams = coding.streams(codec, header)
        assert coding.find_misfit(made, expected, streams) is None
        assert tensor_bytes(made) <= coding.bytes_of(expected)
        assert streams or tensor_bytes(made) == coding.bytes_of(expected)
        assert all(name.startswith(NAMES) or "/" in name for name in made)
        found = coding.decode(codec, made, header)
        assert coding.header_of(found) == header and list(found) == list(given)
        for name, tensor in given.items():
            off = (found[name].double() - tensor.double()).abs()
            assert bool((off <= self.most_error(codec, tensor.double())).all()), name

    @law
    @given(given=tensors(), seed=st.integers(0, 2**62))
    def test_bits_depend_only_on_tensors_and_seed(self, codec: Codec, given: Params, seed: int) -> None:
        """Torch's global random generator and the order and memory layout of the tensors must not affect the result."""
        before = {name: tensor.clone() for name, tensor in given.items()}
        torch.manual_seed(1)
        first = coding.encode(codec, given, seed)
        torch.manual_seed(2)
        turned = {name: given[name].t().contiguous().t() if given[name].dim() == 2 else given[name] for name in given}
        assert encode(coding.encode(codec, dict(reversed(turned.items())), seed)) == encode(first)
        assert_same_bits(given, before)
        header = coding.header_of(given)
        assert_same_bits(coding.decode(codec, first, header), coding.decode(codec, first, header))

    def test_errors_of_an_unbiased_codec_cancel_out(self, codec: Codec) -> None:
        if not self.is_unbiased(codec):
            pytest.skip("this codec is biased")
        given, rounds = {"a.weight": torch.cat([torch.linspace(-1, 1, 31), torch.logspace(-6, 0, 7)])}, 600
        header, total = coding.header_of(given), torch.zeros(38, dtype=torch.float64)
        for seed in range(rounds):
            total += coding.decode(codec, coding.encode(codec, given, seed), header)["a.weight"].double()
        exact = given["a.weight"].double()
        # By Hoeffding's inequality, an element's mean error exceeds this limit with a probability of at most 10^-7.
        most = self.most_error(codec, exact) * (2 * np.log(2e7) / rounds) ** 0.5
        assert bool(((total / rounds - exact).abs() <= most + 1e-7).all())

    @law
    @given(given=tensors())
    def test_smaller_tensors_need_no_more_bytes(self, codec: Codec, given: Params) -> None:
        """After pruning the received model, a client must not return a larger file than it received."""
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
        """The tensors have valid names, types and shapes, but arbitrary bytes. Streams have arbitrary lengths."""
        header = coding.header_of(given)
        made, shorter = coding.encode(codec, given, 0), coding.streams(codec, header)
        name = data.draw(st.sampled_from(sorted(made)))
        spoilt = made[name].clone()
        if spoilt.numel():
            content = spoilt.reshape(-1).view(torch.uint8)
            keep, size = data.draw(st.integers(0, len(content))), len(content)
            few = min(size, 1000)  # Hypothesis draws at most a few kB.
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
    def test_wrong_tensors_are_refused(self, codec: Codec, given: Params, data: st.DataObject) -> None:
        header, made = coding.header_of(given), coding.encode(codec, given, 0)
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
                coding.decode(codec, each, header)

    @law
    @given(given=tensors())
    def test_statistics_and_integers_are_not_encoded(self, codec: Codec, given: Params) -> None:
        rest: Params = {
            "a.running_mean": torch.tensor([1 / 3, -1e30]),
            "a.running_var": torch.tensor([1e9, 1e-9]),
            "a.num_batches_tracked": torch.tensor(2**40),
        }
        made = coding.encode(codec, given | rest, 0)
        assert_same_bits({name: made[name] for name in rest}, rest)
        found = coding.decode(codec, made, coding.header_of(given | rest))
        assert_same_bits({name: found[name] for name in rest}, rest)
        assert tensor_bytes(made) == tensor_bytes(coding.encode(codec, given, 0)) + tensor_bytes(rest)
