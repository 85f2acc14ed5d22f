"""The server trains the network with all its sub-networks, and chooses one for each kind of device: FedX (Lai et
al.), Algorithm 1, lines 5 and 6; section III-A. The run starts from these weights.

Each step trains the largest sub-network, the smallest and some others together (`types.Sandwich`) on four fifths of the
server's data. Accuracies and the search (`submodel_search`) use the other fifth. If batch norm has running statistics,
each sub-network gets its own from the training data before it is scored.

Departs from the paper: it refers to CompOFA, which first trains the largest sub-network alone, from an ImageNet
network, and then distils from this teacher. Here the largest is trained from scratch with the others and teaches them
at the same time (in-place distillation). The paper measures a local round's seconds on a device; here they follow from
the simulated clock (`fleet.devices`), for the mean number of samples of the tier's clients.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from fl_engine.codecs.qsgd import Qsgd
from fl_engine.core import costs, seeds
from fl_engine.core.contracts import ModelFamily, Nested, PreparationContext
from fl_engine.core.costs import count_params
from fl_engine.core.errors import PoolError, nearest
from fl_engine.core.fields import adapter
from fl_engine.core.slicing import initial_params, is_statistic, take
from fl_engine.core.types import FULL, Adam, Device, LocalTask, Params, Sandwich, SubmodelSpec
from fl_engine.core.widths import SIZES, nested
from fl_engine.exchange.coding import decoded, encoded, header_of
from fl_engine.fleet import devices
from fl_engine.preparation.submodel_search import (
    Candidate,
    Kind,
    Rule,
    feasible,
    search,
    smaller_gets_more_bits,
    spread,
)
from fl_engine.preparation.weights import Weights
from fl_engine.selection.capacity import holds
from fl_engine.storage.store import tensor_bytes
from fl_engine.training.evaluation import evaluate, recalibrated

log = logging.getLogger("flexfleet")

MOST_BITS = 16


class SubNetwork(BaseModel):
    """A sub-network as the server has trained it, before any round and not quantised."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    name: str
    params: int
    macs: int
    """Per sample."""
    accuracy: float | None
    """The task's metric on the held-out part of the server's data; None if it is not a number."""


class Supernet(BaseModel):
    """The artifact of the preparation `supernet`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    weights: Weights = Field(default={}, repr=False)
    """The whole network's weights; empty before the preparation."""
    levels: tuple[SubNetwork, ...] = ()
    """The scored sub-networks, smallest first."""
    chosen: dict[str, Candidate] = {}
    """The result of the search by tier; empty without a search."""
    table: tuple[Candidate, ...] = ()
    """Everything that the search measured."""
    seconds_per_round: dict[str, dict[str, float]] = {}
    """By tier and sub-network that its devices can hold: seconds of a local round on the simulated clock."""
    regret: dict[str, float] = {}
    """By tier: the unquantised accuracy of the best sub-network that `algorithm.search_levels` left out, minus that of
    the chosen candidate; at least 0."""
    smaller_gets_more_bits: bool | None = None
    """Whether tiers with smaller sub-networks got more bits; null if all have the same, or without a search."""
    samples: int = 0
    """The server's samples, in both parts."""
    seconds: float = 0.0
    """Of the whole preparation."""


