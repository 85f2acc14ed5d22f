"""Runs that start from given weights (`model.init`): a file, a run, a registered model; what does not fit is told in
full; a changed source does not resume; nothing is unpickled."""

from __future__ import annotations

import importlib
import json
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import flexfleet as ff
from fl_engine.core import seeds
from fl_engine.core.errors import ConfigError
from fl_engine.core.slicing import initial_params
from fl_engine.core.types import Params
from fl_engine.storage.store import decode, encode
from fl_engine.testing.tiny import assert_same_bits
from flexfleet.pipeline.prepare import Resolved
from tests.harness.alike import run_of
from tests.harness.processes import refused

pytestmark = pytest.mark.usefixtures("own_folder", "no_drawings")

PLAIN = ("algorithm.name=all_large", "algorithm.eligible=all")


@pytest.fixture
def run(flexfleet: Any, quick: Sequence[str]) -> Callable[..., Any]:
    def started(run_id: str, *sets: str, code: int = 0, more: Sequence[str] = ()) -> Any:
        done = flexfleet("run", "--json", "--run-id", run_id, *more, sets=[*quick, *PLAIN, *sets])
        assert done.code == code, done.err
        return done.err if code else done.json["model_sha256"]

    return started


def weights_of(sets: Sequence[str], seed: int) -> Params:
    return initial_params(Resolved.load(None, sets).family, seed)


@pytest.fixture
def file(quick: Sequence[str], tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(encode(weights_of([*quick, *PLAIN], 99)))
    return path


# ------------------------------------------------------------------------------------------------- where from
OWN = """
import torch
from torch import nn
from tests.harness.processes import refused


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4 * 36, 10)
        self.frozen = nn.Conv2d(1, 1, 1).requires_grad_(False)
        self.frozen.weight.fill_(2.0), self.frozen.bias.fill_(0.0)
        self.register_buffer("shift", torch.tensor(0.5))

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(self.frozen(x) + self.shift))).flatten(1))
"""


def test_warm_start_takes_state_dict_of_own_network(
    quick: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net_for_a_warm_start.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    network = importlib.import_module("net_for_a_warm_start").Net()
    path = tmp_path / "weights.safetensors"
    save_file(network.state_dict(), path)
    others = [each for each in quick if not each.startswith("model.")]
    sets = [*others, *PLAIN, "model.name=net_for_a_warm_start:Net", f"model.init={path}"]
    found = Resolved.load(None, sets).start
    assert found is not None and "norm.running_var" in found and "frozen.weight" not in found
    assert_same_bits(found, {name: network.state_dict()[name] for name in found})
    network.frozen.weight.add_(1)
    save_file(network.state_dict(), path)
    with pytest.raises(ConfigError, match=r"frozen\.weight"):
        _ = Resolved.load(None, sets).start


@pytest.mark.parametrize("norm", ["batch", "static"])
def test_warm_start_takes_state_dict_of_result_model(
    norm: str, flexfleet: Any, quick: Sequence[str], tmp_path: Path
) -> None:
    sets = [*quick, *PLAIN, f"model.norm={norm}", "rounds.stop=1"]
    run_of(flexfleet, "first", sets)
    result, path = ff.load("first"), tmp_path / "weights.safetensors"
    save_file(result.model().state_dict(), path)
    found = Resolved.load(None, [*sets, f"model.init={path}"]).start
    assert found is not None
    assert_same_bits(found, result.params)


def test_fresh_weights_from_a_file_change_no_bit(run: Any, quick: Sequence[str], tmp_path: Path) -> None:
    fresh = tmp_path / "fresh.safetensors"
    fresh.write_bytes(encode(weights_of([*quick, *PLAIN], seeds.derive(1, "init"))))
    expected = run("plain")
    assert run("none", "model.init=null") == expected
    assert run("file", f"model.init={fresh}") == expected
    assert run("processes", f"model.init={fresh}", "run.backend=processes") == expected
    other = tmp_path / "other.safetensors"
    other.write_bytes(encode(weights_of([*quick, *PLAIN], 1)))
    assert run("other", f"model.init={other}") != expected


def test_a_run_by_its_folder_or_its_name(run: Any) -> None:
    run("first")
    by_name, by_folder = run("second", "model.init=first"), run("third", "model.init=runs/first")
    assert by_name == by_folder
    first, pool = Path("runs/first/model.safetensors"), Path("runs/second/pool/weights.safetensors")
    assert_same_bits(decode(first.read_bytes(), "first"), decode(pool.read_bytes(), "pool"))


@pytest.mark.long
def test_a_registered_model_and_an_exported_level(flexfleet: Any, quick: Sequence[str], tmp_path: Path) -> None:
    uri = f"tracking.mlflow=sqlite:///{tmp_path}/mlflow.db"
    run_of(flexfleet, "first", [*quick, "publish.models=true", "publish.onnx=false", "publish.name=mine", uri])
    stored = decode(Path("runs/first/model.safetensors").read_bytes(), "first")
    kept = decode(Path("runs/first/export/M3/model.safetensors").read_bytes(), "M3")
    assert kept.keys() - stored.keys()
    for place, init in enumerate(("models:/mine@candidate", "models:/mine-M3/1", "runs/first/export/M3")):
        run_of(flexfleet, f"next{place}", [*quick, *PLAIN, uri, f"model.init={init}"])
        found = decode(Path(f"runs/next{place}/pool/weights.safetensors").read_bytes(), init)
        assert_same_bits(found, stored)
    for init, said in (
        ("models:/mine-M1@candidate", "contains only a smaller level"),
        ("models:/mine@nobody", "is not available"),
    ):
        done = flexfleet("check", sets=[*quick, *PLAIN, uri, f"model.init={init}"])
        assert done.code == 2
        assert "model.init" in done.err and init in done.err and said in done.err
    done = flexfleet("check", sets=[*quick, *PLAIN, "model.init=models:/mine@candidate"])
    assert "tracking.mlflow is null" in done.err


# ---------------------------------------------------------------------------------------------------- it goes on
def test_resume_uses_the_stored_weights(run: Any, quick: Sequence[str], file: Path, tmp_path: Path) -> None:
    init = f"model.init={file}"
    whole = run("whole", init)
    run("a", init, "rounds.stop=1")
    shutil.copytree("runs/a", "runs/b")
    file.write_bytes(encode(weights_of([*quick, *PLAIN], 98)))
    assert run("a", init, more=["--resume"]) == whole
    file.unlink()
    assert run("b", init, more=["--resume"]) == whole
    shutil.copyfile("runs/b/pool/weights.safetensors", tmp_path / "moved.safetensors")
    run("b", f"model.init={tmp_path}/moved.safetensors", code=2, more=["--resume"])


# ------------------------------------------------------------------------------------------------------- refused
class Harmful:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("harm"),)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("a.pt", None),
        ("a.safetensors", pickle.dumps(Harmful())),
        ("b.safetensors", b"nothing"),
        ("c.safetensors", encode({"x": torch.zeros(2)})[:-2]),
    ],
    ids=["torch", "pickle", "text", "cut off"],
)
def test_what_is_no_safetensors_is_not_read(
    flexfleet: Any, quick: Sequence[str], tmp_path: Path, name: str, value: bytes | None
) -> None:
    path = tmp_path / name
    if value is None:
        torch.save({"x": torch.zeros(2), "y": Harmful()}, path)
    else:
        path.write_bytes(value)
    assert str(path) in refused(flexfleet("check", sets=[*quick, *PLAIN, f"model.init={path}"]))
    assert not Path("harm").exists()


