"""Create the tables of a comparison, and find the options that differ between variants.

Options are all parameters of a run, including the defaults of the algorithm and the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fl_engine.core.fields import Moves
from fl_engine.core.types import Pool
from fl_engine.rounds import timing
from flexfleet.config import Config, algorithm, moves
from flexfleet.config.read import used_options
from flexfleet.experiments import ranking
from flexfleet.experiments.comparison_file import ComparisonFile, Spread, Summary, further, further_of
from flexfleet.files.measure import Measure, decimals
from flexfleet.reports.finished_run import plain
from flexfleet.reports.page import NONE, Table

REFERENCE = "central training"
COST = "Cost of all rounds"
"""Title of the table with bytes, waste and time."""
OWNERS = {
    "avg devices'": "avg_device_classes",
    "full devices'": "full_device_classes",
    "avg server's": "avg_server_classes",
    "full server's": "full_server_classes",
    "own, all classes": "devices",
}
"""Map column headers to the fields of `Figures` with the accuracies on the devices' or the server's classes."""
UNIFORMITY = ("all sampled", "merged", "compute", "communication", "real clock", "variance s²")
IDENTITY = ("algorithm.name", "seed", "schema_version")
"""Options that are not compared, because their values identify a variant or a run."""
NO_EFFECT = (Moves.PLACE, Moves.EXECUTION)
"""Kinds of options that do not change results."""

Differences = dict[str, dict[str, Any]]
"""Options that differ between variants, as {dotted name: {label: value}}."""
Columns = Mapping[str, Callable[[Summary], str]]
"""Map each column header to a function that returns the cell for a variant."""


def tables(c: ComparisonFile) -> list[Table]:
    """Return all tables of the comparison, from the main metric to the options that differ between variants. Empty
    tables are omitted."""
    labels, measure = list(c.results.values()), Measure(c.metric)
    found = [_metric(c, measure), *_behind(c, measure), *_highest(c, measure)]
    if any(r.full_server_classes is not None for r in labels):
        owners: Columns = {head: _of(name, percent) for head, name in OWNERS.items()}
        found.append(_table(c, "Test accuracy on the devices' and the server's classes, %", owners))
    if any(r.local for r in labels):
        found.append(_local(c))
    if any(r.clients_mean is not None for r in labels):
        heads = ("mean", "10th percentile", "worst", "standard deviation")
        names = ("clients_mean", "clients_p10", "clients_worst", "clients_spread")
        own: Columns = {head: _of(n, lambda s: _score(s, measure)) for head, n in zip(heads, names, strict=True)}
        title = f"Clients' models on their own held-out samples, {measure.unit}".removesuffix(", ")
        found.append(_table(c, title, own))
    cost: Columns = {
        "MB down": lambda r: fine(r.mb_down),
        "MB up": lambda r: fine(r.mb_up),
        "waste %": lambda r: percent(r.waste),
        "failed clients": failed,
        "simulated s": lambda r: seconds(r.seconds_simulated),
        "real s": lambda r: seconds(r.seconds),
    }
    energy: Columns = {"joules": lambda r: fine(r.joules)} if any(r.joules is not None for r in labels) else {}
    found.append(_table(c, COST, {**cost, **energy}))
    if any(getattr(r, name) is not None for r in labels for name in timing.UNIFORMITY):
        title = "Uniformity of the clients' finishing times in a round, s (0: all finish at the same time)"
        times: Columns = {head: _of(n, seconds) for head, n in zip(UNIFORMITY, timing.UNIFORMITY, strict=True)}
        found.append(_table(c, title, times))
    found = [_with_factors(c, table.varying()) for table in (*found, *_to_reach(c, measure))]
    return [*found, as_table(c.differences, c.labels)] if c.differences else found


def factors(c: ComparisonFile) -> dict[str, list[Any]]:
    """Map each factor (`flexfleet compare --over`) to a list of its values."""
    found: dict[str, list[Any]] = {}
    for r in c.results.values():
        for path, value in r.at.items():
            listed = found.setdefault(path, [])
            listed += [] if value in listed else [value]
    return found


def _table(c: ComparisonFile, title: str, columns: Columns, central: Mapping[str, str] = MappingProxyType({})) -> Table:
    """Return a table with a row for each variant. If `central` is not empty, add a row for the central training."""
    rows = [(label, *(of(r) for of in columns.values())) for label, r in c.results.items()]
    if central:
        rows.append((REFERENCE, *(central.get(head, NONE) for head in columns)))
    return Table(title, ("algorithm", *columns), tuple(rows))


def _with_factors(c: ComparisonFile, table: Table) -> Table:
    """Insert a column for each factor after the column with the labels."""
    names = tuple(factors(c))

    def at(label: str) -> tuple[str, ...]:
        return tuple(plain(c.results[label].at[name]) if label in c.results else NONE for name in names)

    rows = tuple((row[0], *at(row[0]), *row[1:]) for row in table.rows)
    return replace(table, head=(table.head[0], *names, *table.head[1:]), rows=rows)


# ------------------------------------------------------------------------------------------------ the tables
def _metric(c: ComparisonFile, measure: Measure) -> Table:
    columns: dict[str, Callable[[Summary], str]] = {
        "levels %": lambda r: " / ".join(f"{size:.0f}" for size in r.levels),
        "avg last": lambda r: _score(r.last.avg, measure),
        "full last": lambda r: _score(r.last.full, measure),
        "avg at best": lambda r: _score(r.best.avg, measure),
        "full at best": lambda r: _score(r.best.full, measure),
        "best round": lambda r: count(r.best.round),
        "last round": lambda r: count(r.last.round),
    }
    if any(r.local for r in c.results.values()):
        columns |= {"local avg": _of("local_avg", percent), "local full": _of("local_full", percent)}
    central = {}
    if c.central is not None:
        central = {
            "levels %": "100",
            "full last": _score(c.central.full, measure),
            "full at best": _score(c.central.best, measure),
            "best round": count(c.central.best_epoch),
            "last round": f"{c.central.settings['central.epochs']}",
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
    title = f"Highest value within a fraction of the rounds, {measure.unit}".removesuffix(", ")
    return [_table(c, title, columns, central)] if shares else []


def _behind(c: ComparisonFile, measure: Measure) -> list[Table]:
    unit, seeds = "% points" if measure.unit else measure.name, ", ".join(map(str, c.seeds))
    groups = [(f", with {case}", case.first, case.labels) for case in c.cases] or [("", c.first or {}, c.labels)]
    return [
        Table(
            f"Behind the highest, {unit}{where}: paired over the seeds {seeds}",
            ("algorithm", *(ranking.TITLES[figure] for figure in found)),
            ranking.rows(found, labels, measure),
        )
        for where, found, labels in groups
        if found
    ]


def _local(c: ComparisonFile) -> Table:
    """Return the table of local accuracies in FedRolex's format. All values are averaged over the seeds."""
    rows = (
        (label, name, f"{100 * of.mean.mean:.2f} ± {100 * of.sd.mean:.2f}", cell(of.clients, digits=0))
        for label, r in c.results.items()
        for name, of in r.local.items()
    )
    title = "Local accuracy of each level, %: mean ± standard deviation over the clients"
    return Table(title, ("algorithm", "level", "local", "clients"), tuple(rows))


