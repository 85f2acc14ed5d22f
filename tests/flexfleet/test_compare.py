"""`flexfleet compare`: its figures are those of the run folders, its runs those of `flexfleet run`, and one that fails
or is stopped costs nothing but itself."""

from __future__ import annotations

import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import pytest

from fl_engine.core.errors import ConfigError, IntegrityError, Stopped
from fl_engine.data import partitioning as partitions
from fl_engine.fleet import uniformity
from fl_engine.rounds import phases
from fl_engine.storage.store import sha256
from flexfleet.comparisons import comparison, side_by_side, tabulate
from flexfleet.comparisons import whole as compare_module
from flexfleet.comparisons.comparison import Comparison
from flexfleet.config import Config, entries, load_config
from flexfleet.files.artifacts import Apoz, Result, RunFile
from flexfleet.reports import report
from flexfleet.runs import whole as run_module
from flexfleet.steps import share
from flexfleet.tracking.record import experiment, token_of
from flexfleet.tracking.trackers import PARENT, TOKEN
from tests.harness import platform
from tests.harness.comparisons import in_this_process

LABELS, SEEDS = ("flexfl", "all_large"), (0, 1)
TWO = ("--algorithms", ",".join(LABELS), "--seeds", "0,1")


def page_stub(runs: Sequence[Path], out: Path) -> Path:
    out.write_text("<html></html>")
    return out


@pytest.fixture(scope="module", autouse=True)
def _quickly() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_module, "side_by_side", in_this_process)
        patch.setattr(run_module, "report", page_stub)
        patch.setattr(partitions, "draw", lambda *_: None)
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@dataclass(frozen=True)
class Ran:
    cwd: Path
    json: dict[str, Any]
    uri: str

    @property
    def folder(self) -> Path:
        return self.cwd / "runs" / "both"


