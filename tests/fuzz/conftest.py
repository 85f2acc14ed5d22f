"""Where the campaign's cases are tried: in folders of their own, and with little memory."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOM = 2 * 2**30
"""Bytes that the tests may take beyond what is loaded: a size that a file declares is not to be believed."""


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    """Who asks for more gets a MemoryError, as on a small machine."""
    now = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(now.split()[1]) * 1024 + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, and everybody's home: nothing of whoever runs the tests is read or written."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("FLEXFLEET_DATA", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "KUBECONFIG", "KF_PIPELINES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here
