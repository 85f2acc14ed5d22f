"""`make setup` says which build of torch came."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from components import torch_build

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_line_names_this_build_and_its_size() -> None:
    done = subprocess.run([sys.executable, "-m", "components.torch_build"], capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"torch {torch.__version__}, the build for ") and ("the CPU," in line) == (
        torch.version.cuda is None
    )
    gigabytes = float(line.partition("takes ")[2].partition(" GB")[0])
    assert 0.1 < gigabytes < 20 and gigabytes == round(torch_build.size_of("torch") / 1e9, 1)


def test_either_build_is_told_how_to_have_the_other() -> None:
    cpu, cuda = torch_build.told("2.13.0+cpu", None, 10**9), torch_build.told("2.13.0", "CUDA 13.0", 3 * 10**9)
    assert "For a GPU" in cpu and "1.0 GB" in cpu
    assert "CUDA 13.0, takes 3.0 GB" in cuda and f"PIP_EXTRA_INDEX_URL={torch_build.CPU_INDEX} make setup" in cuda
    assert torch_build.CPU_INDEX in (ROOT / "README.md").read_text()


def test_what_comes_with_a_build_for_gpus_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def package(name: str, size: int, *requires: str) -> None:
        info = tmp_path / f"{name.replace('-', '_')}-1.dist-info"
        info.mkdir()
        (tmp_path / f"{name}.bin").write_bytes(bytes(size))
        lines = [f"Name: {name}", "Version: 1", *(f"Requires-Dist: {text}" for text in requires)]
        (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines, ""]))
        (info / "RECORD").write_text(f"{name}.bin,,\ngone.bin,,\n")

    package("planted-torch", 1000, "nvidia-blas==1; sys_platform == 'linux'", "triton (>=3)", "numpy", "nvidia-away")
    package("nvidia-blas", 300, "nvidia-rt")
    package("nvidia-rt", 20, "nvidia-blas")
    package("triton", 4)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert torch_build.size_of("planted-torch") == 1324


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_says_it_once_and_only_when_it_has_installed(tmp_path: Path) -> None:
    """With a stand-in for Python, whose pip installs nothing."""
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\nmkdir -p "$3/bin"\nfor x in pip python; do cp "$STAND_IN" "$3/bin/$x"; done\n')
    stand_in = tmp_path / "stand-in"
    stand_in.write_text('#!/bin/sh\n[ "$(basename "$0")" = pip ] || echo "ran $*"\n')
    for script in (python, stand_in):
        script.chmod(0o755)

    def setup() -> Any:
        words = ["make", "--no-print-directory", "setup", f"PYTHON={python}", f"VENV={tmp_path}/venv"]
        env = os.environ | {"STAND_IN": str(stand_in)}
        return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)

    assert setup().stdout.count("ran -m components.torch_build\n") == 1
    assert "torch_build" not in setup().stdout
