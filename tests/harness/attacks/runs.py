"""Attacks of one client of twenty on a run's model. The engine has to refuse them, or the model has to withstand them.

Most use a tiny model, on which each client has much influence. Lies that stay below the bound use the digits."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from fl_engine.aggregation.privacy import Private
from fl_engine.algorithms import FlexFL, HeteroFL
from fl_engine.algorithms.training import Training
from fl_engine.backends import InProcess
from fl_engine.core.contracts import Algorithm
from fl_engine.core.slicing import take
from fl_engine.core.types import Assignment, ClientFailure, ClientResult, ClientUpdate, Params, RoundPlan
from fl_engine.exchange.client import Site
from fl_engine.exchange.manifest import Rejected, pack_result
from fl_engine.exchange.updates import read_update
from fl_engine.rounds import loop as rounds
from fl_engine.rounds import run as rounds_run
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.options import NORM_BOUND, RoundsConfig
from fl_engine.testing.rounds import federated
from fl_engine.testing.tiny import SEED, Memory, context_of, start_of, tiny_site
from flexfleet.pipeline.partition import initial_state, site_of
from flexfleet.pipeline.prepare import Resolved
from tests.harness.attacks.table import Attack
from tests.harness.prepared import prepare
from tests.harness.stores import MemoryStore

LOST, LOST_OF_DIGITS, LOST_AT_WORST = 0.1, 0.03, 0.2
"""Accuracy that one lying client of twenty may cost. If its lies are refused, the run only has one client less. At
worst: if its lies are as long as honest updates, and go the other way."""
Name = Literal["flexfl", "heterofl"]
Factor = Callable[["Liar", float, float], float]
ROUNDS = {0.25: 20, 0.1: 30, 0.05: 40}
"""Rounds of a run, by the share of the clients that each round asks."""


@dataclass
class Liar:
    """Turns one client's honest updates into lies. `moved`: how far the last updates moved, and in how many steps:
    those of the others, and its own lies, of which it assumes that they were accepted."""

    client: int
    factor: Factor
    """The factor by which it multiplies its honest change, from how far that moved, and in how many steps."""
    moved: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=32))
    told: int = 0

    def lie(self, update: ClientUpdate, sent: Params) -> ClientUpdate:
        far, steps = moved(update.payload, sent), update.metrics["steps"]
        factor = self.factor(self, far, steps)
        self.told += 1
        self.moved.append((abs(factor) * far, steps))
        return replace(update, payload={n: sent[n] + factor * (t - sent[n]) for n, t in update.payload.items()})


def times(factor: float, _: Liar, far: float, steps: float) -> float:
    return factor


def just_under(part: float, liar: Liar, far: float, steps: float) -> float:
    """The factor of a lie that reaches this part of the bound, as far as the liar can know it. The engine accepts lies
    of half the bound again and again. Below 0: turned around."""
    known = [*liar.moved, (far, steps)]
    rooted = statistics.median(each / math.sqrt(count) for each, count in known)
    usual = max(statistics.median(each for each, _ in known), math.sqrt(steps) * rooted)
    return 0.9 * part * NORM_BOUND * usual / max(far, 1e-12)


def moved(new: Params, sent: Params) -> float:
    total = sum(float((new[n] - sent[n]).square().sum()) for n in new)
    return math.sqrt(total / sum(t.numel() for t in new.values()))


class Hostile:
    """In-process clients, one of which lies. Its lies are checked as if they came through a store."""

    durable = False

    def __init__(self, site: Site, algorithm: Algorithm, liar: Liar | None) -> None:
        self.inner = InProcess(site)
        self.site = site
        self.rules = replace(site.rules, algorithm=algorithm)
        self.liar = liar
        self.asked: list[list[int]] = []

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[ClientResult]:
        self.asked.append([o.client for o in plan.assignments])
        found = list(self.inner.run(algorithm, plan))
        if self.liar is None:
            yield from found
            return
        for result in found:
            if isinstance(result, ClientUpdate) and result.client != self.liar.client:
                far = moved(result.payload, self._sent(plan.assignment_of[result.client], result))
                self.liar.moved.append((far, result.metrics["steps"]))
        for result in found:
            yield self._told(plan.assignment_of[result.client], result)

    def _told(self, assignment: Assignment, result: ClientResult) -> ClientResult:
        if isinstance(result, ClientFailure) or self.liar is None or result.client != self.liar.client:
            return result
        manifest, value = pack_result(self.liar.lie(result, self._sent(assignment, result)), assignment)
        assert value is not None
        try:
            return read_update(manifest, lambda _: bytes(value), assignment, self.rules)
        except Rejected as error:
            return ClientFailure(assignment.round, assignment.client, "validate", str(error))

    def _sent(self, assignment: Assignment, update: ClientUpdate) -> Params:
        return take(assignment.payload, self.site.layout, update.spec, have=assignment.spec)


@dataclass(frozen=True)
class Run:
    accuracy: float
    asked: list[list[int]]
    refused: Counter[int]
    """Number of updates that were refused because they moved too far, by client."""


@dataclass(frozen=True)
class Job:
    algorithm: Algorithm
    site: Site
    start: Any
    stop: int


Where = float | Literal["digits"]
"""The share of the clients that a round asks, with the tiny network; or the digits, as `flexfleet run` has them."""


@cache
def job(name: Name, where: Where) -> Job:
    if where == "digits":
        return _digits(name)
    kind: Any = {"flexfl": FlexFL, "heterofl": HeteroFL}[name]
    algorithm = kind(training=Training(fraction=where, epochs=2, batch_size=4, lr=0.05))
    site = tiny_site(algorithm)
    return Job(algorithm, site, start_of(algorithm, site), ROUNDS[where])


def _digits(name: Name) -> Job:
    resolved = Resolved.load(None, ("tracking.mlflow=null", f"algorithm.name={name}"))
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(resolved, Path(folder))
        site = site_of(resolved, prepared / "partition", prepared / "pool")
    state = initial_state(resolved, site)
    return Job(resolved.algorithm, site, state, 20)


def run(of: Job, liar: Liar | None) -> Run:
    """Run with the norm bound of strangers' devices; without a liar, an honest run."""
    backend, tracker, ledger = Hostile(of.site, of.algorithm, liar), Memory(), Ledger(MemoryStore())
    options = RoundsConfig(stop=of.stop, evaluate_every=of.stop, commit_every=of.stop, norm_bound=NORM_BOUND)
    rounds.federate(rounds_run.Run(of.algorithm, of.site, options), of.start, backend, ledger, tracker)
    lines = [line for row in ledger.checkpoints.rows() for line in row.clients]
    far = Counter(line["client"] for line in lines if str(line.get("failure", "")).startswith("validate: "))
    return Run(tracker.rows[of.stop]["avg"], backend.asked, far)


