"""Makes the tables of a comparison: of cells as they are shown, with a head and a title each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fl_engine.fleet.uniformity import NAMES
from fl_engine.rounds.phases import BITS
from flexfleet.experiments import ranking
from flexfleet.experiments.comparison_file import BY_OWNER, LOCAL, ComparisonFile, Reached, Spread, further
from flexfleet.experiments.row_differences import TITLE, as_rows
from flexfleet.files.measure import Measure, decimals
from flexfleet.reports.report import NONE, plain

REFERENCE = "central training"


@dataclass(frozen=True)
class Table:
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(c: ComparisonFile) -> list[Table]:
    """Tables of the deciding metric, of its highest values during the rounds, of the cost, of a round's phases,
    of how evenly clients finish, and of the rounds, the time and the MB to reach given values."""
    results, measure, beside = c.results.items(), Measure(c.metric), further(c)
    judged = any(r.local for _, r in results)
    metric = Table(
        f"Test {measure.name}, {measure.unit}".removesuffix(", "),
        ("algorithm", "levels %", "avg last", "full last", "avg at best", "full at best", "best round", "last round")
        + (("local avg", "local full") if judged else ())
        + tuple(f"full {Measure(name).column}" for name in beside),
        tuple(
            (
                label,
                " / ".join(f"{size:.0f}" for size in r.levels),
                *(
                    cell(score, measure.scale, 2 if measure.unit else 4)
                    for score in (r.last.avg, r.last.full, r.best.avg, r.best.full)
                ),
                cell(r.best.round, digits=1),
                cell(r.last.round, digits=1),
                *(cell(getattr(r, name), 100) for name in LOCAL if judged),
                *_further(beside, {name: each.get(label) for name, each in beside.items()}),
            )
            for label, r in results
        )
        + _reference(c, measure, judged, beside),
    )
    digits, shares = 2 if measure.unit else 4, [one.share for one in next(iter(c.results.values())).highest]
    best = Table(
        f"Highest until so many % of the rounds, {measure.unit}".removesuffix(", "),
        ("algorithm", *(f"{of} {share} %" for of in ("avg", "full") for share in shares)),
        tuple(
            (
                label,
                *(cell(one.avg, measure.scale, digits) for one in r.highest),
                *(cell(one.full, measure.scale, digits) for one in r.highest),
            )
            for label, r in results
        )
        + _reference_highest(c, measure),
    )
    metrics = [metric, *_behind(c, measure), *((best,) if shares else ())]
    of_owners = Table(
        "Test accuracy by whose the class is, %",
        ("algorithm", "avg devices'", "full devices'", "avg server's", "full server's", "own, all classes"),
        tuple((label, *(cell(getattr(r, name), 100) for name in (*BY_OWNER, "devices"))) for label, r in results),
    )
    metrics += [of_owners] if any(r.full_server_classes is not None for _, r in results) else []
    metrics += [_local(c)] if judged else []
    cost = Table(
        "Cost of all rounds",
        ("algorithm", "MB down", "MB up", "waste %", "simulated s", "real s"),
        tuple(
            (label, fine(r.mb_down), fine(r.mb_up), cell(r.waste, 100), *map(seconds, (r.seconds_simulated, r.seconds)))
            for label, r in results
        ),
    )
    even = Table(
        "Uniformity: how evenly the clients of a round finish, s (0: at the same moment)",
        ("algorithm", "all asked", "answered", "compute", "communication", "real clock", "variance s²"),
        tuple((label, *(seconds(getattr(r, name)) for name in NAMES)) for label, r in results),
    )
    evenness = [even] if any(getattr(r, name) is not None for _, r in results for name in NAMES) else []
    return [_with_factors(c, table) for table in (*metrics, cost, *_phases(c), *evenness, *_to_reach(c, measure))]


def differing(c: ComparisonFile) -> list[Table]:
    """Where the rows differ; empty if they do not."""
    return [Table(TITLE, *as_rows(c.differences, c.labels))] if c.differences else []


def factors(c: ComparisonFile) -> dict[str, list[Any]]:
    """The parameters that every label was made with several values of, and these values."""
    found: dict[str, list[Any]] = {}
    for r in c.results.values():
        for path, value in r.at.items():
            listed = found.setdefault(path, [])
            listed += [] if value in listed else [value]
    return found


def _with_factors(c: ComparisonFile, table: Table) -> Table:
    """A column for each factor behind the labels."""
    names = tuple(factors(c))

    def at(label: str) -> tuple[str, ...]:
        return tuple(plain(c.results[label].at[name]) if label in c.results else NONE for name in names)

    rows = tuple((row[0], *at(row[0]), *row[1:]) for row in table.rows)
    return Table(table.title, (table.head[0], *names, *table.head[1:]), rows)


def _behind(c: ComparisonFile, measure: Measure) -> list[Table]:
    unit, seeds = "% points" if measure.unit else measure.name, ", ".join(map(str, c.seeds))
    told = [(f", with {case}", case.first, case.labels) for case in c.cases] or [("", c.first or {}, c.labels)]
    return [
        Table(
            f"Behind the highest, {unit}{where}: paired over the seeds {seeds}",
            ("algorithm", *(ranking.TITLES[figure] for figure in found)),
            ranking.rows(found, labels, measure),
        )
        for where, found, labels in told
        if found
    ]


def _local(c: ComparisonFile) -> Table:
    """The table of local accuracies as FedRolex prints it: beside each mean the standard deviation over the clients.
    Both are means over the seeds."""
    rows = (
        (label, name, f"{100 * of.mean.mean:.2f} ± {100 * of.sd.mean:.2f}", cell(of.clients, digits=0))
        for label, r in c.results.items()
        for name, of in r.local.items()
    )
    title = "Local accuracy of each level, %: mean ± standard deviation over the clients"
    return Table(title, ("algorithm", "level", "local", "clients"), tuple(rows))


PHASES = {
    "plan s": "seconds_plan",
    "encode s": "seconds_encode",
    "train s": "seconds_train",
    "of it decode s": "seconds_decode",
    "clients encode s": "seconds_encode_clients",
    "merge s": "seconds_merge",
    "evaluate s": "seconds_evaluate",
    "simulated compute s": "simulated_compute",
    "communication s": "simulated_communication",
    "Mbit down": "bits_down",
    "Mbit up": "bits_up",
}
"""Columns, and what `fl_engine.rounds.phases` calls them."""


def _phases(c: ComparisonFile) -> list[Table]:
    """The table of a round's phases, for the labels whose runs measured them."""

    def cells(found: Mapping[str, Spread]) -> Iterator[str]:
        for name in PHASES.values():
            each = found.get(name)
            yield fine(each, 1e-6, 3) if name in BITS else seconds(each)

    rows = tuple((label, *cells(r.phases)) for label, r in c.results.items())
    return (
        [Table("Phases of a round", ("algorithm", *PHASES), rows)] if any(r.phases for r in c.results.values()) else []
    )