@dataclass(frozen=True)
class TrainSupernet:
    settings: ClassVar[tuple[str, ...]] = (
        *(
            f"algorithm.{name}"
            for name in (
                "widths", "names", "random_levels", "kd_weight", "kd_temperature", "level", "assigned", "bits", "q_max",
                "bucket", "seconds", "delta", "accept", "search_levels", "search_seeds",
            )
        ),
        "fleet.tiers", "training.epochs", "training.batch_size", "training.drop_last",
    )  # fmt: skip
    needs_data: ClassVar[bool] = True
    artifact: ClassVar[Any] = Supernet

    def prepare(self, family: ModelFamily, server: PreparationContext) -> Supernet:
        """Raises PoolError, before anything trains, if a tier has no sub-network to choose."""
        began, settings = time.monotonic(), server.settings
        levels = nested(family, settings["algorithm.widths"], settings["algorithm.names"])
        of = {name: count_params(family, spec) for name, spec in levels.items()}
        kinds = [] if settings["algorithm.assigned"] else _kinds(family, server, levels)
        limit = settings["algorithm.seconds"]
        able = {kind.tier: feasible(kind, limit) for kind in kinds}
        named = anchors(family, levels)
        tried = {name for names in able.values() for name in spread(names, settings["algorithm.search_levels"], named)}
        trained = _trained(family, server, levels)
        scores = Scores(family, server, trained, levels, tried)
        scored = {name for names in able.values() for name in names} | set(named)
        accuracy = {name: scores.plain(name) for name in levels if name in scored}
        found = Supernet(
            weights=trained,
            levels=tuple(
                SubNetwork(name=n, params=of[n], macs=costs.macs_of(family, levels[n]), accuracy=accuracy[n])
                for n in accuracy
            ),
            seconds_per_round={kind.tier: dict(kind.seconds) for kind in kinds},
            samples=len(server.data.train_y) + len(server.data.test_y),
        )
        for each in (level for level in found.levels if level.name in named):
            log.info("supernet: %s, %d parameters: %s", each.name, each.params, _shown(each.accuracy))
        if kinds:
            found = found.model_copy(update=_searched(kinds, of, tried, able, accuracy, scores, settings))
        return found.model_copy(update={"seconds": round(time.monotonic() - began, 3)})

    def assumed(self, family: ModelFamily) -> Supernet:
        """Without a choice, devices get the largest sub-network that they can hold."""
        return Supernet()


def anchors(family: ModelFamily, levels: Mapping[str, SubmodelSpec]) -> list[str]:
    """The sub-networks that are always listed: small, medium and large if the network has its own, else all."""
    return [name for name in levels if name in SIZES or not isinstance(family, Nested)]


def _shown(accuracy: float | None) -> str:
    return "not a number" if accuracy is None else f"{accuracy:.4f}"


# ------------------------------------------------------------------------------------------------------- training
def _trained(family: ModelFamily, server: PreparationContext, levels: Mapping[str, SubmodelSpec]) -> Params:
    """The whole network's weights, trained from scratch."""
    settings = server.settings
    *smaller, _ = levels.values()
    task = LocalTask(
        spec=FULL,
        optimizer=Adam(settings["pretrain.lr"], settings["pretrain.reset_adam"]),
        epochs=settings["pretrain.epochs"],
        batch_size=settings["pretrain.batch_size"],
        drop_last=True,
        seed=seeds.derive(server.seed, "supernet"),
        widths=(*smaller, FULL),
        sandwich=Sandwich(
            settings["algorithm.random_levels"], settings["algorithm.kd_weight"], settings["algorithm.kd_temperature"]
        ),
    )
    log.info("supernet: %d samples, %d epochs", len(server.data.train_y), task.epochs)
    start = initial_params(family, seeds.derive(server.seed, "init"))
    return server.train(task, {name: tensor.to(server.device) for name, tensor in start.items()})


# -------------------------------------------------------------------------------------------------------- scoring
class Scores:
    """The task's metric of sub-networks on the server's held-out data; None if it is not a finite number. It caches the
    weights of the sub-networks `tried`, which are scored in several numbers of bits."""

    def __init__(
        self,
        family: ModelFamily,
        server: PreparationContext,
        trained: Params,
        levels: Mapping[str, SubmodelSpec],
        tried: Collection[str],
    ) -> None:
        self._family, self._server, self._trained, self._levels = family, server, trained, levels
        self._tried = tried
        self._kept: dict[str, Params] = {}

    def plain(self, name: str) -> float | None:
        return self._of(name, self._weights(name))

    def quantised(self, name: str, bits: int, bucket: int | None, count: int) -> Candidate:
        """As a client decodes it: the mean over `count` rounding seeds, the same for all candidates."""
        weights, codec = self._weights(name), Qsgd(bits=bits, bucket=bucket)
        found, size = list[float | None](), 0
        for i in range(count):
            travels = encoded(codec, weights, seeds.derive(self._server.seed, "supernet rounding", i))
            found.append(self._of(name, decoded(codec, travels, header_of(weights))))
            size += 8 * tensor_bytes(travels)
        numbers = [each for each in found if each is not None]
        mean = sum(numbers) / count if len(numbers) == count else None
        return Candidate(level=name, bits=bits, accuracy=mean, encoded_bits=size / count)

    def _weights(self, name: str) -> Params:
        """The weights, with running statistics of its own if the network has any."""
        if name in self._kept:
            return self._kept[name]
        server, spec = self._server, self._levels[name]
        weights = {n: t.cpu().contiguous() for n, t in take(self._trained, self._family.layout(), spec).items()}
        if any(is_statistic(each) for each in weights):
            weights = recalibrated(self._family, weights, spec, server.data, server.data.train_x, server.device)
        if name in self._tried:
            self._kept[name] = weights
        return weights

    def _of(self, name: str, weights: Params) -> float | None:
        server, data = self._server, self._server.data
        spec = self._levels[name]
        value = evaluate(self._family, weights, spec, data, data.test_x, data.test_y, server.device).value
        return value if isfinite(value) else None


