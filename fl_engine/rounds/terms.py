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
    """Rounds in all; may be raised to go on with a finished run."""
    stop_simulated_s: Annotated[Positive | None, Moves.LENGTH] = None
    """End earlier than `stop`, after the first round at whose end so many seconds have passed on the simulated clock;
    may be raised to go on with a finished run; null: `stop` alone counts."""
    mode: Literal["synchronous", "buffered"] = "synchronous"
    """synchronous: a round waits for all its clients; buffered (FedBuff): training.fraction of all clients are at work,
    and a round merges the first `buffer` updates by the simulated clock."""
    buffer: Count | None = None
    """With `buffered`, how many updates are merged at a time; null: those of all clients that are at work, which is the
    synchronous run."""
    staleness: NotNegative = 0.5
    """With `buffered`, an update whose client was sent the weights of s merges ago counts (1 + s)^-staleness (FedBuff
    Sec. 4; 0.5 in its experiments)."""
    evaluate_every: Count = 1
    """Rounds between two evaluations; the last round is always evaluated."""
    commit_every: Annotated[Literal["auto"] | Count, Moves.EXECUTION] = "auto"
    """Rounds between two commits; auto: one after two seconds at the earliest, but one after every round where updates
    are stored (`keep_updates`, or by the backend)."""
    keep_every: Annotated[Count | None, Moves.EXECUTION] = None
    """Keep the state of every n-th round; null: only the last two commits."""
    keep_updates: Annotated[bool, Moves.EXECUTION] = False
    """Store each client's update as it arrives: a kill inside a long round then loses only clients in flight."""
    norm_bound: Literal["auto"] | Positive | None = "auto"
    """Refuse an update whose weights or running statistics moved more than this many times as far as usual. Usual is
    what updates with as many steps moved, in this round and the 128 updates before it. Also refuse an update that
    moved more than half of that limit, if the client's last four, this one included, did so on average. null: refuse
    none. auto: 5 if the clients are devices of other people (run.backend=agents, or kubernetes with
    kubernetes.placement=device), else null; run.json records the value. Honest clients whose data differ very much may
    move further than 5 times the usual (docs/guides/bad-clients.md)."""
    samples_bound: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """An update counts for at most this many times as many samples as the median of those that its round merges. With
    partition.rule=local a device says itself how many it holds: 10, say, keeps one that lies among 19 from being nearly
    all of the mean. null: it counts for as many as its client has, or says that it has."""
    over_provision: Annotated[float, Field(ge=1)] = 1.0
    """Ask this many times as many clients as `training.fraction` says; the round takes the first updates, as many as
    that says: first on the simulated clock, in pods by the wall clock."""
    deadline_s: Positive | None = None
    """Updates that take longer on the simulated clock come too late; null: all are waited for. (Pods also have
    `kubernetes.deadline_s`, by the clock on the wall.)"""
    quorum: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Least share of the wanted updates that a merge needs; with fewer, the model is carried forward unchanged."""
    faults: str | None = None
    """Clients that drop out, come late or lie, on purpose: e.g. drop=0.2,slow=0.1x5,nan=0.02,scale=0.02x100,flip=0.02,
    corrupt=0.01, each with its share of all orders (see `fl_engine.fleet.faults`); null: none."""

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
    """clients: besides the evaluation on the server's test samples, in the same rounds, clients evaluate the global
    model on samples of their own that they hold out (docs/guides/partitions.md). server: only there, and clients train
    on all their samples."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """With `clients`, the share of its samples that each client holds out from training, the same in all rounds."""
    share: Fraction = 1.0
    """With `clients`, the share of all clients that are asked, drawn anew each time."""
