"""Each step as its own program: what it reads, what it writes; chained, they are what `flexfleet run` does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlflow
import pytest

from fl_engine.core.errors import IntegrityError
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.lease import Holder
from flexfleet.config import parse
from flexfleet.files.artifacts import Apoz, EvaluationFile, History, PoolFile, RunFile
from flexfleet.pipeline import evaluate as evaluate_module
from flexfleet.pipeline import federate as federate_module
from flexfleet.pipeline import model_pool as model_pool_module
from flexfleet.pipeline import partition as partition_module
from flexfleet.pipeline import pretrain as pretrain_module
from flexfleet.pipeline import report as gathering
from flexfleet.pipeline.prepare import Resolved

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

    def run(module: Any, *argv: str, sets: Sequence[str] = quick) -> Any:
        done = step(module.main, *argv, sets=sets)
        assert done.code == 0, done.err
        return done

    f = str(folder)
    return {
        "partition": run(partition_module, "--out", f"{f}/partition"),
        "pretrain": run(pretrain_module, "--partition", f"{f}/partition", "--out", f"{f}/pretrain"),
        "model_pool": run(model_pool_module, "--pretrain", f"{f}/pretrain", "--out", f"{f}/pool"),
        "federate": run(federate_module, "--partition", f"{f}/partition", "--pool", f"{f}/pool", "--out", f"{f}/run"),
        "evaluate": run(evaluate_module, *scored(folder, folder / "run", folder / "evaluate")),
    }


def test_the_pool_file_says_all_about_its_models(chained: dict[str, Any], folder: Path) -> None:
    file = PoolFile.read(folder / "pool" / "pool.json")
    assert (file.algorithm, file.model, file.classes, file.input_chw) == ("flexfl", "small_cnn", 10, (1, 8, 8))
    assert [level.name for level in file.levels] == ["M1", "M2'", "M2", "M3'", "M3"]
    assert [level.dispatched for level in file.levels] == [True, False, True, False, True]
    assert all(level.similarity is None for level in file.levels), "nothing to compare with"
    for level, model in zip(file.levels, file.pool(), strict=True):
        assert (model.name, model.params, model.bytes, model.macs) == (
            level.name, level.params, level.bytes, level.flops
        )  # fmt: skip


def test_evaluate_scores_every_level_on_the_test_set(chained: dict[str, Any], folder: Path) -> None:
    found = EvaluationFile.read(folder / "evaluate" / "evaluation.json")
    last = History.read(folder / "run" / "history.json").rounds[-1]["metrics"]
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
def test_the_last_step_publishes_what_it_is_asked_for(
    step: Step, chained: dict[str, Any], folder: Path, tmp_path: Path, quick: Sequence[str]
) -> None:
    given = ("partition", folder / "partition"), ("pretrain", folder / "pretrain"), ("pool", folder / "pool")
    argv = [f"--{option}={path}" for option, path in (*given, ("run", folder / "run"))]
    argv += [f"--evaluation={folder / 'evaluate'}", f"--out={tmp_path / 'whole'}"]
    sets = [*quick, "publish.models=true", "publish.onnx=false", "seed=7"]
    done = step(gathering.main, *argv, sets=sets)
    assert done.code == 0, done.err
    assert sorted(path.name for path in (tmp_path / "whole" / "export").iterdir()) == ["M1", "M2", "M3"]
    kept = parse(RunFile.read(tmp_path / "whole" / "run.json").config)
    assert (kept.publish.models, kept.seed) == (False, 0)


# ---------------------------------------------------------------------------------------- what a step refuses
def test_a_step_without_the_one_before_says_which(step: Step, quick: Sequence[str], tmp_path: Path) -> None:
    t = str(tmp_path)
    for module, argv, said in (
        (pretrain_module, ("--partition", t, "--out", t), "partition.json"),
        (model_pool_module, ("--pretrain", t, "--out", t), "apoz.json"),
        (federate_module, ("--partition", t, "--pool", t, "--out", t), "partition.json"),
        (evaluate_module, ("--run", t, "--partition", t, "--pool", t, "--out", t), "pool.json"),
    ):
        done = step(module.main, *argv, sets=quick)
        assert done.code in (2, 4), module.__name__
        assert said in done.err


def test_a_partition_of_other_data_is_refused(
    step: Step, quick: Sequence[str], chained: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    sets = [*quick, "dataset.train_samples=241"]
    done = step(pretrain_module.main, "--partition", str(folder / "partition"), "--out", str(tmp_path), sets=sets)
    assert done.code == 2
    assert "other data" in done.err


def _copy(folder: Path, to: Path) -> Path:
    to.mkdir()
    for name in ("history.json", "model.safetensors"):
        (to / name).write_bytes((folder / "run" / name).read_bytes())
    return to


def test_evaluate_refuses_a_damaged_model(
    step: Step, quick: Sequence[str], chained: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    run = _copy(folder, tmp_path / "run")
    path = run / "model.safetensors"
    value = path.read_bytes()
    path.write_bytes(value[:-1] + bytes([value[-1] ^ 1]))
    done = step(evaluate_module.main, *scored(folder, run, tmp_path / "out"), sets=quick)
    assert done.code == 4
    assert str(path) in done.err
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------------------------------- the control, APoZ
def test_a_reference_gives_the_pools_similarity(
    step: Step, quick: Sequence[str], chained: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """1 where the proxy prunes as all training data would (FlexFL Sec. IV-C1)."""
    sets, t = [*quick, "pretrain.reference=true"], str(tmp_path)
    assert step(pretrain_module.main, "--partition", str(folder / "partition"), "--out", t, sets=sets).code == 0
    apoz = Apoz.read(tmp_path / "apoz.json")
    assert apoz.reference is not None
    assert len(apoz.reference) == len(apoz.layers)
    assert apoz.layers == Apoz.read(folder / "pretrain" / "apoz.json").layers, "it moves nothing else"
    assert step(model_pool_module.main, "--pretrain", t, "--out", t, sets=sets).code == 0
    levels = PoolFile.read(tmp_path / "pool.json").levels
    assert levels[-1].similarity == 1, "nothing of the full model is pruned"
    assert all(level.similarity is not None and 0 < level.similarity <= 1 for level in levels)
    assert any(level.similarity < 1 for level in levels if level.similarity is not None)
    plain = [level.model_copy(update={"similarity": None}) for level in levels]
    assert tuple(plain) == PoolFile.read(folder / "pool" / "pool.json").levels


# ------------------------------------------------------------------------------------------------ artifacts
def test_artifacts_are_read_strictly(tmp_path: Path) -> None:
    path = Apoz(layers=(), proxy_samples=3).write(tmp_path / "new" / "apoz.json")
    assert Apoz.read(path) == Apoz(layers=(), proxy_samples=3)
    value = json.loads(path.read_bytes())
    for wrong in (value | {"more": 1}, value | {"schema_version": 2}, {"proxy_samples": 3}, []):
        path.write_text(json.dumps(wrong))
        with pytest.raises(IntegrityError, match=str(path)):
            Apoz.read(path)
    path.unlink()
    with pytest.raises(IntegrityError, match=str(path)):
        Apoz.read(path)


def test_runs_of_several_seeds_can_have_one_partition(tmp_path: Path) -> None:
    cuts = []
    for seed in (1, 2):
        resolved = Resolved.load(None, [f"seed={seed}", "partition.seed=5", "dataset.train_samples=600"])
        partition_module.partition(resolved, tmp_path / str(seed))
        cuts.append((tmp_path / str(seed) / "partition.json").read_bytes())
    assert cuts[0] == cuts[1], "the samples too are chosen by partition.seed"
    partition_module.partition(Resolved.load(None, ["seed=5", "dataset.train_samples=600"]), tmp_path / "plain")
    assert (tmp_path / "plain" / "partition.json").read_bytes() == cuts[0]


# -------------------------------------------------------------------------------------- a ledger that others reach
@pytest.fixture
def rounds(step: Step, chained: dict[str, Any], folder: Path, quick: Sequence[str]) -> Step:
    """The rounds of a chained run, in a folder and with settings of one's own."""

    def run(out: Path, *argv: str, sets: Sequence[str] = ()) -> Any:
        given = ("--partition", f"{folder}/partition", "--pool", f"{folder}/pool", "--out", str(out), *argv)
        return step(federate_module.main, *given, sets=[*quick, "rounds.commit_every=1", *sets])

    return run


