"""`flexfleet.run` from Python: its arguments, the command line's bits, what a result has, and code of one's own."""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flexfleet as ff
from fl_engine.algorithms.fedavg import FedAvg
from fl_engine.models.export import load
from flexfleet.api.arguments import Arguments
from flexfleet.api.running import Common
from flexfleet.config import Config
from flexfleet.config.comparison_runs import factors_of
from flexfleet.config.sources import local_name
from tests.harness.from_python import OPTIONS, SMALL
from tests.harness.settings import refused_at

TWO_ROUNDS: dict[str, Any] = {**SMALL, "rounds": 2}


@dataclass(frozen=True)
class Ours(FedAvg):
    boost: float = 1.0


def script(text: str, folder: Path) -> list[str]:
    """Run a script, and return the lines that it prints."""
    (folder / "own.py").write_text(text)
    done = subprocess.run([sys.executable, "own.py"], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def store(module_folder: Path) -> Path:
    return module_folder / "runs"


@pytest.fixture(scope="module")
def result(store: Path) -> ff.Result:
    return ff.run(run_id="first", **TWO_ROUNDS)


# ------------------------------------------------------------------------------------------------------ a run
def test_package_loads_no_torch_and_lists_public_names_only(tmp_path: Path) -> None:
    text = "import sys, flexfleet as ff; print('torch' in sys.modules, sorted(ff.__all__) == dir(ff))"
    assert script(text, tmp_path) == ["False True"]
    assert all(getattr(ff, name) is not None for name in ff.__all__)


def test_compare_and_tune_are_typed_with_the_arguments_of_run() -> None:
    own = {"algorithm", "seed", "run_id", "resume", "callbacks", "progress"}
    of_run = {name: each.annotation for name, each in inspect.signature(ff.run).parameters.items()}
    assert set(Common.__annotations__) == set(of_run) - own
    assert {each.__forward_arg__ for each in Common.__annotations__.values()} <= set(of_run.values())


def test_run_gives_the_bits_of_the_command_line(result: ff.Result, store: Path, flexfleet: Callable[..., Any]) -> None:
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
    scores = dict(zip(result.levels["name"], result.levels["score"], strict=True))
    assert scores["M3"] == result.metrics["full"]
    columns = zip(*(result.levels[key] for key in ("name", "local", "local_sd")), strict=True)
    of_clients = {name: {"mean": mean, "sd": sd} for name, mean, sd in columns if name in result.metrics["levels"]}
    assert {name: {**found, "clients": 4} for name, found in of_clients.items()} == result.metrics["local"]
    again = ff.load("first")
    assert again.model_sha256 == result.model_sha256 and "finished" in repr(again)


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
    with pytest.raises(ff.ConfigError):
        result.model("M9")
    counts = np.asarray(result.confusion())
    assert counts.sum() == 100 and np.trace(counts) / 100 == pytest.approx(result.metrics["full"])


def test_exported_level_computes_what_the_model_computes(result: ff.Result, tmp_path: Path) -> None:
    folder = result.export("M1", tmp_path / "device" / "M1")
    samples = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
    assert (folder / "model.onnx").is_file() and torch.equal(load(folder)(samples), result.model("M1")(samples))
    assert not (result.export(None, tmp_path / "full", onnx=False) / "model.onnx").exists()
    for level, path, at in (("M9", "a", "level"), ("M1", "a.onnx", "path")):
        with refused_at(at):
            result.export(level, tmp_path / path)


def test_resumed_run_equals_a_longer_run(result: ff.Result) -> None:
    short = ff.run(run_id="short", **SMALL)
    assert len(short.history) == 1 and short.model_sha256 != result.model_sha256
    assert short.resume(2, progress=False).model_sha256 == result.model_sha256
    with pytest.raises(ff.ConfigError):
        short.resume(1, progress=False)
    assert len(short.history) == 2 and short.model_sha256 == result.model_sha256


def test_copied_run_is_resumed_in_its_own_folder(result: ff.Result, store: Path, tmp_path: Path) -> None:
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


def test_replay_computes_a_clients_round_again(result: ff.Result) -> None:
    line = json.loads((result.folder / "history.json").read_text())["rounds"][1]["clients"][0]
    again = result.replay(2, line["client"])
    assert again.assignment.client == again.update.client == line["client"]
    assert again.update.metrics["loss"] == line["loss"]
    assert len(repr(again)) < 100 and f"client {line['client']}" in repr(again)
    for name, change in again.change.items():
        torch.testing.assert_close(again.start[name] + change, again.update.payload[name])
    assert any(float(change.abs().max()) > 0 for change in again.change.values())
    table = result.clients
    (missing, *_) = set(range(4)) - set(table["client"][table["round"] == 2])
    for wrong in ((2, missing), (3, 0)):
        with pytest.raises(ff.ConfigError):
            result.replay(*wrong)


def test_own_algorithm_is_a_class_or_an_object(store: Path) -> None:
    plain = ff.run(algorithm=FedAvg, **TWO_ROUNDS)
    assert plain.config["algorithm"]["name"] == "fedavg"
    ours = ff.run(algorithm=Ours(boost=2.0), **TWO_ROUNDS)
    assert ours.config["algorithm"]["name"] == f"{__name__}:Ours" and ours.config["algorithm"]["boost"] == 2.0
    assert ours.model_sha256 == plain.model_sha256
    run = ours.folder / "run.json"
    run.write_text(json.dumps(json.loads(run.read_text()) | {"sources": {f"{__name__}:Ours": "0" * 64}}))
    with pytest.raises(ff.ConfigError, match=r"other code for .*Ours"):
        ours.resume(3, progress=False)


class Net(nn.Module):
    def __init__(self, outputs: int = 10, width: int = 24, act: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), act(), nn.Linear(width, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)  # type: ignore[no-any-return]


def test_own_network_is_a_class_or_a_family(store: Path) -> None:
    ours = ff.run(model=Net, algorithm="heterofl", **TWO_ROUNDS)
    assert ours.config["model"] == {"name": f"{__name__}:Net"} and len(ours.levels) > 1
    same = ff.run(model=ff.from_module(Net), algorithm="heterofl", **TWO_ROUNDS)
    assert same.config["model"] == ours.config["model"] and same.model_sha256 == ours.model_sha256
    whole = ff.run(model=ff.from_module(Net, whole=True), algorithm="all_large", **TWO_ROUNDS)
    assert whole.config["model"] == {"name": f"{__name__}:Net", "whole": True}
    assert isinstance(ours.model(), nn.Module)


def local(width: int) -> type[nn.Module]:
    class Local(Net):
        def __init__(self, outputs: int) -> None:
            super().__init__(outputs, width)

    return Local


FROM_SCOPE: dict[str, Callable[[], Any]] = {
    "class": lambda: local(16),
    "section": lambda: {"name": local(16)},
    "partial": lambda: partial(Net, width=16, act=nn.ReLU),
    "function": lambda: lambda outputs: Net(outputs, 16),
}


@pytest.mark.parametrize("scope", FROM_SCOPE)
def test_network_from_any_scope_trains_here_only(store: Path, scope: str) -> None:
    ours = ff.run(model=FROM_SCOPE[scope](), algorithm="heterofl", **SMALL)
    named = ff.run(model={"name": Net, "width": 16}, algorithm="heterofl", **SMALL)
    assert ours.model_sha256 == named.model_sha256 and isinstance(ours.model(), nn.Module)
    there = {**SMALL, "options": {**OPTIONS, "run.backend": "processes"}}
    with refused_at("model.name"):
        ff.run(model=FROM_SCOPE[scope](), **there)


def test_instance_starts_from_its_own_weights(store: Path) -> None:
    first, second = (ff.run(model=Net(width=16), algorithm="all_large", **SMALL) for _ in range(2))
    assert first.model_sha256 != second.model_sha256 and first.config["model"] != second.config["model"]


def test_local_name_depends_on_code_and_values() -> None:
    net, same = Net(), deepcopy(Net())
    same.load_state_dict(net.state_dict())
    assert local_name(local(8)) == local_name(local(8)) != local_name(local(9))
    assert local_name(net) == local_name(same) != local_name(Net())
    assert local_name(lambda: Net(8)) != local_name(lambda: Net(9))


def test_options_of_an_own_network_are_recorded(store: Path) -> None:
    over = ff.compare(["fedavg"], seeds=(0,), over={"model.width": [8, 16]}, model=Net, **SMALL)
    assert [run.config["model"]["width"] for run in over.runs.values()] == [8, 16]
    exported = {**SMALL, "options": {**OPTIONS, "publish.models": True}}
    ours = ff.run(model=partial(Net, width=16), algorithm="fedavg", **exported)
    assert ours.config["model"] == {"name": f"{__name__}:Net", "width": 16}
    assert load(ours.folder / "export" / "full")(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ({"name": Net, "wide": 8}, "model.wide"),
        ({"name": Net, "outputs": 8}, "model.outputs"),
        ({"name": Net(), "width": 8}, "model.width"),
        (lambda width: Net(10, width), "model.width"),
        (3, "model"),
    ],
)
def test_wrong_option_of_an_own_network_is_named(model: Any, path: str) -> None:
    with refused_at(path):
        config_of(None, None, {"model": model})


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
    print(error.code)
