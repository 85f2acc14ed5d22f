"""FedX: Adaptive Model Decomposition and Quantization for IoT Federated Learning (Lai et al.), Algorithm 1.

Each kind of device, here a tier of the fleet, has a nested sub-network and a number of bits. Each round the server
sends the sub-network, quantised by QSGD; a device trains what it has decoded, and returns it as trained. The server
takes the mean of each element over the clients that hold it, all alike (Eq. 4: the sum over the mask's counts), and
then trains the whole network on its own data (`fine_tuning`, Eq. 5). Before the first round it has trained the
sub-networks there, and chosen one for each tier (Eq. 2): the preparation `supernet`. `fedx_small`, `fedx_medium` and
`fedx_large` send the same sub-network to all devices, in bits that are chosen likewise.

Departs from the paper:

- a tier gets the fewest bits that lose hardly more accuracy than the best; see `preparation.submodel_search`.
- QSGD has a norm for every 512 elements: with the paper's single norm over all, 8 bits of 2.4 M weights are off by
  twice their size (`bucket: null` is one norm over each tensor).
- the server's first training starts from fresh weights; the paper's MobileNetV3 comes from ImageNet.
- a device that has less free than its sub-network needs fails; if that is the smallest level, it trains it all the same
  (`on_too_small`).
- where a network keeps running statistics, those of its sub-networks differ, so they are collected anew before a level
  is scored (`static_bn`).
- the paper's MobileNetV3 and 1-D network have nested sub-networks of their own; others get prefixes of `widths`.
- a round without any update changes nothing: the server does not fine-tune then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fl_engine.aggregation.privacy import is_private
from fl_engine.algorithms.fine_tuning import FineTuning, tuned
from fl_engine.algorithms.levels import Bits
from fl_engine.algorithms.pooled import PooledAlgorithm, PooledState, StaticBN, Weighting
from fl_engine.codecs.qsgd import Qsgd
from fl_engine.core import pool as pools
from fl_engine.core.contracts import Interval, ModelFamily, ServerContext, around
from fl_engine.core.errors import ConfigError, PoolError, nearest
from fl_engine.core.fields import STRICT, Count, Fraction, Index, NotNegative, Positive
from fl_engine.core.types import (
    Codecs,
    Device,
    LocalTask,
    Outcome,
    ParamLayout,
    Params,
    Pool,
    Prepared,
    RoundContext,
    RoundPlan,
    TaskContext,
    WorkOrder,
)
from fl_engine.core.widths import SIZES, nested
from fl_engine.preparation.supernet import Supernet, anchors
from fl_engine.selection import ByCapacity, Selection
from fl_engine.selection.capacity import by_tier, holds


@dataclass(frozen=True)
class Assigned:
    """The sub-network and the bits of a tier."""

    __pydantic_config__ = STRICT

    level: str
    """The sub-network's name."""
    bits: Bits | None = None
    """Bits of QSGD on the way down; null: the run's `codec`, both ways."""


