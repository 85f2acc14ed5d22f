"""A made-up layout with every kind of axis, and sub-models and updates of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from fl_engine.core.slicing import take
from fl_engine.core.types import FULL, Axis, ParamLayout, Params, Slot, SubmodelSpec
from fl_engine.testing.models import kept_channels, kept_mask

# One of each: a free axis, a repeat or copies on either axis, both at once, a group twice in one tensor, concatenated
# axes, a tensor without a group, and a scalar.
LAYOUT = ParamLayout(
    {"a": 4, "b": 3, "c": 2},
    {
        "one": Slot("first", (Axis("a"), Axis(None))),
        "two": Slot("second", (Axis("b"), Axis("a", 2))),
        "tied": Slot("second", (Axis("b", 3), Axis("b"))),
        "cube": Slot("third", (Axis("c"), Axis("b"), Axis("a"))),
        "gates": Slot("second", (Axis("a", copies=4), Axis("b"))),
        "window": Slot("third", (Axis("c"), Axis("b", 2, copies=3))),
        "joined": Slot("first", (Axis("c", copies=2), Axis("c", copies=2))),
        "chain": Slot("third", (Axis("a", then=Axis(None, 2, then=Axis("b", 2, then=Axis("a")))), Axis("c"))),
        "free": Slot("third", (Axis(None),)),
        "scale": Slot("third", ()),
    },
)
SHAPES: dict[str, tuple[int, ...]] = {
    "one": (4, 2), "two": (3, 8), "tied": (9, 3), "cube": (2, 3, 4), "gates": (16, 3), "window": (2, 18),
    "joined": (4, 4), "chain": (16, 2), "free": (5,), "scale": (),
}  # fmt: skip


@dataclass
class Update:
    payload: Params
    spec: SubmodelSpec
    weight: float = 1.0


def model(seed: int, size: float = 1.0) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {name: size * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@st.composite
def specs(draw: st.DrawFn, inside: SubmodelSpec = FULL) -> SubmodelSpec:
    """Any mixture of prefixes and scattered channels, some blocks dropped."""
    keep = {}
    for group in LAYOUT.groups:
        channels = kept_channels(LAYOUT, inside, group)
        if draw(st.booleans()):
            keep[group] = channels[: draw(st.integers(1, len(channels)))]
        else:
            keep[group] = sorted(draw(st.sets(st.sampled_from(channels), min_size=1)))
    blocks = [b for b in LAYOUT.blocks if LAYOUT.has_block(inside, b)]
    kept = draw(st.sets(st.sampled_from(blocks))) if blocks else set()
    return SubmodelSpec.of(keep, kept if draw(st.booleans()) or inside.blocks is not None else None)


ALIKE = st.just(1.0)


@st.composite
def updates(draw: st.DrawFn, weights: st.SearchStrategy[float] = ALIKE) -> Update:
    """An update of any sub-model, which may lack some tensors."""
    spec, brought = draw(specs()), model(draw(st.integers(0, 2**30)))
    kept = {name: t.clone() for name, t in take(brought, LAYOUT, spec).items() if draw(st.integers(0, 9)) > 0}
    return Update(kept, spec, draw(weights))


def values_of(given: list[Update], name: str) -> list[list[tuple[float, float]]]:
    """Return for each element of a parameter (value, weight) of the updates that hold it."""
    found: list[list[tuple[float, float]]] = [[] for _ in range(math.prod(SHAPES[name]))]
    for update in given:
        if name in update.payload:
            where = kept_mask(LAYOUT, update.spec, name, torch.Size(SHAPES[name])).flatten().nonzero().flatten()
            for place, value in zip(where.tolist(), update.payload[name].flatten().tolist(), strict=True):
                found[place].append((value, update.weight))
    return found
