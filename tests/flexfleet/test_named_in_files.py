"""Names `package.module:NAME` that only a file has: nothing is imported or called before the user allows it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

import flexfleet as ff
from fl_engine.codecs import codec_of
from fl_engine.core import allowed
from fl_engine.core.errors import ConfigError, FlexfleetError, IntegrityError
from fl_engine.core.registry import resolve
from fl_engine.core.types import FULL
from fl_engine.datasets import stored_data
from fl_engine.models import export
from fl_engine.preparation import preparation
from fl_engine.storage import code
from fl_engine.storage.store import sha256
from fl_engine.training import user_code
from flexfleet.config import parse_with_algorithm
from flexfleet.experiments import nightly_suite as nightly
from flexfleet.files.artifacts import PoolFile
from tests.harness.own_package import SETS, write

NAME = "strangers23"
TEXT = """
open('executed', 'a').close()
def call(*given, **named):
    open('called', 'a').close()
"""
CALLABLES = (f"{NAME}:call", "os:system", "os:abort", "torch.hub:list", "subprocess:getoutput", "shutil:rmtree")


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that says whether nothing of the stranger's module has been executed."""
    (tmp_path / f"{NAME}.py").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda: not Path("executed").exists() and not Path("called").exists() and NAME not in sys.modules
    sys.modules.pop(NAME, None)
    code.disable()


@pytest.fixture
def run(finished: Any) -> Path:
    """A run of another process, which has not written its manifest."""
    allowed.trusted.clear()
    (finished[0] / "manifest.json").unlink()
    return finished[0]  # type: ignore[no-any-return]


def change(file: Path, at: Sequence[Any], value: Any) -> None:
    told = json.loads(file.read_bytes())
    here = told
    for key in at[:-1]:
        here = here[key]
    here[at[-1]] = value
    file.write_text(json.dumps(told))


def data() -> Any:
    return ff.from_arrays(torch.rand(80, 1, 8, 8).numpy(), (torch.arange(80) % 4).numpy(), name="given")


@pytest.mark.parametrize("name", [*CALLABLES, f"{NAME}:Task"])
def test_task_in_data_json_is_not_called(name: str, tmp_path: Path, flexfleet: Any, quiet: Any) -> None:
    named = stored_data.store(data(), tmp_path / "data")
    change(tmp_path / "data" / named.removeprefix("sha256:") / "data.json", ["task"], {"name": name, "command": "x"})
    assert flexfleet("check", sets=[f"dataset.name={named}", f"dataset.root={tmp_path / 'data'}"]).code == 2
    assert quiet()


SECTIONS: dict[str, tuple[Sequence[str], Callable[[str], Any]]] = {
    "data set": (["dataset", "name"], lambda name: name),
    "model": (["model"], lambda name: {"name": name}),
    "algorithm": (["algorithm"], lambda name: {"name": name}),
    "selection": (["algorithm", "selection"], lambda name: {"name": name}),
    "codec": (["codec", "up"], lambda name: {"name": name}),
    "sampler": (["training", "sampler"], lambda name: {"name": name}),
}


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("name", [f"{NAME}:call", "os:abort"])
def test_section_of_run_json_is_not_imported(name: str, section: str, run: Path, quiet: Any) -> None:
    at, value = SECTIONS[section]
    change(run / "run.json", ["config", *at], value(name))
    found = ff.load(run)
    for act in (found.model, found.resume, lambda: found.replay(1, 0)):
        with pytest.raises(ConfigError):
            act()
    assert quiet()


@pytest.mark.parametrize("parameter", ["objective", "optimizer"])
def test_function_in_run_json_is_not_called(parameter: str, run: Path, quiet: Any) -> None:
    change(run / "run.json", ["config", "training", parameter], f"{NAME}:call")
    with pytest.raises(FlexfleetError):
        ff.load(run).resume(rounds=9, progress=False)
    assert quiet()


def test_figures_of_a_strangers_run_import_nothing(run: Path, flexfleet: Any, quiet: Any) -> None:
    change(run / "run.json", ["config", "algorithm", "name"], f"{NAME}:call")
    assert flexfleet("status", str(run)).code == 0
    assert ff.load(run).metrics["avg"] > 0
    assert quiet()


def test_codec_in_pool_json_is_not_imported(run: Path, quiet: Any) -> None:
    codecs = {"down": {"name": "identity"}, "up": {"name": f"{NAME}:call"}}
    change(run / "pool" / "pool.json", ["levels", 0, "codecs"], codecs)
    with pytest.raises(FlexfleetError):
        PoolFile.read(run / "pool" / "pool.json").pool()
    assert quiet()


