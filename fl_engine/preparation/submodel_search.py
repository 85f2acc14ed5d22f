"""Search for each tier's sub-network and number of bits: FedX (Lai et al., arXiv:2504.12849), Sec. III-A, Eq. 2:

    theta_u, q_u = argmin P(theta, D_S) - P(Q(theta_u, q_u), D_S)    over theta_u with T(theta_u) <= mu_u, q_u <= q_max

The paper's device types u are the tiers of the fleet. A candidate's score does not depend on the tier, so each
candidate is measured only once.

Departs from the paper:

- Eq. 2 alone nearly always chooses the highest number of bits, which loses the least accuracy. Here, `best` considers
  all candidates that lose at most `delta` more accuracy than the best candidate. `best` returns the candidate with the
  fewest encoded bits. `delta = 0` corresponds to Eq. 2. The paper does not define how ties are broken.
- The paper stops its search early "when the utility drops below an acceptable level", but does not specify the order of
  the search. Here the search measures all candidates.
- A sub-network must also fit into the memory of the tier's devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fl_engine.core.errors import PoolError
from fl_engine.core.records import Strict

TINY = 1e-12
"""Tolerance for rounding errors when accuracies are subtracted."""


class Candidate(Strict):
    """Sub-network whose weights are quantised to `bits` bits, and its score."""

    level: str
    bits: int
    accuracy: float | None
    """Task's metric on the server's data, averaged over rounding seeds; None if the metric is not finite."""
    encoded_bits: float
    """Mean size of an encoded update in bits."""


@dataclass(frozen=True)
class Kind:
    """Tier of devices, with the limits that restrict the tier's candidates."""

    tier: str
    most_bits: int
    """Maximum number of bits that the devices support."""
    seconds: Mapping[str, float]
    """Map each sub-network that fits into the devices' memory to the seconds of a local round."""


def feasible(kind: Kind, limit: float | None) -> list[str]:
    """Return the sub-networks whose local round takes at most `limit` seconds on the tier's devices (None: no limit).
    Raises PoolError if no sub-network is feasible."""
    if not kind.seconds:
        raise PoolError(f"tier {kind.tier!r} does not have memory for any sub-network. Increase the tier's memory")
    levels = [level for level, seconds in kind.seconds.items() if limit is None or seconds <= limit]
    if not levels:
        fastest = min(kind.seconds, key=lambda level: kind.seconds[level])
        raise PoolError.at(
            f"algorithm.seconds must be at least {kind.seconds[fastest]:.3g} (for sub-network {fastest!r} on tier "
            f"{kind.tier!r}), got {limit:g}. Increase algorithm.seconds, or decrease training.epochs"
        )
    return levels


def search(
    kinds: Sequence[Kind],
    params: Mapping[str, int],
    bits: Sequence[int],
    measure: Callable[[str, int], Candidate],
    limit: float | None = None,
    delta: float = 0.0,
) -> tuple[dict[str, Candidate], tuple[Candidate, ...]]:
    """Choose a candidate for each tier. Return the chosen candidates and all measured candidates, which are in the
    order of `params` and, for each sub-network, in ascending order of bits.

    Args:
        params: Map the name of each candidate sub-network to its number of parameters.
        measure: Function that measures the sub-network with a given name, quantised to a given number of bits.
        limit: Limit mu in seconds; None: no limit.
    """
    table: dict[tuple[str, int], Candidate] = {}
    chosen = {}
    for kind in kinds:
        able = [level for level in feasible(kind, limit) if level in params]
        grid = [(level, count) for level in able for count in sorted(set(bits)) if count <= kind.most_bits]
        if not grid:
            raise PoolError.at(
                f"algorithm.bits must contain a number of at most {kind.most_bits}, got {sorted(set(bits))}. "
                f"algorithm.q_max limits tier {kind.tier!r} to {kind.most_bits} bits"
            )
        for each in grid:
            if each not in table:
                table[each] = measure(*each)
        chosen[kind.tier] = best([table[each] for each in grid], delta, kind.tier)
    order = list(params)
    return chosen, tuple(sorted(table.values(), key=lambda each: (order.index(each.level), each.bits)))


def best(candidates: Sequence[Candidate], delta: float, tier: str) -> Candidate:
    """Return the candidate with the fewest encoded bits whose accuracy is at most `delta` below the best accuracy. Ties
    are broken by higher accuracy, then by fewer bits."""
    scores = {each: each.accuracy for each in candidates if each.accuracy is not None}
    if not scores:
        raise PoolError(
            f"no sub-network of tier {tier!r} has a finite accuracy on the server's data. Decrease pretrain.lr, or set "
            "algorithm.assigned",
            path="pretrain.lr",
        )
    least = max(scores.values()) - delta - TINY
    able = [each for each, accuracy in scores.items() if accuracy >= least]
    return min(able, key=lambda each: (each.encoded_bits, -scores[each], each.bits, each.level))


def spread(names: Sequence[str], most: int | None, always: Iterable[str]) -> tuple[str, ...]:
    """Return at most `most` of the names without changing their order: all names in `always`, and evenly spaced other
    names. If `most` is None, return all names."""
    if most is None or most >= len(names):
        return tuple(names)
    chosen = set(always) & set(names)
    others = [name for name in names if name not in chosen]
    free = max(0, most - len(chosen))
    chosen |= {others[(i * len(others)) // free + len(others) // (2 * free)] for i in range(free)} if free else set()
    return tuple(name for name in names if name in chosen)
