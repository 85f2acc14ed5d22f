"""Student's paired t test, adjusted by Holm's method: of the highest label against all others, and of two labels."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError
from flexfleet.api.comparing import Paired, paired
from flexfleet.experiments import comparison_file, comparison_report
from flexfleet.experiments.comparison_file import ComparisonFile, LabelScore, OneRun, Spread, known_spread
from flexfleet.experiments.ranking import FEWEST, First, firsts, holm, notes, rows
from flexfleet.files.measure import Measure
from tests.harness.comparisons import summary

A = [10.0, 20.0, 30.0]
NEAR = [a - d for a, d in zip(A, (1, 2, 3), strict=True)]
FAR = [a - d for a, d in zip(A, (9.9, 10, 10.1), strict=True)]


def of(**values: list[Any]) -> First:
    found = firsts({"full": values})
    assert found is not None
    return found["full"]


def p_of(t: float) -> float:
    """With two degrees of freedom P(|t| > t) is 1 - t / sqrt(2 + t^2)."""
    return 1 - t / math.sqrt(2 + t * t)


def test_first_by_hand() -> None:
    """A is (1, 2, 3) above `near`: mean 2, std 1, t = 2 sqrt 3, p .074. It is (9.9, 10, 10.1) above `far`: mean 10, std
    .1, t = 100 sqrt 3, p 3.3e-5, by Holm twice that. So A is not first beside both, and first beside `far` alone."""
    found = of(near=NEAR, a=A, far=FAR)
    near, far = found.behind["near"], found.behind["far"]
    assert (found.highest, found.first, found.not_told_apart) == ("a", False, ("near",))
    assert (near.mean, near.std) == (2, 1) and near.p == near.p_holm == pytest.approx(p_of(2 * math.sqrt(3)))
    assert near.p == pytest.approx(0.0741799, abs=1e-7)
    assert far.mean == pytest.approx(10) and far.std == pytest.approx(0.1)
    assert far.p == pytest.approx(p_of(100 * math.sqrt(3)), rel=1e-6)
    assert far.p_holm == pytest.approx(2 * p_of(100 * math.sqrt(3)), rel=1e-6)
    alone = of(a=A, far=FAR)
    assert (alone.highest, alone.first, alone.not_told_apart) == ("a", True, ())
    assert alone.behind["far"].p_holm == alone.behind["far"].p


def test_too_few_seeds_and_missing_figures_make_no_claim() -> None:
    assert FEWEST == 3 and firsts({"full": {"a": A[:2], "b": NEAR[:2]}}) is None
    found = firsts({"local_avg": {"a": A, "large": [None] * 3}, "full": {"a": A, "large": FAR}})
    assert found is not None and list(found) == ["full"], "one label alone has local_avg"
    for seeds in (1, 2):
        assert notes(None, seeds) == ["Fewer than 3 seeds: there is no paired test, so no variant is ranked first."]
    assert notes(None, 3) == [], "an older comparison"


def test_equal_differences_have_no_test_and_show_nothing() -> None:
    found = of(a=[0.3, 0.4, 0.5], b=[0.2, 0.3, 0.4], same=[0.3, 0.4, 0.5])
    assert (found.behind["b"].p, found.behind["b"].p_holm) == (None, None)
    assert found.behind["same"].p is None and (found.highest, found.first) == ("a", False)
    assert found.not_told_apart == ("b", "same")
    assert rows({"full": found}, ["b"], Measure()) == (("b", "10.00 ± 0.00, no spread"),)


# ------------------------------------------------------------------------------------------- in a comparison
def compared(**full: list[float]) -> ComparisonFile:
    """Labels of one level. The best round's is .1 above the last one's."""

    def run(seed: int, value: float) -> OneRun:
        zero = dict.fromkeys(("mb_down", "mb_up", "waste", "seconds"), 0.0)
        best = {"round": 2.0, "avg": value + 0.1, "full": value + 0.1}
        about = {"run_id": f"r{seed}", "model_sha256": "0" * 64, "mlflow_run_id": None, "seconds_simulated": None}
        return OneRun(seed=seed, avg=value, full=value, best=best, **zero, **about)

    def last(values: list[float]) -> LabelScore:
        mean = known_spread(values)
        return LabelScore(round=Spread(mean=5, std=None), avg=mean, full=mean)

    results = {
        label: summary(label, runs=tuple(run(seed, value) for seed, value in enumerate(values)), last=last(values))
        for label, values in full.items()
    }
    seeds = tuple(range(len(next(iter(full.values())))))
    first = firsts(comparison_file.by_seed(results))
    return ComparisonFile(
        id="x", labels=tuple(results), seeds=seeds, rounds=5, settings={}, results=results, first=first
    )


SCALED = {name: [value / 100 for value in each] for name, each in {"a": A, "near": NEAR, "far": FAR}.items()}


def test_labels_are_compared_within_a_case() -> None:
    hard, easy = ({"partition.alpha": alpha} for alpha in (0.1, 1.0))
    base = compared(
        a=SCALED["a"],
        far=SCALED["far"],
        **{f"{n}2": [v + 0.5 for v in SCALED[n]] for n in ("a", "far")},
        alone=[0.1] * 3,
    )

    def varied(*of: dict[str, Any], at: bool = False) -> ComparisonFile:
        told = zip(base.results.items(), of, strict=True)
        results = {n: r.model_copy(update={"varied": each, "at": each if at else {}}) for (n, r), each in told}
        cases = comparison_file.cases_of(results)
        return base.model_copy(update={"results": results, "cases": cases, "first": None if cases else base.first})

    c = varied(hard, hard, easy, easy, {"partition.alpha": 9.0})
    assert [(case.settings, case.labels) for case in c.cases] == [
        (hard, ("a", "far")), (easy, ("a2", "far2")), ({"partition.alpha": 9.0}, ("alone",))
    ]  # fmt: skip
    assert c.cases[0].first == firsts({f: {n: v for n, v in by.items() if n in ("a", "far")}
                                       for f, by in comparison_file.by_seed(base.results).items()})  # fmt: skip
    assert c.cases[1].first["full"].first and c.cases[1].first["full"].highest == "a2" and c.cases[2].first == {}
    tables = [table for table in comparison_report.tables(c) if table.title.startswith("Behind the highest")]
    assert [table.title for table in tables] == [
        f"Behind the highest, % points, with partition.alpha {alpha}: paired over the seeds 0, 1, 2"
        for alpha in (0.1, 1.0)
    ]
    assert [row[0] for row in tables[1].rows] == ["a2", "far2"] and tables[1].rows[0][1] == "first"
    assert "full last with partition.alpha 0.1: a is first." in comparison_report.text(c)
    apart = [{"noise.labels": i / 10} for i in range(5)]
    assert varied(*apart) == base.model_copy(update={"results": varied(*apart).results}), "noise is what is compared"
    fleets = [{"fleet.tiers": each} for each in "aabbb"]
    assert varied(*fleets) == base.model_copy(update={"results": varied(*fleets).results}), "a row may have its fleet"
    assert [case.labels for case in varied(*fleets, at=True).cases] == [("a", "far"), ("a2", "far2", "alone")]
    assert ComparisonFile.model_validate_json(c.model_dump_json()) == c and "cases" not in base.model_dump()


# --------------------------------------------------------------------------------- two labels, from Python
def test_holm_by_hand() -> None:
    # 4 x 0.01, 3 x 0.02, 2 x 0.03 = 0.06 and so is the one before, 1 x 0.04 is smaller than that.
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


def test_interval_and_p_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, standard error 1 / sqrt 3, t = 2 sqrt 3, half the width 4.302653 / sqrt 3."""
    found = paired({"a": [2.0, 4.0, 6.0], "b": [1.0, 2.0, 3.0]}, (0, 1, 2), "a", "b", "full")
    assert found.differences == (1.0, 2.0, 3.0)
    assert found.mean == 2.0
    assert found.interval == pytest.approx((2 - 2.484137, 2 + 2.484137), abs=1e-5)
    assert found.p == pytest.approx(1 - math.sqrt(12) / math.sqrt(14))  # 2 degrees of freedom, t^2 = 12
    assert found.p_holm == found.p
    assert found.pairs == 1


def test_one_seed_and_equal_differences_have_no_test() -> None:
    for a, b, mean in (([0.5], [0.25], 0.25), ([0.3, 0.4], [0.2, 0.3], 0.1), ([0.3, 0.4], [0.3, 0.4], 0.0)):
        found = paired({"a": a, "b": b}, range(len(a)), "a", "b")
        assert found.mean == pytest.approx(mean) and "No test" in str(found)
        assert (found.interval, found.p, found.p_holm) == (None, None, None)
    far = paired({"a": [1 + k * 1e-9 for k in range(9)], "b": [0.0] * 9}, range(9), "a", "b")
    assert far.p is not None and far.p < 1e-12 and "p < .001" in str(far)


def test_labels_without_the_metric_are_in_no_pair() -> None:
    values: dict[str, list[float | None]] = {"a": [0.1, 0.3], "b": [0.2, 0.1], "large": [None, None]}
    found: Paired = paired(values, (0, 1), "a", "b")
    assert found.pairs == 1
    for wrong in ("large", "lage", "a"):
        with pytest.raises(ConfigError):
            paired(values, (0, 1), "a", wrong)
