"""`evaluate.on: clients` from the command line: the same figures in each backend, and where people find them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlflow
import pytest

from flexfleet.files.artifacts import EvaluationFile, History
from flexfleet.pipeline.partition import cut
from flexfleet.pipeline.prepare import Resolved

pytestmark = pytest.mark.usefixtures("own_folder")

ON = ("evaluate.on=clients", "evaluate.held_out=0.3", "rounds.stop=2", "run.devices=[cpu, cpu]")


def measured(run: Path) -> list[dict[str, float]]:
    rows = History.read(run / "history.json").rounds
    return [{k: v for k, v in row["metrics"].items() if k.startswith(("on_clients/", "bytes_"))} for row in rows]


def test_a_run_tells_what_its_clients_measured(
    flexfleet: Any, quick: Sequence[str], tmp_path: Path, mlflow_uri: str, no_drawings: None
) -> None:
    tracked = (*quick, *ON, f"tracking.mlflow={mlflow_uri}")
    one = flexfleet("run", "--json", "--run-id", "one", sets=tracked)
    assert one.code == 0, one.err
    two = flexfleet("run", "--json", "--run-id", "two", sets=[*quick, *ON, "run.backend=processes"])
    assert two.code == 0, two.err
    runs = tmp_path / "runs"
    assert measured(runs / "one") == measured(runs / "two") and one.json["metrics"] == two.json["metrics"]
    assert one.json["model_sha256"] == two.json["model_sha256"]

    told = one.json["metrics"]["on_clients"]
    last = measured(runs / "one")[-1]
    assert (told["asked"], told["failed"], told["all"]["clients"]) == (6, 0, 6)
    assert told["all"]["worst"] == min(each["worst"] for each in told["tiers"].values()) == last["on_clients/worst"]
    assert sum(each["clients"] for each in told["levels"].values()) == 6
    assert told == EvaluationFile.read(runs / "one" / "evaluation.json").model_dump()["on_clients"]
    assert "local" in one.json["metrics"] and told["levels"].keys() <= one.json["metrics"]["levels"].keys()

    logged = mlflow.MlflowClient(mlflow_uri).get_run(one.json["mlflow_run_id"]).data.metrics
    assert logged["final/on_clients/p10"] == told["all"]["p10"] == logged["on_clients/p10"]
    tier = next(iter(told["tiers"]))
    assert logged[f"on_clients/spread/tier/{tier}"] == told["tiers"][tier]["spread"]


def test_held_out_samples_change_the_model_and_stay_on_resume(flexfleet: Any, quick: Sequence[str]) -> None:
    assert flexfleet("run", "--run-id", "a", sets=[*quick, *ON]).code == 0
    refused = flexfleet("run", "--run-id", "a", "--resume", sets=[*quick, *ON, "evaluate.held_out=0.2"])
    assert refused.code == 2 and "evaluate.held_out" in refused.err
    refused = flexfleet("check", sets=[*quick, "evaluate.on=client"])
    assert refused.code == 2 and "evaluate.on" in refused.err and "clients" in refused.err


def test_a_check_counts_the_samples_that_clients_train_on(flexfleet: Any, quick: Sequence[str]) -> None:
    sets = [*quick, "algorithm.name=fedsgd", "partition.rule=iid", "partition.clients=6"]
    largest = max(map(len, cut(Resolved.load(None, sets)).clients))
    sets += [f"algorithm.most_samples={largest - 1}"]
    assert flexfleet("check", sets=sets).code == 2
    done = flexfleet("check", sets=[*sets, "evaluate.on=clients"])
    assert done.code == 0, done.err
