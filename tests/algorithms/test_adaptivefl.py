"""AdaptiveFL against its paper (Jia et al., DAC 2024): the pool of Table 1 to the last parameter, the search on the
device, which selection each variant is, and the selection by hand (Sec. 3.3, Alg. 1).

The seven models, S3 S2 S1 M3 M2 M1 L1, are the indices 0 to 6; the selection's tables have a row per type (S, M, L) or
per model, and a column per client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.algorithms import AdaptiveFL
from fl_engine.core import seeds
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.types import FULL, Assignment, Device, Pool, PoolModel, SubmodelSpec, Tables, TaskContext
from fl_engine.models.chains import VGG16, AepMLP, SmallCNN
from fl_engine.models.mobilenetv2 import MobileNetV2
from fl_engine.models.resnet import ResNet18
from fl_engine.selection import Curiosity
from fl_engine.testing.tiny import SEED, TRAINING, context_of, failure_of, start_of, tiny_pool, tiny_site
from tests.harness.made_up import learned, picked

VGG = VGG16((3, 32, 32), 10)
SMALL = SmallCNN((1, 16, 16), 4, width=0.25)
law = settings(max_examples=60)


@lru_cache(maxsize=1)
def vgg_pool() -> Pool:
    return tiny_pool(AdaptiveFL(), VGG)


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


def widths_of(ratio: float, start: int) -> list[int]:
    """Of the 13 convolutions and the two hidden layers: full up to layer `start`, int(r_w * n) after it."""
    return [n if k <= start else int(ratio * n) for k, n in enumerate((*CONVS, 4096, 4096), 1)]


@pytest.mark.parametrize("row", TABLE_1, ids=lambda row: row[0])
def test_pool_of_table_1_to_the_last_parameter(row: tuple[str, float, int, int, int, str, str]) -> None:
    name, ratio, start, params, macs, printed_params, printed_flops = row
    (found,) = (m for m in vgg_pool() if m.name == name)
    assert (found.params, found.macs) == (params, macs)
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


@pytest.mark.parametrize(
    ("family", "rows", "shares"),
    [
        (ResNet18((3, 32, 32), 10), RESNET18, "18.63 21.00 25.50 46.34 47.94 51.01 100.00"),
        (MobileNetV2((3, 32, 32), 10), MOBILENETV2, "22.48 23.06 24.64 48.64 49.04 50.07 100.00"),
    ],
    ids=["resnet18", "mobilenetv2"],
)
def test_sizes_of_the_authors_code(family: ModelFamily, rows: Any, shares: str) -> None:
    pool, layout = tiny_pool(AdaptiveFL(), family), family.layout()
    groups = [layer.group for layer in family.prunable()]
    found = {m.name: (m.params, tuple(layout.width(m.spec, g) for g in groups)) for m in pool}
    assert found == rows
    assert list(found) == SEVEN
    assert " ".join(f"{100 * m.share:.2f}" for m in pool) == shares


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


SPLIT = {row[0]: widths_of(row[1], row[2]) for row in TABLE_1}
SIZE = {row[0]: 100 * (row[3] / 33_646_666) for row in TABLE_1}
"""In % of the full model."""


def is_inside(small: str, large: str) -> bool:
    return all(a <= b for a, b in zip(SPLIT[small], SPLIT[large], strict=True))


def trained_by(algorithm: AdaptiveFL, received: str, free: float) -> str:
    pool = vgg_pool()
    (sent,) = (m for m in pool if m.name == received)
    assignment = Assignment(0, 0, sent.spec, {}, 1, SEVEN.index(received))
    task = algorithm.task(assignment, TaskContext(VGG.layout(), pool, Device(0, "any", 110.0, 8.0), free))
    return next(m.name for m in pool if m.spec == task.spec)


def expected_of(received: str, free: float) -> str | None:
    fitting = [name for name in SEVEN if is_inside(name, received) and SIZE[name] < free]
    return max(fitting, key=lambda name: SIZE[name], default=None)


@law
@given(received=st.sampled_from(SEVEN), free=st.floats(0, 130) | st.sampled_from(sorted(SIZE.values())))
def test_device_trains_the_largest_inner_model_that_fits(received: str, free: float) -> None:
    assert trained_by(AdaptiveFL(), received, free) == (expected_of(received, free) or "S3")


def test_greed_sends_the_full_model_to_uniform_distinct_clients() -> None:
    """20 clients, 5 a round: each is selected in a quarter of the rounds."""
    algorithm, rounds, clients = AdaptiveFL(TRAINING, variant="greed"), 400, Counter[int]()
    site = tiny_site(algorithm, SMALL)
    state = start_of(algorithm, site)
    for round in range(rounds):
        assignments = algorithm.plan(state, context_of(site, round, SEED)).assignments
        assert len({each.client for each in assignments}) == len(assignments) == 5
        assert {(SEVEN[each.level], each.spec) for each in assignments} == {("L1", FULL)}
        clients.update(each.client for each in assignments)
    assert len(clients) == 20
    assert all(abs(count / rounds - 0.25) < 0.09 for count in clients.values()), "four standard deviations"


S3, S2, S1, M3, M2, M1, L1 = range(7)


def pool_of(models: int) -> Pool:
    return tuple(
        PoolModel(
            name=f"m{i}",
            spec=SubmodelSpec.of({"g": i + 1}) if i < models - 1 else FULL,
            params=i + 1,
            share=(i + 1) / models,
            macs=i + 1,
            dispatched=True,
            reported=True,
        )
        for i in range(models)
    )


def fleet_of(clients: int) -> tuple[Device, ...]:
    return tuple(Device(c, "any", 110.0, 0.0) for c in range(clients))


def tables_of(curiosity: Sequence[Sequence[float]], resource: Sequence[Sequence[float]]) -> Tables:
    by_type, by_model = zip(*curiosity, strict=True), zip(*resource, strict=True)
    return {
        "curiosity": tuple(tuple(float(v) for v in row) for row in by_type),
        "resource": tuple(tuple(float(v) for v in row) for row in by_model),
    }


def column(tables: Tables, name: str, client: int) -> list[float]:
    return [row[client] for row in tables[name]]


START = (1, 1, 1, 1, 1, 1, 1)
LATER = (5, 0, 2, 4, 1, 0, 3)


@pytest.mark.parametrize(
    ("before", "sent", "curiosity", "resource"),
    [
        # Its type counts as sent and as brought back; T_r as of an update pruned below S3, whatever was sent.
        (START, S3, (3, 1, 1), (4, 0, 0, 0, 0, 0, 0)),
        (START, M2, (1, 3, 1), (4, 0, 0, 0, 0, 0, 0)),
        (LATER, L1, (1, 1, 3), (8, 0, 0, 1, 0, 0, 0)),
    ],
)
def test_a_failure_counts_as_a_visit(
    before: Sequence[int], sent: int, curiosity: Sequence[int], resource: Sequence[int]
) -> None:
    tables = tables_of([(1, 1, 1)] * 2, [before, LATER])
    failed = failure_of(Assignment(0, 0, FULL, {}, 0, sent))
    found = Curiosity().learn(tables, Assignment(0, 0, FULL, {}, 0, sent), failed, 0.0)
    assert column(found, "curiosity", 0) == list(curiosity)
    assert column(found, "resource", 0) == list(resource)
    assert column(found, "resource", 1) == list(LATER)


def algorithm_1(t_c: list[int], t_r: list[int], sent: int, back: int, p: int) -> None:
    """Lines 12 to 26 as they are printed, for one client."""
    models = len(t_r)

    def kind(model: int) -> int:
        return 2 if model == models - 1 else model // p

    t_c[kind(sent)] += 1
    t_c[kind(back)] += 1
    if sent == back:
        for t in range(sent, models):
            t_r[t] += 1
        t_r[models - 1] += p - 1
    else:
        t_r[back] += p
        for tau, t in enumerate(range(back, models)):
            t_r[t] = max(t_r[t] - tau, 0)


@law
@given(p=st.integers(1, 4), data=st.data())
def test_learning_equals_algorithm_1(p: int, data: st.DataObject) -> None:
    models, clients = 2 * p + 1, 3
    selector = Curiosity(per_type=p)
    tables = selector.init(fleet_of(clients), pool_of(models))
    t_c, t_r = [[1, 1, 1] for _ in range(clients)], [[1] * models for _ in range(clients)]
    for _ in range(data.draw(st.integers(1, 20))):
        client, sent = data.draw(st.integers(0, clients - 1)), data.draw(st.integers(0, models - 1))
        back = data.draw(st.integers(0, sent))
        tables = learned(selector, tables, sent, back, client)
        algorithm_1(t_c[client], t_r[client], sent, back, p)
    assert tables == tables_of(t_c, t_r)
    assert (np.asarray(tables["curiosity"]) >= 1).all()
    assert (np.asarray(tables["resource"]).sum(axis=0) > 0).all(), "else R_s would divide by nothing"


# Client a is new; b was sent L1 and brought back S3 from ones, (4, 0, ...); c brought back L1 whole, (1, ..., 1, 4).
# The curiosity columns are made up, of squares.
THREE = tables_of(
    curiosity=[(4, 1, 1), (1, 9, 4), (9, 4, 16)],
    resource=[(1, 1, 1, 1, 1, 1, 1), (4, 0, 0, 0, 0, 0, 0), (1, 1, 1, 1, 1, 1, 4)],
)
F = Fraction
R_S = {
    # S: (7+6+5)/(3*7), (4+0+0)/(3*4), (10+9+8)/(3*10); M: (4+3+2)/21, 0, (7+6+5)/30; L: 1/7, 0, 4/10.
    "S": (F(6, 7), F(1, 3), F(9, 10)),
    "M": (F(3, 7), F(0), F(3, 5)),
    "L": (F(1, 7), F(0), F(2, 5)),
}
R_C = {
    # 1/sqrt of 4, 1, 9; of 1, 9, 4; of 1, 4, 16.
    "S": (F(1, 2), F(1), F(1, 3)),
    "M": (F(1), F(1, 3), F(1, 2)),
    "L": (F(1), F(1, 2), F(1, 4)),
}
R = {
    # min(1/2, R_s) * R_c: 1/2 * 1/2, 1/3 * 1, 1/2 * 1/3; 3/7 * 1, 0, 1/2 * 1/2; 1/7 * 1, 0, 2/5 * 1/4.
    "S": (F(1, 4), F(1, 3), F(1, 6)),
    "M": (F(3, 7), F(0), F(1, 4)),
    "L": (F(1, 7), F(0), F(1, 10)),
}


@pytest.mark.parametrize(("score", "expected"), [("s", R_S), ("c", R_C), ("cs", R)])
def test_the_rewards_of_three_clients(score: Any, expected: dict[str, tuple[Fraction, ...]]) -> None:
    found = Curiosity(score=score).rewards(THREE)
    for model, kind in enumerate("SSSMMML"):
        assert found[model].tolist() == pytest.approx([float(v) for v in expected[kind]], rel=1e-12), kind


def test_model_without_reward_is_not_drawn() -> None:
    tables = tables_of([(1, 1, 1)] * 2, [(4, 0, 0, 0, 0, 0, 0), (2, 3, 0, 0, 0, 0, 0)])
    rng = seeds.rng(3, "curiosity test")
    models = {m for _ in range(200) for _, m in picked(Curiosity(), tables, fleet_of(2), pool_of(7), rng, 2)}
    assert models == {S3, S2, S1}
