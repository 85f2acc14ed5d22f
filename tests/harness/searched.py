"""The search of docs/guides/extending/preparations.md, word for word, as a file of one's own."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from flexfleet.pipeline.partition import partition
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.pretrain import pretrain

ROOT = Path(__file__).parents[2]
MADE = "searched.Search.json"


def recipe() -> str:
    """The guide's file."""
    guide = (ROOT / "docs/guides/extending/preparations.md").read_text()
    (text,) = re.findall(r"```python\n# searched\.py.*?\n(.*?)```", guide, re.DOTALL)
    return str(text)


@pytest.fixture
def searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_drawings: None) -> Iterator[None]:
    """The file lies where the test runs."""
    (tmp_path / "searched.py").write_text(recipe())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("searched", None)


def prepared_in(folder: Path, sets: Sequence[str]) -> Path:
    """The steps before the rounds, as a run that was killed then leaves them; gives pretrain/."""
    resolved = Resolved.load(None, sets)
    partition(resolved, folder / "partition")
    pretrain(resolved, folder / "partition", folder / "pretrain")
    return folder / "pretrain"
