"""The benchmark of peaks: what is measured of which level, and its table."""

from __future__ import annotations

import pytest

from benchmarks.peaks import measured, trials
from benchmarks.pools import APOZ, FAMILIES
from fl_engine.algorithms import FlexFL
from fl_engine.core.costs import count_params
from fl_engine.models.vgg16 import VGG16

TINY = VGG16((3, 32, 32), 10, fc=(64, 64), width=0.25)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_levels_have_a_quarter_half_and_all_of_the_parameters(name: str) -> None:
    family = FAMILIES[name]
    found = trials(family, FlexFL(apoz=APOZ[name]), 8)
    shares = [count_params(family, trial.task.spec) / count_params(family) for trial in found]
    assert [trial.name for trial in found] == ["M1", "M2", "M3"]
    assert shares == pytest.approx([0.25, 0.5, 1.0], abs=0.01)
    teachers = [len(trial.task.distillation.teachers) if trial.task.distillation else 0 for trial in found]
    assert teachers == [0, 2, 4]


@pytest.mark.long
def test_a_larger_level_takes_more() -> None:
    found = measured(TINY, FlexFL(kd_weight=0.0), 30, resident=True)
    assert list(found) == ["tensors", "resident", "with idle"]
    small, middle, large = found["tensors"]
    assert 10 < small < middle < large
    idle = {round(whole - own) for own, whole in zip(found["resident"], found["with idle"], strict=True)}
    assert len(idle) == 1 and min(idle) > 50, "of an idle process with torch"
    assert all(own > 0.7 * alive for own, alive in zip(found["resident"], found["tensors"], strict=True))
