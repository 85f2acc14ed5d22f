"""FlexFL against its paper (Chen et al., TCAD 2024), equation by equation, with numbers that a person can check.

Where the paper leaves something open, the expected value follows the authors' code as the module's docstring says.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fl_engine import pool as pools
from fl_engine.algorithms import AllLarge, FlexFL
from fl_engine.algorithms.pooled import Training
from fl_engine.errors import ClientError, ConfigError, PoolError
from fl_engine.local import Job, Trained, train
from fl_engine.losses import self_distillation
from fl_engine.models.mobilenetv2 import MobileNetV2
from fl_engine.models.resnet import ResNet34
from fl_engine.models.small_cnn import SmallCNN
from fl_engine.models.vgg16 import VGG16
from fl_engine.selection import resource_table, round_size
from fl_engine.slicing import contains, count_params, initial_params
from fl_engine.testing.tiny import SEED, TinyNet, assert_same_bits, start_of, tiny_fleet, tiny_site
from fl_engine.types import (
    FULL,
    SGD,
    Axis,
    Device,
    Distillation,
    LocalTask,
    ModelFamily,
    ParamLayout,
    Params,
    Pool,
    PoolModel,
    Prunable,
    Slot,
    SubmodelSpec,
    TaskContext,
    WorkOrder,
)

CIFAR = (3, 32, 32)
TINY = TinyNet()
law = settings(max_examples=20, deadline=None)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ============================================================================================ APoZ, Eq. 1 and 2
@dataclass(frozen=True)
class TwoLayers:
    """Two inputs -> two units (one layer) -> a block of two layers with two units each -> two classes."""

    relu: str = "relu"
    input_chw: tuple[int, int, int] = (1, 1, 2)
    classes: int = 2
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

        kind = {"relu": nn.ReLU, "relu6": nn.ReLU6}[self.relu]
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


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 128])
@pytest.mark.parametrize("relu", ["relu", "relu6"])
def test_apoz_by_hand(relu: str, batch: int) -> None:
    """Eq. 1 over samples and units together, however they are batched; Eq. 2: the mean over the block's ReLUs. What
    ReLU6 cuts off at six is no zero."""
    found = pools.measure_apoz(TwoLayers(relu), WEIGHTS, INPUTS, batch_size=batch)
    assert found == pytest.approx((4 / 10, (7 / 10 + 4 / 10) / 2), abs=1e-12)


def test_apoz_counts_exact_zeros_only() -> None:
    """A value as small as a float can be is an activation; a negative zero is a zero."""
    tiny = torch.tensor([[1e-45, -0.0]]).view(1, 1, 1, 2)
    assert pools.measure_apoz(TwoLayers(), WEIGHTS, tiny)[0] == 0.5


def test_apoz_measures_without_dropout_and_changes_nothing() -> None:
    family = TinyNet(dropout=0.9)
    params = initial_params(family, 0)
    before = {n: t.clone() for n, t in params.items()}
    x = torch.randn(20, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    found = pools.measure_apoz(family, params, x)
    assert found == pools.measure_apoz(TINY, params, x)
    assert all(0 < a < 1 for a in found)
    assert_same_bits(params, before)


def test_apoz_of_a_convolution_is_over_all_its_pixels() -> None:
    """Channel 0 is everywhere 1, channel 1 everywhere 0, channel 2 is the image, with 4 of 16 pixels above 0."""
    family = TinyNet(conv=3, hidden=2)
    params = {n: torch.zeros_like(t) for n, t in initial_params(family, 0).items()}
    params["conv.conv.bias"][0] = 1
    params["conv.conv.weight"][2, 0, 1, 1] = 1
    x = torch.full((2, 1, 4, 4), -1.0)
    x[:, :, 0] = 1
    assert pools.measure_apoz(family, params, x)[0] == pytest.approx((0 + 16 + 12) / 48)


# =============================================================================================== AdjW, Eq. 3
RESNET34_SIZES = (1_856, 477_504, 1_157_376, 6_822_400, 13_114_368)
MOBILENET_SIZES = (960, 2_064, 14_496, 40_848, 186_816, 306_528, 800_736, 476_160, 413_440)


def test_layer_sizes_are_those_of_the_sheet() -> None:
    assert pools.layer_sizes(ResNet34(CIFAR, 10)) == RESNET34_SIZES
    assert pools.layer_sizes(MobileNetV2(CIFAR, 10)) == MOBILENET_SIZES
    assert len(pools.layer_sizes(VGG16(CIFAR, 10))) == 15


def test_the_classifier_is_not_among_the_layers() -> None:
    """At 200 classes as at 10: it would otherwise be the largest layer of a small network."""
    assert pools.layer_sizes(MobileNetV2(CIFAR, 200)) == MOBILENET_SIZES


def test_adjustment_weights_by_hand() -> None:
    """log size / log largest, in any base: log10 1856 = 3.268578, log10 477504 = 5.678977,
    log10 13114368 = 7.117747."""
    found = pools.adjustment_weights(RESNET34_SIZES)
    assert found == pytest.approx((3.268578 / 7.117747, 5.678977 / 7.117747, 0.851881, 0.960126, 1.0), abs=2e-6)
    assert found == pytest.approx([math.log10(s) / math.log10(13_114_368) for s in RESNET34_SIZES], rel=1e-12)
    assert pools.adjustment_weights((10, 100, 1000)) == pytest.approx((1 / 3, 2 / 3, 1))
    assert max(pools.adjustment_weights(MOBILENET_SIZES)) == pools.adjustment_weights(MOBILENET_SIZES)[6] == 1


# ======================================================================================= ratios and widths, Alg. 1
def test_ratios_by_hand() -> None:
    """gamma (1 - A AdjW): 1.2 (1 - .5 * .5) = .9; 1.2 (1 - 0) -> 1; 1.2 (1 - .995 * 1) = .006 -> .01."""
    assert pools.ratios_at(1.2, (0.5, 0.0, 0.995), (0.5, 0.7, 1.0)) == pytest.approx((0.9, 1.0, 0.01), abs=1e-12)
    assert pools.ratios_at(0.0, (0.3, 0.0), (1.0, 1.0)) == (0.01, 0.01)


@pytest.mark.parametrize(
    ("ratio", "widths"),
    [
        (1.0, (8, 32)),
        (0.99, (7, 31)),
        (0.5, (4, 16)),
        (0.49, (3, 15)),
        (0.25, (2, 8)),
        (0.1, (1, 3)),
        (0.01, (1, 1)),
    ],
)
def test_widths_are_truncated_and_at_least_one(ratio: float, widths: tuple[int, int]) -> None:
    assert pools.spec_of(TINY, (ratio, ratio)) == SubmodelSpec.of(dict(zip(("conv", "hidden"), widths, strict=True)))


def test_a_printed_gamma_gives_the_model_it_stands_beside() -> None:
    family, (_, scores, _) = APOZ["resnet34"]
    adjust = pools.adjustment_weights(RESNET34_SIZES)
    for m in FlexFL().pool(family, scores)[:-1]:
        assert m.gamma == float(f"{m.gamma:.6f}")
        assert pools.spec_of(family, pools.ratios_at(m.gamma, scores, adjust)) == m.spec


# ================================================================================================ gamma, Alg. 1
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


@pytest.mark.parametrize("target", [0.25, 0.4, 0.5, 0.9])
def test_bisection_is_at_least_as_close_as_the_papers_loop(target: float) -> None:
    """Alg. 1 as printed: gamma = 0, 0.01, 0.02, ... ; a fine grid cannot do better either."""
    family = SmallCNN((1, 8, 8), 10)
    apoz, adjust = (0.3, 0.5, 0.6, 0.8), pools.adjustment_weights(pools.layer_sizes(family))
    whole = count_params(family)
    _, spec = pools.solve(family, apoz, adjust, target * whole, epsilon=whole)
    ours = abs(count_params(family, spec) - target * whole)
    for step, count in ((0.01, 501), (0.0023, 2000)):
        grid = [pools.spec_of(family, pools.ratios_at(step * i, apoz, adjust)) for i in range(count)]
        theirs = min(abs(count_params(family, s) - target * whole) for s in set(grid))
        assert ours <= theirs + 1e-9


def test_layers_of_equal_ratio_are_cut_alike() -> None:
    """Equal A_i without adjustment is one ratio s for all: some s has int(8 s) and int(32 s) for its widths."""
    odd = []
    for target in range(300, 2300, 100):
        _, spec = pools.solve(TINY, (0.5, 0.5), (1.0, 1.0), target, epsilon=1e9)
        conv, hidden = (TINY.layout().width(spec, group) for group in ("conv", "hidden"))
        if not max(conv / 8, hidden / 32) < min((conv + 1) / 8, (hidden + 1) / 32):
            odd.append((target, conv, hidden))
    assert odd == []


def test_size_is_monotone_in_gamma() -> None:
    family = MobileNetV2(CIFAR, 10, width=0.3)
    apoz, adjust = [0.1 * i for i in range(9)], pools.adjustment_weights(pools.layer_sizes(family))
    sizes = [count_params(family, pools.spec_of(family, pools.ratios_at(0.02 * i, apoz, adjust))) for i in range(150)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("target", [0.0, 5.0, 2324.0, 5000.0])
def test_targets_at_and_beyond_both_ends(target: float) -> None:
    _, spec = pools.solve(TINY, (0.5, 0.5), (1.0, 1.0), target, epsilon=1e9)
    sizes = sorted(reachable(TINY, (0.5, 0.5), (1.0, 1.0)))
    assert count_params(TINY, spec) == (sizes[0] if target < 100 else 2324)


def test_out_of_reach_is_an_error_that_says_what_is_in_reach() -> None:
    sizes = sorted(reachable(TINY, (0.5, 0.37), (1.0, 1.0)))
    middle = max(itertools.pairwise(sizes), key=lambda pair: pair[1] - pair[0])
    target = sum(middle) / 2
    with pytest.raises(PoolError, match="no gamma gives") as caught:
        pools.solve(TINY, (0.5, 0.37), (1.0, 1.0), target, epsilon=1.0)
    message = str(caught.value)
    assert f"{middle[0]:,}" in message
    assert f"{middle[1]:,}" in message
    assert "epsilon" in message
    assert f"{100 * target / 2324:.2f} %" in message


def test_a_layer_that_is_always_zero_is_an_error_or_stays_at_its_least() -> None:
    with pytest.raises(PoolError, match="every layer has APoZ"):
        pools.solve(TINY, (1.0, 1.0), (1.0, 1.0), 500, epsilon=1e9)
    _, spec = pools.solve(TINY, (0.2, 1.0), (1.0, 1.0), 500, epsilon=1e9)
    assert spec.kept["hidden"] == 1


def test_the_default_epsilon_by_hand() -> None:
    """One of 32 hidden units: 33 entries in fc, 33 + 31 in the residual layer, 4 in the classifier = 101 > 0.5 %."""
    assert pools.default_epsilon(TINY) == 101
    vgg = VGG16(CIFAR, 10)
    one = 512 + 1 + 4096
    assert one < 0.005 * 33_646_666
    assert pools.default_epsilon(vgg) == pytest.approx(0.005 * 33_646_666)


# ================================================================================================== the pool
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


FULL_SIZE = [("vgg16", 0), ("vgg16", 1), ("resnet34", 1), ("resnet34", 2), ("mobilenetv2", 1)]


@pytest.mark.parametrize(("model", "which"), FULL_SIZE)
def test_a_full_size_pool_has_the_sizes_that_it_should_have(model: str, which: int) -> None:
    """Sec. IV-A3: Gamma = 10 %, targets 25, 50, 100 % -> 25, 40, 50, 90, 100 %."""
    family, scores = APOZ[model][0], APOZ[model][1][which]
    pool = FlexFL().pool(family, scores)
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


def test_the_pool_s_ratios_are_those_of_algorithm_1() -> None:
    family, (_, scores, _) = APOZ["resnet34"]
    largest = math.log(max(RESNET34_SIZES))
    slopes = [1 - a * math.log(s) / largest for a, s in zip(scores, RESNET34_SIZES, strict=True)]
    for m in FlexFL().pool(family, scores)[:-1]:
        assert m.gamma is not None
        assert m.ratios == pytest.approx([min(max(m.gamma * s, 0.01), 1.0) for s in slopes])
        channels = {"stem": 64, "stage1": 96, "stage2": 128, "stage3": 256, "stage4": 512}
        widths = {g: max(1, int(r * n)) for r, (g, n) in zip(m.ratios, channels.items(), strict=True)}
        assert m.spec == SubmodelSpec.of(widths)


def test_the_largest_model_is_the_whole_one() -> None:
    full = FlexFL().pool(TINY, (0.5, 0.5))[-1]
    assert (full.spec, full.share, full.ratios) == (FULL, 1.0, (1.0, 1.0))
    assert full.bytes == 4 * 2324


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": (50.0, 25.0, 100.0)}, "must ascend and end in 100"),
        ({"targets": (25.0, 25.0, 100.0)}, "must ascend and end in 100"),
        ({"targets": (25.0, 50.0)}, "must ascend and end in 100"),
        ({"targets": (25.0, 50.0, 120.0)}, "must ascend and end in 100"),
        ({"targets": ()}, "must ascend and end in 100"),
        ({"adaptive_size": 25.0}, r"Gamma.* = 25\.0 must be smaller than the smallest gap .*25\.0"),
        ({"adaptive_size": 30.0}, "Gamma"),
        ({"targets": (80.0, 85.0, 100.0)}, "Gamma"),
        ({"epsilon": 1e-6}, "no gamma gives"),
        ({"targets": (0.5, 50.0, 100.0), "epsilon": 0.1}, "no gamma gives"),
        ({"gammas": (0.5,)}, "gammas needs one value for each target below 100"),
        ({"gammas": (0.5, 0.7, 0.9)}, "gammas needs one value for each target below 100"),
        ({"gammas": (0.9, 0.9)}, "M2"),
        ({"gammas": (0.9, 0.5), "adaptive_size": None}, "M1"),
    ],
)
def test_an_impossible_pool_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PoolError, match=message):
        FlexFL(**changes).pool(TINY, (0.5, 0.5))


def test_scores_for_another_network_are_refused() -> None:
    with pytest.raises(PoolError, match="2 layers can be pruned, the APoZ scores at hand are 3"):
        FlexFL().pool(TINY, (0.5, 0.5, 0.5))


def test_other_targets_and_another_gamma_size() -> None:
    pool = FlexFL(targets=(30.0, 60.0, 80.0, 100.0), adaptive_size=5.0).pool(ResNet34(CIFAR, 10), (0.5,) * 5)
    assert [m.name for m in pool] == ["M1", "M2'", "M2", "M3'", "M3", "M4'", "M4"]
    assert [100 * m.share for m in pool] == pytest.approx([30, 55, 60, 75, 80, 95, 100], abs=0.6)
    only = FlexFL(targets=(100.0,)).pool(TINY, (0.5, 0.5))
    assert [(m.name, m.spec) for m in only] == [("M1", FULL)]


def test_fixed_gammas_give_their_models_and_the_adaptive_ones_keep_their_distance() -> None:
    family = ResNet34(CIFAR, 10)
    pool = FlexFL(gammas=(0.8, 1.2)).pool(family, (0.5,) * 5)
    adjust = pools.adjustment_weights(RESNET34_SIZES)
    assert [m.name for m in pool] == NAMES
    for name, gamma in (("M1", 0.8), ("M2", 1.2)):
        (m,) = (m for m in pool if m.name == name)
        assert m.gamma == gamma
        assert m.spec == pools.spec_of(family, pools.ratios_at(gamma, (0.5,) * 5, adjust))
    shares = {m.name: 100 * m.share for m in pool}
    assert shares["M2'"] == pytest.approx(shares["M2"] - 10, abs=0.6)
    assert shares["M3'"] == pytest.approx(90, abs=0.6)


def test_with_fixed_gammas_gamma_is_measured_against_the_real_gaps() -> None:
    """Sec. III-C: it "should be smaller than the smallest size of the parameter differences between any two models",
    and the models are those of the given gammas, 17 and 69 % here, not those of the targets."""
    family = ResNet34(CIFAR, 10)
    pool = FlexFL(gammas=(0.8, 1.62), adaptive_size=26.0).pool(family, (0.5,) * 5)
    shares = {m.name: 100 * m.share for m in pool}
    assert shares["M2"] - shares["M1"] > 26
    assert shares["M3"] - shares["M2"] > 26
    assert shares["M2'"] == pytest.approx(shares["M2"] - 26, abs=0.6)


@pytest.mark.parametrize("model", ["resnet34", "vgg16"])
def test_the_authors_rule_is_the_first_hit_from_above(model: str) -> None:
    """gamma falls in steps of 0.01; the first model whose prunable part is within 5 points of the target is taken."""
    family, (_, scores, _) = APOZ[model]
    layers, layout = family.prunable(), family.layout()
    adjust = pools.adjustment_weights(pools.layer_sizes(family))
    prunable = sum(pools.layer_sizes(family))

    def share(gamma: float) -> float:
        """Of the prunable part: the whole less the classifier, whose input is the last layer's."""
        spec = pools.spec_of(family, pools.ratios_at(gamma, scores, adjust))
        last = layout.width(spec, layers[-1].group)
        return (count_params(family, spec) - (last + 1) * 10) / prunable

    for m, target in zip(FlexFL(rule="authors").pool(family, scores), TARGETS, strict=True):
        if target == 100:
            continue
        assert m.gamma is not None
        assert share(m.gamma) == pytest.approx(target / 100, abs=0.05 + 1e-12)
        assert round(m.gamma * 100) == pytest.approx(m.gamma * 100, abs=1e-6)
        assert all(share(m.gamma + 0.01 * i) > target / 100 + 0.05 - 1e-12 for i in range(1, 12))
        assert 100 * m.share > target, "larger than the target says"


