"""Width rules, which choose the channels of a sub-model (`SubmodelSpec`). The network's outputs are never cut.

The rules round widths differently. AdaptiveFL truncates, the code of HeteroFL and FjORD rounds up, and the paper of
FedRolex rounds down.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from fl_engine.core.contracts import ModelFamily, Nested
from fl_engine.core.costs import count_params
from fl_engine.core.errors import ModelError, PoolError
from fl_engine.core.types import FULL, HEAD, ParamLayout, SubmodelSpec

Rounding = Literal["ceil", "floor"]

EXIT_TOLERANCE = 5.0
"""Percentage points by which a level's size may exceed its target, as in the code of FlexFL and AdaptiveFL."""


def hidden(layout: ParamLayout) -> dict[str, int]:
    """Map the channel groups that a rule may cut to their sizes."""
    return {group: size for group, size in layout.groups.items() if group != HEAD}


def check_cuttable(groups: Collection[str], family: ModelFamily | None = None) -> None:
    """Raise PoolError if `groups` is empty. The message lists the operations that prevent slicing."""
    if not groups:
        kept = ", ".join(getattr(family, "kept", ()))
        raise PoolError(
            f"the network must have channels that can be cut{kept and f', but all are kept by {kept}'}. Use the "
            "algorithm all_large or fedprox, or choose another network"
        )


def count_kept(size: int, width: float, rounding: Rounding) -> int:
    """Return how many of `size` channels a width keeps, at least 1. Tolerates float errors, so 0.29 keeps 29 of 100."""
    exact = width * size
    rounded = math.ceil(exact - 1e-9) if rounding == "ceil" else math.floor(exact + 1e-9)
    return min(size, max(1, rounded))


def prefix(layout: ParamLayout, width: float, rounding: Rounding = "ceil") -> SubmodelSpec:
    """Return the sub-model with the first channels of every group (HeteroFL; FedRolex Eq. 3.6)."""
    if width >= 1:
        return FULL
    check_cuttable(hidden(layout))
    return SubmodelSpec.of({group: count_kept(size, width, rounding) for group, size in hidden(layout).items()})


Size = Literal["small", "medium", "large"]
SIZES: tuple[Size, ...] = ("small", "medium", "large")
"""Names of sub-networks that every network with nested sub-networks defines."""


def nested(
    family: ModelFamily, widths: Sequence[float], names: Sequence[str], only: str | None = None
) -> dict[str, SubmodelSpec]:
    """Map names to nested sub-networks (`contracts.Nested`), smallest first. If the network does not define
    sub-networks, map `names` to prefixes with the width ratios `widths` (ascending to 1). `only` selects one name.
    Raises PoolError if `widths` or `names` are invalid."""
    if isinstance(family, Nested):
        return dict(family.nested())
    if len(set(names)) != len(widths) or list(widths) != sorted(set(widths)) or widths[-1] != 1:
        raise PoolError.at(
            "algorithm.widths must be in ascending order and end with 1, with a distinct name for each width, got the "
            f"widths {list(widths)} and the names {list(names)}"
        )
    layout, pairs = family.layout(), zip(names, widths, strict=True)
    chosen = {name: width for name, width in pairs if only in (None, name)}
    if min(chosen.values(), default=1) < 1:
        check_cuttable(hidden(layout), family)
    return {name: prefix(layout, width) for name, width in chosen.items()}


def window_start(layout: ParamLayout, width: float, round: int, overlap: float = 1.0) -> dict[str, int]:
    """Return the first channel of each group's window in this round (j-hat in Eq. 3.4 of FedRolex).

    The window advances by `1 + floor(width * (1 - overlap) * K_i)` channels per round (Sec. 3.3.7).
    """
    return {
        group: round * (1 + math.floor(width * (1 - overlap) * size + 1e-9)) % size
        for group, size in hidden(layout).items()
    }


def rolling(layout: ParamLayout, width: float, first: Mapping[str, int]) -> SubmodelSpec:
    """Return FedRolex's sub-model (Eq. 3.4). Each group keeps floor(width * K_i) consecutive channels from index
    `first` on. The window wraps around at the end."""
    if width >= 1:
        return FULL
    groups = hidden(layout).items()
    return SubmodelSpec.of(
        {g: sorted((first[g] + i) % n for i in range(count_kept(n, width, "floor"))) for g, n in groups}
    )


def random_drop(
    layout: ParamLayout, width: float, rng: np.random.Generator, inside: SubmodelSpec = FULL
) -> SubmodelSpec:
    """Return the sub-model of Federated Dropout (FedRolex Eq. 3.5). Each layer keeps floor(width * K_i) random channels
    of `inside`. Layers whose outputs a shortcut adds keep the same channels; other layers draw independently."""
    if width >= 1:
        return inside
    groups = hidden(layout)
    sizes = {name: groups[group] for name, group in layout.choices.items() if group in groups}
    keep = {}
    for name, size in {**groups, **sizes}.items():
        held = layout.indices(inside, name)
        keep[name] = sorted(int(i) for i in rng.choice(held, count_kept(size, width, "floor"), replace=False))
    return SubmodelSpec.of(keep)


