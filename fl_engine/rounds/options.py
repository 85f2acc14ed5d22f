"""Options for the rounds: the number of rounds, commits, and rules for merging."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, field_validator

from fl_engine.core.fields import Count, Fraction, Moves, NotNegative, Positive, Section
from fl_engine.rounds import fault_injection

NORM_BOUND = 5.0
"""Value for `rounds.norm_bound=auto` if other people own the clients' devices."""


SCORE = "validation/score"
"""Metric of a round for `rounds.until`. Higher values are better."""


class Until(Section):
    metric: Literal["avg", "full"] = "avg"
    """Metric on the validation samples: the mean over the levels (avg) or the full model (full)."""
    patience: Count | None = None
    """Stop after this number of evaluated rounds without a better value; null: no limit."""
    target: float | None = None
    """Stop as soon as the value is reached; null: no target."""
    simulated_s: Positive | None = None
    """As `rounds.stop_simulated_s`."""


class RoundsConfig(Section):
    stop: Annotated[Count, Moves.LENGTH] = 40
    """Number of rounds. Increase the number to continue a finished run."""
    stop_simulated_s: Annotated[Positive | None, Moves.LENGTH] = None
    """Stop after the first round that ends later than this number of simulated seconds; null: no limit."""
    until: Annotated[Until | None, Moves.LENGTH] = None
    """Early stop on validation samples of the proxy, e.g. {metric: avg, patience: 10}; also keeps the best model."""
    mode: Literal["synchronous", "buffered"] = "synchronous"
    """synchronous: a round waits for all selected clients. buffered (FedBuff): a fraction of all clients
    (training.fraction) is always training, and a round merges the first `buffer` updates on the simulated clock."""
    buffer: Count | None = None
    """Number of updates that a buffered round merges; null: the number of clients that are training."""
    staleness: NotNegative = 0.5
    """Weight of a buffered update that is s merges old: (1 + s)^-staleness (FedBuff Sec. 4: 0.5)."""
    evaluate_every: Count = 1
    """Evaluate after every n-th round and after the last round."""
    commit_every: Annotated[Literal["auto"] | Count, Moves.EXECUTION] = "auto"
    """Commit every n-th round; auto: every round if updates are stored, otherwise every two seconds."""
    keep_every: Annotated[Count | None, Moves.EXECUTION] = None
    """Keep the state of every n-th round; null: keep only the states of the last two commits."""
    keep_updates: Annotated[bool, Moves.EXECUTION] = False
    """Store each client's update on arrival, so that finished updates survive if the run is killed during a round."""
    norm_bound: Literal["auto"] | Positive | None = "auto"
    """Reject an update that changes the weights more than this multiple of the median change
    (docs/guides/bad-clients.md). null: no limit. auto: 5 if other people own the clients' devices, otherwise null."""
    samples_bound: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Limit the sample count of an update to this multiple of the round's median count; null: no limit."""
    over_provision: Annotated[float, Field(ge=1)] = 1.0
    """Multiply the number of selected clients by this factor, and merge only the first results."""
    deadline_s: Positive | None = None
    """Reject updates that take longer than this number of simulated seconds; null: wait for all updates."""
    quorum: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of the required updates below which a round merges nothing, so the model does not change."""
    without: tuple[NonNegativeInt, ...] = ()
    """Clients (by number) that never train and never evaluate; their places go to other clients."""
    faults: str | None = None
    """Simulated dropouts, stragglers and Byzantine clients, each with a fraction of all assignments, for example
    drop=0.2,slow=0.1x5,nan=0.02,scale=0.02x100,flip=0.02,corrupt=0.01,uphill=0.02,backdoor=0.02; null: no faults."""

    @property
    def bound(self) -> float | None:
        """Value of `norm_bound`; None for no limit. The caller must replace `auto` first."""
        return None if self.norm_bound == "auto" else self.norm_bound

    @property
    def simulated_limit(self) -> float | None:
        """Simulated seconds after which the run ends; None for no limit."""
        limits = [self.stop_simulated_s, self.until.simulated_s if self.until else None]
        return min((each for each in limits if each is not None), default=None)

    def over(self, rounds: int, clock: float) -> bool:
        """Return True if the run ends after this number of rounds at the latest, when the simulated clock is at `clock`
        seconds."""
        return rounds >= self.stop or (self.simulated_limit is not None and clock >= self.simulated_limit)

    def end(self, measured: Iterable[Mapping[str, float]]) -> int | None:
        """Return the number of rounds after which the run ends; None if the run continues. `measured` contains the
        metrics of each round, starting with the first round."""
        course = Course(self)
        return next((course.rounds for metrics in measured if course.add(metrics)), None)

    @field_validator("faults")
    @classmethod
    def _faults(cls, value: str | None) -> str | None:
        fault_injection.parse(value)
        return value


class Course:
    """Follows the metrics of a run's rounds, to find the best round and the end of the run."""

    def __init__(self, options: RoundsConfig, measured: Iterable[Mapping[str, float]] = ()) -> None:
        self.options, self.rounds, self.clock = options, 0, 0.0
        self.best: int | None = None
        """Round, from 0, with the best score; None without scores."""
        self._score, self._waited = -math.inf, 0
        for metrics in measured:
            self.add(metrics)

    def add(self, metrics: Mapping[str, float]) -> bool:
        """Add the metrics of the next round. Return True if the run ends after this round."""
        self.rounds += 1
        self.clock += metrics.get("seconds_simulated", 0.0)
        until, score = self.options.until, metrics.get(SCORE)
        ends = self.options.over(self.rounds, self.clock)
        if until is None or score is None:
            return ends
        self._waited += 1
        if score > self._score:
            self.best, self._score, self._waited = self.rounds - 1, score, 0
        value = metrics[f"validation/{until.metric}"]
        sign = 1 if score == value else -1  # the score of a metric that is better when lower is negative
        reached = until.target is not None and score >= sign * until.target
        return ends or reached or (until.patience is not None and self._waited >= until.patience)


class EvaluateConfig(Section):
    on: Literal["server", "clients"] = "server"
    """clients: clients also evaluate their models on held-out samples (docs/guides/partitions.md)."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Fraction of each client's samples that on=clients holds out from training."""
    share: Fraction = 1.0
    """Fraction of all clients that evaluate with on=clients, selected anew for each evaluation."""