def test_similarity_by_hand() -> None:
    """1 - mean(|.45 - .5| / .5, |.8 - 1| / 1, 0) = 1 - (.1 + .2 + 0) / 3."""
    assert pools.similarity((0.45, 0.8, 0.3), (0.5, 1.0, 0.3)) == pytest.approx(0.9)
    assert pools.similarity((0.2, 0.4), (0.2, 0.4)) == 1


# ==================================================================================== AdaPrune, Sec. III-C
def table(shares: Sequence[float] = (0.25, 0.4, 0.5, 0.9, 1.0)) -> tuple[ParamLayout, Pool]:
    """A pool of exact sizes: of 100 channels with one parameter each."""
    layout = ParamLayout({"g": 100}, {"w": Slot("b", (Axis("g"),))})
    pool = tuple(
        PoolModel(
            name=name,
            spec=SubmodelSpec.of({"g": round(100 * share)}) if share < 1 else FULL,
            params=round(100 * share),
            share=share,
            macs=round(100 * share),
            dispatched="'" not in name,
            reported="'" not in name,
        )
        for name, share in zip(NAMES, shares, strict=True)
    )
    return layout, pool


def trained_by(algorithm: FlexFL, received: str, free: float) -> str:
    layout, pool = table()
    (sent,) = (m for m in pool if m.name == received)
    order = WorkOrder(0, 0, sent.spec, {}, 1, {"model": received})
    task = algorithm.task(order, TaskContext(layout, pool, Device(0, "any", 110.0, 8.0), free))
    return next(m.name for m in pool if m.spec == task.spec)


