"""FedX's Eq. 2 on a table that a person can check, and against a search written out here."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_engine.preparation.submodel_search import Candidate, Kind, search, spread

PARAMS = {"small": 100, "medium": 200, "large": 400}
ACCURACY = {
    ("small", 4): 0.50, ("small", 8): 0.80, ("small", 11): 0.84,
    ("medium", 4): 0.60, ("medium", 8): 0.85, ("medium", 11): 0.86,
    ("large", 4): 0.70, ("large", 8): 0.89, ("large", 11): 0.88,
}  # fmt: skip
BITS = (4, 8, 11)
WEAK = Kind("weak", 16, {"small": 2.0, "medium": 6.0})
STRONG = Kind("strong", 8, {"small": 0.2, "medium": 0.6, "large": 1.5})


def of(level: str, bits: int) -> Candidate:
    return Candidate(level=level, bits=bits, accuracy=ACCURACY[level, bits], encoded_bits=PARAMS[level] * (bits + 1))


def chosen(kinds: list[Kind], **rule: float) -> dict[str, tuple[str, int]]:
    found, _ = search(kinds, PARAMS, BITS, of, **rule)
    return {tier: (each.level, each.bits) for tier, each in found.items()}


@pytest.mark.parametrize(
    ("rule", "weak", "strong"),
    [
        # The weak cannot hold large, the strong compute with 8 bits: the most accurate of what is left.
        ({}, ("medium", 11), ("large", 8)),
        # 0.85 is within 0.01 of 0.86, in 1,800 bits instead of 2,400.
        ({"delta": 0.01}, ("medium", 8), ("large", 8)),
        # small in 11 bits (0.84) has 1,200 bits; of the strong, medium in 8 (0.85, 1,800) is within 0.04 of 0.89.
        ({"delta": 0.04}, ("small", 11), ("medium", 8)),
        # Anything is within 1: the fewest bits.
        ({"delta": 1.0}, ("small", 4), ("small", 4)),
        # medium takes the weak 6 s, large the strong 1.5 s.
        ({"limit": 5.0}, ("small", 11), ("large", 8)),
        ({"limit": 6.0}, ("medium", 11), ("large", 8)),
    ],
)
def test_choice_of_each_tier_by_hand(rule: dict[str, float], weak: tuple[str, int], strong: tuple[str, int]) -> None:
    assert chosen([WEAK, STRONG], **rule) == {"weak": weak, "strong": strong}


ACCURACIES = st.floats(0, 1, allow_nan=False).map(lambda x: round(x, 3))


@given(
    scores=st.lists(ACCURACIES, min_size=9, max_size=9),
    delta=st.sampled_from([0.0, 0.01, 0.1, 0.5]),
    limit=st.sampled_from([None, 0.3, 1.0, 9.0]),
    most=st.sampled_from([4, 8, 16]),
)
def test_search_equals_brute_force(scores: list[float], delta: float, limit: float | None, most: int) -> None:
    """Nothing feasible is more accurate by more than delta; nothing that accurate has fewer bits."""
    table = dict(zip(ACCURACY, scores, strict=True))

    def measure(level: str, bits: int) -> Candidate:
        return of(level, bits).model_copy(update={"accuracy": table[level, bits]})

    kind = Kind("strong", most, STRONG.seconds)
    found = search([kind], PARAMS, BITS, measure, limit, delta)[0]["strong"]
    able = [(n, b) for n, b in table if b <= most and (limit is None or STRONG.seconds[n] <= limit)]
    top = max(table[each] for each in able)
    good = [each for each in able if table[each] >= top - delta - 1e-9]
    assert (found.level, found.bits) in good
    assert found.encoded_bits == min(of(*each).encoded_bits for each in good)


@given(count=st.integers(1, 300), most=st.integers(1, 40), always=st.sets(st.integers(0, 299), max_size=3))
def test_spread_keeps_equal_distances(count: int, most: int, always: set[int]) -> None:
    names = [str(i) for i in range(count)]
    kept = spread(names, most, [str(i) for i in always])
    assert list(kept) == sorted(kept, key=int), "in their order"
    there = {str(i) for i in always} & set(names)
    assert there <= set(kept)
    assert len(kept) == min(count, max(most, len(there)))
    if not always and most < count:
        gaps = [int(b) - int(a) for a, b in pairwise(kept)]
        assert max(gaps, default=0) - min(gaps, default=0) <= 1
    assert spread(names, None, []) == tuple(names)
