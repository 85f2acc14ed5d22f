"""The loop: plan -> run -> merge -> evaluate -> commit -> track; and how it starts again after a kill.

Same seed, same global model, bit for bit, whether or not the run was killed: every round is a function of the
committed state, the round number and the seed, and what a kill left unfinished is computed again.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from statistics import median
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from fl_engine.aggregation import privacy
from fl_engine.aggregation.spool import Spool
from fl_engine.core.errors import ConfigError, EnvironmentFailure, IntegrityError, Stopped, brief
from fl_engine.core.slicing import index_of
from fl_engine.core.state import pack, unpack
from fl_engine.core.types import (
    Algorithm,
    Backend,
    ClientFailure,
    ClientUpdate,
    Data,
    Device,
    ModelFamily,
    Outcome,
    Params,
    Pool,
    RoundPlan,
    SubmodelSpec,
    Tracker,
    WorkOrder,
)
from fl_engine.exchange import acceptance
from fl_engine.exchange.acceptance import Arrival, History, Moved
from fl_engine.exchange.updates import Code, movement, size_of
from fl_engine.fleet import faults
from fl_engine.fleet.devices import simulated_seconds
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.store import tensor_bytes
from fl_engine.training.evaluation import average_accuracy, evaluate_pool, published
from fl_engine.training.memory import resident_peak, restart_peak

log = logging.getLogger("flexfleet")

AUTO_COMMIT_S = 2.0

HISTORY = "rounds/moved"
"""In a commit's JSON, beside the fields of the algorithm's state, none of which can have such a name."""
HISTORIES = TypeAdapter(History)


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` needs besides the state."""

    family: ModelFamily
    pool: Pool
    data: Data
    devices: tuple[str, ...] = ("cpu",)
    fleet: tuple[Device, ...] = ()
    """For the simulated clock; empty: none."""

    def seconds(self, update: ClientUpdate, order: WorkOrder, slowness: float = 1.0) -> float:
        """What the order took on the simulated clock, with the transfer of its weights there and back."""
        if not self.fleet:
            return 0.0
        moved = tensor_bytes(order.payload) + tensor_bytes(update.payload)
        return slowness * simulated_seconds(self.fleet[order.client], update.metrics.get("macs", 0.0), moved)


def federate(
    algorithm: Algorithm,
    initial: Any,
    backend: Backend,
    ledger: Ledger,
    tracker: Tracker,
    config: RoundsConfig,
    seed: int,
    evaluation: Evaluation,
    should_stop: Callable[[], bool] = lambda: False,
    discard_damaged: bool = False,
    noise_key: bytes | None = None,
) -> Any:
    """Runs the rounds that are not committed yet, up to `config.stop`; returns the final state.

    `initial` is the state before round 0. A private aggregation's noise, and who takes part, come from `noise_key`
    instead of `seed`. Raises Stopped (after committing what is finished) when `should_stop` says so, IntegrityError
    where the ledger is damaged and `discard_damaged` does not allow to go back, and EnvironmentFailure where the store
    or the backend do not answer.
    """
    with _told_how_to_go_on(ledger):
        state, history, first = _resume(initial, ledger, config, discard_damaged)
        if first > config.stop:
            raise ConfigError(f"rounds.stop = {config.stop}, but {first} rounds are committed: a run cannot go back")
        tracker.metrics([(row.round + 1, row.metrics) for row in ledger.checkpoints.rows()])
        pending: list[Row] = []
        last_commit = time.monotonic()

        def commit() -> None:
            nonlocal last_commit
            if pending:
                tensors, rest = pack(state)
                if config.norm_bound is not None:
                    rest[HISTORY] = HISTORIES.dump_python(history, mode="json")
                ledger.checkpoints.commit(pending[-1].round, tensors, rest, pending)
                ledger.checkpoints.check_lease()  # a successor tells the tracker what the ledger has
                tracker.metrics([(row.round + 1, row.metrics) for row in pending])
                pending.clear()
            last_commit = time.monotonic()

        held, before = restart_peak()
        for round in range(first, config.stop):
            try:
                state, history, row = _round(
                    algorithm, state, history, round, seed, backend, ledger, config, evaluation, should_stop, noise_key
                )
            except Stopped:
                commit()
                raise
            peak = resident_peak()
            row.metrics["peak_mb"] = max(peak, before) / 1e6
            row.metrics["peak_mb_rounds"] = (peak - held) / 1e6  # above what libraries, data and pre-training hold
            pending.append(row)
            if _due(config, backend, round, last_commit):
                commit()
        _tell_cost(ledger.checkpoints.rows())
    return state


