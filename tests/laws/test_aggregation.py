"""Median and trimmed mean against a loop over single elements; what bad clients cannot do; clipping.

For each element p: of the n values that updates bring, without the floor(trim * n) smallest and as many of the largest,
the mean (Yin et al., ICML 2018, Definitions 1 and 2); where that leaves nobody out, the smallest change on which all
agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from statistics import median
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fl_engine.aggregation import averaging, robust
from fl_engine.aggregation.privacy import Private, Public
from fl_engine.aggregation.robust import Middle
from fl_engine.aggregation.rules import Aggregate, Mean, Median, TrimmedMean
from fl_engine.aggregation.spool import Spool
from fl_engine.algorithms import DepthFL
from fl_engine.core.errors import ConfigError, ModelError
from fl_engine.core.slicing import take
from fl_engine.core.types import FULL, Axis, ParamLayout, Params, Slot, SubmodelSpec
from fl_engine.rounds.server import ServerSite
from fl_engine.testing.models import kept_mask
from fl_engine.testing.tiny import SEED, TRAINING, assert_same_bits, context_of, start_of, tiny_site, update_of

law = settings(max_examples=40)

LAYOUT = ParamLayout(
    {"a": 5, "b": 3},
    {
        "one": Slot("first", (Axis("a"), Axis(None))),
        "two": Slot("second", (Axis("b"), Axis("a", 2))),
        "tied": Slot("second", (Axis("b", 3), Axis("b"))),
        "gates": Slot("second", (Axis("b", 2, copies=2), Axis("a", copies=3))),
        "free": Slot("third", (Axis(None),)),
        "scale": Slot("third", ()),
    },
)
SHAPES = {"one": (5, 2), "two": (3, 10), "tied": (9, 3), "gates": (12, 15), "free": (4,), "scale": ()}
NOTHING = Public(0, (FULL,), None)
"""What aggregates that are not private know of a round: nothing that they need."""


@dataclass
class Update:
    payload: Params
    spec: SubmodelSpec


def model(seed: int, size: float = 1.0) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {name: size * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@st.composite
def specs(draw: st.DrawFn) -> SubmodelSpec:
    """Any mixture of prefixes and scattered channels, some blocks dropped."""
    keep = {}
    for group, size in LAYOUT.groups.items():
        prefix, scattered = st.integers(1, size).map(range), st.sets(st.integers(0, size - 1), min_size=1)
        keep[group] = sorted(draw(prefix | scattered))
    return SubmodelSpec.of(keep, draw(st.none() | st.sets(st.sampled_from(LAYOUT.blocks), min_size=1)))


@st.composite
def updates(draw: st.DrawFn) -> Update:
    spec, brought = draw(specs()), model(draw(st.integers(0, 2**30)))
    kept = {name: t.clone() for name, t in take(brought, LAYOUT, spec).items() if draw(st.integers(0, 9)) > 0}
    return Update(kept, spec)


def add_all(aggregate: Aggregate, given: list[Update]) -> Aggregate:
    for update in given:
        aggregate.add(update.payload, update.spec, 1.0)
    return aggregate


def middle_of(old: Params, given: list[Update], trim: float) -> Params:
    return add_all(Middle(old, LAYOUT, trim), given).result()


def values_of(given: list[Update], name: str) -> list[list[float]]:
    found: list[list[float]] = [[] for _ in range(math.prod(SHAPES[name]))]
    for update in given:
        if name in update.payload:
            where = kept_mask(LAYOUT, update.spec, name, torch.Size(SHAPES[name])).flatten().nonzero().flatten()
            for place, value in zip(where.tolist(), update.payload[name].flatten().tolist(), strict=True):
                found[place].append(value)
    return found


def slow(values: list[float], before: float, tenths: int) -> float:
    drop = min(tenths * len(values) // 10, (len(values) - 1) // 2)
    if values and (drop or not tenths):
        kept = sorted(values)[drop : len(values) - drop]
        return float(sum(map(Fraction, kept)) / len(kept))
    changes = [value - before for value in values]
    agreed = len(values) > 1 and (min(changes) > 0 or max(changes) < 0)
    return min(values, key=lambda value: abs(value - before)) if agreed else before


# ----------------------------------------------------------------------------------------- what it computes
@law
@given(given=st.lists(updates(), min_size=1, max_size=12), tenths=st.integers(0, 4))
def test_trimmed_mean_equals_loop_over_elements(given: list[Update], tenths: int) -> None:
    old = model(0)
    found = middle_of(old, given, tenths / 10)
    assert list(found) == list(old)
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (torch.float32, SHAPES[name])
        for values, got, before in zip(values_of(given, name), tensor.flatten(), old[name].flatten(), strict=True):
            assert float(got) == pytest.approx(slow(values, float(before), tenths), rel=1e-6, abs=1e-9)


@law
@given(given=st.lists(updates(), min_size=1, max_size=12))
def test_a_median_is_the_textbook_one(given: list[Update]) -> None:
    old = model(0)
    found = middle_of(old, given, 0.5)
    for name, tensor in found.items():
        for values, got, before in zip(values_of(given, name), tensor.flatten(), old[name].flatten(), strict=True):
            expected = median(values) if len(values) > 2 else slow(values, float(before), 5)
            assert float(got) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_by_hand() -> None:
    """Five clients: all hold the first value, four the second, one the third, nobody the fourth. 0.2 of five is
    one, of four it is none: of changes of 996, -4, 0 and -2 in the second, no direction is common."""
    layout = ParamLayout({"g": 4}, {"w": Slot("b", (Axis("g"),))})
    arrived = {(2,): [[1.0, 5.0], [2.0, 9.0], [3.0, 7.0], [-1e9, 1003.0]], (0, 2): [[100.0, 6.0]]}
    for trim, expected in ((0.2, [2.0, 9.0, 9.0, 4.0]), (0.4, [2.0, 8.0, 9.0, 4.0]), (0.5, [2, 8, 9, 4])):
        middle = Middle({"w": torch.tensor([9.0, 9.0, 9.0, 4.0])}, layout, trim)
        for keep, rows in arrived.items():
            for row in rows:
                spec = SubmodelSpec.of({"g": keep[0] if len(keep) == 1 else keep})
                middle.add({"w": torch.tensor(row)}, spec, 7.0)
        assert middle.result()["w"].tolist() == expected, trim


@law
@given(given=st.lists(updates(), min_size=2, max_size=10), trim=st.sampled_from([0.0, 0.2, 0.5]), data=st.data())
def test_the_order_of_updates_does_not_matter_to_the_bit(given: list[Update], trim: float, data: st.DataObject) -> None:
    found = middle_of(model(0), given, trim)
    assert_same_bits(middle_of(model(0), data.draw(st.permutations(given)), trim), found)


@law
@given(given=st.lists(updates(), min_size=1, max_size=10), rows=st.integers(1, 200))
def test_chunks_and_the_file_change_no_bit(given: list[Update], rows: int) -> None:
    whole = middle_of(model(0), given, 0.2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(robust, "CHUNK_BYTES", 4 * rows)
        patch.setattr(robust, "Spool", lambda: Spool(held_bytes=0))
        assert_same_bits(middle_of(model(0), given, 0.2), whole)


@law
@given(given=st.lists(updates(), min_size=1, max_size=8))
def test_trained_is_what_somebody_holds(given: list[Update]) -> None:
    for aggregate in (Middle(model(0), LAYOUT, 0.2), averaging.StreamingMean(model(0), LAYOUT)):
        assert aggregate.empty
        add_all(aggregate, given)
        assert aggregate.empty == (not any(u.payload for u in given))
        for name, mask in aggregate.trained().items():
            assert mask.flatten().tolist() == [bool(values) for values in values_of(given, name)]


# ------------------------------------------------------------------------------------------ bad clients
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
                assert min(good) <= got <= max(good), name
    assume(safe)


# ------------------------------------------------------------------------------------------ clipping
def distance(left: Params, right: Params) -> float:
    return math.sqrt(sum(float((left[n].double() - right[n].double()).square().sum()) for n in left))


@law
@given(update=updates(), clip=st.floats(1e-3, 50))
def test_clipped_update_has_norm_clip_and_same_direction(update: Update, clip: float) -> None:
    assume(update.payload)
    old = model(0)
    regions = averaging.Regions(old, LAYOUT)
    sent = take(old, LAYOUT, update.spec)
    sent = {name: sent[name] for name in update.payload}
    moved = distance(update.payload, sent)
    found = averaging.limited(update.payload, update.spec, old, regions, clip)
    if moved <= clip:
        assert found is update.payload
        return
    assert distance(found, sent) == pytest.approx(clip, rel=1e-4, abs=1e-6)  # float32, of weights up to 1
    for name, tensor in found.items():
        expected = sent[name] + (update.payload[name] - sent[name]) * (clip / moved)
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [Mean, Median, TrimmedMean])
@law
@given(given=st.lists(updates(), min_size=1, max_size=6), clip=st.floats(0.01, 10))
def test_clipping_is_that_of_each_update_before_the_aggregation(
    kind: type[Mean] | type[Median] | type[TrimmedMean], given: list[Update], clip: float
) -> None:
    old = model(0)
    regions = averaging.Regions(old, LAYOUT)
    before = [Update(averaging.limited(u.payload, u.spec, old, regions, clip), u.spec) for u in given]
    clipped = add_all(kind(clip=clip).start(old, LAYOUT, NOTHING), given)
    plain = add_all(kind().start(old, LAYOUT, NOTHING), before)
    assert_same_bits(clipped.result(), plain.result())
    assert_same_bits(clipped.trained(), plain.trained())
    assert clipped.empty == plain.empty


NORMED = ParamLayout({}, {n: Slot(None, (Axis(None),)) for n in ("w", "norm.running_mean", "norm.running_var")})
"""A layer and its batch norm's statistics."""


