"""A comparison, or a night, as the tasks of a graph: the first prepares all runs, one task makes each, the last gathers
them.

Kubeflow starts a task with all its parameters in one word of a command line, which Linux limits to 128 KiB. So what the
tasks need to know about the runs is a file, `PairsFile`, and a task gets as a parameter no more than a run's number
there.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from fl_engine.core.errors import IntegrityError
from flexfleet.config import parse
from flexfleet.config.comparison_runs import Entry
from flexfleet.experiments.compare import begin, check_all, in_one_experiment, sharing, tags, to_share
from flexfleet.experiments.comparison_file import ComparisonFile
from flexfleet.experiments.comparison_report import tabulate
from flexfleet.files.artifacts import Artifact, Result, RunFile
from flexfleet.files.run_status import tally_in
from flexfleet.pipeline import keys
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.run import run
from flexfleet.pipeline.share import share
from flexfleet.tracking import record as track
from flexfleet.tracking.trackers import MLflow


class Pair(BaseModel):
    """One run: an algorithm and a seed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    comparison: str
    """Its id; a night has a comparison for each case."""
    label: str
    shared: str
    """Folder of what it starts from, below that of its comparison."""
    config: dict[str, Any]

    @property
    def entry(self) -> Entry:
        config = parse(self.config)
        return Entry(self.label, config.seed, config)


class PairsFile(Artifact):
    """All runs of a graph, and what belongs to all of them."""

    pairs: tuple[Pair, ...]
    mlflow: str | None
    """The MLflow run of the comparison or the night; null: nothing is tracked."""
    parent: str | None
    """The parent of the runs' own MLflow runs."""
    commit: str | None = None
    """Of the code that makes a whole night; null: a comparison."""

    def pair(self, number: str) -> Pair:
        """The run with this number, as `hand_over` gave it. Raises IntegrityError for one that is not there."""
        if not (number.isascii() and number.isdigit() and int(number) < len(self.pairs)):
            raise IntegrityError(f"the file of the pairs has {len(self.pairs)} runs, from 0, and no {number!r}")
        return self.pairs[int(number)]


def prepare(runs: Sequence[Entry], id: str, shared: Path, out: Path, job_id: str) -> list[str]:
    """Begins the comparison's MLflow run and gives what `hand_over` gives."""
    runs = in_one_experiment(runs)
    pairs = pairs_of(runs, id, shared)
    return hand_over(pairs, begin(runs, id, track.of_job(runs[0].config, job_id)), out)


def pairs_of(runs: Sequence[Entry], id: str, shared: Path) -> list[Pair]:
    """Checks all runs, and writes what they start from into `shared`/<id>."""
    check_all(runs)
    track.prepare(runs[0].config)
    folder: dict[str, str] = {}
    for name, group in sharing(runs).items():
        share(Resolved.of(to_share(group).config), shared / id / name)
        folder |= {entry.name: name for entry in group}
    return [
        Pair(comparison=id, label=e.label, shared=folder[e.name], config=e.config.model_dump(mode="json")) for e in runs
    ]


def hand_over(pairs: Sequence[Pair], mlflow: MLflow | None, out: Path, commit: str | None = None) -> list[str]:
    """Writes the file `out` for the other tasks. Gives the runs' numbers there, as texts: a graph may turn numbers into
    floats."""
    about = PairsFile(
        pairs=tuple(pairs),
        mlflow=mlflow.run_id if mlflow else None,
        parent=mlflow.root if mlflow else None,
        commit=commit,
    )
    about.write(out)
    return [str(number) for number in range(len(pairs))]


def run_pair(file: PairsFile, number: str, shared: Path, out: Path, job_id: str) -> Result:
    """Makes or resumes one run in its folder of the store, and copies the finished run, without its ledger and its key,
    into `out`. Raises ConfigError if the run is one of a night that was begun with another code: nodes may have other
    images of the same name. Raises Diverged or NothingMerged if the run's model is of no use."""
    pair = file.pair(number)
    entry, id = pair.entry, pair.comparison
    if file.commit is not None:
        track.check_code(file.commit, id)
    result = run(
        Resolved.of(entry.config),
        entry.name,
        resume=True,
        shared=shared / id / pair.shared,
        tags={**tags(entry, id, file.parent), **track.of_job(entry.config, job_id)},
    )
    folder = Path(entry.config.run.store) / entry.name
    tally_in(folder).check()
    kept = shutil.ignore_patterns("rounds", "states", ".lock", str(Path(keys.IN_RUN).parent))
    shutil.copytree(folder, out, ignore=kept, dirs_exist_ok=True)
    return result


def collect(file: PairsFile, folders: Sequence[Path], out: Path) -> ComparisonFile:
    """The comparison of the finished runs in `folders`, in any order, written into `out`."""
    by_name = {RunFile.read(folder / "run.json").run_id: folder for folder in folders}
    id, runs = file.pairs[0].comparison, [pair.entry for pair in file.pairs]
    return tabulate(id, runs, by_name, out, mlflow=begin(runs, id, {}, file.mlflow))
