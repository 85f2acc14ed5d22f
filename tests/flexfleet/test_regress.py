"""The nightly gate on real runs: what is fine becomes champion; each kind of regression fails for its own reason."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest
import yaml

from fl_engine.core.errors import EnvironmentFailure, IntegrityError, Unreachable
from fl_engine.rounds.run import Run
from flexfleet.config import load_config
from flexfleet.nightly import regress, suite
from flexfleet.nightly.pace import pace
from flexfleet.nightly.regress import Verdict
from flexfleet.nightly.suite import Figures
from flexfleet.publish import publish
from flexfleet.tracking.trackers import MLflow
from tests.harness.warm import warm

PLANTED = '''
"""FlexFL with what should not be."""
import time
from dataclasses import dataclass
from fl_engine.algorithms import pooled
from fl_engine.algorithms.flexfl import FlexFL

KEPT = []

@dataclass(frozen=True)
class NoDistillation(FlexFL):
    kd_weight: float = 0.0

@dataclass(frozen=True)
class ByCount(FlexFL):
    def merge(self, state, plan, answers, server):
        return pooled.merge(self, state, plan, answers, server, lambda update: 1.0)

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

    def champion(self, model: str) -> str | None:
        aliases = mlflow.MlflowClient(tracking_uri=self.uri).get_registered_model(model).aliases
        return str(aliases["champion"]) if "champion" in aliases else None


@pytest.fixture(scope="module", autouse=True)
def _other_work_on_the_machine_is_not_measured() -> Iterator[None]:
    """Pace is what this process computes, not what it waits for a core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flexfleet.nightly.pace.time", SimpleNamespace(perf_counter=time.process_time))
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
        python = opened.enter_context(warm(PYTHONPATH=str(folder)))  # so that it holds as much memory
        patch.setattr(sys, "executable", str(python))
        yield Place(folder, f"sqlite:///{folder}/mlflow.db", flexfleet, tiny_suite)


@pytest.fixture(scope="module")
def first(place: Place) -> Verdict:
    """A night that passes: the champion of those that follow. Its suite's reference is its own figures, of noise as
    this machine has it."""
    path = place.suite("tiny")
    done = place.night(path, "base")
    assert done.code == 2 and "nothing to compare with" in done.err and "--update" in done.err
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flexfleet.nightly.regress.REFERENCE_SEEDS", (0, 1, 2))
        patch.setattr("flexfleet.nightly.regress.REFERENCE_TURNS", 9)
        done = place.night(path, "reference", "--update")
    assert done.code == 0, done.err
    done = place.night(path, "first", "--json")
    verdict = Verdict.model_validate_json(done.out)
    assert done.code == 0, verdict.failed
    return verdict


def test_a_night_like_the_reference_passes_and_becomes_champion(place: Place, first: Verdict) -> None:
    assert first.passed and {c.against for c in first.checks} == {"reference"}
    exact = [c for c in first.checks if c.metric in ("avg", "full", "rounds", "mb")]
    assert len(exact) == 4
    for model in ("tiny-quick-flexfl", "tiny-quick-flexfl-M1", "tiny-quick-flexfl-M3"):
        assert place.champion(model) == "1"
    client = mlflow.MlflowClient(tracking_uri=place.uri)
    night = client.get_run(str(first.mlflow_run_id))
    assert night.info.status == "FINISHED" and night.data.tags["flexfleet.passed"] == "True"
    assert night.data.metrics["full/quick/flexfl"] == pytest.approx(next(c.now for c in exact if c.metric == "full"))
    assert {f.path for f in client.list_artifacts(night.info.run_id)} == {
        "figures.json", "regression.json", "regression.html"
    }  # fmt: skip