@contextmanager
def _told_how_to_go_on(ledger: Ledger) -> Iterator[None]:
    try:
        yield
    except IntegrityError:
        ledger.checkpoints.check_lease()  # what is missing may have been tidied away by the one that has taken over
        raise
    except EnvironmentFailure as error:
        raise type(error)(f"{error}. What was committed stays: mend the cause, then go on with --resume") from error


def _tell_cost(rows: Sequence[Row]) -> None:
    """Where a backend tells phases apart, what they took."""
    measured = rows[-1].metrics if rows else {}
    names = [name for name in measured if name.startswith("seconds_") and name != "seconds_simulated"]
    if any("/" in name for name in names):
        seconds = {name: median(row.metrics[name] for row in rows if name in row.metrics) for name in names}
        said = ", ".join(f"{name.removeprefix('seconds_')} {s:.2f}" for name, s in seconds.items())
        log.info("median seconds of a round: %s", said)


def _resume(initial: Any, ledger: Ledger, config: RoundsConfig, discard_damaged: bool) -> tuple[Any, History, int]:
    """The state to go on from, what is remembered of earlier updates, and the round to compute next."""
    commits = ledger.checkpoints.commits()
    last = commits[-1] if commits else None
    if discard_damaged:
        last = ledger.checkpoints.last_good()
        if commits and last != commits[-1]:
            log.warning("going on after round %d, the last good commit", 0 if last is None else last + 1)
        ledger.checkpoints.discard_after(last)
    ledger.checkpoints.rows()
    tensors, rest = ({}, {}) if last is None else ledger.checkpoints.read(last)
    state = initial if last is None else unpack(initial, tensors, rest)
    history = _history(rest)
    ledger.checkpoints.tidy()  # after everything was seen to be whole: without leave, damage stays as it is
    if last is None:
        return state, History(), 0
    log.info("resuming after round %d", last + 1)
    if config.norm_bound is not None and HISTORY not in rest:
        log.info("an older version's commit, which does not say how far updates moved: rounds.norm_bound starts anew")
    return state, history, last + 1


def _history(rest: Mapping[str, Any]) -> History:
    try:
        return HISTORIES.validate_python(rest.get(HISTORY, History()))
    except ValidationError as error:
        said = f"stored state: {HISTORY!r} is no list of how far updates moved: {brief(error)}"
        raise IntegrityError(said) from error


def _due(config: RoundsConfig, backend: Backend, round: int, last_commit: float) -> bool:
    if round + 1 == config.stop or (config.keep_every and (round + 1) % config.keep_every == 0):
        return True
    if config.commit_every == "auto":
        return config.keep_updates or backend.durable or time.monotonic() - last_commit >= AUTO_COMMIT_S
    return (round + 1) % config.commit_every == 0


def _round(
    algorithm: Algorithm,
    state: Any,
    history: History,
    round: int,
    seed: int,
    backend: Backend,
    ledger: Ledger,
    config: RoundsConfig,
    evaluation: Evaluation,
    should_stop: Callable[[], bool],
    noise_key: bytes | None,
) -> tuple[Any, History, Row]:
    started = time.monotonic()
    drawn_from = seed if noise_key is None else privacy.plan_seed(noise_key)
    plan = replace(algorithm.plan(state, round, drawn_from), noise_seed=privacy.noise_seed(noise_key, round))
    planned = time.monotonic()
    watch = _Watch(plan, evaluation, config, seed, should_stop, history)
    if config.keep_updates or backend.durable:
        outcomes = _through_ledger(algorithm, plan, backend, ledger, watch)
    else:
        outcomes = _in_memory(algorithm, plan, backend, watch)
    state = algorithm.merge(state, plan, watch.merging(outcomes))
    merged = time.monotonic()
    metrics = watch.metrics()
    metrics["seconds_plan"] = planned - started
    metrics["seconds_train"] = watch.waited
    metrics |= {f"seconds_train/{phase}": seconds for phase, seconds in backend.phases.items()}
    metrics["seconds_merge"] = merged - planned - watch.waited
    if (round + 1) % config.evaluate_every == 0 or round + 1 == config.stop:
        e = evaluation
        scores = evaluate_pool(e.family, published(state), e.pool, e.data, e.devices)
        metrics["avg"] = average_accuracy(scores)
        metrics["full"] = scores[e.pool[-1].name].accuracy
        for name, score in scores.items():
            metrics[f"accuracy/{name}"] = score.accuracy
            metrics[f"loss/{name}"] = score.loss
        metrics["seconds_evaluate"] = time.monotonic() - merged
    spent = privacy.epsilon(algorithm, evaluation.fleet, evaluation.pool, round + 1)
    if spent is not None:
        metrics["epsilon"] = spent
    metrics["seconds_round"] = time.monotonic() - started
    return state, watch.remembered(), Row(round=round, metrics=metrics, clients=tuple(watch.clients))


