"""Oort's selection, which favours clients with a large loss and penalises slow clients.

The state has three tables:

- `clients` has six rows (CLIENT to LEVEL) and one column for every client that was selected before, in client order.
  Rounds in LAST are counted from 1. SECONDS is the simulated duration of the last assignment with a result, or 0.
- `results` has a row (round from 0, client, utility, seconds, level) for each result of the last round. When the
  first result of the next round arrives, these rows are moved to `clients`.
- `pacer` has the fields of a `Pacer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fl_engine.core.clients import LARGEST_LOSS
from fl_engine.core.contracts import ClientContext, ClientMetric
from fl_engine.core.costs import FORWARDS_PER_STEP
from fl_engine.core.fields import Count, Fraction, NotNegative, Positive, Share
from fl_engine.core.types import Assignment, ClientResult, ClientUpdate, Device, Pick, Pool, RoundContext, Tables
from fl_engine.selection.capacity import Draws, Rows, check_capacity, dispatched, rows_of, warn_too_weak

CLIENT, UTILITY, SELECTED, LAST, SECONDS, LEVEL = range(6)
"""Rows of `clients`."""
NO_CLIENTS: Rows = ((),) * 6
LATE, FAILED = -1.0, -2.0
"""Values in the column `utility` of `results` that mark stragglers and other failed clients."""
UNCERTAINTY = 0.1
"""Weight of the temporal term in the score (Alg. 1 line 10; a constant in Oort's code)."""
EXPLORE_WINDOW = 5
"""Exploration candidates per drawn client, as in Oort's code (`sample_window`) and in the paper."""
Arrivals = Callable[[np.ndarray], np.ndarray]
"""Returns an exponentially distributed number for each index."""
FLAT, SHARP = 0.1, 5.0
"""T increases if the utility's relative change is at most FLAT, and decreases if the change is at least SHARP."""


def rms_loss(client: ClientContext) -> float:
    """Return sqrt(mean loss^2) over all samples of a client, at most LARGEST_LOSS. The losses are computed with the
    received weights. If a loss is NaN, return NaN, so that the client fails."""
    loss = float(client.losses.double().square().mean().sqrt())
    return loss if math.isnan(loss) else min(loss, LARGEST_LOSS)


@dataclass(frozen=True)
class Oort(Draws):
    """Oort: Efficient Federated Learning via Guided Participant Selection (Lai et al., OSDI 2021), Sec. 4, Alg. 1.

    A client's statistical utility is U = |B| sqrt(mean loss^2) over all its samples B. Clients that were selected
    before are ranked by their score:

        ((min(U, clip) - least) / (clip - least) + sqrt(UNCERTAINTY * ln R / L)) * min(1, T / t)^penalty.

    R is the current round, and L is the round in which the client was last selected, both counted from 1. `least` is
    0.999 times the smallest U. T is the pacer's preferred time (`Pacer`). t is the simulated time of the client's last
    assignment if the model is the same. Otherwise, t is estimated from speed, bandwidth and samples. To select n
    clients, clients are drawn in proportion to their scores from all clients with at least `cut_off` times the (n +
    1)-th largest score.

    In round r = 0, 1, ... the fraction max(`exploration_min`, `exploration` * `exploration_decay`^r) is reserved for
    clients that were never selected. The value of such a client is the number of samples that it trains on, multiplied
    by min(1, T / t)^penalty. To draw n such clients, the candidates are the EXPLORE_WINDOW * n clients with the largest
    values. The probability of a candidate is proportional to its value. If too few clients are left in one of the two
    groups, clients of the other group fill the round.

    Clients report sqrt(mean loss^2) as the metric `rms_loss`, and the server knows |B|. A false loss has two bounds
    (Sec. 4.4): utilities are clipped, and a client is selected at most `share_limit` times as often as on average, plus
    once. If the other clients cannot fill a round, the second bound does not apply in this round. Over-commitment is
    the option `rounds.over_provision` (1.3 in the paper and in FedScale, 1.1 in Oort's code).

    The defaults are from FedScale, whose code the paper's authors maintain (fedscale/cloud/config_parser.py,
    thirdparty/oort/oort.py). The description of each option states the values in Oort's code (training/argParser.py)
    and in the paper if they differ.

    Departs from the paper, as the published code does: U is clipped and scaled to about [0, 1] before the temporal part
    is added. Alg. 1 line 10 adds the temporal part to the unscaled U. The default clip is FedScale's quantile of 0.9,
    not 0.95. T changes by the code's rules instead of Alg. 1 lines 7-8 (`Pacer`).

    Departs from the published code:
    - U is computed from all samples of a client and their losses with the received weights, as in the paper. The code
      uses the samples that the client trains on and the losses of its steps.
    - `least` and `clip` are computed including failed clients, whose U is 0. The code uses only utilities above 0.
    - U is scaled by the range after clipping. With the range before clipping, one reported utility of 1e6 would make
      the scores of all other clients nearly equal. The bound `clip` is element floor((n - 1) * q) of the n sorted
      utilities, with q as the option `clip`, so it is never the largest of several utilities. In the code, the bound is
      the largest utility if there are few clients.
    - `share_limit` replaces the maximum number of rounds per client (`blacklist_rounds`, no maximum by default). The
      number depends on a run's length and fraction of clients.
    - T is a percentile over the clients that can be selected in this round. The code uses all clients and their first
      speeds.
    - The first round explores by the same rule as later rounds. The code draws the clients of the first round
      uniformly.
    - Ties between scores are broken at random. If no clients are left to explore, other clients fill the round.
    - As in FedScale, the utility of a straggler is the mean utility of the round's updates. The utility of a client
      that failed for another reason is 0 until it succeeds. Stragglers and failed clients are not explored again.
    - Clients that are known to have no samples are never selected.
    """

    name: Literal["oort"] = "oort"
    model: Literal["capacity", "largest"] = "capacity"
    """`capacity`: send each client the largest model that it can hold, and select only clients that can hold a model.
    `largest`: send all clients the largest model."""
    preferred: Share = 1.0
    """Fraction k of a round's clients that Oort selects; 1 in Oort's and FedScale's code. Other clients are drawn
    uniformly (Sec. 4.3 of the paper on multi-branch networks)."""
    penalty: NotNegative = 2.0
    """Exponent alpha of T / t for slow clients (`round_penalty`). The paper also uses 2 (Sec. 7.1)."""
    clip: Fraction = 0.9
    """Quantile at which utilities are clipped (`clip_bound`). The paper and Oort's code use 0.95."""
    share_limit: Annotated[float, Field(ge=1)] | None = 2.0
    """Maximum number of a client's selections, as a multiple of the average (see above); null: no maximum."""
    cut_off: Share = 0.05
    """Cut-off confidence c (`cut_off_util`). Oort's code uses 0.7, and the paper uses 0.95."""
    cut_off_pool: NotNegative = 10.0
    """Minimum number of candidates per drawn client, regardless of scores, as in FedScale. Oort's code uses 0."""
    exploration: Share = 0.9
    """Exploration fraction epsilon in the first round (`exploration_factor`), as in Oort's code and the paper."""
    exploration_decay: Share = 0.98
    """Factor by which epsilon is multiplied after each round (`exploration_decay`), as in Oort's code and the paper."""
    exploration_min: Share = 0.3
    """Minimum of epsilon (`exploration_min`). Oort's code and the paper use 0.2."""
    pacer_start: Positive = 30.0
    """T starts at this percentile of client times (`round_threshold`). From 100, T is infinite. Oort's code has 101."""
    pacer_step: Count = 20
    """Number of rounds between two changes of T (`pacer_step`). Oort's code also uses 20."""
    pacer_delta: NotNegative = 5.0
    """Change of T's percentile in points (`pacer_delta`). Oort's code uses 10."""

    def client_metrics(self) -> tuple[ClientMetric, ...]:
        return (ClientMetric("rms_loss", 0.0, LARGEST_LOSS, rms_loss),)

    def init(self, fleet: Sequence[Device], pool: Pool) -> Tables:
        if self.model == "capacity":
            check_capacity(fleet, pool)
        else:
            warn_too_weak(fleet, pool)
        return {"clients": NO_CLIENTS, "results": (), "pacer": Pacer(0, self.pacer_start).rows}

    def learn(self, state: Tables, assignment: Assignment, result: ClientResult, seconds: float) -> Tables:
        """Add a result to the table `results`. Before the first result of a round is added, move all earlier results to
        `clients`."""
        if state["results"] and state["results"][0][0] != assignment.round:
            clients, pacer = self.known(state, assignment.round)
            state = {"clients": rows_of(clients), "results": (), "pacer": pacer.rows}
        if isinstance(result, ClientUpdate):
            utility = result.num_examples * result.metrics["rms_loss"]
        else:
            late = result.stage in ("straggle", "quorum") and seconds > 0
            utility = LATE if late else FAILED
        row = (float(assignment.round), float(assignment.client), utility, seconds, float(assignment.level))
        return {**state, "results": (*state["results"], row)}

    def known(self, state: Tables, round: int) -> tuple[np.ndarray, Pacer]:
        """Return the table `clients` and the pacer, both updated with the results of all rounds before `round`."""
        clients, pacer = np.asarray(state["clients"]), Pacer.of(state["pacer"])
        brought: dict[int, float] = {}
        if state["results"]:
            clients, last, utility = enter(clients, np.asarray(state["results"]))
            brought[last] = utility
        return clients, pacer.after(round, brought, step=self.pacer_step, delta=self.pacer_delta)

    def pick(self, state: Tables, context: RoundContext, count: int, rng: np.random.Generator) -> list[Pick]:
        clients, pacer = self.known(state, context.round)
        candidates = Candidates.of(context, clients, self.model)
        candidates = candidates.only((candidates.levels >= 0) & (candidates.reward > 0))
        count = min(count, len(candidates.clients))
        if count < 1:
            return []
        if self.share_limit is not None:
            average = context.round * count / len(candidates.clients)
            below = candidates.selected <= self.share_limit * average
            candidates = candidates.only(below) if below.sum() >= count else candidates
        if self.draws == "keyed":
            order = self.drawn(context, candidates.clients, len(candidates.clients), rng)
        else:
            order = rng.permutation(len(candidates.clients))
        candidates = candidates.only(order)  # The permutation breaks ties at random.

        def numbers(some: np.ndarray) -> np.ndarray:
            return np.asarray(self.arrivals(context, candidates.clients[some], rng))

        slow = self.slow(candidates.seconds, pacer.preferred(candidates.seconds))
        explored, fresh = np.flatnonzero(candidates.selected > 0), np.flatnonzero(candidates.selected == 0)
        quota = int(self.preferred * count + 1e-9)
        explore = min(len(fresh), max(int(quota * self.epsilon(context.round) + 1e-9), quota - len(explored)))
        exploit = min(len(explored), quota - explore)
        scores = self.scores(candidates.utility[explored], candidates.last[explored], context.round + 1)
        scores = scores * slow[explored]
        if self.draws == "keyed" and exploit == len(explored):
            numbers(explored)  # `exploited` draws nothing, but the next numbers must stay the same
        best = explored[self.exploited(scores, exploit, lambda some: numbers(explored[some]))]
        new = fresh[self.explored((candidates.reward * slow)[fresh], explore, lambda some: numbers(fresh[some]))]
        left = np.delete(np.arange(len(candidates.clients)), np.concatenate([best, new]))
        rest = left[self.drawn(context, candidates.clients[left], count - len(best) - len(new), rng)]
        chosen = np.concatenate([best, new, rest])
        pairs = zip(candidates.clients[chosen], candidates.levels[chosen], strict=True)
        return sorted((int(client), int(level)) for client, level in pairs)

    def epsilon(self, round: int) -> float:
        """Return the fraction of a round's clients that is reserved for clients that were never selected. `round`
        starts at 0."""
        return max(self.exploration_min, self.exploration * self.exploration_decay**round)

    def slow(self, seconds: np.ndarray, preferred: float) -> np.ndarray:
        """Return the penalty factors for the clients' times; 1 if the time is below T = `preferred`."""
        return np.asarray(np.minimum(1.0, preferred / np.maximum(seconds, 1e-9)) ** self.penalty)

    def scores(self, utility: np.ndarray, last: np.ndarray, now: int) -> np.ndarray:
        """Return the scores (N,) in round `now` (from 1), without the penalty factor."""
        if not len(utility):
            return np.zeros(0)
        place = math.floor((len(utility) - 1) * self.clip)
        clip, least = float(np.partition(utility, place)[place]), 0.999 * float(utility.min())
        scaled = (np.minimum(utility, clip) - least) / max(clip - least, 1e-4)
        return np.asarray(scaled + np.sqrt(UNCERTAINTY * math.log(now) / last))

    def exploited(self, scores: np.ndarray, count: int, arrivals: Arrivals) -> np.ndarray:
        """Draw clients in proportion to their scores, and return their indices in `scores`."""
        best = np.argsort(-scores, kind="stable")
        if count == len(best):
            return best
        reach = int((scores >= self.cut_off * scores[best[count]]).sum())
        return _drawn(best[: max(reach, int(self.cut_off_pool * count))], scores, count, arrivals)

    def explored(self, rewards: np.ndarray, count: int, arrivals: Arrivals) -> np.ndarray:
        """Draw clients in proportion to their rewards, and return their indices in `rewards`."""
        best = np.argsort(-rewards, kind="stable")
        return _drawn(best[: EXPLORE_WINDOW * count], rewards, count, arrivals)


@dataclass(frozen=True)
class Candidates:
    """Clients that can be selected, with one array per field. `levels` is -1 if a client cannot hold any model."""

    clients: np.ndarray
    levels: np.ndarray
    reward: np.ndarray
    """Number of samples that the client trains on, which is the reward of a client that was never selected."""
    utility: np.ndarray
    selected: np.ndarray
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
        if model == "capacity":  # Choose the largest model for which `capacity.holds` returns True.
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
        seconds = macs * draws / np.maximum(speed, 1e-9) + moved / np.maximum(bandwidth, 1e-9)  # never divide by 0
        place, here = places(known, clients)
        utility, selected, last, measured, level = np.zeros((5, len(clients)))
        if here.any():
            utility, selected, last, measured, level = np.where(here, known[1:, place], 0.0)
        seconds = np.where((measured > 0) & (level == sent), measured, seconds)
        return Candidates(clients, sent, np.minimum(samples, draws), utility, selected, last, seconds)


def _drawn(places: np.ndarray, weights: np.ndarray, count: int, arrivals: Arrivals) -> np.ndarray:
    """Draw `count` of the indices `places` without replacement, with probabilities proportional to their weights.
    Indices with weight 0 are drawn last."""
    times = arrivals(places) / np.maximum(weights[places], 1e-300)
    return places[np.argsort(times, kind="stable")[:count]]


# ---------------------------------------------------------------------------------------------- the tables
def enter(clients: np.ndarray, results: np.ndarray) -> tuple[np.ndarray, int, float]:
    """Update the table `clients` (6, N) with the results of one round, `results` (M, 5) with M >= 1.

    Return the new table, the round, and the pacer's input, which is the mean utility of updates from clients that were
    selected before, or 0 without such updates. As in FedScale, a straggler gets the mean utility of the round's
    updates. If the round has no updates, stragglers keep their utility. The utility of other failed clients is 0.
    """
    round, selected, utility, seconds, level = int(results[0, 0]), *results[:, 1:].T
    unknown = selected[~places(clients, selected)[1]]
    new = np.zeros((6, len(unknown)))
    new[CLIENT] = unknown
    clients = np.concatenate([clients, new], axis=1)
    clients = clients[:, np.argsort(clients[CLIENT], kind="stable")]
    columns = np.searchsorted(clients[CLIENT], selected)
    good, before = utility >= 0, clients[SELECTED, columns] > 0
    usual = utility[good].mean() if good.any() else clients[UTILITY, columns]
    clients[UTILITY, columns] = np.where(good, utility, np.where(utility == LATE, usual, 0.0))
    clients[SELECTED, columns] += 1
    clients[LAST, columns] = round + 1
    clients[SECONDS, columns] = np.where(seconds > 0, seconds, clients[SECONDS, columns])
    clients[LEVEL, columns] = np.where(seconds > 0, level, clients[LEVEL, columns])
    preferred = utility[good & before]
    return clients, round, float(preferred.mean()) if preferred.size else 0.0


def places(clients: np.ndarray, who: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays (M,): each client's column in the table `clients`, and a mask of the clients in the table."""
    if not clients.shape[1]:
        return np.zeros(len(who), dtype=int), np.zeros(len(who), dtype=bool)
    place = np.minimum(np.searchsorted(clients[CLIENT], who), clients.shape[1] - 1)
    return place, clients[CLIENT, place] == who


@dataclass(frozen=True)
class Pacer:
    """Oort's pacer (Lai et al., OSDI 2021, Sec. 4.3). T, the preferred time of a round, is a percentile of the clients'
    times. Every `step` rounds, the pacer compares the utility of the preferred clients in the last `step` rounds with
    their utility in the `step` rounds before. If the utility hardly changed, T increases to include slower clients with
    other data. If the utility changed sharply, T decreases.

    Departs from the paper, as the published code does: in Alg. 1 lines 7-8, T is a time in seconds that only increases.
    T <- T + Delta if sum U(R-2W : R-W) > sum U(R-W : R), so whenever the utility falls. Here T does not change if the
    utility falls by more than FLAT. `step` corresponds to W, and `delta` corresponds to Delta.
    """

    rounds: int
    """Number of finished rounds."""
    percentile: float
    """Percentile for T. If the percentile is 100 or more, T is infinite."""
    history: tuple[float, ...] = ()
    """Mean utilities of the last 2 * `step` rounds."""

    def after(self, rounds: int, brought: Mapping[int, float], *, step: int, delta: float) -> Pacer:
        """Return the pacer after `rounds` rounds. `brought` maps rounds (from 0) to the mean utility of the preferred
        clients; the utility of a missing round is 0.

        As in Oort's code, a relative change of at most FLAT increases T, and so does a change from 0 to 0. A change of
        at least SHARP decreases T. The percentile stays between `delta` and 100.
        """
        percentile, history = self.percentile, list(self.history)
        for over in range(self.rounds + 1, rounds + 1):
            history = [*history[1 - 2 * step :], brought.get(over - 1, 0.0)]
            if over >= 2 * step and over % step == 0:
                before, now = sum(history[:step]), sum(history[step:])
                if abs(now - before) <= FLAT * before:
                    percentile = min(100.0, percentile + delta)
                elif abs(now - before) >= SHARP * before:
                    percentile = max(delta, percentile - delta)
        return Pacer(max(rounds, self.rounds), percentile, tuple(history))

    def preferred(self, seconds: np.ndarray) -> float:
        """Return T for the times `seconds` (N,) with N >= 1."""
        if self.percentile >= 100:
            return math.inf
        place = min(int(len(seconds) * self.percentile / 100), len(seconds) - 1)
        return float(np.partition(seconds, place)[place])

    @property
    def rows(self) -> Rows:
        return (float(self.rounds), self.percentile), self.history

    @staticmethod
    def of(rows: Rows) -> Pacer:
        (rounds, percentile), history = rows
        return Pacer(int(rounds), percentile, history)
