"""Create an HTML report and a text table that describe finished runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError
from fl_engine.core.fields import adapter
from fl_engine.fleet import devices
from fl_engine.fleet.devices import Tier
from fl_engine.rounds.recorder import STAGES
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.store import FolderStore
from flexfleet.files.artifacts import ConfusionFile, Forecast
from flexfleet.files.measure import Measure, decimals
from flexfleet.files.run_status import QUORUM, REASONS, first_failures, lines_of
from flexfleet.reports import plots, precisions
from flexfleet.reports.answer import Answer, Metric, Standing, compared, count, interest, named, tiles
from flexfleet.reports.figure import colours_of
from flexfleet.reports.finished_run import FinishedRun, differences, labels, measure_of, plain
from flexfleet.reports.page import NONE, Table, render

CLASSES = 26
"""Maximum number of classes for which a confusion matrix is shown. Larger matrices would not be readable."""
MOST_CLIENTS = 20
"""Maximum number of clients with failed updates that have a row of their own."""


def table(runs: Sequence[FinishedRun]) -> str:
    """Return the answer and a text table with one row for each run, without columns that are equal in all rows."""
    unit = f" {runs[0].measure.unit}".rstrip()
    head = ("run", "algorithm", "rounds", f"avg{unit}", f"full{unit}", f"best avg/full{unit} (round)", "MB", "waste %")
    rows = []
    for r in runs:
        scores = (r.measure.number(r.evaluation.avg), r.measure.number(r.evaluation.full), _best(r))
        costs = (mb(r.total("bytes_down") + r.total("bytes_up")), percent(r.waste))
        times = (short_seconds(r.uniformity), f"{r.history.seconds:,.1f}")
        rows.append((r.file.run_id, r.pool.algorithm, str(len(r.rows)), *scores, *costs, *times))
    shown = Table("", (*head, "uniformity s", "seconds"), rows).varying()
    lines = [f"{answer(runs).sentence}.", shown.text(left=2)]
    lines += [f"{r.file.run_id}: {r.tally.problem()}" for r in runs if len(runs) > 1 and r.tally.status != "finished"]
    return "\n".join(lines)


def answer(runs: Sequence[FinishedRun]) -> Answer:
    """Return the sentence and the tiles with which the terminal and the page begin. Runs are compared only if they
    differ in nothing but the algorithm."""
    named_runs = dict(zip(labels(runs), runs, strict=True))
    metric = _metric(runs)
    standings = [_standing(label, named_runs[label], metric) for label in rows_of_interest(runs)]
    main, other = standings[0], standings[1] if len(standings) > 1 else None
    failed = [label for label, run in named_runs.items() if run.tally.status != "finished"]
    if failed and len(runs) == 1:
        sentence = f"{main.label} did not train a model ({runs[0].tally.status}): {runs[0].tally.problem()}"
    elif failed:
        sentence = f"{len(failed)} of {len(runs)} runs did not train a model: {', '.join(failed)}"
    elif other is not None and not differences(runs):
        sentence = compared(main, other, metric, seeds=1)
    else:
        tally = runs[0].tally
        alone = f" with {main.shown[1]}; {tally if tally.failed else 'no update failed'}"
        forked = any(run.file.forked for run in runs)
        apart = "" if forked else "; the runs differ in more than the algorithm, so they are not compared"
        sentence = f"{main.name} reaches {metric.score(main.value)} after {count(main.rounds, 'round')}"
        sentence += apart if len(runs) > 1 else alone
    return Answer(", ".join(run.file.run_id for run in runs), sentence, tiles(metric, main, other))


def rows_of_interest(runs: Sequence[FinishedRun]) -> tuple[str, ...]:
    metric = _metric(runs)
    return interest({label: _value(run, metric) for label, run in zip(labels(runs), runs, strict=True)})


def _metric(runs: Sequence[FinishedRun]) -> Metric:
    on_clients = all(run.evaluation.on_clients is not None for run in runs)
    return Metric(measure_of(runs), on_clients, any(run.evaluation.kept_by_clients for run in runs))


def _value(run: FinishedRun, metric: Metric) -> float:
    of = run.evaluation
    return of.on_clients.all.mean if metric.on_clients and of.on_clients is not None else of.avg


def _standing(label: str, run: FinishedRun, metric: Metric) -> Standing:
    value, sent, tally = _value(run, metric), run.total("bytes_down") + run.total("bytes_up"), run.tally
    shown = (
        metric.measure.with_unit(value),
        f"{mb(sent)} MB",
        f"{run.history.seconds:,.1f} s",
        f"{tally.failed} of {tally.merged + tally.failed}",
    )
    timed = all("seconds_simulated" in row.metrics for row in run.rows if row.metrics["clients_trained"])
    simulated = sum(row.metrics.get("seconds_simulated", 0) for row in run.rows) if timed else 0
    notes = (
        f"full model {metric.measure.with_unit(run.evaluation.full)}",
        f"{percent(run.waste)} % of the sent weights wasted",
        f"{short_seconds(simulated)} s on the simulated clock" if simulated else "",
        f"{count(run.total('clients_pruned'), 'model')} pruned on devices",
    )
    name = named(label, run.pool.algorithm, run.config.get("algorithm.eligible"))
    return Standing(label, name, value, len(run.rows), sent, shown, notes)


def percent(share: float) -> str:
    return f"{100 * share:.2f}"


def mb(count: float) -> str:
    """Format bytes as MB (1e6 bytes), with more decimals for small values."""
    return f"{count / 1e6:,.{0 if count >= 1e9 else decimals(count / 1e6, 2)}f}"


def short_seconds(value: float | None) -> str:
    """Format seconds, with more decimals for small values. Simulated seconds of small networks can be very small."""
    return NONE if value is None else f"{value:,.{0 if value >= 1000 else 1 if value >= 10 else decimals(value, 3)}f}"


def _best(run: FinishedRun) -> str:
    m = run.best.metrics
    return f"{run.measure.number(m['avg'])}/{run.measure.number(m['full'])} ({run.best.round + 1})"


def report(runs: Sequence[FinishedRun], out: Path) -> Path:
    """Write the HTML report to `out` atomically. The same runs result in a bit-identical report. Raises ConfigError."""
    if out.suffix not in (".html", ".htm") or out.is_dir():
        raise ConfigError(f"the report must be an .html file, got {str(out)!r}")
    FolderStore(out.parent).put(out.name, _page(runs).encode())
    return out


def _page(runs: Sequence[FinishedRun]) -> str:
    names, measure = labels(runs), measure_of(runs)
    two = rows_of_interest(runs)
    curves = [
        (name, plots.curve([run.rows], "avg"), plots.curve([run.rows], "full"))
        for name, run in zip(names, runs, strict=True)
    ]
    further = [Measure(name) for name in dict.fromkeys(name for run in runs for name in run.evaluation.further)]
    return render(
        "report.html",
        {"percent": percent, "mb": mb, "plain": plain, "short_seconds": short_seconds},
        kind="report",
        answer=answer(runs),
        lines=dict.fromkeys(f"{run.dataset} · {run.pool.model}" for run in runs),
        measure=measure,
        further=further,
        summary=_summary(names, runs, further),
        parts=[_part(i, names, runs, two) for i in range(len(runs))],
        differences=differences(runs),
        curves=plots.comparison(curves, two, measure=measure),
        any_timed=any(run.uniformity is not None for run in runs),
        dash=NONE,
    )


def _summary(names: Sequence[str], runs: Sequence[FinishedRun], further: Sequence[Measure]) -> Table:
    """Return the table of all runs on the page. It has a column for the algorithm unless the names are algorithms."""
    unit, rows = f" {runs[0].measure.unit}".rstrip(), []
    by_algorithm = list(names) == [run.pool.algorithm for run in runs]
    scores = (f"avg{unit}", f"full{unit}", "best avg/full (round)", *(f"full {m.column}" for m in further))
    costs = ("MB down", "MB up", "waste %", "uniformity s", "seconds", "pruned", "failed")
    for name, r in zip(names, runs, strict=True):
        of, m = r.evaluation, r.measure
        rows.append((
            name, *(() if by_algorithm else (r.pool.algorithm,)), plain(r.config.get("seed")), str(len(r.rows)),
            m.number(of.avg), m.number(of.full), _best(r),
            *(m.number(of.further[m.name]["full"]) if m.name in of.further else NONE for m in further),
            mb(r.total("bytes_down")), mb(r.total("bytes_up")), percent(r.waste), short_seconds(r.uniformity),
            f"{r.history.seconds:,.1f}", *(f"{r.total(f'clients_{kind}'):.0f}" for kind in ("pruned", "failed")),
        ))  # fmt: skip
    first = ("algorithm",) if by_algorithm else ("run", "algorithm")
    return Table("", (*first, "seed", "rounds", *scores, *costs), rows).varying()


def _part(i: int, names: Sequence[str], runs: Sequence[FinishedRun], two: Sequence[str]) -> dict[str, Any]:
    """Return the values that the template shows for run `i`. `two` are the labels of the rows of interest."""
    run, levels = runs[i], [level.name for level in runs[i].pool.levels]
    colours, counts = plots.level_colours(levels), run.partition.class_counts
    # If runs have the same partition, plot it only for the first of them.
    owner = next(n for n, r in zip(names, runs, strict=True) if r.file.partition_sha256 == run.file.partition_sha256)
    is_shown = owner == names[i] and any(run.partition.client_samples)  # With partition.rule=local, all counts are 0.
    histograms = run.evaluation.local_histogram
    alone = len(levels) == 1 and run.pool.levels[0].share == 1
    shared = run.file.forked.round if run.file.forked else 0
    return {
        "label": names[i],
        "run": run,
        "colour": colours_of(names, two)[names[i]],
        "grey": names[i] not in two,
        "level_colours": colours,
        "best_of_level": {level: _best_of(run.rows, f"{run.measure.name}/{level}") for level in run.evaluation.levels},
        "confusion": _confusion(run),
        "precisions": precisions.as_table(run.precisions, NONE) if run.precisions else None,
        "refusals": precisions.refusals(run.precisions),
        "failures": failures(run),
        "codes": _meanings(run),
        "forecast": run.forecast and forecast_table(run.forecast),
        "first_failures": [lines_of(each) for each in first_failures(run.rows)],
        "apoz": {layer.group: layer for layer in run.apoz.layers},
        "partition_of": None if owner == names[i] else owner,
        "draw": {
            "pool": None if alone else plots.pool_widths(run.pool, run.apoz, f"pool-{i}"),
            "levels": plots.of_levels(run.rows, levels, f"levels-{i}", run.measure, shared=shared),
            "local": plots.local_accuracy(histograms, colours, f"local-{i}") if histograms else None,
            "clients": plots.clients_per_round(run.rows, f"clients-{i}"),
            "partition": plots.partition_map(counts, f"partition-{i}", run.partition.label) if is_shown else None,
        },
    }


def forecast_table(found: Forecast) -> Table:
    """Return a table of the figures. It includes the real values if they are known."""
    head, rows = ("figure", "forecast", "from", "to", "real"), []
    for name, figure in found.figures.items():
        values = (figure.get(key) for key in ("value", "low", "high", "real"))
        shown = (NONE if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values)
        rows.append((name.replace("_", " "), *shown))
    return Table("", head, rows).varying()


def _confusion(run: FinishedRun) -> list[tuple[str, Sequence[Any], list[list[tuple[int, float]]]]]:
    """Return the confusion matrix and the class names of each level, from the largest to the smallest level. Each cell
    contains a count, and this count as a fraction of the row's sum."""
    found = ConfusionFile(levels={}) if run.confusion is None or run.pool.classes > CLASSES else run.confusion
    names, levels = found.names, found.levels
    whole = {level.name for level in run.pool.levels if level.share == 1}
    return [
        (
            f"{level}, the full model" if level in whole else level,
            names or range(len(rows)),
            [[(count, count / max(1, sum(row))) for count in row] for row in rows],
        )
        for level, rows in reversed(levels.items())
    ]


