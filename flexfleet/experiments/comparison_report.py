"""Write the files of a comparison, and log the files to MLflow.

comparison.json contains all results, comparison.md contains the tables, and comparison.svg contains the curves.
comparison.html contains tables, curves and the settings of the runs.

The rows of interest are the first variant and the best of the other variants with the same data and network. With three
or more seeds, the answer states the result of the paired test between the two rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_engine.datasets import stored_data
from fl_engine.storage.store import FolderStore
from flexfleet.config.comparison_runs import PlannedRun
from flexfleet.experiments import ranking
from flexfleet.experiments.comparison_file import Central, ComparisonFile, Figures, Spread, Summary, by_case, further
from flexfleet.experiments.comparison_tables import COST, REFERENCE, differences, factors, failed, fine, seconds, tables
from flexfleet.experiments.summarise import Runs, clock, read, summarise
from flexfleet.files.measure import Measure
from flexfleet.reports import plots
from flexfleet.reports.answer import Answer, Metric, Standing, compared, count, interest, named, tiles
from flexfleet.reports.figure import colours_of
from flexfleet.reports.finished_run import plain
from flexfleet.reports.page import NONE, PageSection, Table, escaped
from flexfleet.reports.page import page as html_page
from flexfleet.tracking.trackers import MLflow, log_outcome

FILES = ("comparison.json", "comparison.md", "comparison.svg", "comparison.html")
CLIENTS_FILE = "clients.svg"
"""File with curves of the metrics that clients measured. The file is written only if all runs have these metrics."""
LEVELS = (
    "avg is the mean over the models whose sizes are in `levels %`, and full is the value of the largest model. last: "
    "after the last round. best: in the round with the highest avg, as in FlexFL's paper. Highest: the best value in "
    "the first 50, 80 and 100 % of the rounds, as in FedAIoT's paper. best and Highest are selected on test data."
)
LOCAL_NOTE = (
    "local: accuracy after the last round on each client's test samples, as in FedRolex's paper. The model chooses "
    "only among the client's classes. Values are means over clients, over all levels (avg) or for the largest (full)."
)
OWNERS_NOTE = (
    "Accuracies after the last round. devices': test samples of the devices' classes. server's: test samples of "
    "partition.server_classes, which no device has. own: mean accuracy of the devices' sub-models on all test samples."
)
UNIFORMITY_NOTE = (
    "Uniformity of a round is sqrt(mean (t - min t)²) over the clients' times t. Values are means over the rounds. all "
    "sampled: simulated times of all clients that sent an update, even a late update. compute, communication: parts of "
    f"these times. merged: only merged updates. real clock: measured times; {NONE} if clients train together."
)
CHARTS = ("avg", "full", "best_avg", "best_full", "mb_down", "mb_up", "waste", "seconds_simulated", "seconds")
"""Metrics of a comparison that MLflow shows as charts. The table of the comparison has all metrics."""
BRIEF = ("dataset.name", "model.name", "partition.rule", "partition.clients")


def tabulate(
    id: str,
    entries: Sequence[PlannedRun],
    folders: Mapping[str, Path],
    out: Path,
    to: Sequence[float] = (),
    mlflow: MLflow | None = None,
    central: Central | None = None,
) -> ComparisonFile:
    """Write FILES into `out`, and log the files to the MLflow run `mlflow`. Nothing is logged if `mlflow` is None.

    Args:
        folders: Map run IDs to folders of finished runs.
        to: Target accuracies; if empty, `default_targets` are used.
        central: Results of centralised training, which are shown as the reference.

    Raises the errors of `summarise.read`.
    """
    runs = read(entries, folders)
    comparison = summarise(id, entries, runs, to)
    configs = {entry.label: entry.config.settled() for entry in reversed(entries)}
    pools = {label: each[0].pool.pool() for label, each in runs.items()}
    names = {(e.config.dataset.name, e.config.dataset.root) for e in entries}
    shown_names = {name: stored_data.display_name(name, root) for name, root in names}
    comparison = comparison.model_copy(
        update={
            "central": central,
            "differences": differences({label: configs[label] for label in runs}, pools),
            "called": {name: shown for name, shown in shown_names.items() if shown != name},
        }
    )
    store, drawings = FolderStore(out), draw(runs, rows_of_interest(comparison), central)
    store.put("comparison.md", markdown(comparison).encode())
    for name, drawing in drawings.items():
        store.put(name, (drawing + "\n").encode())
    store.put("comparison.html", page(comparison, drawings).encode())
    comparison.write(out / "comparison.json")
    return comparison if mlflow is None else log(comparison, mlflow, out)


# ------------------------------------------------------------------------------------------------ the answer
def answer(c: ComparisonFile) -> Answer:
    """Return the sentence and the tiles with which the terminal, the page and the Markdown file begin."""
    metric, two = metric_of(c), [_standing(c, label) for label in rows_of_interest(c)]
    main, other = two[0], two[1] if len(two) > 1 else None
    seeds, of = count(len(c.seeds), "seed"), "clients_mean" if metric.on_clients else "avg"
    if cases := [case for case in by_case(c.results) if len(case.labels) > 1]:
        ranked = {case.labels: case.first.get(of) for case in c.cases}
        best = [max(case.labels, key=lambda label: _value(c.results[label], metric)) for case in cases]
        won = [(first := ranked.get(case.labels)) is not None and first.first for case in cases]
        shown = ", ".join(f"{label} ({case})" for label, case in list(zip(best, cases, strict=True))[:3])
        more = ", and others" if len(cases) > 3 else ""
        how = f"significantly in {sum(won)} of {len(cases)} cases, {seeds}" if c.cases else f"{seeds}, not tested"
        sentence = f"Highest {metric.measure.name} in each case: {shown}{more}; {how}"
    elif other is not None:
        first = (c.first or {}).get(of)
        pair = {main.label, other.label}
        behind = first.behind[(pair - {first.highest}).pop()] if first and first.highest in pair else None
        p, apart = (behind.p_holm, behind.apart) if behind else (None, False)
        sentence = compared(main, other, metric, len(c.seeds), p, apart)
    else:
        after = f"after {count(main.rounds, 'round')} with {main.mb:,.1f} MB"
        sentence = f"{main.name} reaches {metric.score(main.value)} {after}; {seeds}"
    timed = c.results[main.label].seconds_simulated is not None
    return Answer(c.id, sentence, tiles(metric, main, other, "time, simulated" if timed else "time"))


def metric_of(c: ComparisonFile) -> Metric:
    results = c.results.values()
    on_clients = all(r.clients_mean is not None for r in results)
    return Metric(Measure(c.metric), on_clients, any(r.kept_by_clients for r in results))


def rows_of_interest(c: ComparisonFile) -> tuple[str, ...]:
    """Return the labels of the first variant and of the best other variant with the same data and network."""
    metric, first = metric_of(c), c.labels[0]
    labels = next((case.labels for case in by_case(c.results) if first in case.labels), c.labels)
    return interest({label: _value(c.results[label], metric) for label in labels})


def _value(r: Summary, metric: Metric) -> float:
    return r.clients_mean.mean if metric.on_clients and r.clients_mean is not None else r.last.avg.mean


def _standing(c: ComparisonFile, label: str) -> Standing:
    r, metric = c.results[label], metric_of(c)
    sent, time = r.mb_down.mean + r.mb_up.mean, r.seconds if r.seconds_simulated is None else r.seconds_simulated
    value, (shown_sent, shown_time) = _value(r, metric), (Spread(mean=mean, std=None) for mean in (sent, time.mean))
    shown = (metric.measure.with_unit(value), f"{fine(shown_sent)} MB", f"{seconds(shown_time)} s", failed(r))
    name = named(label, r.algorithm, r.settings.get("eligible"))
    return Standing(label, name, value, r.last.round.mean, sent, shown)


# ------------------------------------------------------------------------------------------------ sentences
def title(c: ComparisonFile) -> str:
    def values(key: str) -> str:
        found = [r.varied[key] for r in c.results.values()] if key in c.varied else [c.settings.get(key, NONE)]
        return " or ".join(dict.fromkeys(c.called.get(plain(value), plain(value)) for value in found))

    dataset, model, rule, clients = map(values, BRIEF)
    limit = c.settings.get("rounds.stop_simulated_s")
    length = f"{c.rounds} rounds" if limit is None else f"{limit:g} simulated s, up to {c.rounds} rounds"
    return f"{model} on {dataset}, {clients} clients ({rule}), {length}"


def common(c: ComparisonFile) -> str:
    """Return sentences that state which settings are the same in all runs with the same seed."""
    if not c.varied:
        return "Runs with the same seed have the same data, partition, fleet and training settings."
    return (
        f"The variants differ in {', '.join(c.varied)}. All other settings are equal for the same seed. Runs with the "
        "same data, partition, network and pre-training settings use the same partition and pre-trained weights."
    )


def notes(c: ComparisonFile) -> list[str]:
    """Return lines that explain the columns of the tables."""
    results, seeds = c.results.values(), ", ".join(map(str, c.seeds))
    many, beside, over = len(c.seeds) > 1, [Measure(name) for name in further(c)], factors(c)
    full = ", ".join(f"full {each.name}{each.direction}" for each in beside)
    combined = "; ".join(f"{path}: {', '.join(map(plain, values))}" for path, values in over.items())
    lines = [
        f"Mean ± sample standard deviation over the seeds {seeds}." if many else f"Values of the single seed {seeds}.",
        LEVELS,
        LOCAL_NOTE if any(r.local for r in results) else "",
        f"{full}: metric of the largest model after the last round." if beside else "",
        *(ranking.notes(c.first, len(c.seeds), c.cases) if len(c.labels) > 1 else ()),
        f"Each variant was run with every combination of {combined}." if over else "",
        common(c) if c.varied else "",
        OWNERS_NOTE if any(r.full_server_classes is not None for r in results) else "",
    ]
    if c.central is not None:
        epochs, of_seeds = c.central.settings["central.epochs"], ", ".join(map(str, c.central.seeds))
        lines.append(f"{REFERENCE}: the full network, {epochs} epochs on all training samples, seeds {of_seeds}. "
                     "Rounds of this row are epochs.")  # fmt: skip
    if any(r.reached for r in results):
        lines.append("Cost to reach a value: until the first evaluated round with this value, averaged over the seeds.")
    if any(r.seconds_simulated is not None for r in results):
        lines.append("simulated s: simulated time on the fleet's devices, computed from their speed and bandwidth.")
    if any(r.joules is not None for r in results):
        lines.append("joules: energy of the clients, computed from their simulated times and `fleet.tiers[].watts`.")
    lines += ["MB up: size of all merged updates.", "real s: wall-clock time on this machine."]
    lines.append(UNIFORMITY_NOTE if any(r.uniformity is not None for r in results) else "")
    return [*filter(None, lines), *(f"Note: {note}." for note in c.notes)]


def variants(c: ComparisonFile) -> list[str]:
    """Return a line for each variant that has its own settings or whose label is not the name of its algorithm."""
    lines = []
    for label, r in c.results.items():
        if r.settings or r.varied or label != r.algorithm:
            given = ", ".join(f"{k} = {plain(v)}" for k, v in (r.settings | r.varied).items()) or "default settings"
            lines.append(f"{label}: {r.algorithm}, {given}")
    return lines


# ------------------------------------------------------------------------------------------------ files
def text(c: ComparisonFile, brief: bool = False) -> str:
    """Format the answer and the tables as text. With `brief`, only the metric and the cost are shown."""
    found = tables(c)
    shown = [found[0], *(table for table in found if table.title == COST)] if brief else found
    parts = [f"{table.heading}\n" + "".join(f"  {line}\n" for line in table.text().splitlines()) for table in shown]
    return "\n".join([f"{answer(c).sentence}.", title(c), "", *parts, *variants(c), *(() if brief else notes(c))])


def markdown(c: ComparisonFile) -> str:
    colours = _colours(c)
    parts = [f"**{table.heading}**\n\n{table.markdown(colours)}\n" for table in tables(c)]
    points = [f"- {escaped(line)}" for line in (*variants(c), *notes(c))]
    head = [f"## {escaped(answer(c).sentence)}", "", escaped(title(c)), ""]
    curves = ["", "![curves](comparison.svg)", "", escaped(_explained(c)), ""]
    return "\n".join([*head, *parts, *points, *curves])


def _colours(c: ComparisonFile) -> dict[str, str]:
    return colours_of((*c.labels, REFERENCE), rows_of_interest(c))


def _explained(c: ComparisonFile) -> str:
    two = " and ".join(rows_of_interest(c))
    return (
        f"Curves are means over the seeds. avg is solid, and full is dashed. Coloured: {two}, the first variant and "
        "the best of the others. The vertical axis covers the last two thirds of the rounds."
    )


def draw(runs: Runs, two: Sequence[str], central: Central | None = None) -> dict[str, str]:
    """Map file names to SVG figures. One figure plots the test metrics over the rounds. If clients evaluated their
    models, a second figure plots the clients' metrics. `two` are the labels of the rows of interest."""
    measure = next(iter(runs.values()))[0].measure
    reference = None if central is None else (REFERENCE, central.full.mean)
    curves, clocks = _curves(runs, "avg", "full")
    drawings = {"comparison.svg": plots.comparison(curves, two, "comparison", measure, reference, clocks)}
    clients, times = _curves(runs, "on_clients/mean", "on_clients/p10")
    if all(mean for _, mean, _ in clients):
        names = ("mean of the clients", "10th percentile")
        drawings[CLIENTS_FILE] = plots.comparison(clients, two, "clients", measure, None, times, names)
    return drawings