ADAPRUNE = [
    # r in %, and what is trained of a received M1, M2, M3: the largest with size < r.
    (0.0, "M1", "M1", "M1"),
    (24.9, "M1", "M1", "M1"),
    (25.0, "M1", "M1", "M1"),
    (25.1, "M1", "M1", "M1"),
    (39.9, "M1", "M1", "M1"),
    (40.0, "M1", "M1", "M1"),
    (40.1, "M1", "M2'", "M2'"),
    (45.0, "M1", "M2'", "M2'"),
    (50.0, "M1", "M2'", "M2'"),
    (50.1, "M1", "M2", "M2"),
    (60.0, "M1", "M2", "M2"),
    (90.0, "M1", "M2", "M2"),
    (90.1, "M1", "M2", "M3'"),
    (100.0, "M1", "M2", "M3'"),
    (100.1, "M1", "M2", "M3"),
    (110.0, "M1", "M2", "M3"),
]


@pytest.mark.parametrize(("free", "of_m1", "of_m2", "of_m3"), ADAPRUNE)
def test_adaprune_table(free: float, of_m1: str, of_m2: str, of_m3: str) -> None:
    """Sec. IV-A1: r <= size(m) / size(M) * 100 is too little. M3 -> M3' -> M2 -> M2' -> M1."""
    found = [trained_by(FlexFL(), received, free) for received in ("M1", "M2", "M3")]
    assert found == [of_m1, of_m2, of_m3]


