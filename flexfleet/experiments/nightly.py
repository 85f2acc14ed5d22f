"""Nightly regression run: train a suite, judge its figures, and publish the models if it passes.

A nightly regression run is a folder `<run.store>/<id>/` with figures.json, regression.json (what `--json` prints) and
regression.html. The comparison of each case is stored in `<id>-<case>/`. In MLflow it is a run in the experiment
regression-<suite>, the parent of the comparisons and of all their runs. If it passes, the first seed's runs become
versions of the registered models `<suite>-<case>-<label>` with the aliases `candidate` and `champion`.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError, GateFailed, IntegrityError
from fl_engine.storage.store import FolderStore, sha256
from flexfleet.config.form import check_count
from flexfleet.config.run_names import plain
from flexfleet.experiments import compare, comparison_tasks, nightly_gate, nightly_suite
from flexfleet.experiments.nightly_figures import PROCESSES, Folders, measure
from flexfleet.experiments.nightly_gate import Check
from flexfleet.experiments.nightly_run import KIND, Night, check_commit, keep_commit
from flexfleet.experiments.nightly_suite import NightFigures
from flexfleet.files.artifacts import Artifact, BareHistory, RunFile
from flexfleet.files.measure import Measure
from flexfleet.files.run_folder import check_free, failures_tell, folder_lock, go_on
from flexfleet.files.signals import stopping_at_once
from flexfleet.pipeline import publish
from flexfleet.pipeline.check import check
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.run import need_packages
from flexfleet.reports import plots
from flexfleet.reports.page import Drawing, render
from flexfleet.tracking import record as track
from flexfleet.tracking.server import Patient, answering
from flexfleet.tracking.trackers import TOKEN, MLflow, ending, log_outcome

PASSED, JUDGED, REFERENCE = "flexfleet.passed", "flexfleet.judged", "flexfleet.reference"
"""Tags in MLflow: the verdict, a digest of the runs that were judged, and the reference's sha256."""
HISTORY = 20
"""The most passed nightly regression runs that a new one is compared with; the newest are taken."""
REFERENCE_SEEDS = tuple(range(20))
TURNS, REFERENCE_TURNS = 15, 20
"""Turns in which the pace of each label is measured."""
NOTHING_LEARNED = 7
"""Exit code of a run that diverged or merged no update."""
FILES = ("figures.json", "regression.json", "regression.html")

log = logging.getLogger("flexfleet")


class Verdict(Artifact):
    """regression.json."""

    suite: str
    id: str
    passed: bool
    checks: tuple[Check, ...]
    since: str
    """The last nightly regression run that passed, or the reference, and the range of commits since then."""
    commits: tuple[str, ...]
    """`hash subject` of the commits since then, newest first; empty if the code is no checkout."""
    notes: tuple[str, ...]
    report: str
    mlflow_run_id: str | None

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.failed]


# ------------------------------------------------------------------------------------------------ the command
def prepare(name: str, id: str, overrides: Mapping[str, Any] | None = None, update: bool = False) -> Night:
    """Read the suite and check its reference. Raises what `reference_of` raises."""
    path = nightly_suite.path_of(name)
    asked = nightly_suite.load(path)
    seeds = tuple(sorted({*asked.seeds, *REFERENCE_SEEDS})) if update else asked.seeds
    night = Night(
        path, asked, plain(id, "a night's id"), nightly_suite.runs_of(asked, path.stem, seeds, overrides or {}, id)
    )
    if update:
        return night
    if night.config.tracking.mlflow is not None:
        for entry in (each[0] for each in night.runs.values()):
            publishing = entry.config.publish.model_copy(update={"models": True})
            config = entry.config.model_copy(update={"publish": publishing})
            resolved = Resolved.of(config)
            need_packages(resolved)
            check(resolved)
    reference_of(night)
    return night