def _to_reach(c: ComparisonFile, measure: Measure) -> list[Table]:
    """With avg, where a label has it, and with the full model: a table for MB down and up, each for itself, one
    for rounds, one for the time, and one for all MB; none without accuracies to reach."""
    targets = [one.accuracy for one in next(iter(c.results.values())).reached]
    if not targets:
        return []
    head = ("algorithm", *(f"{measure.scale * target:g} {measure.unit}".rstrip() for target in targets))
    on_the_clock = simulated(c)

    spent: dict[str, Callable[[Reached], str]] = {
        "MB down / up": lambda one: f"{fine(one.mb_down)} / {fine(one.mb_up)}",
        "Rounds": lambda one: cell(one.rounds, digits=1),
        f"{'Simulated' if on_the_clock else 'Real'} s": lambda one: seconds(
            one.seconds_simulated if on_the_clock else one.seconds
        ),
        "MB": lambda one: fine(one.mb),
    }
    targeted = {"avg": {n: r.reached_avg for n, r in c.results.items() if r.reached_avg}}
    targeted["the full model"] = {n: r.reached for n, r in c.results.items()}
    return [
        Table(
            f"{title} to reach {'an accuracy' if c.metric == 'accuracy' else c.metric} with {of}",
            head,
            tuple((label, *(_reached(c, one, said) for one in each)) for label, each in found.items()),
        )
        for of, found in targeted.items()
        if found
        for title, said in spent.items()
    ]


def _further(names: Iterable[str], values: Mapping[str, Spread | None]) -> Iterator[str]:
    for measure in map(Measure, names):
        yield cell(values.get(measure.name), measure.scale, 2 if measure.unit else 4)


def _reference(c: ComparisonFile, measure: Measure, judged: bool, beside: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """The row of central training for the table of the runs' figures; empty without central training. `judged`: the
    table has local accuracies, which belong to clients. `beside`: the further metrics that it has."""
    if c.central is None:
        return ()
    full, best = (cell(score, measure.scale, 2 if measure.unit else 4) for score in (c.central.full, c.central.best))
    last = f"{c.central.settings['central.epochs']:.1f}"
    none = (NONE, NONE) if judged else ()
    more = _further(beside, c.central.further)
    return ((REFERENCE, "100", NONE, full, NONE, best, cell(c.central.best_epoch, digits=1), last, *none, *more),)


def _reference_highest(c: ComparisonFile, measure: Measure) -> tuple[tuple[str, ...], ...]:
    if c.central is None:
        return ()
    found = [cell(one.full, measure.scale, 2 if measure.unit else 4) for one in c.central.highest]
    return ((REFERENCE, *(NONE for _ in found), *found),)


def cell(s: Spread | None, scale: float = 1, digits: int = 2) -> str:
    """`mean`, or `mean ± std`."""
    if s is None:
        return NONE
    mean = f"{scale * s.mean:,.{digits}f}"
    return mean if s.std is None else f"{mean} ± {scale * s.std:,.{digits}f}"


def fine(s: Spread | None, scale: float = 1, digits: int = 2) -> str:
    """`cell`, with as many decimals more as show two figures of a small mean."""
    return cell(s, scale, decimals(0.0 if s is None else scale * s.mean, digits))


def seconds(s: Spread | None) -> str:
    """Small values get more decimals: simulated seconds of a small network are small."""
    if s is None or s.mean >= 1000:
        return cell(s, digits=0)
    return cell(s, digits=1) if s.mean >= 10 else fine(s, digits=3)


def simulated(c: ComparisonFile) -> bool:
    """Whether all runs have a simulated clock: a table does not mix simulated and real seconds."""
    return all(r.seconds_simulated is not None for r in c.results.values())


def _reached(c: ComparisonFile, one: Reached, spent: Callable[[Reached], str]) -> str:
    """`(2/3)`: only 2 of 3 seeds reach it."""
    some = f" ({len(one.seeds)}/{len(c.seeds)})" if len(one.seeds) < len(c.seeds) else ""
    return spent(one) + some if one.seeds else NONE
