"""AdaptiveFL against its paper (Jia et al., DAC 2024): the pool of Table 1 to the last parameter, the search on the
device, and which selection each variant is. The selection's own arithmetic is in `test_curiosity.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.algorithms import AdaptiveFL
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ClientError
from fl_engine.core.types import FULL, Device, Pool, TaskContext, WorkOrder
from fl_engine.models.aep_mlp import AepMLP
from fl_engine.models.mobilenetv2 import MobileNetV2
from fl_engine.models.resnet import ResNet18
from fl_engine.models.small_cnn import SmallCNN
from fl_engine.models.vgg16 import VGG16
from fl_engine.testing.tiny import SEED, TRAINING, context_of, start_of, tiny_pool, tiny_site

VGG = VGG16((3, 32, 32), 10)
SMALL = SmallCNN((1, 16, 16), 4, width=0.25)
law = settings(max_examples=60)


@lru_cache(maxsize=1)
def vgg_pool() -> Pool:
    return tiny_pool(AdaptiveFL(), VGG)


# ================================================================================================== the pool
TABLE_1 = [
    # name, r_w, I, parameters, multiply-adds; as printed: millions of parameters and of FLOPs.
    ("S3", 0.40, 4, 5_667_148, 139_070_568, "5.67", "139.07"),
    ("S2", 0.40, 6, 6_483_040, 191_307_368, "6.48", "191.31"),
    ("S1", 0.40, 8, 8_397_106, 239_000_552, "8.39", "239.00"),
    ("M3", 0.66, 4, 14_839_789, 203_408_178, "14.84", "203.41"),
    ("M2", 0.66, 6, 15_410_557, 239_948_594, "15.41", "239.95"),
    ("M1", 0.66, 8, 16_814_977, 272_172_514, "16.81", "272.17"),
    ("L1", 1.00, 15, 33_646_666, 333_217_792, "33.65", "333.22"),
]

CONVS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
SIDES = (32, 32, 16, 16, 8, 8, 8, 4, 4, 4, 2, 2, 2)
"""Of the map that each convolution puts out."""


def widths_of(ratio: float, start: int) -> list[int]:
    """Of the 13 convolutions and the two hidden layers: full up to layer `start`, int(r_w * n) after it."""
    return [n if k <= start else int(ratio * n) for k, n in enumerate((*CONVS, 4096, 4096), 1)]


def cost_of(widths: list[int]) -> tuple[int, int]:
    """Parameters and multiply-adds of such a VGG16 (3x32x32, ten classes), layer by layer."""
    params = macs = 0
    inside = 3
    for out, side in zip(widths[:13], SIDES, strict=True):
        params += 9 * inside * out + out + 2 * out  # kernel, bias, scale and shift of the batch norm
        macs += side * side * (9 * inside * out + 4 * out)
        inside = out
    for out in (*widths[13:], 10):
        params += inside * out + out
        macs += inside * out
        inside = out
    return params, macs


@pytest.mark.parametrize("row", TABLE_1, ids=lambda row: row[0])
def test_table_1_holds_to_the_last_parameter(row: tuple[str, float, int, int, int, str, str]) -> None:
    name, ratio, start, params, macs, printed_params, printed_flops = row
    (found,) = (m for m in vgg_pool() if m.name == name)
    assert (found.params, found.macs) == (params, macs)
    assert cost_of(widths_of(ratio, start)) == (params, macs), "counted without the engine"
    layout = VGG.layout()
    groups = [g for g in layout.groups if g != "classes"]
    assert [layout.width(found.spec, g) for g in groups] == widths_of(ratio, start)
    assert layout.width(found.spec, "classes") == 10
    assert abs(params / 1e6 - float(printed_params)) < 0.01, "S1 is cut off in print, not rounded"
    assert f"{macs / 1e6:.2f}" == printed_flops


# Of the authors' code at 32x32x3 and 10 classes. ResNet18: stem 64, stages 96, 128, 256 and 512. The shares that it
# works with are 51.01, 47.94, 46.34 and 25.50, 21.00, 18.63 %.
RESNET18 = {
    "S3": (2_120_178, (64, 41, 55, 110, 220)),
    "S2": (2_389_623, (64, 96, 55, 110, 220)),
    "S1": (2_901_426, (64, 96, 128, 110, 220)),
    "M3": (5_272_834, (64, 65, 87, 174, 348)),
    "M2": (5_454_711, (64, 96, 87, 174, 348)),
    "M1": (5_803_826, (64, 96, 128, 174, 348)),
    "L1": (11_378_186, (64, 96, 128, 256, 512)),
}
MOBILENETV2 = {
    "S3": (506_974, (32, 16, 11, 14, 29, 44, 73, 147, 588)),
    "S2": (519_922, (32, 16, 24, 14, 29, 44, 73, 147, 588)),
    "S1": (555_508, (32, 16, 24, 32, 29, 44, 73, 147, 588)),
    "M3": (1_096_755, (32, 16, 16, 22, 44, 66, 110, 220, 883)),
    "M2": (1_105_827, (32, 16, 24, 22, 44, 66, 110, 220, 883)),
    "M1": (1_128_897, (32, 16, 24, 32, 44, 66, 110, 220, 883)),
    "L1": (2_254_858, (32, 16, 24, 32, 64, 96, 160, 320, 1280)),
}


def resnet18_params(widths: Sequence[int]) -> int:
    """Stem and four stages of two blocks; each stage's first block has a projection. No convolution has a bias."""

    def conv_bn(inside: int, out: int, side: int) -> int:
        return side * side * inside * out + 2 * out

    total, inside = conv_bn(3, widths[0], 3), widths[0]
    for out in widths[1:]:
        total += conv_bn(inside, out, 3) + conv_bn(inside, out, 1) + 3 * conv_bn(out, out, 3)
        inside = out
    return total + 10 * inside + 10


