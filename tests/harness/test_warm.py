"""The stand-in for `python` does what `python` does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SAYS = "import mine, os, sys; print(mine.NAME, sys.argv, os.getcwd(), os.environ['WORD']); sys.exit({})"


@pytest.mark.parametrize("code", ["3", "'a word'", "None"])
@pytest.mark.parametrize("options", [(), ("-P",)])
def test_arguments_folder_environment_paths_and_exit_code(
    python: Path, tmp_path: Path, options: tuple[str, ...], code: str
) -> None:
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"NAME = {folder!r}")
    env = os.environ | {"WORD": "given", "PYTHONPATH": str(tmp_path / "there")}
    one, other = (
        subprocess.run(
            [executable, *options, "-c", SAYS.format(code), "x", "y z"],
            cwd=tmp_path / "here", env=env, capture_output=True, text=True,
        )
        for executable in (sys.executable, python)
    )  # fmt: skip
    assert (one.returncode, one.stdout, one.stderr) == (other.returncode, other.stdout, other.stderr)
    assert one.stdout.startswith("there" if options else "here")


def test_mkl_is_told_the_same(python: Path) -> None:
    """What decides the bits of matrix products is read from the environment, at the first one."""
    text = "import torch; from fl_engine.training import numerics; numerics.settle(); torch.eye(8) @ torch.eye(8)"
    env = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    one, other = (
        subprocess.run([each, "-c", f"{text}; print(numerics.mkl_cbwr())"], env=env, capture_output=True, text=True)
        for each in (sys.executable, python)
    )
    assert one.returncode == other.returncode == 0 and one.stdout == other.stdout, other.stderr


def test_other_packages_get_a_new_interpreter(python: Path) -> None:
    done = subprocess.run([python, "-m", "this"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("The Zen of Python")


def test_it_is_killed_where_the_script_is_ended(python: Path) -> None:
    text = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen([python, "-c", text], stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        pid = int(asking.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        asking.kill()
        until = time.monotonic() + 60
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < until
            time.sleep(0.01)
