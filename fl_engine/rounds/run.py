"""What a run is: the same in every round."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from fl_engine.aggregation import privacy
from fl_engine.core import workload
from fl_engine.core.client_state import apart, kept_by_clients
from fl_engine.core.contracts import Algorithm
from fl_engine.core.types import ClientUpdate, Codecs, Header, RoundContext, WorkOrder
from fl_engine.core.workload import Epochs
from fl_engine.exchange import sealing
from fl_engine.exchange.client import Site
from fl_engine.exchange.server import ServerSite
from fl_engine.fleet import faults
from fl_engine.fleet.devices import simulated_seconds
from fl_engine.fleet.uniformity import Times
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.selection.capacity import round_size
from fl_engine.storage.store import tensor_bytes


@dataclass(frozen=True)
class Run:
    algorithm: Algorithm
    site: Site
    terms: RoundsConfig
    devices: tuple[str, ...] = ("cpu",)
    """Where the server trains (the first of them) and evaluates."""
    noise_key: bytes | None = None
    """A private aggregation's noise, and who takes part, come from it instead of the site's seed."""
    codecs: Codecs = Codecs()
    """Of orders whose level has none of its own."""

    @cached_property
    def server(self) -> ServerSite:
        return ServerSite(self.site, self.devices[0])

    def context(self, round: int, clock: float, busy: Collection[int] = ()) -> RoundContext:
        """What the round is planned from. `clock`: simulated seconds of the rounds before. `busy`: clients that are
        still at work, where rounds are asynchronous."""
        return RoundContext(
            round=round,
            seed=self.site.seed if self.noise_key is None else privacy.plan_seed(self.noise_key),
            fleet=self.site.fleet,
            available=tuple(d for d in self.site.fleet if d.client not in busy),
            pool=self.site.pool,
            clock=clock,
            over_provision=self.terms.over_provision,
            slots=None if self.terms.mode == "synchronous" else self.at_once - len(busy),
            samples=self._samples,
            draws=self._draws,
        )

    @cached_property
    def at_once(self) -> int:
        """How many clients are at work where rounds are asynchronous."""
        fraction: float = self.algorithm.training.fraction  # type: ignore[attr-defined]
        return round_size(fraction, len(self.site.fleet))

    def times(self, update: ClientUpdate, order: WorkOrder) -> Times:
        """What the order took on the simulated clock, with the transfer of its weights, and of what the client keeps,
        there and back; and what the client measured."""
        fault = faults.befalls(self._faults, self.site.seed, order.round, order.client, len(self.site.fleet))
        moved = tensor_bytes(order.travels) + tensor_bytes(update.travels)
        moved += tensor_bytes(apart(order.memory)[1]) + tensor_bytes(update.state)
        took = simulated_seconds(self.site.fleet[order.client], update.metrics.get("macs", 0.0), moved)
        slow = faults.slowness(fault)
        real = update.metrics.get("seconds", 0.0)
        return Times(slow * took.total, slow * took.compute, slow * took.communication, real)

    @property
    def alone(self) -> bool:
        """Whether each client trains by itself, and not side by side with others in lanes."""
        return self.site.numerics.strategy != "batched" or self.site.numerics.lanes == 1

    @cached_property
    def _samples(self) -> tuple[int, ...]:
        return tuple(self.site.rules.samples)

    @cached_property
    def _draws(self) -> tuple[int, ...]:
        """By the algorithm's `training`, where it has one with epochs and batches; else one epoch of all samples."""
        training = getattr(self.algorithm, "training", None)
        if not isinstance(training, Epochs):
            return self._samples
        return tuple(workload.draws(training, n) for n in self._samples)

    @cached_property
    def client_state(self) -> Header:
        """What each client keeps, as the server stores it."""
        kept = kept_by_clients(self.algorithm, self.site.family, self.site.pool)
        return sealing.forms(kept, self.site.sealed)

    @cached_property
    def _faults(self) -> faults.Faults:
        return faults.parse(self.terms.faults)
