"""The wheel, built once and installed into a folder of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("fl_engine", "flexfleet", "pipelines/compiled", "pyproject.toml", "README.md", "LICENSE")


def run(*argv: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, with PYTHONPATH only as given and without the variables of who runs the tests."""
    return subprocess.run(
        [sys.executable, *argv], cwd=cwd, capture_output=True, text=True, env=clean_environment() | environment
    )


def clean_environment() -> dict[str, str]:
    """The environment without Python's, flexfleet's and MLflow's variables."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "FLEXFLEET", "MLFLOW"))}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves its build folder beside the sources, and takes stale files from there."""
    pytest.importorskip("build")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    done = run("-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source), cwd=out)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "would be ignored" not in done.stdout + done.stderr, "setuptools tells whoever installs it of each folder"
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    argv = ("-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", str(target), str(wheel))
    done = run(*argv, cwd=target)
    assert done.returncode == 0, done.stderr[-2000:]
    return target
