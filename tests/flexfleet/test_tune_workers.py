"""The workers of a study: how they share its trials, which ones they try again, and how they stop."""

from __future__ import annotations

import errno
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError, Diverged, EnvironmentFailure, IntegrityError, Refused, Unreachable
from flexfleet.config import Config, load_config
from flexfleet.experiments import tune as steps
from flexfleet.experiments import tune_report, tune_space, tune_storage, tune_trials, tune_worker
from flexfleet.experiments.tune_worker import work


@pytest.fixture(scope="module")
def prepared(quick: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Config]:
    """A folder with partition and pool for the workers of a study of four trials, and its configuration."""
    folder = tmp_path_factory.mktemp("tune")
    config = load_config(None, (*quick, "tune.trials=4", "algorithm.epsilon=8", "tracking.mlflow=null"))
    tune_worker.prepare_default(config, folder)
    return folder, config


def default(prepared: tuple[Path, Config]) -> dict[str, Any]:
    """What the first trial draws."""
    folder, config = prepared
    return tune_space.defaults(config, *tune_worker.searched(config, folder))


@pytest.fixture
def untrained(prepared: tuple[Path, Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A study in a database whose trials come to a value at once."""

    def trial(config: Config, study: Any, trial: Any, ready: Any) -> float:
        return float(trial.params["algorithm.kd_weight"]) / 100

    monkeypatch.setattr(tune_worker, "_pools", lambda *_: [])
    monkeypatch.setattr(tune_worker, "_trial", trial)
    monkeypatch.setattr(tune_worker, "POLL_S", 0.02)
    shared = prepared[1].tune.model_copy(update={"storage": f"sqlite:///{tmp_path / 'study.db'}"})
    config = prepared[1].model_copy(update={"tune": shared})
    steps._begin(config, tmp_path, tune_storage.open_study(config, tmp_path, "a"), prepared[0], {})
    return config


def drawn(config: Config, folder: Path) -> list[dict[str, Any]]:
    return [t.params for t in tune_storage.open_study(config, folder, "a").trials if t.state.name == "COMPLETE"]


def test_trials_are_those_of_all_workers_together(
    untrained: Config, prepared: tuple[Path, Config], tmp_path: Path
) -> None:
    two = untrained.model_copy(update={"tune": untrained.tune.model_copy(update={"trials": 2})})
    assert work(two, tmp_path, "a", 0, prepared[0]) == [0, 1]
    assert work(untrained, tmp_path, "a", 1, prepared[0]) == [2, 3]
    assert work(untrained, tmp_path, "a", 2, prepared[0]) == []


def test_surplus_trial_of_a_second_worker_is_dropped(tmp_path: Path) -> None:
    study = tune_storage.open_study(Config(), tmp_path, "a")
    first, second, third = (study.ask() for _ in range(3))
    assert [tune_trials.surplus(study, t, 2) for t in (first, second, third)] == [False, False, True]
    tune_trials.drop(study, third)
    tune_trials.give_back(study, study.trials[0], died=False, goes_on=True)
    assert not tune_trials.surplus(study, study.ask(), 2), "one that ended early leaves its place to another"


def test_give_back_all_enqueues_the_values_with_their_runs(tmp_path: Path) -> None:
    study = tune_storage.open_study(Config(), tmp_path, "a")
    gone = study.ask()
    gone.suggest_float("training.lr", 0.1, 1.0)
    assert tune_trials.give_back_all(study) == [gone.number]
    again = study.ask()
    assert again.suggest_float("training.lr", 0.1, 1.0) == gone.params["training.lr"]
    assert tune_trials.runs_of(again) == gone.number


def test_worker_takes_over_trials_of_a_silent_worker(
    untrained: Config, prepared: tuple[Path, Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_trials, "SILENT_S", 0.2)
    lost = tune_storage.open_study(untrained, tmp_path, "a").ask()
    weight = lost.suggest_float("algorithm.kd_weight", 0.1, 100.0, log=True)
    mine = work(untrained, tmp_path, "a", 0, prepared[0])
    assert len(mine) == 4 and lost.number not in mine
    again = [t for t in tune_storage.open_study(untrained, tmp_path, "a").trials if tune_trials.TRIED in t.user_attrs]
    assert [t.params["algorithm.kd_weight"] for t in again] == [weight] and again[0].number in mine
    assert tune_trials.runs_of(again[0]) == again[0].number, "the silent one may still write into its own"


def test_silence_is_measured_by_the_own_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study, seen, clock = tune_storage.open_study(Config(), tmp_path, "a"), dict[int, Any](), [0.0]
    monkeypatch.setattr(tune_trials.time, "monotonic", lambda: clock[0])
    alive, silent = study.ask(), study.ask()
    for trial in (alive, silent):
        trial.suggest_float("training.lr", 0.1, 1.0)
    gone = []
    for i in range(4):
        alive.set_user_attr(tune_trials.BEAT, i)
        gone.append(tune_trials.give_back_stale(study, seen))
        clock[0] += tune_trials.SILENT_S / 2
    assert gone == [[], [], [silent.number], []]


def test_values_that_kill_workers_are_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    study = tune_storage.open_study(Config(), tmp_path, "a")
    study.enqueue_trial({"training.lr": 0.5})
    for _ in range(tune_trials.MOST_TRIED):
        trial = study.ask()  # ended before it took its values
        assert tune_trials.give_back(study, study.trials[trial.number], died=True, goes_on=True)
        assert not tune_trials.give_back(study, study.trials[trial.number], died=True, goes_on=True)
    states = [t.state.name for t in study.trials]
    assert states == ["FAIL"] * tune_trials.MOST_TRIED
    assert "4 workers have died on these values, which are not tried again: {'training.lr': 0.5}" in caplog.text
    assert [t.system_attrs["fixed_params"] for t in study.trials] == [{"training.lr": 0.5}] * tune_trials.MOST_TRIED


def test_worker_whose_trial_was_taken_continues_with_the_next(
    untrained: Config, prepared: tuple[Path, Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def silent(config: Config, study: Any, trial: Any, ready: Any) -> float:
        if trial.number in (0, 1):
            tune_trials.give_back(study, study.trials[trial.number], died=True, goes_on=False)
        if trial.number == 0:
            tune_trials.Reporter(trial, "avg").metrics([(1, {"avg": 0.5})])
        return 0.5

    monkeypatch.setattr(tune_worker, "_trial", silent)
    mine = work(untrained, tmp_path, "a", 0, prepared[0])
    assert len(mine) == 4 and not {0, 1} & set(mine)
    assert len(drawn(untrained, tmp_path)) == 4


def test_a_trial_that_ends_its_worker_is_tried_again(
    untrained: Config, prepared: tuple[Path, Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> float:
        raise OSError("no space left")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(tune_worker, "_trial", broken)
        work(untrained, tmp_path, "a", 0, prepared[0])
    assert work(untrained, tmp_path, "a", 0, prepared[0]) == [1, 2, 3, 4]
    assert drawn(untrained, tmp_path)[0] == pytest.approx(default(prepared))


@pytest.mark.parametrize(
    ("error", "counts", "goes_on"),
    [
        (OSError(errno.ENOMEM, "no memory"), True, False),
        (EnvironmentFailure("this machine would compute other bits"), True, False),
        (IntegrityError("a commit is damaged"), True, False),
        (Refused("the MLflow run is deleted"), False, False),
        (Unreachable("S3 is gone"), False, True),
        (KeyboardInterrupt(), False, True),
    ],
)
def test_failed_trial_counts_by_the_kind_of_its_error(
    untrained: Config, prepared: tuple[Path, Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    error: BaseException, counts: bool, goes_on: bool,
) -> None:  # fmt: skip

    def broken(*_: Any) -> float:
        raise error

    monkeypatch.setattr(tune_worker, "_trial", broken)
    with pytest.raises(type(error)):
        work(untrained, tmp_path, "a", 0, prepared[0])
    again = tune_storage.open_study(untrained, tmp_path, "a").trials[1]
    assert (again.user_attrs[tune_trials.TRIED], tune_trials.runs_of(again)) == (counts, 0 if goes_on else 1)


def test_trial_that_diverges_on_the_server_is_an_outcome(
    untrained: Config, prepared: tuple[Path, Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_diverges(config: Config, study: Any, trial: Any, ready: Any) -> float:
        if trial.number == 0:
            raise Diverged("training on the server diverged")
        return 0.5

    monkeypatch.setattr(tune_worker, "_trial", first_diverges)
    assert work(untrained, tmp_path, "a", 0, prepared[0]) == [0, 1, 2, 3]
    first, *others = (tune_report.tried(t) for t in tune_storage.open_study(untrained, tmp_path, "a").trials)
    assert (first.outcome, first.value, first.why) == ("diverged", None, "training on the server diverged")
    assert {each.outcome for each in others} == {"complete"}


def test_a_waiting_trial_is_given_to_one_worker_alone(tmp_path: Path) -> None:
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


def test_pods_share_a_study_by_a_data_base_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEXFLEET_TUNE_STORAGE", raising=False)
    with pytest.raises(ConfigError, match=r"tune\.workers"):
        steps.prepare(load_config(None, ("tune.workers=2",)), "a", tmp_path, "job")
    assert not list(tmp_path.iterdir())