def mobilenetv2_params(widths: Sequence[int]) -> int:
    """Stem, seven stages of inverted residuals (the first expands once, the others six times), head, classifier; all
    convolutions have a bias."""

    def conv_bn(inside: int, out: int, side: int) -> int:
        return side * side * inside * out + out + 2 * out

    total, inside = conv_bn(3, widths[0], 3), widths[0]
    for out, depth, t in zip(widths[1:8], (1, 2, 3, 4, 3, 3, 1), (1, 6, 6, 6, 6, 6, 6), strict=True):
        for _ in range(depth):
            hidden = t * inside
            total += conv_bn(inside, hidden, 1) + conv_bn(1, hidden, 3) + conv_bn(hidden, out, 1)
            inside = out
    return total + conv_bn(inside, widths[8], 1) + 10 * widths[8] + 10


@pytest.mark.parametrize(
    ("family", "rows", "count", "shares"),
    [
        (ResNet18((3, 32, 32), 10), RESNET18, resnet18_params, "18.63 21.00 25.50 46.34 47.94 51.01 100.00"),
        (MobileNetV2((3, 32, 32), 10), MOBILENETV2, mobilenetv2_params, "22.48 23.06 24.64 48.64 49.04 50.07 100.00"),
    ],
    ids=["resnet18", "mobilenetv2"],
)
def test_the_seven_sizes_of_the_authors_code(family: ModelFamily, rows: Any, count: Any, shares: str) -> None:
    pool, layout = tiny_pool(AdaptiveFL(), family), family.layout()
    groups = [layer.group for layer in family.prunable()]
    found = {m.name: (m.params, tuple(layout.width(m.spec, g) for g in groups)) for m in pool}
    assert found == rows
    assert list(found) == SEVEN
    assert " ".join(f"{100 * m.share:.2f}" for m in pool) == shares
    for params, widths in rows.values():
        assert count(widths) == params, "counted without the engine"


SEVEN = ["S3", "S2", "S1", "M3", "M2", "M1", "L1"]


AEP = (210, 420, 840, 420, 210)


def aep_share(width: float, start: int) -> float:
    """% of the parameters of AEP's network that are left with int(width * n) units behind layer `start`."""

    def params(units: Sequence[int]) -> int:
        return sum((a + 1) * b for a, b in pairwise((18, *units, 1)))

    return 100 * params([n if k <= start else int(width * n) for k, n in enumerate(AEP, 1)]) / params(AEP)


