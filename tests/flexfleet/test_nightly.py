"""A nightly regression run is made by one commit, and needs a reference of its own settings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest
import yaml

from fl_engine.core.errors import ConfigError, GateFailed
from flexfleet.experiments import compare, nightly
from flexfleet.experiments.compare import PairsFile
from flexfleet.experiments.nightly_gate import LabelFigures, NightlyFigures
from flexfleet.experiments.nightly_suite import NightlyRun


@pytest.fixture
def suite(tmp_path: Path, tiny_suite: dict[str, Any]) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump({**tiny_suite, "cases": {"quick": {"algorithms": "all_large", "to": 0.2}}}))
    return path


@pytest.fixture(params=["volume", "remote"])
def in_new_pod(request: pytest.FixtureRequest, tmp_path: Path, suite: Path) -> Callable[[], NightlyRun]:
    """Prepare the run n in a new pod: on a volume that all pods have, or in `run.remote` with a folder for each pod."""
    pods = iter(range(9))

    def prepared() -> NightlyRun:
        where = {"run.store": f"{tmp_path}/volume"}
        if request.param == "remote":
            where = {"run.store": f"{tmp_path}/pod{next(pods)}", "run.remote": f"{tmp_path}/remote"}
        return nightly.prepare(str(suite), "n", {"tracking.mlflow": None, **where}, update=True)

    return prepared


def test_nightly_run_is_resumed_only_by_its_own_commit(
    in_new_pod: Callable[[], NightlyRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    for commit in ("aaaa", "bbbb", "aaaa"):
        monkeypatch.setenv("FLEXFLEET_COMMIT", commit)
        with pytest.raises(ConfigError) if commit == "bbbb" else contextlib.nullcontext():
            nightly.take_commit(in_new_pod())


def test_image_of_another_commit_makes_no_run(suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLEXFLEET_COMMIT", "aaaa")
    prepared = nightly.prepare(str(suite), "n", {"tracking.mlflow": None}, update=True)
    path = tmp_path / "pairs"
    (first, *_) = nightly.hand_over(prepared, tmp_path / "shared", path, "job")
    monkeypatch.setenv("FLEXFLEET_COMMIT", "bbbb")
    with pytest.raises(ConfigError):
        compare.run_pair(PairsFile.read(path), first, tmp_path / "shared", tmp_path / "out", "job")
    assert not list((tmp_path / "runs").rglob("run.json")) and not (tmp_path / "out").exists()


def figures_of(run: NightlyRun) -> NightlyFigures:
    values = {"full": (0.5, 0.6, 0.7)}
    labels = {name: LabelFigures(task=task, values=values, curve=()) for name, task in run.tasks.items()}
    return NightlyFigures(suite=run.name, id="n", when="now", commit=None, machine={}, seeds=(0, 1, 2), labels=labels)


@pytest.mark.parametrize(
    ("cases", "seeds", "fine"),
    [
        ({"quick": "all_large"}, [0, 1, 2], True),
        ({"quick": "mine=flexfl"}, [0, 1, 2], True),
        ({"quick": "all_large,heterofl"}, [0, 1, 2], False),
        ({"slow": "all_large"}, [0, 1, 2], False),
        ({"quick": "mine=heterofl"}, [0, 1, 2], False),
        ({"quick": "all_large"}, [0, 1, 3], False),
    ],
)
def test_prepare_refuses_what_the_reference_does_not_have(
    suite: Path, tiny_suite: dict[str, Any], cases: dict[str, str], seeds: list[int], fine: bool
) -> None:
    def prepared(cases: dict[str, str], seeds: list[int], update: bool = False) -> NightlyRun:
        given = {case: {"algorithms": algorithms, "to": 0.2} for case, algorithms in cases.items()}
        suite.write_text(yaml.safe_dump({**tiny_suite, "cases": given, "seeds": seeds}))
        return nightly.prepare(str(suite), "n", {"tracking.mlflow": None}, update)

    reference = prepared({"quick": "all_large,mine=flexfl"}, [0, 1, 2], update=True)
    figures_of(reference).write(suite.with_suffix(".json"))
    with contextlib.nullcontext() if fine else pytest.raises(ConfigError) as error:
        prepared(cases, seeds)
    assert fine or error.value.code == "config.reference"


@pytest.mark.usefixtures("warm_starts")
def test_regress_fails_the_gate_if_a_run_diverged(
    suite: Path, tiny_suite: dict[str, Any], mlflow_uri: str, own_folder: None
) -> None:
    cases = {"quick": {"algorithms": "all_large", "to": 0.2, "settings": {"training.lr": 1e30}}}
    suite.write_text(yaml.safe_dump({**tiny_suite, "cases": cases}))
    sets = {"tracking.mlflow": mlflow_uri, "publish.onnx": False}
    figures_of(nightly.prepare(str(suite), "n", sets, update=True)).write(suite.with_suffix(".json"))
    with pytest.raises(GateFailed):
        nightly.regress(nightly.prepare(str(suite), "n", sets))
    client = mlflow.MlflowClient(mlflow_uri)
    (experiment,) = client.search_experiments(filter_string="name = 'regression-tiny'")
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.status for run in runs} == {"FAILED"}
    assert not any(nightly.PASSED in run.data.tags for run in runs)
    assert client.search_registered_models() == []