def _curves(
    runs: Runs, solid: str, dashed: str
) -> tuple[list[tuple[str, plots.Points, plots.Points]], dict[str, list[float]]]:
    """Return the points of two metrics for each variant, and the simulated seconds at the points of `dashed`."""
    rows = {label: [run.rows for run in each] for label, each in runs.items()}
    curves = [(label, plots.curve(each, solid), plots.curve(each, dashed)) for label, each in rows.items()]
    return curves, {label: clock(each, dashed) for label, each in runs.items()}


def page(c: ComparisonFile, drawings: Mapping[str, str]) -> str:
    measure, (first, *others) = Measure(c.metric), tables(c)
    others.sort(key=lambda table: table.title != COST)  # Show the cost first, because only this table is not folded.
    sections = [
        PageSection(first.title, first),
        PageSection("Curves", drawings={"": drawings["comparison.svg"]}, lines=[_explained(c)]),
    ]
    if clients := drawings.get(CLIENTS_FILE):
        explained = "The mean over the clients is solid, and the 10th percentile is dashed."
        title_of_clients = "Curves of the clients' models on their own held-out samples"
        sections.append(PageSection(title_of_clients, drawings={"": clients}, lines=[explained], folded=True))
    sections += [PageSection(table.title, table, folded=table.title != COST) for table in others]
    head = ("run", "seed", "last round", "avg", "full", "best round", "avg", "full", "model sha256")
    rows = []
    for one in (one for label in c.labels for one in c.results[label].runs):
        last = [measure.with_unit(value) for value in (one.avg, one.full)]
        best = [measure.with_unit(one.best[name]) for name in ("avg", "full")]
        found = (str(one.rounds), *last, f"{one.best['round']:.0f}", *best, one.model_sha256)
        rows.append((one.run_id, str(one.seed), *found))
    settings = Table("", ("parameter", "value"), [(key, plain(value)) for key, value in c.settings.items()])
    sections += [
        PageSection("What the columns mean", lines=notes(c), folded=True),
        PageSection("Runs", Table("", head, rows), lines=[common(c), *variants(c)], folded=True),
        PageSection("Settings of all runs", settings, folded=True),
    ]
    return html_page("comparison", answer(c), sections, [title(c)], _colours(c))


