"""Write a comparison's files, and log them to its MLflow run.

comparison.json has every figure, comparison.md and the terminal have the tables, comparison.svg has the curves, and
comparison.html has all of these and the settings of the runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from fl_engine.datasets import stored_data
from fl_engine.storage.store import FolderStore
from flexfleet.config import Config
from flexfleet.config.comparison_runs import Entry, varied
from flexfleet.experiments import comparison_curves, ranking
from flexfleet.experiments.comparison_curves import Runs, clock, curve
from flexfleet.experiments.comparison_file import Central, ComparisonFile, by_case, further
from flexfleet.experiments.comparison_tables import REFERENCE, differing, factors, tables
from flexfleet.experiments.row_differences import differences
from flexfleet.experiments.summarise import SPREADS, read, summarise
from flexfleet.files.measure import Measure
from flexfleet.reports import plots
from flexfleet.reports.page import Drawing, render
from flexfleet.reports.report import NONE, plain
from flexfleet.tracking.record import link_to_curves
from flexfleet.tracking.trackers import MLflow, log_outcome

FILES = ("comparison.json", "comparison.md", "comparison.svg", "comparison.html")
LEVELS = (
    "levels: sizes of the models of which avg is the mean; full: the largest of them. last: after the last round. "
    "best: avg and full of the round with the highest avg, as FlexFL prints them; each run chooses its round on test "
    "data. The highest values until 50, 80 and 100 % of the rounds, which FedAIoT reports, are chosen on test data "
    "too."
)
LOCAL_NOTE = (
    "local: after the last round, the mean over the clients of the accuracy on each client's share of the test "
    "samples, among the classes that it holds (FedRolex); of all levels, and of the largest."
)
OWNERS_NOTE = (
    "devices': on test samples of the devices' classes; server's: of partition.server_classes, which no device has; "
    "own: the mean over the devices of the score of their own sub-model. After the last round, among all classes."
)
PHASES_NOTE = (
    "Phases: means over the rounds. The server's real seconds of plan, encode, train (until all results have arrived "
    "and are decoded; clients encode in it, by their own clocks), merge and evaluate add up to a round. simulated: of"
    " the client that finishes last. 1 Mbit is 1e6 bits."
)
UNIFORMITY_NOTE = (
    "Uniformity of a round: sqrt(mean (t - min t)²) of its clients' times, here its mean over the rounds. all asked: "
    "by the simulated clock, with late clients and without those that sent no update; answered: those whose update "
    f"was merged. compute and communication are the two parts of all asked. real clock: as clients measured; {NONE} if"
    " they train together."
)
BRIEF = ("dataset.name", "model.name", "partition.rule", "partition.clients")


def tabulate(
    id: str,
    entries: Sequence[Entry],
    folders: Mapping[str, Path],
    out: Path,
    to: Sequence[float] = (),
    mlflow: MLflow | None = None,
    central: Central | None = None,
) -> ComparisonFile:
    """Write FILES into `out`, and log them to the comparison's MLflow run, if there is one.

    Args:
        folders: The finished run folders by run id.
        to: Accuracies to reach; empty: `default_targets`.
        central: The reference.

    Raises: as `summarise.read`.
    """
    labels, seeds = list(dict.fromkeys(e.label for e in entries)), list(dict.fromkeys(e.seed for e in entries))
    differ = varied(entries)
    runs = read(labels, seeds, folders, differ)
    comparison = summarise(id, seeds, runs, to, differ, {e.label: e.at for e in entries})
    configs = {entry.label: entry.config.settled() for entry in reversed(entries)}
    apart = differences(
        {label: configs[label] for label in labels}, {n: each[0].pool.pool() for n, each in runs.items()}
    )
    comparison = comparison.model_copy(update={"central": central, "differences": apart, "called": called(entries)})
    store, drawing = FolderStore(out), draw(runs, central)
    at = "" if mlflow is None else curves_in_mlflow(comparison, entries[0].config, mlflow.experiment_id)
    local = comparison_curves.draw_histograms(runs, by_case(comparison.results), colours(comparison))
    store.put("comparison.md", markdown(comparison, at).encode())
    store.put("comparison.svg", (drawing + "\n").encode())
    store.put("comparison.html", page(comparison, drawing, local, at).encode())
    comparison.write(out / "comparison.json")
    return comparison if mlflow is None else track(comparison, mlflow, out)


def called(entries: Sequence[Entry]) -> dict[str, str]:
    names = {(e.config.dataset.name, e.config.dataset.root) for e in entries}
    return {name: said for name, root in names if (said := stored_data.display_name(name, root)) != name}


def title(c: ComparisonFile) -> str:
    def of(settings: Mapping[str, object], key: str) -> str:
        said = plain(settings.get(key, NONE))
        return c.called.get(said, said)

    dataset, model, rule, clients = (
        " or ".join(dict.fromkeys(of(r.varied, key) for r in c.results.values()))
        if key in c.varied
        else of(c.settings, key)
        for key in BRIEF
    )
    seconds = c.settings.get("rounds.stop_simulated_s")
    length = f"{c.rounds} rounds" if seconds is None else f"{seconds:g} simulated s, up to {c.rounds} rounds"
    return f"{c.id}: {model} on {dataset}, {clients} clients ({rule}), {length}"


def common(c: ComparisonFile) -> str:
    """Return a sentence on what the runs of a seed have in common."""
    if not c.varied:
        return "All runs of a seed have the same data, partition, fleet and training."
    return (
        f"The labels differ in {', '.join(c.varied)}; all other settings of a seed are the same. Runs with the same "
        "data, partition, network and pre-training settings start from one partition and one pre-training."
    )


def notes(c: ComparisonFile) -> list[str]:
    """Return lines that explain the figures of the tables."""
    results, seeds = c.results.values(), ", ".join(map(str, c.seeds))
    many, beside, over = len(c.seeds) > 1, [Measure(name) for name in further(c)], factors(c)
    full = ", ".join(f"full {each.name}{each.direction}" for each in beside)
    reached = [one for r in results for one in (*r.reached, *r.reached_avg)]
    combined = "; ".join(f"{path}: {', '.join(map(plain, values))}" for path, values in over.items())
    lines = [
        f"Mean ± sample standard deviation over the seeds {seeds}." if many else f"One seed, {seeds}: no deviation.",
        LEVELS,
        LOCAL_NOTE if any(r.local for r in results) else "",
        f"{full}: of the largest model, after the last round." if beside else "",
        *(ranking.notes(c.first, len(c.seeds), c.cases) if len(c.labels) > 1 else ()),
        f"Each algorithm was run with every combination of {combined}." if over else "",
        common(c) if c.varied else "",
        f"avg {NONE}: the algorithm reports one level." if any(r.last.avg is None for r in results) else "",
        OWNERS_NOTE if any(r.full_server_classes is not None for r in results) else "",
    ]
    if c.central is not None:
        epochs, of_seeds = c.central.settings["central.epochs"], ", ".join(map(str, c.central.seeds))
        lines.append(f"{REFERENCE}: the full network, {epochs} epochs on all training samples, seeds {of_seeds}. Its "
                     "rounds are epochs.")  # fmt: skip
    if reached:
        lines.append(f"To reach: up to the first evaluated round in which full, or avg, has the value; {NONE}: never.")
    if any(len(one.seeds) not in (0, len(c.seeds)) for one in reached):
        lines.append("(2/3): the mean over the 2 of 3 seeds that reach the value.")
    if any(r.seconds_simulated is not None for r in results):
        lines.append("simulated s: on the fleet's devices, by their speed and bandwidth.")
    lines += ["MB up: of the updates that were merged.", "real s: as measured on this machine."]
    lines.append(PHASES_NOTE if any(r.phases for r in results) else "")
    lines.append(UNIFORMITY_NOTE if any(r.uniformity is not None for r in results) else "")
    return [*filter(None, lines), *(f"Note: {note}." for note in c.notes)]


def variants(c: ComparisonFile) -> list[str]:
    """Return a line for each label that is not just its algorithm with the common settings."""
    lines = []
    for label, r in c.results.items():
        if r.settings or r.varied or label != r.algorithm:
            given = ", ".join(f"{k} = {plain(v)}" for k, v in (r.settings | r.varied).items()) or "as it is"
            lines.append(f"{label}: {r.algorithm}, {given}")
    return lines


def text(c: ComparisonFile) -> str:
    """Return the tables as text for the terminal."""
    lines = [title(c)]
    for table in (*tables(c), *differing(c)):
        widths = [max(map(len, column)) for column in zip(table.head, *table.rows, strict=True)]
        lines += ["", table.title]
        for row in (table.head, *table.rows):
            cells = [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join([*lines, "", *variants(c), *notes(c)])


def markdown(c: ComparisonFile, mlflow: str = "") -> str:
    """Return the tables and the notes. `mlflow`: the address of the runs' curves in MLflow."""
    lines = [f"## {escaped(title(c))}"]
    for table in (*tables(c), *differing(c)):
        rule = ("---", *("--:" for _ in table.head[1:]))
        lines += ["", f"**{table.title}**", ""]
        lines += [f"| {' | '.join(map(escaped, row))} |" for row in (table.head, rule, *table.rows)]
    points = [f"- {escaped(line)}" for line in (*variants(c), *notes(c))]
    curves = [f"[The curves of all runs in MLflow]({mlflow})", ""] if mlflow else []
    return "\n".join([*lines, "", *points, "", *curves, "![curves](comparison.svg)", ""])