def _best_of(rows: Sequence[Row], key: str) -> Row | None:
    """Return the first round in which the metric `key` is highest. Return None if the metric was never measured."""
    return max((r for r in rows if key in r.metrics), key=lambda r: r.metrics[key], default=None)


def failures(run: FinishedRun) -> Table | None:
    """Return a table of the clients with failed or rejected updates. Clients with the most such updates come first.
    Return None if all updates were merged, or if the run no longer has records of its clients."""
    codes: dict[int, Counter[str]] = defaultdict(Counter)
    asked = Counter[int]()
    for (client, code), n in run.history.results.items():
        asked[client] += n
        if code:
            codes[client][code] += n
    if not codes:
        return None
    order, tiers = sorted(codes, key=lambda client: (-codes[client].total(), client)), _tiers(run)
    # A single client fits into the last row, so do not replace it by a sum.
    shown, rest = (order, []) if len(order) <= MOST_CLIENTS + 1 else (order[:MOST_CLIENTS], order[MOST_CLIENTS:])
    groups = [(str(client), tiers.get(client, NONE), [client]) for client in shown]
    groups += [(f"{len(rest)} more clients", NONE, rest)] if rest else []
    rows = []
    for name, tier, clients in groups:
        found = sum((codes[client] for client in clients), Counter[str]())
        reasons = ", ".join(f"{code}\N{NO-BREAK SPACE}{n}" for code, n in found.most_common())
        rows.append((name, tier, f"{found.total()} of {sum(asked[client] for client in clients)}", reasons))
    return Table("Updates that were not merged", ("client", "tier", "not merged", "reasons"), rows)


def _meanings(run: FinishedRun) -> dict[str, str]:
    """Map the code of each failure in the run to its meaning. Codes without a longer text are omitted."""
    codes = sorted({code for _, code in run.history.results if code})
    stages = {str(stage): REASONS[metric] for stage, metric in STAGES.items()} | {"quorum": QUORUM}
    found = {code: stages.get(code) or REASONS.get(f"rejected/{code}", "") for code in codes}
    return {code: meaning for code, meaning in found.items() if meaning}


def _tiers(run: FinishedRun) -> dict[int, str]:
    """Map each client to the tier of its device; empty if the configuration of the run does not contain tiers."""
    if "fleet.tiers" not in run.config:
        return {}
    tiers = adapter(tuple[Tier, ...]).validate_python(run.config["fleet.tiers"])
    fleet = devices.fleet(tiers, run.config["partition.clients"], run.config["seed"])
    return {device.client: device.tier for device in fleet}
