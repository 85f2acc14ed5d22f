"""Defines the objects and options that all rounds of a run share."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from fl_engine.aggregation import privacy
from fl_engine.core import costs
from fl_engine.core.clients import header, kept_by_clients
from fl_engine.core.contracts import Algorithm
from fl_engine.core.costs import Epochs
from fl_engine.core.errors import ConfigError
from fl_engine.core.types import Assignment, ClientResult, ClientUpdate, Codecs, Device, Header, RoundContext
from fl_engine.exchange import coding
from fl_engine.exchange.client import Site
from fl_engine.fleet import trace
from fl_engine.fleet.devices import Took, simulated_seconds
from fl_engine.fleet.trace import Trace
from fl_engine.rounds import fault_injection
from fl_engine.rounds.fault_injection import Fault, Faults
from fl_engine.rounds.options import EvaluateConfig, RoundsConfig
from fl_engine.rounds.server import ServerSite
from fl_engine.rounds.timing import Times
from fl_engine.selection.capacity import round_size
from fl_engine.storage.store import tensor_bytes


@dataclass(frozen=True)
class Run:
    algorithm: Algorithm
    site: Site
    options: RoundsConfig
    devices: tuple[str, ...] = ("cpu",)
    """Torch devices of the server. The server trains on the first device and evaluates on all devices."""
    noise_key: bytes | None = None
    """Seed for the noise and the client selection of a private aggregation. With None, the site's seed is used."""
    codecs: Codecs = Codecs()
    """Default codecs for all levels that do not set codecs."""
    trace: Trace | None = None
    """Availability and speed of the devices over time. With None, devices are always online with constant speed."""
    wait_s: float = 86_400.0
    """Maximum simulated seconds that a round waits for a client to come online."""
    evaluation: EvaluateConfig | None = None
    """Options for the evaluation at the clients; None if clients do not evaluate."""

    @cached_property
    def server(self) -> ServerSite:
        site, parts = self.site, self.site.partition
        if self.options.until is not None:  # never train on the validation samples
            if not len(parts.proxy_test):
                message = "rounds.until needs validation samples. Increase partition.proxy"
                raise ConfigError(message, path="rounds.until")
            site = replace(site, partition=replace(parts, proxy_test=parts.proxy_test[:0]))
        return ServerSite(site, self.devices[0])

    def begins(self, round: int, clock: float) -> float:
        """Return the start of the round in simulated seconds, if the previous round ends at `clock`. A round begins as
        soon as a client is online. Raises ConfigError if no client comes online within `wait_s`."""
        if self.trace is None:
            return clock
        begin = clock
        while not self.trace.now(begin).online.any():
            begin = self.trace.arrives(begin)
            if begin - clock > self.wait_s:
                when = f"for {begin - clock:g} s" if begin < math.inf else "again"
                raise ConfigError(
                    f"fleet.trace: round {round + 1} would wait longer than fleet.wait_s = {self.wait_s:g} s, because "
                    f"no client comes online {when}. Increase the limit, or set repeat_s in the trace",
                    path="fleet.wait_s",
                )
        return begin

    def context(self, round: int, clock: float, busy: Collection[int] = ()) -> RoundContext:
        """Return the context for planning the round that begins at `clock`. Clients in `busy` have pending updates."""
        return RoundContext(
            round=round,
            seed=self.site.seed if self.noise_key is None else privacy.plan_seed(self.noise_key),
            fleet=self.site.fleet,
            available=self.available(clock, busy),
            pool=self.site.pool,
            clock=clock,
            over_provision=self.options.over_provision,
            slots=None if self.options.mode == "synchronous" else self.at_once - len(busy),
            samples=tuple(self.site.rules.samples),
            draws=self._draws,
            without=frozenset(self.options.without),
        )

    def available(self, clock: float, busy: Collection[int] = ()) -> tuple[Device, ...]:
        """Return the devices that are online at `clock` and do not belong to `busy` clients, in client order."""
        fleet = self.site.fleet
        online = fleet if self.trace is None else trace.online(fleet, self.trace.now(clock))
        return tuple(device for device in online if device.client not in busy) if busy else online

    @cached_property
    def at_once(self) -> int:
        """Number of clients that train at the same time in asynchronous rounds."""
        fraction: float = self.algorithm.training.fraction  # type: ignore[attr-defined]
        return round_size(fraction, len(self.site.fleet))

    def fault(self, assignment: Assignment) -> Fault | None:
        """Return the injected fault for the assignment, or None. Evaluations never have faults."""
        if assignment.evaluates:
            return None
        return fault_injection.fault_of(
            self.faults, self.site.seed, assignment.round, assignment.client, len(self.site.fleet)
        )

    def inject_fault(self, result: ClientResult, assignment: Assignment) -> ClientResult:
        fault, device = self.fault(assignment), self.devices[0]
        return fault_injection.inject(fault, self.algorithm, result, assignment, self.site, device)

    def times(self, update: ClientUpdate, assignment: Assignment, begin: float) -> Times | None:
        """Return the simulated times of an assignment and the measured seconds of the client. `begin` is the start of
        the round. Return None if the client went offline before the assignment was complete."""
        fault, macs = self.fault(assignment), update.metrics.get("macs", 0.0)
        slow = fault.times if fault is not None and fault.kind == "slow" else 1.0
        down = coding.bytes_sent(assignment)
        up = tensor_bytes(update.travels) + (tensor_bytes(update.state) if update.state else 0)
        if self.trace is not None:
            took = trace.took(self.trace, assignment.client, begin, slow * down, slow * macs, slow * up)
        else:
            found = simulated_seconds(self.site.fleet[assignment.client], macs, down + up)
            took = Took(slow * found.compute, slow * found.communication)
        return None if took is None else Times(took.total, *took, update.metrics.get("seconds", 0.0))

    @cached_property
    def _draws(self) -> tuple[int, ...]:
        """Number of samples that each client processes per round; one epoch for algorithms without `training`
        options."""
        training = getattr(self.algorithm, "training", None)
        if not isinstance(training, Epochs):
            return tuple(self.site.rules.samples)
        return tuple(costs.draws(training, n) for n in self.site.rules.samples)

    @cached_property
    def client_state(self) -> Header:
        """Types and shapes of the tensors in a client's state."""
        return header(kept_by_clients(self.algorithm, self.site.family, self.site.pool))

    @cached_property
    def faults(self) -> Faults:
        return fault_injection.parse(self.options.faults)
