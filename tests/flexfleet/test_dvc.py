"""`dvc repro` runs what a change concerns, and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from dvc.repo import Repo

from fl_engine.algorithms.training import Training
from fl_engine.core.errors import Stopped
from fl_engine.core.fields import Moves
from fl_engine.preparation import PREPARATIONS
from fl_engine.rounds import loop
from flexfleet.config import Config, flatten, moves
from flexfleet.files.artifacts import History
from flexfleet.pipeline import __main__ as steps
from flexfleet.pipeline import pretrain, retry
from flexfleet.pipeline.prepare import Resolved
from tests.harness.imports import ROOT, reach
from tests.harness.prepared import prepare

STAGES = ["partition", "pretrain", "model_pool", "federate", "evaluate", "report"]


# -------------------------------------------------------------------------------------------------- dvc repro
def stages() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    return found


def lacks(names: Iterable[str], listed: Iterable[str], mark: str) -> list[str]:
    within = tuple(f"{each}{mark}" for each in listed)
    return sorted(name for name in names if not f"{name}{mark}".startswith(within))


UNLISTED = {"schema_version": "it has one value"}


def test_stages_depend_on_every_parameter_that_changes_their_output() -> None:
    names = [name for name in flatten(Config()) if name not in UNLISTED]
    wanted = {
        "federate": [name for name in names if moves(name) not in (Moves.EXECUTION, Moves.PLACE)],
        "partition": pretrain.HELD_OUT,
        "pretrain": [name for kind in PREPARATIONS.values() for name in kind.settings],
        "report": [name for name in names if name.startswith("publish.")],
    }
    for stage, expected in wanted.items():
        assert expected and lacks(expected, stages()[stage]["params"], ".") == [], stage
    assert "--config params.yaml" in stages()["report"]["cmd"]


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_depends_on_all_code_that_it_imports(name: str) -> None:
    stage = stages()[name]
    module = steps.STEPS[stage["cmd"].split()[3]][0].partition(".")[0]
    files = {file for file in reach([f"flexfleet.pipeline.{module}"]) if (ROOT / file).read_text()}
    assert f"flexfleet/pipeline/{module}.py" in files
    assert lacks(files, stage["deps"], "/") == []


def edit(path: Path, changes: dict[str, Any]) -> None:
    values = yaml.safe_load(path.read_text())
    for section, value in changes.items():
        if isinstance(value, dict):
            values[section].update(value)
        else:
            values[section] = value
    path.write_text(yaml.safe_dump(values, sort_keys=False))


def ran(checkout: Repo) -> list[str]:
    return [stage.name for stage in checkout.reproduce()]


def changed(checkout: Repo) -> set[str]:
    return {name for name in checkout.status() if name in STAGES}


def check_shown(checkout: Repo) -> None:
    """Check what `dvc metrics show` and `dvc plots show` read from the outputs."""
    metrics = checkout.metrics.show()[""]["data"]["work/evaluate/metrics.json"]["data"]
    assert len(metrics) == 10 and {"avg", "full", "bytes_down", "bytes_up", "waste", "seconds_simulated"} <= set(
        metrics
    )
    data = checkout.plots.show(onerror=raise_again)["workspace"]["sources"]["data"]
    curves, samples = (data[f"work/evaluate/{name}.json"]["data"] for name in ("rounds", "samples"))
    assert [row["round"] for row in curves] == [1, 2] and metrics["avg"] == curves[-1]["avg"]
    assert curves[-1]["mb"] == pytest.approx((metrics["bytes_down"] + metrics["bytes_up"]) / 1e6)
    right = [row["actual"] == row["predicted"] for row in samples["samples"]]
    assert sum(right) / len(right) == pytest.approx(metrics["full"])


def raise_again(result: Any, error: Exception, **_: Any) -> None:
    raise error


def test_repro_runs_what_a_change_concerns(checkout: Repo) -> None:
    root = Path.cwd()
    assert ran(checkout) == STAGES
    first = History.read(root / "work" / "federate" / "history.json")
    assert (root / "work" / "report" / "report.html").is_file()
    assert not (root / "work" / "federate.unfinished").exists()
    check_shown(checkout)

    assert ran(checkout) == []

    step = root / "flexfleet" / "pipeline" / "evaluate.py"
    step.write_text(f"{step.read_text()}# edited\n")
    assert ran(checkout) == STAGES

    edit(root / "params.yaml", {"training": {"lr": 0.01}})
    assert ran(checkout) == ["federate", "evaluate", "report"]
    second = History.read(root / "work" / "federate" / "history.json")
    assert len(second.rounds) == 2 and second.model_sha256 != first.model_sha256

    edit(root / "params.yaml", {"tracking": {"experiment": "another"}})
    assert changed(checkout) == set()
    edit(root / "params.yaml", {"publish": {"models": True, "onnx": False}})
    assert ran(checkout) == ["report"]
    assert (root / "work" / "report" / "export" / "M1" / "model.safetensors").is_file()
    edit(root / "params.yaml", {"run": {"precision": "bf16"}})
    assert changed(checkout) == {"federate"}
    edit(root / "params.yaml", {"codec": {"up": {"name": "half"}}})
    assert changed(checkout) == {"model_pool", "federate"}
    edit(root / "params.yaml", {"seed": 2})
    assert changed(checkout) == {"partition", "pretrain", "model_pool", "federate", "evaluate"}


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_fails_if_its_parameters_changed_while_it_ran(
    name: str, step: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def meanwhile(changes: dict[str, Any]) -> Any:
        def work(*given: Any) -> Any:
            edit(Path("params.yaml"), changes)

        monkeypatch.setattr(import_module(f"flexfleet.pipeline.{module}"), function, work)
        return step(steps.main, *words)

    words = stages()[name]["cmd"].split()[3:]
    module, _, function = steps.STEPS[words[0]][0].partition(".")
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    if name != "report":
        assert meanwhile({"tracking": {"experiment": "another"}}).code == 0
        failed = meanwhile({"training": {"lr": 0.1}})
        told = "training.lr: 0.05 -> 0.1"
    else:
        failed = meanwhile({"publish": {"models": True}})
        told = "publish.models: False -> True"
    assert failed.code == 2
    assert told in failed.err and f"work/{name}" in failed.err


# --------------------------------------------------------------------------------- rounds that DVC interrupts
@pytest.fixture
def job(tmp_path: Path, quick: Sequence[str]) -> tuple[Config, Path, Path]:
    """A configuration, its partition and its pool."""
    resolved = Resolved.load(ROOT / "params.yaml", quick)
    prepare(resolved, tmp_path)
    return resolved.config, tmp_path / "partition", tmp_path / "pool"


def interrupt_after(monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    """Every run stops when it has committed this many rounds more."""
    original = loop.run_round
    left = rounds

    def stopping(*args: Any) -> Any:
        nonlocal left
        if left == 0:
            raise Stopped("as by Ctrl-C")
        left -= 1
        return original(*args)

    monkeypatch.setattr(loop, "run_round", stopping)


def test_interrupted_rounds_are_resumed_by_their_configuration(
    tmp_path: Path, job: tuple[Config, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, parts, pool = job
    out, unfinished = tmp_path / "federate", tmp_path / "federate.unfinished"
    whole = History.read(retry.federate_for_dvc(Resolved.of(config), parts, pool, tmp_path / "whole") / "history.json")

    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        with pytest.raises(Stopped):
            retry.federate_for_dvc(Resolved.of(config), parts, pool, out)
    (left,) = unfinished.iterdir()
    assert not out.exists() and not (left / "history.json").exists()

    other = config.model_copy(update={"training": Training(fraction=0.5, epochs=1, lr=0.02)})
    lower = config.model_copy(update={"rounds": config.rounds.model_copy(update={"stop": 1})})
    for changed_config, stop in ((other, 3), (lower, 1)):
        found = retry.federate_for_dvc(Resolved.of(changed_config), parts, pool, tmp_path / "federate")
        assert len(History.read(found / "history.json").rounds) == stop
        assert list(unfinished.iterdir()) == [left]
        shutil.rmtree(out)  # as DVC does before it runs a stage

    with monkeypatch.context() as patch:
        interrupt_after(patch, 1)  # one is all that is missing
        found = retry.federate_for_dvc(Resolved.of(config), parts, pool, out)
    assert History.read(found / "history.json").model_sha256 == whole.model_sha256
    assert not unfinished.exists()
    assert sorted(p.name for p in out.iterdir()) == sorted(retry.OUTCOME)


def test_identity_depends_on_the_content_of_named_files(
    job: tuple[Config, Path, Path], quick: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    trace, network = tmp_path / "trace.csv", tmp_path / "of_identity.py"
    trace.write_text("client,time,online\n")
    network.write_text("from fl_engine.models import SmallCNN\n")
    _, parts, pool = job

    def name(*sets: str) -> str:
        return retry.identity(Resolved.load(ROOT / "params.yaml", [*quick, *sets]), parts, pool)

    for file, line, given in (
        (trace, "0,0,1\n", f"fleet.trace={trace}"),
        (network, "# edited\n", "model.name=of_identity:SmallCNN"),
    ):
        before = name(given)
        assert name(given) == before
        file.write_text(f"{file.read_text()}{line}")
        assert name(given) != before
