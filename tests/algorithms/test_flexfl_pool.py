"""FlexFL's pool against its paper (Chen et al., TCAD 2024, Sec. III-B): APoZ, AdjW, gamma, sizes, by hand."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.pools import APOZ as MEASURED
from fl_engine.algorithms import FlexFL
from fl_engine.core import pool as pools
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.costs import count_params
from fl_engine.core.errors import PoolError
from fl_engine.core.slicing import contains
from fl_engine.core.types import FULL, Axis, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.models.chains import VGG16
from fl_engine.models.mobilenetv2 import MobileNetV2
from fl_engine.models.resnet import ResNet34
from fl_engine.testing.tiny import TinyNet, tiny_pool

CIFAR = (3, 32, 32)
TINY = TinyNet()
law = settings(max_examples=20)


@dataclass(frozen=True)
class TwoLayers:
    """Two inputs -> two units (one layer) -> a block of two layers with two units each -> two classes."""

    relu: str = "relu"
    input_shape: tuple[int, int, int] = (1, 1, 2)
    outputs: int = 2
    min_hw = 1

    def layout(self) -> ParamLayout:
        a, b, free = Axis("a"), Axis("b"), Axis(None)
        slots = {"first.linear.weight": Slot("first", (a, free))}
        slots["block.in.weight"] = Slot("block", (b, a))
        slots["block.out.weight"] = Slot("block", (b, b))
        slots["classifier.weight"] = Slot("classifier", (Axis("classes"), b))
        return ParamLayout({"a": 2, "b": 2, "classes": 2}, slots)

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        def linear() -> nn.Linear:
            return nn.Linear(2, 2, bias=False)

        kind = {"relu": nn.ReLU, "relu6": nn.ReLU6, "leaky": nn.LeakyReLU}[self.relu]
        first = nn.Sequential(OrderedDict(linear=linear(), relu=kind()))
        block = nn.Sequential(OrderedDict([("in", linear()), ("relu1", kind()), ("out", linear()), ("relu2", kind())]))
        layers = OrderedDict(flatten=nn.Flatten(), first=first, block=block, classifier=linear())
        return nn.Sequential(layers)

    def prunable(self) -> tuple[Prunable, ...]:
        return (
            Prunable("a", ("first.",), ("first.relu",)),
            Prunable("b", ("block.",), ("block.relu1", "block.relu2")),
        )


WEIGHTS = {
    "first.linear.weight": torch.tensor([[1.0, 0.0], [0.0, 1.0]]),
    "block.in.weight": torch.tensor([[1.0, 0.0], [-1.0, 0.0]]),
    "block.out.weight": torch.tensor([[1.0, 0.0], [1.0, -1.0]]),
    "classifier.weight": torch.eye(2),
}
# (x1, x2)     first: x1+, x2+    relu1: (first1, 0)    relu2: both first1
# ( 1,  1)         1, 1    no 0        1, 0     one 0        1, 1   no 0
# ( 2, -1)         2, 0    one 0       2, 0     one 0        2, 2   no 0
# (-1,  3)         0, 3    one 0       0, 0     two 0        0, 0   two 0
# (-4, -5)         0, 0    two 0       0, 0     two 0        0, 0   two 0
# ( 9,  9)         9, 9    no 0        9, 0     one 0        9, 9   no 0
INPUTS = torch.tensor([[1.0, 1], [2, -1], [-1, 3], [-4, -5], [9, 9]]).view(5, 1, 1, 2)


@pytest.mark.parametrize("batch", [2, 128])
@pytest.mark.parametrize("relu", ["relu", "relu6"])
def test_apoz_by_hand(relu: str, batch: int) -> None:
    """Eq. 1 over samples and units together, however they are batched; Eq. 2: the mean over the block's ReLUs. What
    ReLU6 cuts off at six is no zero."""
    found = pools.measure_apoz(TwoLayers(relu), WEIGHTS, INPUTS, batch_size=batch)
    assert found == pytest.approx((4 / 10, (7 / 10 + 4 / 10) / 2), abs=1e-12)


RESNET34_SIZES = (1_856, 477_504, 1_157_376, 6_822_400, 13_114_368)
MOBILENET_SIZES = (960, 2_064, 14_496, 40_848, 186_816, 306_528, 800_736, 476_160, 413_440)


def test_adjustment_weights_by_hand() -> None:
    """log size / log largest, in any base: log10 1856 = 3.268578, log10 477504 = 5.678977,
    log10 13114368 = 7.117747."""
    found = pools.adjustment_weights(RESNET34_SIZES)
    assert found == pytest.approx((3.268578 / 7.117747, 5.678977 / 7.117747, 0.851881, 0.960126, 1.0), abs=2e-6)
    assert found == pytest.approx([math.log10(s) / math.log10(13_114_368) for s in RESNET34_SIZES], rel=1e-12)
    assert pools.adjustment_weights((10, 100, 1000)) == pytest.approx((1 / 3, 2 / 3, 1))
    assert max(pools.adjustment_weights(MOBILENET_SIZES)) == pools.adjustment_weights(MOBILENET_SIZES)[6] == 1


def test_ratios_by_hand() -> None:
    """gamma (1 - A AdjW): 1.2 (1 - .5 * .5) = .9; 1.2 (1 - 0) -> 1; 1.2 (1 - .995 * 1) = .006 -> .01."""
    assert pools.ratios_at(1.2, (0.5, 0.0, 0.995), (0.5, 0.7, 1.0)) == pytest.approx((0.9, 1.0, 0.01), abs=1e-12)
    assert pools.ratios_at(0.0, (0.3, 0.0), (1.0, 1.0)) == (0.01, 0.01)


def reachable(family: ModelFamily, apoz: Sequence[float], adjust: Sequence[float]) -> dict[int, float]:
    """Every size that any gamma gives, by brute force: the widths change only where some s_i * out_i is whole."""
    widths = [family.layout().groups[p.group] for p in family.prunable()]
    slopes = [1 - a * w for a, w in zip(apoz, adjust, strict=True)]
    jumps = {k / n / s for n, s in zip(widths, slopes, strict=True) for k in range(1, n + 1)}
    found = {}
    for gamma in [0.0, *(g * (1 + e) for g in sorted(jumps) for e in (-1e-7, 1e-7))]:
        ratios = [min(max(gamma * s, 0.01), 1.0) for s in slopes]
        keep = {p.group: max(1, int(r * n)) for p, r, n in zip(family.prunable(), ratios, widths, strict=True)}
        found[count_params(family, SubmodelSpec.of(keep))] = gamma
    return found


@law
@example(apoz=[0.25, 0.0], target=2256.0, adjusted=True)  # the whole network: ratios round to just below 1
@given(
    apoz=st.lists(st.floats(0.0, 0.95), min_size=2, max_size=2),
    target=st.floats(1, 2324),
    adjusted=st.booleans(),
)
def test_no_gamma_comes_closer(apoz: list[float], target: float, adjusted: bool) -> None:
    adjust = pools.adjustment_weights(pools.layer_sizes(TINY)) if adjusted else (1.0, 1.0)
    sizes = reachable(TINY, apoz, adjust)
    gamma, spec = pools.solve(TINY, apoz, adjust, target, epsilon=1e9)
    closest = min(abs(size - target) for size in sizes)
    assert abs(count_params(TINY, spec) - target) <= closest + 1e-9
    assert spec == pools.spec_of(TINY, pools.ratios_at(gamma, apoz, adjust)), "the gamma is that of the model"


def test_epsilon_is_how_far_the_closest_size_may_be() -> None:
    """Of reachable sizes a < b with nothing between, the target a + 10 is 10 away from a."""
    sizes = sorted(reachable(TINY, (0.5, 0.37), (1.0, 1.0)))
    a, b = next(pair for pair in itertools.pairwise(sizes) if pair[1] - pair[0] > 20)
    _, spec = pools.solve(TINY, (0.5, 0.37), (1.0, 1.0), a + 10, epsilon=10.0)
    assert count_params(TINY, spec) == a and b > a + 20
    with pytest.raises(PoolError):
        pools.solve(TINY, (0.5, 0.37), (1.0, 1.0), a + 10, epsilon=9.9)


NAMES = ["M1", "M2'", "M2", "M3'", "M3"]
TARGETS = [25.0, 40.0, 50.0, 90.0, 100.0]

APOZ: dict[str, tuple[ModelFamily, list[tuple[float, ...]]]] = {
    "vgg16": (
        VGG16(CIFAR, 10),
        [
            (0.5,) * 15,
            (0.45, 0.38, 0.51, 0.55, 0.6, 0.66, 0.7, 0.74, 0.8, 0.86, 0.9, 0.93, 0.92, 0.9, 0.87),
            tuple(0.9 - 0.05 * i for i in range(15)),
        ],
    ),
    "resnet34": (ResNet34(CIFAR, 10), [(0.5,) * 5, (0.4, 0.55, 0.62, 0.74, 0.85), (0.8, 0.6, 0.5, 0.4, 0.3)]),
    "mobilenetv2": (
        MobileNetV2(CIFAR, 10),
        [(0.5,) * 9, (0.2, 0.35, 0.42, 0.5, 0.55, 0.6, 0.66, 0.72, 0.85), tuple(0.8 - 0.08 * i for i in range(9))],
    ),
}


FULL_SIZE = [("vgg16", 1), ("resnet34", 2), ("mobilenetv2", 1)]


@pytest.mark.parametrize(("model", "which"), FULL_SIZE)
def test_pool_of_published_networks_has_its_target_sizes(model: str, which: int) -> None:
    """Sec. IV-A3: Gamma = 10 %, targets 25, 50, 100 % -> 25, 40, 50, 90, 100 %."""
    family, scores = APOZ[model][0], APOZ[model][1][which]
    pool = tiny_pool(FlexFL(), family, scores)
    layout, whole = family.layout(), count_params(family)
    widest = max((p.group for p in family.prunable()), key=lambda g: layout.groups[g])
    channel = whole - count_params(family, SubmodelSpec.of({widest: layout.groups[widest] - 1}))
    epsilon = max(0.5, 100 * channel / whole)
    assert [m.name for m in pool] == NAMES
    for m, target in zip(pool, TARGETS, strict=True):
        assert m.params == count_params(family, m.spec)
        assert 100 * m.params / whole == pytest.approx(target, abs=epsilon)
    assert [m.dispatched for m in pool] == [m.reported for m in pool] == [True, False, True, False, True]
    for small, large in itertools.pairwise(pool):
        assert contains(layout, large.spec, small.spec)


@pytest.mark.parametrize(
    "changes",
    [
        {"targets": (50.0, 25.0, 100.0)}, {"targets": (25.0, 50.0)}, {"adaptive_size": 25.0}, {"epsilon": 1e-6},
        {"targets": (80.0, 85.0, 100.0)}, {"gammas": (0.5,)}, {"gammas": (0.9, 0.9)},
    ],
)  # fmt: skip
def test_impossible_pool_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(PoolError):
        tiny_pool(FlexFL(**changes), TINY, (0.5, 0.5))


def test_fixed_gammas_give_their_models_and_adaptive_ones() -> None:
    family = ResNet34(CIFAR, 10)
    pool = tiny_pool(FlexFL(gammas=(0.8, 1.2)), family, (0.5,) * 5)
    adjust = pools.adjustment_weights(RESNET34_SIZES)
    assert [m.name for m in pool] == NAMES
    for name, gamma in (("M1", 0.8), ("M2", 1.2)):
        (m,) = (m for m in pool if m.name == name)
        assert m.gamma == gamma
        assert m.spec == pools.spec_of(family, pools.ratios_at(gamma, (0.5,) * 5, adjust))
    shares = {m.name: 100 * m.share for m in pool}
    assert shares["M2'"] == pytest.approx(shares["M2"] - 10, abs=0.6)
    assert shares["M3'"] == pytest.approx(90, abs=0.6)


def test_similarity_by_hand() -> None:
    """1 - mean(|.45 - .5| / .5, |.8 - 1| / 1, 0) = 1 - (.1 + .2 + 0) / 3."""
    assert pools.similarity((0.45, 0.8, 0.3), (0.5, 1.0, 0.3)) == pytest.approx(0.9)
    assert pools.similarity((0.2, 0.4), (0.2, 0.4)) == 1


AUTHORS = [
    # g of gamma = 100/g, and parameters: of M1, M2', M2, M3'.
    ("vgg16", (58, 41, 31, 15), (9_877_106, 15_037_489, 18_102_099, 31_135_815), (29.36, 44.69, 53.80, 92.54)),
    ("resnet34", (37, 28, 20, 10), (6_296_547, 9_689_715, 11_671_306, 20_067_466), (29.18, 44.90, 54.09, 93.00)),
    ("mobilenetv2", (63, 51, 45, 8), (663_070, 988_425, 1_234_367, 2_113_000), (29.41, 43.84, 54.74, 93.71)),
]


@pytest.mark.parametrize(("model", "g", "params", "percent"), AUTHORS)
def test_the_authors_pool(model: str, g: tuple[int, ...], params: tuple[int, ...], percent: tuple[float, ...]) -> None:
    """What their code makes of their presets, on CIFAR-10."""
    pool = tiny_pool(FlexFL(rule="authors", apoz=MEASURED[model]), APOZ[model][0])
    assert [m.name for m in pool] == NAMES
    assert [m.gamma for m in pool] == [*(100 / each for each in g), None]
    assert tuple(m.params for m in pool[:-1]) == params
    assert tuple(round(100 * m.share, 2) for m in pool) == (*percent, 100)


@pytest.mark.parametrize("model", APOZ)
def test_the_authors_rule_is_the_first_hit_from_above(model: str) -> None:
    """gamma runs over 100/g, g = 1 .. 199; the first model whose prunable part is within 5 points of the target."""
    family = APOZ[model][0]
    layers, layout = family.prunable(), family.layout()
    scores = [0.4 + 0.4 * i / len(layers) for i in range(len(layers))]
    adjust = pools.adjustment_weights(pools.layer_sizes(family))
    prunable = sum(pools.layer_sizes(family))

    def share(g: int) -> float:
        """Of the prunable part: the whole less the classifier, whose input is the last layer's."""
        spec = pools.spec_of(family, pools.ratios_at(100 / g, scores, adjust))
        last = layout.width(spec, layers[-1].group)
        return (count_params(family, spec) - (last + 1) * 10) / prunable

    shares = {g: share(g) for g in range(1, 200)}
    for m, target in zip(tiny_pool(FlexFL(rule="authors"), family, scores)[:-1], TARGETS[:-1], strict=True):
        assert m.gamma == 100 / next(g for g, size in shares.items() if abs(size - target / 100) <= 0.05)
        assert 100 * m.share > target, "larger than the target says"
