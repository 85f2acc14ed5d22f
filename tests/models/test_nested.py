"""Networks that were published with nested sub-networks: counts, nesting, and forward passes by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fl_engine.core.contracts import Nested
from fl_engine.core.costs import count_params
from fl_engine.core.slicing import contains, runnable, take
from fl_engine.core.types import FULL, Params
from fl_engine.models.chains import HarCNN
from fl_engine.models.mobilenetv3_ofa import MobileNetV3OFA
from fl_engine.testing.models import random_params, samples

TINY_IMAGENET = MobileNetV3OFA((3, 64, 64), 200)
NETWORKS: dict[str, tuple[Any, int]] = {
    "mobilenetv3_ofa": (TINY_IMAGENET, 243),
    "mobilenetv3_ofa, narrow": (MobileNetV3OFA((3, 32, 32), 10, width=0.05, norm="batch"), 243),
    "har_cnn": (HarCNN((128, 9), 6), 3),
    "har_cnn, narrow": (HarCNN((8, 2), 3, width=0.05), 3),
}
"""The family, and how many sub-networks it has."""

SIZES = ("small", "medium", "large")
UNIFORM = dict(zip(SIZES, ((2, 3), (3, 4), (4, 6)), strict=True))
"""Depth and expansion of each stage."""


@pytest.mark.parametrize("name", NETWORKS)
def test_nested_networks_are_ascending_parts_of_the_largest(name: str) -> None:
    family, count = NETWORKS[name]
    assert isinstance(family, Nested)
    nested, layout = family.nested(), family.layout()
    assert len(nested) == len({layout.form(spec) for spec in nested.values()}) == count
    params = [count_params(family, spec) for spec in nested.values()]
    assert params == sorted(params)
    assert (next(iter(nested)), next(reversed(nested))) == ("small", "large")
    assert nested["large"] == FULL
    for inner, outer in pairwise(SIZES):
        assert contains(layout, nested[outer], nested[inner])


# ---------------------------------------------------------------------------------------- the once-for-all network
Choices = tuple[tuple[int, int], ...]
STAGES = ((24, 3, 2, 0), (40, 5, 2, 1), (80, 3, 2, 0), (112, 3, 1, 1), (160, 5, 2, 1))
"""Channels, kernel, stride, and whether there is squeeze-and-excitation; h_swish from the third on."""


def name_of(choices: Choices) -> str:
    alone = {(choice,) * 5: name for name, choice in UNIFORM.items()}
    return alone.get(choices, "-".join(f"d{d}w{w}" for d, w in choices))


any_choices = st.tuples(*[st.sampled_from(list(UNIFORM.values()))] * 5)


@settings(max_examples=40)
@given(inner=any_choices, outer=any_choices)
def test_sub_network_is_part_of_those_with_larger_stages(inner: Choices, outer: Choices) -> None:
    nested = TINY_IMAGENET.nested()
    larger = all(a <= b for a, b in zip(inner, outer, strict=True))
    assert contains(TINY_IMAGENET.layout(), nested[name_of(outer)], nested[name_of(inner)]) == larger


def by_hand(params: Mapping[str, Tensor], x: Tensor, choices: Choices) -> Tensor:
    """The network as OFA describes it, on the state of a sub-network and given statistics."""

    def conv(x: Tensor, name: str, act: Callable[[Tensor], Tensor], stride: int = 1) -> Tensor:
        weight = params[f"{name}.conv.weight"]
        depthwise = len(weight) if name.endswith("depthwise") else 1
        x = F.conv2d(x, weight, None, stride, weight.shape[-1] // 2, 1, depthwise)
        scale, shift, mean, var = (params[f"{name}.bn.{n}"] for n in ("weight", "bias", "running_mean", "running_var"))
        return act(F.batch_norm(x, mean, var, scale, shift, False, 0.1, 1e-5))

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, params[f"{name}.weight"].flatten(1), params.get(f"{name}.bias"))

    def swish(x: Tensor) -> Tensor:
        return x * (x + 3).clamp(0, 6) / 6

    def none(x: Tensor) -> Tensor:
        return x

    x = conv(x, "stem", swish, 1 if x.shape[-1] <= 32 else 2)
    x = x + conv(conv(x, "first.depthwise", torch.relu), "first.project", none)
    for i, ((_, _, stride, squeeze), (depth, _)) in enumerate(zip(STAGES, choices, strict=True), 1):
        act = torch.relu if i <= 2 else swish
        for b in range(depth):
            name = f"stage{i}.{b}"
            y = conv(conv(x, f"{name}.expand", act), f"{name}.depthwise", act, stride if b == 0 else 1)
            if squeeze:
                gate = linear(torch.relu(linear(y.mean((2, 3)), f"{name}.se.squeeze")), f"{name}.se.excite")
                y = y * ((gate + 3).clamp(0, 6) / 6)[:, :, None, None]
            y = conv(y, f"{name}.project", none)
            x = y if b == 0 else x + y
    x = conv(x, "final", swish).mean((2, 3))
    return linear(swish(linear(x, "mix.conv")), "classifier")


@pytest.mark.parametrize("side", [20, 33])
@pytest.mark.parametrize("choices", [((2, 3),) * 5, ((4, 6), (2, 3), (3, 4), (2, 3), (4, 6))], ids=name_of)
def test_forward_by_hand(side: int, choices: Choices) -> None:
    family = MobileNetV3OFA((2, side, side), 5, width=0.2)
    spec = family.nested()[name_of(choices)]
    params: Params = take(random_params(family), family.layout(), spec)
    x = samples(family, 2).double()
    with torch.no_grad():
        found = runnable(family, spec, params).eval()(x)
    torch.testing.assert_close(found, by_hand(params, x, choices))


# ------------------------------------------------------------------------------------------------------ har_cnn


def test_har_cnn_by_hand() -> None:
    """Its convolutions are of one dimension, along the steps."""
    family = HarCNN((7, 3), 4, width=0.5)
    spec = family.nested()["medium"]
    params, x = take(random_params(family), family.layout(), spec), samples(family, 2).double()
    y = x.transpose(1, 2)
    for i in (1, 2, 3):
        y = F.conv1d(y, params[f"conv{i}.conv.weight"].squeeze(-1), params[f"conv{i}.conv.bias"], padding=1)
        scale, shift, mean, var = (
            params[f"conv{i}.bn.{name}"] for name in ("weight", "bias", "running_mean", "running_var")
        )
        y = F.batch_norm(y, mean, var, scale, shift).relu()
    y = y.flatten(1)
    for i in (1, 2, 3, 4):
        y = F.linear(y, params[f"fc{i}.linear.weight"], params[f"fc{i}.linear.bias"]).relu()
    with torch.no_grad():
        found = runnable(family, spec, params).eval()(x)
    torch.testing.assert_close(found, F.linear(y, params["classifier.weight"], params["classifier.bias"]))
