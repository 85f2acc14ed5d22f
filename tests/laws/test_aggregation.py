"""Mean, median and trimmed mean against a loop over single elements; what bad clients cannot do; clipping.

The mean (FlexFL Sec. III-E), for each element p: sum over the updates m that hold p of d_m * p_m, over the sum of their
d_m.

For each element p: of the n values that updates bring, without the floor(trim * n) smallest and as many of the largest,
the mean (Yin et al., ICML 2018, Definitions 1 and 2); where that leaves nobody out, the smallest change on which all
agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fl_engine.aggregation.averaging import StreamingMean
from fl_engine.aggregation.geometric_median import GeometricMedian, Weiszfeld
from fl_engine.aggregation.privacy import Private, Public
from fl_engine.aggregation.rules import Aggregate, Mean, Median, Middle, TrimmedMean
from fl_engine.aggregation.spool import Spool
from fl_engine.algorithms import DepthFL
from fl_engine.core.errors import ConfigError, ModelError
from fl_engine.core.slicing import take
from fl_engine.core.types import FULL, Axis, ParamLayout, Params, Slot, SubmodelSpec
from fl_engine.testing.tiny import TRAINING, assert_same_bits, start_of, tiny_site
from tests.harness.updates import LAYOUT, SHAPES, Update, model, updates, values_of

law = settings(max_examples=40)

NOTHING = Public(0, (FULL,), None)
"""What aggregates that are not private know of a round: nothing that they need."""


def add_all(aggregate: Aggregate, given: list[Update]) -> Aggregate:
    for update in given:
        aggregate.add(update.payload, update.spec, update.weight)
    return aggregate


def middle_of(old: Params, given: list[Update], trim: float) -> Params:
    return add_all(Middle(old, LAYOUT, trim), given).result()


def slow(given: list[tuple[float, float]], before: float, tenths: int) -> float:
    values = [value for value, _ in given]
    drop = min(tenths * len(values) // 10, (len(values) - 1) // 2)
    if values and (drop or not tenths):
        kept = sorted(values)[drop : len(values) - drop]
        return float(sum(map(Fraction, kept)) / len(kept))
    changes = [value - before for value in values]
    agreed = len(values) > 1 and (min(changes) > 0 or max(changes) < 0)
    return min(values, key=lambda value: abs(value - before)) if agreed else before


@law
@given(given=st.lists(updates(), min_size=1, max_size=12), tenths=st.integers(0, 5))
def test_trimmed_mean_equals_loop_over_elements(given: list[Update], tenths: int) -> None:
    old = model(0)
    found = middle_of(old, given, tenths / 10)
    assert list(found) == list(old)
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (torch.float32, SHAPES[name])
        for values, got, before in zip(values_of(given, name), tensor.flatten(), old[name].flatten(), strict=True):
            assert float(got) == pytest.approx(slow(values, float(before), tenths), rel=1e-6, abs=1e-9)


@law
@given(given=st.lists(updates(), min_size=2, max_size=10), trim=st.sampled_from([0.0, 0.2, 0.5]), data=st.data())
def test_the_order_of_updates_does_not_matter_to_the_bit(given: list[Update], trim: float, data: st.DataObject) -> None:
    found = middle_of(model(0), given, trim)
    assert_same_bits(middle_of(model(0), data.draw(st.permutations(given)), trim), found)


@law
@given(given=st.lists(updates(), min_size=1, max_size=10), rows=st.integers(1, 200))
def test_chunks_and_the_file_change_no_bit(given: list[Update], rows: int) -> None:
    whole = middle_of(model(0), given, 0.2)
    in_parts: Any = type("InParts", (Middle,), {"chunk_bytes": 4 * rows, "held_bytes": 0})
    assert_same_bits(add_all(in_parts(model(0), LAYOUT, 0.2), given).result(), whole)


BADNESS: dict[str, Callable[[Tensor], Tensor]] = {
    "huge": lambda t: t + 1e30,
    "minus": lambda t: -1e30 * t.sign(),
    "far": lambda t: t * 1e6,
}


@law
@given(
    honest=st.lists(updates(), min_size=3, max_size=9),
    bad=st.lists(st.tuples(updates(), st.sampled_from(sorted(BADNESS))), min_size=1, max_size=4),
    aggregation=st.sampled_from([Median(), TrimmedMean(), TrimmedMean(trim=0.4)]),
)
def test_minority_cannot_leave_the_range_of_honest_clients(
    honest: list[Update], bad: list[tuple[Update, str]], aggregation: Median | TrimmedMean
) -> None:
    liars = [Update({n: BADNESS[how](t) for n, t in update.payload.items()}, update.spec) for update, how in bad]
    found = add_all(aggregation.start(model(0), LAYOUT, NOTHING), [*honest, *liars]).result()
    share = 0.5 if isinstance(aggregation, Median) else aggregation.trim
    safe = 0
    for name, tensor in found.items():
        everyone = zip(values_of(honest, name), values_of(liars, name), tensor.flatten().tolist(), strict=True)
        for good, lies, got in everyone:
            n = len(good) + len(lies)
            allowed = (n - 1) // 2 if share == 0.5 else int(share * n)
            if lies and len(lies) <= allowed:
                safe += 1
                assert min(good)[0] <= got <= max(good)[0], name
    assume(safe)


NORMED = ParamLayout({}, {n: Slot(None, (Axis(None),)) for n in ("w", "norm.running_mean", "norm.running_var")})
"""A layer and its batch norm's statistics."""


