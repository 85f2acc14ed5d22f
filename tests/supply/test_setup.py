"""What `make setup` says where it cannot set up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
