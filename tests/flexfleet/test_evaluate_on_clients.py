"""`evaluate.on: clients` from the command line: the same figures in each backend, and where people find them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from torch import nn

import flexfleet as ff
from fl_engine.core.errors import ConfigError, ModelError
from flexfleet.files.artifacts import EvaluationFile
from flexfleet.pipeline.partition import cut
from flexfleet.pipeline.prepare import Resolved
from tests.harness.alike import run_of
from tests.harness.run_folders import rounds_of

pytestmark = pytest.mark.usefixtures("own_folder")

ON = ("evaluate.on=clients", "evaluate.held_out=0.3", "rounds.stop=2", "run.devices=[cpu, cpu]")


def measured(run: Path) -> list[dict[str, float]]:
    rows = rounds_of(run)
    return [{k: v for k, v in row["metrics"].items() if k.startswith(("on_clients/", "bytes_"))} for row in rows]


def test_a_run_tells_what_its_clients_measured(
    flexfleet: Any, quick: Sequence[str], tmp_path: Path, mlflow_uri: str, no_drawings: None
) -> None:
    one = run_of(flexfleet, "one", [*quick, *ON, f"tracking.mlflow={mlflow_uri}"])
    two = run_of(flexfleet, "two", [*quick, *ON, "run.backend=processes"])
    runs = tmp_path / "runs"
    assert measured(runs / "one") == measured(runs / "two")
    assert (one["metrics"], one["model_sha256"]) == (two["metrics"], two["model_sha256"])

    told = one["metrics"]["on_clients"]
    last = measured(runs / "one")[-1]
    assert (told["asked"], told["failed"], told["all"]["clients"]) == (6, 0, 6)
    assert told["all"]["worst"] == min(each["worst"] for each in told["tiers"].values()) == last["on_clients/worst"]
    assert sum(each["clients"] for each in told["levels"].values()) == 6
    assert told == EvaluationFile.read(runs / "one" / "evaluation.json").model_dump()["on_clients"]
    assert "local" in one["metrics"] and told["levels"].keys() <= one["metrics"]["levels"].keys()

    logged = mlflow.MlflowClient(mlflow_uri).get_run(one["mlflow_run_id"]).data.metrics
    assert logged["final/on_clients/p10"] == told["all"]["p10"] == logged["on_clients/p10"]
    tier = next(iter(told["tiers"]))
    assert logged[f"on_clients/spread/tier/{tier}"] == told["tiers"][tier]["spread"]


def test_held_out_samples_change_the_model_and_stay_on_resume(flexfleet: Any, quick: Sequence[str]) -> None:
    run_of(flexfleet, "a", [*quick, *ON])
    refused = flexfleet("run", "--run-id", "a", "--resume", sets=[*quick, *ON, "evaluate.held_out=0.2"])
    assert refused.code == 2 and "evaluate.held_out" in refused.err
    refused = flexfleet("check", sets=[*quick, "evaluate.on=client"])
    assert refused.code == 2 and "evaluate.on" in refused.err and "clients" in refused.err


def test_a_check_counts_the_samples_that_clients_train_on(flexfleet: Any, quick: Sequence[str]) -> None:
    sets = [*quick, "algorithm.name=fedsgd", "partition.rule=iid", "partition.clients=6"]
    largest = max(map(len, cut(Resolved.load(None, sets)).clients))
    sets += [f"algorithm.most_samples={largest - 1}"]
    assert flexfleet("check", sets=sets).code == 2
    flexfleet("check", sets=[*sets, "evaluate.on=clients"]).ok()


def test_personal_model_is_the_one_that_the_client_evaluated(own_folder: Path) -> None:
    options = {"evaluate.on": "clients", "evaluate.held_out": 0.3, "partition.clients": 4, "tracking.mlflow": None}
    result = ff.run(algorithm="fedper", rounds=2, client_fraction=1.0, options=options, progress=False)
    rows = [row for row in result.clients.to_dict("records") if row["round"] == 2]
    assert [row["client"] for row in rows] == [0, 1, 2, 3] and all(0 <= row["accuracy"] <= 1 for row in rows)
    assert fmean(row["accuracy"] for row in rows) == pytest.approx(result.metrics["on_clients"]["all"]["mean"])

    heads = [result.personal(client).state_dict() for client in range(4)]
    own = [name for name in heads[0] if not torch.equal(heads[0][name], heads[1][name])]
    assert {name.split(".")[-1] for name in own} == {"weight", "bias"} and len(own) == 2
    kept = result.metrics["kept_by_clients"]
    assert len(kept) == 2 and ", ".join(kept) in (result.folder / "report.html").read_text()
    x, y = result.client_data(2)
    assert len(x) == len(y) == len(result.partition[2]) and result.personal(2)(x).shape == (len(y), 10)
    for wrong in (4, -1, True, "0"):
        with pytest.raises(ConfigError) as error:
            result.client_data(wrong)  # type: ignore[arg-type]
        assert error.value.path == "client"


class Net(nn.Sequential):
    def __init__(self, output_last: bool = True) -> None:
        layers = {"inside": nn.Linear(64, 8), "output": nn.Linear(8, 10)}
        super().__init__(nn.Flatten())
        for name in layers if output_last else reversed(layers):
            self.add_module(name, layers[name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule("output")(self.get_submodule("inside")(x.flatten(1)).relu())


def test_output_layer_of_own_network_is_personal(own_folder: Path) -> None:
    options = {"evaluate.on": "clients", "partition.clients": 3, "tracking.mlflow": None}
    common: dict[str, Any] = {"algorithm": "fedper", "rounds": 1, "client_fraction": 1.0, "progress": False}
    result = ff.run(model=Net(), options=options, **common)
    heads = [result.personal(client).state_dict() for client in range(2)]
    own = [name for name in heads[0] if not torch.equal(heads[0][name], heads[1][name])]
    assert [name.split(".")[-2:] for name in own] == [["output", "weight"], ["output", "bias"]]
    with pytest.raises(ModelError, match="inside"):
        ff.run(model=Net(output_last=False), options=options, **common)


@pytest.mark.parametrize("backend", ["in_process", "processes"])
def test_clients_evaluate_on_their_own_test_samples(own_folder: Path, backend: str) -> None:
    rng = np.random.default_rng(0)

    def drawn(samples: int) -> tuple[Any, Any]:
        y = rng.integers(0, 3, samples)
        return (rng.normal(size=(samples, 1, 8, 8)) + y[:, None, None, None]).astype(np.float32), y

    tests = [drawn(size) for size in (30, 1, 20)]
    data = ff.from_clients([(*drawn(40), *tests[0]), (*drawn(25), *tests[1]), (*drawn(30), *tests[2])])
    options = {"evaluate.on": "clients", "partition.proxy": 0.0, "model.norm": "static", "run.backend": backend}
    options["tracking.mlflow"] = None
    common: dict[str, Any] = {"algorithm": "fedper", "rounds": 2, "client_fraction": 1.0, "progress": False}
    result = ff.run(data, options=options, run_id="own", **common)
    assert [len(result.partition[client]) for client in range(3)] == [40, 25, 30], "no training sample is held out"
    rows = [row for row in result.clients.to_dict("records") if row["round"] == 2]
    assert [row["client"] for row in rows] == [0, 1, 2]
    for row, (x, y) in zip(rows, tests, strict=True):
        found = result.personal(row["client"])(torch.from_numpy(x)).argmax(1).numpy() == y
        assert row["accuracy"] == pytest.approx(found.mean())
    assert ff.run(data, options=options, run_id="own", resume=True, **common).model_sha256 == result.model_sha256


def test_comparison_has_the_metrics_of_the_clients(own_folder: Path) -> None:
    options = {"evaluate.on": "clients", "partition.clients": 4, "tracking.mlflow": None}
    found = ff.compare(["fedavg", "fedper"], seeds=[0], rounds=2, options=options, id="own", progress=False)
    run = found.runs["fedper", 0]
    summary = json.loads((found.folder / "comparison.json").read_text())["results"]["fedper"]
    assert summary["clients_mean"]["mean"] == run.metrics["on_clients"]["all"]["mean"]
    assert summary["clients_p10"]["mean"] <= summary["clients_mean"]["mean"]
    assert (found.folder / "clients.svg").read_text().strip() in (found.folder / "comparison.html").read_text()