@pytest.mark.parametrize("kind", [Mean, Median, TrimmedMean, GeometricMedian])
@pytest.mark.parametrize("moved", [0.5, 4.0], ids=["within", "beyond"])
def test_a_clip_is_of_weights_alone(kind: Any, moved: float) -> None:
    """Running statistics that go from 0 and 1 to those of the data neither count nor are scaled."""
    old = {"w": torch.zeros(4), "norm.running_mean": torch.zeros(4), "norm.running_var": torch.ones(4)}
    update = {"w": torch.full((4,), moved / 2).double(), "norm.running_mean": torch.full((4,), 30.0)}
    update["norm.running_var"] = torch.full((4,), 900.0)  # the change of the weights has the norm `moved`
    aggregate = add_all(kind(clip=1.0).start(old, NORMED, NOTHING), [Update(update, FULL)] * 5)
    torch.testing.assert_close(aggregate.result()["w"], torch.full((4,), min(moved, 1.0) / 2))
    assert update["w"].eq(moved / 2).all(), "the caller's tensors do not change"
    assert_same_bits(
        {n: t for n, t in aggregate.result().items() if n != "w"}, {n: t for n, t in update.items() if n != "w"}
    )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_mean_of_updates_of_one_sub_model(count: int) -> None:
    payloads = [take(model(seed), LAYOUT, HALF) for seed in range(1, count + 1)]
    mean = add_all(Mean().start(model(0), LAYOUT, NOTHING), [Update(each, HALF) for each in payloads]).result()
    for name, tensor in take(mean, LAYOUT, HALF).items():
        torch.testing.assert_close(tensor, torch.stack([each[name] for each in payloads]).mean(0))


def test_mean_is_empty_until_an_update_has_tensors() -> None:
    aggregate = Mean().start(model(0), LAYOUT, NOTHING)
    for payload, empty in (({}, True), (model(1), False), ({}, False)):
        aggregate.add(payload, FULL, 1.0)
        assert aggregate.empty == empty


def test_a_private_sum_counts_every_tensor() -> None:
    """What one client adds is `clip` at most, statistics included: its noise has to hide all of it."""
    old = {"w": torch.zeros(4), "norm.running_mean": torch.zeros(4), "norm.running_var": torch.ones(4)}
    summed = Private(clip=1.0).start(old, NORMED, Public(1, (FULL,), bytes(32)))
    summed.add({n: t + 5 for n, t in old.items()}, FULL, 1.0)
    assert math.hypot(*(float(t.norm()) for t in summed.sum.values())) == pytest.approx(1.0)


HALF = SubmodelSpec.of({"a": 2, "b": [0, 2]})
GOOD = {name: torch.ones_like(t) for name, t in take(model(0), LAYOUT, HALF).items()}


@pytest.mark.parametrize(
    "aggregation",
    [Mean(), Mean(clip=1.0), Median(), Median(clip=1.0), GeometricMedian(), Private()],
    ids=lambda a: a.name,
)
def test_misfitting_update_is_refused_without_a_trace(aggregation: Any) -> None:
    public = Public(1, (FULL,), bytes(32))
    clean, other = (aggregation.start(model(0), LAYOUT, public) for _ in range(2))
    for payload, spec in (
        ({"stray": torch.ones(1)}, FULL),
        (GOOD | {"cube": torch.ones(2, 3, 2)}, HALF),
        (GOOD | {"two": torch.ones(1, 1)}, HALF),  # would broadcast
        (GOOD, SubmodelSpec.of({"a": 3})),
        ({"one": torch.ones(4, 2)}, SubmodelSpec.of({}, ["third"])),
        ({"one": torch.ones(5, 2)}, SubmodelSpec.of({"a": 5})),
    ):
        with pytest.raises(ModelError):
            other.add(payload, spec, 1.0)
    if isinstance(aggregation, Mean):
        for weight in (-1.0, math.nan):
            with pytest.raises(ModelError, match="weight"):
                other.add(GOOD, HALF, weight)
    for aggregate in (clean, other):
        aggregate.add(model(1), FULL, 1.0)
    assert_same_bits(other.result(), clean.result())


@pytest.mark.parametrize("aggregation", [Median(), TrimmedMean(), Private()], ids=lambda a: a.name)
def test_feddyn_refuses_robust_aggregations(aggregation: Any) -> None:
    algorithm = DepthFL(training=TRAINING, aggregation=aggregation)
    site = tiny_site(algorithm)
    with pytest.raises(ConfigError) as error:
        start_of(algorithm, site)
    assert error.value.path == "algorithm.aggregation"
    start_of(DepthFL(training=TRAINING, aggregation=aggregation, alpha=0.0), site)