"""


@pytest.mark.long
def test_class_of_a_script_trains_without_running_it_again(tmp_path: Path) -> None:
    lines = script(CELL.format(options=OPTIONS), tmp_path)
    assert lines == ["top", "__main__:Mine", "finished", "config.own_code"]


SCRIPT = """\
import sys, torch, flexfleet as ff
from dataclasses import dataclass
from functools import cached_property
from torch import nn


def shift(x):
    return x + {shift}


@dataclass
class Factor:
    value: float | None = {scale}


class Base(nn.Module):
    @cached_property
    def scale(self):
        return Factor().value


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
        (found,) = script(SCRIPT.format(**({"shift": 1.0, "scale": 2.0, "unused": "a = 1"} | change)), tmp_path)
        return found

    first = digest()
    assert digest(unused="a = 2") == first
    assert len({first, digest(shift=1.5), digest(scale=3.0)}) == 3


# ---------------------------------------------------------------------------------------------------- arguments
def config_of(config: Any = None, options: Any = None, keywords: Any = None) -> Config:
    arguments = Arguments({"config": config, "options": options, **(keywords or {})})
    return arguments.load(arguments.overrides)[0]


def test_keywords_override_options_and_options_the_file(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("rounds: {stop: 7}\ntraining: {lr: 0.5}\nalgorithm: {name: heterofl}\nseed: 3\n")
    found = config_of(file, {"training.lr": 0.25}, {"rounds": 9, "algorithm": None, "seed": None})
    assert (found.rounds.stop, found.training.lr, found.algorithm["name"], found.seed) == (9, 0.25, "heterofl", 3)
    assert config_of({"rounds": {"stop": 4}}, None, {}).rounds.stop == 4
    assert (
        config_of(None, {"training.lr": np.float32(0.5), "partition.clients": np.int64(7)}, {}).partition.clients == 7
    )


def test_options_of_what_a_keyword_names_are_kept(tmp_path: Path, own_folder: None) -> None:
    found = config_of(None, {"algorithm.mu": 5.0}, {"algorithm": "fedprox"})
    assert found.algorithm == {"name": "fedprox", "mu": 5.0}
    found = config_of(None, {"algorithm": {"on_too_small": "fail"}}, {"algorithm": "heterofl"})
    assert found.algorithm == {"name": "heterofl", "on_too_small": "fail"}
    found = config_of(None, {"model.norm": "bn"}, {"model": "small_cnn", "algorithm": FedAvg})
    assert found.model == {"name": "small_cnn", "norm": "bn"} and found.algorithm == {"name": "fedavg"}
    data = ff.from_arrays(np.zeros((8, 4), dtype=np.float32), np.arange(8) % 2)
    found = config_of(None, None, {"dataset": data, "store_uri": "s3://bucket/prefix"})
    assert (found.run.store, found.run.remote) == ("runs", "s3://bucket/prefix")
    assert found.dataset.root == str(tmp_path / "runs" / ".data") and sorted(Path().iterdir()) == [Path("runs")]
    found = config_of(None, {"run": {"store": "kept"}}, {"dataset": data})
    assert found.dataset.root == str(tmp_path / "kept" / ".data")


def test_data_with_owners_stay_with_their_clients(tmp_path: Path, own_folder: None) -> None:
    x, y = np.arange(96, dtype=np.float32).reshape(48, 2), np.arange(48) % 2
    owned, nobodys = ff.from_arrays(x, y, clients=np.arange(48) % 3), ff.from_arrays(x, y)
    file = tmp_path / "p.yaml"
    file.write_text("partition: {minimum: 4}\nseed: 3\n")

    def partition(config: Any = None, options: Any = None, **keywords: Any) -> tuple[str, int, int]:
        found = config_of(config, options, {"dataset": owned, **keywords}).partition
        return found.rule, found.clients, found.minimum

    assert partition() == partition(Config()) == partition({"seed": 1}) == ("natural", 3, 1)
    assert partition(file, clients=2) == ("natural", 2, 4)
    assert partition(dataset=nobodys) == ("dirichlet", 20, 20)
    assert partition(partition_rule="iid") == partition({"partition": {"rule": "iid"}}) == ("iid", 3, 20)
    assert partition(options={"partition": {"rule": "dirichlet"}, "partition.clients": 5}) == ("dirichlet", 5, 20)
    assert partition(config_of(None, None, {"clients": 7})) == ("dirichlet", 7, 20), "a whole configuration"
    with refused_at("partition.alpha"):
        partition(dirichlet_alpha=0.1)


@pytest.mark.parametrize(
    ("options", "keywords", "path"),
    [
        ({"algorithm.mu": 3.0}, {"algorithm": {"name": "fedprox", "mu": 2.0}}, "algorithm.mu"),
        ({"rounds": {"stop": 3}, "rounds.stop": 4}, {}, "rounds.stop"),
        ({"rounds": {"stop": 4}}, {"rounds": 3}, "rounds.stop"),
        ({"rounds.stopp": 4}, {}, "rounds.stopp"),
        ({3: 4}, {}, "3"),
        ({"rounds": 3}, {}, "rounds"),
        ({"dataset": "digits"}, {}, "dataset"),
        ({"learning_rate": 0.1}, {}, "learning_rate"),
        (None, {"dataset": (np.zeros((4, 2)), np.zeros(4))}, "dataset.name"),
        (None, {"algorithm": 3}, "algorithm.name"),
        (None, {"algorithm": Ours(training=FedAvg.training.__class__(lr=7.0))}, "training"),
    ],
)
def test_wrong_argument_is_named(options: Any, keywords: Any, path: str) -> None:
    with refused_at(path):
        config_of(None, options, keywords)


@pytest.mark.parametrize(
    ("keyword", "instead"),
    [
        ("epochs", "local_epochs="),
        ("lr", "learning_rate="),
        ("batch_size", "{'training.batch_size': 3}"),
        ("momentum", "{'training.momentum': 3}"),
        ("device", "{'run.devices': [3]}"),
        ("data", "'dataset'"),
    ],
)
def test_unknown_keyword_names_the_right_one(keyword: str, instead: str) -> None:
    calls: list[Callable[..., Any]] = [ff.run, partial(ff.compare, ["fedavg"]), ff.tune]
    for call in calls:
        with pytest.raises(ff.ConfigError) as error:
            call(**{keyword: 3})
        assert error.value.code == "config.unknown" and instead in str(error.value)


SECRET = "https://me:geheim@host"


@pytest.mark.parametrize(
    "call",
    [
        lambda: ff.run(options=SECRET),  # type: ignore[arg-type]
        lambda: ff.run(mlflow_uri={SECRET}),  # type: ignore[arg-type]
        lambda: ff.compare([{"algorithm": "flexfl", "tracking.mlflow": SECRET}]),
        lambda: ff.run(config="broken.yaml"),
        lambda: factors_of([f"tracking.mlflow={{a: {SECRET}"]),
        lambda: factors_of([SECRET]),
    ],
)
def test_errors_show_no_password(call: Callable[[], Any], own_folder: None) -> None:
    Path("broken.yaml").write_text(f"tracking: {{mlflow: {SECRET}: [\n")
    with pytest.raises(ff.ConfigError) as error:
        call()
    assert "geheim" not in str(error.value) and "host" in str(error.value)
