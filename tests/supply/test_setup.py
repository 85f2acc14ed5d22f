"""`make setup` rejects an old Python, and chooses where torch comes from."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_an_older_python_is_named_before_anything_is_installed(tmp_path: Path) -> None:
    """Else pip would fail two minutes later, over a package that has no release for it."""
    old = tmp_path / "python3.10"
    older = "import sys; sys.version_info = (3, 10, 12); exec(sys.argv[2])"
    old.write_text(f"#!/bin/sh\nexec '{sys.executable}' -c '{older}' \"$@\"\n")
    old.chmod(0o755)
    given = ["make", "setup", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(given, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"PYTHON must be 3.11 or newer, but {old} is 3.10. Choose another Python" in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() != "x86_64" or Path("/proc/driver/nvidia").exists(),
    reason="the CPU build is only chosen on x86-64 Linux without an NVIDIA GPU",
)
@pytest.mark.parametrize("case", ["reachable", "unreachable", "own index"])
def test_setup_takes_cpu_torch_if_index_is_reachable(case: str, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    real = f'"{sys.executable}"'
    stub = (
        'if [ "$2" = venv ]; then mkdir -p $3/bin; cp $0 $3/bin/python; cp $0 $3/bin/pip; exit; fi\n'
        f'if [ "$1" = config ]; then exec {real} -m pip "$@"; fi\n'
        f'case "$2" in *urllib*) exec {real} "$@";; esac\n'
    )
    (tmp_path / "python").write_text(f"#!/bin/sh\n{stub}")
    (tmp_path / "python").chmod(0o755)
    with HTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        index = f"http://127.0.0.1:{server.server_port}" if case != "unreachable" else "http://127.0.0.1:1"
        own = {"PIP_INDEX_URL": "http://127.0.0.1:2"} if case == "own index" else {}
        given = ["make", "setup", f"PYTHON={tmp_path / 'python'}", f"VENV={tmp_path / 'venv'}", f"TORCH_CPU={index}"]
        env = {k: v for k, v in os.environ.items() if not k.endswith("INDEX_URL")} | own
        done = subprocess.run(given, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
        server.shutdown()
    assert (f"torch --extra-index-url {index}\n" in done.stderr) == (case == "reachable")
    assert (f"{index} is not reachable" in done.stdout) == (case == "unreachable")
