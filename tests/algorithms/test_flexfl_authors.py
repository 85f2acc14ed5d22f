"""`rule: authors` of FlexFL (Chen et al., TCAD 2024): the pool and the pruning on devices of the published code."""

from __future__ import annotations

import pytest

from benchmarks.pools import APOZ
from fl_engine.algorithms import FlexFL
from fl_engine.core import pool as pools
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.costs import count_params
from fl_engine.core.errors import ClientError
from fl_engine.core.types import Device, Pool, TaskContext, WorkOrder
from fl_engine.models.mobilenetv2 import MobileNetV2
from fl_engine.models.resnet import ResNet34
from fl_engine.models.vgg16 import VGG16
from fl_engine.testing.tiny import paper_pool, tiny_pool

CIFAR = (3, 32, 32)
NAMES = ["M1", "M2'", "M2", "M3'", "M3"]
TARGETS = [25.0, 40.0, 50.0, 90.0]


FAMILIES: dict[str, ModelFamily] = {
    "vgg16": VGG16(CIFAR, 10),
    "resnet34": ResNet34(CIFAR, 10),
    "mobilenetv2": MobileNetV2(CIFAR, 10),
}
AUTHORS = [
    # g of gamma = 100/g, and parameters: of M1, M2', M2, M3'.
    ("vgg16", (58, 41, 31, 15), (9_877_106, 15_037_489, 18_102_099, 31_135_815), (29.36, 44.69, 53.80, 92.54)),
    ("resnet34", (37, 28, 20, 10), (6_296_547, 9_689_715, 11_671_306, 20_067_466), (29.18, 44.90, 54.09, 93.00)),
    ("mobilenetv2", (63, 51, 45, 8), (663_070, 988_425, 1_234_367, 2_113_000), (29.41, 43.84, 54.74, 93.71)),
]


@pytest.mark.parametrize(("model", "g", "params", "percent"), AUTHORS)
def test_the_authors_pool(model: str, g: tuple[int, ...], params: tuple[int, ...], percent: tuple[float, ...]) -> None:
    """What their code makes of their presets, on CIFAR-10."""
    pool = tiny_pool(FlexFL(rule="authors", apoz=APOZ[model]), FAMILIES[model])
    assert [m.name for m in pool] == NAMES
    assert [m.gamma for m in pool] == [*(100 / each for each in g), None]
    assert tuple(m.params for m in pool[:-1]) == params
    assert tuple(round(100 * m.share, 2) for m in pool) == (*percent, 100)


@pytest.mark.parametrize("model", FAMILIES)
def test_the_authors_rule_is_the_first_hit_from_above(model: str) -> None:
    """gamma runs over 100/g, g = 1 .. 199; the first model whose prunable part is within 5 points of the target."""
    family = FAMILIES[model]
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
    for m, target in zip(tiny_pool(FlexFL(rule="authors"), family, scores)[:-1], TARGETS, strict=True):
        assert m.gamma == 100 / next(g for g, size in shares.items() if abs(size - target / 100) <= 0.05)
        assert 100 * m.share > target, "larger than the target says"


def trained_by(algorithm: FlexFL, pool: Pool, received: str, free: float) -> str:
    layout, _ = paper_pool()
    level = [m.name for m in pool].index(received)
    order = WorkOrder(0, 0, pool[level].spec, {}, 1, level)
    task = algorithm.task(order, TaskContext(layout, pool, Device(0, "any", 110.0, 8.0), free))
    return next(m.name for m in pool if m.spec == task.spec)


VGG_SHARES = (9_877_106 / 33_646_666, 15_037_489 / 33_646_666, 18_102_099 / 33_646_666, 31_135_815 / 33_646_666, 1.0)


@pytest.mark.parametrize(
    ("free", "of_m1", "of_m2", "of_m3"),
    [
        (0.0, "M1", "M1", "M1"),
        (39.9, "M1", "M1", "M1"),
        (40.0, "M1", "M2'", "M2'"),
        (49.9, "M1", "M2'", "M2'"),
        (50.0, "M1", "M2", "M2"),
        (89.9, "M1", "M2", "M2"),
        (90.0, "M1", "M2", "M3'"),
        (99.9, "M1", "M2", "M3'"),
        (100.0, "M1", "M2", "M3"),
        (110.0, "M1", "M2", "M3"),
    ],
)
def test_the_authors_thresholds_are_the_targets(free: float, of_m1: str, of_m2: str, of_m3: str) -> None:
    """Below 40: M1; below 50: M2'; below 90: M2; below 100: M3'; else M3; then the smaller of that and what came."""
    _, pool = paper_pool(VGG_SHARES)
    assert [trained_by(FlexFL(rule="authors"), pool, m, free) for m in ("M1", "M2", "M3")] == [of_m1, of_m2, of_m3]


def test_a_device_below_the_smallest_target_trains_it_or_fails() -> None:
    _, pool = paper_pool(VGG_SHARES)
    strict = FlexFL(rule="authors", on_too_small="fail")
    assert trained_by(strict, pool, "M2", 25.0) == "M1"
    with pytest.raises(ClientError):
        trained_by(strict, pool, "M2", 24.9)
