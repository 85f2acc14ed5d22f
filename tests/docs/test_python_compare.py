"""The Python blocks of guides/python-compare.md run, on less."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flexfleet as ff
from fl_engine.data import heat_map
from flexfleet.experiments import tune_report
from flexfleet.pipeline import run as run_module

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "python-compare.md"
OPTIONS = {"tracking.mlflow": None, "pretrain.epochs": 1, "dataset.train_samples": 240, "dataset.test_samples": 60}


def smaller(call: Callable[..., Any], **less: Any) -> Callable[..., Any]:
    def wrapped(*args: Any, **given: Any) -> Any:
        few = {"rounds": 1, "clients": 4, "local_epochs": 1, "options": OPTIONS, "progress": False, **less}
        return call(*args, **{**given, **few})

    return wrapped


def test_the_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(heat_map, "draw", lambda *_: None)
    monkeypatch.setattr(run_module, "report", lambda runs, out: out.write_text("<html></html>") and out)
    monkeypatch.setattr(tune_report.plots, "study", lambda *_, **__: [])
    monkeypatch.setattr(ff, "compare", smaller(ff.compare))
    monkeypatch.setattr(ff, "tune", smaller(ff.tune, trials=2, held_out=(7,)))
    monkeypatch.setattr(ff, "run", smaller(ff.run))
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec("\n".join(blocks), names)  # what a reader types, one block after the other
    assert names["found"].labels == ("flexfl", "no_kd") and names["found"].seeds == (0, 1, 2)
    assert names["rates"].labels == ("heterofl-lr0.05", "heterofl-lr0.1")
    said = str(names["found"].paired("flexfl", "no_kd"))
    assert "2 degrees of freedom" in said or "All differences are equal" in said
    assert "below 0.25: 6 seeds" in said
    assert set(names["study"].best) == {"training.lr", "training.batch_size"}
