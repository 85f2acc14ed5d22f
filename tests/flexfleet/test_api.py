"""`flexfleet.run` from Python: the command line's bits, what a result has, and code of one's own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flexfleet as ff
from fl_engine.algorithms.fedavg import FedAvg
from fl_engine.storage.store import decode
from fl_engine.testing.tiny import assert_same_bits
from tests.harness.from_python import OPTIONS, SMALL

TWO_ROUNDS: dict[str, Any] = {**SMALL, "rounds": 2}


@dataclass(frozen=True)
class Ours(FedAvg):
    boost: float = 1.0


def script(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", text]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    here = tmp_path_factory.mktemp("api")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        yield here / "runs"


@pytest.fixture(scope="module")
def result(store: Path) -> ff.Result:
    return ff.run(run_id="first", **TWO_ROUNDS)


# ------------------------------------------------------------------------------------------------------ a run
def test_the_package_loads_no_torch_and_lists_what_it_offers(tmp_path: Path) -> None:
    text = "import sys, flexfleet as ff; print('torch' in sys.modules, sorted(set(ff.__all__) - set(dir(ff))))"
    assert script(text, tmp_path).stdout.split() == ["False", "[]"]
    assert all(getattr(ff, name) is not None for name in ff.__all__)
    with pytest.raises(AttributeError, match="runn"):
        _ = ff.runn


def test_it_gives_the_bits_of_the_command_line(result: ff.Result, store: Path, flexfleet: Callable[..., Any]) -> None:
    sets = [f"{key}={json.dumps(value)}" for key, value in OPTIONS.items()]
    sets += ["partition.clients=4", "rounds.stop=2", "training.epochs=1", f"run.store={store.parent / 'by_command'}"]
    done = flexfleet("run", "--run-id", "same", "--json", sets=sets)
    assert done.json["model_sha256"] == result.model_sha256
    assert done.json["metrics"]["avg"] == result.metrics["avg"]


def test_a_result_has_what_its_folder_has(result: ff.Result) -> None:
    assert result.status == "finished" and result.run_id == "first" and result.report is not None
    assert result.report.is_file() and result.config["rounds"]["stop"] == 2
    assert list(result.history["round"]) == [1, 2] and {"avg", "full", "train_loss"} <= set(result.history.columns)
    assert set(result.clients["round"]) == {1, 2}
    told = dict(zip(result.levels["name"], result.levels["score"], strict=True))
    assert told["M3"] == result.metrics["full"]
    columns = zip(*(result.levels[key] for key in ("name", "local", "local_sd")), strict=True)
    of_clients = {name: {"mean": mean, "sd": sd} for name, mean, sd in columns if name in result.metrics["levels"]}
    assert {name: {**found, "clients": 4} for name, found in of_clients.items()} == result.metrics["local"]
    again = ff.load("first")
    assert again.model_sha256 == result.model_sha256 and "finished" in repr(again)
    assert "report.html" in again._repr_html_()


def test_the_model_takes_raw_samples_and_scores_as_published(result: ff.Result) -> None:
    from fl_engine.datasets import DATASETS, data_root

    digits = DATASETS["digits"].load(data_root())
    for level in ("M1", None):
        network = result.model(level)
        with torch.no_grad():
            answers = network(digits.test_x).argmax(1)
        share = float((answers == digits.test_y).float().mean())
        wanted = result.metrics["levels"][level or "M3"]
        assert share == pytest.approx(wanted, abs=0.12)  # of other samples, with the proxy's statistics
    with pytest.raises(ff.ConfigError, match="no level 'M9'"):
        result.model("M9")


def test_the_confusion_counts_every_test_sample(result: ff.Result) -> None:
    found = np.asarray(result.confusion())
    assert found.shape == (10, 10) and found.sum() == 100
    assert np.trace(found) / 100 == pytest.approx(result.metrics["full"])
    hidden = next(name for name in result.levels["name"] if name not in result.metrics["levels"])
    with pytest.raises(ff.ConfigError, match=f"level {hidden!r} is not reported"):
        result.confusion(hidden)


def test_more_rounds_are_those_of_a_longer_run(result: ff.Result) -> None:
    short = ff.run(run_id="short", **SMALL)
    assert len(short.history) == 1 and short.model_sha256 != result.model_sha256
    assert short.resume(2, progress=False).model_sha256 == result.model_sha256
    with pytest.raises(ff.ConfigError, match="cannot go back"):
        short.resume(1, progress=False)
    assert len(short.history) == 2 and short.model_sha256 == result.model_sha256


def test_a_copy_goes_on_in_its_own_folder_by_its_own_name(result: ff.Result, store: Path, tmp_path: Path) -> None:
    def files(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before, models = files(result.folder), []
    for copy in (store / "copy", tmp_path / "moved" / "other"):
        shutil.copytree(result.folder, copy)
        more = ff.load(copy / "rounds" / "..").resume(3, progress=False)
        assert (more.folder, more.run_id, len(more.history)) == (copy.resolve(), copy.name, 3)
        models.append(more.model_sha256)
    assert files(result.folder) == before and len(set(models)) == 1
    assert [path.name for path in (tmp_path / "moved").iterdir()] == ["other"]


def test_a_clients_round_is_computed_again_from_its_order(result: ff.Result) -> None:
    line = json.loads((result.folder / "history.json").read_text())["rounds"][1]["clients"][0]
    again = result.replay(2, line["client"])
    assert again.order.client == again.update.client == line["client"]
    assert again.update.metrics["loss"] == line["loss"]
    for name, change in again.change.items():
        torch.testing.assert_close(again.start[name] + change, again.update.payload[name])
    assert any(float(change.abs().max()) > 0 for change in again.change.values())
    missing = next(
        c
        for c in range(4)
        if c
        not in {c["client"] for c in json.loads((result.folder / "history.json").read_text())["rounds"][1]["clients"]}
    )
    with pytest.raises(ff.ConfigError, match=f"client {missing} was not selected in round 2"):
        result.replay(2, missing)
    with pytest.raises(ff.ConfigError, match="round 3 is not committed"):
        result.replay(3, 0)


def test_an_algorithm_of_ones_own_is_a_class_or_an_object(store: Path) -> None:
    plain = ff.run(algorithm=FedAvg, **TWO_ROUNDS)
    assert plain.config["algorithm"]["name"] == "fedavg"
    ours = ff.run(algorithm=Ours(boost=2.0), **TWO_ROUNDS)
    assert ours.config["algorithm"]["name"] == f"{__name__}:Ours" and ours.config["algorithm"]["boost"] == 2.0
    assert ours.model_sha256 == plain.model_sha256
    run = ours.folder / "run.json"
    told = json.loads(run.read_text())
    told["sources"] = {f"{__name__}:Ours": "0" * 64}
    run.write_text(json.dumps(told))
    with pytest.raises(ff.ConfigError, match=r"another source of .*Ours"):
        ours.resume(3, progress=False)


class Net(nn.Module):
    def __init__(self, outputs: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)  # type: ignore[no-any-return]


def test_a_network_of_ones_own_is_a_class_a_family_or_a_module(store: Path) -> None:
    ours = ff.run(model=Net, algorithm="heterofl", **TWO_ROUNDS)
    assert ours.config["model"] == {"name": f"{__name__}:Net"} and len(ours.levels) > 1
    same = ff.run(model=ff.from_module(Net), algorithm="heterofl", **TWO_ROUNDS)
    assert same.config["model"] == ours.config["model"] and same.model_sha256 == ours.model_sha256
    whole = ff.run(model=ff.from_module(Net, whole=True), algorithm="all_large", **TWO_ROUNDS)
    assert whole.config["model"] == {"name": f"{__name__}:Net", "whole": True}
    assert isinstance(ours.model(), nn.Module)
    with pytest.raises(ff.ConfigError, match="no name by which it is found again"):
        ff.run(model=Net(), **TWO_ROUNDS)


READY = Net()


def test_a_module_brings_its_weights_and_other_ones_do_not_go_on(store: Path) -> None:
    ours = ff.run(model=READY, algorithm="heterofl", **TWO_ROUNDS)
    stored = decode((ours.folder / "pool" / "weights.safetensors").read_bytes(), "weights")
    assert_same_bits(stored, {name: tensor.detach() for name, tensor in READY.state_dict().items()})
    with torch.no_grad():
        before = READY.body[1].bias.clone()
        READY.body[1].bias += 1
    with pytest.raises(ff.ConfigError, match=r"gives weights of"):
        ours.resume(3, progress=False)
    with torch.no_grad():
        READY.body[1].bias.copy_(before)
    assert len(ours.resume(3, progress=False).history) == 3


# --------------------------------------------------------------------------------------------- a script's own code
CELL = """\
from dataclasses import dataclass
import flexfleet as ff
from fl_engine.algorithms.fedavg import FedAvg
print("top")
@dataclass(frozen=True)
class Mine(FedAvg):
    boost: float = 1.0
