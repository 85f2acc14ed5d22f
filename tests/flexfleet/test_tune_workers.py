"""The workers of a study: how they share its trials, which ones they try again, and what a lost folder changes."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import optuna
import pytest
import torch

from fl_engine.algorithms import FedAvg
from fl_engine.core.errors import Refused, Unreachable
from flexfleet.config import Config, load_config
from flexfleet.config.form import write_config
from flexfleet.experiments import tune as steps
from flexfleet.experiments import tune_storage, tune_worker
from flexfleet.experiments.tune_worker import work
from flexfleet.kubeflow import task_end
from tests.harness.settings import refused_at

SPACE = "tune.space={training.lr: {low: 0.01, high: 0.1}}"
trained: list[int] = []
"""Grows with each round that is trained."""
failures: list[BaseException | None] = []
"""For each of the next runs, the error with which it begins."""


@dataclass(frozen=True)
class Watched(FedAvg):
    def init(self, *given: Any) -> Any:
        if failures and (error := failures.pop(0)) is not None:
            raise error
        return super().init(*given)

    def merge(self, state: Any, plan: Any, *more: Any) -> Any:
        trained.append(plan.round)
        return super().merge(state, plan, *more)


@pytest.fixture(scope="module")
def prepared(quick: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Config]:
    """A folder with partition and pool for the workers of a study of four trials, and its configuration."""
    folder = tmp_path_factory.mktemp("tune")
    sets = (f"algorithm.name={__name__}:Watched", "fleet.tiers=1:1:8", "rounds.stop=1", "tune.trials=4", SPACE)
    config = load_config(None, (*quick, *sets))
    tune_worker.prepare_default(config, folder)
    return folder, config


@pytest.fixture
def begun(prepared: tuple[Path, Config], tmp_path: Path) -> Config:
    """A study in a database."""
    shared = prepared[1].tune.model_copy(update={"storage": f"sqlite:///{tmp_path / 'study.db'}"})
    config = prepared[1].model_copy(update={"tune": shared})
    steps._begin(config, tmp_path, tune_storage.open_study(config, tmp_path, "a"), prepared[0], {})
    return config


def test_workers_share_the_trials(begun: Config, prepared: tuple[Path, Config], tmp_path: Path) -> None:
    two = begun.model_copy(update={"tune": begun.tune.model_copy(update={"trials": 2})})
    assert work(two, tmp_path, "a", 0, prepared[0]) == [0, 1]
    assert work(begun, tmp_path, "a", 1, prepared[0]) == [2, 3]
    assert work(begun, tmp_path, "a", 2, prepared[0]) == []


def test_surplus_trial_of_a_second_worker_is_dropped(tmp_path: Path) -> None:
    study = tune_storage.open_study(Config(), tmp_path, "a")
    first, second, third = (study.ask() for _ in range(3))
    assert [tune_worker.surplus(study, t, 2) for t in (first, second, third)] == [False, False, True]
    study.tell(third, state=optuna.trial.TrialState.FAIL)
    tune_worker.retry(study, study.trials[0], died=False, resume=True)
    assert not tune_worker.surplus(study, study.ask(), 2), "one that ended early leaves its place to another"


def test_restarted_worker_retries_only_its_own_trial(
    begun: Config, prepared: tuple[Path, Config], tmp_path: Path
) -> None:
    study = tune_storage.open_study(begun, tmp_path, "a")
    for worker in (0, 1):
        trial = study.ask()
        trial.suggest_float("training.lr", 0.01, 0.1)
        trial.set_user_attr(tune_worker.WORKER, worker)
    assert work(begun, tmp_path, "a", 0, prepared[0]) == [2, 3, 4]
    trials = tune_storage.open_study(begun, tmp_path, "a").trials
    assert [trial.state.name for trial in trials[:3]] == ["FAIL", "RUNNING", "COMPLETE"]
    assert trials[2].params.items() >= trials[0].params.items() and tune_worker.runs_of(trials[2]) == 0


def test_values_that_kill_workers_are_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    study = tune_storage.open_study(Config(), tmp_path, "a")
    study.enqueue_trial({"training.lr": 0.5})
    for _ in range(tune_worker.MOST_DEATHS):
        trial = study.ask()  # ended before it took its values
        assert tune_worker.retry(study, study.trials[trial.number], died=True, resume=True)
        assert not tune_worker.retry(study, study.trials[trial.number], died=True, resume=True)
    states = [t.state.name for t in study.trials]
    assert states == ["FAIL"] * tune_worker.MOST_DEATHS
    assert "4 workers have died with these values, so the values are not retried: {'training.lr': 0.5}" in caplog.text
    assert [t.system_attrs["fixed_params"] for t in study.trials] == [{"training.lr": 0.5}] * tune_worker.MOST_DEATHS


@pytest.mark.parametrize(
    ("error", "counts", "goes_on"),
    [
        (OSError(errno.ENOMEM, "no memory"), True, False),
        (Refused("the MLflow run is deleted"), True, False),
        (Unreachable("S3 is gone"), False, True),
        (KeyboardInterrupt(), False, True),
    ],
)
def test_failed_trial_counts_by_the_kind_of_its_error(
    begun: Config, prepared: tuple[Path, Config], tmp_path: Path, error: BaseException, counts: bool, goes_on: bool
) -> None:
    failures[:] = [error]
    with pytest.raises(type(error)):
        work(begun, tmp_path, "a", 0, prepared[0])
    again = tune_storage.open_study(begun, tmp_path, "a").trials[1]
    assert (again.user_attrs[tune_worker.DEATHS], tune_worker.runs_of(again)) == (counts, 0 if goes_on else 1)


def test_waiting_trial_is_given_to_one_worker(tmp_path: Path) -> None:
    """SQLite locks no row: of four workers that asked at once, two got the same trial."""
    config = Config(tune={"storage": f"sqlite:///{tmp_path / 'study.db'}"})
    study, many = tune_storage.open_study(config, tmp_path, "a"), 40
    for i in range(many):
        study.enqueue_trial({"x": i})
    workers, given = [tune_storage.open_study(config, tmp_path, "a", begun=True) for _ in range(4)], list[int]()

    def ask(worker: Any) -> None:
        given.extend(worker.ask().number for _ in range(many // 4))

    threads = [Thread(target=ask, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(given) == list(range(many))


def test_several_pods_require_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEXFLEET_TUNE_STORAGE", raising=False)
    with refused_at("tune.workers"):
        steps.prepare(load_config(None, ("tune.workers=2",)), "a", tmp_path, "job")
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------- a lost folder
@pytest.fixture
def config(prepared: tuple[Path, Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A study of three trials whose ledgers are stored in `run.remote`."""
    trained.clear()
    monkeypatch.delenv("FLEXFLEET_TUNE_STORAGE", raising=False)
    run = {"store": str(tmp_path / "pod"), "remote": str(tmp_path / "remote")}
    changed = {"run": run, "tune": {"trials": 3, "held_out": (7,)}}
    sections = {name: getattr(prepared[1], name).model_copy(update=own) for name, own in changed.items()}
    return prepared[1].model_copy(update=sections)


