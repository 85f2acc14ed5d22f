"""One self-contained HTML page, and one table for the terminal, about one or more finished runs.

avg is the mean of the metric that decides (accuracy, R2) over the reported levels, full that of the largest model.
Where one level alone is reported the papers print no avg, and neither does this. `best` is the round with the best avg,
as in the papers; it is chosen on the test data, so the last round is given beside it.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fl_engine.core.errors import ConfigError, IntegrityError, brief, masked
from fl_engine.core.fields import Moves
from fl_engine.core.text import path_of
from fl_engine.data.partition_files import Manifest, read_manifest
from fl_engine.datasets import stored_data
from fl_engine.models.onnx_comparison import Precisions
from fl_engine.rounds.at_clients import PREFIX
from fl_engine.rounds.phases import means, waste
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.store import FolderStore
from flexfleet.config import Config, flatten, moves
from flexfleet.files import manifest, terminal
from flexfleet.files.artifacts import (
    Apoz,
    BareHistory,
    ConfusionFile,
    EvaluationFile,
    History,
    PoolFile,
    RunFile,
    rows_of,
)
from flexfleet.files.manifest import check_inputs
from flexfleet.files.measure import Measure, decimals
from flexfleet.files.run_folder import check_is_folder
from flexfleet.files.run_status import Tally, tally_of
from flexfleet.reports import plots, precisions
from flexfleet.reports.local_accuracy import Shown, local_accuracy
from flexfleet.reports.page import Drawing, render

NEEDED = {
    "run.json": "give the folder of a run, e.g. runs/<run id>",
    "history.json": "its rounds are not finished: go on with `flexfleet run --resume` and the same --run-id",
    "evaluation.json": "its final model is not evaluated: run the evaluate step, or `flexfleet run --resume`",
    "pool/pool.json": "put the model_pool step's output into the run's folder pool/",
    "partition/partition.json": "put the partition step's output into the run's folder partition/",
}
"""Files of a finished run, and what to do where one is missing."""

DEFAULTS = flatten(Config())
"""The defaults of all parameters, by dotted name."""
COUNTED = ("bytes_down", "bytes_up", "clients_trained", "clients_pruned", "clients_failed")
COMPARED = (Moves.RESULT, Moves.LENGTH, Moves.ANSWERS)
"""Parameters that move these should be the same in runs that are compared, the algorithm's own apart."""
CLASSES = 26
"""The most classes of a confusion matrix that is drawn: nobody can read a larger one."""
NONE = "\N{EN DASH}"


@dataclass(frozen=True)
class FinishedRun:
    """What a run folder says. `best` is the row with the best avg; bytes and clients are sums over all rounds."""

    file: RunFile
    config: dict[str, Any]
    """Dotted names to values."""
    rows: tuple[Row, ...]
    history: History
    pool: PoolFile
    apoz: Apoz
    partition: Manifest
    evaluation: EvaluationFile
    precisions: tuple[Precisions, ...]
    """What was measured of the exported levels, smallest first."""
    confusion: ConfusionFile | None
    """None in folders that were made before there was one."""
    best: Row
    bytes_down: float
    bytes_up: float
    clients_pruned: int
    clients_failed: int

    @cached_property
    def settings(self) -> dict[str, Any]:
        """`config`, with the defaults of parameters that the version which made the folder did not have: it ran so."""
        return DEFAULTS | self.config

    @property
    def single(self) -> bool:
        return len(self.evaluation.levels) == 1

    @property
    def dataset(self) -> str:
        """What a person calls the data."""
        return stored_data.display_name(str(self.config.get("dataset.name", "?")), self.config.get("dataset.root"))

    @property
    def measure(self) -> Measure:
        return Measure(self.evaluation.metric)

    @property
    def uniformity(self) -> float | None:
        """How evenly the clients of a round finish, in simulated seconds, the mean over the rounds; None in folders
        that were made before this was measured."""
        return means([row.metrics for row in self.rows], ("uniformity",)).get("uniformity")

    @property
    def tally(self) -> Tally:
        return tally_of(row.metrics for row in self.rows)

    @property
    def waste(self) -> float:
        """Share of the weights sent down that did not come back (`phases.waste`)."""
        return waste([row.metrics for row in self.rows])


