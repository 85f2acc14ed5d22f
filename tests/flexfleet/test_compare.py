"""The figures of `flexfleet compare` are those of the run folders, and its runs those of `flexfleet run`."""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlflow
import pytest

from fl_engine.core.errors import ConfigError, Stopped
from fl_engine.rounds import timing
from flexfleet.config import comparison_runs, load_config
from flexfleet.experiments import compare as compare_module
from flexfleet.experiments import comparison_report, executor
from flexfleet.experiments.comparison_file import ComparisonFile
from flexfleet.files.artifacts import Apoz, RunResult
from flexfleet.tracking.record import experiment
from flexfleet.tracking.server import PARENT
from tests.harness.comparisons import LABELS, SEEDS, TWO, Compared
from tests.harness.processes import refused

pytestmark = pytest.mark.usefixtures("quick_comparisons")


@pytest.fixture
def sets(quick: Sequence[str]) -> list[str]:
    return [given for given in quick if not given.startswith("algorithm.name=")]


def rounds_of(folder: Path, label: str, seed: int) -> list[dict[str, float]]:
    history = json.loads((folder / f"{label}-s{seed}" / "history.json").read_text())
    return [row["metrics"] for row in history["rounds"]]


def sha_of(run: Path) -> str:
    return RunResult.read(run / "result.json").model_sha256


# --------------------------------------------------------------------------------------- what is asked for
def test_labels_seeds_and_accuracies() -> None:
    assert comparison_runs.labels_of("flexfl, no_kd=flexfl,mine=pack.age:NAME") == {
        "flexfl": "flexfl", "no_kd": "flexfl", "mine": "pack.age:NAME"
    }  # fmt: skip
    assert comparison_runs.seeds_of("3, 1,2") == (3, 1, 2)
    assert comparison_runs.accuracies_of("0.5,0.4, 0.4,1") == (0.4, 0.5, 1.0)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--algorithms", "flexfl,flexfl"], "'flexfl'"),
        (["--algorithms", "../a=flexfl"], "'../a'"),
        (["--algorithms", "flexfl,al_large"], "did you mean 'all_large'"),
        (["--seeds", "0,one"], "seeds"),
        (["--to", "40"], "accuracies"),
        (["--resume"], "--id"),
        (["--set", "flexfl:algorithm.kd_wight=0"], "kd_wight"),
        (["--set", "flexfl:algorithm.adaptive_size=30"], "flexfl, seed 0: "),
        (["--set", "run.store=s3://bucket/runs"], "s3://bucket/runs"),
    ],
)
def test_bad_input_is_refused_before_training(
    flexfleet: Any, sets: list[str], argv: list[str], said: str, tmp_path: Path
) -> None:
    given = [word for pair in sets for word in ("--set", pair)]
    assert said in refused(flexfleet("compare", *TWO, *given, *argv, "--json"))
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------- a comparison of four
@pytest.mark.parametrize("label", LABELS)
def test_figures_are_those_of_the_histories(compared: Compared, label: str) -> None:
    each = [rounds_of(compared.folder, label, seed) for seed in SEEDS]
    found = compared.json["results"][label]

    def means(values: list[float]) -> Any:
        return pytest.approx({"mean": sum(values) / 2, "std": statistics.stdev(values)}, nan_ok=False)

    def check(score: dict[str, Any], chosen: list[int]) -> None:
        assert score["full"] == means([run[i]["full"] for run, i in zip(each, chosen, strict=True)])
        avg = [run[i]["avg"] for run, i in zip(each, chosen, strict=True)]
        assert score["avg"] == means(avg)
        assert score["round"] == means([i + 1 for i in chosen])

    check(found["last"], [2, 2])
    check(found["best"], [max(range(3), key=lambda i: run[i]["avg"]) for run in each])
    for percent, until in ((50, 2), (80, 3), (100, 3)):
        (one,) = [one for one in found["highest"] if one["share"] == percent]
        assert one["full"] == means([max(row["full"] for row in run[:until]) for run in each])
        assert one["avg"] == means([max(r["avg"] for r in run[:until]) for run in each])
    down, up = ([sum(row[key] for row in run) for run in each] for key in ("bytes_down", "bytes_up"))
    assert found["mb_down"] == means([value / 1e6 for value in down])
    assert found["mb_up"] == means([value / 1e6 for value in up])
    assert found["waste"] == means([1 - b / a for a, b in zip(down, up, strict=True)])
    results = [RunResult.read(compared.folder / f"{label}-s{seed}" / "result.json") for seed in SEEDS]
    assert found["seconds"] == means([result.seconds for result in results])
    if all("seconds_simulated" in row for run in each for row in run):
        assert found["seconds_simulated"] == means([sum(row["seconds_simulated"] for row in run) for run in each])
    for name in timing.UNIFORMITY:
        known = [[row[name] for row in run if name in row] for run in each]
        assert found[name] == (means([sum(v) / len(v) for v in known]) if all(known) else None)
    for name in timing.NAMES:
        measured = [[row[name] for row in run if name in row] for run in each]
        assert all(measured), f"every run measures {name}"
        assert found["phases"][name] == means([sum(v) / len(v) for v in measured])
    assert found["phases"]["bits_up"] == means([8 * sum(row["bytes_up"] for row in run) / len(run) for run in each])
    assert [one["model_sha256"] for one in found["runs"]] == [result.model_sha256 for result in results]
    best = max(row["full"] for a in LABELS for seed in SEEDS for row in rounds_of(compared.folder, a, seed))
    assert [one["accuracy"] for one in found["reached"]] == [k / 20 for k in range(1, 20) if k / 20 < best][-4:]
    for one in found["reached"]:
        until = [next((i + 1 for i, row in enumerate(run) if row["full"] >= one["accuracy"]), 0) for run in each]
        assert one["seeds"] == [seed for seed, n in zip(SEEDS, until, strict=True) if n]


