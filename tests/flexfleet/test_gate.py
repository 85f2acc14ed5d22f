"""When a figure of a nightly regression run counts as worse, and how often noise alone fails a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fl_engine.core.errors import ConfigError
from flexfleet.experiments import nightly_gate, nightly_suite
from flexfleet.experiments.nightly_gate import OF_MACHINE, LabelFigures, NightlyFigures, judge
from flexfleet.experiments.nightly_verdict import HIGHER, PASSED, REFERENCE, Check

DIGITS = nightly_suite.FOLDER / "digits.yaml"
THRESHOLDS = nightly_suite.read_suite(DIGITS, nightly_suite.NightlySuite).thresholds
HERE, THERE = {"cpu": "here"}, {"cpu": "there"}
Values = Mapping[str, Sequence[float]]


def made(
    values: Values, machine: Mapping[str, str] = HERE, label: str = "x", metric: str = "accuracy"
) -> NightlyFigures:
    """Figures of one label with seeds 0, 1, 2, ..."""
    seeds = tuple(range(max(map(len, values.values()))))
    of = LabelFigures(task="t", values={name: tuple(each) for name, each in values.items()}, curve=(), metric=metric)
    return NightlyFigures(
        suite="s", id="n", when="now", commit=None, machine=dict(machine), seeds=seeds, labels={label: of}
    )


def one(now: Sequence[float], reference: Sequence[float], metric: str = "full", *passed: Sequence[float]) -> Check:
    runs = [made({metric: each}) for each in passed]
    return judge(made({metric: now}), made({metric: reference}), runs, THRESHOLDS)[0]


def test_pooled_spread_by_hand() -> None:
    assert nightly_gate.pooled_spread([[1, 2, 3], [4, 6], [9]]) == pytest.approx(math.sqrt((2 + 2) / 3))
    assert nightly_gate.pooled_spread([[1], [2]]) == 0


def test_gate_compares_seed_by_seed_with_the_formula() -> None:
    """Seeds 0 to 2 of the reference, and a passed run, whose spread around each seed's mean is 1 and 2."""
    reference, passed, now = [10.0, 20, 30, 99, 99], [12.0, 24, 30], [12.0, 23, 34]
    checks = judge(made({"mb": now}), made({"mb": reference}), [made({"mb": passed})], {**THRESHOLDS, "mb": 0.01})
    spread = math.sqrt((2 * 1 + 2 * 4 + 0) / 3)
    found = {check.against: check for check in checks}
    for against, before in ((REFERENCE, 20.0), (PASSED, 22.0)):
        check = found[against]
        assert (check.now, check.before, check.worse_by) == (23, before, 23 - before)
        assert check.allowed == pytest.approx(nightly_gate.Z * spread * math.sqrt(1 / 3 + 1 / 3))
        assert check.limit == pytest.approx(before + check.allowed) and not check.failed


def test_gate_takes_the_threshold_when_runs_repeat_exactly() -> None:
    reference = [0.90, 0.70, 0.80, 0.1, 0.99]
    check = one([0.88, 0.68, 0.78], reference, "full", reference[:3])
    assert check.allowed == THRESHOLDS["full"] and check.failed
    assert not one([0.89, 0.69, 0.79], reference).failed
    assert not one([0.99, 0.99, 0.99], reference).failed


def test_memory_and_pace_are_compared_on_equal_machines_only() -> None:
    now = made({"full": [0.9] * 3, "pace": [9.0] * 3, "peak_mb_rounds": [9.0] * 3})
    before = {"full": [0.9] * 3, "pace": [1.0] * 3, "peak_mb_rounds": [1.0] * 3}
    checks = judge(
        now, made(before, THERE), [made(before, HERE), made({**before, "pace": [99.0] * 3}, THERE)], THRESHOLDS
    )
    assert {(c.metric, c.against) for c in checks if c.failed} == {("pace", PASSED), ("peak_mb_rounds", PASSED)}
    assert {c.metric for c in checks if c.against == REFERENCE} == {"full"}


def test_slow_decline_fails_against_the_reference() -> None:
    """Each run is a little worse than those that passed, not enough to fail; the reference does not move."""
    reference, passed = made({"full": [0.9, 0.91, 0.92]}), list[NightlyFigures]()
    while True:
        lost = 0.004 * (len(passed) + 1)
        now = made({"full": [0.9 - lost, 0.91 - lost, 0.92 - lost]})
        if failed := [c.against for c in judge(now, reference, passed[-20:], THRESHOLDS) if c.failed]:
            break
        passed.append(now)
    assert failed == [REFERENCE] and 3 <= len(passed) <= 12


# -------------------------------------------------------------------------------------------- the digits suite
def test_task_digest_ignores_the_algorithms_options() -> None:
    asked = nightly_suite.read_suite(DIGITS, nightly_suite.NightlySuite)
    before = nightly_suite.task_of(asked, "uneven", "all_large")
    for key, same in (("all_large:training.lr", False), ("all_large:algorithm.eligible", True)):
        case = asked.cases["uneven"]
        changed = case.model_copy(update={"settings": {**case.settings, key: "another"}})
        cases = asked.model_copy(update={"cases": {"uneven": changed}})
        assert (nightly_suite.task_of(cases, "uneven", "all_large") == before) is same
        assert nightly_suite.task_of(cases, "uneven", "flexfl") == before