@pytest.fixture
def pod(config: Config, tmp_path: Path) -> Callable[[], Any]:
    """The only worker of the study s, in a new pod: an earlier pod's folder is lost. Gives the study."""
    steps.prepare(config, "s", tmp_path / "prepared", "job")
    outs = (tmp_path / f"out{i}" for i in range(9))

    def work() -> Any:
        shutil.rmtree(tmp_path / "pod", ignore_errors=True)
        out = next(outs)
        task_end.patiently(lambda: steps.work_in_graph(tmp_path / "prepared", "s", 0, out, "job"), waits_s=(0.0,))
        return tune_storage.open_study(config, out, "s", begun=True)

    return work


def values(study: Any) -> dict[int, tuple[float, float]]:
    return {t.number: (t.params["training.lr"], t.value) for t in study.trials if t.state.name == "COMPLETE"}


def ledgers(tmp_path: Path, kind: str = "trials") -> list[str]:
    return sorted(path.parent.parent.name for path in tmp_path.glob(f"remote/s/{kind}/*/site/run.json"))


def test_restarted_study_trains_values_that_changed(config: Config, pod: Callable[[], Any], tmp_path: Path) -> None:
    failures[:] = [None, Unreachable("MLflow does not answer")]
    first = values(pod())
    assert (sorted(first), len(trained)) == ([0, 2, 3], 3)
    four = config.model_copy(update={"tune": config.tune.model_copy(update={"trials": 4})})
    write_config(four, tmp_path / "prepared" / "config.yaml")
    second = values(pod())
    assert (sorted(second), len(trained)) == ([0, 1, 2, 3], 5), "two trials' rounds are taken from the bucket"
    assert (second[0], second[1]) == (first[0], first[2]), "the default, and what was given back"
    assert second[3][0] != first[3][0]
    assert [name.rpartition("-")[0] for name in ledgers(tmp_path)] == ["0-s0", "1-s0", "2-s0", "3-s0", "3-s0"]


def test_restarted_study_reuses_rounds_of_equal_values(pod: Callable[[], Any]) -> None:
    first = values(pod())
    assert len(trained) == 3
    assert values(pod()) == first and len(trained) == 3


def test_restarted_study_trains_again_with_other_numerics(
    pod: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pod()
    monkeypatch.setattr(torch, "__version__", "another")
    pod()
    assert len(trained) == 6
