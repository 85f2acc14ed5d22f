"""A night is made by the code of one commit: what begins, resumes, makes and judges it asks for that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest
import yaml

from components.nightly_tasks import gate
from fl_engine.core.errors import ConfigError, GateFailed
from flexfleet.experiments import compare, comparison_tasks, nightly
from flexfleet.experiments.comparison_tasks import PairsFile
from flexfleet.experiments.executor import Command
from flexfleet.experiments.nightly_run import Night, keep_commit
from flexfleet.experiments.nightly_suite import NightFigures, OfLabel

Code = Callable[[str], None]
Nights = Callable[[], Night]
OTHER = "aaaa, this is bbbb"


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> Code:
    """Sets the commit of the code, as an image does."""
    return lambda commit: monkeypatch.setenv("FLEXFLEET_COMMIT", commit)


@pytest.fixture
def suite(tmp_path: Path, tiny_suite: dict[str, Any]) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump({**tiny_suite, "cases": {"quick": {"algorithms": "all_large", "to": 0.2}}}))
    return path


@pytest.fixture(params=["volume", "remote"])
def night(request: pytest.FixtureRequest, tmp_path: Path, suite: Path) -> Nights:
    """The night n in a new pod: on a volume that all pods have, or in `run.remote`, and each has its own folder."""
    pods = iter(range(9))

    def in_a_pod() -> Night:
        where = {"run.store": f"{tmp_path}/volume"}
        if request.param == "remote":
            where = {"run.store": f"{tmp_path}/pod{next(pods)}", "run.remote": f"{tmp_path}/remote"}
        return nightly.prepare(str(suite), "n", {"tracking.mlflow": None, **where}, update=True)

    return in_a_pod


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_night_is_resumed_by_the_commit_that_began_it_alone(night: Nights, code: Code, tmp_path: Path) -> None:
    code("aaaa")
    assert keep_commit(night()) == keep_commit(night()) == "aaaa"
    code("bbbb")
    before = files(tmp_path)
    with pytest.raises(ConfigError, match=OTHER):
        nightly.hand_over(night(), tmp_path / "shared", tmp_path / "pairs", "job")
    with pytest.raises(ConfigError, match=OTHER):
        nightly.take_folder(asked := night(), resume=True)
    assert files(tmp_path) == before, "what is refused leaves nothing"
    code("aaaa")
    nightly.take_folder(asked, resume=True)


@pytest.mark.parametrize("kept", ["comparison.token", ".lock"])
def test_what_is_not_a_night_is_not_resumed_as_one(night: Nights, code: Code, tmp_path: Path, kept: str) -> None:
    code("aaaa")
    night().store.put(kept, b"")
    before = files(tmp_path)
    with pytest.raises(ConfigError, match=r"--id"):
        nightly.take_folder(night(), resume=True)
    with pytest.raises(ConfigError, match="--id"):
        keep_commit(night())
    assert files(tmp_path) == before, "what is refused leaves nothing"


def test_image_of_another_commit_is_refused_by_a_night(
    suite: Path, code: Code, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nightly, "reference_of", lambda _: None)
    code("aaaa")
    asked = nightly.prepare(str(suite), "n", {"tracking.mlflow": None})
    path = tmp_path / "pairs"
    (first, *_) = nightly.hand_over(asked, tmp_path / "shared", path, "job")
    pairs = PairsFile.read(path)
    nightly.check_pairs(asked, pairs)

    def judge(pairs: PairsFile) -> str:
        pairs.write(path)
        file: Any = SimpleNamespace(path=str(path))
        given: Any = SimpleNamespace(path=str(tmp_path / "out"))
        with pytest.raises(SystemExit) as ended:
            gate.python_func(str(suite), "", "runs", "n", "job", {}, file, [], given, given, given, given)
        assert ended.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    code("bbbb")
    with pytest.raises(ConfigError, match=OTHER):
        comparison_tasks.run_pair(pairs, first, tmp_path / "shared", tmp_path / "out", "job")
    assert not list((tmp_path / "runs").rglob("run.json")) and not (tmp_path / "out").exists()
    assert OTHER in judge(pairs)


def figures_of(night: Night) -> NightFigures:
    labels = {
        name: OfLabel(task=task, values={"full": (0.5, 0.6, 0.7)}, curve=()) for name, task in night.tasks.items()
    }
    return NightFigures(suite=night.name, id="n", when="now", commit=None, machine={}, seeds=(0, 1, 2), labels=labels)


@pytest.mark.parametrize(
    ("cases", "seeds", "fine"),
    [
        ({"quick": "all_large"}, [0, 1, 2], True),
        ({"quick": "mine=flexfl"}, [0, 1, 2], True),
        ({"quick": "all_large,heterofl"}, [0, 1, 2], False),
        ({"quick": "all_large", "more": "flexfl"}, [0, 1, 2], False),
        ({"slow": "all_large"}, [0, 1, 2], False),
        ({"quick": "mine=heterofl"}, [0, 1, 2], False),
        ({"quick": "all_large"}, [0, 1, 3], False),
    ],
)
def test_prepare_refuses_what_the_reference_does_not_have(
    suite: Path, tiny_suite: dict[str, Any], cases: dict[str, str], seeds: list[int], fine: bool
) -> None:

    def prepared(cases: dict[str, str], seeds: list[int], update: bool = False) -> Night:
        asked = {case: {"algorithms": algorithms, "to": 0.2} for case, algorithms in cases.items()}
        suite.write_text(yaml.safe_dump({**tiny_suite, "cases": asked, "seeds": seeds}))
        return nightly.prepare(str(suite), "n", {"tracking.mlflow": None}, update)

    figures_of(prepared({"quick": "all_large,mine=flexfl"}, [0, 1, 2], update=True)).write(suite.with_suffix(".json"))
    with contextlib.nullcontext() if fine else pytest.raises(ConfigError):
        prepared(cases, seeds)


def test_regress_fails_the_gate_if_a_run_diverged(
    suite: Path, tmp_path: Path, mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:

    def diverged(jobs: Sequence[Command], _: int) -> dict[str, int]:
        for job in jobs:
            job.log.write_text("diverged")
        return {job.name: 7 for job in jobs}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "side_by_side", diverged)
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
