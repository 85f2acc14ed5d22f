"""What a study says of what it has found: a headline, a page, and a table in Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flexfleet.config import Range
from flexfleet.experiments.tune_conclusion import beats
from flexfleet.experiments.tune_report import Tuned, markdown, told

FOUND = Tuned(
    id="a", metric="avg", trials={"complete": 3, "pruned": 1, "infeasible": 0, "diverged": 2},
    space={"algorithm.kd_weight": Range(low=0.1, high=100.0, log=True).model_dump(mode="json"),
           "training.nesterov": Range(choices=(True, "a|b")).model_dump(mode="json")},
    symbols={"algorithm.kd_weight": "λ"},
    importance={"algorithm.kd_weight": 0.25, "training.nesterov": 0.75},
    default={"algorithm.kd_weight": 10.0}, default_value=0.8,
    best={"algorithm.kd_weight": 31.4159, "training.nesterov": "a|b"}, best_trial=2, best_value=0.84,
    held_out={"seeds": [7, 8], "default": [0.80, 0.82], "best": [0.83, 0.84]}, gain=0.025, better=True, tried=(),
)  # fmt: skip


@pytest.mark.parametrize("gain", [-0.004, 0.0, 0.004, None])
def test_a_setting_that_is_not_better_is_no_gain_and_not_shown(gain: float | None) -> None:
    worse = FOUND.model_copy(update={"gain": gain, "better": False})
    first, *_, last = told(worse, Path("runs/a")).splitlines()
    assert first.startswith("Nothing better than the default was found") and "31.42" not in first
    assert "over the default" not in first and last.endswith("params.yaml (the default)")
    assert ("may be noise" in first) == (gain == 0.004)
    assert "```" not in markdown(worse, "{}\n")


@pytest.mark.parametrize(
    ("best", "default", "better"),
    [
        ([0.84, 0.85, 0.86], [0.80, 0.82, 0.82], True),
        ([0.84, 0.81, 0.86], [0.80, 0.82, 0.82], False),  # +2.3 points, but the differences are +4, -1 and +4
        ([0.80, 0.82, 0.82], [0.84, 0.85, 0.86], False),
        ([0.90], [0.80], False),
        ([0.84, None, 0.86], [0.80, 0.82, 0.82], False),
        ([0.84, 0.85, 0.86], [0.80, None, 0.82], True),
        ([0.84, None, 0.86], [None, 0.80, 0.82], False),
    ],
    ids=["better", "within the noise", "worse", "one seed", "best diverged", "default diverged", "both diverged"],
)
def test_the_best_setting_has_to_beat_the_noise(best: Any, default: Any, better: bool) -> None:
    assert beats(best, default) is better
