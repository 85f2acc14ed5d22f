"""Each benchmark can still be started: what it takes from the project is there."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import benchmarks

PEERS = {"fedjax", "flower", "pfl"}
"""They run in environments of their own (`make bench-peers`)."""
NAMES = sorted(file.stem for file in Path(benchmarks.__path__[0]).glob("*.py"))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in PEERS])
def test_it_imports(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")
