"""Writes a comparison's figures as tables, as a drawing and as a page, and into its own small MLflow run.

comparison.json has every figure, comparison.md and the terminal have the tables, comparison.svg has the curves, and
comparison.html has all of these and the settings of the runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from fl_engine.datasets import stored_data
from fl_engine.fleet.uniformity import NAMES
from fl_engine.storage.store import FolderStore
from flexfleet.config import Config
from flexfleet.config.comparison_runs import Entry, varied
from flexfleet.experiments import comparison_curves, ranking
from flexfleet.experiments.comparison_curves import Runs, clock, curve
from flexfleet.experiments.comparison_file import (
    BY_OWNER,
    LOCAL,
    Central,
    ComparisonFile,
    by_case,
    further,
)
from flexfleet.experiments.comparison_tables import REFERENCE, differing, factors, tables
from flexfleet.experiments.row_differences import differences
from flexfleet.experiments.summarise import read, summarise
from flexfleet.files.measure import Measure
from flexfleet.reports import plots
from flexfleet.reports.page import Drawing, render
from flexfleet.reports.report import NONE, plain
from flexfleet.tracking.record import link_to_curves
from flexfleet.tracking.trackers import MLflow, log_outcome

FILES = ("comparison.json", "comparison.md", "comparison.svg", "comparison.html")
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
    """Writes FILES into `out` (`folders`: the finished run folders by run id; `central`: the reference), then logs them
    to the comparison's MLflow run, if there is one. Raises what `summarise.read` raises."""
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
    """A sentence on what the runs of a seed have in common."""
    if not c.varied:
        return "All runs of a seed have the same data, partition, fleet and training."
    return (
        f"The labels differ in {', '.join(c.varied)}, as said with each; besides, all runs of a seed have the same "
        "settings. Those with the same data, partition, network and pre-training settings start from one partition "
        "and one pre-training."
    )


def notes(c: ComparisonFile) -> list[str]:
    """Lines that explain the figures of the tables."""
    seeds = ", ".join(map(str, c.seeds))
    many = len(c.seeds) > 1
    lines = [f"Mean ± sample standard deviation over the seeds {seeds}." if many else f"One seed, {seeds}: no spread."]
    lines.append("levels: sizes of the models that avg is the mean of; full: the largest of them. last: after the last "
                 "round. best: avg and full both of the round with the highest avg, as FlexFL prints them, a choice of "
                 "each run made on test data. So is the highest value until 50, 80 and 100 % of the rounds, which "
                 "FedAIoT reports.")  # fmt: skip
    if any(r.local for r in c.results.values()):
        lines.append("local: after the last round, the mean over the clients of the accuracy on each client's share of "
                     "the test samples, among the classes that it holds (FedRolex); of all levels, and of the "
                     "largest.")  # fmt: skip
    if beside := [Measure(name) for name in further(c)]:
        told = ", ".join(f"full {each.name}{each.direction}" for each in beside)
        lines.append(f"{told}: of the largest model, after the last round.")
    lines += ranking.notes(c.first, len(c.seeds), c.cases) if len(c.labels) > 1 else []
    if over := factors(c):
        said = "; ".join(f"{path}: {', '.join(map(plain, values))}" for path, values in over.items())
        lines.append(f"Each algorithm was run with every combination of {said}.")
    if c.varied:
        lines.append(common(c))
    if any(r.last.avg is None for r in c.results.values()):
        lines.append(f"avg {NONE}: the algorithm reports one level alone.")
    if any(r.full_server_classes is not None for r in c.results.values()):
        lines.append("devices': on test samples of the devices' classes; server's: of partition.server_classes, which "
                     "no device has; own: the mean over the devices of what their own sub-model scores. After the last "
                     "round, among all classes.")  # fmt: skip
    if c.central is not None:
        of_seeds = ", ".join(map(str, c.central.seeds))
        lines.append(f"{REFERENCE}: the full network on all training samples, {c.central.settings['central.epochs']} "
                     f"epochs, seeds {of_seeds}; rounds are epochs there.")  # fmt: skip
    if any(r.reached for r in c.results.values()):
        far = "that accurate" if c.metric == "accuracy" else "that high"
        lines.append(f"To reach: up to the first evaluated round in which full, or avg, is {far}; {NONE}: not reached.")
    if any(len(one.seeds) not in (0, len(c.seeds)) for r in c.results.values() for one in (*r.reached, *r.reached_avg)):
        lines.append("(2/3): the mean over the seeds that reach it; the others would make it longer.")
    if any(r.seconds_simulated is not None for r in c.results.values()):
        lines.append("simulated s: on the fleet's devices, by their speed and bandwidth.")
    lines.append("MB up: of the updates that were merged; those that were refused, or came too late, are not counted.")
    lines.append("real s: as measured here, whatever ran beside.")
    if any(r.phases for r in c.results.values()):
        lines.append("Phases: means over the rounds. Real seconds on the server: plan, encode (what it sends), train "
                     "(until all answers are there, decoded; clients encode in it, by their own clocks), merge and "
                     "evaluate (in rounds that are evaluated) add up to a round. simulated: of the client that "
                     "finishes last. 1 Mbit is 1e6 bits.")  # fmt: skip
    if any(r.uniformity is not None for r in c.results.values()):
        lines.append("Uniformity of a round: sqrt(mean (t - min t)²) of its clients' times, here its mean over the "
                     "rounds. all asked: by the simulated clock, late ones count, those that sent no update have no "
                     "time; answered: those whose update was merged. compute and communication are the two parts "
                     f"of all asked. real clock: as clients measured; {NONE} where they train together.")  # fmt: skip
    return lines + [f"Note: {note}." for note in c.notes]