@law
@given(free=st.floats(0, 120), received=st.sampled_from(["M1", "M2", "M3"]))
def test_adaprune_gives_the_largest_that_fits(free: float, received: str) -> None:
    _, pool = table()
    smaller = list(pool)[: NAMES.index(received) + 1]
    fitting = [m.name for m in smaller if free > 100 * m.share]
    assert trained_by(FlexFL(), received, free) == (fitting[-1] if fitting else "M1")


@pytest.mark.parametrize("free", [0.0, 10.0, 25.0])
@pytest.mark.parametrize("received", ["M1", "M2", "M3"])
def test_a_device_below_the_smallest_model_trains_it_or_fails(free: float, received: str) -> None:
    assert trained_by(FlexFL(on_too_small="train"), received, free) == "M1"
    with pytest.raises(ClientError, match=rf"{free:.1f} % .* 25\.0 %"):
        trained_by(FlexFL(on_too_small="fail"), received, free)
    assert trained_by(FlexFL(on_too_small="fail"), received, 25.1) == "M1"


# ================================================================================ self-distillation, Sec. III-D
def softmax(logits: Sequence[float], tau: float) -> list[float]:
    powers = [math.exp(v / tau) for v in logits]
    return [p / sum(powers) for p in powers]


def kl_by_hand(student: list[list[float]], teacher: list[list[float]], tau: float) -> float:
    """tau^2 times the mean over batch *and* classes of t log(t / s)."""
    terms = []
    for s_row, t_row in zip(student, teacher, strict=True):
        pairs = zip(softmax(t_row, tau), softmax(s_row, tau), strict=True)
        terms += [t * math.log(t / s) for t, s in pairs]
    return tau**2 * sum(terms) / len(terms)


