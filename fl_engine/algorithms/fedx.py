"""FedX: Adaptive Model Decomposition and Quantization for IoT Federated Learning (Lai et al., DCOSS-IoT 2025;
arXiv:2504.12849), Algorithm 1.

Each tier of the fleet is assigned one of several nested sub-networks and a number of bits. Before the first round, the
preparation `supernet` trains the sub-networks on the server's data and chooses the sub-network of each tier (Eq. 2). In
each round the server sends the sub-networks, quantised by QSGD. A device trains the decoded weights and returns
unquantised weights. The server averages each parameter over the updates that contain it, with equal weights (Eq. 4).
Then the server trains the whole network on its own data (`fine_tuning`, Eq. 5). `fedx_small`, `fedx_medium` and
`fedx_large` send the same sub-network to all devices and search only for the number of bits.

Departs from the paper:

- A tier gets the candidate with the fewest encoded bits within `delta` of the best accuracy (`submodel_search`).
- QSGD uses one norm for every 512 elements. With the paper's single norm, quantising 2.4 M weights with 8 bits causes a
  root-mean-square error about twice as large as the weights. `bucket: null` uses one norm per tensor.
- The server's first training starts from random weights. The paper's MobileNetV3 is pretrained on ImageNet.
- A device fails if its sub-network does not fit into its free memory. The smallest level is trained regardless of the
  memory (`on_too_small`).
- Each sub-network needs separate running statistics, which are collected before its evaluation (`static_bn`).
- The paper's MobileNetV3 and 1-D network define their nested sub-networks. In other networks, a sub-network consists of
  the first channels of each layer, according to the ratios `widths`.
- After a round without any update the server does not fine-tune, so the model does not change.

The paper's abstract states that the total training time falls by a factor of 1.36. Table IV yields at most 1.32. In
comparison to DAdaQuant, the factors are 79.92 / 60.5 = 1.32 (FEMNIST), 118.73 / 90.2 = 1.32 (Tiny-ImageNet), 79.57 /
61.5 = 1.29 (CIFAR-10) and 6.25 / 7.81 = 0.80 (HAR).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fl_engine.aggregation.privacy import is_private
from fl_engine.algorithms.fine_tuning import FineTuned, FineTuning
from fl_engine.algorithms.levels import Bits
from fl_engine.algorithms.pooled import PooledState, Weighting, with_codecs
from fl_engine.codecs.qsgd import Qsgd
from fl_engine.core import pool as pools
from fl_engine.core.contracts import Interval, ModelFamily, ServerContext, around
from fl_engine.core.errors import ConfigError, PoolError, nearest
from fl_engine.core.fields import Count, Fraction, NotNegative, Options, Positive
from fl_engine.core.types import Codecs, Device, Pool, Prepared, RoundContext, RoundPlan
from fl_engine.core.widths import SIZES, nested
from fl_engine.preparation.supernet import Supernet, anchors
from fl_engine.selection import ByCapacity, Selection
from fl_engine.selection.capacity import by_tier, holds


@dataclass(frozen=True)
class Assigned(Options):
    """Sub-network and number of bits for a tier."""

    level: str
    """Name of the sub-network."""
    bits: Bits | None = None
    """Number of QSGD bits for the weights that the server sends; null: use the run's `codec` in both directions."""