# ----------------------------------------------------------------------------------------------- reading
def load(folder: Path) -> FinishedRun:
    """Reads a finished run. Raises as `check_is_folder` does; IntegrityError naming the file that is
    missing (and what to do), damaged, or of another run."""
    check_is_folder(folder)
    manifest.check(folder)
    for name, remedy in NEEDED.items():
        if not (folder / name).is_file():
            raise IntegrityError(f"{folder} is not a finished run, {name} is missing: {remedy}")
    file, history = RunFile.read(folder / "run.json"), BareHistory.read(folder / "history.json")
    evaluation = EvaluationFile.read(folder / "evaluation.json")
    check_inputs(folder, file)
    scores = folder / "pretrain" / "apoz.json"
    rows = _rows(folder / "history.json", history)
    config = {k: masked(v) if isinstance(v, str) else v for k, v in _flat(file.config)}
    _check_all(folder, config, rows)
    if evaluation.rounds != len(rows):
        raise IntegrityError(
            f"{folder / 'evaluation.json'} is of round {evaluation.rounds}, history.json has {len(rows)} rounds: "
            "run the evaluate step again"
        )
    return FinishedRun(
        file=file,
        config=config,
        rows=rows,
        history=history,
        pool=PoolFile.read(folder / "pool" / "pool.json"),
        apoz=Apoz.read(scores) if scores.is_file() else Apoz(layers=()),
        partition=read_manifest(folder / "partition" / "partition.json"),
        evaluation=evaluation,
        precisions=precisions.of_run(folder, list(evaluation.levels), history.model_sha256),
        confusion=ConfusionFile.read(folder / "confusion.json") if (folder / "confusion.json").is_file() else None,
        best=max((r for r in rows if "avg" in r.metrics), key=lambda r: r.metrics["avg"]),
        bytes_down=sum(r.metrics["bytes_down"] for r in rows),
        bytes_up=sum(r.metrics["bytes_up"] for r in rows),
        clients_pruned=int(sum(r.metrics["clients_pruned"] for r in rows)),
        clients_failed=int(sum(r.metrics["clients_failed"] for r in rows)),
    )


def _rows(path: Path, history: History) -> tuple[Row, ...]:
    rows = []
    for i, row in enumerate(rows_of(history)):
        absent = [name for name in (*COUNTED, *(("full",) if "avg" in row.metrics else ())) if name not in row.metrics]
        if row.round != i or absent:
            what = f"lacks {', '.join(absent)}" if absent else f"is round {row.round}, expected {i}"
            raise IntegrityError(f"{path}: entry {i} {what}; the file is damaged: write it again from the ledger")
        rows.append(row)
    if not any("avg" in row.metrics for row in rows):
        raise IntegrityError(f"{path} has no evaluated round: run at least one, rounds.stop >= 1")
    return tuple(rows)