STUDENT = [[2.0, -1.0, 0.5], [0.0, 0.0, 3.0]]
TEACHER = [[1.0, 1.0, -2.0], [-1.0, 4.0, 0.0]]
OTHER = [[0.5, 0.25, 2.0], [3.0, 1.0, 1.0]]


@pytest.mark.parametrize("tau", [1.0, 3.0, 10.0])
def test_the_distillation_loss_by_hand(tau: float) -> None:
    found = self_distillation(torch.tensor(STUDENT), [torch.tensor(TEACHER)], tau)
    assert float(found) == pytest.approx(kl_by_hand(STUDENT, TEACHER, tau), rel=1e-5)
    assert float(found) > 0


def test_the_distillation_loss_is_the_mean_over_teachers() -> None:
    found = self_distillation(torch.tensor(STUDENT), [torch.tensor(TEACHER), torch.tensor(OTHER)], 3.0)
    both = kl_by_hand(STUDENT, TEACHER, 3.0) + kl_by_hand(STUDENT, OTHER, 3.0)
    assert float(found) == pytest.approx(both / 2, rel=1e-5)


def test_agreement_costs_nothing_and_direction_matters() -> None:
    s, t = torch.tensor(STUDENT), torch.tensor(TEACHER)
    assert float(self_distillation(s, [s + 5.0], 3.0)) == pytest.approx(0, abs=1e-7)
    assert float(self_distillation(s, [t], 1.0)) != pytest.approx(float(self_distillation(t, [s], 1.0)), rel=1e-3)


def test_no_gradient_reaches_the_teacher() -> None:
    s, t = torch.tensor(STUDENT, requires_grad=True), torch.tensor(TEACHER, requires_grad=True)
    self_distillation(s, [t], 3.0).backward()
    assert t.grad is None
    # d/ds of tau^2 * mean(t log(t/s)) is tau * (softmax(s/tau) - softmax(t/tau)) / (batch * classes).
    expected = [
        [3.0 * (a - b) / 6 for a, b in zip(softmax(sr, 3.0), softmax(tr, 3.0), strict=True)]
        for sr, tr in zip(STUDENT, TEACHER, strict=True)
    ]
    torch.testing.assert_close(s.grad, torch.tensor(expected))