@dataclass(frozen=True)
class FedX(FineTuned):
    preparations: ClassVar[tuple[str, ...]] = ("supernet",)

    widths: tuple[Fraction, ...] = (0.5, 0.75, 1.0)
    """Ascending width ratios that end with 1. Ignored if the network defines its own nested sub-networks."""
    names: tuple[str, ...] = SIZES
    """Names of the sub-networks, one for each ratio in `widths`."""
    level: str | None = None
    """Name of the sub-network for all devices; null: each tier has its own sub-network."""
    assigned: Mapping[str, Assigned] = field(default_factory=dict, hash=False)
    """Map each tier to its sub-network and bits, e.g. {weak: {level: small, bits: 11}, medium: {level: medium, bits:
    9}}; empty: a search chooses them."""
    bits: tuple[Bits, ...] = tuple(range(1, 17))
    """Numbers of bits that the search tries."""
    q_max: Mapping[str, Bits] = field(default_factory=dict, hash=False)
    """Map each tier to the maximum number of bits that its devices support; 16 for tiers that are not listed."""
    seconds: Positive | None = None
    """mu: maximum duration of local training in a round, in simulated seconds; null: no limit. Durations reveal the
    clients' sample counts, so a search with this limit cannot be combined with a private aggregation."""
    delta: NotNegative = 0.01
    """Loss of accuracy that the search accepts to save encoded bits; 0: choose the most accurate candidate (Eq. 2)."""
    search_levels: Annotated[int, Field(ge=3)] | None = 9
    """Number of sub-networks to try for a tier: small, medium, large, and others at equal distances; null: all."""
    search_seeds: Count = 3
    """Number of random roundings of each candidate. The mean of their accuracies is the candidate's score."""
    kd_weight: NotNegative = 1.0
    """Weight of the distillation from the largest sub-network in the server's first training; 0: no distillation."""
    up: Literal["identity", "quantised"] = "identity"
    """identity: devices return trained weights; quantised: devices return changes with the bits of their tier."""
    fine_tuning: FineTuning | None = FineTuning()
    """Options of the server's training after each merge; null: no training."""
    weighting: Weighting = "uniform"
    selection: Selection = ByCapacity()
    """Selection of the clients. A client's tier determines which sub-network the client receives."""

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        """Return the small, medium and large sub-network and all sub-networks that are assigned to tiers. Before the
        preparation assigns sub-networks to tiers, the selection may send any model, or only `level` if it is set."""
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
        if self.assigned and self.level is not None:
            raise PoolError.at("algorithm.level must be null if algorithm.assigned is set")
        tiers_of: dict[str, tuple[tuple[str, Codecs | None], ...]] = {}
        for tier, each in (self.assigned or (made.chosen if made else {})).items():
            _known(each.level, levels, f"algorithm.assigned.{tier}.level")
            tiers_of[each.level] = (*tiers_of.get(each.level, ()), (tier, self._codecs(each.bits)))
        return tiers_of

    def _codecs(self, bits: int | None) -> Codecs | None:
        if bits is None:
            return None
        codec = Qsgd(bits=bits, bucket=self.bucket)
        return Codecs(down=codec, up=codec if self.up == "quantised" else None)

    def check(self, fleet: Sequence[Device], pool: Pool, server: ServerContext) -> None:
        if self.seconds is not None and not self.assigned and is_private(self):
            raise ConfigError.at(
                "algorithm.seconds must be null with a private aggregation. Alternatively, set algorithm.assigned"
            )
        tiers = by_tier(pool)
        for device in {device.tier: device for device in fleet}.values() if tiers else ():
            if device.tier not in tiers:
                raise ConfigError.at(
                    f"algorithm.assigned must have an entry for tier {device.tier!r}{nearest(device.tier, tiers)}"
                )
            model = pool[tiers[device.tier][0]]
            if not holds(device, model.share):
                raise ConfigError.at(
                    f"algorithm.assigned: {model.name} has {100 * model.share:.1f} % of the full model's size, but "
                    f"tier {device.tier!r} has memory for only {device.most:g} %. Assign a smaller sub-network"
                )

    def plan(self, state: PooledState, context: RoundContext) -> RoundPlan:
        """Send each selected client the sub-network of the client's tier, with the tier's codecs."""
        picks, tiers = self.select(state, context), by_tier(state.pool)
        if not tiers:
            return self.assign(state, context, picks)
        of_client = {device.client: tiers[device.tier] for device in context.available}
        plan = self.assign(state, context, [(client, of_client[client][0]) for client, _ in picks])
        return with_codecs(plan, (of_client[assignment.client][1] for assignment in plan.assignments))

    def search_space(self, pool: Pool) -> Mapping[str, Interval]:
        """Return the search ranges of the fine-tuning's `lr` and `gamma`. Omit `gamma` if its value is 0."""
        if self.fine_tuning is None:
            return {}
        ranges = {"fine_tuning.lr": around(self.fine_tuning.lr, 1e-4, 0.1, log=True)}
        if self.fine_tuning.gamma > 0:
            ranges = {"fine_tuning.gamma": around(self.fine_tuning.gamma, 1e-6, 1.0, log=True)} | ranges
        return ranges


def _known(name: str, levels: Mapping[str, object], path: str) -> None:
    if name not in levels:
        raise PoolError.at(f"{path} must name a sub-network, got {name!r}{nearest(name, levels)}")


def _finest(codecs: Sequence[Codecs | None]) -> Codecs | None:
    """Return the codecs with the highest number of bits, which determine the maximum bytes of a sub-network. Return
    None if any tier uses the run's codecs."""
    known = [each for each in codecs if each is not None and isinstance(each.down, Qsgd)]
    if len(known) < len(codecs):
        return None
    return max(known, key=lambda each: each.down.bits, default=None)  # type: ignore[union-attr]