@cache
def honest(name: Name, where: Where) -> Run:
    return run(job(name, where), None)


def control(ruins: Iterable[tuple[Name, Where, str]]) -> None:
    """Check that honest runs learn, and that the bound refuses none of their updates. `ruins`: keys of RUINS."""
    for name, where in {(n, w) for n, w, _ in ruins}:
        found = honest(name, where)
        assert found.accuracy > 0.75 and not found.refused, f"{name}, {where}: {found}"


def ruined(name: Name, where: Where, factor: Factor, first: bool, may_cost: float) -> str | None:
    """Says what the liar achieved; None: nothing. `first`: the liar is the client that is asked first, when nothing is
    known of any client; else it is the client that is asked most often."""
    before = honest(name, where)
    often = Counter(client for asked in before.asked for client in asked).most_common(1)[0][0]
    liar = Liar(before.asked[0][0] if first else often, factor)
    after = run(job(name, where), liar)
    assert liar.told, "the liar was never asked"
    others = sum(n for client, n in after.refused.items() if client != liar.client)
    honestly = sum(client != liar.client for asked in after.asked for client in asked)
    if others > MAY_REFUSE * honestly:
        return f"{others} of {honestly} honest updates were refused for it"
    if before.accuracy - after.accuracy > may_cost:
        return f"{100 * before.accuracy:.1f} % -> {100 * after.accuracy:.1f} % by {liar.told} lies"
    return None