def regress(night: Night, *, jobs: int = 1, resume: bool = False) -> Verdict:
    """Make the runs that are not finished, and judge them. A worse figure is a result, not an error. Raises as
    `run_comparison`; GateFailed if a run diverged or merged no update."""
    take_folder(night, resume)
    with folder_lock(night.folder), stopping_at_once(go_on(night.id)):
        with failures_tell(night.id):
            mlflow = begin(night, {})
        with ending(mlflow):
            try:
                folders = make(night, jobs, resume, mlflow.root if mlflow else None)
            except compare.RunsFailed as error:
                if error.exit_code == NOTHING_LEARNED:
                    raise GateFailed(str(error)) from error
                raise
        with failures_tell(night.id):
            return settle(night, folders, night.folder)


def update(night: Night, *, jobs: int = 1, resume: bool = False) -> NightFigures:
    """Run at least 20 seeds and write the suite's reference."""
    take_folder(night, resume)
    with folder_lock(night.folder), stopping_at_once(go_on(night.id)):
        figures = measure(night, make(night, jobs, resume), REFERENCE_TURNS)
        figures.write(night.path.with_suffix(".json"))
        return figures


def take_folder(night: Night, resume: bool) -> None:
    """Raise ConfigError if the nightly regression run exists and cannot be resumed by this code."""
    check_free(night.folder, resume, "--id")
    keep_commit(night)
    night.folder.mkdir(parents=True, exist_ok=True)


def make(night: Night, jobs: int, resume: bool, mlflow_run_id: str | None = None) -> Folders:
    for case, entries in night.runs.items():
        compare.run_comparison(
            entries,
            f"{night.id}-{case}",
            to=(night.suite.cases[case].to,),
            at_once=jobs,
            resume=resume,
            night=mlflow_run_id,
            goes_on_as=night.id,
        )
    return {(case, e.name): Path(e.config.run.store) / e.name for case, runs in night.runs.items() for e in runs}


def settle(
    night: Night, folders: Folders, out: Path, runs_in: str = PROCESSES, mlflow_run_id: str | None = None
) -> Verdict:
    """Measure, judge and report: write FILES into `out`, and publish the models if the verdict is good. If MLflow has a
    verdict on these runs, it is used again. `mlflow_run_id`: the night's MLflow run, if another task began it."""
    mlflow = begin(night, {}, mlflow_run_id)
    with ending(mlflow):
        verdict = _judged(folders, out, mlflow) if mlflow else None
        if verdict is None:
            figures = measure(night, folders, TURNS, runs_in)
            figures.write(out / "figures.json")
            verdict = _verdict(night, figures, out, mlflow)
            if mlflow is not None:
                _record(night, folders, out, verdict, mlflow, figures)
        if mlflow is not None:
            if verdict.passed:
                _publish(night, folders, out, mlflow.client)
            mlflow.finish("FINISHED" if verdict.passed else "FAILED")
        return verdict


def _verdict(night: Night, figures: NightFigures, out: Path, mlflow: MLflow | None) -> Verdict:
    reference, passed = reference_of(night), passed_since(night, mlflow) if mlflow else []
    checks = nightly_gate.judge(figures, reference, passed, night.suite.thresholds)
    before, last = ("last nightly regression run that passed", passed[0]) if passed else ("reference", reference)
    verdict = Verdict(
        suite=night.name,
        id=night.id,
        passed=not any(check.failed for check in checks),
        checks=tuple(checks),
        since=f"{before}, {last.commit or 'unknown'}..{figures.commit or 'unknown'}",
        commits=track.commits(last.commit, figures.commit),
        notes=_notes(figures, checks, len(passed)),
        report=str(out / "regression.html"),
        mlflow_run_id=mlflow.run_id if mlflow else None,
    )
    verdict.write(out / "regression.json")
    curves = {"tonight": figures, **({"last that passed": passed[0]} if passed else {}), "reference": reference}
    FolderStore(out).put("regression.html", page(verdict, figures, curves).encode())
    return verdict


