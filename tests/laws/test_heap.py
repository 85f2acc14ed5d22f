"""When freed memory goes back: after work on a large model, and never in somebody else's process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

KEEPS = """
from pathlib import Path
from fl_engine.core import system
def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4
system.keep_freed_memory()
before = held()
blocks = [b"x" * 100_000 for _ in range(2000)]
del blocks[::2]
blocks[:-1] = []
print(held() - before, system.trim() or held() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps nothing")
def test_what_was_kept_goes_back_once_where_that_is_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", KEEPS], capture_output=True, text=True, check=True)
    kept, trimmed = map(int, done.stdout.split())
    assert kept > 150_000 and trimmed < 20_000, "in kB"
