"""The nightly gate on real runs: what is fine becomes champion; each kind of regression fails for its own reason."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest
import yaml

from flexfleet.experiments import nightly, nightly_suite
from flexfleet.experiments.nightly import Verdict
from flexfleet.experiments.nightly_gate import PASSED, REFERENCE
from flexfleet.experiments.nightly_suite import NightFigures
from flexfleet.tracking.trackers import MLflow
from tests.harness.warm import warm

PLANTED = '''
"""FlexFL with what should not be."""
import time
from dataclasses import dataclass
from fl_engine.algorithms.flexfl import FlexFL

KEPT = []

@dataclass(frozen=True)
class NoDistillation(FlexFL):
    kd_weight: float = 0.0

@dataclass(frozen=True)
class ByCount(FlexFL):
    def weight(self, update, state, server):
        return 1.0

@dataclass(frozen=True)
class Sleeping(FlexFL):
    def merge(self, state, plan, answers, server):
        if plan.round == 0:  # the round whose pace is measured
            time.sleep(1.0)
        return super().merge(state, plan, answers, server)

@dataclass(frozen=True)
class Leaking(FlexFL):
    def merge(self, state, plan, answers, server):
        KEPT.append(b"x" * 20_000_000)
        return super().merge(state, plan, answers, server)
'''
HEAVY = 'HELD = b"x" * 600_000_000'
"""Every run begins with as much memory as PyPI's CUDA build of torch takes: a tenth of that hides a leak."""


@dataclass(frozen=True)
class Place:
    folder: Path
    uri: str
    flexfleet: Any
    tiny: dict[str, Any]

    def suite(self, name: str, **changes: Any) -> Path:
        path = self.folder / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump({**self.tiny, **changes}))
        return path

    def night(self, path: Path, id: str, *argv: str) -> Any:
        sets = [f"tracking.mlflow={self.uri}", "publish.onnx=false"]
        return self.flexfleet("regress", "--suite", str(path), "--id", id, "--jobs", "2", *argv, sets=sets)

    def aliases(self, model: str) -> dict[str, str]:
        aliases = mlflow.MlflowClient(tracking_uri=self.uri).get_registered_model(model).aliases
        return {alias: str(version) for alias, version in aliases.items()}


