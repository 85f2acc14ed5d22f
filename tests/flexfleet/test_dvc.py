"""params.yaml says what the defaults are; `dvc repro` runs what a change concerns, and nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from dvc.repo import Repo

from fl_engine.algorithms import FlexFL
from fl_engine.algorithms.training import Training
from fl_engine.core.errors import Stopped
from fl_engine.core.fields import Moves
from fl_engine.models import SmallCNN
from fl_engine.preparation import PREPARATIONS
from fl_engine.rounds import loop
from flexfleet.config import Config, flatten, load_config, moves
from flexfleet.files.artifacts import History
from flexfleet.pipeline import model_pool, partition, pretrain, retry, share
from flexfleet.pipeline.prepare import Resolved
from tests.harness.imports import ROOT, reach

STAGES = ["partition", "pretrain", "model_pool", "federate", "evaluate", "report"]


# ------------------------------------------------------------------------------------------------ params.yaml
def test_params_are_the_defaults() -> None:
    assert load_config(ROOT / "params.yaml") == Config()


def test_params_list_every_parameter_in_order() -> None:
    def names(value: Any) -> Any:
        return [(k, names(v)) for k, v in value.items()] if isinstance(value, dict) else None

    listed = yaml.safe_load((ROOT / "params.yaml").read_text())
    assert names(listed) == names(Config().model_dump(mode="json"))


@pytest.mark.parametrize(("section", "kind"), [("algorithm", FlexFL), ("model", SmallCNN)])
def test_options_in_comments_are_the_defaults_too(section: str, kind: Any) -> None:
    text = (ROOT / "params.yaml").read_text()
    part = re.search(rf"^{section}:\n(?:  .*\n)+", text, re.MULTILINE)
    assert part is not None
    listed = yaml.safe_load(re.sub(r"^  # (?=\w+: )", "  ", part[0], flags=re.MULTILINE))[section]
    own = [f for f in fields(kind) if f.name not in ("training", "input_shape", "outputs")]
    start = ["init"] if section == "model" else []  # every network's, beside its own options
    assert list(listed) == ["name", *start, *(f.name for f in own)]
    for f in own:
        found = listed[f.name]
        if is_dataclass(f.default):  # {name: average} stands for Average()
            assert found == {"name": getattr(f.default, "name")}  # noqa: B009 - any of them
        else:
            assert found == (list(f.default) if isinstance(f.default, tuple) else f.default)


# -------------------------------------------------------------------------------------------------- dvc repro
def test_every_stage_starts_in_a_new_interpreter() -> None:
    assert list(stages()) == STAGES
    for stage in stages().values():
        python, *module = stage["cmd"].split()[:3]
        assert python == "python"
        done = subprocess.run([sys.executable, *module, "--help"], capture_output=True, text=True)
        assert done.returncode == 0 and "--out" in done.stdout, done.stderr


def stages() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    return found


def test_dvc_keeps_all_that_a_stage_writes() -> None:
    written = {}
    for stage in stages().values():
        for each in (*stage["outs"], *stage.get("metrics", ())):
            written |= each if isinstance(each, dict) else {each: {}}
    assert "work/evaluate/evaluation.json" in written and "work/report" in written
    assert [name for name, options in written.items() if not options.get("cache", True)] == []


def lacks(names: Iterable[str], listed: Iterable[str], mark: str) -> list[str]:
    within = tuple(f"{each}{mark}" for each in listed)
    return sorted(name for name in names if not f"{name}{mark}".startswith(within))


UNLISTED = {"schema_version": "it has one value"}


def test_the_rounds_depend_on_every_parameter_that_changes_them() -> None:
    nothing = (Moves.EXECUTION, Moves.PLACE)
    names = [name for name in flatten(Config()) if moves(name) not in nothing and name not in UNLISTED]
    assert lacks(names, stages()["federate"]["params"], ".") == []


def test_partition_stage_depends_on_held_out_samples() -> None:
    assert lacks(share.HELD_OUT, stages()["partition"]["params"], ".") == []


def test_pretraining_depends_on_what_preparations_are_given() -> None:
    names = [name for kind in PREPARATIONS.values() for name in kind.settings]
    assert "training.epochs" in names
    assert lacks(names, stages()["pretrain"]["params"], ".") == []


def test_the_report_depends_on_what_is_published_and_is_given_it() -> None:
    report = stages()["report"]
    names = [name for name in flatten(Config()) if name.startswith("publish.")]
    assert names and lacks(names, report["params"], ".") == []
    assert "--config params.yaml" in report["cmd"]


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_depends_on_all_code_that_it_imports(name: str) -> None:
    stage = stages()[name]
    module = stage["cmd"].split()[2]
    files = {file for file in reach([module]) if (ROOT / file).read_text()}
    assert f"{module.replace('.', '/')}.py" in files
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


def test_repro_runs_what_a_change_concerns(checkout: Repo) -> None:
    root = Path.cwd()
    assert ran(checkout) == STAGES
    first = History.read(root / "work" / "federate" / "history.json")
    assert (root / "work" / "report" / "report.html").is_file()
    assert not (root / "work" / "federate.unfinished").exists()

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
    edit(root / "params.yaml", {"seed": 1})
    assert changed(checkout) == {"partition", "pretrain", "model_pool", "federate", "evaluate"}


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_fails_if_its_parameters_changed_while_it_ran(
    name: str, step: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def meanwhile(changes: dict[str, Any]) -> Any:
        def work(*given: Any) -> Any:
            edit(Path("params.yaml"), changes)
            if callable(given[-1]):
                given[-1]()  # the check, where the work calls it itself

        monkeypatch.setattr(module, {"federate": "federate_for_dvc", "report": "finish"}.get(name, name), work)
        monkeypatch.setattr(module.terminal, "show", lambda _: None)
        return step(module.main, *command[3:])

    command = stages()[name]["cmd"].split()
    module: Any = import_module(command[2])
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
    partition.partition(resolved, tmp_path / "partition")
    pretrain.pretrain(resolved, tmp_path / "partition", tmp_path / "pretrain")
    model_pool.model_pool(resolved, tmp_path / "pretrain", tmp_path / "pool")
    return resolved.config, tmp_path / "partition", tmp_path / "pool"


def interrupt_after(monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    """Every run stops when it has committed this many rounds more."""
    original = loop.play
    left = rounds

    def stopping(*args: Any) -> Any:
        nonlocal left
        if left == 0:
            raise Stopped("as by Ctrl-C")
        left -= 1
        return original(*args)

    monkeypatch.setattr(loop, "play", stopping)


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


@pytest.mark.parametrize("files", [0, 3])
def test_kill_while_rounds_are_deleted_blocks_no_later_run(
    tmp_path: Path, job: tuple[Config, Path, Path], monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    config, parts, pool = job
    out, unfinished = tmp_path / "federate", tmp_path / "federate.unfinished"

    def killed(folder: Path) -> None:
        for path in sorted((p for p in folder.rglob("*") if p.is_file()), reverse=True)[:files]:
            path.unlink()
        raise Stopped("as by a kill")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(Stopped):
            retry.federate_for_dvc(Resolved.of(config), parts, pool, out)
    first = History.read(out / "history.json").model_sha256
    shutil.rmtree(out)  # as DVC does before it runs a stage
    found = retry.federate_for_dvc(Resolved.of(config), parts, pool, out)
    assert History.read(found / "history.json").model_sha256 == first
    assert not unfinished.exists()


def test_the_identity_depends_on_what_decides_the_model(job: tuple[Config, Path, Path]) -> None:
    config, parts, pool = job

    def name(**changes: Any) -> str:
        return retry.identity(Resolved.of(config.model_copy(update=changes)), parts, pool)

    elsewhere = config.tracking.model_copy(update={"mlflow": "http://here:5000"})
    quicker = config.rounds.model_copy(update={"commit_every": 7})
    assert name(tracking=elsewhere, rounds=quicker) == name()
    assert name(seed=1) != name()
    before = name()
    (pool / "pool.json").write_text((pool / "pool.json").read_text().replace('"M1"', '"N1"'))
    assert name() != before


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
