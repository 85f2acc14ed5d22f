"""Pools that several algorithms use: prefixes of all layers, early exits, and small, medium and large sub-networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from fl_engine.algorithms.pooled import PooledAlgorithm
from fl_engine.core import pool as pools
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import PoolError
from fl_engine.core.fields import Fraction
from fl_engine.core.types import FULL, Codecs, Pool, PoolModel
from fl_engine.core.widths import SIZES, Rounding, Size, early_exit, nested, prefix

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
    """Return a model per width ratio, of the first channels of every layer, named `0.5x` and so on.

    Args:
        algorithm: Whose options decide about static batch norm.
        family: The network.
        widths: Ascending ratios, of which the last is 1.
        rounding: Of ratio * channels.
        full_only: Only the full model is reported. The last ratio may then be below 1: the full model is not sent.

    Raises:
        PoolError: The widths do not ascend to 1, or two models have one size.
    """
    if not widths or list(widths) != sorted(set(widths)) or (widths[-1] != 1 and not full_only):
        end = "" if full_only else ", the last one 1"
        raise PoolError(f"algorithm.widths must be different ratios in ascending order{end}, got {list(widths)}")
    layout = family.layout()
    models = [
        algorithm.member(family, f"{width:g}x", prefix(layout, width, rounding), reported=width == 1 or not full_only)
        for width in widths
    ]
    if widths[-1] < 1:
        models.append(algorithm.member(family, "1x", FULL, sent=False))
    return pools.ascending(tuple(models))


def exit_pool(
    algorithm: PooledAlgorithm, family: ModelFamily, widths: Sequence[float], ends: Sequence[str], **more: Any
) -> Pool:
    """Return a model per level, named `level1` and so on: all blocks up to its exit, at its width.

    Args:
        algorithm: Whose options decide about static batch norm.
        family: The network with its exits.
        widths: Width ratio of each level; the last one is 1.
        ends: The block behind which each level but the last exits.
        more: Other fields of `PoolModel`.

    Raises:
        PoolError: The widths descend or do not end in 1, or there is not one exit for each level but the last.
    """
    if len(ends) != len(widths) - 1 or widths[-1] != 1:
        raise PoolError(
            "one early exit is expected for each level but the last, whose width is 1, got algorithm.widths "
            f"{list(widths)} and exits {list(ends)}"
        )
    if list(widths) != sorted(widths):
        raise PoolError(f"algorithm.widths must not descend, got {list(widths)}")
    specs = [early_exit(family, w, end) for w, end in zip(widths, (*ends, None), strict=True)]
    models = [algorithm.member(family, f"level{i}", spec, **more) for i, spec in enumerate(specs, 1)]
    return pools.ascending(tuple(models))


def nested_member(
    algorithm: PooledAlgorithm, family: ModelFamily, size: Size, widths: Sequence[float], codecs: Codecs
) -> PoolModel:
    """Return the small, medium or large sub-network: the network's own (`contracts.Nested`), else the first channels of
    every layer. Raises PoolError if `widths` do not ascend to 1."""
    spec = nested(family, widths, SIZES, only=size)[size]
    return algorithm.member(family, size, spec, codecs=codecs)


def nested_pool(algorithm: PooledAlgorithm, family: ModelFamily, widths: Sequence[float], codecs: Codecs) -> Pool:
    """Return all three, each a part of the next. Raises PoolError."""
    models = tuple(nested_member(algorithm, family, size, widths, codecs) for size in SIZES)
    return pools.check_nested(family, models)