def test_models_are_those_of_plain_runs(compared: Compared, flexfleet: Any, sets: list[str]) -> None:
    for label in LABELS:
        for seed in SEEDS:
            given = [*sets, f"algorithm.name={label}", f"seed={seed}", "run.store=plain"]
            done = flexfleet("run", "--json", "--run-id", f"{label}-{seed}", sets=given)
            assert done.json["model_sha256"] == sha_of(compared.folder / f"{label}-s{seed}"), f"{label}, seed {seed}"


def test_partition_and_pretraining_are_computed_once(compared: Compared) -> None:
    for seed in SEEDS:
        shared = compared.folder / f"shared-s{seed}"
        for label in LABELS:
            run = compared.folder / f"{label}-s{seed}"
            for name in ("partition.json", "partition.safetensors"):
                assert (run / "partition" / name).read_bytes() == (shared / "partition" / name).read_bytes()
        # Its seconds too: measured once, and copied.
        scores = Apoz.read(shared / "pretrain" / "apoz.json")
        assert scores == Apoz.read(compared.folder / f"flexfl-s{seed}" / "pretrain" / "apoz.json")
        assert scores.layers
        assert not (compared.folder / f"all_large-s{seed}" / "pretrain" / "apoz.json").exists()
    assert sha_of(compared.folder / "flexfl-s0") != sha_of(compared.folder / "flexfl-s1")


def test_local_accuracies_are_those_of_the_runs(compared: Compared) -> None:
    found = ComparisonFile.read(compared.folder / "comparison.json")
    for label, summary in found.results.items():
        for one in summary.runs:
            metrics = RunResult.read(compared.folder / f"{label}-s{one.seed}" / "result.json").metrics
            assert {name: each.model_dump() for name, each in one.local.items()} == metrics["local"]
            assert one.local_full == [each["mean"] for each in metrics["local"].values()][-1]
        for name, level in summary.local.items():
            assert level.mean.mean == pytest.approx(statistics.fmean(one.local[name].mean for one in summary.runs))


def test_page_loads_nothing_from_elsewhere(compared: Compared) -> None:
    page, drawing = (compared.folder / "comparison.html").read_text(), (compared.folder / "comparison.svg").read_text()
    assert "<script" not in page and "@import" not in page
    assert set(re.findall(r"\w+://[^\"'\s<)]+", page)) == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert drawing.strip() in page
    assert drawing.startswith("<svg ") and all(label in drawing for label in (*LABELS, "avg", "full", "range of seeds"))
    assert sha_of(compared.folder / "flexfl-s0") in page and "partition.clients" in page


# ---------------------------------------------------------------------------------------------------- variants
def test_labels_can_vary_any_parameter(flexfleet: Any, sets: list[str]) -> None:
    argv = ("--algorithms", "even=flexfl,skewed=flexfl,rough=flexfl", "--seeds", "0,1", "--id", "a", "--json")
    own = ["skewed:partition.alpha=0.1", "rough:partition.alpha=0.1", "rough:run.precision=bf16"]
    done = flexfleet("compare", *argv, sets=[*sets, "rounds.stop=2", *own]).ok()
    found, folder = ComparisonFile.model_validate(done.json), Path("runs/a")
    assert found.varied == ("partition.alpha", "run.precision")
    assert "partition.alpha" not in found.settings and found.settings["partition.clients"] > 0
    alphas = {"even": 0.6, "skewed": 0.1, "rough": 0.1}
    assert {label: r.varied["partition.alpha"] for label, r in found.results.items()} == alphas
    # What depends on alpha is computed once for each alpha and seed, and taken over by all runs that have it.
    for seed in (0, 1):
        first, second = sorted(path for path in folder.glob(f"shared-s{seed}*") if path.is_dir())
        for label, shared in (("even", first), ("skewed", second), ("rough", second)):
            run = folder / f"{label}-s{seed}"
            for name in ("partition/partition.json", "partition/partition.safetensors", "pretrain/apoz.json"):
                assert (run / name).read_bytes() == (shared / name).read_bytes(), (label, name)
        assert (first / "partition/partition.json").read_bytes() != (second / "partition/partition.json").read_bytes()
    assert len({r.runs[1].model_sha256 for r in found.results.values()}) == 3
    # The terminal, the table and the page name what differs.
    for said in (comparison_report.text(found), (folder / "comparison.md").read_text().replace("\\_", "_")):
        assert "even: flexfl, partition.alpha = 0.6, run.precision = fp32" in said
        assert "The variants differ in partition.alpha, run.precision" in said


