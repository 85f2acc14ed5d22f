"""Preparation that trains the network with all sub-networks on the server and chooses a sub-network for each tier: FedX
(Lai et al., arXiv:2504.12849), Algorithm 1, lines 5 and 6; section III-A. The run starts from the trained weights.

Each step trains the largest, the smallest and some other sub-networks together (`types.Sandwich`) on four fifths of the
server's data. The remaining fifth is used to measure accuracies and for the search (`submodel_search`). Before a
sub-network is scored, the running statistics of batch norm are recomputed on the training data.

Departs from the paper, which refers to CompOFA. CompOFA first trains the largest sub-network alone, starting from an
ImageNet network, and then distils from this teacher. Here all sub-networks are trained from scratch together, and the
largest one teaches the others (in-place distillation). The paper measures the duration of a local round on a device.
Here the simulated clock (`fleet.devices`) computes this duration from the mean number of samples of the tier's clients.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, ClassVar

from pydantic import Field

from fl_engine.codecs.qsgd import Qsgd
from fl_engine.core import costs, seeds
from fl_engine.core.contracts import ModelFamily, Nested, PreparationContext
from fl_engine.core.costs import count_params
from fl_engine.core.errors import PoolError, nearest
from fl_engine.core.fields import adapter
from fl_engine.core.records import Strict
from fl_engine.core.slicing import is_statistic, take
from fl_engine.core.types import FULL, SGD, Device, LocalTask, Params, Sandwich, SubmodelSpec
from fl_engine.core.widths import SIZES, nested
from fl_engine.exchange.coding import decode, encode, header_of
from fl_engine.fleet import devices
from fl_engine.preparation.apoz import pretraining
from fl_engine.preparation.submodel_search import Candidate, Kind, feasible, search, spread
from fl_engine.preparation.weights import Weights
from fl_engine.selection.capacity import holds
from fl_engine.storage.store import tensor_bytes
from fl_engine.training.evaluation import recalibrated

log = logging.getLogger("flexfleet")

MOST_BITS = 16


class SubNetwork(Strict):
    """Sub-network that was scored after the server's training, before the first round and without quantisation."""

    name: str
    params: int
    macs: int
    """Multiply-adds per sample."""
    accuracy: float | None
    """Task's metric on the held-out part of the server's data; None if the metric is not finite."""


class Supernet(Strict):
    """Artifact of the preparation `supernet`."""

    weights: Weights = Field(default={}, repr=False)
    """Weights of the whole network; empty before the preparation."""
    levels: tuple[SubNetwork, ...] = ()
    """Scored sub-networks in ascending order of size."""
    chosen: dict[str, Candidate] = Field(default={})
    """Map each tier to its chosen candidate; empty without a search."""
    table: tuple[Candidate, ...] = ()
    """All candidates that the search measured."""
    smaller_gets_more_bits: bool | None = None
    """True if tiers with smaller sub-networks get more bits, as FedX claims; None if all sub-networks have
    the same size."""
    seconds_per_round: dict[str, dict[str, float]] = Field(default={})
    """For each tier, map each sub-network that fits into the memory to the simulated seconds of a local round."""
    samples: int = 0
    """Number of the server's samples, including held-out samples."""
    seconds: float = 0.0
    """Duration of the whole preparation in seconds."""


@dataclass(frozen=True)
class TrainSupernet:
    settings: ClassVar[tuple[str, ...]] = (
        "algorithm.widths", "algorithm.names", "algorithm.kd_weight", "algorithm.level", "algorithm.assigned",
        "algorithm.bits", "algorithm.q_max", "algorithm.bucket", "algorithm.seconds", "algorithm.delta",
        "algorithm.search_levels", "algorithm.search_seeds",
        "fleet.tiers", "training.epochs", "training.batch_size", "training.drop_last",
    )  # fmt: skip
    needs_data: ClassVar[bool] = True
    artifact: ClassVar[Any] = Supernet

    def prepare(self, family: ModelFamily, server: PreparationContext) -> Supernet:
        """Train the network and run the search. Before that, raise PoolError if a tier has no feasible sub-network."""
        began, settings = time.monotonic(), server.settings
        levels = nested(family, settings["algorithm.widths"], settings["algorithm.names"])
        params = {name: count_params(family, spec) for name, spec in levels.items()}
        kinds = [] if settings["algorithm.assigned"] else _kinds(family, server, levels)
        limit = settings["algorithm.seconds"]
        able = {kind.tier: feasible(kind, limit) for kind in kinds}
        named = anchors(family, levels)
        tried = {name for names in able.values() for name in spread(names, settings["algorithm.search_levels"], named)}
        trained = _trained(family, server, levels)
        scores = Scores(family, server, trained, levels, tried)
        scored = {name for names in able.values() for name in names} | set(named)
        found = Supernet(
            weights=trained,
            levels=tuple(
                SubNetwork(name=n, params=params[n], macs=costs.macs_of(family, spec), accuracy=scores.plain(n))
                for n, spec in levels.items()
                if n in scored
            ),
            seconds_per_round={kind.tier: dict(kind.seconds) for kind in kinds},
            samples=len(server.data.train_y) + len(server.data.test_y),
        )
        for each in (level for level in found.levels if level.name in named):
            log.info("supernet: accuracy of %s (%d parameters): %s", each.name, each.params, _shown(each.accuracy))
        if kinds:
            found = found.model_copy(update=_search(kinds, params, found.levels[-1].accuracy, scores))
        return found.model_copy(update={"seconds": round(time.monotonic() - began, 3)})

    def assumed(self, family: ModelFamily) -> Supernet:
        """Return an artifact without chosen sub-networks. Devices then get the largest sub-network that fits."""
        return Supernet()


