"""The tables of a comparison: a title, a head, and rows of cells as they are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fl_engine.fleet.uniformity import NAMES
from fl_engine.rounds.phases import BITS
from flexfleet.experiments import ranking
from flexfleet.experiments.comparison_file import (
    BY_OWNER,
    LOCAL,
    ComparisonFile,
    Reached,
    Spread,
    Summary,
    further,
    further_of,
)
from flexfleet.experiments.row_differences import TITLE, as_rows
from flexfleet.files.measure import Measure, decimals
from flexfleet.reports.report import NONE, plain

REFERENCE = "central training"
OWNERS = ("avg devices'", "full devices'", "avg server's", "full server's", "own, all classes")
UNIFORMITY = ("all asked", "answered", "compute", "communication", "real clock", "variance s²")
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
"""Map columns to their names in `fl_engine.rounds.phases`."""

Columns = Mapping[str, Callable[[Summary], str]]
"""Map the head of each column to a function that returns the cell of a label."""


@dataclass(frozen=True)
class Table:
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(c: ComparisonFile) -> list[Table]:
    """Return the tables of the deciding metric, its highest values, the cost, a round's phases, uniformity, and the
    cost to reach given values. A table without figures is left out."""
    labels, measure = list(c.results.values()), Measure(c.metric)
    found = [_metric(c, measure), *_behind(c, measure), *_highest(c, measure)]
    if any(r.full_server_classes is not None for r in labels):
        figures = zip(OWNERS, (*BY_OWNER, "devices"), strict=True)
        owners = {head: _share(name) for head, name in figures}
        found.append(_table(c, "Test accuracy by whose the class is, %", owners))
    if any(r.local for r in labels):
        found.append(_local(c))
    cost: Columns = {
        "MB down": lambda r: fine(r.mb_down),
        "MB up": lambda r: fine(r.mb_up),
        "waste %": lambda r: cell(r.waste, 100),
        "simulated s": lambda r: seconds(r.seconds_simulated),
        "real s": lambda r: seconds(r.seconds),
    }
    found.append(_table(c, "Cost of all rounds", cost))
    if any(r.phases for r in labels):
        found.append(_table(c, "Phases of a round", {head: _phase(name) for head, name in PHASES.items()}))
    if any(getattr(r, name) is not None for r in labels for name in NAMES):
        title = "Uniformity: how evenly the clients of a round finish, s (0: at the same moment)"
        found.append(_table(c, title, {head: _seconds(n) for head, n in zip(UNIFORMITY, NAMES, strict=True)}))
    found += _to_reach(c, measure)
    return [_with_factors(c, table) for table in found]


def differing(c: ComparisonFile) -> list[Table]:
    """Return the table of the options in which the rows differ; empty if they do not differ."""
    return [Table(TITLE, *as_rows(c.differences, c.labels))] if c.differences else []


def factors(c: ComparisonFile) -> dict[str, list[Any]]:
    """Map the parameters that every label was run with several values of to these values."""
    found: dict[str, list[Any]] = {}
    for r in c.results.values():
        for path, value in r.at.items():
            listed = found.setdefault(path, [])
            listed += [] if value in listed else [value]
    return found


def _table(c: ComparisonFile, title: str, columns: Columns, central: Mapping[str, str] = MappingProxyType({})) -> Table:
    """Make a table with a row for each label, and one for the central training if `central` has cells of it."""
    rows = [(label, *(of(r) for of in columns.values())) for label, r in c.results.items()]
    if central:
        rows.append((REFERENCE, *(central.get(head, NONE) for head in columns)))
    return Table(title, ("algorithm", *columns), tuple(rows))


def _with_factors(c: ComparisonFile, table: Table) -> Table:
    """Insert a column for each factor after the labels."""
    names = tuple(factors(c))

    def at(label: str) -> tuple[str, ...]:
        return tuple(plain(c.results[label].at[name]) if label in c.results else NONE for name in names)

    rows = tuple((row[0], *at(row[0]), *row[1:]) for row in table.rows)
    return Table(table.title, (table.head[0], *names, *table.head[1:]), rows)


# ------------------------------------------------------------------------------------------------ the tables
def _metric(c: ComparisonFile, measure: Measure) -> Table:
    columns: dict[str, Callable[[Summary], str]] = {
        "levels %": lambda r: " / ".join(f"{size:.0f}" for size in r.levels),
        "avg last": lambda r: _score(r.last.avg, measure),
        "full last": lambda r: _score(r.last.full, measure),
        "avg at best": lambda r: _score(r.best.avg, measure),
        "full at best": lambda r: _score(r.best.full, measure),
        "best round": lambda r: cell(r.best.round, digits=1),
        "last round": lambda r: cell(r.last.round, digits=1),
    }
    if any(r.local for r in c.results.values()):
        columns |= {name.replace("_", " "): _share(name) for name in LOCAL}
    central = {}
    if c.central is not None:
        central = {
            "levels %": "100",
            "full last": _score(c.central.full, measure),
            "full at best": _score(c.central.best, measure),
            "best round": cell(c.central.best_epoch, digits=1),
            "last round": f"{c.central.settings['central.epochs']:.1f}",
        }
    for name in further(c):
        own = Measure(name)
        columns[f"full {own.column}"] = lambda r, own=own: _score(further_of(r, own.name), own)  # type: ignore[misc]
        if c.central is not None:
            central[f"full {own.column}"] = _score(c.central.further.get(name), own)
    return _table(c, f"Test {measure.name}, {measure.unit}".removesuffix(", "), columns, central)


def _highest(c: ComparisonFile, measure: Measure) -> list[Table]:
    columns: dict[str, Callable[[Summary], str]] = {}
    central = {}
    shares = [one.share for one in next(iter(c.results.values())).highest]
    for of in ("avg", "full"):
        for i, share in enumerate(shares):
            columns[f"{of} {share} %"] = lambda r, of=of, i=i: _score(getattr(r.highest[i], of), measure)  # type: ignore[misc]
            if c.central is not None and of == "full":
                central[f"full {share} %"] = _score(c.central.highest[i].full, measure)
    title = f"Highest until so many % of the rounds, {measure.unit}".removesuffix(", ")
    return [_table(c, title, columns, central)] if shares else []


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
    """Make the table of local accuracies as FedRolex prints it; means and deviations are means over the seeds."""
    rows = (
        (label, name, f"{100 * of.mean.mean:.2f} ± {100 * of.sd.mean:.2f}", cell(of.clients, digits=0))
        for label, r in c.results.items()
        for name, of in r.local.items()
    )
    title = "Local accuracy of each level, %: mean ± standard deviation over the clients"
    return Table(title, ("algorithm", "level", "local", "clients"), tuple(rows))


def _to_reach(c: ComparisonFile, measure: Measure) -> list[Table]:
    """Make four tables with avg, if a label has it, and four with full; none without accuracies to reach."""
    targets = [one.accuracy for one in next(iter(c.results.values())).reached]
    head = ("algorithm", *(f"{measure.scale * target:g} {measure.unit}".rstrip() for target in targets))
    # A table does not mix simulated and real seconds.
    on_the_clock = all(r.seconds_simulated is not None for r in c.results.values())
    spent: dict[str, Callable[[Reached], str]] = {
        "MB down / up": lambda one: f"{fine(one.mb_down)} / {fine(one.mb_up)}",
        "Rounds": lambda one: cell(one.rounds, digits=1),
        f"{'Simulated' if on_the_clock else 'Real'} s": lambda one: seconds(
            one.seconds_simulated if on_the_clock else one.seconds
        ),
        "MB": lambda one: fine(one.mb),
    }
    targeted = {
        "avg": {label: r.reached_avg for label, r in c.results.items() if r.reached_avg},
        "the full model": {label: r.reached for label, r in c.results.items() if r.reached},
    }
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


def _reached(c: ComparisonFile, one: Reached, spent: Callable[[Reached], str]) -> str:
    """`(2/3)`: only 2 of 3 seeds reach the accuracy."""
    some = f" ({len(one.seeds)}/{len(c.seeds)})" if len(one.seeds) < len(c.seeds) else ""
    return spent(one) + some if one.seeds else NONE


# ------------------------------------------------------------------------------------------------- the cells
def _share(name: str) -> Callable[[Summary], str]:
    return lambda r: cell(getattr(r, name), 100)


def _seconds(name: str) -> Callable[[Summary], str]:
    return lambda r: seconds(getattr(r, name))


def _phase(name: str) -> Callable[[Summary], str]:
    return lambda r: fine(r.phases.get(name), 1e-6, 3) if name in BITS else seconds(r.phases.get(name))


def _score(s: Spread | None, measure: Measure) -> str:
    return cell(s, measure.scale, 2 if measure.unit else 4)


def cell(s: Spread | None, scale: float = 1, digits: int = 2) -> str:
    """`mean`, or `mean ± std`."""
    if s is None:
        return NONE
    mean = f"{scale * s.mean:,.{digits}f}"
    return mean if s.std is None else f"{mean} ± {scale * s.std:,.{digits}f}"


def fine(s: Spread | None, scale: float = 1, digits: int = 2) -> str:
    """`cell`, with enough decimals to show two figures of a small mean."""
    return cell(s, scale, decimals(0.0 if s is None else scale * s.mean, digits))


def seconds(s: Spread | None) -> str:
    """`cell` with more decimals for small values, as simulated seconds of a small network are."""
    if s is None or s.mean >= 1000:
        return cell(s, digits=0)
    return cell(s, digits=1) if s.mean >= 10 else fine(s, digits=3)
