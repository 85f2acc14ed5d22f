"""Functions for algorithms that train a network's small, medium and large sub-networks, as FedX does.

A network that was published with nested sub-networks has these three (`contracts.Nested`); of any other they are the
first channels of every layer, a share of them for each size.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, TypeVar

from pydantic import Field

from fl_engine.aggregation import privacy
from fl_engine.aggregation.rules import Aggregation
from fl_engine.algorithms.fine_tuning import FineTuning, fine_tuned
from fl_engine.algorithms.pooled import PooledState
from fl_engine.core import pool as pools
from fl_engine.core import seeds
from fl_engine.core.contracts import ModelFamily, ServerContext
from fl_engine.core.errors import ModelError
from fl_engine.core.fields import Fraction
from fl_engine.core.types import Codecs, Pool, PoolModel, RoundPlan
from fl_engine.core.widths import SIZES, Size, nested

log = logging.getLogger("flexfleet")

Widths = tuple[Fraction, Fraction, Fraction]
WIDTHS: Widths = (0.5, 0.75, 1.0)
Bits = Annotated[int, Field(ge=1, le=16)]

S = TypeVar("S", bound=PooledState)


def member(family: ModelFamily, size: Size, widths: Sequence[float], codecs: Codecs, static_bn: bool) -> PoolModel:
    """A size as a pool model that is sent and reported. Raises PoolError for widths that do not ascend to 1."""
    spec = nested(family, widths, SIZES, only=size)[size]
    return pools.member(family, size, spec, dispatched=True, reported=True, static_bn=static_bn, codecs=codecs)


def sizes(family: ModelFamily, widths: Sequence[float], codecs: Codecs, static_bn: bool) -> Pool:
    """All three, each a part of the next. Raises PoolError."""
    return pools.check_nested(family, tuple(member(family, size, widths, codecs, static_bn) for size in SIZES))


def check_tuning(tuning: FineTuning | None, server: ServerContext) -> None:
    """Raises ConfigError where the server is to fine-tune and holds no data."""
    if tuning is not None:
        _ = server.data


def tuned(
    tuning: FineTuning | None, aggregation: Aggregation, before: S, merged: S, plan: RoundPlan, server: ServerContext
) -> S:
    """The state after the server's training on its own data; as merged without `tuning`, in a round in which nobody
    trained, and where this training diverges: no update may end the run."""
    if tuning is None or merged.params is before.params:
        return merged
    seed = seeds.derive(privacy.server_seed(aggregation, plan), "fine-tuning", plan.round)
    try:
        return replace(merged, params=fine_tuned(tuning, server, merged.params, before.params, seed))
    except ModelError as error:
        log.warning("round %d: not fine-tuned: %s", plan.round + 1, error)
        return merged