def variants(c: ComparisonFile) -> list[str]:
    """A line for each label that is more than its algorithm with the common settings."""
    lines = []
    for label, r in c.results.items():
        if r.settings or r.varied or label != r.algorithm:
            given = ", ".join(f"{k} = {plain(v)}" for k, v in (r.settings | r.varied).items()) or "as it is"
            lines.append(f"{label}: {r.algorithm}, {given}")
    return lines


def text(c: ComparisonFile) -> str:
    """The tables as text for the terminal."""
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
    """In one line, with the characters of names escaped that mean something in Markdown."""
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
    """By label, its colour in the drawings and the tables."""
    return {label: plots.PALETTE[i % len(plots.PALETTE)] for i, label in enumerate(c.labels)}


def page(c: ComparisonFile, drawing: str, local: str | None = None, mlflow: str = "") -> str:
    """One HTML page that loads nothing from elsewhere. `local`: what `histograms.draw` gives. `mlflow`: the address of
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
    """Return the address of the page where MLflow draws the comparison's metrics of all runs; empty if there is no
    server."""
    ids = [run.mlflow_run_id for r in c.results.values() for run in r.runs if run.mlflow_run_id]
    chosen = [name for name in ("avg", "full") if any(getattr(r.last, name) is not None for r in c.results.values())]
    return link_to_curves(config, experiment_id, ids, chosen)


def track(c: ComparisonFile, mlflow: MLflow, out: Path) -> ComparisonFile:
    """Logs the figures and FILES to the comparison's own small MLflow run, and makes all runs its children."""
    tracked = c.model_copy(update={"mlflow_run_id": mlflow.run_id})
    tracked.write(out / "comparison.json")
    log_outcome(mlflow.client, mlflow.run_id, metrics(c), {}, [str(out / name) for name in FILES])
    mlflow.finish("FINISHED")
    return tracked


def metrics(c: ComparisonFile) -> dict[str, float]:
    """Metrics like `full/flexfl`: means over the seeds, accuracies as shares; `_std` if there are several seeds.
    `full_mae/flexfl` is one of the task's further metrics.
    `rounds_to_0.6/flexfl`, `seconds_simulated_to_0.6/flexfl`, `mb_down_to_0.6/flexfl` and `mb_up_to_0.6/flexfl` are
    means over the seeds that reach that accuracy with the full model, of which `seeds_to_0.6/flexfl` says how
    many they are."""
    out: dict[str, float] = {}
    beside = further(c)
    for label, r in c.results.items():
        spreads = {
            "avg": r.last.avg,
            "full": r.last.full,
            **{name: getattr(r, name) for name in (*BY_OWNER, "devices", *LOCAL)},
            **{f"local/{name}": of.mean for name, of in r.local.items()},
            **{f"local_sd/{name}": of.sd for name, of in r.local.items()},
            **{f"full_{name}": each.get(label) for name, each in beside.items()},
            "best_avg": r.best.avg,
            "best_full": r.best.full,
            "mb_down": r.mb_down,
            "mb_up": r.mb_up,
            "waste": r.waste,
            "seconds": r.seconds,
            "seconds_simulated": r.seconds_simulated,
            **{name: getattr(r, name) for name in NAMES},
            **r.phases,
        }
        for one in r.reached:
            out[f"seeds_to_{one.accuracy:g}/{label}"] = float(len(one.seeds))
            spreads |= {
                f"rounds_to_{one.accuracy:g}": one.rounds,
                f"seconds_simulated_to_{one.accuracy:g}": one.seconds_simulated,
                f"mb_down_to_{one.accuracy:g}": one.mb_down,
                f"mb_up_to_{one.accuracy:g}": one.mb_up,
            }
        for name, spread in spreads.items():
            if spread is not None:
                out[f"{name}/{label}"] = spread.mean
                if spread.std is not None:
                    out[f"{name}_std/{label}"] = spread.std
    return out