# ---------------------------------------------------------------------------------- teachers during training
def samples(family: ModelFamily, count: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(count, *family.input_chw, generator=generator)
    return x, torch.randint(0, family.classes, (count,), generator=generator)


def prefix_slice(family: ModelFamily, params: Params, spec: SubmodelSpec) -> Params:
    """The first rows and columns, copied: for prefixes, without `take`."""
    with torch.device("meta"):
        wanted = {n: t.shape for n, t in family.module(spec).state_dict().items()}
    return {n: params[n][tuple(slice(0, k) for k in shape)].clone() for n, shape in wanted.items()}


def reference(
    family: ModelFamily, start: Params, student: SubmodelSpec, teachers: Sequence[SubmodelSpec], sgd: SGD, steps: int,
    weight: float, tau: float, stale: bool = False,
) -> tuple[Params, list[float]]:  # fmt: skip
    """Plain PyTorch on the whole batch; teachers cut out anew before every step (`stale`: before the first only)."""
    x, y = samples(family)
    module = family.module(student).train()
    module.load_state_dict(start)
    optimizer = torch.optim.SGD(module.parameters(), sgd.lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay)
    losses, cut = [], start
    for _ in range(steps):
        if not stale:
            cut = {n: t.detach().clone() for n, t in module.state_dict().items()}
        logits = module(x)
        terms = []
        for spec in teachers:
            teacher = family.module(spec).train()
            teacher.load_state_dict(prefix_slice(family, cut, spec))
            with torch.no_grad():
                soft = F.softmax(teacher(x) / tau, dim=1)
            log_s = F.log_softmax(logits / tau, dim=1)
            terms.append((soft * (soft.log() - log_s)).mean() * tau**2)
        loss = F.cross_entropy(logits, y) + weight * sum(terms) / max(1, len(terms))
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {n: t.detach() for n, t in module.state_dict().items()}, losses


def job_of(family: ModelFamily, task: LocalTask) -> Job:
    full = initial_params(family, 2)
    return Job(task, prefix_slice(family, full, task.spec), *samples(family))


DISTILLED = [
    pytest.param(TINY, 4, id="M3"),
    pytest.param(TINY, 2, id="M2"),
    pytest.param(TINY, 1, id="M2'"),
    pytest.param(SmallCNN((1, 8, 8), 4, width=0.5), 4, id="M3 with batch norm"),
]


@pytest.mark.parametrize(("family", "level"), DISTILLED)
def test_teachers_are_current_at_every_step(family: ModelFamily, level: int) -> None:
    """A large step size, so that a teacher of the step before would be another teacher altogether."""
    pool = FlexFL().pool(family, (0.5,) * len(family.prunable()))
    student, teachers = pool[level].spec, tuple(m.spec for m in pool[:level])
    sgd = SGD(0.3, 0.5, 1e-4)
    task = LocalTask(student, sgd, 4, 12, True, 9, Distillation(teachers, 10.0, 3.0))
    job = job_of(family, task)
    (found,) = train(family, [job])
    expected, losses = reference(family, job.start, student, teachers, sgd, 4, 10.0, 3.0)
    stale, _ = reference(family, job.start, student, teachers, sgd, 4, 10.0, 3.0, stale=True)
    assert found.steps == 4
    assert found.loss == pytest.approx(sum(losses) / 4, rel=1e-4)
    for name, tensor in expected.items():
        torch.testing.assert_close(found.params[name], tensor, rtol=1e-3, atol=2e-5)
    worst = max(float((stale[n] - t).abs().max()) for n, t in expected.items())
    assert worst > 2e-3, "this example could not tell a stale teacher from a current one"


class Counting:
    """A family that counts the samples each sub-network is run on."""

    def __init__(self, inner: ModelFamily) -> None:
        self.inner = inner
        self.runs: Counter[SubmodelSpec] = Counter()
        self.modes: set[bool] = set()
        self.min_hw, self.input_chw, self.classes = inner.min_hw, inner.input_chw, inner.classes

    def layout(self) -> ParamLayout:
        return self.inner.layout()

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        def count(module: nn.Module, *_: object) -> None:
            self.runs[spec] += 1
            self.modes.add(module.training)

        module = self.inner.module(spec)
        module.register_forward_hook(count)
        return module

    def prunable(self) -> tuple[Prunable, ...]:
        return self.inner.prunable()


def run_counted(algorithm: FlexFL, received: str, free: float) -> tuple[Counting, Pool, Trained]:
    counting, pool = Counting(TINY), algorithm.pool(TINY, (0.5, 0.5))
    (sent,) = (m for m in pool if m.name == received)
    order = WorkOrder(0, 0, sent.spec, {}, 1, {"model": received})
    task = algorithm.task(order, TaskContext(TINY.layout(), pool, Device(0, "any", 110.0, 8.0), free))
    (found,) = train(counting, [job_of(TINY, task)])  # type: ignore[arg-type]
    return counting, pool, found


ONE_EPOCH = Training(epochs=1, batch_size=4)


@pytest.mark.parametrize(
    ("received", "free", "teachers"),
    [("M3", 110.0, 4), ("M3", 95.0, 3), ("M3", 60.0, 2), ("M2", 110.0, 2), ("M3", 45.0, 1), ("M1", 110.0, 0)],
)
def test_every_smaller_member_of_the_pool_teaches(received: str, free: float, teachers: int) -> None:
    """M3 learns from M1, M2', M2 and M3'; M1 from nobody. In training mode, once per batch."""
    counting, pool, found = run_counted(FlexFL(training=ONE_EPOCH), received, free)
    assert found.steps == 3
    assert counting.runs == {m.spec: 3 for m in pool[: teachers + 1]}
    assert counting.modes == {True}


def test_without_weight_no_teacher_runs() -> None:
    counting, pool, found = run_counted(FlexFL(training=ONE_EPOCH, kd_weight=0.0), "M3", 110.0)
    assert counting.runs == {pool[-1].spec: found.steps}
    counting = Counting(TINY)
    task = LocalTask(FULL, SGD(0.1), 1, 4, True, 1, Distillation((pool[0].spec,), 0.0, 3.0))
    (plain,) = train(TINY, [job_of(TINY, replace(task, distillation=None))])
    (found,) = train(counting, [job_of(TINY, task)])  # type: ignore[arg-type]
    assert counting.runs == {FULL: 3}
    assert_same_bits(found.params, plain.params)


def test_teachers_drop_units_too() -> None:
    """Sheet: "in train mode, dropout on". Another mask for the teacher than for the student."""
    family = TinyNet(dropout=0.5)
    task = LocalTask(FULL, SGD(1e-30), 1, 12, True, 1, Distillation((FULL,), 1.0, 1.0))
    (alone,) = train(family, [job_of(family, replace(task, distillation=None))])
    (taught,) = train(family, [job_of(family, task)])
    assert taught.loss > alone.loss + 1e-4, "a twin with the student's own mask would agree with it"


# ================================================================================= hyper-parameters of a task
def task_at(algorithm: FlexFL, round: int = 0, received: str = "M3", free: float = 110.0, seed: int = 1) -> LocalTask:
    layout, pool = table()
    (sent,) = (m for m in pool if m.name == received)
    order = WorkOrder(round, 0, sent.spec, {}, seed, {"model": received})
    return algorithm.task(order, TaskContext(layout, pool, Device(0, "any", 110.0, 8.0), free))


def test_the_papers_defaults() -> None:
    """Sec. IV: SGD 0.01, momentum 0.5, batch 50, 5 epochs, 10 % of the devices; tau 3, lambda 10, Gamma 10 %."""
    algorithm, task = FlexFL(), task_at(FlexFL())
    assert (algorithm.targets, algorithm.adaptive_size) == ((25.0, 50.0, 100.0), 10.0)
    assert algorithm.training.fraction == 0.1
    assert task.optimizer == SGD(0.01, 0.5, 1e-4)
    assert (task.epochs, task.batch_size, task.drop_last, task.seed) == (5, 50, True, 1)
    assert task.distillation is not None
    assert (task.distillation.weight, task.distillation.temperature) == (10.0, 3.0)


@pytest.mark.parametrize(("round", "lr"), [(0, 0.01), (1, 0.00998), (2, 0.00996004), (1000, 0.0013506452)])
def test_the_learning_rate_falls_by_two_per_mille_a_round(round: int, lr: float) -> None:
    assert task_at(FlexFL(), round).optimizer.lr == pytest.approx(lr, rel=1e-6)


# ==================================================================================================== ablations
def test_without_self_distillation_only_the_loss_changes() -> None:
    plain, ablated = FlexFL(), FlexFL(kd_weight=0.0)
    assert ablated.pool(TINY, (0.3, 0.6)) == plain.pool(TINY, (0.3, 0.6))
    for received, free in itertools.product(("M1", "M2", "M3"), (30.0, 45.0, 60.0, 95.0, 110.0)):
        with_kd, without = (task_at(a, 3, received, free) for a in (plain, ablated))
        assert without.distillation is None
        assert replace(with_kd, distillation=None) == without
    assert_same_choices(plain, ablated)


def test_without_adaptive_models_the_pool_has_three_members() -> None:
    plain, ablated = FlexFL(), FlexFL(adaptive_size=None)
    five, three = plain.pool(TINY, (0.3, 0.6)), ablated.pool(TINY, (0.3, 0.6))
    assert three == tuple(m for m in five if "'" not in m.name)
    layout, pool = table()
    without = tuple(m for m in pool if m.dispatched)
    order = WorkOrder(0, 0, FULL, {}, 1, {"model": "M3"})
    task = ablated.task(order, TaskContext(layout, without, Device(0, "any", 110.0, 8.0), 95.0))
    assert task.spec == pool[2].spec, "with 95 % free, M2 is the largest that fits"
    assert task.distillation == Distillation((pool[0].spec,), 10.0, 3.0)
    assert_same_choices(plain, ablated)


def test_without_apoz_every_layer_counts_as_half_zero() -> None:
    plain, ablated = FlexFL(), FlexFL(use_apoz=False)
    expected = plain.pool(TINY, (0.5, 0.5))
    for scores in ((0.3, 0.6), (0.9, 0.1), ()):
        assert ablated.pool(TINY, scores) == expected
    assert plain.pool(TINY, (0.3, 0.6)) != expected
    assert task_at(plain) == task_at(ablated)


def test_without_adjustment_every_weight_is_one() -> None:
    plain, ablated = FlexFL(), FlexFL(use_adjustment=False)
    family, scores = SmallCNN((1, 8, 8), 10), (0.3, 0.5, 0.7, 0.6)
    both = list(zip(plain.pool(family, scores), ablated.pool(family, scores), strict=True))
    assert sum(with_it.ratios != without.ratios for with_it, without in both) >= 3
    for with_it, without in both:
        assert with_it.name == without.name
        if without.gamma is not None:
            assert without.ratios == pytest.approx([min(max(without.gamma * (1 - a), 0.01), 1) for a in scores])
    assert task_at(plain) == task_at(ablated)


def assert_same_choices(left: FlexFL, right: FlexFL) -> None:
    """The same devices are sent the same models."""
    for round in range(5):
        chosen = []
        for algorithm in (left, right):
            plan = algorithm.plan(start_of(algorithm, tiny_site(algorithm)), round, SEED)
            chosen.append([(o.client, o.hints["model"], o.seed) for o in plan.orders])
        assert chosen[0] == chosen[1]


# ==================================================================================================== selection
def devices(**tiers: int) -> tuple[Device, ...]:
    memory = {"weak": 35.0, "medium": 60.0, "strong": 110.0}
    kinds = [kind for kind, count in tiers.items() for _ in range(count)]
    return tuple(Device(c, kind, memory[kind], 8.0) for c, kind in enumerate(kinds))


def draw(fleet: tuple[Device, ...], k: int, rounds: int) -> list[list[tuple[int, str]]]:
    from fl_engine import seeds

    _, pool = table()
    found = [resource_table(seeds.rng(1, "test", r), fleet, pool, k) for r in range(rounds)]
    return [[(client, pool[level].name) for client, level in picks] for picks in found]


def test_levels_are_drawn_uniformly_from_25_50_and_100() -> None:
    """Table I's fleet of 100, ten a round: no class runs out, so each level comes a third of the time."""
    rounds = draw(devices(weak=40, medium=30, strong=30), 10, 300)
    levels = Counter(level for picks in rounds for _, level in picks)
    assert set(levels) == {"M1", "M2", "M3"}, "M2' and M3' are never sent"
    for count in levels.values():
        assert count / 3000 == pytest.approx(1 / 3, abs=0.04)
    clients = Counter(client for picks in rounds for client, _ in picks)
    assert len(clients) == 100


def test_devices_of_a_level_are_drawn_uniformly() -> None:
    """M1 goes to anybody, M2 to the 60 that can hold it, M3 to the 30 strong ones."""
    fleet = devices(weak=40, medium=30, strong=30)
    rounds = draw(fleet, 1, 6000)
    tiers = Counter((level, fleet[client].tier) for ((client, level),) in rounds)
    expected = {
        ("M1", "weak"): 0.4, ("M1", "medium"): 0.3, ("M1", "strong"): 0.3,
        ("M2", "medium"): 0.5, ("M2", "strong"): 0.5, ("M3", "strong"): 1.0,
    }  # fmt: skip
    assert set(tiers) == set(expected)
    for key, share in expected.items():
        assert tiers[key] / 2000 == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize(
    ("tiers", "levels"),
    [
        ({"weak": 12}, {"M1"}),
        ({"medium": 12}, {"M1", "M2"}),
        ({"strong": 12}, {"M1", "M2", "M3"}),
        ({"weak": 6, "medium": 6}, {"M1", "M2"}),
    ],
)
def test_a_fleet_is_sent_what_it_can_hold(tiers: dict[str, int], levels: set[str]) -> None:
    assert {level for picks in draw(devices(**tiers), 4, 100) for _, level in picks} == levels


def test_a_device_is_asked_once_a_round_and_the_number_is_met() -> None:
    for fleet in (devices(weak=40, medium=30, strong=30), devices(weak=9, strong=1)):
        for picks in draw(fleet, 10, 60):
            clients = [client for client, _ in picks]
            assert len(clients) == len(set(clients)) == 10
            assert clients == sorted(clients)


def test_more_than_there_are_is_all_that_there_are() -> None:
    assert all(len(picks) == 5 for picks in draw(devices(weak=3, strong=2), 9, 20))


def test_a_capacity_equal_to_the_size_is_too_little() -> None:
    """r <= size is insufficient: a device of exactly 50 % is sent M1."""
    from fl_engine import seeds

    _, pool = table()
    fleet = tuple(Device(c, "half", 50.0, 0.0) for c in range(6))
    assert {level for r in range(40) for _, level in resource_table(seeds.rng(0, "t", r), fleet, pool, 3)} == {0}


def test_a_fleet_that_can_hold_nothing_is_an_error() -> None:
    fleet = tuple(Device(c, "tiny", 25.0, 0.0) for c in range(6))
    with pytest.raises(ConfigError, match=r"can hold the smallest model \(25\.0 %\)"):
        draw(fleet, 2, 1)


@pytest.mark.parametrize(
    ("fraction", "clients", "k"), [(0.1, 100, 10), (0.1, 5, 1), (0.3, 10, 3), (0.29, 100, 29), (1.0, 7, 7), (0.5, 5, 2)]
)
def test_the_number_asked_is_max_1_f_times_devices(fraction: float, clients: int, k: int) -> None:
    assert round_size(fraction, clients) == k


def test_the_plan_asks_for_f_of_the_fleet() -> None:
    algorithm = FlexFL(training=Training(fraction=0.1))
    site = tiny_site(algorithm, fleet=tiny_fleet(30))
    assert len(algorithm.plan(start_of(algorithm, site), 0, SEED).orders) == 3


# ==================================================================================================== All-Large
def all_large(eligible: Any, fleet: tuple[Device, ...]) -> list[WorkOrder]:
    algorithm = AllLarge(training=Training(fraction=0.5), eligible=eligible)
    site = tiny_site(algorithm, fleet=fleet)
    state = start_of(algorithm, site)
    return [order for round in range(30) for order in algorithm.plan(state, round, SEED).orders]


def test_all_large_sends_everybody_the_full_model() -> None:
    orders = all_large("all", devices(weak=4, medium=3, strong=3))
    assert {o.spec for o in orders} == {FULL}
    assert len(orders) == 30 * 5
    assert {o.client for o in orders} == set(range(10))


def test_all_large_keeps_to_the_capable_where_asked() -> None:
    orders = all_large("capable", devices(weak=4, medium=3, strong=3))
    assert {o.client for o in orders} == {7, 8, 9}
    assert len(orders) == 30 * 3, "k is five, three are able"
    with pytest.raises(ConfigError, match="no device of the fleet can hold the full model"):
        all_large("capable", devices(weak=4, medium=3))


@pytest.mark.parametrize(("free", "fits"), [(100.0, False), (99.0, False), (100.1, True), (110.0, True)])
def test_all_large_does_not_adapt(free: float, fits: bool) -> None:
    context = TaskContext(TINY.layout(), (), Device(0, "strong", 110.0, 8.0), free)
    order = WorkOrder(7, 0, FULL, {}, 5, {"model": "full"})
    task = AllLarge(eligible="all").task(order, context)
    assert (task.spec, task.distillation, task.optimizer.lr) == (FULL, None, pytest.approx(0.01 * 0.998**7))
    if fits:
        assert AllLarge(eligible="capable").task(order, context) == task
    else:
        with pytest.raises(ClientError, match=f"{free:.1f} %"):
            AllLarge(eligible="capable").task(order, context)
