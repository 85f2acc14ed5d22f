"""The rules that cut a network: counts to the channel, windows that roll, random sets, early exits that fit."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.algorithms import ScaleFL
from fl_engine.core import seeds
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ModelError, PoolError
from fl_engine.core.slicing import contains
from fl_engine.core.types import Axis, ParamLayout, Slot, SubmodelSpec
from fl_engine.core.widths import (
    choose_exits,
    count_kept,
    early_exit,
    exit_name,
    exit_points,
    prefix,
    random_drop,
    rolling,
    up_to,
    window_start,
    with_exits,
)
from fl_engine.models.chains import VGG16, SmallCNN
from fl_engine.models.mobilenetv2 import MobileNetV2
from fl_engine.models.resnet import ResNet34
from fl_engine.testing.models import kept_channels
from fl_engine.testing.tiny import TinyNet, tiny_pool

law = settings(max_examples=60)
TINY = TinyNet()
SMALL = SmallCNN((1, 8, 8), 10)
CIFAR = (3, 32, 32)


def layout_of(*sizes: int) -> ParamLayout:
    groups = {f"g{i}": size for i, size in enumerate(sizes)} | {"classes": 10}
    return ParamLayout(groups, {f"w{g}": Slot(g, (Axis(g),)) for g in groups})


@law
@given(size=st.integers(1, 8192), below=st.integers(1, 500), data=st.data())
def test_counts_are_those_of_exact_fractions(size: int, below: int, data: st.DataObject) -> None:
    above = data.draw(st.integers(1, below))
    exact = Fraction(above, below) * size
    assert count_kept(size, above / below, "floor") == max(1, math.floor(exact))
    assert count_kept(size, above / below, "ceil") == math.ceil(exact)


def test_the_two_roundings_are_different_networks() -> None:
    """0.71 of 16, 32, 64, 64: 11.36, 22.72, 45.44, 45.44."""
    layout = SMALL.layout()
    up, down = prefix(layout, 0.71, "ceil"), prefix(layout, 0.71, "floor")
    assert up == SubmodelSpec.of({"conv1": 12, "conv2": 23, "conv3": 46, "fc1": 46})
    assert down == SubmodelSpec.of({"conv1": 11, "conv2": 22, "conv3": 45, "fc1": 45})
    assert prefix(layout, 0.71) == up
    assert contains(layout, up, down)


def equation_3_4(round: int, beta: Fraction, size: int, step: int = 1) -> set[int]:
    """As it is printed; `step` channels per round (Sec. 3.3.7), at least one channel (ours)."""
    j_hat = (round * step) % size
    count = max(1, math.floor(beta * size))
    if j_hat + count <= size:
        return set(range(j_hat, j_hat + count))
    return set(range(j_hat, size)) | set(range(0, j_hat + count - size))


def window(layout: ParamLayout, width: float, round: int, overlap: float = 1.0) -> dict[str, list[int]]:
    spec = rolling(layout, width, window_start(layout, width, round, overlap))
    return {group: kept_channels(layout, spec, group) for group in layout.groups}


def test_the_papers_figure() -> None:
    """Fig. 3.1: five channels a to e. Four of them: a, b, c, d, then b, c, d, e, then c, d, e, a. Three of them:
    c, d, e, then d, e, a, then e, a, b. (There in the same rounds; by Eq. 3.4 the windows of a round start together.)
    """
    layout = layout_of(5)
    assert [window(layout, 0.8, j)["g0"] for j in range(3)] == [[0, 1, 2, 3], [1, 2, 3, 4], [0, 2, 3, 4]]
    assert [window(layout, 0.6, j)["g0"] for j in range(2, 5)] == [[2, 3, 4], [0, 3, 4], [0, 1, 4]]


RATIOS = st.integers(1, 20).flatmap(lambda b: st.integers(1, b).map(lambda a: Fraction(a, b))).filter(lambda f: f < 1)


TENTHS = st.integers(0, 10).map(lambda tenths: Fraction(tenths, 10))


@law
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3), beta=RATIOS, overlap=TENTHS,
    first=st.integers(0, 10**6),
)  # fmt: skip
def test_windows_are_those_of_the_equation(sizes: list[int], beta: Fraction, overlap: Fraction, first: int) -> None:
    """1 + floor(beta * (1 - r) * K) channels per round. Where the stride and K let the window come around evenly, each
    channel is trained equally often; that is so whenever their greatest common divisor divides the window."""
    layout, visits = layout_of(*sizes), [Counter[int]() for _ in sizes]
    steps = [1 + math.floor(beta * (1 - overlap) * size) for size in sizes]
    for round in range(first, first + max(sizes)):
        found = window(layout, float(beta), round, float(overlap))
        for i, (size, step) in enumerate(zip(sizes, steps, strict=True)):
            kept = found[f"g{i}"]
            assert set(kept) == equation_3_4(round, beta, size, step) and kept == sorted(kept)
            visits[i].update(kept)
        assert found["classes"] == list(range(10)), "the output layer is never cut"
    (size, *others), step, count = sizes, steps[0], max(1, math.floor(beta * sizes[0]))
    if not others and count % math.gcd(step, size) == 0:
        assert visits[0] == dict.fromkeys(range(size), count)


def test_the_published_stride_can_pass_channels_over() -> None:
    """Sec. 3.3.7 as printed, with r = 0: one channel of four, a stride of 1 + 1. Channels 1 and 3 are never trained by
    a client of this capacity. The engine follows the formula; the default r = 1 does not have this."""
    layout = layout_of(4)
    assert {tuple(window(layout, 0.25, j, 0.0)["g0"]) for j in range(40)} == {(0,), (2,)}


@law
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    widths=st.tuples(RATIOS, RATIOS).map(sorted),
    seed=st.integers(0, 2**32),
)
def test_random_parts_have_their_sizes_and_nest(sizes: list[int], widths: list[Fraction], seed: int) -> None:
    layout, rng = layout_of(*sizes), np.random.default_rng(seed)
    small, large = (float(w) for w in widths)
    outer = random_drop(layout, large, rng)
    inner = random_drop(layout, small, rng, inside=outer)
    assert contains(layout, outer, inner)
    for spec, width in ((inner, widths[0]), (outer, widths[1])):
        layout.check(spec)
        for i, size in enumerate(sizes):
            assert layout.width(spec, f"g{i}") == max(1, math.floor(width * size)), "of the whole, not of the part"
        assert kept_channels(layout, spec, "classes") == list(range(10))
    assert random_drop(layout, 1.0, rng, inside=outer) == outer
    assert random_drop(layout, large, np.random.default_rng(seed)) == outer


def test_all_channels_are_drawn_alike_and_layers_apart() -> None:
    """Three of eight, 2,000 times: each channel 750 times, within four standard deviations; of all 56 sets."""
    layout, rng, draws = layout_of(8, 8), seeds.rng(1, "widths"), 2000
    drawn = [random_drop(layout, 3 / 8, rng) for _ in range(draws)]
    for group in ("g0", "g1"):
        visits = Counter(c for spec in drawn for c in kept_channels(layout, spec, group))
        for channel in range(8):
            assert abs(visits[channel] - draws * 3 / 8) < 4 * math.sqrt(draws * 3 / 8 * 5 / 8)
        assert len({tuple(kept_channels(layout, spec, group)) for spec in drawn}) == math.comb(8, 3)
    alike = sum(kept_channels(layout, spec, "g0") == kept_channels(layout, spec, "g1") for spec in drawn)
    assert alike < draws / 56 * 2


@lru_cache(maxsize=256)
def blocks_at(family: ModelFamily, width: Fraction) -> list[tuple[str, int, int]]:
    """(block, parameters up to its end, output channels), from the plain network that is built for this width."""
    layout = family.layout()
    kept = {g: math.ceil(width * n) for g, n in layout.groups.items() if g != "classes"}
    with torch.device("meta"):
        state = family.module(SubmodelSpec.of(kept)).state_dict()
    out, total = [], 0
    for block in layout.blocks:
        mine = [t for name, t in state.items() if layout.slots[name].block == block]
        total += sum(t.numel() for t in mine)
        out.append((block, total, mine[-1].shape[0]))
    return out


def sizes_at(family: ModelFamily, width: Fraction) -> list[int]:
    points = exit_points(family)
    found = blocks_at(family, width)
    return [total + outputs * family.outputs + family.outputs for block, total, outputs in found if block in points]


def whole(family: ModelFamily) -> int:
    return blocks_at(family, Fraction(1))[-1][1]


def allowed(family: ModelFamily, widths: Sequence[Fraction], targets: Sequence[int], ends: Sequence[int]) -> bool:
    for level, end in enumerate(ends):
        if sizes_at(family, widths[level])[end] > Fraction(targets[level] + 5, 100) * whole(family):
            return False
        if level + 1 < len(ends) and end >= ends[level + 1]:
            return False
    return True


QUARTERS = st.integers(2, 20).map(lambda n: Fraction(n, 20))


@settings(max_examples=80)
@given(
    family=st.sampled_from([TINY, SMALL, SmallCNN((3, 16, 16), 5, width=0.5)]),
    widths=st.lists(QUARTERS, min_size=0, max_size=3).map(lambda found: (*sorted(found), Fraction(1))),
    data=st.data(),
)
def test_exits_are_the_deepest_that_their_targets_allow(
    family: ModelFamily, widths: tuple[Fraction, ...], data: st.DataObject
) -> None:
    targets = data.draw(st.lists(st.integers(1, 100), min_size=len(widths), max_size=len(widths)).map(sorted))
    points = exit_points(family)
    try:
        found = choose_exits(family, [float(w) for w in widths], targets)
    except PoolError as error:
        every = itertools.product(range(len(points)), repeat=len(widths) - 1)
        assert not any(allowed(family, widths, targets, ends) for ends in every), str(error)
        return
    ends = [points.index(point) for point in found]
    assert len(ends) == len(widths) - 1
    assert allowed(family, widths, targets, ends)
    for level in range(len(ends)):
        for deeper in range(ends[level] + 1, len(points)):
            assert not allowed(family, widths, targets, [*ends[:level], deeper, *ends[level + 1 :]]), "not the deepest"


def test_up_to_an_exit() -> None:
    family = with_exits(TINY, ("conv", "fc", "conv"))
    assert family == TinyNet(exits=("conv", "fc")), "an exit counts once"
    assert up_to(family, "conv") == ("conv", "exit_conv")
    assert up_to(family, "fc") == ("conv", "exit_conv", "fc", "exit_fc")
    assert up_to(family, None) == family.layout().blocks
    assert early_exit(family, 0.5, "conv") == SubmodelSpec.of({"conv": 4, "hidden": 16}, ["conv", "exit_conv"])
    assert exit_name("stage1.0") == "exit_stage1_0"
    with pytest.raises(ModelError, match="does not have an exit after 'extra'"):
        up_to(family, "extra")


SCALEFL = [
    # widths; where the first two levels end; parameters of all three, heads included.
    pytest.param(
        VGG16(CIFAR, 10), ("0.75", "0.82", "1"), ("conv13", "fc1"), (8_288_314, 11_362_419, 33_692_766),
        id="vgg16",
    ),
    pytest.param(
        ResNet34(CIFAR, 10), ("0.81", "0.95", "1"), ("stage3.5", "stage4.0"), (5_588_294, 11_023_326, 21_586_334),
        id="resnet34",
    ),
    pytest.param(
        MobileNetV2(CIFAR, 10), ("0.87", "0.89", "1"), ("stage6.0", "stage6.2"), (551_064, 1_094_596, 2_258_078),
        id="mobilenetv2",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("family", "widths", "ends", "sizes"), SCALEFL)
def test_scalefls_levels_in_flexfls_comparison(
    family: ModelFamily, widths: tuple[str, ...], ends: tuple[str, str], sizes: tuple[int, int, int]
) -> None:
    """Targets of 25, 50 and 100 %. Every level is also counted from the module that a device builds."""
    algorithm = ScaleFL(widths=tuple(float(w) for w in widths))
    network = algorithm.network(family)
    assert network == with_exits(family, ends)
    pool = tiny_pool(algorithm, network)
    assert tuple(m.params for m in pool) == sizes
    for model in pool:
        with torch.device("meta"):
            module = network.module(model.spec)
        assert model.params == sum(tensor.numel() for tensor in module.state_dict().values())
    for m, target in zip(pool[:-1], (25, 50), strict=True):
        assert m.share <= (target + 5) / 100
