"""Oort's selection: clients with a large loss, unless they are too slow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fl_engine.core.clients import LARGEST_LOSS
from fl_engine.core.contracts import ClientContext, ClientMetric
from fl_engine.core.costs import FORWARDS_PER_STEP
from fl_engine.core.fields import STRICT, Count, Fraction, NotNegative, Positive, Share
from fl_engine.core.types import ClientUpdate, Device, Outcome, Pick, Pool, RoundContext, Tables, WorkOrder
from fl_engine.selection import oort_state
from fl_engine.selection.capacity import check_capacity, dispatched, tell_of_too_weak
from fl_engine.selection.oort_state import ASKED, CLIENT, Pacer


def rms_loss(client: ClientContext) -> float:
    """Return sqrt(mean loss^2) over all samples of a client with the received weights, at most LARGEST_LOSS. NaN, which
    makes the client fail, if a loss is NaN."""
    found = float(client.losses.double().square().mean().sqrt())
    return found if math.isnan(found) else min(found, LARGEST_LOSS)


@dataclass(frozen=True)
class Oort:
    """Oort: Efficient Federated Learning via Guided Participant Selection (Lai et al., OSDI 2021), Sec. 4, Alg. 1.

    A client's statistical utility is U = |B| sqrt(mean loss^2) over all its samples B. Among the clients asked before,
    those with the largest score are preferred:

        score = ((min(U, clip) - least) / (clip - least) + sqrt(uncertainty * ln R / L)) * min(1, T / t)^penalty

    with the round R and the client's last round L, both counted from 1, the client's time t, the pacer's T
    (`oort_state.Pacer`), and `least` = 0.999 times the smallest U. The draw, in proportion to the score, is among all
    that score at least `cut_off` times the best score not preferred. The share epsilon = max(`exploration_min`,
    `exploration` * `exploration_decay`^r) of round r = 0, 1, ... goes to clients that were never asked, drawn in
    proportion to (samples to train) * (the same penalty for time) among the `explore_window` times as many with the
    largest values. If one kind runs out, the other fills the round. Each client is sent the largest model that it can
    hold. The defaults are those of FedScale, whose code the paper's authors maintain (fedscale/cloud/config_parser.py,
    thirdparty/oort/oort.py). Other values of Oort's own code (training/argParser.py) or the paper are given below.

    t is the simulated time of the client's last assignment if that had the same model, else an estimate from its
    speed, bandwidth and samples. Over-commitment is `rounds.over_provision`: 1.3 in the paper and in FedScale, 1.1 in
    Oort's own code.

    Clients report sqrt(mean loss^2) as the metric `rms_loss`; |B| is what the server knows. A lie is worth at most
    `clip`, a value that an ordinary client has.

    Departs from the paper, as the code does: U is clipped and scaled to about 0 .. 1 before the temporal part is added
    (Alg. 1 line 10 adds it to U itself), and the default clip is FedScale's quantile of 0.9, not 0.95.

    Departs from the code:
    - U counts all samples of a client with the losses of the received weights, as in the paper. The code counts those
      that it trains, with the losses of its steps.
    - Failed clients, with a U of 0, count in `least` and in `clip`. The code uses only utilities above 0 for these.
    - U is scaled by the range after clipping. Before it, one report of 1e6 would make all others equal. `clip` is the
      floor((n - 1) * `clip`)-th of n ascending values of the clients asked, so the largest never sets it; the code's
      index takes the largest of few.
    - T is a percentile over the clients that can be asked now. The code takes all, with their first speeds.
    - The first round explores by the same rule. The code draws it uniformly.
    - Equal scores are drawn in random order, and a round is filled if nobody is left to explore.
    - A straggler gets the mean utility of its round's updates (FedScale). A client that failed otherwise gets 0 until
      it succeeds. Both count as asked.
    - Clients known to have no samples are never asked.
    """

    __pydantic_config__ = STRICT
    name: Literal["oort"] = "oort"
    model: Literal["capacity", "largest"] = "capacity"
    """`capacity` sends each the largest model that it can hold, and asks only clients that can hold one; `largest`
    sends everyone the largest."""
    preferred: Share = 1.0
    """k, the share of a round that Oort selects; the rest is drawn uniformly from the other clients (the paper on
    multi-branch networks, Sec. 4.3; Oort's and FedScale's code: all)."""
    uncertainty: NotNegative = 0.1
    """Of the score's temporal part (paper, Alg. 1 line 10; a constant of the code)."""
    penalty: NotNegative = 2.0
    """alpha, exponent of T / t for slow clients (`round_penalty`; paper Sec. 7.1: 2)."""
    clip: Fraction = 0.9
    """Quantile at which utilities are clipped (`clip_bound`; paper and own code: 0.95)."""
    cut_off: Share = 0.05
    """c, the cut-off confidence (`cut_off_util`; own code: 0.7; paper: 0.95)."""
    cut_off_pool: NotNegative = 10.0
    """The draw is among at least this multiple of the clients wanted, whatever they score (FedScale; own code: 0)."""
    exploration: Share = 0.9
    """epsilon in the first round (`exploration_factor`; the same in the own code and the paper)."""
    exploration_decay: Share = 0.98
    """(`exploration_decay`; the same in the own code and the paper.)"""
    exploration_min: Share = 0.3
    """(`exploration_min`; own code and paper: 0.2.)"""
    explore_window: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 5.0
    """The draw is among this multiple of the unexplored clients wanted (`sample_window`; the same in both)."""
    pacer_start: Positive = 30.0
    """Percentile of the clients' times that T is at first; from 100 on there is no T (`round_threshold`; own code:
    101)."""
    pacer_step: Count = 20
    """Rounds between two changes of T (`pacer_step`; the same in both)."""
    pacer_delta: NotNegative = 5.0
    """Points by which the percentile changes (`pacer_delta`; own code: 10)."""
    pacer_flat: NotNegative = 0.1
    """T rises if utility changed by at most this share of itself (a constant of both)."""
    pacer_sharp: NotNegative = 5.0
    """T falls if utility changed by at least so many times itself (a constant of both)."""
    blacklist_after: Count | None = None
    """A client that was asked more often is not asked again; null: off (`blacklist_rounds`: -1 in both)."""
    blacklist_most: Share = 0.3
    """At most this share of all clients is on the blacklist, those asked most (`blacklist_max_len`; the same in both).
    If nobody else is available, they are asked."""

    def client_metrics(self) -> tuple[ClientMetric, ...]:
        return (ClientMetric("rms_loss", 0.0, LARGEST_LOSS, rms_loss),)

    def init(self, fleet: Sequence[Device], pool: Pool) -> Tables:
        """Return the tables `clients` and `heard` (`oort_state`) and `pacer` (`Pacer`)."""
        if self.model == "capacity":
            check_capacity(fleet, pool)
        else:
            tell_of_too_weak(fleet, pool)
        return {"clients": oort_state.NOBODY, "heard": (), "pacer": Pacer(0, self.pacer_start).rows}

    def learn(self, state: Tables, order: WorkOrder, outcome: Outcome, seconds: float) -> Tables:
        """Add a result to `heard`. The table of all clients is updated once a round, at its first result."""
        if state["heard"] and state["heard"][0][0] != order.round:
            clients, pacer = self.known(state, order.round)
            state = {"clients": oort_state.rows(clients), "heard": (), "pacer": pacer.rows}
        if isinstance(outcome, ClientUpdate):
            utility = outcome.num_examples * outcome.metrics["rms_loss"]
        else:
            came = outcome.stage in ("straggle", "quorum") and seconds > 0
            utility = oort_state.LATE if came else oort_state.FAILED
        heard = (float(order.round), float(order.client), utility, seconds, float(order.level))
        return {**state, "heard": (*state["heard"], heard)}

    def known(self, state: Tables, round: int) -> tuple[np.ndarray, Pacer]:
        """Return (columns of clients, pacer) before this round, with the results of the rounds before."""
        clients, pacer = np.asarray(state["clients"]), Pacer.of(state["pacer"])
        brought: dict[int, float] = {}
        if state["heard"]:
            clients, last, utility = oort_state.entered(clients, np.asarray(state["heard"]))
            brought[last] = utility
        paces = {"delta": self.pacer_delta, "flat": self.pacer_flat, "sharp": self.pacer_sharp}
        return clients, pacer.after(round, brought, step=self.pacer_step, **paces)

    def pick(self, state: Tables, context: RoundContext, count: int, rng: np.random.Generator) -> list[Pick]:
        clients, pacer = self.known(state, context.round)
        able = Candidates.of(context, clients, self.model)
        able = able.only((able.levels >= 0) & (able.reward > 0))
        if self.blacklist_after is not None:
            black = np.isin(able.clients, self.blacklist(clients, len(context.fleet)))
            able = able if black.all() else able.only(~black)
        count = min(count, len(able.clients))
        if count < 1:
            return []
        able = able.only(rng.permutation(len(able.clients)))  # equals come in random order
        slow = self.slow(able.seconds, pacer.preferred(able.seconds))
        explored, fresh = np.flatnonzero(able.asked > 0), np.flatnonzero(able.asked == 0)
        quota = int(self.preferred * count + 1e-9)
        explore = min(len(fresh), max(int(quota * self.epsilon(context.round) + 1e-9), quota - len(explored)))
        exploit = min(len(explored), quota - explore)
        scores = self.scores(able.utility[explored], able.last[explored], context.round + 1) * slow[explored]
        best = explored[self.exploited(scores, exploit, rng)]
        new = fresh[self.explored((able.reward * slow)[fresh], explore, rng)]
        left = np.ones(len(able.clients), dtype=bool)
        left[best] = left[new] = False
        rest = rng.choice(np.flatnonzero(left), size=count - len(best) - len(new), replace=False)
        chosen = np.concatenate([best, new, rest])
        pairs = zip(able.clients[chosen], able.levels[chosen], strict=True)
        return sorted((int(client), int(level)) for client, level in pairs)

    # --------------------------------------------------------------------------------------------- the formulas
    def epsilon(self, round: int) -> float:
        """Return the share of a round, counted from 0, for clients that were never asked."""
        return max(self.exploration_min, self.exploration * self.exploration_decay**round)

    def slow(self, seconds: np.ndarray, preferred: float) -> np.ndarray:
        """Return the penalty factor of clients with these times, with T = `preferred`; 1 for those in time."""
        return np.asarray(np.minimum(1.0, preferred / np.maximum(seconds, 1e-9)) ** self.penalty)

    def scores(self, utility: np.ndarray, last: np.ndarray, now: int) -> np.ndarray:
        """Return the scores in round `now` (from 1) without the penalty factor; (N,) each."""
        if not len(utility):
            return np.zeros(0)
        place = math.floor((len(utility) - 1) * self.clip)
        clip, least = float(np.partition(utility, place)[place]), 0.999 * float(utility.min())
        scaled = (np.minimum(utility, clip) - least) / max(clip - least, 1e-4)
        return np.asarray(scaled + np.sqrt(self.uncertainty * math.log(now) / last))

    def exploited(self, scores: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return the places drawn from the preferred clients."""
        best = np.argsort(-scores, kind="stable")
        if count == len(best):
            return best
        reach = int((scores >= self.cut_off * scores[best[count]]).sum())
        return _drawn(best[: max(reach, int(self.cut_off_pool * count))], scores, count, rng)

    def explored(self, rewards: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return the places drawn from clients that were never asked."""
        best = np.argsort(-rewards, kind="stable")
        return _drawn(best[: int(self.explore_window * count)], rewards, count, rng)

    def blacklist(self, clients: np.ndarray, fleet: int) -> np.ndarray:
        """Return the clients that were asked too often."""
        assert self.blacklist_after is not None
        often = clients[:, clients[ASKED] > self.blacklist_after]
        most = np.argsort(-often[ASKED], kind="stable")[: int(self.blacklist_most * fleet + 1e-9)]
        return np.asarray(often[CLIENT][most])


@dataclass(frozen=True)
class Candidates:
    """Clients that may be asked, a column for each field; `levels` is -1 for a client that can hold no model."""

    clients: np.ndarray
    levels: np.ndarray
    reward: np.ndarray
    """The worth of a client that was never asked: the number of samples that it trains on."""
    utility: np.ndarray
    asked: np.ndarray
    last: np.ndarray
    seconds: np.ndarray

    def only(self, places: np.ndarray) -> Candidates:
        return Candidates(*(column[places] for column in vars(self).values()))

    @staticmethod
    def of(context: RoundContext, known: np.ndarray, model: str) -> Candidates:
        devices, pool = context.available, context.pool
        levels = np.asarray([-1, *dispatched(pool)])
        clients = np.fromiter((d.client for d in devices), int, len(devices))
        speed = np.fromiter((d.speed for d in devices), float, len(devices))
        bandwidth = np.fromiter((d.bandwidth for d in devices), float, len(devices))
        if model == "capacity":  # the number of models, ascending, that `capacity.holds` says it can hold
            most = np.fromiter((d.most for d in devices), float, len(devices))
            sent = levels[np.searchsorted([100 * pool[level].share for level in levels[1:]], most)]
        else:
            sent = np.full(len(clients), levels[-1])
        samples, draws = (
            np.asarray(column, dtype=float)[clients] if column else np.ones(len(clients))
            for column in (context.samples, context.draws)
        )
        macs = np.asarray([FORWARDS_PER_STEP * m.macs for m in pool], dtype=float)[sent]
        moved = np.asarray([m.bytes + m.bytes_up for m in pool], dtype=float)[sent]
        tiny = 1e-9  # of a device that is there and yet stands still
        seconds = macs * draws / np.maximum(speed, tiny) + moved / np.maximum(bandwidth, tiny)
        place, here = oort_state.places(known, clients)
        utility, asked, last, measured, level = np.zeros((5, len(clients)))
        if here.any():
            utility, asked, last, measured, level = np.where(here, known[1:, place], 0.0)
        seconds = np.where((measured > 0) & (level == sent), measured, seconds)
        return Candidates(clients, sent, np.minimum(samples, draws), utility, asked, last, seconds)


def _drawn(places: np.ndarray, weights: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return `count` of these places, drawn without replacement in proportion to the weights: the first arrivals of
    exponential clocks. Places without weight come last."""
    arrivals = rng.exponential(size=len(places)) / np.maximum(weights[places], 1e-300)
    return places[np.argsort(arrivals, kind="stable")[:count]]
