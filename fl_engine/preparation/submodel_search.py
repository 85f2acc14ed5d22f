"""Chooses a sub-network and its number of bits for each tier: FedX (Lai et al.), section III-A, Eq. 2:

    theta_u, q_u = argmin P(theta, D_S) - P(Q(theta_u, q_u), D_S)    over theta_u with T(theta_u) <= mu_u, q_u <= q_max

A kind of device is a tier of the fleet. The score of a candidate does not depend on the tier, so each is measured once.

Departs from the paper:

- Eq. 2 alone nearly always takes the most bits, because these lose least. Here a tier takes, of the candidates that
  lose at most `delta` more than the best, the one with the fewest encoded bits; `delta = 0` is Eq. 2, whose ties the
  paper leaves open.
- The paper ends its search early "when the utility drops below an acceptable level", in an order that it does not give.
  With `accept`, candidates are measured in the order of their bits (parameters times bits), and a tier takes the first
  that loses at most `accept`. If none does, all are measured, and the rule above decides.
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
    """A sub-network in some bits."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    level: str
    bits: int
    accuracy: float | None
    """The mean over the rounding seeds of the task's metric on the server's data; None if it is not a number."""
    encoded_bits: float
    """The mean size of an encoded update."""


@dataclass(frozen=True)
class Kind:
    tier: str
    most_bits: int
    """The most bits that its devices compute with."""
    seconds: Mapping[str, float]
    """Seconds of a local round, for each sub-network that its devices can hold."""


@dataclass(frozen=True)
class Rule:
    limit: float | None = None
    """mu, in seconds; None: no limit."""
    delta: float = 0.0
    accept: float | None = None


Measure = Callable[[str, int], Candidate]
"""Measures the sub-network of a name in a number of bits."""


def feasible(kind: Kind, limit: float | None) -> list[str]:
    """The sub-networks whose time on this tier's devices is at most `limit`. Raises PoolError if there are none."""
    if not kind.seconds:
        raise PoolError(f"tier {kind.tier!r} cannot hold any of the sub-networks: raise the memory of its devices")
    found = [level for level, seconds in kind.seconds.items() if limit is None or seconds <= limit]
    if not found:
        fastest = min(kind.seconds, key=lambda level: kind.seconds[level])
        raise PoolError(
            f"tier {kind.tier!r}: no sub-network trains a local round within algorithm.seconds = {limit:g}. The "
            f"fastest, {fastest!r}, takes {kind.seconds[fastest]:.3g} s. Raise it, or lower training.epochs"
        )
    return found


def search(
    kinds: Sequence[Kind], params: Mapping[str, int], bits: Sequence[int], measure: Measure, whole: float, rule: Rule
) -> tuple[dict[str, Candidate], tuple[Candidate, ...]]:
    """Return the choice of each tier, and all that was measured in the order of `params` and bits.

    Args:
        params: The parameters of each sub-network that is tried.
        whole: The accuracy of the whole network, not quantised.
    """
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
                f"tier {kind.tier!r} has nothing to choose from: its devices support at most {kind.most_bits} bits "
                f"(algorithm.q_max), and algorithm.bits = {sorted(set(bits))}"
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
    """The first candidate that loses at most `accept`."""
    if accept is None:
        return None
    candidates = (measure(*each) for each in grid)
    return next((c for c in candidates if c.accuracy is not None and whole - c.accuracy <= accept + TINY), None)


def best(candidates: Sequence[Candidate], delta: float, tier: str) -> Candidate:
    """Of the candidates that lose at most `delta` more than the best, the one with the fewest encoded bits; of equals
    the more accurate, then the one in fewer bits."""
    scores = {each: each.accuracy for each in candidates if each.accuracy is not None}
    if not scores:
        raise PoolError(
            f"tier {tier!r}: the accuracy of all sub-networks on the server's data is not a number: lower pretrain.lr, "
            "or set algorithm.assigned"
        )
    least = max(scores.values()) - delta - TINY
    able = [each for each, accuracy in scores.items() if accuracy >= least]
    return min(able, key=lambda each: (each.encoded_bits, -scores[each], each.bits, each.level))


def smaller_gets_more_bits(chosen: Mapping[str, Candidate], params: Mapping[str, int]) -> bool | None:
    """Whether of any two tiers with different sub-networks the one with the smaller has more bits; None if all tiers
    have the same sub-network."""
    taken = {(params[each.level], each.bits) for each in chosen.values()}
    pairs = [(a, b) for a in taken for b in taken if a[0] < b[0]]
    return all(small[1] > large[1] for small, large in pairs) if pairs else None


def spread(names: Sequence[str], most: int | None, always: Iterable[str]) -> tuple[str, ...]:
    """At most `most` of these names (None: all), in their order: all of `always`, and others at equal distances."""
    if most is None or most >= len(names):
        return tuple(names)
    kept = set(always) & set(names)
    others = [name for name in names if name not in kept]
    free = max(0, most - len(kept))
    kept |= {others[(i * len(others)) // free + len(others) // (2 * free)] for i in range(free)} if free else set()
    return tuple(name for name in names if name in kept)
