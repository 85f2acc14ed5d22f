"""A study whose ledgers are kept in `run.remote` and whose folder is lost: it begins again, and no run of it meets the
ledger of another run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fl_engine.backends import InProcess
from fl_engine.core.errors import Unreachable
from fl_engine.training.numerics import describe
from flexfleet.config import Config, load_config
from flexfleet.config.form import write_config
from flexfleet.experiments import tune as steps
from flexfleet.experiments import tune_storage, tune_worker
from flexfleet.kubeflow import task_end
from flexfleet.pipeline import federate as federation
from flexfleet.pipeline import retry
from flexfleet.pipeline.federate import federate

SPACE = "tune.space={training.lr: {low: 0.01, high: 0.1}}"


@pytest.fixture
def config(quick: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.delenv("FLEXFLEET_TUNE_STORAGE", raising=False)
    monkeypatch.setattr(task_end, "WAITS_S", (0.0,))
    places = (f"run.store={tmp_path}/pod", f"run.remote={tmp_path}/remote")
    sets = ("algorithm.name=all_large", "fleet.tiers=1:1:8", "rounds.stop=1", "tune.trials=3", "tune.held_out=[7]")
    return load_config(None, (*quick, *places, *sets, SPACE))


@pytest.fixture
def pod(config: Config, tmp_path: Path) -> Callable[[], Any]:
    """The only worker of the study s, in a new pod: an earlier pod's folder is lost. Gives the study."""
    steps.prepare(config, "s", tmp_path / "prepared", "job")
    outs = (tmp_path / f"out{i}" for i in range(9))

    def work() -> Any:
        shutil.rmtree(tmp_path / "pod", ignore_errors=True)
        out = next(outs)
        task_end.patiently(lambda: steps.work_in_graph(tmp_path / "prepared", "s", 0, out, "job"))
        return tune_storage.open_study(config, out, "s", begun=True)

    return work


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each round that is trained."""
    rounds, real = list[int](), InProcess.run

    def run(self: Any, algorithm: Any, plan: Any, *more: Any) -> Any:
        rounds.append(plan.round)
        return real(self, algorithm, plan, *more)

    monkeypatch.setattr(InProcess, "run", run)
    return rounds


def values(study: Any) -> dict[int, tuple[float, float]]:
    return {t.number: (t.params["training.lr"], t.value) for t in study.trials if t.state.name == "COMPLETE"}


def ledgers(tmp_path: Path, kind: str = "trials") -> list[str]:
    return sorted(path.parent.parent.name for path in tmp_path.glob(f"remote/s/{kind}/*/site/run.json"))


def test_restarted_study_trains_values_that_changed(
    config: Config, pod: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: list[int]
) -> None:
    outages = iter([False, True])

    def flaky(*given: Any, **named: Any) -> Path:
        if next(outages, False):
            raise Unreachable("MLflow does not answer")
        return federate(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(tune_worker, "federate", flaky)
        first = values(pod())
    assert (sorted(first), len(trained)) == ([0, 2, 3], 3)
    four = config.model_copy(update={"tune": config.tune.model_copy(update={"trials": 4})})
    write_config(four, tmp_path / "prepared" / "config.yaml")
    second = values(pod())
    assert (sorted(second), len(trained)) == ([0, 1, 2, 3], 5), "two trials' rounds are taken from the bucket"
    assert (second[0], second[1]) == (first[0], first[2]), "the default, and what was given back"
    assert second[3][0] != first[3][0]
    assert [name.rpartition("-")[0] for name in ledgers(tmp_path)] == ["0-s0", "1-s0", "2-s0", "3-s0", "3-s0"]


def test_restarted_study_reuses_rounds_of_equal_values(pod: Callable[[], Any], trained: list[int]) -> None:
    first = values(pod())
    assert len(trained) == 3
    assert values(pod()) == first and len(trained) == 3


def test_restarted_study_trains_again_with_other_numerics(
    pod: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, trained: list[int]
) -> None:
    pod()
    for module in (federation, retry):
        here: Any = module
        monkeypatch.setattr(here, "describe", lambda *given: {**describe(*given), "torch": "another"})
    pod()
    assert len(trained) == 6
