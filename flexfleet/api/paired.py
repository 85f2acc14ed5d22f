"""Two labels of a comparison, seed by seed: the differences, their interval, and what a test can say of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, count
from statistics import fmean

from fl_engine.core.errors import ConfigError, nearest
from flexfleet.experiments.ranking import LEVEL, holm, tested

EXACT = 1e-12
"""A smaller p is said as being below."""


@dataclass(frozen=True)
class Paired:
    """The differences a - b of one metric, one for each seed. Both runs of a seed have the same data and partition,
    unless the two labels differ in settings of these."""

    a: str
    b: str
    metric: str
    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    """In the metric's own unit: of accuracies as shares, 0.01 is one point."""
    mean: float
    interval: tuple[float, float] | None
    """95 % interval of the mean, by Student's t; None where the differences show no spread."""
    p: float | None
    """Two-sided, of the paired t test; None as `interval`."""
    p_holm: float | None
    """The same, adjusted by Holm's method for all pairs of labels; None as `interval`."""
    pairs: int
    """How many pairs of labels the comparison has, with this metric."""

    def __str__(self) -> str:
        return "\n".join([self._figures(), *self.limits])

    __repr__ = __str__

    @property
    def limits(self) -> tuple[str, ...]:
        """Sentences on what so many seeds can and cannot show."""
        n = len(self.seeds)
        if n == 1:
            return ("One seed: it has no spread, so there is neither an interval nor a test.",)
        said = []
        if self.p is None:
            said.append("All differences are equal: without a spread there is neither an interval nor a t test.")
        else:
            said.append(
                f"The t test rests on {n - 1} degree{'s' if n > 2 else ''} of freedom and takes the differences for "
                "normally distributed."
            )
        least, wanted = smallest_p(n), seeds_for(self.pairs)
        if least * self.pairs > LEVEL:
            among = f", and {min(1.0, self.pairs * least):.3g} after Holm over {self.pairs} pairs"
            said.append(
                f"With {n} seeds, no sign test and no permutation test can reach a two-sided p below {least:.3g}"
                f"{among if self.pairs > 1 else ''}: {wanted} seeds are the fewest with which they can reach {LEVEL:g}."
            )
        return tuple(said)

    def _figures(self) -> str:
        each = ", ".join(f"{value:+.4f}" for value in self.differences)
        text = f"{self.metric} of {self.a} - {self.b}: mean {self.mean:+.4f}"
        if self.interval is not None:
            text += f", 95 % interval [{self.interval[0]:+.4f}, {self.interval[1]:+.4f}]"
        if self.p is not None and self.p_holm is not None:
            text += f", p {_said(self.p)} (paired t)"
            text += f", {_said(self.p_holm)} after Holm over {self.pairs} pairs" if self.pairs > 1 else ""
        return f"{text}; seeds {', '.join(map(str, self.seeds))}: {each}"


def _said(p: float) -> str:
    return f"{p:.3g}" if p >= EXACT else f"< {EXACT:g}"


def paired(
    values: Mapping[str, Sequence[float | None]], seeds: Sequence[int], a: str, b: str, metric: str = "avg"
) -> Paired:
    """Return the differences of two labels. `values`: a figure for each seed by label; None for a label without the
    metric, which belongs to no pair. Raises ConfigError for an unknown label, a label without the metric, and a pair of
    a label with itself."""
    for label in (a, b):
        if label not in values:
            raise ConfigError(f"no label {label!r} in this comparison{nearest(label, list(values))}")
        if None in values[label]:
            raise ConfigError(f"{label} has no {metric}: compare another metric, e.g. metric='full'")
    if a == b:
        raise ConfigError(f"{a!r} is to be compared with itself: give two labels")
    known = {label: [v for v in found if v is not None] for label, found in values.items() if None not in found}
    tests = {pair: tested(known[pair[0]], known[pair[1]]) for pair in combinations(known, 2)}
    # A pair without a test counts as one that shows nothing.
    adjusted = dict(zip(tests, holm([1.0 if found is None else found.p for found in tests.values()]), strict=True))
    differences = tuple(x - y for x, y in zip(known[a], known[b], strict=True))
    mean, pair = fmean(differences), (a, b) if (a, b) in tests else (b, a)
    found = tests[pair]
    half, p = (None, None) if found is None else (found.half, found.p)
    return Paired(
        a=a,
        b=b,
        metric=metric,
        seeds=tuple(seeds),
        differences=differences,
        mean=mean,
        interval=None if half is None else (mean - half, mean + half),
        p=p,
        p_holm=None if p is None else adjusted[pair],
        pairs=len(tests),
    )


def smallest_p(n: int) -> float:
    """Return the smallest two-sided p of a sign or permutation test of n pairs: 2 of the 2^n ways to set the signs."""
    return float(2.0 ** (1 - n))


def seeds_for(pairs: int) -> int:
    """Return the fewest seeds with which such a test can reach LEVEL, after Holm over so many pairs."""
    return next(n for n in count(1) if pairs * smallest_p(n) <= LEVEL)