def _through_ledger(
    algorithm: Algorithm, plan: RoundPlan, backend: Backend, ledger: Ledger, watch: _Watch
) -> Iterator[Outcome]:
    """Stores outcomes as they arrive, closes the round, then reads them back one at a time, in client order."""
    ledger.mailbox.open_round(plan)
    closed = ledger.mailbox.closed(plan)
    if closed is None:
        done, adopted = set[int](), 0
        for outcome in ledger.mailbox.finished(plan):
            watch.arrived(outcome)
            done.add(outcome.client)
            adopted += isinstance(outcome, ClientUpdate)
        if done:
            log.info("round %d: adopting %d updates of %d", plan.round + 1, len(done), len(plan.orders))
        rest = replace(plan, orders=tuple(o for o in plan.orders if o.client not in done), adopted=adopted)
        for outcome in watch.arriving(backend.run(algorithm, rest)):
            if isinstance(outcome, ClientFailure) or not backend.durable:
                ledger.mailbox.put_outcome(plan, outcome)
        closed = ledger.mailbox.close(plan, sorted(plan.order_of), watch.refused(), watch.moved)
    watch.moved = closed.moved
    for client in sorted(closed.accepted):
        yield ledger.mailbox.accepted(plan, client, closed)


def _in_memory(algorithm: Algorithm, plan: RoundPlan, backend: Backend, watch: _Watch) -> Iterator[Outcome]:
    """Holds outcomes until all are there, then gives them in client order, whatever order they came in: floating-point
    sums depend on it."""
    held, places = Spool(), {}
    outcomes: dict[int, Outcome] = {}
    for outcome in watch.arriving(backend.run(algorithm, plan)):
        if isinstance(outcome, ClientUpdate):
            places[outcome.client] = held.put(outcome.payload)
            outcome = replace(outcome, payload={})
        outcomes[outcome.client] = outcome
    refused = watch.refused()
    for client in sorted(outcomes):
        found = refused.get(client, outcomes[client])
        yield replace(found, payload=held.get(places[client])) if isinstance(found, ClientUpdate) else found


