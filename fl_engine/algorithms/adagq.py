"""AdaGQ: Communication-Efficient Federated Learning for Heterogeneous Edge Devices Based on Adaptive Gradient
Quantization (Liu, He, Cao; arXiv:2212.08272). The bits per value depend on the gradient norm and the client's speed.

Only the paper's abstract was available, so the two rules below are flexfleet's interpretation. According to the
abstract, AdaGQ "exploits the change of gradient norm to adjust the quantization resolution in each training round".
AdaGQ also assigns "lower quantization resolution to slow clients to align their training time with other clients" and
"higher quantization resolution to fast clients".

- **Over time**: QSGD's step size is the norm divided by the number of levels. The number of levels grows in proportion
  to the norm, so that the step size stays constant. The mean number of bits per client in round t is

      bits + log2(|D_t| / |D_1|), at least `least` and at most `most`,

  where |D_1| is the L2 norm of the first change of the global model, and |D_t| is the norm of its latest change, both
  before fine-tuning.
- **Between clients**: every client gets `least` bits. The remaining bits of the round are assigned one by one. Each bit
  is assigned to the client that would finish the round first on the simulated clock if it got this bit. Ties are broken
  in favour of the lower client number. No client gets more than `most` bits.

The server sends unquantised weights. Clients quantise the returned changes with QSGD, and the run's `codec` is ignored.
Each device trains the largest of three nested sub-networks that fits into its memory. In FedX's comparison (Section
IV-D), the server "has data, fine-tunes without regularization" (`fine_tuning: {gamma: 0}`).

With a private aggregation, bits are assigned as if each client had one sample, because the sample counts are secret.
`secret_selection` is rejected, because a client's number of bits depends on the other selected clients.

`rounds.norm_bound` limits how much a malicious client can change the norm. If a malicious client cancels out the other
updates of the first round, |D_1| is too small, and all later rounds use more bits, up to `most`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fl_engine.aggregation.privacy import is_private
from fl_engine.algorithms.fine_tuning import FineTuned
from fl_engine.algorithms.levels import WIDTHS, Bits, Widths, nested_pool
from fl_engine.algorithms.pooled import PooledState, with_codecs
from fl_engine.codecs.qsgd import Qsgd
from fl_engine.core.contracts import ModelFamily, ServerContext
from fl_engine.core.costs import FORWARDS_PER_STEP
from fl_engine.core.errors import ConfigError
from fl_engine.core.slicing import is_statistic
from fl_engine.core.types import Codecs, Device, Params, Pool, PoolModel, Prepared, Results, RoundContext, RoundPlan


@dataclass(frozen=True, kw_only=True)
class AdaGQState(PooledState):
    """`first` and `last` are the first and the latest nonzero L2 norm of the global model's change in a round."""

    first: float = 0.0
    last: float = 0.0


@dataclass(frozen=True)
class AdaGQ(FineTuned):
    draw_matters: ClassVar[str] = "adagq shares a round's bits among the clients that are drawn"

    widths: Widths = WIDTHS
    """Ascending width ratios that end with 1. Ignored if the network defines its own nested sub-networks."""
    bits: Bits = 8
    """Mean QSGD bits per client in rounds 1 and 2. Later, the mean depends on the norm of the model's change."""
    least: Bits = 4
    """Minimum QSGD bits per client."""
    most: Bits = 12
    """Maximum QSGD bits per client."""

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        return nested_pool(self, family, self.widths, Codecs(up=self._codec(self.most)))

    def _codec(self, bits: int) -> Qsgd:
        return Qsgd(bits=bits, bucket=self.bucket)

    def check(self, fleet: Sequence[Device], pool: Pool, server: ServerContext) -> None:
        super().check(fleet, pool, server)
        if not self.least <= self.bits <= self.most:
            raise ConfigError.at(
                f"algorithm.bits must be between algorithm.least = {self.least} and algorithm.most = {self.most}, got "
                f"{self.bits}"
            )

    def first_state(self, common: PooledState) -> AdaGQState:
        return AdaGQState(**vars(common))

    def plan(self, state: AdaGQState, context: RoundContext) -> RoundPlan:
        plan = super().plan(state, context)
        devices = {device.client: device for device in context.available}
        alike = is_private(self) or not context.draws
        draws = (1,) * len(context.fleet) if alike else context.draws
        clocks = [clock(state.pool[a.level], devices[a.client], draws[a.client]) for a in plan.assignments]
        mean = mean_bits(self.bits, state.first, state.last, self.least, self.most)
        bits = share_bits(clocks, round(mean * len(clocks)), self.least, self.most)
        return with_codecs(plan, (Codecs(up=self._codec(each)) for each in bits))

    def aggregated(self, state: AdaGQState, plan: RoundPlan, results: Results, server: ServerContext) -> AdaGQState:
        merged: AdaGQState = super().aggregated(state, plan, results, server)
        norm = distance(state.params, merged.params)
        if norm > 0:
            merged = replace(merged, first=state.first or norm, last=norm)
        return merged


def distance(before: Params, after: Params) -> float:
    """Return the L2 norm of `after - before` over all weights. Running statistics and integer tensors are excluded."""
    return math.hypot(
        *(
            float(torch.dist(after[name].double(), tensor.double()))
            for name, tensor in before.items()
            if tensor.is_floating_point() and not is_statistic(name)
        )
    )


def mean_bits(bits: int, first: float, last: float, least: int, most: int) -> float:
    """Return the mean number of bits per client. `first` and `last` are the fields of `AdaGQState`."""
    change = math.log2(last / first) if first and last else 0.0
    return min(max(float(least), bits + change), float(most))


def clock(model: PoolModel, device: Device, draws: int) -> tuple[float, float]:
    """Return the seconds of a client's round without the upload, and the seconds to upload one bit per parameter."""
    compute = FORWARDS_PER_STEP * model.macs * draws / device.speed
    return compute + model.bytes / device.bandwidth, model.params / 8 / device.bandwidth


def share_bits(clocks: Sequence[tuple[float, float]], total: int, least: int, most: int) -> list[int]:
    """Distribute `total` bits over the clients. All clients get `least` bits. Each further bit is assigned to the
    client that would finish the round first if it got this bit. Each encoded number takes one more bit for its sign."""
    bits = [least] * len(clocks)

    def finish(client: int) -> tuple[float, int]:
        rest, each = clocks[client]
        return rest + (1 + bits[client] + 1) * each, client

    waiting = [finish(client) for client in range(len(clocks)) if least < most]
    heapq.heapify(waiting)
    for _ in range(total - least * len(clocks)):
        if not waiting:
            break
        _, client = heapq.heappop(waiting)
        bits[client] += 1
        if bits[client] < most:
            heapq.heappush(waiting, finish(client))
    return bits
