"""A search: what it draws, how it sets it, what it prunes, and how it goes on after a kill."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlflow
import optuna
import pytest
import yaml

from components.tune import Tuned, _conclude, tune
from fl_engine import tune as search
from fl_engine.config import Config, Range, load_config
from fl_engine.errors import ConfigError, Stopped
from fl_engine.types import FULL, Pool, PoolModel

FEW = ("tune.trials=4", "tune.held_out=[7]", "rounds.stop=2", "algorithm.epsilon=8")


def member(name: str, share: float, gamma: float | None) -> PoolModel:
    return PoolModel(name, FULL, 1, share, 1, True, True, gamma=gamma)


POOL: Pool = (member("M1", 0.3, 1.0), member("M2", 0.5, 1.21), member("M3", 1.0, None))


def space(**more: Any) -> dict[str, Range]:
    return {"training.lr": Range(low=0.01, high=1.0, log=True), **more}


# ------------------------------------------------------------------------------------------------- the space
def test_flexfl_is_searched_in_gamma_lambda_and_big_gamma_without_being_told() -> None:
    found = search.space_of(Config(), POOL)
    assert list(found) == [
        "algorithm.gammas.0", "algorithm.gammas.1", "algorithm.kd_weight", "algorithm.adaptive_size"
    ]  # fmt: skip
    first, second = found["algorithm.gammas.0"], found["algorithm.gammas.1"]
    # Up to a fifth away: 1 / 1.2 and 1.21 * 1.2; and the middle of 1 and 1.21, as factors go, is 1.1.
    assert (first.low, first.high) == (pytest.approx(1 / 1.2), pytest.approx(1.1))
    assert (second.low, second.high) == (pytest.approx(1.1), pytest.approx(1.452))
    expected = {"algorithm.gammas.0": 1.0, "algorithm.gammas.1": 1.21}
    expected |= {"algorithm.kd_weight": 10.0, "algorithm.adaptive_size": 10.0}
    assert search.defaults(Config(), found, POOL) == expected


def test_other_algorithms_have_to_be_told() -> None:
    config = load_config(None, ("algorithm.name=heterofl",))
    with pytest.raises(ConfigError, match=r"tune\.space is empty: say what of heterofl"):
        search.space_of(config, POOL)


def test_any_dotted_name_can_be_searched_and_defaults_outside_the_space_are_drawn() -> None:
    given = '{"training.lr": {low: 0.1, high: 1.0}, "algorithm.kd_weight": {choices: [0.0, 10.0]}}'
    config = load_config(None, (f"tune.space={given}",))
    found = search.space_of(config, POOL)
    assert search.defaults(config, found, POOL) == {"algorithm.kd_weight": 10.0}  # lr = 0.05 is none of them


def test_values_go_to_their_places_and_lists_are_whole() -> None:
    found = search.applied(Config(), {"algorithm.gammas.1": 1.5, "algorithm.gammas.0": 0.9, "training.lr": 0.1})
    assert (found.algorithm["gammas"], found.training.lr) == ([0.9, 1.5], 0.1)
    with pytest.raises(ConfigError, match=r"of algorithm\.gammas \[1\] are searched"):
        search.applied(Config(), {"algorithm.gammas.1": 1.5})


def test_a_level_has_to_fit_its_tier() -> None:
    assert search.excess(POOL, Config()) == {  # tiers of 35, 60 and 110 %
        "size/weak": pytest.approx(-5), "size/medium": pytest.approx(-10), "size/strong": pytest.approx(-10)
    }  # fmt: skip
    two = (member("S", 0.4, None), member("L", 1.0, None))
    assert search.excess(two, Config()) == {"size/weak": pytest.approx(5)}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{training.lr: {low: 1.0, high: 0.1}}", "low below high"),
        ("{training.lr: {low: 0.0, high: 0.1, log: true}}", "above 0 for log"),
        ("{training.lr: {low: 0.0, choices: [1]}}", "choices stand alone"),
        ("{training.lr: {lo: 0.0}}", "unknown"),
    ],
)
def test_a_range_that_is_none_is_said(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(None, (f"tune.space={given}",))


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (("tune.space={seed: {low: 0, high: 9, whole: true}}",), "seed cannot be searched"),
        (("tune.space={run.precision: {choices: [fp32, bf16]}}",), "run.precision cannot be searched"),
        (("tune.held_out=[0]",), "these seeds are to be new"),
    ],
)
def test_a_search_that_would_not_mean_anything_is_refused(
    quick: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sets: Sequence[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        tune(load_config(None, (*quick, *sets)), "a")


# ------------------------------------------------------------------------------------------------- pruning
def test_a_trial_behind_the_others_is_pruned_at_that_round(tmp_path: Path) -> None:
    study = search.open_study(load_config(None, ("rounds.stop=8",)), tmp_path, "a")
    for value in (0.8, 0.82, 0.84, 0.86, 0.88):
        trial = study.ask()
        search.Reporter(trial, "avg").metrics([(i, {"avg": value}) for i in range(1, 9)])
        study.tell(trial, value)
    slow = search.Reporter(study.ask(), "avg")
    slow.metrics([(1, {"avg": 0.1}), (2, {"full": 0.1})])  # a quarter of the rounds is for warming up
    with pytest.raises(search.Pruned, match="after round 4"):
        slow.metrics([(3, {}), (4, {"avg": 0.2})])


def test_trials_of_a_worker_that_is_gone_are_tried_again(tmp_path: Path) -> None:
    study = search.open_study(Config(), tmp_path, "a")
    mine, gone, elsewhere = (study.ask() for _ in range(3))
    for trial, worker in ((mine, search.me()), (gone, f"{os.uname().nodename}:1:0"), (elsewhere, "other:1:0")):
        trial.set_user_attr(search.WORKER, worker)
        trial.suggest_float("training.lr", 0.1, 1.0)
    assert search.clear_stale(study) == [gone.number]
    again = study.ask()
    assert again.suggest_float("training.lr", 0.1, 1.0) == gone.params["training.lr"]


# ------------------------------------------------------------------------------------------------- a study
@pytest.fixture(scope="module")
def done(quick: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> tuple[Tuned, Path, Config]:
    folder = tmp_path_factory.mktemp("tune")
    store = f"run.store={folder}"
    tracking = f"tracking.mlflow=sqlite:///{folder / 'mlflow.db'}"
    config = load_config(None, (*quick, *FEW, store, tracking))
    return tune(config, "a"), folder / "a", config


def test_the_default_is_the_first_trial_and_the_best_is_no_worse(done: tuple[Tuned, Path, Config]) -> None:
    found, folder, config = done
    assert sum(found.trials.values()) == 4
    assert found.default["algorithm.kd_weight"] == 10.0
    assert found.default_value is not None and found.best_value >= found.default_value
    study = search.open_study(config, folder, "a")
    assert study.trials[0].params == pytest.approx(found.default)
    assert study.trials[found.best_trial].value == found.best_value
    assert all(v <= 0 for v in study.trials[found.best_trial].constraints.values())


def test_what_it_leaves_can_be_run_and_looked_at(done: tuple[Tuned, Path, Config]) -> None:
    found, folder, config = done
    best = load_config(folder / "params.yaml")
    patch = yaml.safe_load((folder / "patch.yaml").read_text())
    assert patch["algorithm"] == {k: best.algorithm[k] for k in ("gammas", "kd_weight", "adaptive_size")}
    assert best.algorithm["kd_weight"] == found.best["algorithm.kd_weight"]
    assert best.model_copy(update={"algorithm": config.algorithm}) == config
    drawn = (folder / "study.svg").read_text()
    assert "importance" in drawn and ">kd_weight<" in drawn and "mathdefault" not in drawn
    assert found == Tuned.read(folder / "tune.json")
    assert [len(found.held_out[k]) for k in ("seeds", "default", "best")] == [1, 1, 1]
    assert found.gain == pytest.approx(found.held_out["best"][0] - found.held_out["default"][0])


def test_in_mlflow_the_trials_are_children_of_the_study(done: tuple[Tuned, Path, Config]) -> None:
    found, _, config = done
    client = mlflow.MlflowClient(config.tracking.mlflow)
    (experiment,) = [e for e in client.search_experiments() if e.name != "Default"]
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [r for r in runs if "mlflow.parentRunId" not in r.data.tags]
    assert parent.data.metrics["best/avg"] == found.best_value and parent.info.status == "FINISHED"
    children = [r for r in runs if r is not parent]
    assert {r.data.tags["mlflow.parentRunId"] for r in children} == {parent.info.run_id}
    trials = {r.data.tags["flexfleet.trial"] for r in children if "flexfleet.trial" in r.data.tags}
    assert len(trials) == found.trials["complete"] + found.trials["pruned"]


def test_a_finished_study_has_nothing_left_to_do(done: tuple[Tuned, Path, Config]) -> None:
    found, folder, config = done
    with pytest.raises(ConfigError, match="exists already: go on with --resume"):
        tune(config, "a")
    assert tune(config, "a", resume=True) == found
    assert len(search.open_study(config, folder, "a").trials) == 4


def test_a_killed_study_goes_on_and_workers_share_it(
    nursery: Any, quick: tuple[str, ...], tmp_path: Path
) -> None:
    """The kill hits a trial in its rounds; two workers do the rest."""
    sets = [word for s in (*quick, *FEW) for word in ("--set", s)]
    child = nursery.start("flexfleet", "tune", "--id", "a", *sets, "--set", "training.epochs=3000", cwd=tmp_path)
    end = time.monotonic() + 60
    while not (tmp_path / "runs/a/trials/0-s0/run.json").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    child.send(signal.SIGKILL)
    child.wait()
    again = nursery.start("flexfleet", "tune", "--id", "a", "--resume", "--jobs", "2", "--json", *sets, cwd=tmp_path)
    end_of = again.wait()
    assert end_of.code == 0, end_of.err
    found = json.loads(end_of.out)
    assert sum(found["trials"].values()) in (4, 5)  # two workers may both find the last one missing
    study = optuna.load_study(
        study_name="a",
        storage=optuna.storages.JournalStorage(
            optuna.storages.journal.JournalFileBackend(str(tmp_path / "runs/a/study.log"))
        ),
    )
    states = [t.state.name for t in study.trials]
    assert states[0] == "FAIL" and "RUNNING" not in states
    assert any(t.params == study.trials[0].params for t in study.trials[1:])


def test_no_trial_that_can_be_held_is_said(done: tuple[Tuned, Path, Config], monkeypatch: pytest.MonkeyPatch) -> None:
    found, folder, config = done
    monkeypatch.setattr("components.tune._done", lambda study: [])
    with pytest.raises(Exception, match="none of 0 trials has a pool that its devices can hold"):
        _conclude(config, folder, "a", {}, found.default)


def test_stopped_is_what_pruned_is() -> None:
    """The rounds then commit and tell the tracker as they do when they are stopped."""
    assert issubclass(search.Pruned, Stopped)