def from_layer(family: ModelFamily, width: float, start: int) -> SubmodelSpec:
    """Return AdaptiveFL's sub-model (Sec. 3.2). The first `start` prunable layers keep all channels. All further
    prunable layers keep int(width * n) of their n channels."""
    groups = family.layout().groups
    if width < 1:
        check_cuttable([p.group for p in family.prunable()], family)
    deeper = [p.group for p in family.prunable()[start:]]
    return SubmodelSpec.of({group: max(1, int(width * groups[group])) for group in deeper} if width < 1 else {})


def exit_name(block: str) -> str:
    """Return the name of the early exit after `block`, which is also the name of the exit's block and module."""
    return "exit_" + block.replace(".", "_")


def up_to(family: ModelFamily, exit: str | None) -> tuple[str, ...]:
    """Return all blocks, including heads, up to the head of the exit after block `exit`, in network order. If `exit` is
    None, return all blocks. Raises ModelError if the exit is unknown."""
    blocks = family.layout().blocks
    if exit is None:
        return blocks
    exits: tuple[str, ...] = getattr(family, "exits", ())
    if exit not in exits:
        raise ModelError(f"{type(family).__name__} does not have an exit after {exit!r}. Choose from {exits!r}")
    return blocks[: blocks.index(exit_name(exit)) + 1]


def with_exits(
    family: ModelFamily, points: Sequence[str], convs: tuple[tuple[str, int], ...] | None = None
) -> ModelFamily:
    """Return the network with early exits after the blocks `points`, ignoring duplicates. `convs` contains pairs
    (block, number of convolutions in the block's head); None uses the numbers of `family`."""
    options: Any = family
    heads = {} if convs is None else {"exit_convs": convs}
    return replace(options, exits=tuple(dict.fromkeys(points)), **heads)  # type: ignore[no-any-return]


def exit_points(family: ModelFamily) -> tuple[str, ...]:
    """Return the blocks after which an exit may be placed. Raises ModelError if the network does not support exits."""
    points: tuple[str, ...] | None = family.exit_points() if hasattr(family, "exit_points") else None
    if not points:
        raise ModelError(f"{type(family).__name__} does not support early exits. Choose another network or algorithm")
    return points


def early_exit(family: ModelFamily, width: float, point: str | None) -> SubmodelSpec:
    """Return the sub-model with this width and all blocks up to the exit after `point`; None keeps all blocks."""
    return SubmodelSpec.of(prefix(family.layout(), width).kept, None if point is None else up_to(family, point))


def branch(family: ModelFamily, point: str | None) -> SubmodelSpec:
    """Return the full-width sub-model with all blocks up to `point` and the head of the exit after `point`, but without
    earlier heads. If `point` is None, return the whole network without exit heads."""
    heads = {exit_name(p) for p in exit_points(family)}
    trunk = [block for block in up_to(family, point) if block not in heads]
    return SubmodelSpec.of({}, trunk if point is None else [*trunk, exit_name(point)])


def choose_exits(family: ModelFamily, widths: Sequence[float], targets: Sequence[float]) -> tuple[str, ...]:
    """Return the exit of each level except the last. The chosen exit is the deepest exit that meets two conditions: it
    precedes the next level's exit, and the level has at most `target` + 5 % of the network's parameters. These
    parameters include one exit head. Raises PoolError if a level does not have such an exit."""
    if len(widths) != len(targets) or not widths or list(targets) != sorted(targets):
        raise PoolError(
            "widths and targets must have the same length, and targets must be in ascending order, got the widths "
            f"{list(widths)} and the targets {list(targets)}"
        )
    points = exit_points(family)
    every = with_exits(family, points)
    whole = count_params(with_exits(family, ()))

    def size(width: float, point: str) -> int:
        return count_params(every, SubmodelSpec.of(prefix(every.layout(), width).kept, branch(every, point).blocks))

    chosen: list[int] = []
    deepest = len(points) - 1
    for width, target in list(zip(widths, targets, strict=True))[-2::-1]:
        fits = [i for i in range(deepest + 1) if size(width, points[i]) <= (target + EXIT_TOLERANCE) / 100 * whole]
        if not fits:
            raise PoolError(
                f"{type(family).__name__} does not have an early exit with at most {target} % of the parameters at "
                f"width {width}. Choose smaller widths or larger targets"
            )
        chosen.insert(0, fits[-1])
        deepest = fits[-1] - 1
    return tuple(points[i] for i in chosen)
