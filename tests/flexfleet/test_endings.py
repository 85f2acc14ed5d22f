"""How a run ends that merged no update: its status, its exit code, MLflow, and what is not published."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import flexfleet as ff
from fl_engine.core.errors import Diverged, NothingMerged
from flexfleet.config import load_config
from flexfleet.files.run_status import Tally, tally_of
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.retry import federate_in
from tests.harness.from_python import SMALL

WILD = ("algorithm.name=all_large", "training.lr=1e6")
ENDINGS = {
    "rate": (WILD, "diverged"),
    "nan": (("algorithm.name=all_large", "rounds.faults=nan=1"), "diverged"),
    "drop": (("algorithm.name=all_large", "rounds.faults=drop=1"), "nothing_merged"),
}


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, own_folder: None) -> Path:
    return tmp_path / "runs"


@pytest.mark.parametrize("name", ENDINGS)
def test_run_without_merged_update_says_so(
    name: str, flexfleet: Any, quick: Sequence[str], runs: Path, mlflow_template: Path
) -> None:
    shutil.copy(mlflow_template, "mlflow.db")
    sets, status = ENDINGS[name]
    sets = (*quick, *sets, "rounds.stop=2", "tracking.mlflow=sqlite:///mlflow.db", "publish.models=true")
    done = flexfleet("run", "--json", "--run-id", name, sets=sets)
    assert (done.code, done.json["status"]) == (7, status)
    run = runs / name
    assert json.loads((run / "result.json").read_text()) == done.json
    updates = done.json["metrics"]["updates"]
    assert updates["merged"] == 0 and updates["failed"] == sum(updates["reasons"].values()) > 0
    assert not (run / "export").exists()
    assert flexfleet("status", str(run), "--json").json["status"] == status
    again = flexfleet("run", "--run-id", name, "--resume", sets=sets)
    assert again.code == 7 and f"({status})" in again.out.splitlines()[0]

    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{runs.parent}/mlflow.db")
    found = client.get_run(done.json["mlflow_run_id"])
    assert (found.info.status, found.data.tags["flexfleet.status"]) == ("FAILED", status)
    assert "final/avg" not in found.data.metrics, "no search by figures finds an untrained model"
    assert not client.search_registered_models()


def test_result_of_a_diverged_run_says_so(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []

    class Watch(ff.Callback):
        def on_end(self, status: str) -> None:
            ended.append(status)

    wild: dict[str, Any] = {**SMALL, "learning_rate": 1e6, "callbacks": [Watch()]}
    result = ff.run(algorithm="all_large", run_id="wild", **wild)
    assert result.status == "diverged" and ended == ["diverged"] and "(most: diverged)" in repr(result)
    assert ff.load("wild").status == "diverged"
    assert any("no update was merged" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("name", ["rate", "drop"])
def test_rounds_of_a_pipeline_fail_without_update(
    name: str, quick: Sequence[str], flexfleet: Any, runs: Path, tmp_path: Path
) -> None:
    sets, status = ENDINGS[name]
    given = [*quick, *sets, "rounds.stop=1"]
    flexfleet("run", "--run-id", "first", sets=given)
    first = runs / "first"
    resolved, out = Resolved.of(load_config(None, given)), tmp_path / "out"
    with pytest.raises(Diverged if status == "diverged" else NothingMerged):
        federate_in(tmp_path / "again", resolved, first / "partition", first / "pool", out)
    assert not out.exists()


def round_with(merged: int, failed: int, **counts: int) -> dict[str, float]:
    return {"clients_trained": merged, "clients_failed": failed, **counts}


@pytest.mark.parametrize(
    ("rounds", "status", "said"),
    [
        (
            [round_with(1, 5, clients_dropped=2, clients_late=3), round_with(4, 2, clients_dropped=2)],
            "finished",
            "7 of 12 updates failed (most: did not answer)",
        ),
        ([round_with(0, 3, **{"rejected/norm": 3})], "diverged", "3 of 3 updates failed (most: moved too far)"),
        (
            [round_with(0, 4, clients_without_memory=3, **{"rejected/finite": 1})],
            "nothing_merged",
            "4 of 4 updates failed (most: not enough memory)",
        ),
        ([round_with(0, 0)], "nothing_merged", "0 of 0 updates failed"),
        ([round_with(6, 0), round_with(6, 0, diverged=1)], "diverged", "0 of 12 updates failed"),
    ],
)
def test_tally_gives_status_and_main_reason(rounds: list[dict[str, float]], status: str, said: str) -> None:
    tally: Tally = tally_of(rounds)
    assert (tally.status, str(tally)) == (status, said)
    if status == "finished":
        tally.check()
        return
    with pytest.raises(Diverged if status == "diverged" else NothingMerged):
        tally.check()