@pytest.mark.parametrize("kind", [Mean, Median, TrimmedMean])
@pytest.mark.parametrize("moved", [0.5, 4.0], ids=["within", "beyond"])
def test_a_clip_is_of_weights_alone(kind: type[Mean] | type[Median] | type[TrimmedMean], moved: float) -> None:
    """Running statistics that go from 0 and 1 to those of the data neither count nor are scaled."""
    old = {"w": torch.zeros(4), "norm.running_mean": torch.zeros(4), "norm.running_var": torch.ones(4)}
    update = {"w": torch.full((4,), moved / 2), "norm.running_mean": torch.full((4,), 30.0)}
    update["norm.running_var"] = torch.full((4,), 900.0)  # the change of the weights has the norm `moved`
    aggregate = add_all(kind(clip=1.0).start(old, NORMED, NOTHING), [Update(update, FULL)] * 5)
    torch.testing.assert_close(aggregate.result()["w"], torch.full((4,), min(moved, 1.0) / 2))
    assert_same_bits(
        {n: t for n, t in aggregate.result().items() if n != "w"}, {n: t for n, t in update.items() if n != "w"}
    )


def test_a_private_sum_counts_every_tensor() -> None:
    """What one client adds is `clip` at most, statistics included: its noise has to hide all of it."""
    old = {"w": torch.zeros(4), "norm.running_mean": torch.zeros(4), "norm.running_var": torch.ones(4)}
    summed = Private(clip=1.0).start(old, NORMED, Public(1, (FULL,), bytes(32)))
    summed.add({n: t + 5 for n, t in old.items()}, FULL, 1.0)
    assert math.hypot(*(float(t.norm()) for t in summed.sum.values())) == pytest.approx(1.0)