def run_in_mlflow(uri: str, out: Path) -> Any:
    run_id = RunFile.read(out / "run.json").mlflow_run_id
    assert run_id is not None
    return mlflow.MlflowClient(tracking_uri=uri).get_run(run_id)


def test_fewer_rounds_than_are_committed_change_nothing(rounds: Step, tmp_path: Path, mlflow_uri: str) -> None:
    sets = [f"tracking.mlflow={mlflow_uri}"]
    assert rounds(tmp_path / "a", sets=[*sets, "rounds.stop=2"]).code == 0
    record = (tmp_path / "a" / "run.json").read_bytes()
    for damaged, more, said in (
        (["--discard-damaged"], ["rounds.stop=1"], "rounds.stop = 1, but 2 rounds are committed: a run cannot go back"),
        ([], ["rounds.stop=2", "rounds.stop_simulated_s=0.001"], "passes in round 1, but 2 rounds are committed"),
    ):
        done = rounds(tmp_path / "a", "--resume", *damaged, sets=[*sets, *more])
        assert done.code == 2 and said in done.err
        assert (tmp_path / "a" / "run.json").read_bytes() == record
        assert run_in_mlflow(mlflow_uri, tmp_path / "a").info.status == "FINISHED"
    (tmp_path / "a" / "rounds" / "00001" / "state.safetensors").write_bytes(b"")
    done = rounds(tmp_path / "a", "--resume", "--discard-damaged", sets=[*sets, "rounds.stop=1"])
    assert done.code == 0, "what is damaged does not count"