def _notes(figures: NightFigures, checks: Sequence[Check], passed: int) -> tuple[str, ...]:
    judged = {(check.label, check.metric) for check in checks}
    unjudged = [
        f"{label} {nightly_suite.METRICS[metric]}"
        for label, of in figures.labels.items()
        for metric in nightly_suite.METRICS
        if metric in of.values and (label, metric) not in judged
    ]
    notes = [f"compared with the reference and {passed} nightly regression runs that passed since it was made"]
    if unjudged:
        notes.append(
            f"not judged, because no earlier figures are comparable: {', '.join(unjudged)}. Memory and pace are only "
            "compared with figures of the same machine, kind of process and run.backend"
        )
    return tuple(notes)


# ------------------------------------------------------------------------------------------ as tasks of a graph
def hand_over(night: Night, shared: Path, out: Path, job_id: str) -> list[str]:
    """Check all runs, begin the MLflow run, write the data that runs of a case and seed share into `shared`, and return
    the runs' numbers. Raises ConfigError if it was begun with other code, or has too many runs for a pipeline."""
    check_commit(night)
    check_count(sum(map(len, night.runs.values())), f"those of the suite {night.name}")
    pairs = [
        p for case, runs in night.runs.items() for p in comparison_tasks.pairs_of(runs, f"{night.id}-{case}", shared)
    ]
    commit = keep_commit(night)  # after the checks, so that a refused one can be begun with corrected code
    return comparison_tasks.hand_over(pairs, begin(night, track.of_job(night.config, job_id)), out, commit)


def check_pairs(night: Night, file: comparison_tasks.PairsFile) -> None:
    """Raise ConfigError unless these runs were made with this code, whose commit the verdict names."""
    track.check_code(file.commit, night.id)


def folders_of(night: Night, finished: Sequence[Path]) -> Folders:
    """Map case and run to the finished run folders. Raises IntegrityError if one is missing."""
    of_case = {f"{night.id}-{case}": case for case in night.runs}
    folders = {}
    for folder in finished:
        file = RunFile.read(folder / "run.json")
        folders[of_case[Path(file.config["run"]["store"]).name], file.run_id] = folder
    wanted = {(case, entry.name) for case, entries in night.runs.items() for entry in entries}
    if missing := sorted(wanted - folders.keys()):
        raise IntegrityError(f"runs of {night.id} are missing: {', '.join('/'.join(pair) for pair in missing)}")
    return folders


# ------------------------------------------------------------------------------------------------- before
def reference_of(night: Night) -> NightFigures:
    """Return the suite's reference. Raises ConfigError if it does not exist or was made for other settings, and
    IntegrityError if it is damaged."""
    path = night.path.with_suffix(".json")
    if not path.exists():
        raise ConfigError(f"{path} does not exist, so there is nothing to compare with. Make this reference: --update")
    try:
        figures = NightFigures.read(path)
    except IntegrityError as error:
        raise IntegrityError(f"{error}. Restore it from git, or make it again: --update") from error
    known = {name: of.task for name, of in figures.labels.items()}
    if other := [name for name, task in night.tasks.items() if known.get(name) != task]:
        raise ConfigError(
            f"{path} was made for other settings than {night.path} has now (of {', '.join(other)}; the reference has "
            f"{', '.join(known) or 'nothing'}). Undo the change of the suite, or make the reference again: --update"
        )
    if missing := sorted({*night.seeds} - {*figures.seeds}):
        raise ConfigError(f"{path} does not have the seeds {missing} of {night.path}. Make it again: --update")
    return figures


