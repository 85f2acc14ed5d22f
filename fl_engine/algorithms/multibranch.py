"""Multi-branch networks: "Enhancing Communication Efficiency and Training Time Uniformity in Federated Learning through
Multi-Branch Networks and the Oort Algorithm" (Algorithms 17(2), 52, MDPI, January 2024; doi:10.3390/a17020052),
sections 4 and 5.1.2.

A network has early exits at equal distances. A branch is the network up to one exit, with only this exit's head. The
last branch is the network without early exits. In each round the selected clients are sorted by speed and bandwidth and
divided into as many tiers as branches (`capacity.tiers`, Algorithm 1). The slowest tier trains the first branch, and
the fastest tier trains the last branch. Each parameter is averaged over the updates that contain it. All branches are
evaluated, and the metric `full` is the accuracy of the last branch. The selection chooses clients, but not branches.
The paper also combines the method with FedProx (`proximal`) and FedYogi (`server: {name: yogi}`).

The implementation specifies details that the paper leaves open:

- With B exits and N blocks, exit j is behind block j N / (B + 1), rounded half up. The nine exits of ResNet34 are
  behind the blocks 2, 3, 5, 6, 8, 10, 11, 13 and 14, as in the paper's figure 4. The paper's text, however, mentions
  "equidistant points", "every two blocks" and "nine additional branches". With `exits: every:2`, there are seven exits.
- Heads have two convolutions in the first third of the exits, one convolution in the second third and no convolution in
  the last third. Each 3x3 convolution has stride 1 and as many channels as the block, and is followed by batch norm and
  ReLU. Global average pooling and a linear layer follow. The paper specifies the heads only for the "first group of
  residual blocks", with three branches.
- A client minimises only the loss of its branch.
- In the paper every client can hold every branch. Here a device that cannot hold its tier's branch receives the largest
  branch that fits. If no branch fits, the device receives the smallest branch. A device fails if its free memory is too
  small for the received branch, because the device did not receive the heads of smaller branches. The smallest branch
  is always trained, unless `on_too_small: fail` is set.

The algorithm supports every network with early exits. A head has fewer convolutions if its branch would otherwise cost
at least as much as the next branch. For example, the heads of `small_cnn` have no convolutions, and the second head of
`resnet18` has one instead of two. In networks with group norm (`uthar_resnet18`, `widar_resnet18`) and behind blocks
that return vectors, a head is a linear layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from fl_engine.algorithms.pooled import PooledAlgorithm, PooledState
from fl_engine.core import pool as pools
from fl_engine.core.contracts import Interval, ModelFamily, ServerContext, around
from fl_engine.core.costs import count_params, macs_of
from fl_engine.core.errors import PoolError
from fl_engine.core.fields import Index, NotNegative
from fl_engine.core.types import Assignment, LocalTask, Pick, Pool, Prepared, RoundContext, RoundPlan, TaskContext
from fl_engine.core.widths import branch, exit_points, with_exits
from fl_engine.selection.capacity import dispatched, holds, tiers


@dataclass(frozen=True)
class MultiBranch(PooledAlgorithm):
    draw_matters: ClassVar[str] = "multibranch ranks the clients of a round among themselves"

    exits: str | tuple[str, ...] = "equidistant:9"
    """Positions of the early exits. `equidistant:9`: nine exits at equal distances, but at most one for each block
    except the last; `every:2`: an exit behind every second block except the last; or a list of block names in network
    order."""
    head_convs: tuple[Index, ...] = (2, 1, 0)
    """Numbers of 3x3 convolutions per head, one for each group of exits. The groups are about equally large. A head has
    fewer convolutions if its branch would not cost less than the next branch."""
    mu: NotNegative = 1.0
    """Weight of a client's speed, relative to its bandwidth, when tiers are assigned; 0: use only the bandwidth."""
    proximal: NotNegative = 0.0
    """Weight of FedProx's proximal term (the option `mu` of `fedprox`); 0: no proximal term."""

    def network(self, family: ModelFamily) -> ModelFamily:
        return branching(family, exits_at(exit_points(family), self.exits), self.head_convs)

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        ends = exits_at(exit_points(family), self.exits)
        models = [self.member(family, f"branch{i}", branch(family, end)) for i, end in enumerate((*ends, None), 1)]
        return pools.ascending(tuple(models))

    def plan(self, state: PooledState, context: RoundContext) -> RoundPlan:
        return self.assign(state, context, in_tiers(self.select(state, context), context, self.mu))

    def task(self, assignment: Assignment, ctx: TaskContext) -> LocalTask:
        return self.whole(assignment, ctx, proximal=self.proximal)

    def search_space(self, pool: Pool) -> Mapping[str, Interval]:
        """Return the search range of mu, which is from section 5.4.2 of the paper."""
        return {"mu": around(self.mu, 0.0, 4.0)}


def exits_at(points: Sequence[str], rule: str | Sequence[str]) -> tuple[str, ...]:
    """Return the blocks of `points`, in network order, that are followed by an exit. An exit after the last block would
    be a second classifier, so it exists only if `rule` lists the block."""
    match = re.fullmatch(r"(equidistant|every):([1-9][0-9]{0,5})", rule) if isinstance(rule, str) else None
    n, blocks, ends = int(match[2]) if match else 0, len(points), tuple[str, ...]()
    if match is None:
        ends = () if isinstance(rule, str) else tuple(rule)
    elif match[1] == "every":
        ends = tuple(points[position - 1] for position in range(n, blocks, n))
    else:
        n = min(n, blocks - 1)
        ends = tuple(points[(2 * j * blocks + n + 1) // (2 * (n + 1)) - 1] for j in range(1, n + 1))
    if not ends:
        raise PoolError.at(
            f"algorithm.exits must be equidistant:<n>, every:<n> or names of the {blocks} blocks, got {rule!r}"
        )
    return ends


@lru_cache(maxsize=16)
def branching(family: ModelFamily, ends: tuple[str, ...], head_convs: tuple[int, ...]) -> ModelFamily:
    """Return the network with exits behind the blocks `ends`. The heads have at most `head_convs` convolutions. A head
    has fewer convolutions if its branch would otherwise not be smaller and faster than the next branch."""
    if not hasattr(family, "exit_convs"):  # The network supports only linear layers as heads.
        return with_exits(family, ends)
    maps = {slot.block for slot in family.layout().slots.values() if len(slot.axes) == 4}
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
    """Return the numbers of parameters and multiply-adds of a branch."""
    spec = branch(family, end)
    return count_params(family, spec), macs_of(family, spec)


def in_tiers(picks: Sequence[Pick], context: RoundContext, mu: float) -> list[Pick]:
    """Assign each picked client the largest branch that fits into its maximum memory and is not larger than the branch
    of its tier. If no branch fits, assign the smallest branch."""
    devices = {d.client: d for d in context.available}
    picked = [devices[client] for client, _ in picks]
    levels = dispatched(context.pool)
    assigned = []
    of_device = tiers([d.speed for d in picked], [d.bandwidth for d in picked], len(levels), mu)
    for device, tier in zip(picked, of_device, strict=True):
        fits = [level for level in levels[: tier + 1] if holds(device, context.pool[level].share)]
        assigned.append((device.client, fits[-1] if fits else levels[0]))
    return assigned
