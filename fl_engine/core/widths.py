"""Width rules: each returns a `SubmodelSpec` of a network. The outputs are never cut.

`int` and `ceil` give different sub-models: AdaptiveFL truncates, HeteroFL's and FjORD's code rounds up, FedRolex's
paper rounds down.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np

from fl_engine.core.contracts import ModelFamily, Nested
from fl_engine.core.costs import count_params
from fl_engine.core.errors import ModelError, PoolError
from fl_engine.core.types import FULL, HEAD, ParamLayout, SubmodelSpec

Rounding = Literal["ceil", "floor"]
ROUNDINGS = get_args(Rounding)

EXIT_TOLERANCE = 5.0
"""How far a level may exceed its target, in points (as in FlexFL's and AdaptiveFL's code)."""


def hidden(layout: ParamLayout) -> dict[str, int]:
    """Return the channel groups that a rule may cut."""
    return {group: size for group, size in layout.groups.items() if group != HEAD}


def check_cuttable(groups: Collection[str]) -> None:
    """Raise PoolError if there are no such groups."""
    if not groups:
        raise PoolError(
            "the network has no channels that can be cut, and this algorithm trains sub-models. Choose all_large or "
            "fedprox, or a network with sub-models (model.whole=false)"
        )


def kept(size: int, width: float, rounding: Rounding) -> int:
    """Return how many of `size` channels a width ratio keeps, at least one. 0.29 * 100 is 29 despite the float. Raises
    PoolError for another rounding."""
    if rounding not in ROUNDINGS:
        raise PoolError(f"rounding is {' or '.join(map(repr, ROUNDINGS))}, got {rounding!r}")
    exact = width * size
    rounded = math.ceil(exact - 1e-9) if rounding == "ceil" else math.floor(exact + 1e-9)
    return min(size, max(1, rounded))


def prefix(layout: ParamLayout, width: float, rounding: Rounding = "ceil") -> SubmodelSpec:
    """Return the first channels of every group (HeteroFL; FedRolex Eq. 3.6)."""
    if width >= 1:
        return FULL
    check_cuttable(hidden(layout))
    return SubmodelSpec.of({group: kept(size, width, rounding) for group, size in hidden(layout).items()})


Size = Literal["small", "medium", "large"]
SIZES: tuple[Size, ...] = ("small", "medium", "large")
"""The names of the sub-networks of every network with nested ones."""


def nested(
    family: ModelFamily, widths: Sequence[float], names: Sequence[str], only: str | None = None
) -> dict[str, SubmodelSpec]:
    """Return the network's nested sub-networks by name (`contracts.Nested`), smallest first, or prefixes of `widths`,
    ascending to 1, under `names`. With `only`, just this one. Raises PoolError."""
    if isinstance(family, Nested):
        return dict(family.nested())
    if len(set(names)) != len(widths) or list(widths) != sorted(set(widths)) or widths[-1] != 1:
        raise PoolError(
            "algorithm.widths: different ratios in ascending order to 1, and in algorithm.names as many different "
            f"names, are expected; got {list(widths)} and {list(names)}"
        )
    pairs = zip(names, widths, strict=True)
    return {name: prefix(family.layout(), width) for name, width in pairs if only in (None, name)}


def window_start(layout: ParamLayout, width: float, round: int, overlap: float = 1.0) -> dict[str, int]:
    """Return j-hat of each group in this round (FedRolex Eq. 3.4): the window advances by `1 + floor(width * (1 -
    overlap) * K_i)` channels per round (Sec. 3.3.7), by one with an overlap of 1."""
    return {
        group: round * (1 + math.floor(width * (1 - overlap) * size + 1e-9)) % size
        for group, size in hidden(layout).items()
    }


def rolling(layout: ParamLayout, width: float, first: Mapping[str, int]) -> SubmodelSpec:
    """Return FedRolex Eq. 3.4: floor(width * K_i) channels from index `first` on, around the end of the layer, in
    ascending order."""
    if width >= 1:
        return FULL
    return SubmodelSpec.of(
        {
            group: sorted((first[group] + i) % size for i in range(kept(size, width, "floor")))
            for group, size in hidden(layout).items()
        }
    )


def random_drop(
    layout: ParamLayout, width: float, rng: np.random.Generator, inside: SubmodelSpec = FULL
) -> SubmodelSpec:
    """Return Federated Dropout (FedRolex Eq. 3.5): floor(width * K_i) random channels of each layer, of those in
    `inside`. Layers draw independently; those that a shortcut adds share their channels."""
    if width >= 1:
        return inside
    groups = hidden(layout)
    sizes = {name: groups[group] for name, group in layout.choices.items() if group in groups}
    keep = {}
    for name, size in {**groups, **sizes}.items():
        held = layout.indices(inside, name)
        keep[name] = sorted(int(i) for i in rng.choice(held, kept(size, width, "floor"), replace=False))
    return SubmodelSpec.of(keep)


def from_layer(family: ModelFamily, width: float, start: int) -> SubmodelSpec:
    """AdaptiveFL Sec. 3.2: the first `start` prunable layers keep full width, deeper ones int(width * n) channels."""
    groups = family.layout().groups
    if width < 1:
        check_cuttable([p.group for p in family.prunable()])
    deeper = [p.group for p in family.prunable()[start:]]
    return SubmodelSpec.of({group: max(1, int(width * groups[group])) for group in deeper} if width < 1 else {})


# ------------------------------------------------------------------------------------------------ early exits
def exit_name(block: str) -> str:
    """Return the name of the early exit behind `block`, as a block and as a module."""
    return "exit_" + block.replace(".", "_")


def up_to(family: ModelFamily, exit: str | None) -> tuple[str, ...]:
    """Return the blocks up to the head of the exit behind block `exit`, in network order, with earlier heads; None: all
    blocks. Raises ModelError for an unknown exit."""
    blocks = family.layout().blocks
    if exit is None:
        return blocks
    exits: tuple[str, ...] = getattr(family, "exits", ())
    if exit not in exits:
        raise ModelError(f"{type(family).__name__} has no exit behind {exit!r} (exits={exits!r})")
    return blocks[: blocks.index(exit_name(exit)) + 1]


def with_exits(
    family: ModelFamily, points: Sequence[str], convs: tuple[tuple[str, int], ...] | None = None
) -> ModelFamily:
    """Return the network with early exits after these blocks (repetitions count once). `convs` pairs blocks with the
    number of convolutions in their heads, instead of the network's own."""
    options: Any = family
    heads = {} if convs is None else {"exit_convs": convs}
    return replace(options, exits=tuple(dict.fromkeys(points)), **heads)  # type: ignore[no-any-return]


