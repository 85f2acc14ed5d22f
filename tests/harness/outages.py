"""Who asks databases that may be away, and what a study does then, and when its database is back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import Unreachable
from flexfleet.config import Config
from flexfleet.experiments import tune_storage, tune_trials, tune_worker
from flexfleet.tracking import databases
from flexfleet.tracking.trackers import MLflow


def opened(url: str, begun: bool = False) -> Any:
    """The study `a` at this address."""
    return tune_storage.open_study(Config(tune={"storage": url}), Path("folder"), "a", begun=begun)


FIRST: dict[str, Callable[[str], Any]] = {"MLflow": lambda url: MLflow(url, "e", "name", {}), "a study": opened}
"""Who asks a database first, each in its own way."""


@pytest.fixture
def asked_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No address was asked before, and relative ones are of the test's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("FLEXFLEET_TUNE_STORAGE", raising=False)
    databases.check_connection.cache_clear()


def interrupted_and_resumed(
    url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, leave: Callable[[], Any], come_back: Callable[[], Any]
) -> None:
    """The database goes away within a study's trial, and is back when the study is resumed: its values are retried."""
    config = Config(tune={"storage": url, "trials": 1})
    monkeypatch.setattr(tune_worker, "searched", lambda *_: ({}, None))
    monkeypatch.setattr(tune_worker, "_pools", lambda *_: [])
    monkeypatch.setattr(tune_trials, "SILENT_S", 0.1)
    tune_storage.open_study(config, folder, "outage").enqueue_trial({"training.lr": 0.5})

    def cut_off(config: Config, study: Any, trial: Any, ready: Any) -> float:
        leave()
        tune_trials.Reporter(trial, "avg").metrics([(1, {"avg": 0.5})])
        pytest.fail("the database took it")

    with monkeypatch.context() as patch:
        patch.setattr(tune_worker, "_trial", cut_off)
        with pytest.raises(Unreachable, match="the study's database") as error:
            tune_worker.work(config, folder, "outage")
    assert "pl4nted" not in str(error.value)
    come_back()
    monkeypatch.setattr(tune_worker, "_trial", lambda *_: 0.5)
    assert tune_worker.work(config, folder, "outage") == [1]
    (first, again) = tune_storage.open_study(config, folder, "outage").trials
    assert (first.state.name, again.state.name) == ("FAIL", "COMPLETE")
    assert again.system_attrs["fixed_params"] == {"training.lr": 0.5}
    assert again.user_attrs[tune_trials.TRIED] == 1
