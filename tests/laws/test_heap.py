"""When freed memory goes back: after work on a large model, and never in somebody else's process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from fl_engine.core import system
from fl_engine.core.system import LARGE_BLOCK, LARGE_MODEL, WORKING_BLOCK

NAMES = {system._MMAP_MAX: "blocks", system._MMAP_THRESHOLD: "from"}
KEPT = [("blocks", 0)]


def given_back(size: int) -> list[tuple[str, int]]:
    return [("blocks", system._MANY), ("from", size)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """How many blocks may go back, from which size on, and trims, as they were asked for."""
    found: list[tuple[str, int]] = []

    def call(name: str, *arguments: int) -> None:
        if name == "malloc_trim" or arguments[0] in NAMES:
            found.append((NAMES.get(arguments[0], name), arguments[-1]))

    monkeypatch.setattr(system, "_call", call)
    monkeypatch.setattr(system, "_kept", False)
    return found


def test_a_large_model_gives_back_what_is_not_at_work(calls: list[tuple[str, int]]) -> None:
    system.keep_freed_memory()
    with system.at_work(LARGE_MODEL):
        assert calls == [*KEPT, *given_back(WORKING_BLOCK)]
    assert calls[3:] == [*given_back(LARGE_BLOCK), ("malloc_trim", 0)]


def test_a_small_model_or_a_guest_changes_nothing(calls: list[tuple[str, int]]) -> None:
    with system.at_work(10 * LARGE_MODEL):
        system.give_back(10 * LARGE_MODEL)
    assert calls == [], "a guest's heap is its host's"
    system.keep_freed_memory()
    with system.at_work(LARGE_MODEL - 1):
        system.give_back(LARGE_MODEL - 1)
    assert calls == KEPT


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
    """Else a device would find less and less free, from order to order."""
    done = subprocess.run([sys.executable, "-c", KEEPS], capture_output=True, text=True, check=True)
    kept, trimmed = map(int, done.stdout.split())
    assert kept > 150_000 and trimmed < 20_000, "in kB"
