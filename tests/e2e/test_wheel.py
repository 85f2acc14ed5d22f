"""The wheel works where there is no checkout: what is not in it would only be missed by those who install it."""

from __future__ import annotations

import json
import shlex
import zipfile
from collections.abc import Sequence
from pathlib import Path

import fl_engine
from tests.harness.wheel import run

ROOT = Path(__file__).parents[2]


def test_the_wheel_holds_what_it_should(wheel: Path) -> None:
    assert wheel.name == f"flexfleet-{fl_engine.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(n for n in names if n.endswith("/METADATA"))).decode()
        entry_points = archive.read(next(n for n in names if n.endswith("/entry_points.txt"))).decode()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"fl_engine", "flexfleet"}
    for package in ("fl_engine", "flexfleet"):
        modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / package).rglob("*.py")}
        assert modules <= names, f"{package}: {sorted(modules - names)}"
    assert {"flexfleet/reports/report.html", "fl_engine/py.typed", "flexfleet/py.typed"} <= names
    assert {"fl_engine/remote/kubernetes/worker-job.yaml", "flexfleet/kubeflow/compiled/tune.yaml"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any("__pycache__" in name or name.startswith("tests/") for name in names)
    assert "License-Expression: Apache-2.0" in metadata and "Project-URL: Repository, https://" in metadata
    assert f"version: {fl_engine.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert "flexfleet = flexfleet.__main__:main" in entry_points
    for extra in ("engine", "pipeline", "tracking", "data", "tune", "testing", "dev", "all"):
        assert f"Provides-Extra: {extra}" in metadata


def test_the_wheel_runs_outside_the_checkout(installed: Path, quick: Sequence[str], tmp_path: Path) -> None:
    def command(*argv: str) -> str:
        done = run("-P", *argv, cwd=tmp_path, PYTHONPATH=str(installed))
        assert done.returncode == 0, done.stderr
        return done.stdout

    # An editable installation of the checkout must not stand in for the wheel.
    where = command("-c", "import fl_engine, flexfleet; print(fl_engine.__file__, flexfleet.__path__[0])")
    assert where.split() == [str(installed / "fl_engine" / "__init__.py"), str(installed / "flexfleet")]
    assert command("-m", "flexfleet.cli.main", "--version").split() == ["flexfleet", fl_engine.__version__]
    assert json.loads(command("-m", "flexfleet.cli.main", "doctor", "--json"))["version"] == fl_engine.__version__
    sets = [part for pair in (*quick, "rounds.stop=1") for part in ("--set", pair)]
    found = json.loads(command("-m", "flexfleet.cli.main", "run", "--json", "--run-id", "a", *sets))
    assert found["status"] == "finished"
    assert "<svg" in (tmp_path / found["report"]).read_text(), "the page's template came with the wheel"


def test_install_command_of_wheel_names_the_wheel(installed: Path, wheel: Path) -> None:
    code = "from fl_engine.core.system import install_command; print(install_command('privacy'), end='')"
    command = run("-P", "-c", code, cwd=installed, PYTHONPATH=str(installed)).stdout
    assert command.startswith("pip install 'flexfleet[privacy] @ ") and wheel.name in command
    pip = ("-m", *shlex.split(command), "--dry-run", "--no-deps", "--no-index", "--ignore-installed")
    assert run(*pip, cwd=installed).returncode == 0