def passed_since(night: Night, mlflow: MLflow) -> list[NightFigures]:
    """Return the figures of the newest nightly regression runs that passed against this reference, newest first.
    Raises EnvironmentFailure if MLflow does not answer, IntegrityError if figures are damaged."""
    wanted = f"tags.`{PASSED}` = 'True' and tags.`{REFERENCE}` = '{_reference_sha256(night)}'"
    with answering(mlflow.uri, "does not list the nightly regression runs that passed"):
        runs = mlflow.client.search_runs(
            [mlflow.experiment_id], wanted, max_results=HISTORY + 1, order_by=["attributes.start_time DESC"]
        )
    others = [run.info.run_id for run in runs if run.info.run_id != mlflow.run_id]
    return [_figures_of(mlflow.client, run_id) for run_id in others[:HISTORY]]


def _reference_sha256(night: Night) -> str:
    return sha256(night.path.with_suffix(".json").read_bytes())


def _figures_of(client: Patient, run_id: str) -> NightFigures:
    name = f"figures.json of the MLflow run {run_id}, a nightly regression run that passed"
    advice = f"restore the file, or delete that run: mlflow runs delete --run-id {run_id}"
    with tempfile.TemporaryDirectory() as scratch:
        with answering(client.uri, f"does not give {name} ({advice})"):
            at = client.download_artifacts(run_id, "figures.json", scratch)
        try:
            return NightFigures.of(Path(at).read_bytes(), name)
        except IntegrityError as error:
            raise IntegrityError(f"{error}: {advice}") from error


# ------------------------------------------------------------------------------------------------- MLflow
def begin(night: Night, given: Mapping[str, str], run_id: str | None = None) -> MLflow | None:
    """Begin or continue the MLflow run of the nightly regression run; None without tracking. `given`: more tags;
    `run_id`: an MLflow run that was begun for it."""
    config = night.config
    if config.tracking.mlflow is None:
        return None
    at = track.commit()
    about = {"flexfleet.kind": KIND, "flexfleet.suite": night.name, **({track.COMMIT: at} if at else {})}
    if run_id is None:
        fresh = track.new_token(KIND, night.id, given)
        about[TOKEN] = track.lasting_token(KIND, night.store, fresh)
    return track.tracker(config, night.id, {**about, **given}, run_id)


def _digest(folders: Folders) -> str:
    return track.token_of(KIND, [RunFile.read(folder / "run.json").token for folder in folders.values()])


def _judged(folders: Folders, out: Path, mlflow: MLflow) -> Verdict | None:
    """Return MLflow's verdict on these runs, if there is one, and download its FILES."""
    with answering(mlflow.uri, "does not say whether the night was judged"):
        tags = mlflow.client.get_run(mlflow.run_id).data.tags
    if PASSED not in tags or tags.get(JUDGED) != _digest(folders):
        return None
    with answering(mlflow.uri, "does not give the verdict"):
        for name in FILES:
            mlflow.client.download_artifacts(mlflow.run_id, name, str(out))
    log.info("%s was judged before", mlflow.run_id)
    return Verdict.read(out / "regression.json").model_copy(update={"report": str(out / "regression.html")})


def _record(night: Night, folders: Folders, out: Path, verdict: Verdict, mlflow: MLflow, figures: NightFigures) -> None:
    metrics = {
        f"{metric}/{label}": sum(each) / len(each)
        for label, of in figures.labels.items()
        for metric, each in of.values.items()
    }
    files = [str(out / name) for name in FILES]
    log_outcome(mlflow.client, mlflow.run_id, metrics, {REFERENCE: _reference_sha256(night)}, files)
    with answering(mlflow.uri, "does not take the verdict"):
        mlflow.client.set_tag(mlflow.run_id, PASSED, str(verdict.passed))
        # After all figures and files: from now on these runs are not judged again.
        mlflow.client.set_tag(mlflow.run_id, JUDGED, _digest(folders))


