"""`flexfleet compare`: its figures are those of the run folders, its runs those of `flexfleet run`."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError
from fl_engine.fleet import uniformity
from fl_engine.rounds import phases
from flexfleet.config import Config, comparison_runs, load_config
from flexfleet.experiments import compare as compare_module
from flexfleet.experiments import comparison_report
from flexfleet.experiments.comparison_file import ComparisonFile
from flexfleet.files.artifacts import Apoz, Result
from flexfleet.tracking.record import experiment
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
    return Result.read(run / "result.json").model_sha256


# --------------------------------------------------------------------------------------- what is asked for
def test_labels_seeds_and_accuracies() -> None:
    assert comparison_runs.labels_of("flexfl, no_kd=flexfl,mine=pack.age:NAME") == {
        "flexfl": "flexfl", "no_kd": "flexfl", "mine": "pack.age:NAME"
    }  # fmt: skip
    assert comparison_runs.seeds_of("3, 1,2") == (3, 1, 2)
    assert comparison_runs.accuracies_of("0.5,0.4, 0.4,1") == (0.4, 0.5, 1.0)


BAD = {
    "no algorithm": (["--algorithms", ""], ("algorithms", "list")),
    "a label twice": (["--algorithms", "flexfl,flexfl"], ("'flexfl'", "twice", "label=name")),
    "a label that is no name": (["--algorithms", "../a=flexfl"], ("'../a'", "label")),
    "an unknown algorithm": (["--algorithms", "flexfl,al_large"], ("al_large", "did you mean 'all_large'")),
    "a seed that is none": (["--seeds", "0,one"], ("seeds", "whole numbers", "one")),
    "an accuracy in percent": (["--to", "40"], ("accuracies to reach", "40")),
    "a resume of what": (["--resume"], ("--resume needs --id",)),
    "an algorithm as a setting": (["--set", "all_large:algorithm.name=flexfl"], ("algorithm.name", "--algorithms")),
    "an unknown setting": (["--set", "flexfl:algorithm.kd_wight=0"], ("flexfl: ", "kd_wight", "did you mean")),
    "what only a pool tells": (["--set", "flexfl:algorithm.adaptive_size=30"], ("flexfl, seed 0: ", "Gamma")),
    "a store that is no folder": (["--set", "run.store=s3://bucket/runs"], ("folder", "s3://bucket/runs")),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_found_before_anything_trains(flexfleet: Any, sets: list[str], what: str, tmp_path: Path) -> None:
    given, said = BAD[what]
    argv = [word for pair in sets for word in ("--set", pair)]
    text = refused(flexfleet("compare", *TWO, *argv, *given, "--json"))
    assert all(part in text for part in said), text
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------- a comparison of four
@pytest.mark.parametrize("label", LABELS)
def test_every_figure_is_what_the_histories_say(compared: Compared, label: str) -> None:
    each = [rounds_of(compared.folder, label, seed) for seed in SEEDS]
    single, found = label == "all_large", compared.json["results"][label]

    def means(values: list[float]) -> Any:
        return pytest.approx({"mean": sum(values) / 2, "std": statistics.stdev(values)}, nan_ok=False)

    def check(score: dict[str, Any], chosen: list[int]) -> None:
        assert score["full"] == means([run[i]["full"] for run, i in zip(each, chosen, strict=True)])
        avg = [run[i]["avg"] for run, i in zip(each, chosen, strict=True)]
        assert score["avg"] is None if single else score["avg"] == means(avg)
        assert score["round"] == means([i + 1 for i in chosen])

    check(found["last"], [2, 2])
    check(found["best"], [max(range(3), key=lambda i: run[i]["avg"]) for run in each])
    for percent, until in ((50, 2), (80, 3), (100, 3)):
        (one,) = [one for one in found["highest"] if one["share"] == percent]
        assert one["full"] == means([max(row["full"] for row in run[:until]) for run in each])
        assert (
            (one["avg"] is None)
            if single
            else one["avg"] == means([max(r["avg"] for r in run[:until]) for run in each])
        )
        told = [Result.read(compared.folder / f"{label}-s{seed}" / "result.json").metrics["highest"] for seed in SEEDS]
        assert one["full"] == means([highest[str(percent)]["full"] for highest in told])
    down, up = ([sum(row[key] for row in run) for run in each] for key in ("bytes_down", "bytes_up"))
    assert found["mb_down"] == means([value / 1e6 for value in down])
    assert found["mb_up"] == means([value / 1e6 for value in up])
    assert found["waste"] == means([1 - b / a for a, b in zip(down, up, strict=True)])
    results = [Result.read(compared.folder / f"{label}-s{seed}" / "result.json") for seed in SEEDS]
    assert found["waste"] == means([result.waste for result in results])
    assert found["seconds"] == means([result.seconds for result in results])
    if all("seconds_simulated" in row for run in each for row in run):
        assert found["seconds_simulated"] == means([sum(row["seconds_simulated"] for row in run) for run in each])
    for name in uniformity.NAMES:
        known = [[row[name] for row in run if name in row] for run in each]
        assert found[name] == (means([sum(v) / len(v) for v in known]) if all(known) else None)
        if name != uniformity.MEASURED:
            assert all(known), f"every round of every run has {name}"
            assert found[name] == means([result.metrics[name] for result in results])
    for name in phases.NAMES:
        measured = [[row[name] for row in run if name in row] for run in each]
        assert all(measured), f"every run measures {name}"
        assert found["phases"][name] == means([sum(v) / len(v) for v in measured])
        if name in phases.REPEATED:
            assert found["phases"][name] == means([result.metrics[name] for result in results])
    assert found["phases"]["bits_up"] == means([8 * sum(row["bytes_up"] for row in run) / len(run) for run in each])
    assert [one["model_sha256"] for one in found["runs"]] == [result.model_sha256 for result in results]
    best = max(row["full"] for a in LABELS for seed in SEEDS for row in rounds_of(compared.folder, a, seed))
    assert [one["accuracy"] for one in found["reached"]] == [k / 20 for k in range(1, 20) if k / 20 < best][-4:]
    for one in found["reached"]:
        until = [next((i + 1 for i, row in enumerate(run) if row["full"] >= one["accuracy"]), 0) for run in each]
        assert one["seeds"] == [seed for seed, n in zip(SEEDS, until, strict=True) if n]
        if all(until):
            assert one["rounds"] == means([float(n) for n in until])
            spent = [run[:n] for run, n in zip(each, until, strict=True)]
            assert one["mb"] == means([sum(r["bytes_down"] + r["bytes_up"] for r in run) / 1e6 for run in spent])
            assert one["seconds"] == means([sum(r["seconds_round"] for r in run) for run in spent])


def test_every_model_is_that_of_a_plain_run(compared: Compared, flexfleet: Any, sets: list[str]) -> None:
    for label in LABELS:
        for seed in SEEDS:
            given = [*sets, f"algorithm.name={label}", f"seed={seed}", "run.store=plain"]
            done = flexfleet("run", "--json", "--run-id", f"{label}-{seed}", sets=given)
            assert done.json["model_sha256"] == sha_of(compared.folder / f"{label}-s{seed}"), f"{label}, seed {seed}"


def test_partition_and_pretraining_are_computed_once_per_seed(compared: Compared) -> None:
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


def test_local_accuracies_and_both_rounds_are_those_of_the_runs(compared: Compared) -> None:
    found = ComparisonFile.read(compared.folder / "comparison.json")
    for label, summary in found.results.items():
        told = [
            json.loads((compared.folder / f"{label}-s{one.seed}" / "result.json").read_text()) for one in summary.runs
        ]
        for one, metrics in zip(summary.runs, (each["metrics"] for each in told), strict=True):
            levels, several = metrics["local"], len(metrics["local"]) > 1
            assert {name: each.model_dump() for name, each in one.local.items()} == levels
            assert {name: each["accuracy"] for name, each in one.levels.items()} == metrics["levels"]
            assert one.local_full == [each["mean"] for each in levels.values()][-1]
            assert one.local_avg == (statistics.fmean(each["mean"] for each in levels.values()) if several else None)
            best = metrics["best"] | ({} if several else {"avg": None})
            assert (one.rounds, one.best) == (found.rounds, best)
        for name, level in summary.local.items():
            assert level.sd.mean == pytest.approx(statistics.fmean(one.local[name].sd for one in summary.runs))
            assert level.mean.mean == pytest.approx(statistics.fmean(one.local[name].mean for one in summary.runs))
    page = (compared.folder / "comparison.html").read_text()
    assert page.count("<h2>Local accuracy over the clients</h2>") == page.count('id="local"') == 1
    for one in (one for summary in found.results.values() for one in summary.runs):
        row = f"<td>{one.rounds}</td>", f"<td>{100 * one.full:.2f} %</td><td>{one.best['round']:.0f}</td>"
        assert all(cells in page for cells in row)


def test_the_page_needs_nothing_from_outside(compared: Compared) -> None:
    page, drawing = (compared.folder / "comparison.html").read_text(), (compared.folder / "comparison.svg").read_text()
    assert "<script" not in page and "@import" not in page
    assert set(re.findall(r"\w+://[^\"'\s<)]+", page)) == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert drawing.strip() in page
    assert drawing.startswith("<svg ") and all(label in drawing for label in (*LABELS, "avg", "full", "range of seeds"))
    assert sha_of(compared.folder / "flexfl-s0") in page and "partition.clients" in page


# ---------------------------------------------------------------------------------------------------- variants
def test_variants_of_one_algorithm(flexfleet: Any, sets: list[str]) -> None:
    argv = ("--algorithms", "flexfl,no_kd=flexfl", "--id", "a", "--json")
    given = [*sets, "rounds.stop=2", "no_kd:algorithm.kd_weight=0", "seed=4"]
    assert "seeds" in refused(flexfleet("compare", *argv, sets=given))
    Path("params.yaml").write_text("seed: 4\n")
    found = flexfleet("compare", *argv, sets=given[:-1]).json
    assert found["seeds"] == [4], "the configuration's"
    results = found["results"]
    assert {label: (r["algorithm"], r["settings"]) for label, r in results.items()} == {
        "flexfl": ("flexfl", {}), "no_kd": ("flexfl", {"kd_weight": 0})
    }  # fmt: skip
    assert results["flexfl"]["last"]["full"]["std"] is None, "one seed has no spread"
    given = [*sets, "rounds.stop=2", "algorithm.name=flexfl", "algorithm.kd_weight=0", "seed=4"]
    plain = flexfleet("run", "--json", "--run-id", "a-plain", sets=given)
    shas = [results[label]["runs"][0]["model_sha256"] for label in ("flexfl", "no_kd")]
    assert shas[1] == plain.json["model_sha256"] != shas[0]
    assert "no_kd: flexfl, kd_weight = 0" in comparison_report.text(ComparisonFile.model_validate(found))


def test_labels_may_vary_any_parameter(flexfleet: Any, sets: list[str]) -> None:
    argv = ("--algorithms", "even=flexfl,skewed=flexfl,rough=flexfl", "--seeds", "0,1", "--id", "a", "--json")
    own = ["skewed:partition.alpha=0.1", "rough:partition.alpha=0.1", "rough:run.precision=bf16"]
    done = flexfleet("compare", *argv, sets=[*sets, "rounds.stop=2", *own])
    assert done.code == 0, done.err
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
    # Each is the plain run of its settings.
    own = ["algorithm.name=flexfl", "seed=1", "partition.alpha=0.1", "run.store=plain"]
    plain = flexfleet("run", "--json", "--run-id", "plain", sets=[*sets, "rounds.stop=2", *own])
    shas = {label: r.runs[1].model_sha256 for label, r in found.results.items()}
    assert shas["skewed"] == plain.json["model_sha256"] and len(set(shas.values())) == 3
    # The terminal, the table and the page name what differs.
    for said in (comparison_report.text(found), (folder / "comparison.md").read_text().replace("\\_", "_")):
        assert "even: flexfl, partition.alpha = 0.6, run.precision = fp32" in said
        assert "The labels differ in partition.alpha, run.precision" in said
    page = (folder / "comparison.html").read_text()
    assert "The labels differ in partition.alpha, run.precision" in page and "same data, partition, fleet" not in page
    # Another alpha than the label's is still no run of this comparison.
    text = refused(flexfleet("compare", *argv[:-1], "--resume", sets=[*sets, "rounds.stop=2", *own[:1]]))
    assert "partition.alpha" in text or "algorithm.name" in text


def test_runs_of_other_networks_are_tracked_in_one_experiment() -> None:
    def configure(label: str, seed: int) -> Config:
        mlflow = "tracking.mlflow=sqlite:///mlflow.db"
        return load_config(None, [f"seed={seed}", f"model.name={label}", "dataset.pad=32", mlflow])

    runs = comparison_runs.entries({"small_cnn": "flexfl", "vgg16": "flexfl"}, [0], configure, "a")
    assert comparison_runs.varied(runs) == ("model.name",)
    found = [experiment(entry.config) for entry in compare_module.in_one_experiment(runs)]
    assert found == ["digits-small_cnn-dirichlet"] * 2


def test_compare_refuses_labels_with_different_metrics() -> None:
    kinds = "fl_engine.testing.kinds"

    def configure(label: str, seed: int) -> Config:
        data, network = {"table": ("TABLE", "TinyMLP"), "tokens": ("SEQUENCES", "TinyTokens")}[label]
        names = (f"dataset.name={kinds}:{data}", f"model.name={kinds}:{network}", "tracking.mlflow=null")
        return load_config(None, [f"seed={seed}", *names])

    runs = comparison_runs.entries({"table": "flexfl", "tokens": "flexfl"}, [0], configure, "a")
    with pytest.raises(ConfigError, match="table: r2, tokens: accuracy"):
        compare_module.check_all(runs)
