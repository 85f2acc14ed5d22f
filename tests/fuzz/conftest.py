"""Run each case in its own folder and with little memory."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOM = 2 * 2**30
"""Bytes that the tests may allocate in addition. Readers must not trust sizes that a file declares."""


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    """Raise MemoryError for larger allocations, as on a small machine."""
    now = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(now.split()[1]) * 1024 + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder and home, so that no file of the user is read or written."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("FLEXFLEET_DATA", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "KUBECONFIG", "KF_PIPELINES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here