@dataclass
class _Watch:
    """Counts what passes by."""

    plan: RoundPlan
    evaluation: Evaluation
    config: RoundsConfig
    seed: int
    should_stop: Callable[[], bool]
    history: History = field(default_factory=History)
    """How far updates of earlier rounds moved."""
    moved: dict[int, Moved] = field(default_factory=dict)
    """How far this round's did, by client, where terms ask for it."""
    clients: list[dict[str, Any]] = field(default_factory=list)
    sent: int = 0
    back: int = 0
    trained: int = 0
    pruned: int = 0
    waited: float = 0.0
    """Seconds until the backend had outcomes."""
    losses: list[tuple[float, int]] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    """Updates that were not to be trusted, by code (`updates`)."""
    failed: Counter[str] = field(default_factory=Counter)
    """Clients that brought nothing, or nothing that was taken, by stage."""
    simulated: list[float] = field(default_factory=list)
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    """Updates, by client."""

    @cached_property
    def _faults(self) -> faults.Faults:
        return faults.parse(self.config.faults)

    def _seconds(self, update: ClientUpdate) -> float:
        """On the simulated clock."""
        order, clients = self.plan.order_of[update.client], len(self.evaluation.fleet)
        fault = faults.befalls(self._faults, self.seed, order.round, order.client, clients)
        return self.evaluation.seconds(update, order, faults.slowness(fault))

    def arrived(self, outcome: Outcome) -> None:
        """Takes down of an update what decides whether it is taken."""
        if isinstance(outcome, ClientUpdate) and not acceptance.unconditional(self.config):
            moved = movement(outcome, self.plan.order_of[outcome.client], self.evaluation.family.layout())
            self.moved[outcome.client] = moved
            self.arrivals[outcome.client] = Arrival(moved, self._seconds(outcome))

    @cached_property
    def _size(self) -> Moved:
        """Of what was sent, while too little is remembered."""
        if self.plan.orders and self.history.count < acceptance.FIRST_ONES:
            return size_of(self.plan.orders[0].payload)
        return acceptance.NOTHING

    def refused(self) -> dict[int, ClientFailure]:
        asked = len(self.plan.orders)
        return acceptance.refused(self.plan.round, asked, self.arrivals, self.config, self.history, self._size)

    def remembered(self) -> History:
        return acceptance.remembered(self.history, self.moved, self._size)

    def arriving(self, outcomes: Iterator[Outcome]) -> Iterator[Outcome]:
        while True:
            asked = time.monotonic()
            outcome = next(outcomes, None)
            self.waited += time.monotonic() - asked
            if outcome is None:
                return
            self.arrived(outcome)
            yield outcome
            if self.should_stop():
                raise Stopped("stopped on request: what was committed stays, resume with --resume")

    def merging(self, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
        pool, layout = self.evaluation.pool, self.evaluation.family.layout()
        sizes: dict[tuple[object, ...], int] = {}

        def size(spec: SubmodelSpec, payload: Params) -> int:
            held = (spec, *payload)
            if held not in sizes:
                sizes[held] = tensor_bytes(payload)
            return sizes[held]

        @cache
        def member(spec: SubmodelSpec) -> int | None:
            return index_of(pool, layout, spec)

        for outcome in outcomes:
            order = self.plan.order_of[outcome.client]
            down = size(order.spec, order.payload)
            self.sent += down
            sent = str(order.hints.get("model", ""))
            line: dict[str, Any] = {"client": outcome.client, "sent": sent}
            if isinstance(outcome, ClientUpdate):
                up = size(outcome.spec, outcome.payload)
                trained = member(outcome.spec)
                whole = trained == member(order.spec)
                self.back += up
                self.trained += 1
                self.pruned += not whole
                self.losses.append((outcome.metrics["loss"], outcome.num_examples))
                line |= {"trained": sent if trained is None else pool[trained].name, "examples": outcome.num_examples}
                line |= outcome.metrics
                if self.evaluation.fleet:
                    known = self.arrivals.get(outcome.client)
                    line["seconds_simulated"] = self._seconds(outcome) if known is None else known.seconds
                    self.simulated.append(line["seconds_simulated"])
            else:
                where = f"round {outcome.round + 1}, client {outcome.client}"
                log.warning("%s: nothing to merge: %s: %s", where, outcome.stage, outcome.reason)
                line |= {"failure": f"{outcome.stage}: {outcome.reason}"}
                self.failed[outcome.stage] += 1
                if outcome.stage == "validate" and (code := outcome.reason.partition(":")[0]) in get_args(Code):
                    self.rejected[code] += 1
            self.clients.append(line)
            yield outcome

    def metrics(self) -> dict[str, float]:
        """Bytes count 4 per parameter of what is sent and brought back; waste is the share that was sent in vain
        (AdaptiveFL Sec. 4.1): 1 - sum size(back) / sum size(sent). A simulated round ends with the slowest client that
        it takes, or at its deadline where one has not come by then; another that failed is not waited for."""
        out = {
            "bytes_down": float(self.sent),
            "bytes_up": float(self.back),
            "waste": 1 - self.back / self.sent if self.sent else 0.0,
            "clients_trained": float(self.trained),
            "clients_pruned": float(self.pruned),
            "clients_failed": float(len(self.clients) - self.trained),
        }
        out |= {f"rejected/{code}": float(count) for code, count in sorted(self.rejected.items())}
        names = {"drop": "clients_dropped", "straggle": "clients_late"}
        out |= {name: float(self.failed[stage]) for stage, name in names.items() if self.failed[stage]}
        if self.failed["quorum"]:
            out["carried_forward"] = 1.0
        deadline_s = self.config.deadline_s
        if (
            deadline_s is not None
            and self.evaluation.fleet
            and self.trained < acceptance.wanted(self.config, len(self.clients))
        ):
            out["seconds_simulated"] = deadline_s
        elif self.simulated:
            out["seconds_simulated"] = max(self.simulated)
        if self.losses:
            out["train_loss"] = sum(loss * n for loss, n in self.losses) / sum(n for _, n in self.losses)
        return out