def anchors(family: ModelFamily, levels: Mapping[str, SubmodelSpec]) -> list[str]:
    """Return the names of the sub-networks that are always scored: small, medium and large if the network defines these
    names, otherwise all names."""
    return [name for name in levels if name in SIZES or not isinstance(family, Nested)]


def _shown(accuracy: float | None) -> str:
    return "not a number" if accuracy is None else f"{accuracy:.4f}"


def sandwich(task: LocalTask, smaller: Sequence[SubmodelSpec], kd_weight: float = 1.0) -> LocalTask:
    """Return a copy of `task` in which each step trains the whole network, the smallest sub-network and a random
    sub-network. `smaller` contains the sub-networks in ascending order of size."""
    return replace(task, widths=(*smaller, FULL), sandwich=Sandwich(random=1, weight=kd_weight, temperature=1.0))


def _trained(family: ModelFamily, server: PreparationContext, levels: Mapping[str, SubmodelSpec]) -> Params:
    """Train the whole network from scratch and return the weights."""
    *smaller, _ = levels.values()
    task, start = pretraining(family, server, "supernet")
    return server.train(sandwich(task, smaller, server.settings["algorithm.kd_weight"]), start)


@dataclass(frozen=True)
class Scores:
    """Scores of sub-networks: the task's metric on the server's held-out data; None if the metric is not finite."""

    family: ModelFamily
    server: PreparationContext
    trained: Params
    levels: Mapping[str, SubmodelSpec]
    tried: Collection[str]
    """Names of sub-networks that are scored with several numbers of bits, and whose weights are cached."""
    cached: dict[str, Params] = field(default_factory=dict)

    def plain(self, name: str) -> float | None:
        return self._of(name, self._weights(name))

    def quantised(self, name: str, bits: int) -> Candidate:
        """Return the mean score of the decoded weights over rounding seeds that are the same for all candidates."""
        weights, codec = self._weights(name), Qsgd(bits=bits, bucket=self.server.settings["algorithm.bucket"])
        found, size, count = list[float | None](), 0, self.server.settings["algorithm.search_seeds"]
        for i in range(count):
            travels = encode(codec, weights, seeds.derive(self.server.seed, "supernet rounding", i))
            found.append(self._of(name, decode(codec, travels, header_of(weights))))
            size += 8 * tensor_bytes(travels)
        numbers = [each for each in found if each is not None]
        mean = sum(numbers) / count if len(numbers) == count else None
        return Candidate(level=name, bits=bits, accuracy=mean, encoded_bits=size / count)

    def _weights(self, name: str) -> Params:
        """Return the sub-network's weights, with recomputed running statistics."""
        if name in self.cached:
            return self.cached[name]
        server, spec = self.server, self.levels[name]
        weights = {n: t.cpu().contiguous() for n, t in take(self.trained, self.family.layout(), spec).items()}
        if any(is_statistic(each) for each in weights):
            weights = recalibrated(self.family, weights, spec, server.data, server.data.train_x, server.device)
        if name in self.tried:
            self.cached[name] = weights
        return weights

    def _of(self, name: str, weights: Params) -> float | None:
        value = self.server.evaluate(self.levels[name], weights)
        return value if isfinite(value) else None


def _kinds(family: ModelFamily, server: PreparationContext, levels: Mapping[str, SubmodelSpec]) -> list[Kind]:
    """Return a `Kind` for each tier that has devices. Tiers are sorted by their first client."""
    settings, samples = server.settings, server.samples
    wanted = settings["algorithm.level"]
    if wanted is not None and wanted not in levels:
        raise PoolError.at(f"algorithm.level must name a sub-network, got {wanted!r}{nearest(wanted, levels)}")
    params = {name: count_params(family, spec) for name, spec in levels.items() if wanted in (None, name)}
    tiers = adapter(tuple[devices.Tier, ...]).validate_json(json.dumps(settings["fleet.tiers"]))
    members: dict[str, list[Device]] = {}
    for device in devices.fleet(tiers, len(samples), server.seed, family, min(params.values())):
        members.setdefault(device.tier, []).append(device)
    most_bits = settings["algorithm.q_max"]
    if unknown := [tier for tier in most_bits if tier not in members]:
        raise PoolError.at(
            f"algorithm.q_max: the fleet does not have the tier {unknown[0]!r}{nearest(unknown[0], members)}"
        )
    epochs = {name: settings[f"training.{name}"] for name in ("epochs", "batch_size", "drop_last")}
    training = LocalTask(FULL, SGD(0.0), **epochs, seed=0)
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


def _search(kinds: Sequence[Kind], params: Mapping[str, int], whole: float | None, scores: Scores) -> dict[str, Any]:
    """Run the search and return the resulting fields of `Supernet`. `whole` is the accuracy of the whole network."""
    settings = scores.server.settings
    if whole is None:
        raise PoolError(
            "training the whole network on the server's data diverged (accuracy NaN). Decrease pretrain.lr",
            path="pretrain.lr",
        )
    chosen, table = search(
        kinds,
        {name: count for name, count in params.items() if name in scores.tried},
        settings["algorithm.bits"],
        scores.quantised,
        settings["algorithm.seconds"],
        settings["algorithm.delta"],
    )
    for tier, each in chosen.items():
        lost = whole - (each.accuracy or 0.0)
        log.info("supernet: tier %s uses %s with %d bits (accuracy loss: %.4f)", tier, each.level, each.bits, lost)
    pairs = [(a, b) for a in chosen.values() for b in chosen.values() if params[a.level] < params[b.level]]
    more = all(small.bits > large.bits for small, large in pairs) if pairs else None
    return {"chosen": chosen, "table": table, "smaller_gets_more_bits": more}
