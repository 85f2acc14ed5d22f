"""DAdaQuant: Doubly-adaptive quantization for communication-efficient Federated Learning (Hoenig, Zhao, Mullins, ICML
2022; arXiv:2111.00465). The number of quantisation levels grows when the loss stops decreasing. Clients with a larger
weight get more levels.

The number of levels q starts at `q_min`. The server computes a moving average of the clients' loss:

    L_t = psi L_{t-1} + (1 - psi) (mean loss of the round's clients).

If L_t is at least L_{t - phi}, q doubles, up to `q_max`. After doubling, q stays constant for at least phi rounds. Each
client k gets a separate number of levels q_k. The variance of the mean must be the same as if every client used q
levels. Under this condition, the sum of all q_k is smallest for:

    q_k = sqrt(a / b) w_k^(2/3),  a = sum_j w_j^(2/3),  b = sum_j w_j^2 / q^2       over the clients of the round

where w_j is the weight of client j in the mean. With any aggregation other than `mean`, all clients have the same
weight, so q_k = q. The server sends unquantised weights. Clients quantise the returned changes with QSGD and q_k levels
per sign. The levels are encoded as run lengths of zeros and Elias omega codes, or with a fixed width. A client sends
the shorter encoding of each tensor. The run's `codec` is ignored. Each device trains the largest of three nested
sub-networks that fits into its memory. In FedX's comparison (Section IV-D), the server "has data, fine-tunes without
regularization" (`fine_tuning: {gamma: 0}`).

Departs from the paper, whose text was not available:

- q_k is rounded to the nearest integer (halves are rounded up), at least 1. If only some clients train a parameter,
  their weights in its mean differ from w_j, but q_k does not take this difference into account.
- The first L is the mean loss of the first round. The paper sets phi to a tenth of all rounds. Here phi is a fixed
  number of rounds (by default 4), so that extending a run does not change its earlier rounds.
- A client's loss is clipped to the range from 0 to twice the round's median. If fewer than half of the clients report
  false losses, the mean stays between 0 and twice the largest true loss. Clients that report false losses can still
  make q double too early, which increases the traffic, or prevent q from doubling, which lowers the accuracy.
- QSGD uses one norm for every 512 elements. `bucket: null` selects a single norm per tensor, as in the paper. With few
  levels, a single norm for n elements causes a relative mean squared error of about sqrt(n) / q.

A private aggregation does not add noise to the clients' losses, so it requires `phi: null`. With a private aggregation,
all clients use `q_min` levels in every round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated

from pydantic import Field

from fl_engine.aggregation.privacy import is_private
from fl_engine.aggregation.rules import Mean
from fl_engine.algorithms.fine_tuning import FineTuned
from fl_engine.algorithms.levels import WIDTHS, Widths, nested_pool
from fl_engine.algorithms.pooled import PooledState, weight_of, with_codecs
from fl_engine.codecs.qsgd import MOST_LEVELS, Qsgd
from fl_engine.core import costs
from fl_engine.core.contracts import ModelFamily, ServerContext
from fl_engine.core.errors import ConfigError
from fl_engine.core.fields import Count
from fl_engine.core.types import ClientUpdate, Codecs, Device, Pool, Prepared, Results, RoundContext, RoundPlan

Levels = Annotated[int, Field(ge=1, le=MOST_LEVELS)]


@dataclass(frozen=True, kw_only=True)
class DAdaQuantState(PooledState):
    """`level` is q, the number of levels per sign in the next round. `averages` contains the values of L since q last
    changed, but at most the latest phi + 1."""

    level: int
    averages: tuple[float, ...] = ()


@dataclass(frozen=True)
class DAdaQuant(FineTuned):
    widths: Widths = WIDTHS
    """Ascending width ratios that end with 1. Ignored if the network defines its own nested sub-networks."""
    q_min: Levels = 1
    """Number of quantisation levels per sign in the first round. 2^b - 1 levels need b bits and a sign bit."""
    q_max: Levels = 2047
    """Maximum of q, the round's levels per sign. A client with a large weight may use more than q."""
    psi: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Weight of the previous value in the moving average of the loss."""
    phi: Count | None = 4
    """Number of rounds over which the average loss must decrease; otherwise q doubles. null: q stays at `q_min`."""

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        return nested_pool(self, family, self.widths, Codecs(up=self._codec(self.q_max)))

    def _codec(self, levels: int) -> Qsgd:
        return Qsgd(levels=levels, bucket=self.bucket)

    def check(self, fleet: Sequence[Device], pool: Pool, server: ServerContext) -> None:
        super().check(fleet, pool, server)
        if self.phi is not None and is_private(self):
            raise ConfigError.at(
                "algorithm.phi must be null with a private aggregation, because the quantization levels would reveal "
                "the clients' losses"
            )
        if self.q_max < self.q_min:
            raise ConfigError.at(f"algorithm.q_max must be at least algorithm.q_min = {self.q_min}, got {self.q_max}")

    def first_state(self, common: PooledState) -> DAdaQuantState:
        return DAdaQuantState(**vars(common), level=self.q_min)

    def plan(self, state: DAdaQuantState, context: RoundContext) -> RoundPlan:
        self.check_samples(context)
        plan = super().plan(state, context)
        weights = [1.0] * len(plan.assignments)
        if isinstance(self.aggregation, Mean):
            for i, assignment in enumerate(plan.assignments):
                samples = context.samples[assignment.client]
                steps = costs.steps(self.training, samples)
                weights[i] = float(weight_of(self.weighting, state.layout, assignment.payload, samples, steps))
        return with_codecs(plan, (Codecs(up=self._codec(q)) for q in levels_of(weights, state.level)))

    def aggregated(
        self, state: DAdaQuantState, plan: RoundPlan, results: Results, server: ServerContext
    ) -> DAdaQuantState:
        merged: DAdaQuantState = super().aggregated(state, plan, results, server)
        losses = [result.metrics["loss"] for result in results if isinstance(result, ClientUpdate)]
        if self.phi is not None and losses:
            average = averaged(losses, state.averages, self.psi)
            level, averages = doubled(state.level, (*state.averages, average), self.phi, self.q_max)
            merged = replace(merged, level=level, averages=averages)
        return merged


def averaged(losses: Sequence[float], averages: Sequence[float], psi: float) -> float:
    """Return the next value of the moving average `averages`. Each loss is clipped to [0, twice the median]."""
    most = 2 * max(0.0, median(losses))
    mean = math.fsum(min(max(0.0, loss), most) for loss in losses) / len(losses)
    return psi * averages[-1] + (1 - psi) * mean if averages else mean


def doubled(level: int, averages: Sequence[float], phi: int, q_max: int) -> tuple[int, tuple[float, ...]]:
    """Double q = `level` if the loss stopped decreasing. Return q and the averages since q last changed."""
    recent = tuple(averages)[-(phi + 1) :]
    if len(recent) > phi and recent[-1] >= recent[0]:
        return min(2 * level, q_max), recent[-1:]
    return level, recent


def levels_of(weights: Sequence[float], level: int) -> list[int]:
    """Return q_k for each client, from 1 to MOST_LEVELS. With equal weights, every q_k is `level`."""
    total = sum(weights)
    w = [weight / total if total else 1 / len(weights) for weight in weights]
    a = math.fsum(share ** (2 / 3) for share in w)
    b = math.fsum((share / level) ** 2 for share in w)
    exact = (math.sqrt(a / b) * share ** (2 / 3) for share in w)
    return [min(max(1, math.floor(each + 0.5)), MOST_LEVELS) for each in exact]