@pytest.mark.parametrize("aggregation", [Mean(clip=1.0), Median(), Median(clip=1.0), Private()], ids=lambda a: a.name)
def test_what_does_not_fit_is_refused_and_nothing_has_been_added(aggregation: Any) -> None:
    public = Public(1, (FULL,), bytes(32))
    clean, other = (aggregation.start(model(0), LAYOUT, public) for _ in range(2))
    for payload, spec in (
        ({"stray": torch.ones(1)}, FULL),
        ({"free": torch.ones(4), "one": torch.ones(5, 1)}, FULL),
        ({"one": torch.ones(5, 2)}, SubmodelSpec.of({}, ["third"])),
        ({"one": torch.ones(6, 2)}, SubmodelSpec.of({"a": 6})),
    ):
        with pytest.raises(ModelError):
            other.add(payload, spec, 1.0)
    for aggregate in (clean, other):
        aggregate.add(model(1), FULL, 1.0)
    assert_same_bits(other.result(), clean.result())


# ------------------------------------------------------------------------------------------ with FedDyn
def depth_state(algorithm: DepthFL) -> tuple[Any, Any, list[Any], Any]:
    """A state, a plan, an update of each of its orders that moves every weight by 1, and the server."""
    site = tiny_site(algorithm)
    state = start_of(algorithm, site)
    plan = algorithm.plan(state, context_of(site, 0, SEED))
    updates = [update_of(o, o.spec, {n: t + 1 for n, t in o.payload.items()}) for o in plan.orders]
    return state, plan, updates, ServerSite(site)


def test_feddyn_remembers_what_was_clipped() -> None:
    """g = -alpha * change, h = -alpha/K * sum of changes; a change of ones has norm sqrt(size), clipped to 0.5."""
    state, plan, updates, server = depth_state(DepthFL(training=TRAINING, aggregation=Mean(clip=0.5)))
    found = DepthFL(training=TRAINING, aggregation=Mean(clip=0.5)).merge(state, plan, updates, server)
    for update in updates:
        step = 0.5 / math.sqrt(sum(t.numel() for t in update.payload.values()))
        for name in update.payload:
            memory = found.memory[f"{update.client}/{name}"]
            torch.testing.assert_close(memory, torch.full_like(memory, -0.1 * step), rtol=2e-3, atol=1e-8)
    unclipped = DepthFL(training=TRAINING).merge(state, plan, updates, server)
    assert all(float(found.h[n].abs().max()) < 0.05 * float(unclipped.h[n].abs().max()) for n in found.h)


@pytest.mark.parametrize("aggregation", [Median(), TrimmedMean(), Private()], ids=lambda a: a.name)
def test_what_feddyn_would_undo_is_refused_with_a_way_out(aggregation: Any) -> None:
    algorithm = DepthFL(training=TRAINING, aggregation=aggregation)
    site = tiny_site(algorithm)
    with pytest.raises(ConfigError, match=r"algorithm\.alpha=0"):
        start_of(algorithm, site)
    start_of(DepthFL(training=TRAINING, aggregation=aggregation, alpha=0.0), site)
