"""When a figure counts as worse: formulas by hand, and how often noise alone fails a night."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fl_engine.core.errors import ConfigError
from flexfleet.files.artifacts import History
from flexfleet.nightly import figures, gate, regress, suite
from flexfleet.nightly.gate import Before, Values, judge, noise
from flexfleet.nightly.pace import machine
from flexfleet.nightly.suite import Figures

THRESHOLDS = {"avg": 0.01, "full": 0.01, "rounds": 0.15, "mb": 0.15, "peak_mb_rounds": 0.1, "pace": 0.2}
DIGITS = suite.path_of("digits")


def test_noise_by_hand() -> None:
    """Groups 1, 2, 3 and 4, 6: s^2 = (2 + 2) / 3; two seeds now, three before."""
    expected = stats.t.ppf(0.95, 3) * math.sqrt(4 / 3 * (1 / 2 + 1 / 3))
    assert noise([9, 9], [1, 2, 3], [[1, 2, 3], [4, 6]], 0.05) == pytest.approx(expected, rel=0.01)
    assert noise([1], [2], [[2]], 0.05) == math.inf, "of one value nobody knows how it spreads"


def one(now: list[float], before: list[float], metric: str = "full") -> gate.Check:
    (check,) = judge({"x": {metric: now}}, [Before("reference", {"x": {metric: before}}, True)], THRESHOLDS)
    return check


def test_a_drop_beyond_threshold_and_noise_fails_and_says_what() -> None:
    check = one([0.80, 0.81, 0.82], [0.90, 0.91, 0.92, 0.90, 0.91, 0.92])
    assert check.failed and check.worse_by == pytest.approx(0.10)
    assert (check.label, check.metric, check.against) == ("x", "full", "reference")
    assert (check.now, check.before) == (pytest.approx(0.81), pytest.approx(0.91))


@pytest.mark.parametrize(
    ("measured", "what", "figure"),
    [("accuracy", "accuracy of the full model", "81.00 %"), ("r2", "r2 of the full model", "0.8100")],
)
def test_a_figure_is_told_in_the_unit_of_the_tasks_metric(measured: str, what: str, figure: str) -> None:
    values = {"x": {"full": [0.80, 0.81, 0.82], "mb": [3.0, 3.0, 3.3]}}
    full, mb = judge(values, [Before("reference", values, True)], THRESHOLDS, {"x": measured})
    assert (gate.said(full), regress.figure(full, full.now)) == (what, figure)
    assert (gate.said(mb), regress.figure(mb, mb.now)) == (f"MB sent to the {measured}", "3.1")


def test_a_difference_of_accuracies_is_told_in_points_and_none_has_no_sign() -> None:
    check = one([0.60] * 3, [0.80, 0.81, 0.79])
    verdict = regress.Verdict(suite="s", id="n", passed=False, checks=(check,), since=None, commits=(), notes=(),
                              report="page", mlflow_run_id=None)  # fmt: skip
    assert "60.00 %, reference 80.00 %: worse by 20.00 % points (threshold 1.00 % points, " in regress.told(verdict)
    same = one([3.0] * 3, [3.0] * 3, "rounds")
    assert regress.difference(same, same.worse_by) == "0"


@pytest.mark.parametrize(
    ("now", "before", "why"),
    [
        ([0.895, 0.896, 0.897], [0.901, 0.902, 0.903] * 3, "beyond noise, below the threshold"),
        ([0.80, 0.81, 0.82], [0.99, 0.70, 0.95, 0.72] * 2, "beyond the threshold, within noise"),
        ([0.95, 0.96, 0.97], [0.90, 0.91, 0.92] * 3, "better"),
    ],
)
def test_what_does_not_fail(now: list[float], before: list[float], why: str) -> None:
    assert not one(now, before).failed, why


@pytest.mark.parametrize(
    ("metric", "worse", "fine"), [("rounds", 12.0, 11.0), ("peak_mb_rounds", 11.2, 10.9), ("pace", 12.5, 11.9)]
)
def test_thresholds_of_costs_are_shares_of_the_figure_before(metric: str, worse: float, fine: float) -> None:
    before = [9.99, 10.0, 10.01] * 4
    assert one([worse - 0.01, worse, worse + 0.01], before, metric).failed
    assert not one([fine - 0.01, fine, fine + 0.01], before, metric).failed
    assert not one([1.0, 1.0, 1.0], before, metric).failed, "cheaper"


def test_machines_are_not_compared_with_others() -> None:
    values = {"x": {"full": [0.9] * 3, "pace": [9.0] * 3, "peak_mb_rounds": [9.0] * 3}}
    before = {"x": {"full": [0.9, 0.91, 0.89] * 3, "pace": [1.0, 1.1] * 3, "peak_mb_rounds": [1.0, 1.1] * 3}}
    here = judge(values, [Before("champion", before, True), Before("reference", before, False)], THRESHOLDS)
    assert {(c.metric, c.against) for c in here if c.failed} == {("pace", "champion"), ("peak_mb_rounds", "champion")}
    assert {c.metric for c in here if c.against == "reference"} == {"full"}


def test_what_only_one_side_knows_is_not_compared() -> None:
    checks = judge({"x": {"full": [0.9] * 3}, "y": {"full": [0.1] * 3}},
                   [Before("champion", {"x": {"full": [0.9] * 3, "avg": [1.0]}}, True)], THRESHOLDS)  # fmt: skip
    assert [(c.label, c.metric, c.failed) for c in checks] == [("x", "full", False)]


def test_a_slow_decline_stops_at_the_reference() -> None:
    """Each night is a little worse than its champion, not enough to fail; the reference does not move."""
    reference = {"x": {"full": [0.90 + 0.001 * (i % 3) for i in range(20)]}}
    champion, nights = dict(reference), 0
    while True:
        level = np.mean(champion["x"]["full"]) - 0.004
        now = {"x": {"full": [level - 0.0005, level, level + 0.0005]}}
        checks = judge(now, [Before("champion", champion, True), Before("reference", reference, True)], THRESHOLDS)
        failed = [c.against for c in checks if c.failed]
        if failed:
            break
        champion, nights = now, nights + 1
    assert failed == ["reference"] and nights == 2


# -------------------------------------------------------------------------------------------- the digits suite
def test_a_label_with_another_partition_has_another_task() -> None:
    """Its figures are not compared with those of before; what an algorithm is set to is what is measured."""
    asked = suite.load(DIGITS)
    before = suite.task_of(asked, "uneven", "all_large")
    for key, same in (("all_large:training.lr", False), ("all_large:algorithm.eligible", True)):
        case = asked.cases["uneven"]
        changed = case.model_copy(update={"settings": {**case.settings, key: "another"}})
        cases = asked.model_copy(update={"cases": {"uneven": changed}})
        assert (suite.task_of(cases, "uneven", "all_large") == before) is same
        assert suite.task_of(cases, "uneven", "flexfl") == before


def test_a_label_with_another_algorithm_has_another_task() -> None:
    asked = suite.load(DIGITS)
    before = suite.task_of(asked, "skewed", "flexfl")
    for algorithms, same in (("flexfl=flexfl", True), ("flexfl=heterofl", False)):
        case = asked.cases["skewed"].model_copy(update={"algorithms": algorithms})
        cases = asked.model_copy(update={"cases": {"skewed": case}})
        assert (suite.task_of(cases, "skewed", "flexfl") == before) is same


@pytest.fixture(scope="module")
def reference() -> Figures:
    return Figures.read(DIGITS.with_suffix(".json"))


def test_the_reference_is_of_this_suite_and_of_20_seeds(reference: Figures) -> None:
    asked = suite.load(DIGITS)
    runs = suite.runs_of(asked, "digits", asked.seeds, [], "x")
    labels = {f"{case}/{entry.label}" for case, entries in runs.items() for entry in entries}
    assert labels == set(reference.labels) and len(reference.seeds) >= 20
    for label, of in reference.labels.items():
        assert of.task == suite.task_of(asked, *label.split("/", 1))
        assert all(len(values) >= 20 for values in of.values.values())


@pytest.mark.long
@pytest.mark.parametrize("case", ["skewed", "uneven"])
def test_the_reference_is_of_this_code(
    flexfleet: Any, no_drawings: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Figures, case: str
) -> None:
    """A whole run of its first seed: what costs accuracy is not to wait for a night to be seen. Another processor's
    last bits move it by less than this."""
    monkeypatch.chdir(tmp_path)
    asked = suite.load(DIGITS)
    given = {key: value for key, value in (asked.settings | asked.cases[case].settings).items() if ":" not in key}
    sets = ["tracking.mlflow=null", f"seed={asked.seeds[0]}", *(f"{key}={value}" for key, value in given.items())]
    done = flexfleet("run", "--run-id", "a", "--json", sets=sets)
    assert done.code == 0, done.err
    before, history = reference.labels[f"{case}/flexfl"].values, History.read(tmp_path / "runs" / "a" / "history.json")
    for metric in ("avg", "full"):
        assert history.rounds[-1]["metrics"][metric] == pytest.approx(before[metric][0], abs=0.03)
    refused = [line["failure"] for row in history.rounds for line in row["clients"] if "failure" in line]
    assert refused == [], "nobody lies here"


def false_alarms(
    reference: Mapping[str, Values], thresholds: Mapping[str, float], seeds: int, nights: int, seed: int
) -> float:
    """Share of nights that fail although nothing has changed: each night draws `seeds` of the reference's seeds for
    itself and as many for its champion, and is compared with this champion and with the rest."""
    rng = np.random.default_rng(seed)
    failed = 0
    for _ in range(nights):
        now: dict[str, dict[str, list[float]]] = {}
        champion: dict[str, dict[str, list[float]]] = {}
        rest: dict[str, dict[str, list[float]]] = {}
        for label, values in reference.items():
            orders: dict[int, Any] = {}
            for metric, each in values.items():
                # One draw for all metrics of the same runs.
                order = orders.setdefault(len(each), rng.permutation(len(each)))
                parts = np.split(order, [seeds, 2 * seeds])
                for night, part in zip((now, champion, rest), parts, strict=True):
                    night.setdefault(label, {})[metric] = [each[i] for i in part]
        others = [Before("champion", champion, True), Before("reference", rest, True)]
        failed += any(check.failed for check in judge(now, others, thresholds))
    return failed / nights


def test_noise_alone_rarely_fails_a_night(reference: Figures) -> None:
    labels = {label: of.values for label, of in reference.labels.items()}
    rate = false_alarms(labels, suite.load(DIGITS).thresholds, seeds=3, nights=2000, seed=0)
    assert rate <= 0.01


def test_a_gate_without_bounds_would_cry_wolf(reference: Figures, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = {label: of.values for label, of in reference.labels.items()}
    monkeypatch.setattr(gate, "noise", lambda *_: 0.0)
    assert false_alarms(labels, suite.load(DIGITS).thresholds, seeds=3, nights=200, seed=0) > 0.2


@pytest.mark.parametrize("given", [{}, {"backend": "in_process"}, {"backend": "processes"}])
def test_memory_and_pace_are_compared_with_nights_of_the_same_backend_alone(
    reference: Figures, given: dict[str, str]
) -> None:
    """The memory is the coordinator's. Figures that do not say which backend made them were made by the default."""
    asked = suite.load(DIGITS)
    for backend in ("in_process", "processes"):
        runs = suite.runs_of(asked, "digits", asked.seeds, [f"run.backend={backend}"], "x")
        night = regress.Night(DIGITS, asked, "x", runs)
        now = reference.model_copy(update={"machine": figures._machine(night, figures.PROCESSES)})
        before = reference.model_copy(update={"machine": machine() | {"runs in": figures.PROCESSES} | given})
        checks, notes = regress.compared(night, now, None, before)
        same = given.get("backend", "in_process") == backend
        assert ("pace" in {check.metric for check in checks}) is same
        assert any("run.backend, and are not compared" in note for note in notes) is not same


# -------------------------------------------------------------------------------------------- a suite's file
GOOD = DIGITS.read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD.replace("[0, 1, 2]", "[0, 1]"), "seeds.*at least 3"),
        (GOOD.replace("avg: 0.01, ", ""), "a threshold above 0 is expected for each"),
        (GOOD.replace("avg: 0.01", "avg: 0"), "a threshold above 0 is expected for each"),
        (GOOD.replace("thresholds", "threshold"), r"unknown parameter 'threshold' \(did you mean 'thresholds'\?\)"),
        (GOOD.replace("to: 0.8", "to: 80"), "cases.skewed.to: input should be less than or equal to 1, got 80"),
        ("cases: [", "is no suite"),
        ("", "is no suite: seeds: field required"),
        ("- seeds", "is no suite: input should be .*, got \\['seeds'\\]"),
    ],
)
def test_a_file_that_is_no_suite(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"own\.yaml is no suite: ") as told:
        suite.load(tmp_path / "own.yaml")
    assert re.search(said, str(told.value), re.DOTALL)
