"""Multi-branch networks: "Enhancing Communication Efficiency and Training Time Uniformity in Federated Learning through
Multi-Branch Networks and the Oort Algorithm" (Algorithms, MDPI, January 2024), sections 4 and 5.1.2.

A network has early exits at equal distances. A branch is the network up to one of them, with the head of that exit
alone; the last branch is the network without early exits. In each round the selected clients are sorted by their speed
and bandwidth and cut into as many tiers as there are branches (`selection.tiers`, Algorithm 1): the weakest train the
first branch, the strongest the last. The mean is per element, over the clients whose branch has it. The accuracy of
each branch is reported; that of the last one is `full`. Any selection picks the clients, but not their branches. The
paper also pairs the method with FedProx (`proximal`) and FedYogi (`server: {name: yogi}`).

What the paper does not say, and is decided here:

- Where nine exits sit among the 16 blocks of ResNet34. The text has "equidistant points", "every two blocks" and "nine
  additional branches"; the places are in its figure 4 alone. Here exit j of B is behind block j N / (B + 1) of N,
  rounded, halves up: behind the blocks 2, 3, 5, 6, 8, 10, 11, 13 and 14. `exits: every:2` is the other reading, which
  makes seven.
- Which exit has which head. "Three extra branches for the first group of residual blocks" have two convolutions and a
  linear layer; those of "the second group" have one convolution, those of "the last group" none, and their number is
  not printed. Here a group is a third of the exits.
- The convolutions: 3x3, stride 1, as many channels as the block, each with batch norm and ReLU. The mean over the map
  follows, then the linear layer.
- The loss. Each client is sent its branch: here it trains that branch's loss alone.
- Which exit is scored: here all are.
- Memory: in the paper every client holds every branch. Here a device that cannot hold its tier's branch is sent the
  largest that it holds; one that holds none (picked only if the selection ignores memory) is sent the smallest. A
  device with less free than its branch needs cannot shorten it, as it has no other head: it fails. Only one that was
  sent the smallest branch trains it all the same, unless `on_too_small: fail` is set.

The same construction serves every network with early exits. On small ones two convolutions may cost more than the
blocks that the branch leaves out; then the head has fewer, so that every branch has fewer parameters and multiply-adds
than the next (`small_cnn`: no convolutions; `resnet18`: one instead of two in the second head). Behind a vector, and in
the networks for maps with group norm (`uthar_resnet18`, `widar_resnet18`), a head is the linear layer alone.

MB-ResNet34 at 3x32x32 and 10 classes (`model.channels`: those of He et al., and those of FlexFL's code):

                                     64, 128, 256, 512             96, 128, 256, 512
    branch  blocks  head         parameters  10^6 mult.-adds   parameters  10^6 mult.-adds
    1       2       2 conv + fc     224,458           230.10      480,330           492.37
    2       3       2 conv + fc     298,442           306.12      646,602           663.03
    3       5       2 conv + fc   1,046,090           440.73    1,342,602           713.49
    4       6       1 conv + fc   1,193,802           478.61    1,490,314           751.37
    5       8       1 conv + fc   2,852,170           613.22    3,148,682           885.98
    6       10      1 conv + fc   5,213,514           764.48    5,510,026          1037.24
    7       11      fc            5,803,850           802.29    6,100,362          1075.06
    8       13      fc            8,165,194           953.55    8,461,706          1226.31
    9       14      fc           11,840,842          1012.37   12,137,354          1285.13
    10      16      classifier   21,282,122          1163.50   21,578,634          1436.26
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fl_engine.aggregation.privacy import check_draw
from fl_engine.algorithms.pooled import PooledAlgorithm, PooledState
from fl_engine.core import pool as pools
from fl_engine.core.contracts import Interval, ModelFamily, ServerContext, around
from fl_engine.core.costs import count_params, macs_of
from fl_engine.core.errors import PoolError
from fl_engine.core.fields import Index, NotNegative
from fl_engine.core.types import (
    Device,
    LocalTask,
    ParamLayout,
    Params,
    Pick,
    Pool,
    Prepared,
    RoundContext,
    RoundPlan,
    TaskContext,
    WorkOrder,
)
from fl_engine.core.widths import branch, exit_points, with_exits
from fl_engine.selection.capacity import dispatched, holds
from fl_engine.selection.tiers import tiers


@dataclass(frozen=True)
class MultiBranch(PooledAlgorithm):
    exits: str | tuple[str, ...] = "equidistant:9"
    """Where early exits sit. `equidistant:9`: nine at equal distances, or one behind each block but the last where the
    network has fewer than ten blocks; `every:2`: behind every second block but the last; or the blocks' names, in
    order."""
    head_convs: tuple[Index, ...] = (2, 1, 0)
    """3x3 convolutions in the heads of the first, second, ... group of exits; as many groups of about equal size as
    there are numbers here. A head has fewer where its branch would not cost less than the next."""
    mu: NotNegative = 1.0
    """How much a client's speed counts beside its bandwidth when tiers are made: 0 is the bandwidth alone, 1e6 in
    effect the speed alone."""
    proximal: NotNegative = 0.0
    """Weight of FedProx's proximal term (the option `mu` of `fedprox`); 0: none."""

    def network(self, family: ModelFamily) -> ModelFamily:
        return branching(family, exits_at(exit_points(family), self.exits), self.head_convs)

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        ends = exits_at(exit_points(family), self.exits)
        models = [self.member(family, f"branch{i}", branch(family, end)) for i, end in enumerate((*ends, None), 1)]
        return pools.ascending(tuple(models))

    def init(
        self, params: Params, layout: ParamLayout, fleet: Sequence[Device], pool: Pool, server: ServerContext
    ) -> PooledState:
        """Raises ConfigError for secret selection."""
        check_draw(self.aggregation, "multibranch ranks the clients of a round among themselves")
        return super().init(params, layout, fleet, pool, server)

    def plan(self, state: PooledState, context: RoundContext) -> RoundPlan:
        return self.assign(state, context, in_tiers(self.select(state, context), context, self.mu))

    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        return self.whole(order, ctx, proximal=self.proximal)

    def search_space(self, pool: Pool) -> Mapping[str, Interval]:
        """The paper's section 5.4.2 varies mu."""
        return {"mu": around(self.mu, 0.0, 4.0)}


