"""Which sub-network, in how many bits, for which kind of device: FedX (Lai et al.), section III-A, Eq. 2:

    theta_u, q_u = argmin P(theta, D_S) - P(Q(theta_u, q_u), D_S)    over theta_u with T(theta_u) <= mu_u, q_u <= q_max

A kind of device is a tier of the fleet. What a candidate scores does not depend on the tier, so each is measured once.

Departs from the paper:

- Eq. 2 alone nearly always takes the most bits, as these lose least. Here a tier takes, of the candidates that lose at
  most `delta` more than the best, the one with the fewest encoded bits; `delta = 0` is Eq. 2, whose ties the paper
  leaves open.
- The paper ends its search early "when the utility drops below an acceptable level", and does not say in which order it
  goes. With `accept`, candidates are measured in the order of their bits (parameters times bits), and a tier takes the
  first that loses at most `accept`; where none does, all are measured, and the rule above decides.
- A sub-network also has to fit into the memory of the tier's devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from fl_engine.core.errors import PoolError

TINY = 1e-12
"""A difference of accuracies, which are decimal fractions, may be wrong by this much."""


class Candidate(BaseModel):
    """A sub-network in some bits: `accuracy` is the mean over the rounding seeds of the task's metric on the server's
    data (None: not a number), `encoded_bits` the mean of the bits that are sent."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    level: str
    bits: int
    accuracy: float | None
    encoded_bits: float


@dataclass(frozen=True)
class Kind:
    """A tier: the most bits that its devices compute with, and for each sub-network that they can hold the seconds of a
    local round on one of them."""

    tier: str
    most_bits: int
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Rule:
    """What Eq. 2 is searched under: see the top of this file. `limit`: mu, seconds; None: no limit."""

    limit: float | None = None
    delta: float = 0.0
    accept: float | None = None


Measure = Callable[[str, int], Candidate]
"""Measures the sub-network of this name in so many bits."""


def feasible(kind: Kind, limit: float | None) -> list[str]:
    """The sub-networks whose time on this tier's devices is at most `limit`. Raises PoolError where none is."""
    if not kind.seconds:
        raise PoolError(
            f"tier {kind.tier!r} can hold none of the sub-networks: raise the memory of its devices, or give smaller "
            "sub-networks"
        )
    found = [level for level, seconds in kind.seconds.items() if limit is None or seconds <= limit]
    if not found:
        fastest = min(kind.seconds, key=lambda level: kind.seconds[level])
        raise PoolError(
            f"tier {kind.tier!r}: no sub-network trains a local round within algorithm.seconds = {limit:g}: "
            f"{fastest!r}, the fastest, takes {kind.seconds[fastest]:.3g} s. Raise algorithm.seconds, lower "
            "training.epochs, or give smaller sub-networks"
        )
    return found


def search(
    kinds: Sequence[Kind], params: Mapping[str, int], bits: Sequence[int], measure: Measure, whole: float, rule: Rule
) -> tuple[dict[str, Candidate], tuple[Candidate, ...]]:
    """(by tier what it takes, all that was measured in the order of `params` and bits). `params`: the parameters of
    each sub-network that is tried; `whole`: the accuracy of the whole network, not quantised. Raises PoolError where a
    tier has nothing to take."""
    measured: dict[tuple[str, int], Candidate] = {}

    def of(level: str, count: int) -> Candidate:
        if (level, count) not in measured:
            measured[level, count] = measure(level, count)
        return measured[level, count]

    chosen = {}
    for kind in kinds:
        able = [level for level in feasible(kind, rule.limit) if level in params]
        grid = [(level, count) for level in able for count in sorted(set(bits)) if count <= kind.most_bits]
        if not grid:
            raise PoolError(
                f"tier {kind.tier!r} has nothing to choose from: algorithm.bits = {sorted(set(bits))}, its devices "
                f"compute with at most {kind.most_bits} bits (algorithm.q_max)"
            )
        grid.sort(key=lambda each: (params[each[0]] * each[1], each))
        chosen[kind.tier] = _acceptable(grid, of, whole, rule.accept) or best(
            [of(*each) for each in grid], rule.delta, kind.tier
        )
    order = list(params)
    table = sorted(measured.values(), key=lambda each: (order.index(each.level), each.bits))
    return chosen, tuple(table)


def _acceptable(
    grid: Iterable[tuple[str, int]], measure: Measure, whole: float, accept: float | None
) -> Candidate | None:
    """The first that loses at most `accept`."""
    for each in grid if accept is not None else ():
        found = measure(*each)
        if found.accuracy is not None and accept is not None and whole - found.accuracy <= accept + TINY:
            return found
    return None


def best(candidates: Sequence[Candidate], delta: float, tier: str) -> Candidate:
    """Of those that lose at most `delta` more than the one that loses least, the one with the fewest encoded bits; of
    equals the more accurate, then the one in fewer bits. Raises PoolError where none has an accuracy."""
    scores = {each: each.accuracy for each in candidates if each.accuracy is not None}
    if not scores:
        raise PoolError(
            f"tier {tier!r}: no sub-network has an accuracy on the server's data that is a number: lower pretrain.lr, "
            "or say in algorithm.assigned what tiers get"
        )
    least = max(scores.values()) - delta - TINY
    able = [each for each, accuracy in scores.items() if accuracy >= least]
    return min(able, key=lambda each: (each.encoded_bits, -scores[each], each.bits, each.level))


def smaller_gets_more_bits(chosen: Mapping[str, Candidate], params: Mapping[str, int]) -> bool | None:
    """Whether, of any two tiers with different sub-networks, the one with the smaller has more bits. None: all tiers
    have the same sub-network."""
    taken = {(params[each.level], each.bits) for each in chosen.values()}
    pairs = [(a, b) for a in taken for b in taken if a[0] < b[0]]
    return all(small[1] > large[1] for small, large in pairs) if pairs else None


def spread(names: Sequence[str], most: int | None, always: Iterable[str]) -> tuple[str, ...]:
    """At most `most` of these names (None: all), in their order: those of `always`, however many, and others at equal
    distances."""
    if most is None or most >= len(names):
        return tuple(names)
    kept = set(always) & set(names)
    others = [name for name in names if name not in kept]
    free = max(0, most - len(kept))
    kept |= {others[(i * len(others)) // free + len(others) // (2 * free)] for i in range(free)} if free else set()
    return tuple(name for name in names if name in kept)
