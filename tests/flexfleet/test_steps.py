"""Each step as its own program: what it reads, what it writes; chained, they are what `flexfleet run` does."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest

from fl_engine.core.errors import Replaced
from fl_engine.storage.run_lock import Holder
from flexfleet.config import parse
from flexfleet.files.artifacts import Apoz, EvaluationFile, History, PoolFile, RunFile
from flexfleet.pipeline import __main__ as steps
from flexfleet.pipeline.federate import federate
from flexfleet.pipeline.partition import partition
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.resume import Attempt
from tests.harness.processes import refused
from tests.harness.run_folders import flip, rounds_of

Step = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


def scored(folder: Path, run: Path, out: Path) -> tuple[str, ...]:
    """What the step evaluate is given, for a run with the partition and the pool in `folder`."""
    given = {"--run": run, "--partition": folder / "partition", "--pool": folder / "pool", "--out": out}
    return tuple(str(word) for pair in given.items() for word in pair)


@pytest.fixture(scope="module")
def chained(step: Step, quick: Sequence[str], folder: Path) -> dict[str, Any]:
    """All steps, each in a folder of its own, as a graph would start them."""

    def run(*argv: str) -> Any:
        done = step(steps.main, *argv, sets=quick).ok()
        return done

    f = str(folder)
    return {
        "partition": run("partition", "--out", f"{f}/partition"),
        "pretrain": run("pretrain", "--partition", f"{f}/partition", "--out", f"{f}/pretrain"),
        "model_pool": run("model_pool", "--pretrain", f"{f}/pretrain", "--out", f"{f}/pool"),
        "federate": run("federate", "--partition", f"{f}/partition", "--pool", f"{f}/pool", "--out", f"{f}/run"),
        "evaluate": run("evaluate", *scored(folder, folder / "run", folder / "evaluate")),
    }


def test_pool_file_describes_its_models(chained: dict[str, Any], folder: Path) -> None:
    file = PoolFile.read(folder / "pool" / "pool.json")
    assert (file.algorithm, file.model, file.classes, file.input_chw) == ("flexfl", "small_cnn", 10, (1, 8, 8))
    assert [level.name for level in file.levels] == ["M1", "M2'", "M2", "M3'", "M3"]
    assert [level.dispatched for level in file.levels] == [True, False, True, False, True]
    assert all(level.similarity is None for level in file.levels), "nothing to compare with"
    for level, model in zip(file.levels, file.pool(), strict=True):
        assert (model.name, model.params, model.bytes, model.macs) == (
            level.name, level.params, level.bytes, level.macs
        )  # fmt: skip


def test_evaluate_scores_every_level_on_the_test_set(chained: dict[str, Any], folder: Path) -> None:
    found = EvaluationFile.read(folder / "evaluate" / "evaluation.json")
    last = rounds_of(folder / "run")[-1]["metrics"]
    assert (found.rounds, found.test_samples) == (3, 60)
    assert list(found.levels) == ["M1", "M2", "M3"]
    assert (found.avg, found.full) == (last["avg"], last["full"]), "the same model, the same figures"
    assert {name: score.loss for name, score in found.levels.items()} == {
        name: last[f"loss/{name}"] for name in found.levels
    }


def test_evaluate_scores_levels_on_each_clients_distribution(
    chained: dict[str, Any], folder: Path, finished_template: tuple[Path, Any]
) -> None:
    found = EvaluationFile.read(folder / "evaluate" / "evaluation.json")
    assert list(found.local) == list(found.levels)
    for each in found.local.values():
        assert 0 < each.mean <= 1 and 0 < each.sd < 1 and 1 < each.clients <= 6
    for name, histogram in found.local_histogram.items():
        rounded_down = sum(percent * clients for percent, clients in histogram.items()) / found.local[name].clients
        assert rounded_down <= 100 * found.local[name].mean < rounded_down + 1
    assert list(found.local_histogram) == list(found.levels)
    told = {name: each.model_dump() for name, each in found.local.items()}
    assert finished_template[1].json["metrics"]["local"] == told


def test_chained_steps_are_what_run_does(
    chained: dict[str, Any], folder: Path, finished_template: tuple[Path, Any]
) -> None:
    run, done = finished_template
    assert History.read(folder / "run" / "history.json").model_sha256 == done.json["model_sha256"]
    for ours, theirs in (
        ("partition/partition.json", "partition/partition.json"),
        ("partition/partition.safetensors", "partition/partition.safetensors"),
        ("pool/pool.json", "pool/pool.json"),
        ("evaluate/evaluation.json", "evaluation.json"),
        ("run/model.safetensors", "model.safetensors"),
    ):
        assert (folder / ours).read_bytes() == (run / theirs).read_bytes(), ours


@pytest.mark.usefixtures("no_drawings")
def test_report_publishes_as_configured(
    step: Step, chained: dict[str, Any], folder: Path, tmp_path: Path, quick: Sequence[str]
) -> None:
    given = ("partition", folder / "partition"), ("pretrain", folder / "pretrain"), ("pool", folder / "pool")
    argv = [f"--{option}={path}" for option, path in (*given, ("run", folder / "run"))]
    argv += [f"--evaluation={folder / 'evaluate'}", f"--out={tmp_path / 'whole'}"]
    sets = [*quick, "publish.models=true", "publish.onnx=false", "seed=7"]
    step(steps.main, "report", *argv, sets=sets).ok()
    assert sorted(path.name for path in (tmp_path / "whole" / "export").iterdir()) == ["M1", "M2", "M3"]
    kept = parse(RunFile.read(tmp_path / "whole" / "run.json").config)
    assert (kept.publish.models, kept.seed) == (False, 1)


# ---------------------------------------------------------------------------------------- what a step refuses
def test_evaluate_refuses_a_damaged_model(
    step: Step, quick: Sequence[str], chained: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "run", run)
    path = run / "model.safetensors"
    flip(path)
    assert str(path) in refused(step(steps.main, "evaluate", *scored(folder, run, tmp_path / "out"), sets=quick), 4)
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------------------------------- the control, APoZ
def test_reference_gives_the_similarity_of_the_pool(
    step: Step, quick: Sequence[str], chained: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """1 where the proxy prunes as all training data would (FlexFL Sec. IV-C1)."""
    sets, t = [*quick, "pretrain.reference=true"], str(tmp_path)
    assert step(steps.main, "pretrain", "--partition", str(folder / "partition"), "--out", t, sets=sets).code == 0
    apoz = Apoz.read(tmp_path / "apoz.json")
    assert apoz.reference is not None
    assert len(apoz.reference) == len(apoz.layers)
    assert apoz.layers == Apoz.read(folder / "pretrain" / "apoz.json").layers, "it moves nothing else"
    assert step(steps.main, "model_pool", "--pretrain", t, "--out", t, sets=sets).code == 0
    levels = PoolFile.read(tmp_path / "pool.json").levels
    assert levels[-1].similarity == 1, "nothing of the full model is pruned"
    assert all(level.similarity is not None and 0 < level.similarity <= 1 for level in levels)
    assert any(level.similarity < 1 for level in levels if level.similarity is not None)
    plain = [level.model_copy(update={"similarity": None}) for level in levels]
    assert tuple(plain) == PoolFile.read(folder / "pool" / "pool.json").levels


# ------------------------------------------------------------------------------------------------ artifacts
def test_runs_of_several_seeds_can_have_one_partition(tmp_path: Path) -> None:
    cuts = []
    for seed in (1, 2):
        resolved = Resolved.load(None, [f"seed={seed}", "partition.seed=5", "dataset.train_samples=600"])
        partition(resolved, tmp_path / str(seed))
        cuts.append((tmp_path / str(seed) / "partition.json").read_bytes())
    assert cuts[0] == cuts[1], "the samples too are chosen by partition.seed"
    partition(Resolved.load(None, ["seed=5", "dataset.train_samples=600"]), tmp_path / "plain")
    assert (tmp_path / "plain" / "partition.json").read_bytes() == cuts[0]


# -------------------------------------------------------------------------------------- a ledger that others reach
@pytest.fixture
def rounds(step: Step, chained: dict[str, Any], folder: Path, quick: Sequence[str]) -> Step:
    """The rounds of a chained run, in a folder and with settings of one's own."""

    def run(out: Path, *argv: str, sets: Sequence[str] = ()) -> Any:
        given = ("--partition", f"{folder}/partition", "--pool", f"{folder}/pool", "--out", str(out), *argv)
        return step(steps.main, "federate", *given, sets=[*quick, "rounds.commit_every=1", *sets])

    return run