# --------------------------------------------------------------------------------------------------- the network
def exits_at(points: Sequence[str], rule: str | Sequence[str]) -> tuple[str, ...]:
    """Behind which of `points` (blocks, in network order) exits sit. Behind the last one none does, unless it is named:
    that exit would be a second classifier. Raises PoolError."""
    if not isinstance(rule, str):
        if not rule:
            raise PoolError("algorithm.exits is empty: name at least one block, or give equidistant:<n> or every:<n>")
        return tuple(rule)
    found = re.fullmatch(r"(equidistant|every):([1-9][0-9]{0,5})", rule)
    if found is None:
        raise PoolError(
            f"algorithm.exits is equidistant:<n>, every:<n> (n from 1) or a list of blocks, got {rule!r}: write "
            "equidistant:9, every:2 or [stage1.1, stage2.0]"
        )
    n, blocks = int(found[2]), len(points)
    if found[1] == "every":
        places = list(range(n, blocks, n))
    else:
        n = min(n, blocks - 1)
        places = [(2 * j * blocks + n + 1) // (2 * (n + 1)) for j in range(1, n + 1)]
    if not places:
        raise PoolError(
            f"algorithm.exits={rule} leaves no early exit among {blocks} blocks: the last has none behind it"
        )
    return tuple(points[place - 1] for place in places)


@lru_cache(maxsize=16)
def branching(family: ModelFamily, ends: tuple[str, ...], head_convs: tuple[int, ...]) -> ModelFamily:
    """The network with exits behind the blocks `ends`, whose heads have as many of `head_convs` convolutions as leave
    each branch fewer parameters and multiply-adds than the next. Where even none does, none."""
    if not hasattr(family, "exit_convs"):  # its heads are linear layers
        return with_exits(family, ends)
    slots = family.layout().slots.values()
    maps = {slot.block for slot in slots if len(slot.axes) == 4}
    family = with_exits(family, ends, ())
    convs: dict[str, int] = {}
    next_one = _cost(family, None)
    for j, end in reversed(list(enumerate(ends))):
        most = head_convs[len(head_convs) * j // len(ends)] if head_convs and end in maps else 0
        for count in range(most, -1, -1):
            convs[end] = count
            family = with_exits(family, ends, tuple((e, convs[e]) for e in ends if convs.get(e)))
            cost = _cost(family, end)
            if cost[0] < next_one[0] and cost[1] < next_one[1]:
                break
        next_one = cost
    return family


def _cost(family: ModelFamily, end: str | None) -> tuple[int, int]:
    """Parameters and multiply-adds of a branch."""
    spec = branch(family, end)
    return count_params(family, spec), macs_of(family, spec)


# ----------------------------------------------------------------------------------------------------- the tiers
def in_tiers(picks: Sequence[Pick], context: RoundContext, mu: float) -> list[Pick]:
    """The same clients, each with the branch of its tier, or with the largest that it can hold if that is smaller;
    where it can hold none, the smallest."""
    devices = {d.client: d for d in context.available}
    asked = [devices[client] for client, _ in picks]
    levels = dispatched(context.pool)
    found = []
    for device, tier in zip(
        asked, tiers([d.speed for d in asked], [d.bandwidth for d in asked], len(levels), mu), strict=True
    ):
        fits = [level for level in levels[: tier + 1] if holds(device, context.pool[level].share)]
        found.append((device.client, fits[-1] if fits else levels[0]))
    return found
