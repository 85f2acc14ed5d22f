"""The tuning graph, each task a process of its own, on the digits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexfleet.config import Config, form
from flexfleet.experiments import tune_storage, tune_worker
from flexfleet.experiments.tune_report import Tuned
from pipelines.tune import tuning
from tests.harness import graphs

pytestmark = [
    pytest.mark.filterwarnings("ignore:You may be attemping to run a task that uses custom:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*settings .'display_name'. have no effect:UserWarning"),
]

QUICK: dict[str, Any] = {"store_uri": "runs", "rounds": 1, "clients": 6, "client_fraction": 0.5, "local_epochs": 1}
FEW = {
    "pretrain.epochs": 3, "partition.minimum": 10, "algorithm.epsilon": 8, "tune.held_out": [7],
    "tune.space": {"algorithm.kd_weight": {"low": 1, "high": 100, "log": True}},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEXFLEET_TUNE_STORAGE", raising=False)


def tasks_of(scratch: Path, study: str) -> tuple[Path, list[Path]]:
    """Folders of the last task of a study, and of its workers."""
    found = [p.parent.parent.parent for p in scratch.glob("tasks/tune-*/report/study/tune.json")]
    (folder,) = [f for f in found if Tuned.read(f / "report" / "study" / "tune.json").id == study]
    return folder / "report", sorted(folder.rglob("search"))


def figures(task: Path) -> dict[str, float]:
    told = json.loads((task / "executor_output.json").read_text())["artifacts"]["metrics"]["artifacts"][0]
    return dict(told["metadata"])


def test_a_study_as_a_pipeline(scratch: Path, monkeypatch: pytest.MonkeyPatch, telling: Any) -> None:
    """Two workers share a database, whose secret address is in no artifact; the default's trial is tried again."""
    base = scratch / "pl4nted-secret.db"
    monkeypatch.setenv("FLEXFLEET_TUNE_STORAGE", f"sqlite:///{base}")
    begun = tune_storage.open_study(Config(), scratch, "a")
    begun.enqueue_trial({"algorithm.kd_weight": 10.0}, user_attrs={tune_worker.DEFAULT: ["algorithm.kd_weight"]})
    begun.ask()
    tune_worker.retry_all(begun)
    with graphs.commands() as commands:
        tuning(**QUICK, study_id="a", trials=3, advanced=FEW | {"tune.workers": 2})
    (last,) = filter(None, (graphs.given_to("report", each) for each in commands))
    given = json.loads(last)
    given["inputs"]["parameterValues"]["workers"] *= form.MOST_RUNS // 2
    assert graphs.gathered(json.dumps(given), "searched", form.MOST_RUNS) < graphs.LONGEST_WORD
    report, workers = tasks_of(scratch, "a")
    found = Tuned.read(report / "study" / "tune.json")
    assert (sum(found.trials.values()), list(found.space)) == (3, ["algorithm.kd_weight"])
    assert found.default == {"algorithm.kd_weight": 10.0} and found.default_value is not None
    assert (
        "held-out seeds 7:" in (report / "best_settings").read_text()
        and "λ (kd\\_weight)" in (report / "best_settings").read_text()
    )
    assert "<svg" in (report / "page").read_text() and "<h1>" in (report / "page").read_text()
    assert figures(report) == {"best/avg": found.best_value, "held_out/gain": found.gain}
    ended = [json.loads((worker / "searched" / "trials.json").read_text()) for worker in workers]
    assert len(ended) == 2 and sorted(n for each in ended for n in each) == [1, 2, 3], "trial 0 is the lost one"
    assert [figures(worker)["trials"] for worker in workers] == [len(each) for each in ended]
    assert len([*report.parent.rglob("shared.json")]) == 1, "partition and pre-training are computed once"
    assert not (scratch / "runs" / "a" / "study.log").exists()
    states = [t.state.name for t in begun.trials]
    assert states[:4] == ["FAIL", "COMPLETE", "COMPLETE", "COMPLETE"]
    assert set(states[4:]) <= {"FAIL"}, "one that both workers found missing was left by one of them"
    assert telling(scratch / "tasks", scratch / "runs") == []


def test_one_worker_needs_no_data_base(scratch: Path) -> None:
    tuning(**QUICK, study_id="alone", trials=1, advanced=FEW)
    report, workers = tasks_of(scratch, "alone")
    assert len(workers) == 1 and figures(workers[0]) == {"trials": 1}
    assert (workers[0] / "searched" / "study.log").exists(), "the last task may be where the worker's folder is not"
    assert sum(Tuned.read(report / "study" / "tune.json").trials.values()) == 1


def test_a_password_in_the_address_of_a_study_is_refused(
    scratch: Path, capsys: pytest.CaptureFixture[str], telling: Any
) -> None:
    with pytest.raises(RuntimeError):
        tuning(store_uri="runs", advanced={"tune.storage": "postgresql://me:pl4nted-secret@host/studies"})
    assert "tune.storage" in " ".join(capsys.readouterr().out.split())
    assert telling(scratch) == []