def test_fewer_rounds_than_committed_are_refused(rounds: Step, tmp_path: Path, mlflow_uri: str) -> None:
    sets = [f"tracking.mlflow={mlflow_uri}"]
    assert rounds(tmp_path / "a", sets=[*sets, "rounds.stop=2"]).code == 0
    record = (tmp_path / "a" / "run.json").read_bytes()
    for damaged, more in (
        (["--discard-damaged"], ["rounds.stop=1"]),
        ([], ["rounds.stop=2", "rounds.stop_simulated_s=0.001"]),
    ):
        done = rounds(tmp_path / "a", "--resume", *damaged, sets=[*sets, *more])
        assert done.code == 2
        assert (tmp_path / "a" / "run.json").read_bytes() == record
        (run,) = mlflow.MlflowClient(mlflow_uri).search_runs(["1"])
        assert run.info.status == "FINISHED"
    (tmp_path / "a" / "rounds" / "00001" / "state.safetensors").write_bytes(b"")
    done = rounds(tmp_path / "a", "--resume", "--discard-damaged", sets=[*sets, "rounds.stop=1"])
    assert done.code == 0, "what is damaged does not count"


def test_shared_ledger_has_a_lock_and_is_resumable(rounds: Step, tmp_path: Path, folder: Path) -> None:
    ledger, sets = tmp_path / "ledger" / "a", [f"run.remote={tmp_path}/ledger"]
    assert rounds(tmp_path / "one" / "a", sets=sets).code == 0
    holder = Holder.model_validate_json((ledger / "lease" / "00001.json").read_bytes())
    assert holder.released and (ledger / "model.safetensors").exists()
    done = rounds(tmp_path / "other" / "a", sets=sets)
    assert done.code == 2
    (path,) = (ledger / "lease").glob("*.json")
    living = holder.model_copy(update={"released": False, "pid": 1})
    path.write_text(living.model_dump_json())
    with ThreadPoolExecutor(1) as others:
        later = living.model_copy(update={"heartbeats": 1}).model_dump_json()
        others.submit(lambda: (time.sleep(1), path.write_text(later)))
        done = rounds(tmp_path / "other" / "a", "--resume", sets=sets)
    assert done.code == 6
    path.write_text(holder.model_dump_json())
    assert rounds(tmp_path / "other" / "a", "--resume", sets=sets).code == 0
    model = (tmp_path / "other" / "a" / "model.safetensors").read_bytes()
    assert model == (folder / "run" / "model.safetensors").read_bytes()


