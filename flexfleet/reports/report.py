"""One self-contained HTML page, and one table for the terminal, about finished runs.

avg is the mean of the deciding metric (accuracy, R2) over the reported levels, and full the metric of the largest
model. A run of one level has no avg. `best` is the round with the best avg, as in the papers, chosen on test data.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError, IntegrityError, masked
from fl_engine.core.fields import Moves
from fl_engine.data.partition_files import Manifest, read_manifest
from fl_engine.datasets import stored_data
from fl_engine.models.onnx_comparison import Precisions
from fl_engine.rounds.at_clients import PREFIX
from fl_engine.rounds.phases import means, waste
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.store import FolderStore
from flexfleet.config import moves
from flexfleet.files import manifest
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
    "run.json": "Use the folder of a run, e.g. runs/<run id>",
    "history.json": "Continue its rounds with `flexfleet run --resume` and the same --run-id",
    "evaluation.json": "Run the evaluate step, or `flexfleet run --resume`",
    "pool/pool.json": "Copy the output of the model_pool step into the run's folder pool/",
    "partition/partition.json": "Copy the output of the partition step into the run's folder partition/",
}
"""Map the files of a finished run to the cure if one is missing."""
COUNTED = ("bytes_down", "bytes_up", "clients_trained", "clients_pruned", "clients_failed")
COMPARED = (Moves.RESULT, Moves.LENGTH, Moves.ANSWERS)
"""Parameters that change these should be equal in runs that are compared, except for the algorithm's own."""
CLASSES = 26
"""The most classes of a confusion matrix that is still readable."""
NONE = "\N{EN DASH}"


@dataclass(frozen=True)
class FinishedRun:
    """The contents of a run folder. `best` is the row with the best avg; bytes and clients are sums over all rounds."""

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
    """Measurements of the exported levels, smallest first."""
    confusion: ConfusionFile | None
    best: Row
    bytes_down: float
    bytes_up: float
    clients_pruned: int
    clients_failed: int

    @property
    def single(self) -> bool:
        return len(self.evaluation.levels) == 1

    @property
    def dataset(self) -> str:
        """Name of the data for people."""
        return stored_data.display_name(str(self.config.get("dataset.name", "?")), self.config.get("dataset.root"))

    @property
    def measure(self) -> Measure:
        return Measure(self.evaluation.metric)

    @property
    def uniformity(self) -> float | None:
        """How evenly the clients of a round finish, in simulated seconds; None if it was not measured."""
        return means([row.metrics for row in self.rows], ("uniformity",)).get("uniformity")

    @property
    def tally(self) -> Tally:
        return tally_of(row.metrics for row in self.rows)

    @property
    def waste(self) -> float:
        """Share of the weights sent down that did not come back."""
        return waste([row.metrics for row in self.rows])


