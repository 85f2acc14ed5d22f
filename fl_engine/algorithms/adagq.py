"""AdaGQ: Communication-Efficient Federated Learning for Heterogeneous Edge Devices Based on Adaptive Gradient
Quantization (Liu, He, Cao; arXiv 2212.08272): bits that follow the gradient's norm, and the clients' speed.

Only its abstract was at hand. It says that AdaGQ "exploits the change of gradient norm to adjust the quantization
resolution in each training round", and "assigns lower quantization resolution to slow clients to align their training
time with other clients", "and higher quantization resolution to fast clients". Both rules below are ours:

- **In time**: QSGD's step is the norm over the number of levels, so levels in proportion to the norm keep the step what
  it was in the first round. The mean bits of a round's clients are

      bits + log2(|D_t| / |D_1|), at least `least` and at most `most`,

  where |D_1| is how far the first merge moved the global model, and |D_t| the last one (L2, before fine-tuning).
- **Between clients**: the round has (its mean bits) x (its clients) bits a number to give away. All get `least`; the
  rest goes out bit by bit, each to the client that would be done first with it, by the simulated clock's rule: three
  times the forward pass's multiply-adds, times the samples it trains on, over its speed; plus the bytes of its model
  down and of its quantised change up, over its bandwidth. Of equals
  the lower number is first; `most` is the most that one gets.

Weights go down as they are; changes come back by QSGD. As FedX's rival each device trains the largest of three nested
sub-networks that it can hold. For FedX's comparison (Section IV-D), where "the server has data, fine-tunes without
regularization", set `fine_tuning: {gamma: 0}`. The run's `codec` is not used.

A private aggregation hides how many samples a client holds. With it the clock counts one sample for every client, so
that no client's samples decide about another's bits. Who else is drawn still does: `secret_selection` is refused.

What a client can gain by lying: the norm is of the merged change, so `rounds.norm_bound` limits how far one client
raises it (a first norm five times too large costs log2(5) < 3 bits for good). One that cancels the others' updates in
the first round makes that norm small, and the bits of all later rounds large; they stay within `least` and
`most`. Speed and bandwidth are the fleet's, not what a client says.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from fl_engine.aggregation.privacy import check_draw, is_private
from fl_engine.algorithms.fine_tuning import FineTuning, check_tuning, tuned
from fl_engine.algorithms.levels import WIDTHS, Bits, Widths, nested_pool
from fl_engine.algorithms.pooled import PooledAlgorithm, PooledState, StaticBN
from fl_engine.codecs.qsgd import Qsgd
from fl_engine.core.contracts import ModelFamily, ServerContext
from fl_engine.core.costs import FORWARDS_PER_STEP
from fl_engine.core.errors import ConfigError
from fl_engine.core.fields import Count
from fl_engine.core.slicing import is_statistic
from fl_engine.core.types import (
    Codecs,
    Device,
    LocalTask,
    Outcome,
    ParamLayout,
    Params,
    Pool,
    PoolModel,
    Prepared,
    RoundContext,
    RoundPlan,
    TaskContext,
    WorkOrder,
)


@dataclass(frozen=True, kw_only=True)
class AdaGQState(PooledState):
    """`first`, `last`: L2 norm of the first and of the latest nonzero change by a merge; 0: none yet."""

    first: float = 0.0
    last: float = 0.0


@dataclass(frozen=True)
class AdaGQ(PooledAlgorithm):
    widths: Widths = WIDTHS
    """Width ratios of small, medium and large, ascending to 1, of a network that has no nested sub-networks of its
    own."""
    bits: Bits = 8
    """Mean bits of QSGD over the clients in the first two rounds; later rounds follow the norm of the change."""
    least: Bits = 4
    """The fewest bits of a client, and the lowest mean."""
    most: Bits = 12
    """The most bits of a client, and the highest mean."""
    bucket: Count | None = 512
    """Elements that share a norm in QSGD; null: one norm per tensor."""
    fine_tuning: FineTuning | None = None
    """The server's training after each merge, on its own data; null: none. FedX's comparison: {gamma: 0}."""
    static_bn: StaticBN = "kept"

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        return nested_pool(self, family, self.widths, Codecs(up=self._codec(self.most)))

    def _codec(self, bits: int) -> Qsgd:
        return Qsgd(bits=bits, bucket=self.bucket)

    def init(
        self, params: Params, layout: ParamLayout, fleet: Sequence[Device], pool: Pool, server: ServerContext
    ) -> AdaGQState:
        """Raises ConfigError for secret selection, for bits that do not lie between the least and the most, and for
        fine-tuning without data."""
        check_tuning(self.fine_tuning, server)
        check_draw(self.aggregation, "adagq shares a round's bits among the clients that are drawn")
        if not self.least <= self.bits <= self.most:
            raise ConfigError(
                f"algorithm.least <= algorithm.bits <= algorithm.most is expected, got {self.least}, {self.bits} and "
                f"{self.most}"
            )
        return AdaGQState(**vars(super().init(params, layout, fleet, pool, server)))

    def plan(self, state: AdaGQState, context: RoundContext) -> RoundPlan:
        plan = super().plan(state, context)
        devices = {device.client: device for device in context.available}
        alike = is_private(self) or not context.draws
        draws = (1,) * len(context.fleet) if alike else context.draws
        clocks = [clock(state.pool[o.level], devices[o.client], draws[o.client]) for o in plan.orders]
        mean = mean_bits(self.bits, state.first, state.last, self.least, self.most)
        given = shared(clocks, round(mean * len(clocks)), self.least, self.most)
        pairs = zip(plan.orders, given, strict=True)
        orders = tuple(replace(order, codecs=Codecs(up=self._codec(bits))) for order, bits in pairs)
        return replace(plan, orders=orders)

    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        return self.whole(order, ctx)

    def merge(
        self, state: AdaGQState, plan: RoundPlan, answers: Iterable[Outcome], server: ServerContext
    ) -> AdaGQState:
        merged: AdaGQState = super().merge(state, plan, answers, server)
        norm = distance(state.params, merged.params)
        if norm > 0:
            merged = replace(merged, first=state.first or norm, last=norm)
        return tuned(self.fine_tuning, self.aggregation, state, merged, plan, server)


# ------------------------------------------------------------------------------------------------------ in time
def distance(before: Params, after: Params) -> float:
    """How far the weights moved: L2, running statistics and integers left out."""
    return math.hypot(
        *(
            float(torch.dist(after[name].double(), tensor.double()))
            for name, tensor in before.items()
            if tensor.is_floating_point() and not is_statistic(name)
        )
    )


def mean_bits(bits: int, first: float, last: float, least: int, most: int) -> float:
    """The mean bits of a round's clients. `first`, `last`: norms of the first merge and of the last one; 0: not known
    yet."""
    change = math.log2(last / first) if first and last else 0.0
    return min(max(float(least), bits + change), float(most))


# --------------------------------------------------------------------------------------------- between clients
def clock(model: PoolModel, device: Device, draws: int) -> tuple[float, float]:
    """(seconds of a device's round without its upload, seconds of the upload for each bit that a number takes)."""
    compute = FORWARDS_PER_STEP * model.macs * draws / device.speed
    return compute + model.bytes / device.bandwidth, model.params / 8 / device.bandwidth


def shared(clocks: Sequence[tuple[float, float]], total: int, least: int, most: int) -> list[int]:
    """The bits of each client: `least`, and of what is left of `total` each next bit to the client that would be done
    first with it. A number takes a bit more, for its sign."""
    bits = [least] * len(clocks)

    def done(client: int) -> tuple[float, int]:
        rest, each = clocks[client]
        return rest + (1 + bits[client] + 1) * each, client

    waiting = [done(client) for client in range(len(clocks)) if least < most]
    heapq.heapify(waiting)
    for _ in range(total - least * len(clocks)):
        if not waiting:
            break
        _, client = heapq.heappop(waiting)
        bits[client] += 1
        if bits[client] < most:
            heapq.heappush(waiting, done(client))
    return bits
