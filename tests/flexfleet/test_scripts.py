"""Paths with spaces, umlauts and CJK characters."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.long
def test_run_is_published_from_paths_of_any_script(
    flexfleet: Any, quick: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_drawings: None
) -> None:
    here, scratch = tmp_path / "Möbel 中文 x", tmp_path / "tmp ü 中"
    for folder in (here, scratch, here / "ß code"):
        folder.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    (here / "ß code" / "rate.py").write_text("RATE = 0.1\n")
    sets = [
        *(text for text in quick if not text.startswith(("tracking.", "run.store"))),
        "run.store=Läufe 中",
        "run.code=ß code/rate.py",
        "tracking.mlflow=sqlite:///möbel 中.db",
        "tracking.experiment=Versuch ü 中",
        "publish.dvc=Ablage ü 中",
        "publish.models=true",
        "rounds.stop=1",
    ]
    done = flexfleet("run", "--json", "--run-id", "a", sets=sets)
    assert done.code == 0, done.err
    fetched = flexfleet("fetch", "--json", done.json["mlflow_run_id"], "--out", "zurück 中", sets=sets)
    assert fetched.code == 0, fetched.err
    model = Path("Läufe 中/a/model.safetensors").read_bytes()
    assert Path("zurück 中/model.safetensors").read_bytes() == model
    assert flexfleet("report", "Läufe 中/a", "--out", "Bericht ü.html").code == 0