# ----------------------------------------------------------------------------------------------- reading
def load(folder: Path) -> FinishedRun:
    """Read a finished run. Raises as `check_is_folder`; IntegrityError for a missing, damaged or foreign file."""
    check_is_folder(folder)
    manifest.check(folder)
    for name, remedy in NEEDED.items():
        if not (folder / name).is_file():
            raise IntegrityError(f"{folder} is not a finished run, {name} is missing. {remedy}")
    file, history = RunFile.read(folder / "run.json"), BareHistory.read(folder / "history.json")
    evaluation = EvaluationFile.read(folder / "evaluation.json")
    check_inputs(folder, file)
    scores = folder / "pretrain" / "apoz.json"
    rows = _rows(folder / "history.json", history)
    config = {k: masked(v) if isinstance(v, str) else v for k, v in _flat(file.config)}
    _check_all(folder, config, rows)
    if evaluation.rounds != len(rows):
        raise IntegrityError(
            f"{folder / 'evaluation.json'} is of round {evaluation.rounds}, but history.json has {len(rows)} rounds. "
            "Run the evaluate step again"
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
    rows = tuple(rows_of(history))
    for i, row in enumerate(rows):
        absent = [name for name in (*COUNTED, *(("full",) if "avg" in row.metrics else ())) if name not in row.metrics]
        if row.round != i or absent:
            raise IntegrityError(f"{path} is damaged at entry {i}. Write it again from the ledger")
    if not any("avg" in row.metrics for row in rows):
        raise IntegrityError(f"{path} has no evaluated round")
    return rows


def _check_all(folder: Path, config: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Raise IntegrityError if the run is to have more rounds than its files have."""
    stop = config.get("rounds.stop")
    told = {"stop": stop, "stop_simulated_s": config.get("rounds.stop_simulated_s")}
    if stop is not None and RoundsConfig.model_validate(told).end(row.metrics for row in rows) is None:
        raise IntegrityError(
            f"{folder} is not a finished run, history.json has {len(rows)} of {stop} rounds. {NEEDED['history.json']}"
        )


def load_all(folders: Sequence[Path]) -> list[FinishedRun]:
    """Read finished runs that are shown together. Raises as `load`; ConfigError for no run, for a run that is given
    twice, and for runs with different metrics."""
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
    """Return the metric of the runs. Raises ConfigError if they have different metrics."""
    metrics = {run.evaluation.metric: run.file.run_id for run in runs}
    if len(metrics) > 1:
        told = ", ".join(f"{metric} ({run_id})" for metric, run_id in metrics.items())
        raise ConfigError(f"the runs must have one metric, got {told}")
    return runs[0].measure


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def labels(runs: Sequence[FinishedRun]) -> list[str]:
    """Return the algorithms' names if they are unique, else the run ids, numbered if these are not unique."""
    names = [r.pool.algorithm for r in runs]
    if len(set(names)) < len(names):
        names = [r.file.run_id for r in runs]
    many, out = Counter(names), []
    for i, name in enumerate(names):
        out.append(name if many[name] == 1 else f"{name} #{names[: i + 1].count(name)}")
    return out


def differences(runs: Sequence[FinishedRun]) -> list[str]:
    """Return a line for each parameter that the runs should have in common, and do not."""
    names, lines = labels(runs), []

    def note(what: str, value: Callable[[FinishedRun], str]) -> None:
        held: dict[str, list[str]] = {}
        for name, run in zip(names, runs, strict=True):
            held.setdefault(value(run), []).append(name)
        if len(held) > 1:
            lines.append(f"{what}: " + "; ".join(f"{v} ({', '.join(who)})" for v, who in held.items()))

    for key in dict.fromkeys(key for run in runs for key in run.config):
        if moves(key) not in COMPARED or key.startswith(("algorithm", "schema_version")):
            continue
        if len({plain(run.config.get(key)) for run in runs}) > 1:
            note(key, lambda run, key=key: plain(run.config.get(key)))  # type: ignore[misc]
    if not any(line.startswith(("dataset.", "partition.", "seed:")) for line in lines):
        note("the partition itself (sha256)", lambda run: run.file.partition_sha256[:12])
    return lines


# ---------------------------------------------------------------------------------------------- the table
def table(runs: Sequence[Path]) -> str:
    """Return the runs in aligned columns. Raises as `load_all`."""
    return table_of(load_all(runs))


def table_of(loaded: Sequence[FinishedRun]) -> str:
    """Return the `table` of runs that have been read."""
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
        text.append(f"{NONE}: the run reports one level, so it has no average over levels")
    text += [f"{r.file.run_id}: {r.tally.problem()}" for r in loaded if r.tally.status != "finished"]
    return "\n".join(text)


def percent(share: float) -> str:
    return f"{100 * share:.2f}"


def mb(count: float) -> str:
    """Return MB of 1e6 bytes, with more decimals for small values."""
    return f"{count / 1e6:,.{0 if count >= 1e9 else decimals(count / 1e6, 2)}f}"


def short_seconds(value: float | None) -> str:
    """Return seconds, with more decimals for small values, as simulated seconds of a small network are."""
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
    """Write the page to `out` (.html) atomically; the same runs give the same bytes.

    Raises as `load_all`; ConfigError for another suffix, EnvironmentFailure without jinja2 or matplotlib.
    """
    _check_ending(out)
    return report_of(load_all(runs), out)


def report_of(loaded: Sequence[FinishedRun], out: Path) -> Path:
    """Write the `report` of runs that have been read."""
    _check_ending(out)
    FolderStore(out.parent).put(out.name, _page(loaded).encode())
    return out


def _check_ending(out: Path) -> None:
    if out.suffix not in (".html", ".htm") or out.is_dir():
        raise ConfigError(f"the report is an .html file, got {str(out)!r}")


FILTERS = {"percent": percent, "mb": mb, "plain": plain, "short_seconds": short_seconds}
"""Functions that the page's template calls by name."""


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
        known = any(run.partition.client_samples)  # clients with their own data are not counted
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
    """Draw a panel for each level, the largest first; None if the run has no local accuracies."""
    shown = {
        level: Shown(colours[level], score.mean, score.sd, evaluation.local_histogram.get(level, {}))
        for level, score in reversed(evaluation.local.items())
    }
    return local_accuracy([("", {level: each}) for level, each in shown.items()], name) if shown else None


def _confusion(run: FinishedRun) -> list[tuple[str, list[list[tuple[int, float]]]]]:
    """Return the confusion matrix of each level, the largest first: counts, and shares of the row's class."""
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
    """Return the first round with a level's best metric; None if no round evaluated the level."""
    return max((r for r in rows if key in r.metrics), key=lambda r: r.metrics[key], default=None)
