"""The terms of the rounds: how many, what is committed, and which answers count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator

from fl_engine.core.errors import ConfigError
from fl_engine.core.fields import Count, Fraction, Moves, NotNegative, Positive, Section
from fl_engine.fleet import faults

NORM_BOUND = 5.0
"""`rounds.norm_bound` if it is `auto` and clients are devices of other people."""


class RoundsConfig(Section):
    stop: Annotated[Count, Moves.LENGTH] = 40
    """Number of rounds; may be raised to continue a finished run."""
    stop_simulated_s: Annotated[Positive | None, Moves.LENGTH] = None
    """End after the first round that ends after so many simulated seconds, if that is before `stop`; null: no limit."""
    mode: Literal["synchronous", "buffered"] = "synchronous"
    """synchronous: a round waits for its clients. buffered (FedBuff): training.fraction of all clients train at any
    time, and a round merges the first `buffer` updates by the simulated clock."""
    buffer: Count | None = None
    """With buffered, the number of updates that are merged at a time; null: those of all clients that train."""
    staleness: NotNegative = 0.5
    """With buffered, an update that started s merges ago has the weight (1 + s)^-staleness (FedBuff Sec. 4: 0.5)."""
    evaluate_every: Count = 1
    """Rounds between two evaluations; the last round is always evaluated."""
    commit_every: Annotated[Literal["auto"] | Count, Moves.EXECUTION] = "auto"
    """Rounds between two commits; auto: every round with stored updates, else at most every two seconds."""
    keep_every: Annotated[Count | None, Moves.EXECUTION] = None
    """Keep the state of every n-th round; null: only the last two commits."""
    keep_updates: Annotated[bool, Moves.EXECUTION] = False
    """Store each client's update on arrival, so that a kill within a round loses no finished client."""
    norm_bound: Literal["auto"] | Positive | None = "auto"
    """Refuse an update that moved more than this many times as far as the updates before it
    (docs/guides/bad-clients.md); null: refuse none; auto: 5 if other people own the clients' devices, else null."""
    samples_bound: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """An update counts for at most this many times the median sample count of its round; null: no limit."""
    over_provision: Annotated[float, Field(ge=1)] = 1.0
    """Ask this many times as many clients as training.fraction says, and merge the first results."""
    deadline_s: Positive | None = None
    """Simulated seconds after which an update comes too late; null: wait for all."""
    quorum: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Least share of the wanted updates that a merge needs; with fewer, the model stays unchanged."""
    faults: str | None = None
    """Simulated dropouts, stragglers and Byzantine clients, each with its share of all assignments, e.g.
    drop=0.2,slow=0.1x5,nan=0.02,scale=0.02x100,flip=0.02,corrupt=0.01; null: none."""

    @property
    def bound(self) -> float | None:
        """`norm_bound` as a number; None if it refuses no update. Whoever knows the backend replaces `auto` before."""
        return None if self.norm_bound == "auto" else self.norm_bound

    def over(self, rounds: int, clock: float) -> bool:
        """Whether the run ends with this many rounds, if the simulated clock then stands at `clock` seconds."""
        return rounds >= self.stop or (self.stop_simulated_s is not None and clock >= self.stop_simulated_s)

    def end(self, measured: Iterable[Mapping[str, float]]) -> int | None:
        """After how many rounds the run ends; `measured`: by round, from the first, what was measured. None: not within
        these rounds. The clock is summed up as the rounds do it, so that both have the same bits."""
        clock = 0.0
        for rounds, metrics in enumerate(measured, 1):
            clock += metrics.get("seconds_simulated", 0.0)
            if self.over(rounds, clock):
                return rounds
        return None

    @field_validator("faults")
    @classmethod
    def _faults(cls, value: str | None) -> str | None:
        try:
            faults.parse(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return value


class EvaluateConfig(Section):
    on: Literal["server", "clients"] = "server"
    """clients: clients also evaluate the global model, on samples that they hold out (docs/guides/partitions.md)."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """With clients, the share of its samples that each client holds out from training."""
    share: Fraction = 1.0
    """With clients, the share of all clients that evaluate, drawn anew each time."""