# --------------------------------------------------------------------------------------------------------- search
def _kinds(family: ModelFamily, server: PreparationContext, levels: Mapping[str, SubmodelSpec]) -> list[Kind]:
    """One for each tier with devices, in the order of their first client."""
    settings, samples = server.settings, server.samples
    wanted = settings["algorithm.level"]
    if wanted is not None and wanted not in levels:
        raise PoolError(f"algorithm.level must be a sub-network, got {wanted!r}{nearest(wanted, levels)}")
    params = {name: count_params(family, spec) for name, spec in levels.items() if wanted in (None, name)}
    tiers = adapter(tuple[devices.Tier, ...]).validate_json(json.dumps(settings["fleet.tiers"]))
    members: dict[str, list[Device]] = {}
    for device in devices.fleet(tiers, len(samples), server.seed, family, min(params.values())):
        members.setdefault(device.tier, []).append(device)
    most_bits = settings["algorithm.q_max"]
    if unknown := [tier for tier in most_bits if tier not in members]:
        raise PoolError(f"algorithm.q_max: the fleet has no tier {unknown[0]!r}{nearest(unknown[0], members)}")
    training = _Epochs(settings["training.epochs"], settings["training.batch_size"], settings["training.drop_last"])
    whole, found = count_params(family), []
    for tier, own in members.items():
        draws = sum(costs.draws(training, samples[device.client]) for device in own) / len(own)
        seconds = {
            name: costs.FORWARDS_PER_STEP * costs.macs_of(family, levels[name]) * draws / own[0].speed
            for name, count in params.items()
            if any(holds(device, count / whole) for device in own)
        }
        found.append(Kind(tier, most_bits.get(tier, MOST_BITS), seconds))
    return found


@dataclass(frozen=True)
class _Epochs:
    epochs: int
    batch_size: int
    drop_last: bool


def _searched(
    kinds: Sequence[Kind],
    params: Mapping[str, int],
    tried: set[str],
    able: Mapping[str, Sequence[str]],
    accuracy: Mapping[str, float | None],
    scores: Scores,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The fields of a `Supernet` that come from the search."""
    seeds_per_candidate, bucket = settings["algorithm.search_seeds"], settings["algorithm.bucket"]
    rule = Rule(settings["algorithm.seconds"], settings["algorithm.delta"], settings["algorithm.accept"])
    whole = list(accuracy.values())[-1]
    if whole is None:
        raise PoolError("the whole network's accuracy on the server's data is not a number: lower pretrain.lr")
    chosen, table = search(
        kinds,
        {name: count for name, count in params.items() if name in tried},
        settings["algorithm.bits"],
        lambda name, bits: scores.quantised(name, bits, bucket, seeds_per_candidate),
        whole,
        rule,
    )
    regret = {}
    for tier, names in able.items():
        left = [value for name in names if name not in tried and (value := accuracy[name]) is not None]
        if left:
            regret[tier] = max(0.0, max(left) - (chosen[tier].accuracy or 0.0))
    for tier, each in chosen.items():
        lost = whole - (each.accuracy or 0.0)
        log.info("supernet: tier %s gets %s in %d bits, which loses %.4f", tier, each.level, each.bits, lost)
    more = smaller_gets_more_bits(chosen, params)
    if more is not None:
        log.info("supernet: smaller sub-networks get more bits: %s", "yes" if more else "no")
    return {"chosen": chosen, "table": table, "regret": regret, "smaller_gets_more_bits": more}