def test_shared_ledger_has_a_lease_and_is_resumable(rounds: Step, tmp_path: Path, folder: Path) -> None:
    ledger, sets = tmp_path / "ledger" / "a", [f"run.remote={tmp_path}/ledger"]
    assert rounds(tmp_path / "one" / "a", sets=sets).code == 0
    holder = Holder.model_validate_json((ledger / "lease" / "00001.json").read_bytes())
    assert holder.released and (ledger / "model.safetensors").exists()
    done = rounds(tmp_path / "other" / "a", sets=sets)
    assert done.code == 2 and "holds a run already: go on with --resume" in done.err
    (path,) = (ledger / "lease").glob("*.json")
    living = holder.model_copy(update={"released": False, "pid": 1})
    path.write_text(living.model_dump_json())
    with ThreadPoolExecutor(1) as others:
        later = living.model_copy(update={"beats": 1}).model_dump_json()
        others.submit(lambda: (time.sleep(1), path.write_text(later)))
        done = rounds(tmp_path / "other" / "a", "--resume", sets=sets)
    assert done.code == 6 and "is being run by process 1" in done.err
    path.write_text(holder.model_dump_json())
    assert rounds(tmp_path / "other" / "a", "--resume", sets=sets).code == 0
    model = (tmp_path / "other" / "a" / "model.safetensors").read_bytes()
    assert model == (folder / "run" / "model.safetensors").read_bytes()


def test_one_that_was_replaced_leaves_the_run_in_mlflow_alone(
    rounds: Step, tmp_path: Path, mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = [f"run.remote={tmp_path}/ledger", f"tracking.mlflow={mlflow_uri}"]
    commit, ended = Checkpoints.commit, list[Any]()

    def paused(self: Checkpoints, round: int, *given: Any) -> None:
        if round == 1 and not ended:
            ended.append(None)
            ended.append(rounds(tmp_path / "other" / "a", "--resume", sets=sets))
        commit(self, round, *given)

    monkeypatch.setattr(Checkpoints, "commit", paused)
    done = rounds(tmp_path / "one" / "a", sets=sets)
    assert ended[1].code == 0, ended[1].err
    assert done.code == 3 and "has taken over" in done.err
    client = mlflow.MlflowClient(tracking_uri=mlflow_uri)
    run = client.get_run(str(RunFile.read(tmp_path / "other" / "a" / "run.json").mlflow_run_id))
    assert run.info.status == "FINISHED"
    assert [m.step for m in client.get_metric_history(run.info.run_id, "seconds_round")] == [1, 2, 3]