@pytest.fixture(scope="module")
def reference() -> NightlyFigures:
    return NightlyFigures.read(DIGITS.with_suffix(".json"))


def test_reference_matches_the_suite_and_has_20_seeds(reference: NightlyFigures) -> None:
    tasks = nightly_suite.nightly_run(DIGITS, "x", {}).tasks
    assert tasks == {label: figures.task for label, figures in reference.labels.items()}
    assert len(reference.seeds) >= 20
    assert all(len(values) >= 20 for each in reference.labels.values() for values in each.values.values())


# ------------------------------------------------------------------------------- unchanged code, and what is caught
MACHINE_NOISE = 0.05
"""Standard deviation of a run's peak memory or pace, as a share, when its seed is run again (memory: measured 0.03)."""
OTHER_BITS = {"avg": 0.003, "full": 0.006, "rounds": 0.07, "mb": 0.07}
"""Standard deviations of a seed's figures when other code computes other last bits: absolute for accuracies, shares for
the others (measured on 8 seeds of `skewed`, with two versions of the code)."""


def tonight(reference: NightlyFigures, rng: np.random.Generator, other_bits: bool = False) -> NightlyFigures:
    """A nightly regression run of 3 seeds with unchanged code, on the reference's machine. Its seeds give the
    reference's figures again, unless bits differ."""
    labels = {}
    for label, of in reference.labels.items():
        values: dict[str, tuple[float, ...]] = {}
        for metric, each in of.values.items():
            again = np.array(each[:3])
            if metric in OF_MACHINE:
                again = again * rng.normal(1, MACHINE_NOISE, 3)
            elif other_bits and metric in OTHER_BITS:
                scale = 1.0 if metric in HIGHER else again
                again = again + scale * rng.normal(0, OTHER_BITS[metric], 3)
            values[metric] = tuple(again.tolist())
        labels[label] = of.model_copy(update={"values": values})
    return reference.model_copy(update={"seeds": reference.seeds[:3], "labels": labels})


def worse(figures: NightlyFigures, label: str, metric: str) -> NightlyFigures:
    factor, shift = {"full": (1, -0.02), "avg": (1, -0.02), "rounds": (1.3, 0), "mb": (1.3, 0)}.get(metric, (1.5, 0))
    of = figures.labels[label]
    values = {**of.values, metric: tuple(value * factor + shift for value in of.values[metric])}
    return figures.model_copy(update={"labels": {**figures.labels, label: of.model_copy(update={"values": values})}})


@pytest.fixture(scope="module")
def measured(reference: NightlyFigures) -> NightlyFigures:
    """The digits suite's reference, with memory and pace for each seed."""
    labels = {}
    for label, of in reference.labels.items():
        machine = {name: tuple(11.0 + 0.9 * math.sin(seed) for seed in reference.seeds) for name in OF_MACHINE}
        labels[label] = of.model_copy(update={"values": {**machine, **of.values}})
    return reference.model_copy(update={"labels": labels})


@pytest.mark.parametrize("other_bits", [False, True])
def test_gate_passes_20_unchanged_nightly_runs(measured: NightlyFigures, other_bits: bool) -> None:
    failed = 0
    for seed in range(10):
        rng, passed = np.random.default_rng(seed), list[NightlyFigures]()
        for _ in range(20):
            now = tonight(measured, rng, other_bits)
            good = not any(check.failed for check in judge(now, measured, passed, THRESHOLDS))
            failed += not good
            passed += [now] if good else []
    assert failed == 0


@pytest.mark.parametrize("metric", nightly_suite.METRICS)
def test_gate_fails_each_regression_after_one_passed_run(measured: NightlyFigures, metric: str) -> None:
    """Memory x 1.5, rounds and MB x 1.3, accuracy - 2 points, pace x 1.5; the champion has 3 seeds."""
    for label in (label for label, of in measured.labels.items() if metric in of.values):
        for seed in range(20):
            rng = np.random.default_rng(seed)
            passed, now = tonight(measured, rng), worse(tonight(measured, rng), label, metric)
            failed = {(c.label, c.metric) for c in judge(now, measured, [passed], THRESHOLDS) if c.failed}
            assert failed == {(label, metric)}


# -------------------------------------------------------------------------------------------- a suite's file
@pytest.mark.parametrize("sets", [{"publish.models": True}, {}])
def test_suite_must_not_publish_before_the_gate(sets: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    suite = yaml.safe_load(DIGITS.read_text())
    path.write_text(yaml.safe_dump(suite if sets else {**suite, "settings": {"publish.models": True}}))
    with pytest.raises(ConfigError, match=r"publish\.models"):
        nightly_suite.nightly_run(path, "x", sets)