def _to_reach(c: ComparisonFile, measure: Measure) -> list[Table]:
    """Return two tables, which contain the cost until avg and full reach each target accuracy. Each row shows for how
    many seeds the run reaches the accuracy. Empty tables are omitted."""
    on_the_clock = all(r.seconds_simulated is not None for r in c.results.values())
    time = "simulated s" if on_the_clock else "real s"
    energy = ("joules",) if any(r.joules is not None for r in c.results.values()) else ()
    head = ("algorithm", "to reach", "seeds", "rounds", time, "MB down", "MB up", *energy)
    what, found = "an accuracy" if c.metric == "accuracy" else c.metric, []
    for of, name in (("avg", "reached_avg"), ("the full model", "reached")):
        rows = [
            (
                label,
                f"{measure.scale * one.accuracy:g} {measure.unit}".rstrip(),
                f"{len(one.seeds)} of {len(c.seeds)}",
                count(one.rounds),
                seconds(one.seconds_simulated if on_the_clock else one.seconds),
                fine(one.mb_down),
                fine(one.mb_up),
                *(fine(one.joules) for _ in energy),
            )
            for label, r in c.results.items()
            for one in getattr(r, name)
        ]
        found += [Table(f"Cost to reach {what} with {of}", head, rows)] if rows else []
    return found


