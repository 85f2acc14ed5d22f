"""Kernels of our own compute what PyTorch's do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.training import kernels


def drawn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def assert_equal(ours: torch.Tensor, expected: torch.Tensor, *inputs: torch.Tensor | None) -> None:
    """Equal outputs, and equal gradients of the inputs."""
    torch.testing.assert_close(ours, expected)
    given = [t for t in inputs if t is not None]
    upstream = torch.randn(expected.shape, dtype=torch.float64)
    found, wanted = (torch.autograd.grad(each, given, upstream) for each in (ours, expected))
    torch.testing.assert_close(found, wanted)


@settings(max_examples=40)
@given(
    batch=st.integers(1, 4),
    channels=st.tuples(st.integers(1, 5), st.integers(1, 6)),
    size=st.tuples(st.integers(3, 7), st.integers(3, 7)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    with_bias=st.booleans(),
    seed=st.integers(0, 100),
)
def test_unfolded_convolution_equals_conv2d_with_gradients(
    batch: int,
    channels: tuple[int, int],
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    with_bias: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = drawn(generator, batch, channels[0], *size)
    weight = drawn(generator, channels[1], channels[0], *kernel)
    bias = drawn(generator, channels[1]) if with_bias else None
    expected = F.conv2d(x, weight, bias, stride, padding)
    assert_equal(kernels.unfolded_conv2d(x, weight, bias, stride, padding), expected, x, weight, bias)


@settings(max_examples=25)
@given(
    n=st.integers(1, 4),
    batch=st.integers(1, 5),
    features=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    with_bias=st.booleans(),
    seed=st.integers(0, 100),
)
def test_batched_linear_equals_each_layer_with_gradients(
    n: int, batch: int, features: tuple[int, int], with_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight = drawn(generator, batch, n * features[0]), drawn(generator, n, features[1], features[0])
    bias = drawn(generator, n, features[1]) if with_bias else None
    parts = x.view(batch, n, features[0]).unbind(1)
    expected = torch.cat(
        [F.linear(part, weight[i], None if bias is None else bias[i]) for i, part in enumerate(parts)], dim=1
    )
    assert_equal(kernels.batched_linear(x, weight, bias), expected, x, weight, bias)
