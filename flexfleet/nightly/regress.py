"""The nightly regression: runs a suite, measures it, compares it with earlier figures, and reports; a night that passes
becomes champion.

A night is a folder `<run.store>/<id>/` with figures.json, regression.json (what `--json` prints) and regression.html;
beside it, `<id>-<case>/` is the comparison of each case. In MLflow a night is a run in the experiment
regression-<suite>, the parent of the comparisons and of all their runs. It also makes versions of the registered models
`<suite>-<case>-<label>` (publish.py) from the first seed's runs: each is `candidate` at once, and `champion` if the
gate passes the night. A version's tag says to which night it belongs.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fl_engine.core.errors import ConfigError, IntegrityError
from fl_engine.storage.store import FolderStore
from flexfleet.comparisons import graph, whole
from flexfleet.config.entries import Entry
from flexfleet.config.names import plain
from flexfleet.config.overrides import check_count
from flexfleet.files.alone import alone
from flexfleet.files.artifacts import Artifact, BareHistory, RunFile
from flexfleet.files.begun import check_free, failures_tell, go_on
from flexfleet.files.measure import Measure
from flexfleet.files.signals import stopping_at_once
from flexfleet.nightly import gate, suite
from flexfleet.nightly.figures import BACKEND, PROCESSES, Folders, measure
from flexfleet.nightly.gate import Before, Check
from flexfleet.nightly.night import KIND, Night, check_commit, keep_commit
from flexfleet.nightly.suite import Figures
from flexfleet.publish import publish
from flexfleet.reports import plots
from flexfleet.reports.page import Drawing, Filters, render
from flexfleet.runs.check import check
from flexfleet.runs.whole import need_packages
from flexfleet.steps.prepare import Resolved
from flexfleet.tracking import record as track
from flexfleet.tracking.server import address, answering, client_of
from flexfleet.tracking.trackers import TOKEN, MLflow, ending, log_outcome

PASSED, JUDGED = "flexfleet.passed", "flexfleet.judged"
"""Tags of a night's run: the verdict, and a digest of the runs that were judged."""
NIGHT = "flexfleet.regression"
"""Tag of a registered version: the MLflow run of its night."""
REFERENCE_SEEDS = tuple(range(20))
TURNS, REFERENCE_TURNS = 9, 20
"""Turns in which the pace of each label is measured."""
FILES = ("figures.json", "regression.json", "regression.html")

log = logging.getLogger("flexfleet")


class Verdict(Artifact):
    """regression.json."""

    suite: str
    id: str
    passed: bool
    checks: tuple[Check, ...]
    since: str | None
    """`champion` or `reference`, and the range of commits since then."""
    commits: tuple[str, ...]
    """`hash subject` of the commits since then, newest first; empty if the code is no checkout."""
    notes: tuple[str, ...]
    report: str
    mlflow_run_id: str | None

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.failed]


# ------------------------------------------------------------------------------------------------ the command
def prepare(name: str, id: str, sets: Sequence[str] = (), update: bool = False) -> Night:
    """Reads the suite and its reference. Raises ConfigError if there is nothing to compare with."""
    path = suite.path_of(name)
    asked = suite.load(path)
    seeds = tuple(sorted({*asked.seeds, *REFERENCE_SEEDS})) if update else asked.seeds
    night = Night(path, asked, plain(id, "a night's id"), suite.runs_of(asked, path.stem, seeds, list(sets), id))
    if night.config.tracking.mlflow is not None and not update:
        for entry in (each[0] for each in night.runs.values()):
            publishing = entry.config.publish.model_copy(update={"models": True})
            config = entry.config.model_copy(update={"publish": publishing})
            resolved = Resolved.of(config)
            need_packages(resolved)
            check(resolved)
    if not update:
        _check_before(night)
    return night


