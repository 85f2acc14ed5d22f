"""What follows from the machine: its GPU, what is installed, its system."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_engine.core.errors import EnvironmentFailure
from fl_engine.core.system import of_posix
from fl_engine.training import numerics
from flexfleet.config import load_config, parse
from flexfleet.files.artifacts import RunFile
from flexfleet.files.doctor import EXTRAS
from tests.harness.processes import refused

pytestmark = pytest.mark.usefixtures("own_folder")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("there", "devices"), [(True, ("cuda",)), (False, ("cpu",))])
def test_auto_is_cuda_where_it_is_there(monkeypatch: pytest.MonkeyPatch, there: bool, devices: tuple[str, ...]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert load_config(None, ["run.devices=auto"]).run.devices == devices
    assert parse({"run": {"devices": "auto"}}).run.devices == devices
    assert load_config(None).run.devices == ("cpu",), "not asked for"


def test_a_run_keeps_the_precision_that_auto_was(
    flexfleet: Any, quick: Sequence[str], tmp_path: Path, no_drawings: None
) -> None:
    sets = [*quick, "run.precision=auto"]
    path = tmp_path / "runs" / "a" / "run.json"
    assert flexfleet("run", "--run-id", "a", sets=[*sets, "rounds.stop=1"]).code == 0
    assert RunFile.read(path).numerics["precision"] == ("bf16" if numerics.cpu_bf16() else "fp32")

    def resumed(stop: int, *argv: str, **numerics: Any) -> Any:
        known = RunFile.read(path)
        known.model_copy(update={"numerics": known.numerics | numerics}).write(path)
        done = flexfleet("run", "--run-id", "a", "--resume", *argv, sets=[*sets, f"rounds.stop={stop}"])
        assert RunFile.read(path).numerics["precision"] == numerics["precision"]
        return done

    other = {"precision": "bf16", "cpu_bf16": ["of another"]}
    refused = resumed(2, **other)
    assert refused.code == 6 and "cpu_bf16: ['of another'] there" in refused.err
    assert "precision: " not in refused.err
    assert resumed(2, "--accept-numerics", **other).code == 0
    assert resumed(3, precision="fp32", cpu_bf16=[]).code == 0


def test_every_extra_is_told() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert EXTRAS.keys() == project["optional-dependencies"].keys() - {"all", "dev"}


@pytest.mark.long
def test_the_extra_for_a_run_is_enough_for_the_digits(quick: Sequence[str], tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    modules = {"scikit-learn": "sklearn"}
    brought = {modules.get(name := re.split("[>=]", text)[0], name) for text in extras["run"]}
    assert brought - {"scipy"} == set(EXTRAS["run"][0]), "scikit-learn needs scipy"
    hidden = {module for name, (needed, _) in EXTRAS.items() if name != "run" for module in needed} - brought
    assert {"mlflow", "boto3", "dvc"} <= hidden
    sets = [text for text in quick if not text.startswith(("tracking.", "run.store", "rounds.stop"))]
    argv = ["flexfleet", "run", "--json", "--run-id", "a", "--rounds", "2"]
    argv += [word for text in sets for word in ("--set", text)]
    script = (
        f"import sys\nsys.modules |= dict.fromkeys({sorted(hidden)!r})\n"
        f"from flexfleet.cli import main as cli\nsys.argv = {argv!r}\ncli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["mlflow_run_id"] is None
    assert done.stderr.count("[tracking]'") == 1
    assert (tmp_path / "runs" / "a" / "report.html").is_file()


def test_what_windows_lacks_is_said(monkeypatch: pytest.MonkeyPatch, flexfleet: Any, quick: Sequence[str]) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "resource", None)
    for module in ("fcntl", "resource"):
        with pytest.raises(EnvironmentFailure, match=r"training requires Linux or macOS.*install WSL"):
            of_posix(module)
    assert "install WSL" in refused(flexfleet("run", "--run-id", "a", sets=quick), 6)
    assert not Path("runs/a/partition").exists(), "before anything is computed"