def _publish(night: Night, folders: Folders, out: Path, client: Patient) -> None:
    """Register the models of the first seed's runs, as candidate and champion. A second call changes nothing."""
    for case, entries in night.runs.items():
        for entry in (each for each in entries if each.seed == night.seeds[0]):
            folder = folders[case, entry.name]
            run_id = RunFile.read(folder / "run.json").mlflow_run_id
            if run_id is None:
                continue
            name = publish.clean(f"{night.name}-{case}-{entry.label}")
            named = entry.config.publish.model_copy(update={"name": name})
            resolved = Resolved.of(entry.config.model_copy(update={"publish": named}))
            publish.publish(resolved, folder, run_id, out / "export" / case / entry.label)
            publish.promote(client, run_id, BareHistory.read(folder / "history.json").model_sha256)


# ------------------------------------------------------------------------------------------------- telling
COLUMNS = ("case / algorithm", "figure", "before", "of", "tonight", "limit", "smallest regression caught")


def row(check: Check) -> tuple[str, ...]:
    """Return a check's cells below COLUMNS."""
    shown = Measure(check.measured).with_unit if check.metric in nightly_suite.HIGHER else "{:.4g}".format
    if check.metric in nightly_suite.HIGHER:
        points = shown(check.allowed)
        smallest = f"-{points} points" if points.endswith("%") else f"-{points}"
    else:
        smallest = f"x {check.limit / check.before:.2f}" if check.before else f"+{check.allowed:.4g}"
    figure = nightly_suite.METRICS[check.metric].replace("accuracy", check.measured)
    return check.label, figure, shown(check.before), check.against, shown(check.now), shown(check.limit), smallest


def table(checks: Sequence[Check]) -> str:
    """Return the checks as text, a line for each."""
    rows = [COLUMNS, *map(row, checks)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in rows)


def told(verdict: Verdict, every: bool = False) -> str:
    """Return the verdict with the table of the checks that failed, or of `every` check."""
    checks = verdict.checks if every else verdict.failed
    worse = sum(check.worse_by > 0 for check in verdict.checks)
    count = len(verdict.checks)
    head = (
        f"passed: {count} comparisons, {worse} of them worse within their limits"
        if verdict.passed
        else f"failed: {len(verdict.failed)} of {count} comparisons"
    )
    return "\n".join([head, *([table(checks)] if checks else []), *verdict.notes, f"report: {verdict.report}"])


def where(night: Night, verdict: Verdict, job_id: str) -> str:
    """The link to a night's report: its MLflow run, else its run in Kubeflow, else a hint where to look."""
    job = track.of_job(night.config, job_id).get("kfp.run", "")
    return track.link(night.config, verdict.mlflow_run_id or "") or job or "the page of the task before this one"


def card(verdict: Verdict) -> str:
    """Return Markdown for the run's page in Kubeflow."""
    rows = [COLUMNS, ("--",) * len(COLUMNS), *map(row, verdict.failed or verdict.checks)]
    head = "passed" if verdict.passed else "FAILED"
    since = [f"Since the {verdict.since}:", "", *(f"- {line}" for line in verdict.commits)] if verdict.commits else []
    lines = (f"| {' | '.join(cells)} |" for cells in rows)
    return "\n".join([f"## {verdict.suite}: {head}", "", *lines, "", *verdict.notes, "", *since, ""])


def page(verdict: Verdict, now: NightFigures, nights: Mapping[str, NightFigures]) -> str:
    """Return one HTML page that loads nothing from elsewhere. `nights`: whose curves are drawn, by name."""
    drawings: dict[str, Drawing] = {}
    for label in now.labels:
        curves = [
            (name, [p for p in _points(one, label, 2) if p[2]], _points(one, label, 3))
            for name, one in nights.items()
            if label in one.labels
        ]
        measure = Measure(now.labels[label].metric)
        drawings[label] = Drawing(plots.comparison(curves, f"curve-{len(drawings)}", measure))
    return render(
        "flexfleet.experiments", "regression.html", {"row": row}, v=verdict, now=now, drawings=drawings, columns=COLUMNS
    )


def _points(figures: NightFigures, label: str, which: int) -> list[tuple[int, float, list[float]]]:
    return [(point[0], point[1], list(point[2] if which == 2 else point[3])) for point in figures.labels[label].curve]