common = dict(clients=4, rounds=1, local_epochs=1, progress=False)
options = {options!r}
print(ff.run(algorithm=Mine, options=options, **common).config["algorithm"]["name"])
there = {{**options, "run.backend": "processes"}}
print(ff.run(algorithm="all_large", options=there, **common).status)
try:
    ff.run(algorithm=Mine, options=there, **common)
except ff.ConfigError as error:
    print(error)
"""


@pytest.mark.long
def test_class_of_a_script_trains_without_running_it_again(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CELL.format(options=OPTIONS))
    command = [sys.executable, "mine.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    lines = done.stdout.splitlines()
    assert lines[:3] == ["top", "__main__:Mine", "finished"], done.stderr
    assert "Mine is defined in this notebook or script, which worker processes cannot import: write it" in lines[3]
    assert len(lines) == 4


SCRIPT = """\
import sys, torch, flexfleet as ff
from torch import nn


def shift(x):
    return x + {shift}


class Base(nn.Module):
    scale = {scale}


class Block(Base):
    def forward(self, x):
        return shift(x) * self.scale


class Unused:
    {unused}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), Block(), nn.Linear(24, 10))

    def forward(self, x):
        return self.body(x)


from flexfleet.config.sources import sources
from flexfleet.config import parse
print(sources(parse({{"model": {{"name": "__main__:Net"}}}}))["__main__:Net"])
"""


@pytest.mark.long
def test_code_of_a_script_counts_with_all_that_it_uses(tmp_path: Path) -> None:
    def digest(**change: Any) -> str:
        (tmp_path / "own.py").write_text(SCRIPT.format(**({"shift": 1.0, "scale": 2.0, "unused": "a = 1"} | change)))
        command = [sys.executable, "own.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
        return done.stdout

    first = digest()
    assert digest(unused="a = 2") == first
    assert len({first, digest(shift=1.5), digest(scale=3.0)}) == 3