@pytest.fixture(scope="module", autouse=True)
def _other_work_on_the_machine_is_not_measured() -> Iterator[None]:
    """Pace is what this process computes, not what it waits for a core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flexfleet.experiments.nightly_figures.time", SimpleNamespace(perf_counter=time.process_time))
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, flexfleet: Any, tiny_suite: dict[str, Any]) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("nights")
    (folder / "planted.py").write_text(PLANTED)
    (folder / "sitecustomize.py").write_text(HEAVY)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as opened:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", str(folder))  # for the runs, which are processes
        patch.setenv("FLEXFLEET_ALLOWED_CODE", "planted")  # a suite may be somebody else's file
        python = opened.enter_context(warm(PYTHONPATH=str(folder)))  # so that it holds as much memory
        patch.setattr(sys, "executable", str(python))
        yield Place(folder, f"sqlite:///{folder}/mlflow.db", flexfleet, tiny_suite)


@pytest.fixture(scope="module")
def first(place: Place) -> Verdict:
    """A nightly regression run that passes. Its suite's reference is its own figures, of noise as
    this machine has it."""
    path = place.suite("tiny")
    done = place.night(path, "base")
    assert done.code == 2 and "--update" in done.err
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flexfleet.experiments.nightly.REFERENCE_SEEDS", (0, 1, 2))
        patch.setattr("flexfleet.experiments.nightly.REFERENCE_TURNS", 9)
        done = place.night(path, "reference", "--update")
    assert done.code == 0, done.err
    done = place.night(path, "first", "--json")
    verdict = Verdict.model_validate_json(done.out)
    assert done.code == 0, verdict.failed
    return verdict


def test_a_night_like_the_reference_passes_and_becomes_champion(place: Place, first: Verdict) -> None:
    assert first.passed and {c.against for c in first.checks} == {REFERENCE}
    exact = [c for c in first.checks if c.metric in ("avg", "full", "rounds", "mb")]
    assert len(exact) == 4
    for model in ("tiny-quick-flexfl", "tiny-quick-flexfl-M1", "tiny-quick-flexfl-M3"):
        assert place.aliases(model) == {"champion": "1", "candidate": "1"}
    client = mlflow.MlflowClient(tracking_uri=place.uri)
    night = client.get_run(str(first.mlflow_run_id))
    assert night.info.status == "FINISHED" and night.data.tags["flexfleet.passed"] == "True"
    assert night.data.metrics["full/quick/flexfl"] == pytest.approx(next(c.now for c in exact if c.metric == "full"))
    assert {f.path for f in client.list_artifacts(night.info.run_id)} == {
        "figures.json", "regression.json", "regression.html"
    }  # fmt: skip


def test_mlflow_has_runs_and_comparison_below_the_night(place: Place, first: Verdict) -> None:
    client = mlflow.MlflowClient(tracking_uri=place.uri)
    (experiment,) = client.search_experiments(filter_string="name = 'regression-tiny'")
    filter = f"tags.`mlflow.parentRunId` = '{first.mlflow_run_id}'"
    found = {run.info.run_name for run in client.search_runs([experiment.experiment_id], filter)}
    assert found == {"first-quick", *(f"flexfl-s{seed}" for seed in range(3))}
    assert "mlflow.parentRunId" not in client.get_run(str(first.mlflow_run_id)).data.tags


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the planted algorithm the digest of FlexFL's task."""
    task_of = nightly_suite.task_of

    def of_flexfl(suite: nightly_suite.NightlySuite, case: str, label: str) -> str:
        plain = suite.cases[case].model_copy(update={"algorithms": label})
        return task_of(suite.model_copy(update={"cases": {**suite.cases, case: plain}}), case, label)

    monkeypatch.setattr("flexfleet.experiments.nightly_run.task_of", of_flexfl)


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize(("kind", "reasons"), [("Sleeping", {"pace"}), ("Leaking", {"peak_mb_rounds"})])
def test_what_costs_more_fails_the_night(
    place: Place, first: Verdict, kind: str, reasons: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "Sleeping":
        monkeypatch.setattr("flexfleet.experiments.nightly_figures.time", time)
    before = place.aliases("tiny-quick-flexfl")
    night = place.suite(f"{kind}/tiny", cases={"quick": {"algorithms": f"flexfl=planted:{kind}", "to": 0.9}})
    night.with_suffix(".json").write_text((place.folder / "tiny.json").read_text())
    done = place.night(night, kind, "--json")
    verdict = Verdict.model_validate_json(done.out)
    assert done.code == 5 and not verdict.passed
    found = {c.metric for c in verdict.failed}
    assert reasons <= found <= reasons | {"pace"}, "for the right reason (to fill memory also takes time)"
    assert {c.against for c in verdict.failed if c.metric in reasons} == {REFERENCE, PASSED}
    same = [c for c in verdict.checks if c.metric in ("avg", "full", "rounds", "mb")]
    assert len(same) == 8 and all(c.worse_by == 0 for c in same), "equal seeds, equal figures"
    assert place.aliases("tiny-quick-flexfl") == before, "nothing is registered"
    page = Path(verdict.report).read_text()
    assert "failed" in page and verdict.since in page
    assert mlflow.MlflowClient(tracking_uri=place.uri).get_run(str(verdict.mlflow_run_id)).info.status == "FAILED"


DIGITS = nightly_suite.path_of("digits")


@pytest.mark.usefixtures("warm_starts", "planted")
@pytest.mark.parametrize(
    ("kind", "case", "reasons"),
    [("NoDistillation", "skewed", {"full"}), ("ByCount", "uneven", {"avg", "full"})],
)
def test_what_learns_worse_fails_the_night(place: Place, kind: str, case: str, reasons: set[str]) -> None:
    """On the suite that comes along, against its reference in git; other machines compute other last bits."""
    asked = yaml.safe_load(DIGITS.read_text())
    about = asked["cases"][case]
    about["settings"] = {key: value for key, value in about["settings"].items() if ":" not in key}
    asked["cases"] = {case: {**about, "algorithms": f"flexfl=planted:{kind}"}}
    (place.folder / kind).mkdir()
    (place.folder / kind / "digits.yaml").write_text(yaml.safe_dump(asked))
    (place.folder / kind / "digits.json").write_text(DIGITS.with_suffix(".json").read_text())
    done = place.flexfleet("regress", "--suite", str(place.folder / kind / "digits.yaml"), "--id", kind, "--jobs", "2",
                           "--json", sets=["tracking.mlflow=null"])  # fmt: skip
    verdict = Verdict.model_validate_json(done.out)
    assert done.code == 5, done.err
    found = {c.metric for c in verdict.failed}
    assert found & reasons and not found & {"pace", "peak_mb_rounds"}, "for the right reason"


def test_a_suite_that_was_changed_wants_a_new_reference(place: Place, first: Verdict) -> None:
    changed = json.loads(json.dumps(place.tiny))
    changed["settings"]["training.lr"] = 0.01
    path = place.suite("changed", **changed)
    path.with_suffix(".json").write_text((place.folder / "tiny.json").read_text())
    done = place.night(path, "changed")
    assert done.code == 2 and "--update" in done.err


def test_a_night_is_not_begun_twice_and_goes_on(place: Place, first: Verdict) -> None:
    done = place.night(place.folder / "tiny.yaml", "first")
    assert done.code == 2 and "--resume" in done.err
    versions = len(mlflow.MlflowClient(tracking_uri=place.uri).search_model_versions("name = 'tiny-quick-flexfl'"))
    done = place.night(place.folder / "tiny.yaml", "first", "--resume", "--json")
    assert done.code == 0, done.err
    assert Verdict.model_validate_json(done.out) == first, "judged once"
    again = mlflow.MlflowClient(tracking_uri=place.uri).search_model_versions("name = 'tiny-quick-flexfl'")
    assert len(again) == versions, "nothing is registered twice"


@pytest.mark.parametrize(
    "setting",
    ["training.lr=0.01", "seed=4", "algorithm.kd_weight=0", "run.precision=bf16", "rounds.over_provision=1.5"],
)
def test_nobody_moves_a_figure_by_a_setting(place: Place, setting: str) -> None:
    done = place.flexfleet("regress", "--id", "moved", sets=[setting])
    assert done.code == 2 and "a suite says what is measured" in done.err


@pytest.fixture
def night(mlflow_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nightly.Night:
    """A nightly regression run of the suite digits, which trains nothing."""
    monkeypatch.chdir(tmp_path)  # MLflow puts artifacts under ./mlruns
    for ending in (".yaml", ".json"):
        (tmp_path / f"digits{ending}").write_text(DIGITS.with_suffix(ending).read_text())
    asked = nightly_suite.load(DIGITS)
    runs = nightly_suite.runs_of(asked, "digits", asked.seeds, {"tracking.mlflow": mlflow_uri}, "n")
    return nightly.Night(tmp_path / "digits.yaml", asked, "n", runs)


FIGURES = NightFigures(suite="digits", id="n", when="now", commit=None, machine={}, seeds=(0, 1, 2), labels={})


def judged(night: nightly.Night, name: str, passed: bool = True) -> MLflow:
    """The MLflow run of a nightly regression run that has a verdict."""
    uri = str(night.config.tracking.mlflow)
    tracked, out = MLflow(uri, "nights", name, {}), night.path.parent / name
    out.mkdir()
    verdict = Verdict(suite="digits", id=name, passed=passed, checks=(), since="reference", commits=(), notes=(),
                      report=str(out / "regression.html"), mlflow_run_id=tracked.run_id)  # fmt: skip
    figures = FIGURES.model_copy(update={"id": name})
    figures.write(out / "figures.json")
    verdict.write(out / "regression.json")
    (out / "regression.html").write_text("<html></html>")
    nightly._record(night, {}, out, verdict, tracked, figures)
    return tracked


def test_passed_since_gives_the_newest_of_this_reference(night: nightly.Night, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = night.path.with_suffix(".json")
    own = MLflow(str(night.config.tracking.mlflow), "nights", "own", {})
    now = reference.read_text()
    reference.write_text(now + " ")
    judged(night, "other")
    reference.write_text(now)
    for name, passed in (("a", True), ("b", True), ("bad", False), ("c", True)):
        judged(night, name, passed)
    assert [figures.id for figures in nightly.passed_since(night, own)] == ["c", "b", "a"]
    monkeypatch.setattr(nightly, "HISTORY", 2)
    assert [figures.id for figures in nightly.passed_since(night, own)] == ["c", "b"]


def test_unexportable_suite_is_refused_before_training(place: Place, first: Verdict) -> None:
    cases = {"quick": {"algorithms": "all_large", "to": 0.9}}
    path = place.suite("bare/tiny", settings=place.tiny["settings"] | {"partition.proxy": 0.0}, cases=cases)
    done = place.night(path, "bare")
    assert done.code == 2 and "set partition.proxy above 0" in done.err
    assert not (place.folder / "runs" / "bare").exists()


def test_figures_have_what_was_measured(place: Place, first: Verdict) -> None:
    found = NightFigures.read(place.folder / "runs" / "first" / "figures.json")
    folders = [place.folder / "runs" / "first-quick" / f"flexfl-s{seed}" for seed in range(3)]
    runs = [json.loads((folder / "result.json").read_text()) for folder in folders]
    of = found.labels["quick/flexfl"]
    assert list(of.values["full"]) == [run["metrics"]["full"] for run in runs]
    assert set(of.mlflow_runs) == {run["mlflow_run_id"] for run in runs}
    history = json.loads((folders[0] / "history.json").read_text())["rounds"]
    reached = [row["round"] + 1 for row in history if row["metrics"].get("full", 0) >= 0.9]
    assert of.values["rounds"][0] == (reached[0] if reached else 4.0), "one round more than there were"
    sent = sum(row["metrics"]["bytes_down"] + row["metrics"]["bytes_up"] for row in history) / 1e6
    assert of.values["mb"][0] == pytest.approx(sent * 4 / 3) or reached
    for name in ("peak_mb", "peak_mb_rounds"):
        assert of.values[name][0] == max(row["metrics"][name] for row in history)
    assert of.values["peak_mb"][0] > 600 > 100 > of.values["peak_mb_rounds"][0] > 0, "what was held is not"
    assert found.machine["backend"] == "in_process"
    assert len(of.curve) == 3 and [len(point[3]) for point in of.curve] == [3, 3, 3]