def _check_all(folder: Path, config: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Raises IntegrityError where the rows are fewer than the run has by now: its files are of an earlier end."""
    told = {name: config.get(f"rounds.{name}") for name in ("stop", "stop_simulated_s")}
    if told["stop"] is None:
        return
    try:
        end = RoundsConfig.model_validate(told).end(row.metrics for row in rows)
    except ValidationError as error:
        raise IntegrityError(f"{folder / 'run.json'} is damaged: rounds: {brief(error)}") from error
    if end is None:
        raise IntegrityError(
            f"{folder} is not a finished run, history.json is of {len(rows)} rounds and the run goes on to "
            f"{told['stop']}: {NEEDED['history.json']}"
        )


def load_all(folders: Sequence[Path]) -> list[FinishedRun]:
    """Finished runs to be shown together. Raises as `load` does; ConfigError for no run, for one that is given more
    than once, and for runs with different metrics."""
    if not folders:
        raise ConfigError("no run given: name at least one run folder")
    for folder in folders:
        check_is_folder(folder)
    twice = [str(f) for f, n in Counter(f.resolve() for f in folders).items() if n > 1]
    if twice:
        raise ConfigError(f"given more than once: {', '.join(twice)}")
    runs = [load(folder) for folder in folders]
    measure_of(runs)
    return runs


def measure_of(runs: Sequence[FinishedRun]) -> Measure:
    """The metric that the runs have in common. Raises ConfigError where they have not one."""
    metrics = {run.evaluation.metric: run.file.run_id for run in runs}
    if len(metrics) > 1:
        told = ", ".join(f"{metric} ({run_id})" for metric, run_id in metrics.items())
        raise ConfigError(f"the runs have different metrics, {told}: they cannot be put side by side")
    return runs[0].measure


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def labels(runs: Sequence[FinishedRun]) -> list[str]:
    """The algorithm where that tells all runs apart, else the run id, numbered where even that does not."""
    names = [r.pool.algorithm for r in runs]
    if len(set(names)) < len(names):
        names = [r.file.run_id for r in runs]
    many, out = Counter(names), []
    for i, name in enumerate(names):
        out.append(name if many[name] == 1 else f"{name} #{names[: i + 1].count(name)}")
    return out


def differences(runs: Sequence[FinishedRun]) -> list[str]:
    """What the runs do not have in common though a comparison assumes it: one line for each parameter."""
    names, lines = labels(runs), []

    def compare(what: str, value: Callable[[FinishedRun], str]) -> None:
        held: dict[str, list[str]] = {}
        for name, run in zip(names, runs, strict=True):
            held.setdefault(value(run), []).append(name)
        if len(held) > 1:
            lines.append(f"{what}: " + "; ".join(f"{v} ({', '.join(who)})" for v, who in held.items()))

    for key in dict.fromkeys(key for run in runs for key in run.config):
        if moves(key) not in COMPARED or key.startswith(("algorithm", "schema_version")):
            continue
        if len({plain(run.settings.get(key)) for run in runs}) > 1:
            compare(key, lambda run, key=key: plain(run.settings.get(key)))  # type: ignore[misc]
    if not any(line.startswith(("dataset.", "partition.", "seed:")) for line in lines):
        compare("the partition itself (sha256)", lambda run: run.file.partition_sha256[:12])
    return lines


# ---------------------------------------------------------------------------------------------- the table
def table(runs: Sequence[Path]) -> str:
    """The runs in aligned columns. Raises as `load_all` does."""
    return table_of(load_all(runs))


def table_of(loaded: Sequence[FinishedRun]) -> str:
    """`table` of runs that have been read."""
    unit = f" {loaded[0].measure.unit}".rstrip()
    scored = (f"avg{unit}", f"full{unit}", f"best avg/full{unit} (round)")
    timed = any(r.uniformity is not None for r in loaded)
    head = ("run", "algorithm", "rounds", *scored, "MB", "waste %", *(("uniformity s",) if timed else ()), "seconds")
    lines = [head]
    for r in loaded:
        scores = (_avg(r, r.evaluation.avg), r.measure.said(r.evaluation.full), _best(r))
        even = (short_seconds(r.uniformity),) if timed else ()
        costs = (mb(r.bytes_down + r.bytes_up), percent(r.waste), *even, f"{r.history.seconds:,.1f}")
        lines.append((r.file.run_id, r.pool.algorithm, str(len(r.rows)), *scores, *costs))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line in lines:
        cells = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        text.append("  ".join(cells))
    if any(r.single for r in loaded):
        text.append(f"{NONE}: the run reports one level alone, and an average over levels says nothing")
    text += [f"{r.file.run_id}: {r.tally.problem()}" for r in loaded if r.tally.status != "finished"]
    return "\n".join(text)


def percent(share: float) -> str:
    return f"{100 * share:.2f}"


def mb(count: float) -> str:
    """MB of 1e6 bytes, with decimals where they matter."""
    return f"{count / 1e6:,.{0 if count >= 1e9 else decimals(count / 1e6, 2)}f}"


def short_seconds(value: float | None) -> str:
    """With more decimals for small values: simulated seconds of a small network are small."""
    return NONE if value is None else f"{value:,.{0 if value >= 1000 else 1 if value >= 10 else decimals(value, 3)}f}"


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _avg(run: FinishedRun, value: float) -> str:
    return NONE if run.single else run.measure.said(value)


def _best(run: FinishedRun) -> str:
    m = run.best.metrics
    return f"{_avg(run, m['avg'])}/{run.measure.said(m['full'])} ({run.best.round + 1})"


# ----------------------------------------------------------------------------------------------- the page
def report(runs: Sequence[Path], out: Path) -> Path:
    """Writes the page to `out` (.html), whole or not at all; the same runs give the same bytes.

    Raises as `load_all` does, ConfigError for another file ending, EnvironmentFailure without jinja2 or matplotlib.
    """
    _check_ending(out)
    return report_of(load_all(runs), out)


def report_of(loaded: Sequence[FinishedRun], out: Path) -> Path:
    """`report` of runs that have been read."""
    _check_ending(out)
    FolderStore(out.parent).put(out.name, _page(loaded).encode())
    return out


def _check_ending(out: Path) -> None:
    if out.suffix not in (".html", ".htm") or out.is_dir():
        raise ConfigError(f"the report is an .html file, got {str(out)!r}")


FILTERS = {"percent": percent, "mb": mb, "plain": plain, "short_seconds": short_seconds}
"""The functions that the page's template calls by name."""


def _page(runs: Sequence[FinishedRun]) -> str:
    names, measure = labels(runs), measure_of(runs)
    series = [(name, run.rows) for name, run in zip(names, runs, strict=True)]
    first_with: dict[str, str] = {}
    parts = []
    for i, (name, run) in enumerate(zip(names, runs, strict=True)):
        levels = [m.name for m in run.pool.levels]
        owner = first_with.setdefault(run.file.partition_sha256, name)
        alone = len(levels) == 1 and run.pool.levels[0].share == 1
        counts, label = run.partition.class_counts, run.partition.label
        known = any(run.partition.client_samples)  # clients may have data of their own
        told = any(f"{PREFIX}mean" in row.metrics for row in run.rows)  # perhaps not in the last round
        drawings = {
            "pool": None if alone else plots.pool_widths(run.pool, run.apoz, f"pool-{i}"),
            "levels": plots.of_levels(run.rows, levels, f"levels-{i}", run.measure),
            "local": _local(run.evaluation, plots.level_colours(levels), f"local-{i}"),
            "on_clients": plots.on_clients(run.rows, f"on-clients-{i}", run.measure) if told else None,
            "clients": plots.clients_per_round(run.rows, f"clients-{i}"),
            "uniformity": None if run.uniformity is None else plots.evenness(run.rows, f"uniformity-{i}"),
            "partition": plots.partition_map(counts, f"partition-{i}", label) if owner == name and known else None,
        }
        parts.append(
            {
                "label": name,
                "run": run,
                "colour": plots.PALETTE[i % len(plots.PALETTE)],
                "avg": _avg(run, run.evaluation.avg),
                "best": _best(run),
                "level_colours": plots.level_colours(levels),
                "best_of_level": {
                    level: _best_of(run.rows, f"{run.measure.name}/{level}") for level in run.evaluation.levels
                },
                "confusion": _confusion(run),
                "precisions": precisions.rows(run.precisions, NONE),
                "refusals": precisions.refusals(run.precisions),
                "apoz": {layer.group: layer for layer in run.apoz.layers},
                "partition_of": None if owner == name else owner,
                "draw": {k: Drawing(v) if v else None for k, v in drawings.items()},
            }
        )
    titles = dict.fromkeys(f"{r.dataset} · {r.pool.model}" for r in runs)
    return render(
        "flexfleet.reports",
        "report.html",
        FILTERS,
        title=", ".join(titles),
        measure=measure,
        further=[Measure(name) for name in dict.fromkeys(name for run in runs for name in run.evaluation.further)],
        parts=parts,
        differences=differences(runs),
        curves=Drawing(plots.learning_curves(series, measure=measure)),
        costs=Drawing(plots.bytes_to_accuracy(series, measure=measure)),
        by_algorithm=names == [r.pool.algorithm for r in runs],
        any_timed=any(r.uniformity is not None for r in runs),
        any_single=any(r.single for r in runs),
        bands=len(runs) <= plots.MOST_BANDS,
        dash=NONE,
    )


def _local(evaluation: EvaluationFile, colours: Mapping[str, str], name: str) -> str | None:
    """A panel for each level, the largest first; None where the run has no local accuracies."""
    shown = {
        level: Shown(colours[level], score.mean, score.sd, evaluation.local_histogram.get(level, {}))
        for level, score in reversed(evaluation.local.items())
    }
    return local_accuracy([("", {level: each}) for level, each in shown.items()], name) if shown else None


def _confusion(run: FinishedRun) -> list[tuple[str, list[list[tuple[int, float]]]]]:
    """By the level's title, the largest first: of each class's samples how many were taken for which, and as a share of
    them."""
    levels = {} if run.confusion is None or run.pool.classes > CLASSES else run.confusion.levels
    whole = {m.name for m in run.pool.levels if m.share == 1}
    return [
        (
            f"{level}, the full model" if level in whole else level,
            [[(count, count / max(1, sum(row))) for count in row] for row in rows],
        )
        for level, rows in reversed(levels.items())
    ]


def _best_of(rows: Sequence[Row], key: str) -> Row | None:
    """The first round in which a level's metric was at its best; None where no round scored it."""
    return max((r for r in rows if key in r.metrics), key=lambda r: r.metrics[key], default=None)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m flexfleet.reports.report", description=__doc__)
    p.add_argument("runs", type=path_of, nargs="+", metavar="RUN", help="folder of a finished run")
    p.add_argument("--out", type=path_of, required=True, metavar="FILE", help="the page, an .html file")
    args = p.parse_args(argv)
    page = report(args.runs, args.out)
    terminal.show(table(args.runs))
    terminal.show(f"report: {page}")
    return 0


if __name__ == "__main__":
    terminal.run_main(main)
