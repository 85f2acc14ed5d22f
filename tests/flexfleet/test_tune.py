"""A study: what it prunes, what it leaves, and how it goes on after a kill."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import mlflow
import optuna
import pytest

from fl_engine.core.errors import BadInput, ConfigError, NothingMerged
from flexfleet.config import Config, load_config
from flexfleet.experiments import tune as steps
from flexfleet.experiments import tune_storage, tune_worker
from flexfleet.experiments.tune import tune
from flexfleet.experiments.tune_report import Tuned, conclude
from flexfleet.files.artifacts import History, RunFile
from flexfleet.pipeline import run as run_module
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.status import runs_in
from tests.harness.processes import until

FEW = ("tune.trials=4", "tune.held_out=[7]", "rounds.stop=2", "algorithm.epsilon=8")


# ------------------------------------------------------------------------------------------------- pruning
def test_trial_behind_the_others_is_pruned(tmp_path: Path) -> None:
    study = tune_storage.open_study(load_config(None, ("rounds.stop=8",)), tmp_path, "a")
    for value in (0.8, 0.82, 0.84, 0.86, 0.88):
        trial = study.ask()
        tune_worker.Reporter(trial, "avg").metrics([(i, {"avg": value}) for i in range(1, 9)])
        study.tell(trial, value)
    slow = tune_worker.Reporter(study.ask(), "avg")
    none, one = ({"clients_trained": count, "clients_failed": 0.0} for count in (0.0, 1.0))
    slow.metrics([(1, {"avg": 0.1, **one}), (2, {"full": 0.1, **none})])  # a quarter of the rounds is for warming up
    with pytest.raises(tune_worker.Pruned, match="after round 4"):
        slow.metrics([(3, none), (4, {"avg": 0.2, **none})])
    with pytest.raises(NothingMerged):  # the trial is not only behind the others
        tune_worker.Reporter(study.ask(), "avg").metrics([(4, {"avg": 0.2, **none})])


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
    study = tune_storage.open_study(config, folder, "a")
    assert study.trials[0].params == pytest.approx(found.default)
    assert study.trials[found.best_trial].value == found.best_value
    assert all(v <= 0 for v in study.trials[found.best_trial].constraints.values())


def test_files_of_a_finished_study(done: tuple[Tuned, Path, Config]) -> None:
    found, folder, config = done
    best = load_config(folder / "params.yaml")
    assert not found.better, "one held-out seed shows no gain"
    assert best == config
    drawn = (folder / "study.html").read_text()
    assert "importance" in drawn and ">λ (kd_weight)<" in drawn and "mathdefault" not in drawn
    assert drawn.count("<svg") == 2 + len(found.space), "a drawing each, so that they can stand below each other"
    assert found == Tuned.read(folder / "tune.json")
    assert [len(found.held_out[k]) for k in ("seeds", "default", "best")] == [1, 1, 1]
    assert '"seeds": [\n   7\n  ]' in (folder / "tune.json").read_text(), "as whole numbers"
    ran = {each["run_id"].removeprefix("a/"): each for each in runs_in(folder)}
    ended = [each for place, each in ran.items() if each["status"] == "finished" and place.startswith("trials/")]
    assert len(ended) == found.trials["complete"] and all(each["round"] == 2 for each in ended)
    assert found.best_value == ran[f"trials/{found.best_trial}-s0"]["avg"], "though its ledger is deleted"
    held_out = [each for place, each in ran.items() if place.startswith("held-out/")]
    assert [(each["status"], each["round"]) for each in held_out] == [("finished", 2)] * 2
    assert found.gain == pytest.approx(found.held_out["best"][0] - found.held_out["default"][0])


def test_mlflow_trials_are_children_of_the_study(done: tuple[Tuned, Path, Config]) -> None:
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


def test_resumed_finished_study_changes_nothing(done: tuple[Tuned, Path, Config]) -> None:
    found, folder, config = done
    with pytest.raises(ConfigError, match="--resume"):
        tune(config, "a")
    assert tune(config, "a", resume=True) == found
    assert len(tune_storage.open_study(config, folder, "a").trials) == 4


def test_new_best_trial_has_its_own_held_out_runs(done: tuple[Tuned, Path, Config], tmp_path: Path) -> None:
    _, before, config = done
    folder = shutil.copytree(before, tmp_path / "a")
    untracked = config.tracking.model_copy(update={"mlflow": None})
    config = config.model_copy(update={"tracking": untracked})
    study = tune_storage.open_study(config, folder, "a")
    first, better = study.trials[0], {**study.trials[0].params, "algorithm.kd_weight": 0.5}
    study.add_trial(optuna.trial.create_trial(params=better, distributions=first.distributions, value=1.0))
    found = conclude(config, study, folder, folder)
    assert found.best == better
    ran = [RunFile.read(path) for path in folder.glob("held-out/best-*/run.json")]
    assert 0.5 in [run.config["algorithm"]["kd_weight"] for run in ran]
    history = History.read(folder / "held-out" / f"best-t{found.best_trial}-s7" / "history.json")
    assert found.held_out["best"] == [history.rounds[-1].metrics["avg"]]


@pytest.mark.parametrize(("value", "better"), [(0.5, True), (0.7, False), (None, True)])
def test_params_yaml_has_the_best_values_only_if_better(
    done: tuple[Tuned, Path, Config], tmp_path: Path, value: float | None, better: bool
) -> None:
    sets = ("tune.space={training.lr: {low: 0.1, high: 1.0}}", "tune.held_out=[]", "tracking.mlflow=null")
    config = load_config(None, sets)
    study = tune_storage.open_study(config, tmp_path, "a")
    state = optuna.trial.TrialState.PRUNED if value is None else optuna.trial.TrialState.COMPLETE
    study.add_trial(optuna.trial.create_trial(state=state, value=value, user_attrs={tune_worker.DEFAULT: []}))
    space = {"training.lr": optuna.distributions.FloatDistribution(0.1, 1.0)}
    study.add_trial(optuna.trial.create_trial(params={"training.lr": 0.3}, distributions=space, value=0.6))
    found = conclude(config, study, tmp_path, done[1])
    assert (found.default, found.default_value) == ({"training.lr": config.training.lr}, value)
    assert (found.better, found.gain) == (better, None)
    left = load_config(None, (*sets, *(["training.lr=0.3"] if better else [])))
    assert load_config(tmp_path / "params.yaml") == left


def test_trial_0_is_the_run_of_the_configuration(
    done: tuple[Tuned, Path, Config], quick: tuple[str, ...], tmp_path: Path
) -> None:
    _, folder, _ = done
    own = load_config(None, (*quick, *FEW, "seed=0", f"run.store={tmp_path}", "tracking.mlflow=null"))
    run = run_module.run(Resolved.of(own), "plain")
    assert History.read(folder / "trials" / "0-s0" / "history.json").model_sha256 == run.model_sha256


def test_study_in_another_storage_is_not_resumed(done: tuple[Tuned, Path, Config], tmp_path: Path) -> None:
    _, folder, config = done
    other = config.tune.model_copy(update={"storage": f"sqlite:///{tmp_path / 'other.db'}"})
    with pytest.raises(ConfigError, match=r"other\.db"):
        config = config.model_copy(update={"tune": other})
        steps._begin(config, folder, tune_storage.open_study(config, folder, "a"), folder, {})


def test_killed_study_is_resumed_by_two_workers(fork_server: Any, quick: tuple[str, ...], tmp_path: Path) -> None:
    slow = "training.epochs=30"  # else the rounds could be over before the kill
    sets = [word for s in (*quick, *FEW, slow) for word in ("--set", s)]
    child = fork_server.start("flexfleet", "tune", "--id", "a", *sets, cwd=tmp_path)
    until((tmp_path / "runs/a/trials/0-s0/run.json").exists, "the first trial")
    child.send(signal.SIGKILL)
    child.wait()
    again = fork_server.start(
        "flexfleet", "tune", "--id", "a", "--resume", "--jobs", "2", "--json", *sets, cwd=tmp_path
    )
    found = json.loads(again.wait().ok().out)
    assert sum(found["trials"].values()) == 4, "of both workers together"
    study = tune_storage.open_study(load_config(None, (*quick, *FEW, slow)), tmp_path / "runs/a", "a")
    states = [t.state.name for t in study.trials]
    assert states[0] == "FAIL" and "RUNNING" not in states
    (again,) = (t for t in study.trials[1:] if t.params == study.trials[0].params)
    assert tune_worker.runs_of(again) == 0 and not (tmp_path / f"runs/a/trials/{again.number}-s0").exists()
    assert {row["status"] for row in runs_in(tmp_path / "runs/a")} == {"finished"}, "also the killed trial's run"


def test_study_without_a_feasible_trial_fails(done: tuple[Tuned, Path, Config], tmp_path: Path) -> None:
    _, folder, config = done
    study = tune_storage.open_study(config, tmp_path, "a")
    over = optuna.trial.create_trial(value=0.9, user_attrs={tune_worker.DEFAULT: []})
    over.set_constraint("size/weak", 1.0)
    study.add_trial(over)
    why = {tune_worker.INFEASIBLE: "sizes that cross"}
    study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.PRUNED, user_attrs=why))
    with pytest.raises(BadInput):
        conclude(config, study, tmp_path, folder)