def escaped(words: str) -> str:
    """Return one line in which Markdown's characters are escaped."""
    return re.sub(r"([\\|_*`])", r"\\\1", " ".join(words.splitlines())).replace("<", "&lt;")


# ------------------------------------------------------------------------------------------ curves and page
def draw(runs: Runs, central: Central | None = None) -> str:
    return plots.comparison(
        [(label, [] if each[0].single else curve(each, "avg"), curve(each, "full")) for label, each in runs.items()],
        measure=next(iter(runs.values()))[0].measure,
        reference=None if central is None else (REFERENCE, central.full.mean),
        clocks={label: clock(each, "full") for label, each in runs.items()},
    )


def colours(c: ComparisonFile) -> dict[str, str]:
    """Map labels to their colours in the drawings and the tables."""
    return {label: plots.PALETTE[i % len(plots.PALETTE)] for i, label in enumerate(c.labels)}


def page(c: ComparisonFile, drawing: str, local: str | None = None, mlflow: str = "") -> str:
    """Return one HTML page that loads nothing else. `local`: the result of `draw_histograms`. `mlflow`: the address of
    the runs' curves in MLflow."""
    return render(
        "flexfleet.experiments",
        "comparison.html",
        {"plain": plain},
        c=c,
        measure=Measure(c.metric),
        title=title(c),
        tables=tables(c),
        differing=differing(c),
        notes=notes(c),
        variants=variants(c),
        common=common(c),
        drawing=Drawing(drawing),
        local=None if local is None else Drawing(local),
        colours={REFERENCE: plots.GREY} | colours(c),
        dash=NONE,
        mlflow=mlflow,
    )


