"""What was prepared is kept by its inputs: it is taken over after a kill, refused where it is damaged, and shared."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import IntegrityError
from fl_engine.data.partition import TENSORS
from fl_engine.storage import code
from flexfleet.config import load_config
from flexfleet.config.comparison_runs import PlannedRun
from flexfleet.experiments import compare
from flexfleet.files import prepared
from flexfleet.files.artifacts import Apoz
from flexfleet.pipeline import keys, pretrain
from flexfleet.pipeline.partition import partition
from flexfleet.pipeline.prepare import Resolved
from tests.harness.alike import run_of
from tests.harness.searched import MADE, prepared_in, recipe
from tests.harness.searched import searched as searched  # a fixture

pytestmark = pytest.mark.usefixtures("searched")


@pytest.fixture
def sets(quick: Sequence[str]) -> list[str]:
    return [*quick, "algorithm.name=searched:Searched"]


# -------------------------------------------------------------------------------------------------- it is kept
def test_run_uses_existing_results_and_logs_it(
    flexfleet: Any, sets: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "flexfleet")
    whole = run_of(flexfleet, "whole", sets)
    folder = prepared_in(Path("runs/a"), sets)
    before = (folder / MADE).read_bytes()
    # What does not move the result of a preparation is no input of it.
    done = run_of(flexfleet, "a", [*sets, "run.devices=[cpu, cpu]"], "--resume")
    assert "reusing searched:Search from runs/a/pretrain" in caplog.text
    assert (folder / MADE).read_bytes() == before
    assert done["model_sha256"] == whole["model_sha256"]


INPUTS = {
    "pretrain.epochs": ["pretrain.epochs=2"],
    "a parameter that it asks for": ["algorithm.candidates=[0.3, 0.5]"],
    "one with its default": ["algorithm.tolerance=0.5"],
    "the seed": ["seed=2"],
    "the partition": ["partition.alpha=0.3"],
    "the data": ["dataset.train_samples=241"],
    "the network": ["model.width=0.25"],
}


@pytest.mark.parametrize("what", [*INPUTS, "its file"])
def test_another_input_computes_again(tmp_path: Path, sets: list[str], what: str) -> None:
    folder = prepared_in(tmp_path / "a", sets)
    before = prepared.index(folder)["searched:Search"]
    if what == "its file":
        (tmp_path / "searched.py").write_text(recipe().replace("min(width for", "max(width for"))
        sys.modules.pop("searched")
    else:
        sets = [*sets, *INPUTS[what]]
    now = prepared.index(prepared_in(tmp_path / "a", sets))["searched:Search"]
    assert now.inputs != before.inputs
    # In a folder of its own it makes the same.
    fresh = prepared_in(tmp_path / "b", sets)
    assert (fresh / MADE).read_bytes() == (folder / MADE).read_bytes()
    assert prepared.index(fresh)["searched:Search"] == now


NET = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, outputs):
        act = nn.ReLU
        super().__init__(
            nn.Conv2d(1, 4, 3), act(), nn.Conv2d(4, 8, 3), act(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(8, outputs),
        )
"""
OWN_NETWORK = {"a file": ["model.name=own_net:Net"], "run.code": ["model.name=packed.own_net:Net", "run.code=packed"]}