def _check_before(night: Night) -> None:
    path = night.path.with_suffix(".json")
    known = [figures for figures in (champion_of(night), reference_of(night)) if figures is not None]
    if not known:
        raise ConfigError(
            f"nothing to compare with: {path} does not exist and MLflow has no champion; make the reference first, "
            "with --update"
        )
    before = {(name, of.task) for figures in known for name, of in figures.labels.items()}
    if not night.tasks.items() & before:
        same = sorted(night.tasks.keys() & {name for name, _ in before})
        why = (
            f"{', '.join(same)} have other settings now than when the figures before were made"
            if same
            else f"the suite has {', '.join(night.tasks)}, the figures before are of "
            f"{', '.join(sorted({name for name, _ in before})) or 'nothing'}"
        )
        raise ConfigError(
            f"nothing to compare with: {why}: take back what was renamed or changed in {night.path}, or make the "
            "reference again, with --update"
        )


def regress(night: Night, *, jobs: int = 1, resume: bool = False) -> Verdict:
    """Makes the runs that are not finished, and judges the night. A night that fails is a result, not an error. Raises
    what `compare` raises, and ConfigError if another process has the night."""
    take_folder(night, resume)
    with alone(night.folder), stopping_at_once(go_on(night.id)):
        with failures_tell(night.id):
            mlflow = begin(night, {})
        with ending(mlflow):
            folders = make(night, jobs, resume, mlflow.root if mlflow else None)
        with failures_tell(night.id):
            return settle(night, folders, night.folder)


def update(night: Night, *, jobs: int = 1, resume: bool = False) -> Figures:
    """Runs at least 20 seeds and writes the suite's reference."""
    take_folder(night, resume)
    with alone(night.folder), stopping_at_once(go_on(night.id)):
        figures = measure(night, make(night, jobs, resume), REFERENCE_TURNS)
        figures.write(night.path.with_suffix(".json"))
        return figures


def take_folder(night: Night, resume: bool) -> None:
    """Raises ConfigError if a night of that name exists and cannot be resumed, also by this code, and if the folder is
    not a night's (`keep_commit`)."""
    check_free(night.folder, resume, "--id")
    keep_commit(night)
    night.folder.mkdir(parents=True, exist_ok=True)


