"""`flexfleet status RUN --failures`, and failures in the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fl_engine.storage import code

MINE = """
import logging, os, torch

STEPS = 0
os.environ["SENSOR_PASSWORD"] = "sesame-0123"  # also in workers that are already running

def loss(module, x, y, start):
    global STEPS
    STEPS += 1
    if STEPS > 2:
        logging.getLogger("mine").warning("the sensor in /home/me/private/a.csv is broken")
        broken(x)
    return torch.nn.functional.cross_entropy(module(x), y.squeeze())

def broken(x):
    raise ValueError(f"value {STEPS} is missing, password {os.environ['SENSOR_PASSWORD']}")
"""


@pytest.fixture(autouse=True)
def _no_code_afterwards() -> Iterator[None]:
    yield
    code.disable()
    code.disable("faulty")


@pytest.mark.parametrize("backend", ["in_process", "processes"])
def test_failures_of_a_users_loss_are_shown_with_log_and_traceback(
    flexfleet: Any, quick: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SENSOR_PASSWORD", "")
    Path("faulty.py").write_text(MINE)
    sets = [*quick, "algorithm.name=heterofl", "training.objective=faulty:loss", f"run.backend={backend}"]
    flexfleet("run", "--run-id", "a", sets=[*sets, "run.code=faulty.py"])
    found = flexfleet("status", "runs/a", "--failures", "--json").json["failures"]
    assert len(found) == 1 and found[0]["count"] > 1, "failures that differ in a number are one kind"
    assert found[0]["code"] == "train" and found[0]["details"]["peak_mb"] > 10
    shown = flexfleet("status", "runs/a", "--failures").out
    for text in ("ValueError: value", "faulty.py:", "in broken", "a.csv is broken", "$SENSOR_PASSWORD"):
        assert text in shown
    for secret in ("sesame", "/home/me", str(tmp_path)):
        assert secret not in shown
    assert "in broken" in Path("runs/a/report.html").read_text()


def test_status_of_failures_needs_a_run(flexfleet: Any) -> None:
    assert flexfleet("status", "--failures").code == 2