# ------------------------------------------------------------------------------------------------- the cells
def _of(name: str, shown: Callable[[Spread | None], str]) -> Callable[[Summary], str]:
    return lambda r: shown(getattr(r, name))


def _score(s: Spread | None, measure: Measure) -> str:
    return cell(s, measure.scale, 2 if measure.unit else 4)


def cell(s: Spread | None, scale: float = 1, digits: int = 2) -> str:
    """Format a mean as `mean ± std`, or as `mean` if there is only one seed."""
    if s is None:
        return NONE
    mean = f"{scale * s.mean:,.{digits}f}"
    return mean if s.std is None else f"{mean} ± {scale * s.std:,.{digits}f}"


def percent(s: Spread | None) -> str:
    return cell(s, 100)


def fine(s: Spread | None, digits: int = 2) -> str:
    """Format like `cell`, with more decimals for small means, so that at least two significant digits are shown."""
    return cell(s, digits=decimals(0.0 if s is None else s.mean, digits))


def count(s: Spread | None) -> str:
    """Format a number of rounds or clients like `cell`, with a decimal only if it is a mean over several seeds."""
    return cell(s, digits=0 if s is None or s.std is None else 1)


def failed(r: Summary) -> str:
    """Format the number of failed clients in all rounds."""
    return "0" if r.clients_failed is not None and not r.clients_failed.mean else count(r.clients_failed)


def seconds(s: Spread | None) -> str:
    """Format seconds like `cell`, with more decimals for small values, such as simulated times."""
    if s is None or s.mean >= 1000:
        return cell(s, digits=0)
    return cell(s, digits=1) if s.mean >= 10 else fine(s, digits=3)


# ----------------------------------------------------------------------------------------- options that differ
def differences(configs: Mapping[str, Config], pools: Mapping[str, Pool]) -> Differences:
    """Return the options that differ between the configurations. `pools` maps labels to pools of sub-models. Raises
    ConfigError."""
    options = {
        label: {
            key: value
            for key, value in used_options(config, algorithm(config), pools[label]).items()
            if key not in IDENTITY and moves(key) not in NO_EFFECT
        }
        for label, config in configs.items()
    }
    found: Differences = {}
    for name in dict.fromkeys(name for each in options.values() for name in each):
        values = {label: each[name] for label, each in options.items() if name in each}
        if len({plain(value) for value in values.values()}) > 1:
            found[name] = values
    return found


def as_table(found: Differences, labels: Sequence[str]) -> Table:
    rows = [
        (name, *(shown(values[label]) if label in values else NONE for label in labels))
        for name, values in found.items()
    ]
    return Table("Options that differ between the rows, besides the algorithm", ("option", *labels), rows)


def shown(value: Any) -> str:
    """Format a strategy that has options as in `oort, clip 0.9`. Format any other value with `plain`."""
    if isinstance(value, dict) and "name" in value:
        return ", ".join([value["name"], *(f"{key} {plain(each)}" for key, each in value.items() if key != "name")])
    return plain(value)
