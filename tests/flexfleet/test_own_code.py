"""`run.code`: one's own package as a wheel in the run's folder, from which every process imports."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import flexfleet as ff
from fl_engine.storage import code
from fl_engine.storage.store import sha256
from flexfleet.config.dotted import parse_sets
from flexfleet.files.artifacts import RunFile
from flexfleet.pipeline import retry
from flexfleet.pipeline.evaluate import evaluate
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.run import finish
from tests.harness.own_package import NAME, SETS, write
from tests.harness.prepared import prepare


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_drawings: None) -> Iterator[None]:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield
    code.disable()
    code.disable(NAME)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return write(tmp_path / "source")


@pytest.fixture
def run(flexfleet: Any, quick: Sequence[str], package: Path) -> Callable[..., Any]:
    def started(run_id: str, *sets: str, status: int = 0, more: Sequence[str] = ()) -> Any:
        given = [*quick, *SETS, f"run.code={package}", *sets]
        done = flexfleet("run", "--json", "--run-id", run_id, *more, sets=given)
        assert done.code == status, done.err
        return done.err if status else done.json["model_sha256"]

    return started


def record(run_id: str) -> RunFile:
    return RunFile.read(Path("runs") / run_id / "run.json")


def test_every_process_imports_from_the_wheel_of_the_run(
    run: Any, flexfleet: Any, quick: Sequence[str], package: Path
) -> None:
    here, there = run("here"), run("there", "run.backend=processes", "run.devices=[cpu, cpu]")
    assert here == there
    wheel = code.pack(package)
    for name in ("here", "there"):
        assert record(name).code_sha256 == sha256(wheel)
        assert (Path("runs") / name / "code" / f"{sha256(wheel)}.whl").read_bytes() == wheel
    (package / "factor.txt").write_text("1.0\n")
    assert run("other") != here
    plain = flexfleet("run", "--json", "--run-id", "p", sets=[*quick, "algorithm.name=all_large", SETS[1]])
    assert plain.json["model_sha256"] == run("again"), "a factor of 1 is the method that it comes from"
    assert record("p").code_sha256 is None


def test_steps_that_write_folders_of_their_own_hand_on_the_wheel(
    package: Path, quick: Sequence[str], tmp_path: Path
) -> None:
    resolved = Resolved.load(None, [*quick, *SETS, f"run.code={package}", "rounds.stop=1"])
    prepare(resolved, tmp_path)
    parts, before, pool, scores = (tmp_path / name for name in ("partition", "pretrain", "pool", "evaluation"))
    run = retry.federate_for_dvc(resolved, parts, pool, tmp_path / "federate")
    evaluate(resolved, run, parts, pool, scores)
    found = finish(resolved, run, parts, before, pool, scores, tmp_path / "whole")
    assert found.status == "finished"
    (wheel,) = (tmp_path / "whole" / "code").iterdir()
    assert wheel.name == f"{sha256(code.pack(package))}.whl"


def test_an_objective_of_the_package(run: Any) -> None:
    sets = (f"training.objective={NAME}.loss:smooth",)
    assert run("a", *sets) == run("b", *sets, "run.backend=processes") != run("c")


def test_changed_source_does_not_resume(run: Any, package: Path, flexfleet: Any, quick: Sequence[str]) -> None:
    whole = run("whole")
    run("a", "rounds.stop=1")
    run("b", "rounds.stop=1")
    (package / "mine.py").write_text((package / "mine.py").read_text() + "\n# a remark\n")
    before, now = record("a").code_sha256, sha256(code.pack(package))
    message = run("a", more=["--resume"], status=2)
    assert str(before) in message and now in message
    (package / "mine.py").write_text((package / "mine.py").read_text().removesuffix("\n# a remark\n"))
    moved = package.rename(package.parent.parent / NAME)
    assert run("a", f"run.code={moved}", more=["--resume"]) == whole
    done = flexfleet("run", "--run-id", "b", "--resume", sets=[*quick, "algorithm.name=all_large"])
    assert done.code == 2
    assert "run.code" in done.err and str(before) in done.err


def test_looking_at_a_run_executes_none_of_its_code(run: Any, package: Path, flexfleet: Any) -> None:
    (package / "__init__.py").write_text("open('executed', 'a').close()\n")
    run("a", "rounds.stop=1")
    code.disable()
    assert Path("executed").exists()
    Path("executed").unlink()
    for command in (["status", "runs/a"], ["status"]):
        flexfleet(*command).ok()
    found = ff.load("a")
    assert (found.status, len(found.history), len(found.levels)) == ("finished", 1, 1)
    assert found.metrics["avg"] >= 0
    assert not Path("executed").exists()


def test_from_python_it_is_imported_while_it_is_needed(run: Any, package: Path, quick: Sequence[str]) -> None:
    expected = run("a")
    code.disable()
    path = list(sys.path)
    options = parse_sets([*quick, *SETS]) | {"run.code": str(package)}
    found = ff.run(options=options, run_id="b", progress=False)
    assert found.model_sha256 == expected
    mine = {"mine": options.pop("algorithm.name")}
    both = ff.compare(mine, seeds=[0], id="both", options=options, progress=False)
    assert both.runs["mine", 0].status == "finished"
    assert sys.path == path and not [name for name in sys.modules if name.startswith(NAME)]
    package.rename(package.with_name("away"))
    assert found.model()(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
    client = int(found.clients[0]["client"] if isinstance(found.clients, list) else found.clients["client"][0])
    assert found.replay(1, client).update.client == client
    assert sys.path == path and not [name for name in sys.modules if name.startswith(NAME)]


def test_own_class_is_usable_after_a_run_with_run_code(
    package: Path, quick: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(package.parent))
    own = importlib.import_module(f"{NAME}.mine").Mine(eligible="all")
    options = parse_sets([each for each in quick if not each.startswith("algorithm.")])
    packed = ff.run(algorithm=own, options=options | {"run.code": str(package)}, progress=False)
    for sets in ([], ["run.backend=processes"]):
        found = ff.run(algorithm=own, options=options | parse_sets(sets), progress=False)
        assert found.model_sha256 == packed.model_sha256