@pytest.mark.parametrize(
    ("widths", "start", "shares"),
    [
        # I = 2 would leave S1 and M1 so many %: within 30 and 60, then S1 beyond, then M1.
        ((0.34, 0.66), 2, (29.7, 58.3)),
        ((0.36, 0.66), 1, (31.2, 58.3)),
        ((0.34, 0.68), 1, (29.7, 60.4)),
    ],
)
def test_s1_and_m1_have_at_most_30_and_60_percent(
    widths: tuple[float, float], start: int, shares: tuple[float, float]
) -> None:
    """Where the paper names no I: the largest within these, which leave room above Table 1's .25 and .50."""
    assert [aep_share(w, 2) for w in widths] == pytest.approx(shares, abs=0.05)
    found = {m.name: 100 * m.share for m in tiny_pool(AdaptiveFL(widths=widths), AepMLP((18,), 1))}
    for level, width in zip("SM", widths, strict=True):
        expected = {f"{level}{i}": aep_share(width, start + 1 - i) for i in range(1, start + 2)}
        assert {name: share for name, share in found.items() if name[0] == level} == pytest.approx(expected)


# ============================================================================== the search on the device, Sec. 3.2
SPLIT = {row[0]: widths_of(row[1], row[2]) for row in TABLE_1}
SIZE = {row[0]: 100 * (row[3] / 33_646_666) for row in TABLE_1}
"""In % of the full model."""


def is_inside(small: str, large: str) -> bool:
    return all(a <= b for a, b in zip(SPLIT[small], SPLIT[large], strict=True))


def trained_by(algorithm: AdaptiveFL, received: str, free: float) -> str:
    pool = vgg_pool()
    (sent,) = (m for m in pool if m.name == received)
    order = WorkOrder(0, 0, sent.spec, {}, 1, SEVEN.index(received))
    task = algorithm.task(order, TaskContext(VGG.layout(), pool, Device(0, "any", 110.0, 8.0), free))
    return next(m.name for m in pool if m.spec == task.spec)


def expected_of(received: str, free: float) -> str | None:
    fitting = [name for name in SEVEN if is_inside(name, received) and SIZE[name] < free]
    return max(fitting, key=lambda name: SIZE[name], default=None)


@law
@given(received=st.sampled_from(SEVEN), free=st.floats(0, 130) | st.sampled_from(sorted(SIZE.values())))
def test_device_trains_the_largest_inner_model_that_fits(received: str, free: float) -> None:
    assert trained_by(AdaptiveFL(), received, free) == (expected_of(received, free) or "S3")


@pytest.mark.parametrize("received", SEVEN)
def test_a_device_below_the_smallest_model_trains_it_or_fails(received: str) -> None:
    """S3 has 16.8 %, and is inside all others."""
    assert trained_by(AdaptiveFL(on_too_small="train"), received, 10.0) == "S3"
    with pytest.raises(ClientError):
        trained_by(AdaptiveFL(on_too_small="fail"), received, 10.0)
    assert trained_by(AdaptiveFL(on_too_small="fail"), received, 17.0) == "S3"


# ================================================================================================ the variants
def plans(algorithm: AdaptiveFL, rounds: int, tables: Any = None) -> list[Any]:
    site = tiny_site(algorithm, SMALL)
    state = start_of(algorithm, site)
    state = state if tables is None else replace(state, tables=tables)
    return [algorithm.plan(state, context_of(site, round, SEED)) for round in range(rounds)]


def test_greed_sends_the_full_model_to_uniform_distinct_clients() -> None:
    """20 clients, 5 a round, whatever they can hold: each comes in a quarter of the rounds."""
    rounds = 400
    clients: Counter[int] = Counter()
    for plan in plans(AdaptiveFL(TRAINING, variant="greed"), rounds):
        asked = [o.client for o in plan.orders]
        assert len(set(asked)) == len(asked) == 5
        assert {(SEVEN[o.level], o.spec) for o in plan.orders} == {("L1", FULL)}
        clients.update(asked)
    assert len(clients) == 20
    for count in clients.values():
        assert abs(count / rounds - 0.25) < 0.09, "four standard deviations"
