"""AdaptiveFL's selection (Jia et al., DAC 2024, Sec. 3.3 and Alg. 1), worked by hand.

Seven models, S3 S2 S1 M3 M2 M1 L1, are the indices 0 to 6; tables have a row per type (S, M, L) or per model, and a
column per client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.core import seeds
from fl_engine.core.types import FULL, Device, Pick, Pool, PoolModel, SubmodelSpec, Tables, WorkOrder
from fl_engine.selection import Curiosity
from fl_engine.testing.tiny import failure_of, learned, picked

law = settings(max_examples=60)
S3, S2, S1, M3, M2, M1, L1 = range(7)


def pool_of(models: int, dispatched: Sequence[int] | None = None) -> Pool:
    return tuple(
        PoolModel(
            name=f"m{i}",
            spec=SubmodelSpec.of({"g": i + 1}) if i < models - 1 else FULL,
            params=i + 1,
            share=(i + 1) / models,
            macs=i + 1,
            dispatched=dispatched is None or i in dispatched,
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
    failed = failure_of(WorkOrder(0, 0, FULL, {}, 0, sent))
    found = Curiosity().learn(tables, WorkOrder(0, 0, FULL, {}, 0, sent), failed, 0.0)
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
def test_a_history_is_learned_as_the_algorithm_says(p: int, data: st.DataObject) -> None:
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
P = {
    # Over 3/4, over 19/28, over 17/70.
    "S": (F(1, 3), F(4, 9), F(2, 9)),
    "M": (F(12, 19), F(0), F(7, 19)),
    "L": (F(10, 17), F(0), F(7, 17)),
}


@pytest.mark.parametrize(("score", "expected"), [("s", R_S), ("c", R_C), ("cs", R)])
def test_the_rewards_of_three_clients(score: Any, expected: dict[str, tuple[Fraction, ...]]) -> None:
    found = Curiosity(score=score).rewards(THREE)
    for model, kind in enumerate("SSSMMML"):
        assert found[model].tolist() == pytest.approx([float(v) for v in expected[kind]], rel=1e-12), kind


CHI_SQUARE_999 = {6: 22.458, 12: 32.909, 14: 36.123, 20: 45.315}
"""Exceeded once in a thousand, by degrees of freedom."""


def chi_square(found: Counter[Pick], expected: dict[Pick, float], draws: int) -> float:
    assert sum(expected.values()) == pytest.approx(1)
    return sum((found[cell] - draws * p) ** 2 / (draws * p) for cell, p in expected.items() if p > 0)


def single_picks(selector: Curiosity, tables: Tables, pool: Pool, clients: int, draws: int) -> Counter[Pick]:
    rng = seeds.rng(1, "curiosity test")
    return Counter(picked(selector, tables, fleet_of(clients), pool, rng, 1)[0] for _ in range(draws))


@pytest.mark.parametrize(("score", "reward"), [("cs", R), ("c", R_C), ("s", R_S)])
def test_models_come_alike_and_clients_by_their_reward(score: Any, reward: dict[str, tuple[Fraction, ...]]) -> None:
    draws = 3000
    expected = {
        (client, model): float(reward[kind][client] / sum(reward[kind])) / 7
        for model, kind in enumerate("SSSMMML")
        for client in range(3)
    }
    if score == "cs":
        by_hand = {(c, m): float(P[kind][c]) / 7 for m, kind in enumerate("SSSMMML") for c in range(3)}
        assert expected == pytest.approx(by_hand)
    found = single_picks(Curiosity(score=score), THREE, pool_of(7), 3, draws)
    cells = [cell for cell, p in expected.items() if p > 0]
    limit = {21: CHI_SQUARE_999[20], 17: 39.252}[len(cells)]
    assert chi_square(found, expected, draws) < limit
    assert set(found) == set(cells), "somebody without a reward was asked"


def test_a_model_that_nobody_can_train_is_not_drawn() -> None:
    tables = tables_of([(1, 1, 1)] * 2, [(4, 0, 0, 0, 0, 0, 0), (2, 3, 0, 0, 0, 0, 0)])
    rng = seeds.rng(3, "curiosity test")
    models = {m for _ in range(200) for _, m in picked(Curiosity(), tables, fleet_of(2), pool_of(7), rng, 2)}
    assert models == {S3, S2, S1}