def exit_points(family: ModelFamily) -> tuple[str, ...]:
    """Return the blocks after which an exit may be placed. Raises ModelError if there are none."""
    points: tuple[str, ...] | None = family.exit_points() if hasattr(family, "exit_points") else None
    if not points:
        raise ModelError(f"{type(family).__name__} offers no early exits: this algorithm cannot train it")
    return points


def early_exit(family: ModelFamily, width: float, point: str | None) -> SubmodelSpec:
    """Return all blocks up to and including the exit after `point` (None: to the end), at one width."""
    blocks = None if point is None else up_to(family, point)
    return SubmodelSpec.of(dict(prefix(family.layout(), width).kept), blocks)


def branch(family: ModelFamily, point: str | None) -> SubmodelSpec:
    """Return all blocks up to `point` and the head of its exit, without the earlier heads, at full width; None: the
    whole network without its exits' heads."""
    heads = {exit_name(p) for p in exit_points(family)}
    trunk = [block for block in up_to(family, point) if block not in heads]
    return SubmodelSpec.of({}, trunk if point is None else [*trunk, exit_name(point)])


def choose_exits(family: ModelFamily, widths: Sequence[float], targets: Sequence[float]) -> tuple[str, ...]:
    """Return the exit of each level but the last: the deepest one at which the level has at most `target` % (plus 5
    points) of the whole and ends before the next level's exit. Counts one exit head per level. Raises PoolError if
    there is none."""
    if len(widths) != len(targets) or not widths or list(targets) != sorted(targets):
        raise PoolError(
            "a width and a target for each level are expected, targets in ascending order: got widths "
            f"{list(widths)} and targets {list(targets)}"
        )
    points = exit_points(family)
    every = with_exits(family, points)
    heads = {exit_name(p) for p in points}
    whole = count_params(with_exits(family, ()))

    def size(width: float, point: str) -> int:
        trunk = [b for b in up_to(every, point) if b not in heads]
        kept = dict(prefix(every.layout(), width).kept)
        return count_params(every, SubmodelSpec.of(kept, [*trunk, exit_name(point)]))

    chosen: list[int] = []
    deepest = len(points) - 1
    for width, target in list(zip(widths, targets, strict=True))[-2::-1]:
        fits = [i for i in range(deepest + 1) if size(width, points[i]) <= (target + EXIT_TOLERANCE) / 100 * whole]
        if not fits:
            raise PoolError(
                f"{type(family).__name__} has no early exit at which a level of width {width} stays within {target} % "
                "of the whole network: give smaller widths or larger targets"
            )
        chosen.insert(0, fits[-1])
        deepest = fits[-1] - 1
    return tuple(points[i] for i in chosen)