# ------------------------------------------------------------------------------------------------- MLflow
def curves_in_mlflow(c: ComparisonFile, config: Config, experiment_id: str) -> str:
    """Return the address of MLflow's page with the curves of all runs; empty without a server."""
    ids = [run.mlflow_run_id for r in c.results.values() for run in r.runs if run.mlflow_run_id]
    chosen = [name for name in ("avg", "full") if any(getattr(r.last, name) is not None for r in c.results.values())]
    return link_to_curves(config, experiment_id, ids, chosen)


def track(c: ComparisonFile, mlflow: MLflow, out: Path) -> ComparisonFile:
    """Log the figures and FILES to the comparison's MLflow run, and make all runs its children."""
    tracked = c.model_copy(update={"mlflow_run_id": mlflow.run_id})
    tracked.write(out / "comparison.json")
    log_outcome(mlflow.client, mlflow.run_id, metrics(c), {}, [str(out / name) for name in FILES])
    mlflow.finish("FINISHED")
    return tracked


def metrics(c: ComparisonFile) -> dict[str, float]:
    """Return metrics like `full/flexfl`: means over the seeds, accuracies as shares, and `full_std/flexfl` with several
    seeds.

    `full_mae/flexfl` is one of the task's other metrics. `rounds_to_0.6/flexfl` is a mean over the seeds that reach the
    accuracy with the full model; `seeds_to_0.6/flexfl` is their number.
    """
    out: dict[str, float] = {}
    beside = further(c)
    for label, r in c.results.items():
        spreads = {
            "avg": r.last.avg,
            "full": r.last.full,
            "best_avg": r.best.avg,
            "best_full": r.best.full,
            **{name: getattr(r, name) for name in SPREADS},
            **{f"local/{name}": of.mean for name, of in r.local.items()},
            **{f"local_sd/{name}": of.sd for name, of in r.local.items()},
            **{f"full_{name}": each.get(label) for name, each in beside.items()},
            **r.phases,
        }
        for one in r.reached:
            out[f"seeds_to_{one.accuracy:g}/{label}"] = float(len(one.seeds))
            for name in ("rounds", "seconds_simulated", "mb_down", "mb_up"):
                spreads[f"{name}_to_{one.accuracy:g}"] = getattr(one, name)
        for name, spread in spreads.items():
            if spread is not None:
                out[f"{name}/{label}"] = spread.mean
                if spread.std is not None:
                    out[f"{name}_std/{label}"] = spread.std
    return out