@pytest.fixture(scope="module")
def ran_template(
    tmp_path_factory: pytest.TempPathFactory, flexfleet: Any, quick: Sequence[str], mlflow_template: Path
) -> Ran:
    """Two algorithms with two seeds, tracked."""
    cwd = tmp_path_factory.mktemp("both")
    shutil.copy(mlflow_template, cwd / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        sets = [*quick, "tracking.mlflow=sqlite:///mlflow.db"]
        done = flexfleet("compare", *TWO, "--id", "both", "--json", sets=[s for s in sets if "algorithm.name" not in s])
    assert done.code == 0, done.err
    return Ran(cwd, done.json, f"sqlite:///{cwd / 'mlflow.db'}")


@pytest.fixture
def sets(quick: Sequence[str]) -> list[str]:
    return [given for given in quick if not given.startswith("algorithm.name=")]


@pytest.fixture
def ran(ran_template: Ran, tmp_path: Path) -> Ran:
    """A copy of its run folders in the current folder."""
    shutil.copytree(ran_template.cwd / "runs", tmp_path / "runs")
    return Ran(tmp_path, ran_template.json, ran_template.uri)


def refused(done: Any, code: int = 2) -> str:
    assert done.code == code, done.err
    assert done.out == ""
    lines = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.err
    assert done.err.rstrip().endswith(lines[0])
    return str(lines[0])


def rounds_of(folder: Path, label: str, seed: int) -> list[dict[str, float]]:
    history = json.loads((folder / f"{label}-s{seed}" / "history.json").read_text())
    return [row["metrics"] for row in history["rounds"]]


def sha_of(run: Path) -> str:
    return Result.read(run / "result.json").model_sha256


# --------------------------------------------------------------------------------------- what is asked for
def test_labels_seeds_and_accuracies() -> None:
    assert entries.labels_of("flexfl, no_kd=flexfl,mine=pack.age:NAME") == {
        "flexfl": "flexfl", "no_kd": "flexfl", "mine": "pack.age:NAME"
    }  # fmt: skip
    assert entries.seeds_of("3, 1,2") == (3, 1, 2)
    assert entries.accuracies_of("0.5,0.4, 0.4,1") == (0.4, 0.5, 1.0)


BAD = {
    "no algorithm": (["--algorithms", ""], ("algorithms", "list")),
    "a gap": (["--algorithms", "flexfl,,all_large"], ("algorithms", "list")),
    "a label without": (["--algorithms", "flexfl,x="], ("'x='", "no algorithm")),
    "a label twice": (["--algorithms", "flexfl,flexfl"], ("'flexfl'", "twice", "label=name")),
    "a label twice over": (["--algorithms", "a=flexfl,a=all_large"], ("'a'", "twice")),
    "a label that is no name": (["--algorithms", "../a=flexfl"], ("'../a'", "label")),
    "a label that is taken": (["--algorithms", "shared=flexfl"], ("'shared'",)),
    "one's own without a label": (["--algorithms", "pack.age:NAME"], ("label=pack.age:NAME",)),
    "an unknown algorithm": (["--algorithms", "flexfl,al_large"], ("al_large", "did you mean 'all_large'")),
    "no seed": (["--seeds", ""], ("seeds", "list")),
    "a seed twice": (["--seeds", "0,1,0"], ("seeds", "more than once", "0")),
    "a seed that is none": (["--seeds", "0,one"], ("seeds", "whole numbers", "one")),
    "an accuracy in percent": (["--to", "40"], ("shares", "0.4", "'40'")),
    "an accuracy that is none": (["--to", "many"], ("shares", "many")),
    "no jobs": (["--jobs", "0"], ("--jobs", "0")),
    "an id that is a path": (["--id", "a/b"], ("'a/b'",)),
    "an empty id": (["--id", "", "--resume"], ("id is a plain name", "got ''")),
    "a resume of what": (["--resume"], ("--resume needs --id",)),
    "a label that does not exist": (["--set", "flexfi:algorithm.epsilon=3"], ("'flexfi'", "did you mean 'flexfl'")),
    "a length of one label": (["--set", "flexfl:rounds.stop=9"], ("rounds.stop", "all labels", "Leave out the label")),
    "a place of one label": (["--set", "flexfl:run={store: there}"], ("run.store", "Leave out the label")),
    "an unknown setting of one label": (["--set", "flexfl:training.lrr=0.1"], ("flexfl: ", "lrr", "did you mean 'lr'")),
    "a seed as a setting": (["--set", "seed=3"], ("seed", "--seeds")),
    "an algorithm as a setting": (["--set", "all_large:algorithm.name=flexfl"], ("algorithm.name", "--algorithms")),
    "an unknown setting": (["--set", "flexfl:algorithm.kd_wight=0"], ("flexfl: ", "kd_wight", "did you mean")),
    "a setting that one does not have": (["--set", "algorithm.kd_weight=0"], ("all_large: ", "kd_weight")),
    "no setting": (["--set", "flexfl:algorithm.kd_weight"], ("a.b=value",)),
    "what only data tell": (["--set", "partition.clients=2000"], ("flexfl, seed 0: ", "2000")),
    "what only a pool tells": (["--set", "flexfl:algorithm.adaptive_size=30"], ("flexfl, seed 0: ", "Gamma")),
    "a store that is no folder": (["--set", "run.store=s3://bucket/runs"], ("folder", "s3://bucket/runs")),
    "tracking": (["--set", "tracking.mlflow=sqlite:////proc/nowhere/mlflow.db"], ("tracking.mlflow", "/proc/nowhere")),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_found_before_anything_trains(flexfleet: Any, sets: list[str], what: str, tmp_path: Path) -> None:
    given, said = BAD[what]
    argv = [word for pair in sets for word in ("--set", pair)]
    text = refused(flexfleet("compare", *TWO, *argv, *given, "--json"))
    assert all(part in text for part in said), text
    assert list(tmp_path.iterdir()) == []


def test_help(flexfleet: Any) -> None:
    done = flexfleet("compare", "--help")
    assert done.code == 0
    assert all(word in done.out for word in ("--algorithms", "--seeds", "--jobs", "--to", "LABEL:algorithm.x=value"))


# ------------------------------------------------------------------------------------------- a comparison of four
def test_json_is_one_object_and_is_comparison_json(ran: Ran) -> None:
    assert ran.json == json.loads((ran.folder / "comparison.json").read_text())
    assert ran.json["schema_version"] == 1
    assert (ran.json["id"], ran.json["labels"], ran.json["seeds"]) == ("both", list(LABELS), list(SEEDS))
    assert Comparison.model_validate(ran.json).rounds == 3
    assert ran.json["settings"]["partition.clients"] == 6
    assert {path.name for path in ran.folder.iterdir() if path.is_dir()} == {
        "flexfl-s0", "flexfl-s1", "all_large-s0", "all_large-s1", "shared-s0", "shared-s1"
    }  # fmt: skip


@pytest.mark.parametrize("label", LABELS)
def test_every_figure_is_what_the_histories_say(ran: Ran, label: str) -> None:
    each = [rounds_of(ran.folder, label, seed) for seed in SEEDS]
    single, found = label == "all_large", ran.json["results"][label]

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
        told = [Result.read(ran.folder / f"{label}-s{seed}" / "result.json").metrics["highest"] for seed in SEEDS]
        assert one["full"] == means([highest[str(percent)]["full"] for highest in told])
    down, up = ([sum(row[key] for row in run) for run in each] for key in ("bytes_down", "bytes_up"))
    assert found["mb_down"] == means([value / 1e6 for value in down])
    assert found["mb_up"] == means([value / 1e6 for value in up])
    assert found["waste"] == means([1 - b / a for a, b in zip(down, up, strict=True)])
    results = [Result.read(ran.folder / f"{label}-s{seed}" / "result.json") for seed in SEEDS]
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
    best = max(row["full"] for a in LABELS for seed in SEEDS for row in rounds_of(ran.folder, a, seed))
    assert [one["accuracy"] for one in found["reached"]] == [k / 20 for k in range(1, 20) if k / 20 < best][-4:]
    for one in found["reached"]:
        until = [next((i + 1 for i, row in enumerate(run) if row["full"] >= one["accuracy"]), 0) for run in each]
        assert one["seeds"] == [seed for seed, n in zip(SEEDS, until, strict=True) if n]
        if all(until):
            assert one["rounds"] == means([float(n) for n in until])
            spent = [run[:n] for run, n in zip(each, until, strict=True)]
            assert one["mb"] == means([sum(r["bytes_down"] + r["bytes_up"] for r in run) / 1e6 for run in spent])
            assert one["seconds"] == means([sum(r["seconds_round"] for r in run) for run in spent])


def test_every_model_is_that_of_a_plain_run(ran: Ran, flexfleet: Any, sets: list[str]) -> None:
    for label in LABELS:
        for seed in SEEDS:
            given = [*sets, f"algorithm.name={label}", f"seed={seed}", "run.store=plain"]
            done = flexfleet("run", "--json", "--run-id", f"{label}-{seed}", sets=given)
            assert done.json["model_sha256"] == sha_of(ran.folder / f"{label}-s{seed}"), f"{label}, seed {seed}"
            mine, plain = (json.loads((run / "pretrain" / "apoz.json").read_text()) | {"seconds": 0}
                           for run in (ran.folder / f"{label}-s{seed}", Path(f"plain/{label}-{seed}")))  # fmt: skip
            assert mine == plain


def test_partition_and_pretraining_are_computed_once_per_seed(ran: Ran) -> None:
    for seed in SEEDS:
        shared = ran.folder / f"shared-s{seed}"
        for label in LABELS:
            run = ran.folder / f"{label}-s{seed}"
            for name in ("partition.json", "partition.safetensors"):
                assert (run / "partition" / name).read_bytes() == (shared / "partition" / name).read_bytes()
        # Its seconds too: measured once, and copied.
        scores = Apoz.read(shared / "pretrain" / "apoz.json")
        assert scores == Apoz.read(ran.folder / f"flexfl-s{seed}" / "pretrain" / "apoz.json")
        assert scores.layers
        assert Apoz.read(ran.folder / f"all_large-s{seed}" / "pretrain" / "apoz.json").layers == ()
    assert sha_of(ran.folder / "flexfl-s0") != sha_of(ran.folder / "flexfl-s1")


def test_each_run_can_be_made_again_from_what_lies_beside_it(ran: Ran, flexfleet: Any) -> None:
    config = str(ran.folder / "flexfl-s1.yaml")
    sets = ["tracking.mlflow=null", "run.store=again"]
    done = flexfleet("run", "--json", "--config", config, "--run-id", "a", sets=sets)
    assert done.json["model_sha256"] == sha_of(ran.folder / "flexfl-s1")
    log = (ran.folder / "flexfl-s1.log").read_text()
    assert "flexfl-s1.yaml" in log and "--tag" in log


def test_the_tables_say_the_same_everywhere(ran: Ran) -> None:
    found = Comparison.read(ran.folder / "comparison.json")
    text, markdown = tabulate.text(found), (ran.folder / "comparison.md").read_text()
    page = (ran.folder / "comparison.html").read_text()
    flexfl = found.results["flexfl"]
    assert flexfl.last.avg is not None and flexfl.last.avg.std is not None
    avg = f"{100 * flexfl.last.avg.mean:.2f} ± {100 * flexfl.last.avg.std:.2f}"
    for shown in (text, markdown.replace("\\", ""), page):
        assert avg in shown
        for table in tabulate.tables(found):
            assert table.title in shown
            assert all(value in shown for row in table.rows for value in row)
    (line,) = [line for line in text.splitlines() if line.startswith("  all_large") and "±" in line][:1]
    assert line.split()[1:3] == ["100", report.NONE], "one level has no avg"
    assert " / ".join(f"{size:.0f}" for size in flexfl.levels) in text
    assert flexfl.levels[-1] == 100
    assert "both: small_cnn on digits, 6 clients (dirichlet), 3 rounds" in text
    assert "seeds 0, 1" in text


def test_local_accuracies_and_both_rounds_are_those_of_the_runs(ran: Ran) -> None:
    found = Comparison.read(ran.folder / "comparison.json")
    for label, summary in found.results.items():
        told = [json.loads((ran.folder / f"{label}-s{one.seed}" / "result.json").read_text()) for one in summary.runs]
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
    page = (ran.folder / "comparison.html").read_text()
    for one in (one for summary in found.results.values() for one in summary.runs):
        row = f"<td>{one.rounds}</td>", f"<td>{100 * one.full:.2f} %</td><td>{one.best['round']:.0f}</td>"
        assert all(cells in page for cells in row)


def test_the_page_needs_nothing_from_outside(ran: Ran) -> None:
    page, drawing = (ran.folder / "comparison.html").read_text(), (ran.folder / "comparison.svg").read_text()
    assert "<script" not in page and "@import" not in page
    assert set(re.findall(r"\w+://[^\"'\s<)]+", page)) == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert drawing.strip() in page
    assert drawing.startswith("<svg ") and all(label in drawing for label in (*LABELS, "avg", "full", "range of seeds"))
    assert sha_of(ran.folder / "flexfl-s0") in page and "partition.clients" in page


def test_a_comparison_without_json_prints_tables_and_where_things_are(
    ran: Ran, flexfleet: Any, sets: list[str]
) -> None:
    done = flexfleet("compare", *TWO, "--id", "both", "--resume", "--to", "0.01,0.999", sets=sets)
    assert done.code == 0, done.err
    assert "runs/both/comparison.html" in done.out
    assert "1 %" in done.out and "99.9 %" in done.out
    last = [line for line in done.out.splitlines() if line.startswith("  flexfl")][-1]
    assert last.rstrip().endswith(report.NONE), "not reached"


# ----------------------------------------------------------------------------------------------------- MLflow
def test_mlflow_groups_the_runs_and_has_the_comparison_itself(ran_template: Ran) -> None:
    client = mlflow.MlflowClient(ran_template.uri)
    experiment = client.get_experiment_by_name("digits-small_cnn-dirichlet")
    assert experiment is not None
    assert [e.name for e in client.search_experiments() if e.name != "Default"] == [experiment.name]
    of_id = client.search_runs([experiment.experiment_id], "tags.`flexfleet.comparison` = 'both'")
    assert {run.info.status for run in of_id} == {"FINISHED"}
    runs = [run for run in of_id if "flexfleet.kind" not in run.data.tags]
    assert {(run.data.tags["algorithm"], run.data.tags["seed"]) for run in runs} == {
        (label, str(seed)) for label in LABELS for seed in SEEDS
    }
    assert {run.info.run_name for run in runs} == {f"{label}-s{seed}" for label in LABELS for seed in SEEDS}
    (summary,) = [run for run in of_id if run not in runs]
    assert (summary.info.run_name, summary.data.tags["flexfleet.kind"]) == ("both", "comparison")
    assert summary.info.run_id == ran_template.json["mlflow_run_id"]
    full = ran_template.json["results"]["all_large"]["last"]["full"]
    assert summary.data.metrics["full/all_large"] == full["mean"]
    assert summary.data.metrics["full_std/all_large"] == full["std"]
    for one in ran_template.json["results"]["all_large"]["reached"]:
        assert summary.data.metrics[f"seeds_to_{one['accuracy']:g}/all_large"] == len(one["seeds"])
        if one["seeds"]:
            took = summary.data.metrics[f"seconds_simulated_to_{one['accuracy']:g}/all_large"]
            assert took == one["seconds_simulated"]["mean"]
    (one,) = [run for run in runs if run.info.run_name == "all_large-s0"]
    assert one.data.metrics["final/uniformity"] == ran_template.json["results"]["all_large"]["runs"][0]["uniformity"]
    assert "avg/all_large" not in summary.data.metrics and "avg/flexfl" in summary.data.metrics
    assert {file.path for file in client.list_artifacts(summary.info.run_id)} == set(tabulate.FILES)
    assert {run.data.tags[PARENT] for run in runs} == {summary.info.run_id}
    assert PARENT not in summary.data.tags, "one level of nesting"


def test_tabulating_again_is_the_same_mlflow_run(
    ran_template: Ran, flexfleet: Any, sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ran_template.cwd)
    before = len(mlflow.MlflowClient(ran_template.uri).search_runs(["1"]))
    sets = [*sets, "tracking.mlflow=sqlite:///mlflow.db"]
    done = flexfleet("compare", *TWO, "--id", "both", "--resume", "--json", sets=sets)
    assert done.json == ran_template.json
    assert len(mlflow.MlflowClient(ran_template.uri).search_runs(["1"])) == before == 5


@pytest.mark.parametrize("version", ["this", "earlier"])
def test_what_joins_a_comparison_joins_its_mlflow_run(ran: Ran, flexfleet: Any, sets: list[str], version: str) -> None:
    """Earlier versions made that of a comparison last, by the tokens of its runs, and put none of them below it."""
    shutil.copy(ran.uri.removeprefix("sqlite:///"), "mlflow.db")
    uri, summary = f"sqlite:///{ran.cwd}/mlflow.db", ran.json["mlflow_run_id"]
    client = mlflow.MlflowClient(uri)
    if version == "earlier":
        names = [f"{label}-s{seed}" for label in LABELS for seed in SEEDS]
        files = [RunFile.read(ran.folder / name / "run.json") for name in names]
        client.set_tag(summary, TOKEN, token_of("comparison", [file.token for file in files]))
        for file in files:
            client.delete_tag(str(file.mlflow_run_id), PARENT)
        (ran.folder / "comparison.token").unlink()
    argv = ("--algorithms", "flexfl,all_large,late=all_large", "--seeds", "0,1", "--id", "both", "--resume", "--json")
    for _ in range(2):
        done = flexfleet("compare", *argv, sets=[*sets, f"tracking.mlflow={uri}"])
        assert done.code == 0, done.err
        assert done.json["mlflow_run_id"] == summary
    tags = {run.info.run_name: run.data.tags for run in client.search_runs(["1"])}
    assert len(tags) == len(client.search_runs(["1"])) == 7 and PARENT not in tags.pop("both")
    assert {of_run.get(PARENT) for of_run in tags.values()} == {summary}
    assert "full/late" in client.get_run(summary).data.metrics


def test_the_mlflow_run_of_a_comparison_is_there_before_its_runs_and_says_how_it_ended(
    flexfleet: Any, sets: list[str], mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, seen = mlflow.MlflowClient(mlflow_uri), []

    def stopped(jobs: Sequence[side_by_side.Command], at_once: int) -> dict[str, int]:
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


def test_on_a_platform_a_comparison_and_its_runs_are_side_by_side_below_the_pipeline(
    flexfleet: Any, sets: list[str], mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = platform.begin(mlflow_uri, monkeypatch)
    given = [*sets, f"tracking.mlflow={mlflow_uri}", "rounds.stop=1"]
    done = flexfleet("compare", "--algorithms", "heterofl,all_large", "--id", "c", sets=given)
    assert done.code == 0, done.err
    assert {run.info.run_name for run in at.ours()} == {"c", "heterofl-s0", "all_large-s0"}
    assert {run.data.tags[PARENT] for run in at.ours()} == {at.pipeline}
    assert {run.data.tags["flexfleet.comparison"] for run in at.ours()} == {"c"}, "by which they belong together"
    assert at.untouched()


# ----------------------------------------------------------------------------------------------------- resuming
def test_the_same_id_again_needs_resume(ran: Ran, flexfleet: Any, sets: list[str]) -> None:
    text = refused(flexfleet("compare", *TWO, "--id", "both", sets=sets))
    assert "runs/both" in text and "--resume" in text and "--id" in text


def test_resume_makes_what_is_missing_and_keeps_the_rest(ran: Ran, flexfleet: Any, sets: list[str]) -> None:
    (ran.folder / "flexfl-s1" / "result.json").unlink()
    shutil.rmtree(ran.folder / "all_large-s0")
    kept = [ran.folder / name for name in ("flexfl-s0", "all_large-s1")]
    before = {path: path.read_bytes() for run in kept for path in (*run.rglob("*"), run.with_name(f"{run.name}.log"))
              if path.is_file()}  # fmt: skip
    done = flexfleet("compare", *TWO, "--id", "both", "--resume", "--json", sets=sets)
    assert done.code == 0, done.err
    assert {path: path.read_bytes() for path in before} == before
    for label in LABELS:
        now, then = done.json["results"][label]["runs"], ran.json["results"][label]["runs"]
        assert [one["model_sha256"] for one in now] == [one["model_sha256"] for one in then]
        assert done.json["results"][label]["last"] == ran.json["results"][label]["last"]
    assert "pretrain" not in (ran.folder / "shared-s0.log").read_text().split(side_by_side.BEGINS)[2:]


def test_resume_with_more_rounds_algorithms_and_seeds(ran: Ran, flexfleet: Any, sets: list[str]) -> None:
    argv = ("--algorithms", "flexfl,no_kd=flexfl", "--seeds", "1,2", "--id", "both", "--resume", "--json")
    given = [*sets, "rounds.stop=4", "no_kd:algorithm.kd_weight=0"]
    found = flexfleet("compare", *argv, sets=given).json
    assert (found["labels"], found["seeds"], found["rounds"]) == (["flexfl", "no_kd"], [1, 2], 4)
    given = [*sets, "rounds.stop=4", "seed=1", "algorithm.name=flexfl"]
    plain = flexfleet("run", "--json", "--run-id", "a", sets=given)
    assert found["results"]["flexfl"]["runs"][0]["model_sha256"] == plain.json["model_sha256"]
    # A run that joins later takes over what the others started from.
    late, shared = (Apoz.read(ran.folder / name / "pretrain" / "apoz.json") for name in ("no_kd-s1", "shared-s1"))
    assert late == shared
    assert "pretrain:" not in (ran.folder / "no_kd-s1.log").read_text()


def test_changed_settings_are_refused(ran: Ran, flexfleet: Any, sets: list[str]) -> None:
    text = refused(flexfleet("compare", *TWO, "--id", "both", "--resume", sets=[*sets, "training.lr=0.01"]))
    assert "training.lr: 0.05 -> 0.01" in text and "--id" in text and "--run-id" not in text
    text = refused(flexfleet("compare", *TWO, "--id", "both", "--resume", sets=[*sets, "flexfl:algorithm.epsilon=3"]))
    assert "algorithm.epsilon" in text


def test_fewer_rounds_are_refused_before_anything_trains(ran: Ran, flexfleet: Any, sets: list[str]) -> None:
    before = {name: (ran.folder / name).read_bytes() for name in tabulate.FILES}
    text = refused(flexfleet("compare", *TWO, "--id", "both", "--resume", sets=[*sets, "rounds.stop=2"]))
    assert "flexfl, seed 0: rounds.stop = 2, but 3 rounds of runs/both/flexfl-s0 are committed" in text
    assert "rounds.stop=3 or more, or choose another --id" in text
    assert {name: (ran.folder / name).read_bytes() for name in tabulate.FILES} == before


def test_old_results_go_before_a_run_changes_and_stay_where_none_can(
    ran: Ran, flexfleet: Any, sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed leaves no results that are not of it."""
    argv, given = ("compare", *TWO, "--id", "both", "--resume"), [*sets, "rounds.stop=4"]
    there, log = list[bool](), ran.folder / "flexfl-s0.log"

    def look(jobs: Sequence[side_by_side.Command], at_once: int) -> dict[str, int]:
        there.append(all((ran.folder / name).exists() for name in tabulate.FILES))
        return {job.name: IntegrityError.exit_code for job in jobs}

    def shares(groups: dict[str, Any], *_: Any) -> list[side_by_side.Command]:
        return [side_by_side.Command(name, "fails", (), log) for name in groups]

    monkeypatch.setattr(compare_module, "side_by_side", look)
    with monkeypatch.context() as patch:
        patch.setattr(compare_module, "_shares", shares)
        refused(flexfleet(*argv, sets=given), IntegrityError.exit_code)
    assert there == [True, True]
    refused(flexfleet(*argv, sets=given), IntegrityError.exit_code)
    assert there[2:] == [True, False] and not any((ran.folder / name).exists() for name in tabulate.FILES)


def test_changed_code_is_refused_before_anything_trains(
    flexfleet: Any, sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished run is not made again, and still was made with its code: that of the algorithm, or of the network."""
    (tmp_path / "kept_on.py").write_text(BREAKS)
    monkeypatch.syspath_prepend(tmp_path)
    argv = ("compare", "--algorithms", "mine=kept_on:Breaks", "--id", "a")
    done = flexfleet(*argv, sets=[*sets, "rounds.stop=1"])
    assert done.code == 0, done.err
    (tmp_path / "kept_on.py").write_text(f"{BREAKS}# a change\n")
    text = refused(flexfleet(*argv, "--seeds", "0,1", "--resume", sets=[*sets, "rounds.stop=1"]))
    assert "mine, seed 0: runs/a/mine-s0 was started with another source of kept_on:Breaks: undo the change" in text
    assert not Path("runs/a/mine-s1").exists()
    (tmp_path / "kept_on.py").write_text(BREAKS)
    assert flexfleet(*argv, "--resume", sets=[*sets, "rounds.stop=1"]).code == 0


def test_a_finished_run_whose_code_is_gone_is_refused(ran: Ran, flexfleet: Any, sets: list[str]) -> None:
    for name in (f"{label}-s{seed}" for label in LABELS for seed in SEEDS):
        file = RunFile.read(ran.folder / name / "run.json")
        config = file.config | {"dataset": file.config["dataset"] | {"name": "gone_away:DATA"}}
        file.model_copy(update={"config": config}).write(ran.folder / name / "run.json")
    text = refused(flexfleet("compare", *TWO, "--id", "both", "--resume", sets=[*sets, "dataset.name=gone_away:DATA"]))
    assert "flexfl, seed 0: code of one's own 'gone_away:DATA' cannot be imported: ModuleNotFoundError" in text


def test_shared_work_of_other_settings_is_not_taken_over(ran: Ran, flexfleet: Any, sets: list[str]) -> None:
    """Nothing has begun but the shared part: it is computed again; a run that is handed it refuses."""
    shutil.rmtree(ran.folder / "flexfl-s0")
    argv = ("--run-id", "flexfl-s0", "--shared", str(ran.folder / "shared-s0"))
    text = refused(flexfleet("run", *argv, sets=[*sets, "partition.alpha=0.1", "algorithm.name=flexfl"]))
    assert "partition.alpha: 0.6 -> 0.1" in text
    for name in ("flexfl-s1", "all_large-s0", "all_large-s1"):
        shutil.rmtree(ran.folder / name)
    before = (ran.folder / "shared-s0" / "partition" / "partition.json").read_bytes()
    given = [*sets, "partition.alpha=0.1", "rounds.stop=1"]
    done = flexfleet("compare", *TWO, "--id", "both", "--resume", "--json", sets=given)
    assert done.code == 0, done.err
    assert (ran.folder / "shared-s0" / "partition" / "partition.json").read_bytes() != before


def test_a_comparison_is_made_by_one_process_at_a_time(ran: Ran, flexfleet: Any, sets: list[str]) -> None:
    from flexfleet.steps.federate import alone

    with alone(ran.folder):
        text = refused(flexfleet("compare", *TWO, "--id", "both", "--resume", sets=sets))
    assert "another process" in text


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
    assert "no_kd: flexfl, kd_weight = 0" in tabulate.text(Comparison.model_validate(found))


def test_labels_may_vary_any_parameter(flexfleet: Any, sets: list[str]) -> None:
    """One algorithm at two alphas, and with another precision at the second one, with two seeds."""
    argv = ("--algorithms", "even=flexfl,skewed=flexfl,rough=flexfl", "--seeds", "0,1", "--id", "a", "--json")
    own = ["skewed:partition.alpha=0.1", "rough:partition.alpha=0.1", "rough:run.precision=bf16"]
    done = flexfleet("compare", *argv, sets=[*sets, "rounds.stop=2", *own])
    assert done.code == 0, done.err
    found, folder = Comparison.model_validate(done.json), Path("runs/a")
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
    for said in (tabulate.text(found), (folder / "comparison.md").read_text().replace("\\_", "_")):
        assert "even: flexfl, partition.alpha = 0.6, run.precision = fp32" in said
        assert "The labels differ in partition.alpha, run.precision, as said with each" in said
    page = (folder / "comparison.html").read_text()
    assert "The labels differ in partition.alpha, run.precision" in page and "same data, partition, fleet" not in page
    # Another alpha than the label's is still no run of this comparison.
    text = refused(flexfleet("compare", *argv[:-1], "--resume", sets=[*sets, "rounds.stop=2", *own[:1]]))
    assert "partition.alpha" in text or "algorithm.name" in text


def test_runs_of_other_networks_are_tracked_in_one_experiment() -> None:
    def configure(label: str, seed: int) -> Config:
        mlflow = "tracking.mlflow=sqlite:///mlflow.db"
        return load_config(None, [f"seed={seed}", f"model.name={label}", "dataset.pad=32", mlflow])

    runs = entries.entries({"small_cnn": "flexfl", "vgg16": "flexfl"}, [0], configure, "a")
    assert entries.varied(runs) == ("model.name",)
    found = [experiment(entry.config) for entry in compare_module.in_one_experiment(runs)]
    assert found == ["digits-small_cnn-dirichlet"] * 2


def test_labels_that_are_measured_by_different_metrics_are_refused() -> None:
    kinds = "fl_engine.testing.kinds"

    def configure(label: str, seed: int) -> Config:
        data, network = {"table": ("TABLE", "TinyMLP"), "tokens": ("SEQUENCES", "TinyTokens")}[label]
        names = (f"dataset.name={kinds}:{data}", f"model.name={kinds}:{network}", "tracking.mlflow=null")
        return load_config(None, [f"seed={seed}", *names])

    runs = entries.entries({"table": "flexfl", "tokens": "flexfl"}, [0], configure, "a")
    with pytest.raises(ConfigError, match=r"\(table: r2, tokens: accuracy\): compare each kind by itself"):
        compare_module.check_all(runs)


def test_a_title_names_the_data_sets_that_labels_have(ran: Ran) -> None:
    found = Comparison.read(ran.folder / "comparison.json")
    results = {
        label: r.model_copy(update={"varied": {"model.name": name}})
        for (label, r), name in zip(found.results.items(), ("small_cnn", "vgg16"), strict=True)
    }
    settings = {k: v for k, v in found.settings.items() if k != "model.name"}
    found = found.model_copy(update={"varied": ("model.name",), "results": results, "settings": settings})
    assert "small_cnn or vgg16 on digits" in tabulate.title(found)


# ---------------------------------------------------------------------------------------------------- failures
BREAKS = """
from collections.abc import Iterable
from dataclasses import dataclass
from fl_engine.algorithms import AllLarge
from fl_engine.core.errors import DataError

@dataclass(frozen=True)
class Breaks(AllLarge):
    def merge(self, state, plan, answers, server):
        if plan.round == 1:
            raise DataError("no merge of the second round")
        return super().merge(state, plan, answers, server)
"""


def test_a_run_that_fails_does_not_stop_the_others(
    flexfleet: Any, sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "breaks_later.py").write_text(BREAKS)
    monkeypatch.syspath_prepend(tmp_path)
    argv = ("--seeds", "0,1", "--id", "a", "--json")
    all_three = ("--algorithms", "breaks=breaks_later:Breaks,flexfl,all_large")
    done = flexfleet("compare", *all_three, *argv, sets=[*sets, "rounds.commit_every=1"])
    text = refused(done, 2)
    assert "4 of 6 runs are finished" in text
    for seed in SEEDS:
        assert f"runs/a/breaks-s{seed}.log" in text
        assert f"breaks-s{seed}: exit code 2, runs/a/breaks-s{seed}.log: no merge of the second round" in caplog.text
        assert all((Path("runs/a") / f"{label}-s{seed}" / "result.json").is_file() for label in LABELS)
    assert "--resume" in text
    assert list(Path("runs/a").glob("comparison.*")) == [], "half a comparison is none"
    found = flexfleet("compare", *TWO[:2], *argv, "--resume", sets=[*sets, "rounds.commit_every=1"])
    assert found.code == 0, found.err
    assert found.json["labels"] == list(LABELS)


def test_the_part_of_all_that_fails_is_told_as_such(
    flexfleet: Any, sets: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Path:
        raise OSError(28, "No space left on device", "apoz.json")

    monkeypatch.setattr(share, "pretrain", broken)
    text = refused(flexfleet("compare", *TWO, "--id", "a", sets=sets), 6)
    assert "0 of 4 runs are finished" in text and "runs/a/shared-s0.log" in text and "runs/a/shared-s1.log" in text
    assert caplog.text.count("apoz.json: No space left on device") == 2
    assert not Path("runs/a/flexfl-s0").exists()


def test_runs_that_differ_are_not_tabulated(ran: Ran) -> None:
    folders = {f"{label}-s{seed}": ran.folder / f"{label}-s{seed}" for label in LABELS for seed in SEEDS}

    def change(name: str, path: str, value: Any) -> Callable[[], None]:
        file = folders[name] / "run.json"
        before = file.read_text()
        changed = json.loads(before)
        *parents, last = path.split(".")
        here = changed["config"]
        for part in parents:
            here = here[part]
        here[last] = value
        file.write_text(json.dumps(changed))
        return lambda: file.write_text(before) and None

    def wrong() -> str:
        with pytest.raises(ConfigError) as error:
            comparison.read(LABELS, SEEDS, folders)
        return str(error.value)

    others = {"training.lr": 0.1, "partition.alpha": 0.3, "rounds.stop": 9, "rounds.evaluate_every": 3}
    for path, value in others.items():
        undo = change("flexfl-s1", path, value)
        assert "seed 1" in wrong() and path in wrong()
        undo()
    for path, value in {
        "kubernetes.poll_s": 2.0,
        "rounds.keep_every": 7,
        "run.store": "there",
        "tune.trials": 3,
    }.items():
        undo = change("flexfl-s1", path, value)  # as after --resume --set kubernetes.poll_s=2.0
        assert comparison.read(LABELS, SEEDS, folders)
        undo()
    undo = change("flexfl-s1", "algorithm.kd_weight", 0)
    assert "the runs of flexfl differ in more than the seed: algorithm.kd_weight" in wrong()
    undo()
    undo = change("flexfl-s1", "seed", 0)
    assert "not of seed 1" in wrong()
    undo()
    for label in LABELS:
        change(f"{label}-s1", "training.lr", 0.1)
    assert "differ in more than the seed: training.lr: 0.05 (seed 0), 0.1 (seed 1)" in wrong()


def test_another_partition_is_not_tabulated(ran: Ran) -> None:
    """The same parameters, but other samples: what a checksum is for."""
    run = ran.folder / "all_large-s0"
    shutil.rmtree(run / "partition")
    shutil.copytree(ran.folder / "all_large-s1" / "partition", run / "partition")
    file = RunFile.read(run / "run.json")
    other = RunFile.read(ran.folder / "all_large-s1" / "run.json").partition_sha256
    file.model_copy(update={"partition_sha256": other}).write(run / "run.json")
    folders = {f"{label}-s0": ran.folder / f"{label}-s0" for label in LABELS}
    with pytest.raises(ConfigError, match=r"seed 0 .* the partition itself \(sha256\)"):
        comparison.read(LABELS, (0,), folders)


def test_other_code_is_not_tabulated(ran: Ran) -> None:
    folders = {f"{label}-s{seed}": ran.folder / f"{label}-s{seed}" for label in LABELS for seed in SEEDS}
    file = folders["flexfl-s1"] / "run.json"
    whole = RunFile.read(file)
    whole.model_copy(update={"code_sha256": "c" * 64}).write(file)
    with pytest.raises(ConfigError, match=r"flexfl differ .* the code of run.code .* cccccccccccc \(seed 1\)"):
        comparison.read(LABELS, SEEDS, folders)
    for seed, digest in enumerate("ab"):
        known = RunFile.read(folders[f"flexfl-s{seed}"] / "run.json").model_copy(update={"code_sha256": None})
        names = {"mine:A": digest * 64, f"mine:B{seed}": digest * 64}
        known.model_copy(update={"sources": names}).write(folders[f"flexfl-s{seed}"] / "run.json")
    with pytest.raises(ConfigError) as error:
        comparison.read(LABELS, SEEDS, folders)
    said = "the source of mine:A (sha256): aaaaaaaaaaaa (seed 0), bbbbbbbbbbbb (seed 1)"
    assert str(error.value) == f"the runs of flexfl differ in more than the seed: {said}"


def test_other_data_are_not_tabulated(ran: Ran) -> None:
    """Of one seed, where the partitions differ as they are to, and of one label, where no seed cuts the data."""
    folders = {f"{label}-s{seed}": ran.folder / f"{label}-s{seed}" for label in LABELS for seed in SEEDS}

    def change(name: str, section: str, **data: Any) -> None:
        manifest, file = folders[name] / "partition" / "partition.json", folders[name] / "run.json"
        known = RunFile.read(file)
        config = known.config | {section: {**known.config[section], **data}}
        known.model_copy(update={"config": config, "partition_sha256": sha256(manifest.read_bytes())}).write(file)

    for seed in SEEDS:
        change(f"flexfl-s{seed}", "partition", alpha=0.3)
    assert comparison.read(LABELS, SEEDS, folders, ["partition.alpha"]), "each seed cuts its own samples"
    manifest = folders["flexfl-s0"] / "partition" / "partition.json"
    before = manifest.read_bytes()
    manifest.write_text(json.dumps(json.loads(before) | {"data_sha256": "f" * 64}))
    change("flexfl-s0", "partition")
    with pytest.raises(ConfigError, match=r"seed 0 .* the data \(sha256\): ffffffffffff \(flexfl\), "):
        comparison.read(LABELS, SEEDS, folders, ["partition.alpha"])
    manifest.write_bytes(before)
    for name in folders:
        change(name, "dataset", train_samples=None, test_samples=None)
    with pytest.raises(ConfigError, match=r"flexfl differ in more than the seed: the data \(sha256\): "):
        comparison.read(LABELS, SEEDS, folders, ["partition.alpha"])


def test_other_numerics_are_noted(ran: Ran) -> None:
    folders = {f"{label}-s0": ran.folder / f"{label}-s0" for label in LABELS}
    file = RunFile.read(ran.folder / "flexfl-s0" / "run.json")
    file.model_copy(update={"numerics": file.numerics | {"torch": "0.1"}}).write(ran.folder / "flexfl-s0" / "run.json")
    found = comparison.summarise("a", (0,), comparison.read(LABELS, (0,), folders))
    assert "numerics" in tabulate.text(found)


# ----------------------------------------------------------------------------------------------- real processes
@pytest.mark.long
def test_a_stopped_comparison_goes_on(sets: list[str], flexfleet: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The command as people type it, ended by SIGTERM in the middle of its runs."""
    given = [*sets, "rounds.stop=400", "rounds.commit_every=1", "rounds.evaluate_every=200"]
    argv = ["compare", *TWO[:2], "--id", "a", "--jobs", "2", *(word for one in given for word in ("--set", one))]
    command = subprocess.Popen(
        [sys.executable, "-m", "flexfleet.cli", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 300
    while not all(list(Path("runs/a", f"{label}-s0", "rounds").glob("*/COMMITTED")) for label in LABELS):
        assert command.poll() is None, command.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    command.send_signal(signal.SIGTERM)
    out, err = command.communicate(timeout=120)
    assert (command.returncode, out) == (3, ""), err
    assert err.splitlines()[-1] == "error: stopped on request: the same command with --id a --resume goes on"
    assert "exit code 3" in err
    ledgers = [sorted(Path("runs/a", f"{label}-s0", "rounds").iterdir()) for label in LABELS]
    assert all(ledgers) and not list(Path("runs/a").glob("*/result.json"))
    rounds = max(int(ledger[-1].name) for ledger in ledgers) + 2
    short = [*given, f"rounds.stop={rounds}"]
    with caplog.at_level("INFO", "flexfleet"):
        found = flexfleet("compare", *TWO[:2], "--id", "a", "--resume", "--json", sets=short)
    assert found.code == 0, found.err
    assert caplog.text.count("resuming after round") == 2
    for label in LABELS:
        plain = flexfleet("run", "--json", "--run-id", label, sets=[*short, f"algorithm.name={label}"])
        assert plain.json["model_sha256"] == found.json["results"][label]["runs"][0]["model_sha256"]