def test_in_mlflow_a_night_has_its_runs_and_their_comparison_below_it(place: Place, first: Verdict) -> None:
    client = mlflow.MlflowClient(tracking_uri=place.uri)
    (experiment,) = client.search_experiments(filter_string="name = 'regression-tiny'")
    filter = f"tags.`mlflow.parentRunId` = '{first.mlflow_run_id}'"
    found = {run.info.run_name for run in client.search_runs([experiment.experiment_id], filter)}
    assert found == {"first-quick", *(f"flexfl-s{seed}" for seed in range(3))}
    assert "mlflow.parentRunId" not in client.get_run(str(first.mlflow_run_id)).data.tags


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planted takes the place of FlexFL's code, of which a suite knows the name alone."""
    monkeypatch.setattr("flexfleet.nightly.suite.labels_of", lambda algorithms: {})


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize(("kind", "reasons"), [("Sleeping", {"pace"}), ("Leaking", {"peak_mb_rounds"})])
def test_what_costs_more_fails_the_night(
    place: Place, first: Verdict, kind: str, reasons: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "Sleeping":
        monkeypatch.setattr("flexfleet.nightly.pace.time", time)
    before = place.champion("tiny-quick-flexfl")
    night = place.suite(f"{kind}/tiny", cases={"quick": {"algorithms": f"flexfl=planted:{kind}", "to": 0.9}})
    night.with_suffix(".json").write_text((place.folder / "tiny.json").read_text())
    done = place.night(night, kind, "--json")
    verdict = Verdict.model_validate_json(done.out)
    assert done.code == 5 and not verdict.passed
    found = {c.metric for c in verdict.failed}
    assert reasons <= found <= reasons | {"pace"}, "for the right reason (to fill memory also takes time)"
    assert {c.against for c in verdict.failed if c.metric in reasons} == {"champion", "reference"}
    same = [c for c in verdict.checks if c.against == "champion" and c.metric in ("avg", "full", "rounds", "mb")]
    assert len(same) == 4 and all(c.worse_by == 0 for c in same), "equal seeds, equal figures"
    assert place.champion("tiny-quick-flexfl") == before, "the alias stays"
    page = Path(verdict.report).read_text()
    assert "failed" in page and verdict.since and verdict.since in page
    assert mlflow.MlflowClient(tracking_uri=place.uri).get_run(str(verdict.mlflow_run_id)).info.status == "FAILED"


DIGITS = suite.path_of("digits")


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
    assert any("no champion" in note for note in verdict.notes)


def test_a_suite_that_was_changed_wants_a_new_reference(place: Place, first: Verdict) -> None:
    changed = json.loads(json.dumps(place.tiny))
    changed["settings"]["training.lr"] = 0.01
    path = place.suite("changed", **changed)
    path.with_suffix(".json").write_text((place.folder / "tiny.json").read_text())
    done = place.night(path, "changed")
    assert done.code == 2 and "is of other settings than" in done.err and "--update" in done.err


def test_a_night_is_not_begun_twice_and_goes_on(place: Place, first: Verdict) -> None:
    done = place.night(place.folder / "tiny.yaml", "first")
    assert done.code == 2 and "--resume" in done.err
    versions = len(mlflow.MlflowClient(tracking_uri=place.uri).search_model_versions("name = 'tiny-quick-flexfl'"))
    done = place.night(place.folder / "tiny.yaml", "first", "--resume", "--json")
    assert done.code == 0, done.err
    assert Verdict.model_validate_json(done.out) == first, "judged once"
    again = mlflow.MlflowClient(tracking_uri=place.uri).search_model_versions("name = 'tiny-quick-flexfl'")
    assert len(again) == versions, "nothing is registered twice"


def test_a_night_that_fails_as_it_is_judged_says_how_it_goes_on(
    place: Place, first: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any) -> None:
        raise Unreachable("MLflow does not give the verdict")

    monkeypatch.setattr(regress, "settle", gone)
    done = place.night(place.folder / "tiny.yaml", "first", "--resume")
    assert done.code == 6 and done.err.rstrip().endswith("verdict: the same command with --id first --resume goes on")


def test_a_number_of_jobs_that_cannot_be_is_refused_at_once(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    done = place.flexfleet("regress", "--suite", "digits", "--id", "nobody", "--jobs", "0")
    assert done.code == 2 and "at least 1, got 0" in done.err and "folder" not in caplog.text


@pytest.mark.parametrize(
    "setting",
    ["training.lr=0.01", "seed=4", "algorithm.kd_weight=0", "run.precision=bf16", "rounds.over_provision=1.5"],
)
def test_nobody_moves_a_figure_by_a_setting(place: Place, setting: str) -> None:
    done = place.flexfleet("regress", "--id", "moved", sets=[setting])
    assert done.code == 2 and "a suite says what is measured" in done.err


def test_code_of_another_commit_does_not_go_on_with_a_night(place: Place, first: Verdict) -> None:
    begun = place.folder / "runs" / "first" / "commit"
    before = begun.read_text()
    begun.write_text("another")
    done = place.night(place.folder / "tiny.yaml", "first", "--resume")
    begun.write_text(before)
    assert done.code == 2 and "was begun with the code of commit another" in done.err


def test_a_champion_that_mlflow_does_not_tell_is_an_error_not_nobody(
    place: Place, first: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.exceptions import MlflowException

    def refuse(*_: object) -> None:
        raise MlflowException("no answer", error_code=13)  # TEMPORARILY_UNAVAILABLE and the like

    monkeypatch.setattr(mlflow.MlflowClient, "get_model_version_by_alias", refuse)
    done = place.night(place.folder / "tiny.yaml", "untold")
    assert (done.code, "does not say who is champion" in done.err) == (6, True)


def test_figures_before_that_are_damaged_are_named_with_what_to_do(
    mlflow_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MLflow puts artifacts under ./mlruns
    path = tmp_path / "digits.yaml"
    path.write_text(DIGITS.read_text())
    path.with_suffix(".json").write_text("{")
    asked, client = suite.load(path), mlflow.MlflowClient(mlflow_uri)
    runs = suite.runs_of(asked, "digits", asked.seeds, [f"tracking.mlflow={mlflow_uri}"], "n")
    night, before = regress.Night(path, asked, "n", runs), MLflow(mlflow_uri, "nights", "before", {})
    with pytest.raises(IntegrityError, match=r"digits\.json is not .*\. Take it back from git, or .* --update"):
        regress.reference_of(night)
    model = "digits-uneven-flexfl"
    client.create_registered_model(model)
    client.create_model_version(model, "here", before.run_id, tags={regress.NIGHT: before.run_id})
    client.set_registered_model_alias(model, publish.CHAMPION, "1")
    about = f"figures.json of the champion's night, the MLflow run {before.run_id}"
    with pytest.raises(EnvironmentFailure, match=f"does not give {about} .*take the alias champion from version 1 of"):
        regress.champion_of(night)
    client.log_text(before.run_id, "{", "figures.json")
    with pytest.raises(IntegrityError, match=f"^{about} is not .*take the alias champion from version 1 of {model}"):
        regress.champion_of(night)


@pytest.mark.parametrize("reached", [False, True])
def test_a_night_that_is_killed_while_it_becomes_champion_is_not_judged_again(
    mlflow_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: type[BaseException], reached: bool
) -> None:
    """It would be compared with itself; and what the kill kept from being promoted is."""
    monkeypatch.chdir(tmp_path)  # MLflow puts artifacts under ./mlruns
    asked, client = suite.load(DIGITS), mlflow.MlflowClient(mlflow_uri)
    runs = suite.runs_of(asked, "digits", asked.seeds, [f"tracking.mlflow={mlflow_uri}"], "n")
    night, tracked = regress.Night(DIGITS, asked, "n", runs), MLflow(mlflow_uri, "nights", "n", {})
    model, made = "digits-uneven-flexfl", client.create_run(tracked.experiment_id).info.run_id
    client.create_registered_model(model)
    client.create_model_version(model, "here", made, tags={publish.MODEL: "m", regress.NIGHT: tracked.run_id})
    figures = Figures(suite="digits", id="n", when="now", commit=None, machine={}, seeds=(0, 1, 2), labels={})
    verdict = Verdict(suite="digits", id="n", passed=True, checks=(), since=None, commits=(), notes=(),
                      report=str(tmp_path / "regression.html"), mlflow_run_id=tracked.run_id)  # fmt: skip
    figures.write(tmp_path / "figures.json")
    verdict.write(tmp_path / "regression.json")
    (tmp_path / "regression.html").write_text("<html></html>")

    def promote(*_: Any) -> None:
        publish.promote(mlflow_uri, made, "m")

    def kill(*_: Any) -> None:
        if reached:
            promote()
        raise killed

    monkeypatch.setattr(regress, "_registered", lambda *_: [])
    with monkeypatch.context() as patch, pytest.raises(killed):
        patch.setattr(regress, "_promote", kill)
        regress._publish(night, {}, tmp_path, verdict, tracked, figures)
    monkeypatch.setattr(regress, "_promote", promote)
    assert regress._judged(night, {}, tmp_path, tracked) == verdict
    assert client.get_registered_model(model).aliases == {"champion": 1}
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    assert regress.champion_of(night) == figures and regress.champion_of(night, tracked.run_id) is None
    assert not list(scratch.iterdir())


def test_what_could_not_be_exported_is_said_before_anything_trains(place: Place, first: Verdict) -> None:
    cases = {"quick": {"algorithms": "all_large", "to": 0.9}}
    path = place.suite("bare/tiny", settings=place.tiny["settings"] | {"partition.proxy": 0.0}, cases=cases)
    done = place.night(path, "bare")
    assert done.code == 2 and "set partition.proxy above 0" in done.err
    assert not (place.folder / "runs" / "bare").exists()


PRIVATE = "algorithm.aggregation={name: private, clip: 0.5, noise_multiplier: 1.0}"
TRACED = "fleet.trace={name: lognormal, online_s: 3, offline_s: 3, bandwidth_s: 1, repeat_s: 100}"


@pytest.mark.parametrize("sets", [(PRIVATE, "rounds.norm_bound=null", "algorithm.static_bn=false"), (TRACED,)])
def test_pace_is_measured_on_the_plan_that_a_run_has(
    finished: tuple[Path, Any], quick: Sequence[str], monkeypatch: pytest.MonkeyPatch, sets: Sequence[str]
) -> None:
    """A private one, whose noise needs a key, and one whose clients come and go; round and loop have the same."""
    config, runs = load_config(None, (*quick, "fleet.wait_s=1000", *sets)), list[Run]()

    def seen(*given: Any, **more: Any) -> Run:
        runs.append(Run(*given, **more))
        return runs[-1]

    monkeypatch.setattr("flexfleet.nightly.pace.Run", seen)
    assert len(pace(config, finished[0], 1)) == 1
    (run,) = runs
    wanted = (config.fleet.trace is not None, PRIVATE in sets, 1000)
    assert (run.trace is not None, run.noise_key is not None, run.wait_s) == wanted


def test_figures_have_what_was_measured(place: Place, first: Verdict) -> None:
    found = Figures.read(place.folder / "runs" / "first" / "figures.json")
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