# ------------------------------------------------------------------------------------------------- MLflow
def log(c: ComparisonFile, mlflow: MLflow, out: Path) -> ComparisonFile:
    """Log the metrics, the table and FILES to the comparison's MLflow run.

    The metrics `variants/*` of all variants share a chart, because the step of a metric is the number of the variant.
    The table has all metrics in one row for each variant.
    """
    tracked = c.model_copy(update={"mlflow_run_id": mlflow.run_id})
    tracked.write(out / "comparison.json")
    rows: list[dict[str, Any]] = []
    for label, each in figures(c).items():
        # MLflow's UI does not show the values of columns whose names contain a dot.
        rows.append({"step": len(rows) + 1, "variant": label, **{k.replace(".", "_"): v for k, v in each.items()}})
    mlflow.table(list(dict.fromkeys(name for row in rows for name in row)), rows, "variants.json")
    for name in CHARTS:
        mlflow.chart(f"variants/{name}", {row["step"]: row[name] for row in rows if name in row})
    log_outcome(mlflow.client, mlflow.run_id, {}, {}, [str(out / name) for name in FILES])
    mlflow.finish("FINISHED")
    return tracked


def figures(c: ComparisonFile) -> dict[str, dict[str, float]]:
    """Map each variant to its metrics, such as `full` (mean over the seeds) and `full_std` (standard deviation).
    Accuracies are numbers from 0 to 1.

    `full_mae` is the mean absolute error in regression tasks. `seeds_to_0.6` is the number of seeds for which the full
    model reaches the accuracy 0.6, and `rounds_to_0.6` is a mean over these seeds.
    """
    out: dict[str, dict[str, float]] = {}
    beside = further(c)
    for label, r in c.results.items():
        own = out[label] = dict[str, float]()
        spreads = {
            "avg": r.last.avg,
            "full": r.last.full,
            "best_avg": r.best.avg,
            "best_full": r.best.full,
            **{name: getattr(r, name) for name in Figures.model_fields},
            **{f"local/{name}": of.mean for name, of in r.local.items()},
            **{f"local_sd/{name}": of.sd for name, of in r.local.items()},
            **{f"full_{name}": each.get(label) for name, each in beside.items()},
            **r.phases,
        }
        for one in r.reached:
            for name in ("rounds", "seconds_simulated", "mb_down", "mb_up"):
                spreads[f"{name}_to_{one.accuracy:g}"] = getattr(one, name)
        for name, spread in spreads.items():
            if spread is not None:
                own[name] = spread.mean
                if spread.std is not None:
                    own[f"{name}_std"] = spread.std
        own |= {f"seeds_to_{one.accuracy:g}": float(len(one.seeds)) for one in r.reached}
    return out