def make(night: Night, jobs: int, resume: bool, mlflow_run_id: str | None = None) -> Folders:
    for case, entries in night.runs.items():
        whole.compare(
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
    """Measures, judges, registers and reports: writes FILES into `out`. A night that MLflow has as judged is not judged
    again, since it would be compared with itself. `mlflow_run_id`: the night's MLflow run, if another task began it."""
    mlflow = begin(night, {}, mlflow_run_id)
    if mlflow is not None and (known := _judged(night, folders, out, mlflow)) is not None:
        log.info("%s was judged before", night.id)
        return known
    with ending(mlflow):
        figures = measure(night, folders, TURNS, runs_in)
        figures.write(out / "figures.json")
        verdict = _verdict(night, figures, out, mlflow.run_id if mlflow else None)
        if mlflow is not None:
            _publish(night, folders, out, verdict, mlflow, figures)
        return verdict


def _verdict(night: Night, figures: Figures, out: Path, mlflow_run_id: str | None) -> Verdict:
    champion, reference = champion_of(night, mlflow_run_id), reference_of(night)
    checks, notes = compared(night, figures, champion, reference)
    before = ("champion", champion) if champion else ("reference", reference)
    verdict = Verdict(
        suite=night.name,
        id=night.id,
        passed=not any(check.failed for check in checks),
        checks=tuple(checks),
        since=f"{before[0]}, {before[1].commit or 'unknown'}..{figures.commit or 'unknown'}" if before[1] else None,
        commits=track.commits(before[1].commit if before[1] else None, figures.commit),
        notes=tuple(notes),
        report=str(out / "regression.html"),
        mlflow_run_id=mlflow_run_id,
    )
    verdict.write(out / "regression.json")
    FolderStore(out).put("regression.html", page(verdict, figures, champion, reference).encode())
    return verdict


# ------------------------------------------------------------------------------------------ as tasks of a graph
def hand_over(night: Night, shared: Path, out: Path, job_id: str) -> list[str]:
    """Checks all runs, begins the night's MLflow run, writes what the runs of a case and seed share into `shared`, and
    gives what `graph.hand_over` gives. Raises ConfigError for a night that was begun with another code (`keep_commit`),
    and for one with more runs than a pipeline can gather."""
    check_commit(night)
    check_count(sum(map(len, night.runs.values())), f"those of the suite {night.name}")
    pairs = [p for case, runs in night.runs.items() for p in graph.pairs_of(runs, f"{night.id}-{case}", shared)]
    commit = keep_commit(night)  # after the checks: a night that they refuse can be begun with the mended code
    return graph.hand_over(pairs, begin(night, track.of_job(night.config, job_id)), out, commit)


def check_pairs(night: Night, file: graph.PairsFile) -> None:
    """Raises ConfigError unless these runs were made with this code: what judges them says of which commit they are."""
    track.check_code(file.commit, night.id)


def folders_of(night: Night, finished: Sequence[Path]) -> Folders:
    """Finished runs' folders, given in any order. Raises IntegrityError where one is missing."""
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
def reference_of(night: Night) -> Figures | None:
    """Raises ConfigError if the suite has changed since its reference was made, IntegrityError for a damaged one."""
    path = night.path.with_suffix(".json")
    if not path.exists():
        return None
    try:
        figures = Figures.read(path)
    except IntegrityError as error:
        raise IntegrityError(f"{error}. Take it back from git, or make it again with --update") from error
    if any(name in figures.labels and figures.labels[name].task != task for name, task in night.tasks.items()):
        raise ConfigError(
            f"{path} is of other settings than {night.path} has now (or of a version that did not tell apart the "
            "algorithms behind labels): make it again with --update"
        )
    return figures


def champion_of(night: Night, own: str | None = None) -> Figures | None:
    """The figures of the last night that passed, by the alias in MLflow's registry; None if there is none yet. `own`:
    the MLflow run of the night itself, which is not compared with itself. Raises EnvironmentFailure if MLflow does not
    answer, IntegrityError for damaged figures."""
    uri = night.config.tracking.mlflow
    if uri is None:
        return None
    client = client_of(uri)
    from mlflow.exceptions import MlflowException

    for case, entries in night.runs.items():
        for label in dict.fromkeys(entry.label for entry in entries):
            with answering(uri, "does not say who is champion"):
                try:
                    version = client.get_model_version_by_alias(_model(night, case, label), publish.CHAMPION)
                except MlflowException as error:
                    if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                        raise
                    continue
            if version.tags.get(NIGHT) in (None, own):  # somebody gave it the alias by hand, or it is of this night
                continue
            return _figures_of(uri, version.tags[NIGHT], f"version {version.version} of {version.name}")
    return None


def _figures_of(uri: str, run_id: str, version: str) -> Figures:
    """The figures of the champion, whose night has this MLflow run. An error says which `version` to take the alias
    from: without a champion a night is compared with the reference alone."""
    from mlflow import artifacts

    said = f"figures.json of the champion's night, the MLflow run {run_id}"
    advice = f"put it back, or take the alias {publish.CHAMPION} from {version} in MLflow, and from the suite's others"
    with tempfile.TemporaryDirectory() as scratch:
        with answering(uri, f"does not give {said} ({advice})"):
            at = artifacts.download_artifacts(
                run_id=run_id, artifact_path="figures.json", dst_path=scratch, tracking_uri=address(uri)
            )
        try:
            return Figures.of(Path(at).read_bytes(), said)
        except IntegrityError as error:
            raise IntegrityError(f"{error}: {advice}") from error


def compared(
    night: Night, now: Figures, champion: Figures | None, reference: Figures | None
) -> tuple[list[Check], list[str]]:
    """All checks, and notes on what could not be checked. Raises IntegrityError if nothing could be checked."""
    before, notes = [], []
    for name, figures in (("champion", champion), ("reference", reference)):
        if figures is None:
            notes.append(f"there is no {name} to compare with")
            continue
        same = {
            label: of_label.values
            for label, of_label in figures.labels.items()
            if label in now.labels and of_label.task == now.labels[label].task
        }
        if missing := sorted(now.labels.keys() - same.keys()):
            notes.append(f"the {name} knows nothing comparable of {', '.join(missing)}")
        known = {metric for values in same.values() for metric in values}
        measured = {metric for label in same for metric in now.labels[label].values}
        if unknown := [metric for metric in gate.METRICS if metric in measured - known]:
            notes.append(f"the {name} has no {', '.join(unknown)} to compare with")
        same_machine = {BACKEND: "in_process", **figures.machine} == now.machine
        if not same_machine:
            notes.append(
                f"memory and pace of the {name} are of another machine, kind of process or run.backend, and are not "
                "compared"
            )
        before.append(Before(name, same, same_machine))
    values, metrics = ({label: getattr(of, part) for label, of in now.labels.items()} for part in ("values", "metric"))
    checks = gate.judge(values, before, night.suite.thresholds, metrics)
    if not checks:
        raise IntegrityError(f"nothing of {night.id} is comparable: {'; '.join(notes)}")
    return checks, notes


# ------------------------------------------------------------------------------------------------- MLflow
def begin(night: Night, given: Mapping[str, str], run_id: str | None = None) -> MLflow | None:
    """The night's own MLflow run: it begins before its children, and a resumed night has the same one. None without
    tracking. `given`: more tags; `run_id`: of an MLflow run that was begun for the night."""
    config = night.config
    if config.tracking.mlflow is None:
        return None
    at = track.commit()
    about = {"flexfleet.kind": KIND, "flexfleet.suite": night.name, **({track.COMMIT: at} if at else {})}
    if run_id is None:
        fresh = track.new_token(KIND, night.id, given)
        about[TOKEN] = track.lasting_token(KIND, night.store, night.stores, fresh)
    return track.tracker(config, night.id, {**about, **given}, run_id)


def _digest(folders: Folders) -> str:
    return track.token_of(KIND, [RunFile.read(folder / "run.json").token for folder in folders.values()])


def _judged(night: Night, folders: Folders, out: Path, mlflow: MLflow) -> Verdict | None:
    """The verdict on these runs, with its FILES, if they were judged before; a kill may have come before the night's
    models were promoted."""
    client = client_of(mlflow.uri)
    with answering(mlflow.uri, "does not say whether the night was judged"):
        tags = client.get_run(mlflow.run_id).data.tags
    # Earlier versions made the token from the same digest as JUDGED.
    if PASSED not in tags or tags.get(JUDGED, tags.get(TOKEN)) != _digest(folders):
        return None
    from mlflow import artifacts

    with answering(mlflow.uri, "does not give the verdict"):
        for name in FILES:
            artifacts.download_artifacts(
                run_id=mlflow.run_id, artifact_path=name, dst_path=str(out), tracking_uri=address(mlflow.uri)
            )
    passed = tags[PASSED] == "True"
    if passed:
        _promote(night, folders, mlflow.uri)
    mlflow.finish("FINISHED" if passed else "FAILED")
    return Verdict.read(out / "regression.json").model_copy(update={"report": str(out / "regression.html")})


def _publish(night: Night, folders: Folders, out: Path, verdict: Verdict, mlflow: MLflow, figures: Figures) -> None:
    client = client_of(mlflow.uri)
    for case, entry, run_id in _registered(night, folders):
        name = entry.config.publish.model_copy(update={"name": _model(night, case, entry.label)})
        config = entry.config.model_copy(update={"publish": name})
        folder = folders[case, entry.name]
        publish.publish(Resolved.of(config), folder, run_id, out / "export" / case / entry.label)
        with answering(mlflow.uri, "does not take the night's models"):
            for version in client.search_model_versions(f"run_id = '{run_id}'"):
                client.set_model_version_tag(version.name, version.version, NIGHT, mlflow.run_id)
    metrics = {
        f"{metric}/{label}": sum(each) / len(each)
        for label, of in figures.labels.items()
        for metric, each in of.values.items()
    }
    log_outcome(mlflow.uri, mlflow.run_id, metrics, {}, [str(out / name) for name in FILES])
    with answering(mlflow.uri, "does not take the verdict"):
        client.set_tag(mlflow.run_id, PASSED, str(verdict.passed))
        # After all figures and files, and before the night is the champion: from now on it is not judged again.
        client.set_tag(mlflow.run_id, JUDGED, _digest(folders))
    if verdict.passed:
        _promote(night, folders, mlflow.uri)
    mlflow.finish("FINISHED" if verdict.passed else "FAILED")


def _registered(night: Night, folders: Folders) -> list[tuple[str, Entry, str]]:
    """The tracked runs of the first seed, whose models are registered: case, run, MLflow run."""
    first = [(case, e) for case, entries in night.runs.items() for e in entries if e.seed == night.seeds[0]]
    tracked = [(case, e, RunFile.read(folders[case, e.name] / "run.json").mlflow_run_id) for case, e in first]
    return [(case, e, run_id) for case, e, run_id in tracked if run_id is not None]


def _promote(night: Night, folders: Folders, uri: str) -> None:
    for case, entry, run_id in _registered(night, folders):
        publish.promote(uri, run_id, BareHistory.read(folders[case, entry.name] / "history.json").model_sha256)


def _model(night: Night, case: str, label: str) -> str:
    return publish.clean(f"{night.name}-{case}-{label}")


# ------------------------------------------------------------------------------------------------- telling
def figure(check: Check, value: float) -> str:
    """A value of the check's metric, for people."""
    return Measure(check.measured).with_unit(value) if check.metric in gate.HIGHER else f"{value:.4g}"


def difference(check: Check, value: float) -> str:
    """How far two values of the check's metric lie apart, for people: in % points where they are in %."""
    said = figure(check, value)
    return f"{said} points" if said.endswith("%") else said


def told(verdict: Verdict) -> str:
    lines = [
        f"{c.label}: {gate.said(c)} {figure(c, c.now)}, {c.against} {figure(c, c.before)}: worse by "
        f"{difference(c, c.worse_by)} (threshold {difference(c, c.threshold)}, noise up to {difference(c, c.noise)})"
        for c in verdict.failed
    ]
    count = len(verdict.checks)
    head = f"passed: {count} figures compared" if verdict.passed else f"failed: {len(lines)} of {count} figures"
    return "\n".join([head, *lines, *verdict.notes, f"report: {verdict.report}"])


def where(night: Night, verdict: Verdict, job_id: str) -> str:
    """The link to a night's report: its MLflow run, else its run in Kubeflow, else a hint where to look."""
    job = track.of_job(night.config, job_id).get("kfp.run", "")
    return track.link(night.config, verdict.mlflow_run_id or "") or job or "the page of the task before this one"


def card(verdict: Verdict) -> str:
    """Markdown for the run's page in Kubeflow."""
    rows = [
        f"| {c.label} | {gate.said(c)} | {figure(c, c.now)} | {figure(c, c.before)} ({c.against}) |"
        for c in (verdict.failed or verdict.checks)
    ]
    head = "passed" if verdict.passed else "FAILED"
    since = [f"Since {verdict.since}:", "", *(f"- {line}" for line in verdict.commits)] if verdict.commits else []
    return "\n".join([f"## {verdict.suite}: {head}", "", "| | metric | now | before |", "|---|---|--:|--:|", *rows, "",
                      *verdict.notes, "", *since, ""])  # fmt: skip


def page(verdict: Verdict, now: Figures, champion: Figures | None, reference: Figures | None) -> str:
    """One HTML page that loads nothing from elsewhere."""
    drawings: dict[str, Drawing] = {}
    for label in now.labels:
        nights = {"now": now, "champion": champion, "reference": reference}
        curves = [
            (name, [p for p in _points(one, label, 2) if p[2]], _points(one, label, 3))
            for name, one in nights.items()
            if one is not None and label in one.labels
        ]
        measure = Measure(now.labels[label].metric)
        drawings[label] = Drawing(plots.comparison(curves, f"curve-{len(drawings)}", measure))
    filters: Filters = {"said": gate.said, "figure": _named(figure), "difference": _named(difference)}
    return render("flexfleet.nightly", "regression.html", filters, v=verdict, now=now, drawings=drawings)


def _named(said: Callable[[Check, float], str]) -> Callable[[Check, str], str]:
    """The same of a check's field of this name."""
    return lambda check, name: said(check, getattr(check, name))


def _points(figures: Figures, label: str, which: int) -> list[tuple[int, float, list[float]]]:
    return [(point[0], point[1], list(point[2] if which == 2 else point[3])) for point in figures.labels[label].curve]
