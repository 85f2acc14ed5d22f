"""Build pools that several algorithms use (prefixes, nested sub-networks), and define the base classes of methods with
early exits and of methods whose sub-models change from round to round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from fl_engine.algorithms.pooled import PooledAlgorithm, StaticBN, Weighting
from fl_engine.core import pool as pools
from fl_engine.core import widths as rules
from fl_engine.core.contracts import ModelFamily, ServerContext
from fl_engine.core.errors import PoolError
from fl_engine.core.fields import Fraction, Positive
from fl_engine.core.types import FULL, Assignment, Codecs, LocalTask, Pool, Prepared, SubmodelSpec, TaskContext
from fl_engine.core.widths import SIZES, Rounding, Size

Widths = tuple[Fraction, Fraction, Fraction]
WIDTHS: Widths = (0.5, 0.75, 1.0)
Bits = Annotated[int, Field(ge=1, le=16)]


def prefix_pool(
    algorithm: PooledAlgorithm,
    family: ModelFamily,
    widths: Sequence[float],
    rounding: Rounding = "ceil",
    full_only: bool = False,
) -> Pool:
    """Return one model for each width ratio, with the first channels of every layer and a name such as `0.5x`.

    With `full_only`, only the full model is evaluated. The last ratio may then be below 1, in which case clients do not
    receive the full model. Raises PoolError if the widths do not ascend to 1 or if two models have the same size.
    """
    if not widths or list(widths) != sorted(set(widths)) or (widths[-1] != 1 and not full_only):
        raise PoolError.at(
            f"algorithm.widths must be in ascending order{'' if full_only else ' and end with 1'}, got {list(widths)}"
        )
    layout = family.layout()
    if widths[0] < 1:
        rules.check_cuttable(rules.hidden(layout), family)
    models = [
        algorithm.member(family, f"{w:g}x", rules.prefix(layout, w, rounding), reported=w == 1 or not full_only)
        for w in widths
    ]
    if widths[-1] < 1:
        models.append(algorithm.member(family, "1x", FULL, sent=False))
    return pools.ascending(tuple(models))


@dataclass(frozen=True)
class ExitLevels(PooledAlgorithm):
    """Base class of methods whose levels end with early exits and are named `level1`, `level2` and so on."""

    ensemble: ClassVar[bool] = False
    """True if the prediction of a level is the mean of its exits' logits."""

    targets: tuple[Positive, ...] = (25.0, 50.0, 100.0)
    """Target size of each level in % of the full network. The target limits the depth of the level."""
    exits: tuple[str, ...] | None = None
    """Last block of each level except the largest level; null: chosen according to `targets`."""

    def ratios(self) -> tuple[float, ...]:
        """Return the width ratio of each level."""
        return (1.0,) * len(self.targets)

    def ends(self, family: ModelFamily) -> tuple[str, ...]:
        return rules.choose_exits(family, self.ratios(), self.targets) if self.exits is None else self.exits

    def network(self, family: ModelFamily) -> ModelFamily:
        return rules.with_exits(family, self.ends(family))

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        ends, widths = self.ends(family), self.ratios()
        if len(ends) != len(widths) - 1 or widths[-1] != 1 or list(widths) != sorted(widths):
            raise PoolError.at(
                "algorithm.widths must be in ascending order and end with 1, with one exit for each width except the "
                f"last, got the widths {list(widths)} and the exits {list(ends)}"
            )
        specs = [rules.early_exit(family, w, end) for w, end in zip(widths, (*ends, None), strict=True)]
        models = [self.member(family, f"level{i}", s, ensemble=self.ensemble) for i, s in enumerate(specs, 1)]
        return pools.ascending(tuple(models))


def nested_pool(
    algorithm: PooledAlgorithm,
    family: ModelFamily,
    widths: Sequence[float],
    codecs: Codecs,
    sizes: Sequence[Size] = SIZES,
) -> Pool:
    """Return the sub-networks `sizes` that the network defines (`contracts.Nested`), or prefixes of every layer if the
    network does not define sub-networks. Raises PoolError if `widths` do not ascend to 1, or unless each sub-network
    contains the previous one."""
    specs = {size: rules.nested(family, widths, SIZES, only=size)[size] for size in sizes}
    models = (algorithm.member(family, size, spec, codecs=codecs) for size, spec in specs.items())
    return pools.check_nested(family, tuple(models))


@dataclass(frozen=True)
class MovingWidths(PooledAlgorithm):
    """Base class of methods with a width ratio for each client. `submodel` chooses new channels in every round. Only
    the full model is evaluated."""

    moving: ClassVar[bool] = True

    widths: tuple[Fraction, ...] = (0.5, 0.71, 1.0)
    """Capacities beta of the clients, in ascending order. The last capacity may be below 1."""
    weighting: Weighting = "uniform"
    static_bn: StaticBN = True
    scaler: bool = True

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        """Return one model for each capacity, and the full model."""
        return prefix_pool(self, family, self.widths, "floor", full_only=True)

    def part(self, assignment: Assignment, ctx: TaskContext, width: float) -> SubmodelSpec:
        """Return a part of the received sub-model with the ratio `width`, for a device with too little memory."""
        raise NotImplementedError

    def task(self, assignment: Assignment, ctx: TaskContext) -> LocalTask:
        level = self.largest_fitting(ctx, range(assignment.level + 1))
        width = (*self.widths, 1.0)[level]
        spec = self.part(assignment, ctx, width) if level < assignment.level else assignment.spec
        return self.local_task(assignment, spec, width)
