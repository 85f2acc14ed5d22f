"""Execute a nightly regression run: compare the algorithms of a suite, check the metrics, and publish the models.

The results are figures.json, regression.json (the output of `--json`) and regression.html in `<run.store>/<id>/`. The
comparison of each case is stored in `<id>-<case>/`. In MLflow, the experiment regression-<suite> contains the nightly
regression run, which is the parent run of all comparisons and runs. If all checks pass, the models of the first seed
are registered as `<suite>-<case>-<label>`. The registered versions get the aliases `candidate` and `champion`.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError, Diverged, GateFailed
from fl_engine.storage.store import FolderStore, sha256
from flexfleet.config.form import check_count
from flexfleet.experiments import compare, nightly_gate, published_suites
from flexfleet.experiments.executor import RunsFailed, resumable
from flexfleet.experiments.nightly_gate import PROCESSES, Folders, NightlyFigures, measure
from flexfleet.experiments.nightly_suite import FOLDER, NightlyRun, nightly_run
from flexfleet.experiments.nightly_verdict import Verdict
from flexfleet.files.artifacts import History, RunFile
from flexfleet.files.run_folder import check_free
from flexfleet.pipeline import publish
from flexfleet.pipeline.check import check
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.run import need_packages
from flexfleet.tracking import record as track
from flexfleet.tracking.server import Client
from flexfleet.tracking.trackers import MLflow, ending, log_outcome

PASSED, REFERENCE = "flexfleet.passed", "flexfleet.reference"
"""Names of MLflow tags. PASSED stores the verdict, and REFERENCE stores the sha256 of the reference file."""
COMMIT = "commit"
"""Store key under which the git commit of the nightly regression run is saved."""
HISTORY = 20
"""Maximum number of earlier nightly regression runs with which a run is compared."""
REFERENCE_SEEDS = tuple(range(20))
FILES = ("figures.json", "regression.json", "regression.html")

log = logging.getLogger("flexfleet")


# ------------------------------------------------------------------------------------------------ the command
def prepare(name: str, id: str, overrides: Mapping[str, Any] | None = None, update: bool = False) -> NightlyRun:
    """Read a suite, and check its runs and its reference. If `update` is True, only plan the runs for a new reference,
    without these checks. Raises the errors of `reference_of`."""
    nightly = nightly_run(
        published_suites.path_of(name, FOLDER), id, overrides or {}, REFERENCE_SEEDS if update else ()
    )
    if update:
        return nightly
    if nightly.config.tracking.mlflow is not None:
        for entry in (entries[0] for entries in nightly.runs.values()):
            publishing = entry.config.publish.model_copy(update={"models": True})
            resolved = Resolved.of(entry.config.model_copy(update={"publish": publishing}))
            need_packages(resolved)
            check(resolved)
    reference_of(nightly)
    return nightly


def regress(nightly: NightlyRun, *, jobs: int = 1, resume: bool = False) -> Verdict:
    """Execute all unfinished runs, and return the verdict. A metric that became worse does not raise an error. Raises
    the errors of `run_comparison`, and GateFailed if a run diverged or did not merge any update."""
    check_free(nightly.folder, resume, "--id")
    take_commit(nightly)
    with resumable(nightly.folder, nightly.id):
        mlflow = begin(nightly, {})
        with ending(mlflow):
            try:
                folders = execute(nightly, jobs, resume, mlflow.root if mlflow else None)
            except RunsFailed as error:
                if error.exit_code == Diverged.exit_code:  # also the exit code of NothingMerged
                    raise GateFailed(str(error)) from error
                raise
        return settle(nightly, folders, nightly.folder)


def update(nightly: NightlyRun, *, jobs: int = 1, resume: bool = False) -> NightlyFigures:
    """Execute the runs of the suite with at least 20 seeds, and write the new reference."""
    check_free(nightly.folder, resume, "--id")
    take_commit(nightly)
    with resumable(nightly.folder, nightly.id):
        figures = measure(nightly, execute(nightly, jobs, resume))
        figures.write(nightly.reference)
        return figures


def take_commit(nightly: NightlyRun) -> str:
    """Store and return the git commit of the code. Raises ConfigError if this nightly regression run was started with
    another commit, because all models are published under one commit."""
    store = nightly.store
    if COMMIT in store.list(COMMIT):
        return track.check_code(store.get(COMMIT).decode(), store.uri())
    if track.commit() is None:
        log.warning(
            "the git commit of the code is unknown, so reports cannot list the commits between two runs. Build the "
            "image with COMMIT=$(git rev-parse HEAD), or set FLEXFLEET_COMMIT"
        )
    store.create(COMMIT, track.code().encode())
    return track.code()


def execute(nightly: NightlyRun, jobs: int, resume: bool, mlflow_run_id: str | None = None) -> Folders:
    """Run the comparison of each case, and return the run folders. `mlflow_run_id` is the parent of all MLflow runs."""
    for case, entries in nightly.runs.items():
        compare.run_comparison(
            entries,
            f"{nightly.id}-{case}",
            to=(nightly.suite.cases[case].to,),
            at_once=jobs,
            resume=resume,
            parent=mlflow_run_id,
            resume_id=nightly.id,
        )
    return {(case, entry.name): entry.folder for case, entries in nightly.runs.items() for entry in entries}


def settle(
    nightly: NightlyRun, folders: Folders, out: Path, runs_in: str = PROCESSES, mlflow_run_id: str | None = None
) -> Verdict:
    """Evaluate the finished runs, write FILES into `out`, and publish the models if the nightly regression run passes.

    Args:
        runs_in: PROCESSES or TASKS.
        mlflow_run_id: ID of the MLflow run that another task has started; None to start an MLflow run.
    """
    mlflow = begin(nightly, {}, mlflow_run_id)
    with ending(mlflow):
        figures = measure(nightly, folders, runs_in)
        figures.write(out / "figures.json")
        verdict = _judge(nightly, figures, out, mlflow)
        if mlflow is not None:
            log_verdict(nightly, out, verdict, mlflow, figures)
            if verdict.passed:
                _publish(nightly, folders, out, mlflow.client)
            mlflow.finish("FINISHED" if verdict.passed else "FAILED")
        return verdict


def _judge(nightly: NightlyRun, figures: NightlyFigures, out: Path, mlflow: MLflow | None) -> Verdict:
    reference, passed = reference_of(nightly), passed_since(nightly, mlflow) if mlflow else []
    checks = nightly_gate.judge(figures, reference, passed, nightly.suite.thresholds)
    before, last = ("last nightly regression run that passed", passed[0]) if passed else ("reference", reference)
    verdict = Verdict(
        suite=nightly.name,
        id=nightly.id,
        passed=not any(check.failed for check in checks),
        checks=tuple(checks),
        since=f"{before}, {last.commit or 'unknown'}..{figures.commit or 'unknown'}",
        commits=track.commits(last.commit, figures.commit),
        notes=nightly_gate.notes(figures, checks, len(passed)),
        report=str(out / "regression.html"),
        mlflow_run_id=mlflow.run_id if mlflow else None,
    )
    verdict.write(out / "regression.json")
    others = {**({"last that passed": passed[0]} if passed else {}), "reference": reference}
    FolderStore(out).put("regression.html", nightly_gate.html(verdict, figures, others).encode())
    return verdict


# ------------------------------------------------------------------------------------------ pipeline tasks
def hand_over(nightly: NightlyRun, shared: Path, out: Path, job_id: str) -> list[str]:
    """Check all runs, prepare them in `shared`, write their parameters into the file `out`, and start the MLflow run.
    Returns the index of each run in the file. Raises ConfigError if the code has changed, or if there are too many runs
    for a pipeline."""
    check_count(sum(map(len, nightly.runs.values())), f"the runs of the suite {nightly.name}")
    pairs = [
        pair for case, runs in nightly.runs.items() for pair in compare.pairs_of(runs, f"{nightly.id}-{case}", shared)
    ]
    commit = take_commit(nightly)  # pin the commit last, because a failed check may require a code change
    return compare.write_pairs(pairs, begin(nightly, track.of_job(nightly.config, job_id)), out, commit)


def folders_of(nightly: NightlyRun, finished: Sequence[Path]) -> Folders:
    """Map (case, run ID) to the folder of each finished run."""
    cases = {f"{nightly.id}-{case}": case for case in nightly.runs}
    folders = {}
    for folder in finished:
        file = RunFile.read(folder / "run.json")
        folders[cases[Path(file.config["run"]["store"]).name], file.run_id] = folder
    return folders


def link(nightly: NightlyRun, verdict: Verdict, job_id: str) -> str:
    """Return the URL of the report in MLflow or Kubeflow. If both URLs are unknown, return a hint."""
    job = track.of_job(nightly.config, job_id).get("kfp.run", "")
    return track.link(nightly.config, verdict.mlflow_run_id or "") or job or "the page of the task before this one"


# ------------------------------------------------------------------------------------------------- earlier figures
def reference_of(nightly: NightlyRun) -> NightlyFigures:
    """Read the reference of the suite. Raises ConfigError if the file is missing, or if its settings differ from the
    suite. Raises IntegrityError if the file is damaged."""
    path = nightly.reference
    if not path.exists():
        raise ConfigError(f"{path} does not exist. Create the reference with --update", code="config.reference")
    figures = NightlyFigures.read(path)
    known = {name: each.task for name, each in figures.labels.items()}
    other = [name for name, task in nightly.tasks.items() if known.get(name) != task]
    if other or not {*nightly.seeds} <= {*figures.seeds}:
        raise ConfigError(
            f"{path} must have the settings and seeds of {nightly.path}, but differs in {', '.join(other or known)}. "
            "Undo the change to the suite, or create the reference again with --update",
            code="config.reference",
        )
    return figures


def passed_since(nightly: NightlyRun, mlflow: MLflow, most: int = HISTORY) -> list[NightlyFigures]:
    """Return the metrics of earlier nightly regression runs that passed with the same reference, starting with the
    newest. Raises EnvironmentFailure if MLflow is unreachable, and IntegrityError if a file is damaged."""
    reference = sha256(nightly.reference.read_bytes())
    wanted = f"tags.`{PASSED}` = 'True' and tags.`{REFERENCE}` = '{reference}'"
    figures = []
    runs = mlflow.client.search_runs(
        [mlflow.experiment_id], wanted, max_results=most + 1, order_by=["attributes.start_time DESC"]
    )
    others = [run.info.run_id for run in runs if run.info.run_id != mlflow.run_id]
    for run_id in others[:most]:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(mlflow.client.download_artifacts(run_id, "figures.json", scratch))
            figures.append(NightlyFigures.of(path.read_bytes(), f"figures.json of the MLflow run {run_id}"))
    return figures


# ------------------------------------------------------------------------------------------------- MLflow
def begin(nightly: NightlyRun, tags: Mapping[str, str], run_id: str | None = None) -> MLflow | None:
    """Start or continue the MLflow run of the nightly regression run, and add `tags`. Returns None if tracking is off.
    If another task has started the MLflow run, `run_id` is its ID."""
    about = {track.SUITE: nightly.name, **tags}
    return track.begin_parent(nightly.config, "regression", nightly.id, nightly.store, about, run_id)


def log_verdict(nightly: NightlyRun, out: Path, verdict: Verdict, mlflow: MLflow, figures: NightlyFigures) -> None:
    metrics = {
        f"{metric}/{label}": sum(values) / len(values)
        for label, each in figures.labels.items()
        for metric, values in each.values.items()
    }
    files, reference = [str(out / name) for name in FILES], sha256(nightly.reference.read_bytes())
    log_outcome(mlflow.client, mlflow.run_id, metrics, {REFERENCE: reference}, files)
    # Set this tag last, because later runs are compared with all runs that have the tag.
    mlflow.client.set_tag(mlflow.run_id, PASSED, str(verdict.passed))


def _publish(nightly: NightlyRun, folders: Folders, out: Path, client: Client) -> None:
    """Register the models of the first seed with the aliases candidate and champion. Repeated calls change nothing."""
    for case, entries in nightly.runs.items():
        for entry in (each for each in entries if each.seed == nightly.seeds[0]):
            folder = folders[case, entry.name]
            run_id = RunFile.read(folder / "run.json").mlflow_run_id
            if run_id is None:
                continue
            name = publish.clean(f"{nightly.name}-{case}-{entry.label}")
            named = entry.config.publish.model_copy(update={"name": name})
            resolved = Resolved.of(entry.config.model_copy(update={"publish": named}))
            publish.publish(resolved, folder, run_id, out / "export" / case / entry.label)
            publish.promote(client, run_id, History.read(folder / "history.json").model_sha256)
