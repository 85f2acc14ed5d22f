"""What is the same in every round of a run."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from fl_engine.aggregation import privacy
from fl_engine.core import costs
from fl_engine.core.clients import header, kept_by_clients
from fl_engine.core.contracts import Algorithm
from fl_engine.core.costs import Epochs
from fl_engine.core.errors import ConfigError
from fl_engine.core.types import ClientUpdate, Codecs, Device, Header, RoundContext, RoundPlan, WorkOrder
from fl_engine.exchange import coding
from fl_engine.exchange.client import Site
from fl_engine.fleet import faults, trace
from fl_engine.fleet.devices import Took, simulated_seconds
from fl_engine.fleet.faults import Fault
from fl_engine.fleet.trace import Trace
from fl_engine.fleet.uniformity import Times
from fl_engine.rounds.server import ServerSite
from fl_engine.rounds.terms import EvaluateConfig, RoundsConfig
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
    """Seed of a private aggregation's noise and selection; None: the site's seed."""
    codecs: Codecs = Codecs()
    """The codecs of assignments whose level has no codecs of its own."""
    trace: Trace | None = None
    """Availability and speed of the devices over time; None: all are online, each with its own speed and bandwidth."""
    wait_s: float = 86_400.0
    """The longest that a round waits for a client to come online, in seconds of the simulated clock."""
    evaluation: EvaluateConfig | None = None
    """How clients evaluate the global model; None: they do not."""

    @cached_property
    def server(self) -> ServerSite:
        return ServerSite(self.site, self.devices[0])

    def begins(self, round: int, clock: float) -> float:
        """Return when the round begins on the simulated clock, if the one before ends at `clock`: as soon as a client
        is online. Raises ConfigError if that takes longer than `wait_s`."""
        if self.trace is None:
            return clock
        begin = clock
        while not self.trace.now(begin).online.any():
            begin = self.trace.arrives(begin)
            if begin - clock > self.wait_s:
                when = f"the next comes after {begin - clock:g} s" if begin < math.inf else "nobody comes any more"
                raise ConfigError(
                    f"round {round + 1}: no client is online {clock:g} s after the run's begin on the simulated "
                    f"clock, and {when}; fleet.wait_s = {self.wait_s:g} is the longest to wait. Raise it, or give "
                    "fleet.trace more clients or a repeat_s; what was committed stays"
                )
        return begin

    def context(self, round: int, clock: float, busy: Collection[int] = ()) -> RoundContext:
        """Return what the round is planned from. `clock`: when it begins. `busy`: clients with pending updates."""
        return RoundContext(
            round=round,
            seed=self.site.seed if self.noise_key is None else privacy.plan_seed(self.noise_key),
            fleet=self.site.fleet,
            available=self.available(clock, busy),
            pool=self.site.pool,
            clock=clock,
            over_provision=self.terms.over_provision,
            slots=None if self.terms.mode == "synchronous" else self.at_once - len(busy),
            samples=self._samples,
            draws=self._draws,
        )

    def available(self, clock: float, busy: Collection[int] = ()) -> tuple[Device, ...]:
        """Return the devices that are online then, in client order."""
        fleet = self.site.fleet
        online = fleet if self.trace is None else trace.online(fleet, self.trace.now(clock))
        return tuple(device for device in online if device.client not in busy) if busy else online

    @cached_property
    def at_once(self) -> int:
        """How many clients train at the same time in asynchronous rounds."""
        fraction: float = self.algorithm.training.fraction  # type: ignore[attr-defined]
        return round_size(fraction, len(self.site.fleet))

    def fault(self, order: WorkOrder) -> Fault | None:
        """Return the injected fault of the assignment, if any. Evaluations have none."""
        if order.evaluates:
            return None
        return faults.befalls(self._faults, self.site.seed, order.round, order.client, len(self.site.fleet))

    def times(self, update: ClientUpdate, order: WorkOrder, begin: float) -> Times | None:
        """Return what the assignment took on the simulated clock, transfers included, in a round that began at `begin`,
        and the client's own measurement; None if the client went offline before it was done."""
        took = self._took(update, order, begin)
        return None if took is None else Times(took.total, *took, update.metrics.get("seconds", 0.0))

    def _took(self, update: ClientUpdate, order: WorkOrder, begin: float) -> Took | None:
        slow, macs = faults.slowness(self.fault(order)), update.metrics.get("macs", 0.0)
        down = coding.bytes_sent(order)
        up = tensor_bytes(update.travels) + (tensor_bytes(update.state) if update.state else 0)
        if self.trace is not None:
            return trace.took(self.trace, order.client, begin, slow * down, slow * macs, slow * up)
        found = simulated_seconds(self.site.fleet[order.client], macs, down + up)
        return Took(slow * found.compute, slow * found.communication)

    def without_updates(self, plan: RoundPlan, dropped: Iterable[int], begin: float) -> float | None:
        """Return the simulated seconds of a round without updates and without a deadline: until the last client that
        dropped out has gone offline, or without assignments until a client comes online. None without a trace."""
        if self.trace is None:
            return None
        ends = [self.trace.leaves(client, begin) for client in dropped] if plan.orders else [self.trace.arrives(begin)]
        return max((end - begin for end in ends if end < math.inf), default=0.0)

    @property
    def alone(self) -> bool:
        """Whether each client trains by itself, and not side by side with others in lanes."""
        return self.site.numerics.strategy != "batched" or self.site.numerics.lanes == 1

    @cached_property
    def _samples(self) -> tuple[int, ...]:
        return tuple(self.site.rules.samples)

    @cached_property
    def _draws(self) -> tuple[int, ...]:
        """By the algorithm's `training`, if it has epochs and batches; else one epoch of all samples."""
        training = getattr(self.algorithm, "training", None)
        if not isinstance(training, Epochs):
            return self._samples
        return tuple(costs.draws(training, n) for n in self._samples)

    @cached_property
    def client_state(self) -> Header:
        """What each client keeps, as the server stores it."""
        return header(kept_by_clients(self.algorithm, self.site.family, self.site.pool))

    @cached_property
    def _faults(self) -> faults.Faults:
        return faults.parse(self.terms.faults)