MAY_REFUSE = 0.02
"""Largest share of the honest updates that may be refused because the liar has changed the model."""

RUINS: dict[tuple[Name, Where, str], tuple[Factor, bool, float]] = {
    ("flexfl", 0.25, "90 times the change"): (partial(times, 90.0), False, LOST),
    ("flexfl", 0.25, "90 times, turned around"): (partial(times, -90.0), False, LOST),
    ("flexfl", 0.25, "1000 times the change"): (partial(times, 1000.0), False, LOST),
    ("flexfl", 0.25, "90 times, in the first round"): (partial(times, 90.0), True, LOST),
    ("heterofl", 0.25, "90 times the change"): (partial(times, 90.0), False, LOST),
    ("flexfl", 0.1, "90 times, in rounds of two"): (partial(times, 90.0), False, LOST),
    ("flexfl", 0.1, "90 times, in a first round of two"): (partial(times, 90.0), True, LOST),
    ("flexfl", 0.05, "90 times, in rounds of one"): (partial(times, 90.0), False, LOST),
    ("flexfl", 0.05, "90 times, in a first round of one"): (partial(times, 90.0), True, LOST),
    ("flexfl", 0.25, "no change at all, to lower the bound"): (partial(times, 0.0), False, LOST),
    ("flexfl", "digits", "90 times the change of digits"): (partial(times, 90.0), False, LOST_OF_DIGITS),
    ("flexfl", "digits", "just under the bound"): (partial(just_under, 1.0), False, LOST_OF_DIGITS),
    ("flexfl", "digits", "just under the bound, turned around"): (partial(just_under, -1.0), False, LOST_OF_DIGITS),
    ("flexfl", "digits", "all that is taken"): (partial(just_under, 0.5), False, LOST_OF_DIGITS),
    ("flexfl", "digits", "all that is taken, turned around"): (partial(just_under, -0.5), False, LOST_AT_WORST),
    ("heterofl", "digits", "90 times the change of digits"): (partial(times, 90.0), False, LOST_OF_DIGITS),
    ("heterofl", "digits", "just under the bound"): (partial(just_under, 1.0), False, LOST_OF_DIGITS),
    ("heterofl", "digits", "just under the bound, turned around"): (partial(just_under, -1.0), False, LOST_OF_DIGITS),
    ("heterofl", "digits", "all that is taken"): (partial(just_under, 0.5), False, LOST_OF_DIGITS),
    ("heterofl", "digits", "all that is taken, turned around"): (partial(just_under, -0.5), False, LOST_AT_WORST),
}
"""By algorithm, model and lie: its factor, whether the liar is the client that is asked first, and the accuracy that it
may cost."""


def cohort_from_the_seed() -> str | None:
    """Every client knows the run's seed. Who took part in a private round must not follow from it."""
    algorithm = FlexFL(training=Training(fraction=0.25, epochs=1, batch_size=4), aggregation=Private())
    site = tiny_site(algorithm)
    backend, start = Hostile(site, algorithm, None), start_of(algorithm, site)
    options = RoundsConfig(stop=3, evaluate_every=3, norm_bound=None)
    run = rounds_run.Run(algorithm, site, options, noise_key=bytes(range(32)))
    federated(run, MemoryStore(), backend)
    guessed = [
        sorted(o.client for o in algorithm.plan(start, context_of(site, round, SEED)).assignments) for round in range(3)
    ]
    same = sum(sorted(asked) == guess for asked, guess in zip(backend.asked, guessed, strict=True))
    return f"who took part in {same} of 3 rounds follows from the run's seed" if same else None


ATTACKS = (
    *(
        Attack(f"{name}, {said}", "to ruin the model, one of twenty", "engine", partial(ruined, name, where, *how))
        for (name, where, said), how in RUINS.items()
    ),
    Attack("cohort from the seed", "to know who took part", "engine", cohort_from_the_seed),
)