def test_one_that_was_replaced_leaves_the_run_in_mlflow_alone(
    rounds: Step, folder: Path, quick: Sequence[str], tmp_path: Path, mlflow_uri: str
) -> None:
    sets, ended = [f"run.remote={tmp_path}/ledger", f"tracking.mlflow={mlflow_uri}"], list[Any]()

    def replaced(number: int, *_: Any) -> None:
        """Another process runs all rounds while the second round of the first process is not committed."""
        if number == 2:
            ended.append(rounds(tmp_path / "other" / "a", "--resume", sets=sets))

    watcher: Any = SimpleNamespace(update=lambda *_: None, round=replaced)
    resolved = Resolved.load(None, [*quick, "rounds.commit_every=1", *sets])
    with pytest.raises(Replaced):
        federate(resolved, folder / "partition", folder / "pool", tmp_path / "one" / "a", Attempt(watcher=watcher))
    assert ended[0].code == 0, ended[0].err
    client = mlflow.MlflowClient(tracking_uri=mlflow_uri)
    run = client.get_run(str(RunFile.read(tmp_path / "other" / "a" / "run.json").mlflow_run_id))
    assert run.info.status == "FINISHED"
    assert [m.step for m in client.get_metric_history(run.info.run_id, "seconds_round")] == [1, 2, 3]
