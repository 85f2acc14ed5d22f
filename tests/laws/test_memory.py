"""What a memory limit leaves room for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fl_engine.algorithms import FlexFL
from fl_engine.core.errors import EnvironmentFailure
from fl_engine.models.vgg16 import VGG16
from fl_engine.tasks import Classification
from fl_engine.testing.tiny import TRAINING, tiny_site
from fl_engine.training import memory
from fl_engine.training.numerics import SINGLE

POOL = tiny_site(FlexFL(training=TRAINING)).pool


def test_free_is_the_share_of_what_training_the_full_model_takes_besides_the_rest() -> None:
    assert memory.free(150, (100, 200), POOL) == 50.0
    assert memory.free(90, (100, 200), POOL) == 0.0
    assert memory.free(400, (100, 200), POOL) == 300.0


def test_each_failure_steps_down_one_model_of_the_pool() -> None:
    shares = [100 * member.share for member in POOL]
    for failures in range(1, len(POOL)):
        found = memory.free(300, (100, 200), POOL, failures)
        assert shares[-1 - failures] < found < shares[-failures], "more than that model needs, less than the next"
    assert memory.free(300, (100, 200), POOL, len(POOL)) == 0.0


def test_what_a_sub_model_needs_leaves_room_for_it() -> None:
    """A quarter more than 100 bytes and half of the 100 that training the full model takes."""
    assert memory.needed((100, 200), 0.5) == 188
    for member in POOL:
        assert memory.free(memory.needed((100, 200), member.share), (100, 200), POOL) > 100 * member.share


@pytest.mark.parametrize(("name", "text"), [("memory.max", "12345\n"), ("memory/memory.limit_in_bytes", "12345")])
def test_the_limit_is_what_the_cgroup_says(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert memory.limit(tmp_path) == 12345


@pytest.mark.parametrize("text", ["max", str(2**63 - 4096), ""])
def test_no_limit_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "memory.max").write_text(text)
    with pytest.raises(EnvironmentFailure, match=r"no memory limit: set one for the tier's pool"):
        memory.limit(tmp_path)


def test_the_peak_is_that_of_training_and_not_of_the_process_that_asks() -> None:
    held = bytearray(600 * 2**20)  # what a coordinator holds does not count
    base, peak = memory.training_peak(VGG16((3, 32, 32), 10, width=0.25), Classification(10), 10, SINGLE)
    assert len(held) and base < 600 * 2**20
    assert peak > base + 8 * 2**20, "weights and their gradients at least"


COUNTED = """
from fl_engine.tasks import Classification
from fl_engine.training import memory
gone = b"x" * 300_000_000
del gone
held, before = memory.restart_peak()
kept = b"x" * 50_000_000
print(held, before, memory.resident_peak())
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="counting the peak anew is Linux's")
def test_the_peak_counts_anew_above_what_is_held() -> None:
    done = subprocess.run([sys.executable, "-c", COUNTED], capture_output=True, text=True, check=True)
    held, before, peak = map(int, done.stdout.split())
    assert before > held + 280_000_000, "what was freed is no more held"
    assert 45_000_000 < peak - held < 80_000_000, "nor does it hide what comes"