@pytest.mark.parametrize("init", ["nowhere", "''", "3", "."])
def test_missing_weights_are_refused(flexfleet: Any, quick: Sequence[str], tmp_path: Path, init: str) -> None:
    (tmp_path / "net.pth").write_bytes(b"")
    assert "model.init" in refused(flexfleet("check", sets=[*quick, *PLAIN, f"model.init={init}"]))


def test_numbers_that_are_none_and_a_damaged_run(run: Any, quick: Sequence[str], file: Path) -> None:
    weights = decode(file.read_bytes(), "file")
    name = next(iter(weights))
    file.write_bytes(encode({**weights, name: torch.full_like(weights[name], torch.nan)}))
    assert f"{name}: values must be finite" in run("nan", f"model.init={file}", code=2)
    run("first")
    history = json.loads(Path("runs/first/history.json").read_bytes())
    Path("runs/first/history.json").write_text(json.dumps(history | {"model_sha256": "0" * 64}))
    assert "model.safetensors is damaged" in run("second", "model.init=first", code=4)


def test_a_preparation_that_gives_weights_too_is_refused(flexfleet: Any, quick: Sequence[str], file: Path) -> None:
    name = "algorithm.name=tests.flexfleet.test_given_weights:FromFresh"
    done = flexfleet("check", sets=[*quick, name, "algorithm.eligible=all", f"model.init={file}"])
    assert done.code == 2
    assert "model.init" in done.err
