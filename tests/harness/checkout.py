"""A copy of the checkout as a DVC repository."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: Path) -> Iterator[Any]:
    """A copy of the checkout without git, with a short job, as an open DVC repository. Stages run the code of the
    original checkout (tests/harness/forking.py), so only DVC sees edits of the copy."""
    from dvc.repo import Repo  # takes a second

    root, project = tmp_path / "checkout", Path(__file__).parents[2]
    for folder in ("fl_engine", "flexfleet", "components"):
        shutil.copytree(project / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(project / "dvc.yaml", root / "dvc.yaml")
    values = yaml.safe_load((project / "params.yaml").read_text())
    short: dict[str, dict[str, Any]] = {
        "partition": {"clients": 6, "minimum": 10},
        "pretrain": {"epochs": 2},
        "training": {"epochs": 1, "batch_size": 20},
        "rounds": {"stop": 2},
        "tracking": {"mlflow": None},
    }
    for section, changes in short.items():
        values[section].update(changes)
    (root / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    (root / ".dvcignore").write_text("__pycache__/\n")
    monkeypatch.setenv("DVC_NO_ANALYTICS", "1")
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    # The `python` of dvc.yaml, as in an activated environment.
    monkeypatch.setenv("PATH", str(python.parent), prepend=os.pathsep)
    monkeypatch.chdir(root)
    with Repo.init(".", no_scm=True) as found:
        yield found