@pytest.fixture
def edit(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Writes the network with this activation, to be imported anew."""

    def write(act: str) -> None:
        code.disable()
        sys.modules.pop("own_net", None)
        for folder in (tmp_path, tmp_path / "packed"):
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
            (folder / "own_net.py").write_text(NET.replace("nn.ReLU", f"nn.{act}"))

    yield write
    code.disable()
    sys.modules.pop("own_net", None)


@pytest.mark.parametrize("where", OWN_NETWORK)
def test_another_source_of_a_network_computes_again(
    tmp_path: Path, quick: Sequence[str], edit: Callable[[str], None], where: str
) -> None:
    sets = [each for each in quick if not each.startswith("model.")] + OWN_NETWORK[where]
    network = OWN_NETWORK[where][0].partition("=")[2]
    more = {
        "noise": ("noise.labels=0.5", "noise.epochs=1"),
        "clusters": (f"partition.features={network}", "partition.clusters=3"),
    }
    found = []
    for folder, act in (("a", "ReLU"), ("a", "Sigmoid"), ("b", "Sigmoid")):
        edit(act)
        prepared_in(tmp_path / folder, sets)
        for name, given in more.items():
            partition(Resolved.load(None, [*sets, *given]), tmp_path / folder / name)
        layers = Apoz.read(tmp_path / folder / "pretrain" / "apoz.json").layers
        found.append((layers, (tmp_path / folder / "clusters" / TENSORS).read_bytes()))
    before, now, fresh = found
    assert now == fresh and all(one != two for one, two in zip(before, now, strict=True))


def test_results_of_another_algorithm_are_deleted(tmp_path: Path, quick: Sequence[str], sets: list[str]) -> None:
    folder = prepared_in(tmp_path / "a", sets)
    prepared_in(tmp_path / "a", [*quick, "algorithm.name=all_large"])
    assert sorted(path.name for path in folder.iterdir()) == ["prepared.json"]
    assert prepared.index(folder) == {}
    prepared_in(tmp_path / "a", quick)
    assert len(Apoz.read(folder / "apoz.json").layers) == 4


# ------------------------------------------------------------------------------------------------- damage
@pytest.mark.parametrize("name", [MADE, "apoz.json"])
def test_damaged_result_of_a_preparation_is_named(
    flexfleet: Any, quick: Sequence[str], sets: list[str], name: str
) -> None:
    given = sets if name == MADE else list(quick)
    path = prepared_in(Path("runs/a"), given) / name
    value = path.read_bytes()
    position = max(value.rfind(digit) for digit in b"123")
    path.write_bytes(value[:position] + b"9" + value[position + 1 :])
    done = flexfleet("run", "--json", "--run-id", "a", "--resume", sets=given)
    assert done.code == 4
    assert done.err.count("\n") <= 2 and str(path) in done.err
    path.unlink()
    assert flexfleet("run", "--run-id", "a", "--resume", sets=given).code == 0
    kept = json.loads(path.read_bytes())
    assert {**kept, "seconds": 0} == {**json.loads(value), "seconds": 0}


# --------------------------------------------------------------------------------------------- kills
DYING = """
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from searched import Found, Searched


@dataclass(frozen=True)
class Last:
    settings: ClassVar[tuple[str, ...]] = ()
    needs_data: ClassVar[bool] = False
    artifact: ClassVar[Any] = Found

    def prepare(self, family, server):
        if "DIES" in os.environ and not Path("died").exists():
            Path("died").write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        return Found(0.5, {str(server.seed): float(len(server.samples))})

    def assumed(self, family):
        return Found(0.5, {})


class Twice(Searched):
    preparations: ClassVar[tuple[str, ...]] = ("searched:Search", "dying:Last")
"""


@pytest.mark.long
def test_killed_preparation_is_resumed(fork_server: Any, tmp_path: Path, sets: list[str]) -> None:
    """The first preparation is finished when the process is killed in the second one."""
    (tmp_path / "dying.py").write_text(DYING)
    given = [*sets, "algorithm.name=dying:Twice"]

    def run(run_id: str, *more: str, **env: str) -> Any:
        argv = ("run", "--json", "--run-id", run_id, *more)
        return fork_server.start("flexfleet", *argv, cwd=tmp_path, sets=given, env=env).wait(120)

    folder = tmp_path / "runs" / "a"
    assert run("a", DIES="1").code == -signal.SIGKILL
    assert list(prepared.index(folder / "pretrain")) == ["searched:Search"] and not (folder / "run.json").exists()
    done, whole = run("a", "--resume", DIES="1"), run("whole")
    assert (done.code, whole.code) == (0, 0), done.err + whole.err
    assert "reusing searched:Search from" in done.err
    assert done.json["model_sha256"] == whole.json["model_sha256"]
    assert prepared.index(folder / "pretrain") == prepared.index(tmp_path / "runs" / "whole" / "pretrain")


# --------------------------------------------------------------------------------------- several runs share it
def test_runs_share_what_has_the_same_inputs(tmp_path: Path, sets: list[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "flexfleet")
    shared = tmp_path / "shared-s0"
    first, same, other = (
        Resolved.load(None, [*sets, more])
        for more in ("rounds.stop=1", "algorithm.selection.name=uniform", "algorithm.tolerance=0.5")
    )
    pretrain.share(first, shared)
    assert [pretrain.can_adopt(each, shared) for each in (first, same, other)] == [True, True, False]
    made = (shared / "pretrain" / MADE).read_bytes()
    pretrain.adopt(other, shared, tmp_path / "other")
    assert prepared.index(tmp_path / "other" / "pretrain") != prepared.index(shared / "pretrain")
    assert "the inputs are the same" not in caplog.text
    pretrain.adopt(same, shared, tmp_path / "same")
    assert "the inputs are the same" in caplog.text
    assert (tmp_path / "same" / "pretrain" / MADE).read_bytes() == made
    (shared / "pretrain" / MADE).write_bytes(made[:-20])
    pretrain.adopt(same, shared, tmp_path / "late")
    with pytest.raises(IntegrityError, match=MADE):
        prepared.read(tmp_path / "late" / "pretrain", ["searched:Search"])
    (shared / "pretrain" / prepared.INDEX).write_bytes(b"")
    assert not pretrain.can_adopt(same, shared), "it is computed again"


def test_the_key_of_a_private_run_stays_in_its_store(quick: Sequence[str], tmp_path: Path) -> None:
    private = ["algorithm.aggregation={name: private, noise_multiplier: 0.1}", "rounds.norm_bound=null"]
    runs = [PlannedRun("a", 1, load_config(None, [*quick, "algorithm.name=all_large", "rounds.stop=1", *private]))]
    (number,) = compare.write_pairs(compare.pairs_of(runs, "c", tmp_path / "shared"), None, tmp_path / "pairs")
    compare.run_pair(compare.PairsFile.read(tmp_path / "pairs"), number, tmp_path / "shared", tmp_path / "out", "")
    assert (Path(runs[0].config.run.store) / runs[0].name / keys.IN_RUN).is_file()
    assert (tmp_path / "out/result.json").is_file()
    assert not (tmp_path / "out" / keys.IN_RUN).parent.exists()