def test_runs_of_other_networks_are_tracked_in_one_experiment() -> None:
    labels = {name: {"model.name": name, "dataset.pad": 32} for name in ("small_cnn", "vgg16")}
    runs = comparison_runs.entries_from(labels, [0], partial(load_config, None), "a")
    assert comparison_runs.varied(runs) == ("model.name",)
    found = [experiment(entry.config) for entry in compare_module.in_one_experiment(runs)]
    assert found == ["digits-small_cnn-dirichlet"] * 2


def test_compare_refuses_labels_with_different_metrics() -> None:
    kinds = "fl_engine.testing.kinds"
    names = {"table": ("TABLE", f"{kinds}:TinyMLP"), "tokens": ("SEQUENCES", "casas_bilstm")}
    labels = {
        label: {"dataset.name": f"{kinds}:{data}", "model.name": network, "tracking.mlflow": None}
        for label, (data, network) in names.items()
    }
    with pytest.raises(ConfigError) as error:
        compare_module.check_all(comparison_runs.entries_from(labels, [0], partial(load_config, None), "a"))
    assert error.value.code == "config.not_comparable"


# ------------------------------------------------------------------------------------------------------ MLflow
def rows_of(client: mlflow.MlflowClient, run_id: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        table = json.loads(Path(client.download_artifacts(run_id, "variants.json", scratch)).read_text())
    return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


def test_mlflow_groups_the_runs_and_has_the_comparison_itself(compared_template: Compared) -> None:
    client = mlflow.MlflowClient(compared_template.uri)
    experiment = client.get_experiment_by_name("digits-small_cnn-dirichlet")
    assert experiment is not None
    assert [e.name for e in client.search_experiments() if e.name != "Default"] == [experiment.name]
    of_id = client.search_runs([experiment.experiment_id], "tags.`flexfleet.comparison` = 'both'")
    assert {run.info.status for run in of_id} == {"FINISHED"}
    runs = [run for run in of_id if "flexfleet.kind" not in run.data.tags]
    assert {(run.data.tags["algorithm"], run.data.tags["seed"]) for run in runs} == {
        (label, str(seed)) for label in LABELS for seed in SEEDS
    }
    assert {run.info.run_name for run in runs} == {f"both/{label}-s{seed}" for label in LABELS for seed in SEEDS}
    (summary,) = [run for run in of_id if run not in runs]
    assert (summary.info.run_name, summary.data.tags["flexfleet.kind"]) == ("both", "comparison")
    assert summary.info.run_id == compared_template.json["mlflow_run_id"]
    result = compared_template.json["results"]["all_large"]
    row = rows_of(client, summary.info.run_id)[LABELS.index("all_large")]
    assert (row["variant"], row["step"]) == ("all_large", LABELS.index("all_large") + 1)
    assert (row["full"], row["full_std"]) == (result["last"]["full"]["mean"], result["last"]["full"]["std"])
    for one in result["reached"]:
        accuracy = f"{one['accuracy']:g}".replace(".", "_")
        assert row[f"seeds_to_{accuracy}"] == len(one["seeds"])
        if one["seeds"]:
            assert row[f"seconds_simulated_to_{accuracy}"] == one["seconds_simulated"]["mean"]
    points = client.get_metric_history(summary.info.run_id, "variants/full")
    assert [point.step for point in points] == [1, 2] and points[row["step"] - 1].value == row["full"]
    (one,) = [run for run in runs if run.info.run_name == "both/all_large-s0"]
    assert one.data.metrics["final/uniformity"] == result["runs"][0]["uniformity"]
    files = {file.path for file in client.list_artifacts(summary.info.run_id)}
    assert files == {*comparison_report.FILES, "variants.json"}
    assert {run.data.tags[PARENT] for run in runs} == {summary.info.run_id}
    assert PARENT not in summary.data.tags, "one level of nesting"


def test_mlflow_run_of_a_comparison_has_its_status(
    flexfleet: Any, sets: list[str], mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, seen = mlflow.MlflowClient(mlflow_uri), []

    def stopped(jobs: Sequence[executor.Command], at_once: int) -> dict[str, int]:
        seen.extend((run.info.run_name, run.info.status) for run in client.search_runs(["1"]))
        raise Stopped("")

    argv, given = ("compare", "--algorithms", "all_large", "--id", "a"), [*sets, f"tracking.mlflow={mlflow_uri}"]
    with monkeypatch.context() as patch:
        patch.setattr(compare_module, "side_by_side", stopped)
        assert flexfleet(*argv, sets=given).code == 3
    (run,) = client.search_runs(["1"])
    assert (seen, run.info.status) == ([("a", "RUNNING")], "KILLED")
    done = flexfleet(*argv, "--resume", "--json", sets=given)
    assert (done.json["mlflow_run_id"], len(client.search_runs(["1"]))) == (run.info.run_id, 2)
    assert client.get_run(run.info.run_id).info.status == "FINISHED"