@pytest.mark.parametrize(
    "resolved",
    [
        lambda name: codec_of({"name": name}),  # of an assignment, a result or a pool
        preparation,
        lambda name: user_code.function(name, user_code.OBJECTIVE),
        lambda name: resolve({}, name, "model"),
        lambda name: parse_with_algorithm({"model": {"name": name}}, stored=True),
    ],
)
@pytest.mark.parametrize("name", [f"{NAME}:call", "os:abort"])
def test_name_that_nobody_trusts_is_refused(resolved: Any, name: str, quiet: Any) -> None:
    with pytest.raises((ConfigError, ValueError)):
        resolved(name)
    assert quiet()


def test_suite_file_names_registered_things_alone(flexfleet: Any, tmp_path: Path, quiet: Any) -> None:
    path = tmp_path / "suite.yaml"
    path.write_text(yaml.safe_dump({"seeds": [0], "rows": {"a": {"algorithm": f"{NAME}:call"}}}))
    assert flexfleet("compare", "--suite", str(path)).code == 2
    path.write_text(yaml.safe_dump({"seeds": [0], "rows": {"a": {"algorithm": "all_large", "model.name": "os:abort"}}}))
    assert flexfleet("compare", "--suite", str(path)).code == 2
    assert quiet()


def test_nightly_suite_names_registered_things_alone(tiny_suite: Any, tmp_path: Path, quiet: Any) -> None:
    path = tmp_path / "night.yaml"
    path.write_text(yaml.safe_dump({**tiny_suite, "cases": {"a": {"algorithms": f"{NAME}:call", "to": 0.9}}}))
    with pytest.raises(ConfigError):
        nightly.nightly_run(path, "id", {})
    assert quiet()


def test_published_level_is_not_imported(tmp_path: Path, quiet: Any) -> None:
    save_file({"w": torch.zeros(1)}, tmp_path / export.WEIGHTS)
    for name in (f"{NAME}:call", "os:abort"):
        about = export.About(
            schema_version=1, samples="uint8", names=(), metric="accuracy", proxy_statistics=False,
            level="L1", dataset="d", model=name, options={}, input_chw=(1, 8, 8), classes=4, mean=(), std=(),
            spec=FULL.to_json(), ensemble=False, accuracy_trained=0, accuracy_exported=0,
            weights_sha256=sha256((tmp_path / export.WEIGHTS).read_bytes()),
        )  # fmt: skip
        (tmp_path / export.ABOUT).write_text(about.model_dump_json())
        with pytest.raises(IntegrityError):
            export.load(tmp_path)
    assert quiet()


def test_wheel_of_a_strangers_run_is_not_imported(
    flexfleet: Any, quick: Sequence[str], tmp_path: Path, no_drawings: None
) -> None:
    package = write(tmp_path / "source")
    sets = [*quick, *SETS, f"run.code={package}", "rounds.stop=1"]
    assert flexfleet("run", "--run-id", "w", sets=sets).code == 0
    shutil.copytree(package, tmp_path / "runs" / "w" / package.name)
    allowed.trusted.clear()
    code.disable()
    with pytest.raises(ConfigError):
        ff.load("w").model()
    with pytest.raises(ConfigError):
        ff.load("w").resume(rounds=2)
    allowed.trusted.add(sha256(code.pack(package)))
    assert ff.load("w").model()(torch.zeros(1, 1, 8, 8)).shape == (1, 10)


# ------------------------------------------------------------------------------------------------ what is allowed
OWN = """
from dataclasses import dataclass
from fl_engine.tasks import Classification
from torch import nn
@dataclass(frozen=True)
class Task(Classification):
    extra: int = 1
def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
"""


def test_own_network_loads_once_its_module_is_imported(
    tmp_path: Path, flexfleet: Any, quick: Sequence[str], no_drawings: None
) -> None:
    (tmp_path / f"{NAME}.py").write_text(OWN)
    sets = [each for each in quick if not each.startswith("model.")] + [f"model.name={NAME}:net", "rounds.stop=1"]
    assert flexfleet("run", "--run-id", "own", sets=sets).code == 0
    assert flexfleet("run", "--run-id", "own", "--resume", sets=[*sets, "rounds.stop=2"]).code == 0
    allowed.trusted.clear()
    assert NAME in sys.modules
    assert ff.load("own").model()(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
    sys.modules.pop(NAME)
    with pytest.raises(ConfigError):
        ff.load("own").model()
    allowed.trusted.add(NAME)
    assert ff.load("own").model()(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