@pytest.mark.parametrize("far", [3.0, 1e6])
def test_geometric_median_is_where_diagonals_cross(far: float) -> None:
    """The geometric median of a quadrilateral's corners is the intersection of its diagonals, here the origin."""
    layout, old = ParamLayout({}, {"w": Slot(None, (Axis(None),))}), {"w": torch.tensor([0.5, 0.5])}
    corners = [Update({"w": torch.tensor(at)}, FULL) for at in ([-1.0, 0.0], [far, 0.0], [0.0, -1.0], [0.0, 2.0])]
    found = add_all(GeometricMedian().start(old, layout, NOTHING), corners).result()
    torch.testing.assert_close(found["w"], torch.zeros(2), atol=0.05, rtol=0)


def test_geometric_median_of_sub_models_equals_hand_result() -> None:
    layout, old = ParamLayout({"w": 3}, {"w": Slot("all", (Axis("w"),))}), {"w": torch.full((3,), 0.5)}
    given = [Update({"w": torch.tensor(values)}, SubmodelSpec.of({"w": len(values)}), 1e9 * len(values)) for values in (
        [0.0], [0.0, 5.0], [10.0, 5.0, 7.0])]  # fmt: skip
    found = add_all(GeometricMedian().start(old, layout, NOTHING), given).result()
    torch.testing.assert_close(found["w"], torch.tensor([0.0, 5.0, 7.0]), atol=0.1, rtol=0)


@settings(max_examples=10)
@given(given=st.lists(updates(), min_size=2, max_size=8), data=st.data())
def test_geometric_median_ignores_order_and_file(given: list[Update], data: st.DataObject) -> None:
    found = add_all(GeometricMedian().start(model(0), LAYOUT, NOTHING), given).result()
    in_a_file: Any = type("InAFile", (Weiszfeld,), {"held_bytes": 0})
    assert_same_bits(add_all(in_a_file(model(0), LAYOUT), given).result(), found)
    other = add_all(Weiszfeld(model(0), LAYOUT), data.draw(st.permutations(given))).result()
    for name, tensor in found.items():
        torch.testing.assert_close(other[name], tensor, atol=1e-4, rtol=1e-4)


def mean_of(old: Params, given: list[Update]) -> Params:
    return add_all(StreamingMean(old, LAYOUT), given).result()


counts = st.integers(1, 5000).map(float)
reals = st.floats(1e-3, 1e6)


@law
@given(given=st.lists(updates(counts | reals), min_size=10, max_size=10))
def test_mean_equals_loop_over_elements(given: list[Update]) -> None:
    """An element that nobody holds keeps its bits; others have one rounding to single precision."""
    old = model(0)
    found = mean_of(old, given)
    assert list(found) == list(old)
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (torch.float32, SHAPES[name])
        for pairs, got, before in zip(values_of(given, name), tensor.flatten(), old[name].flatten(), strict=True):
            if pairs:
                total = sum(Fraction(weight) * Fraction(value) for value, weight in pairs)
                exact = float(total / sum(Fraction(weight) for _, weight in pairs))
                assert float(got) == pytest.approx(exact, rel=1e-6, abs=1e-9)
            else:
                assert float(got) == float(before)


@pytest.mark.parametrize("held_bytes", [0, 2**30], ids=["in a file", "in memory"])
@pytest.mark.parametrize("rows_bytes", [1, 48, 2**22])
def test_neither_a_spool_nor_parts_of_tensors_change_a_bit(held_bytes: int, rows_bytes: int) -> None:
    updates = [Update(model(1), FULL, 3.0), Update(GOOD, HALF, 5.0), Update(model(2), FULL, 0.5)]
    expected = mean_of(model(0), updates)
    spool, mean = Spool(held_bytes), StreamingMean(model(0), LAYOUT)
    mean.rows_bytes = rows_bytes
    for update in updates:
        mean.add(spool.get(spool.put(update.payload)), update.spec, update.weight)
    assert_same_bits(mean.result(), expected)
    wrong = spool.get(spool.put(GOOD | {"free": torch.ones(4)}))
    with pytest.raises(ModelError, match="free"):
        StreamingMean(model(0), LAYOUT).add(wrong, HALF, 1.0)


def test_many_updates_do_not_lose_the_small_ones() -> None:
    """In single precision the running sum would stop growing."""
    layout = ParamLayout({"g": 1}, {"w": Slot("b", (Axis("g"),))})
    mean = StreamingMean({"w": torch.zeros(1)}, layout)
    mean.add({"w": torch.tensor([1.0])}, FULL, 2.0**25)
    for _ in range(64):
        mean.add({"w": torch.tensor([0.0])}, FULL, 2.0**19)
    assert mean.result()["w"].tolist() == [0.5]