@dataclass(frozen=True)
class FedX(PooledAlgorithm):
    preparations: ClassVar[tuple[str, ...]] = ("supernet",)

    widths: tuple[Fraction, ...] = (0.5, 0.75, 1.0)
    """Width ratios of the sub-networks, ascending to 1, of a network that has none of its own."""
    names: tuple[str, ...] = SIZES
    """Names of these sub-networks."""
    level: str | None = None
    """The sub-network of every device; null: each tier has its own."""
    assigned: Mapping[str, Assigned] = field(default_factory=dict, hash=False)
    """By tier, the sub-network and the bits, e.g. {weak: {level: small, bits: 11}, medium: {level: medium, bits: 9}};
    empty: they are searched."""
    bits: tuple[Bits, ...] = tuple(range(1, 17))
    """Bits that the search tries."""
    q_max: Mapping[str, Bits] = field(default_factory=dict, hash=False)
    """Map each tier to the most bits that its devices support; 16 for a tier that is missing."""
    seconds: Positive | None = None
    """mu: a local round takes at most so long on the simulated clock, without the transfer; null: no limit. How long it
    takes follows from the clients' sample counts, so that a private aggregation refuses it where it is searched."""
    delta: NotNegative = 0.01
    """Of the candidates whose accuracy is at most this much below the best one's, a tier takes the one with the fewest
    encoded bits; 0: the most accurate (Eq. 2)."""
    accept: NotNegative | None = None
    """The search ends at the first candidate, in the order of their bits, that loses at most this much accuracy against
    the whole network; null: all are tried."""
    search_levels: Annotated[int, Field(ge=3)] | None = 9
    """How many sub-networks are tried for a tier: small, medium, large, and others at equal distances; null: all."""
    search_seeds: Count = 3
    """How many times a candidate is rounded; its accuracy is the mean."""
    random_levels: Index = 1
    """Sub-networks that each step of the server's first training draws, besides the smallest and the largest."""
    kd_weight: NotNegative = 1.0
    """Weight of the distillation from the largest sub-network in this training; 0: none."""
    kd_temperature: Positive = 1.0
    """Temperature of this distillation."""
    bucket: Count | None = 512
    """Elements that share a norm in QSGD; null: one norm per tensor."""
    up: Literal["identity", "quantised"] = "identity"
    """identity: a device returns its weights as trained; quantised: their change, in its tier's bits."""
    fine_tuning: FineTuning | None = FineTuning()
    """The server's training after each merge; null: none."""
    static_bn: StaticBN = "kept"
    weighting: Weighting = "uniform"
    selection: Selection = ByCapacity()
    """Selects the clients; their tiers decide what they are sent."""

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        """Small, medium and large, and the sub-networks that tiers are sent. Before the preparation no tier has one:
        then the selection may send each of them, or `level` alone."""
        levels = nested(family, self.widths, self.names)
        if self.level is not None:
            _known(self.level, levels, "algorithm.level")
        tiers = self._tiers(prepared.get("supernet"), levels)
        listed = {*anchors(family, levels), *tiers, *([] if self.level is None else [self.level])}
        sent = {*tiers} or ({self.level} if self.level is not None else listed)
        models = [
            self.member(
                family,
                name,
                spec,
                name in sent,
                codecs=_finest([codecs for _, codecs in tiers.get(name, ())]),
                tiers=tiers.get(name, ()),
            )
            for name, spec in levels.items()
            if name in listed
        ]
        return pools.ascending(tuple(models))

    def _tiers(
        self, made: Supernet | None, levels: Mapping[str, object]
    ) -> dict[str, tuple[tuple[str, Codecs | None], ...]]:
        """By sub-network, the tiers that are sent it."""
        if self.assigned and self.level is not None:
            raise PoolError("algorithm.assigned and algorithm.level both say what devices are sent: leave one out")
        told = dict(self.assigned) or {
            tier: Assigned(each.level, each.bits) for tier, each in (made.chosen if made else {}).items()
        }
        found: dict[str, tuple[tuple[str, Codecs | None], ...]] = {}
        for tier, each in told.items():
            _known(each.level, levels, f"algorithm.assigned.{tier}.level")
            found[each.level] = (*found.get(each.level, ()), (tier, self._codecs(each.bits)))
        return found

    def _codecs(self, bits: int | None) -> Codecs | None:
        if bits is None:
            return None
        codec = Qsgd(bits=bits, bucket=self.bucket)
        return Codecs(down=codec, up=codec if self.up == "quantised" else None)

    def init(
        self, params: Params, layout: ParamLayout, fleet: Sequence[Device], pool: Pool, server: ServerContext
    ) -> PooledState:
        """Raises ConfigError if a tier of the fleet has no sub-network, or its devices cannot hold it, and if the
        search would reveal what a private aggregation hides."""
        if self.seconds is not None and not self.assigned and is_private(self):
            raise ConfigError(
                "with algorithm.seconds the search goes by how many samples clients hold, which a private aggregation "
                "hides: set algorithm.seconds=null, or say in algorithm.assigned what each tier is sent"
            )
        tiers = by_tier(pool)
        for device in {device.tier: device for device in fleet}.values() if tiers else ():
            if device.tier not in tiers:
                raise ConfigError(
                    f"tier {device.tier!r} of the fleet has no sub-network: algorithm.assigned, or the preparation "
                    f"supernet, names {', '.join(tiers)}{nearest(device.tier, tiers)}"
                )
            model = pool[tiers[device.tier][0]]
            if not holds(device, model.share):
                raise ConfigError(
                    f"tier {device.tier!r} is assigned {model.name}, which needs {100 * model.share:.1f} % of the full "
                    f"model, and its devices hold {device.most:g} %: assign a smaller sub-network"
                )
        return super().init(params, layout, fleet, pool, server)

    def plan(self, state: PooledState, context: RoundContext) -> RoundPlan:
        """Each client that the selection picks is sent the sub-network of its tier, by its codecs."""
        picks, tiers = self.select(state, context), by_tier(state.pool)
        if not tiers:
            return self.assign(state, context, picks)
        tier = {device.client: device.tier for device in context.available}
        plan = self.assign(state, context, [(client, tiers[tier[client]][0]) for client, _ in picks])
        orders = (replace(order, codecs=tiers[tier[order.client]][1]) for order in plan.orders)
        return replace(plan, orders=tuple(orders))

    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        return self.whole(order, ctx)

    def merge(
        self, state: PooledState, plan: RoundPlan, answers: Iterable[Outcome], server: ServerContext
    ) -> PooledState:
        merged: PooledState = super().merge(state, plan, answers, server)
        return tuned(self.fine_tuning, self.aggregation, state, merged, plan, server)

    def search_space(self, pool: Pool) -> Mapping[str, Interval]:
        """The server's fine-tuning, where there is one, and its regulariser, where that is not switched off."""
        tuning, found = self.fine_tuning, dict[str, Interval]()
        if tuning is not None and tuning.gamma > 0:
            found["fine_tuning.gamma"] = around(tuning.gamma, 1e-6, 1.0, log=True)
        if tuning is not None:
            found["fine_tuning.lr"] = around(tuning.lr, 1e-4, 0.1, log=True)
        return found


def _known(name: str, levels: Mapping[str, object], where: str) -> None:
    if name not in levels:
        raise PoolError(f"{where}: there is no sub-network {name!r}{nearest(name, levels)}; {len(levels)} have names")


def _finest(codecs: Sequence[Codecs | None]) -> Codecs | None:
    """Of the tiers that are sent one sub-network, the codecs with the most bits: they count its bytes. None, for the
    run's codecs, where a tier has none of its own."""
    known = [each for each in codecs if each is not None and isinstance(each.down, Qsgd)]
    if len(known) < len(codecs):
        return None
    return max(known, key=lambda each: each.down.bits, default=None)  # type: ignore[union-attr]
