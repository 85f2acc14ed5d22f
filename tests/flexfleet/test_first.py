"""Who is first: Student's paired t test of the highest against each other label, adjusted by Holm's method."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexfleet.experiments import comparison_file, comparison_report
from flexfleet.experiments.comparison_file import ComparisonFile, LabelScore, OneRun, Spread, Summary
from flexfleet.experiments.ranking import FEWEST, First, firsts, notes, rows
from flexfleet.files.measure import Measure

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


def test_by_hand() -> None:
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


def test_holm_counts_the_labels_below_the_highest() -> None:
    """Differences of mean d and std 1 over three seeds have t = d sqrt 3. At d = 5 p is .013; of four such labels the
    smallest p times four is above 5 %, of three it is below."""
    others = {f"x{i}": [a - 5 - e for a, e in zip(A, (-1, 0, 1), strict=True)] for i in range(4)}
    p = p_of(5 * math.sqrt(3))
    assert 3 * p < 0.05 < 4 * p
    three = of(a=A, **{name: others[name] for name in ("x0", "x1", "x2")})
    assert three.first and three.behind["x0"].p_holm == pytest.approx(3 * p)
    four = of(a=A, **others)
    assert not four.first and four.not_told_apart == tuple(others)


def test_too_few_seeds_and_missing_figures_make_no_claim() -> None:
    assert FEWEST == 3 and firsts({"full": {"a": A[:2], "b": NEAR[:2]}}) is None
    found = firsts({"avg": {"a": A, "large": [None] * 3}, "full": {"a": A, "large": FAR}})
    assert found is not None and list(found) == ["full"], "one label alone has avg"
    for seeds in (1, 2):
        assert notes(None, seeds) == ["Fewer than 3 seeds: there is no paired test, so no row is called first."]
    assert notes(None, 3) == [], "an older comparison"


def test_equal_differences_have_no_test_and_show_nothing() -> None:
    found = of(a=[0.3, 0.4, 0.5], b=[0.2, 0.3, 0.4], same=[0.3, 0.4, 0.5])
    assert (found.behind["b"].p, found.behind["b"].p_holm) == (None, None)
    assert found.behind["same"].p is None and (found.highest, found.first) == ("a", False)
    assert found.not_told_apart == ("b", "same")
    assert rows({"full": found}, ["b"], Measure()) == (("b", "10.00 ± 0.00, no spread"),)


@given(
    values=st.integers(3, 6).flatmap(
        lambda seeds: st.lists(
            st.lists(st.floats(0, 1, width=32), min_size=seeds, max_size=seeds), min_size=2, max_size=5
        )
    ),
    data=st.data(),
)
def test_the_order_of_rows_and_seeds_does_not_matter(values: list[list[float]], data: st.DataObject) -> None:
    labels = {f"x{i}": each for i, each in enumerate(values)}
    names = data.draw(st.permutations(list(labels)))
    order = data.draw(st.permutations(range(len(values[0]))))
    found, other = of(**labels), of(**{name: [labels[name][i] for i in order] for name in names})
    assert (found.highest, found.first, set(found.not_told_apart)) == (
        other.highest,
        other.first,
        set(other.not_told_apart),
    )
    assert {n: b.mean for n, b in found.behind.items()} == pytest.approx({n: b.mean for n, b in other.behind.items()})
    assert fmean(labels[found.highest]) == max(map(fmean, values))
    assert all(each.mean >= -1e-12 for each in found.behind.values())
    assert found.first == all(each.p_holm is not None and each.p_holm < 0.05 for each in found.behind.values())


# ------------------------------------------------------------------------------------------- in a comparison
def compared(**full: list[float]) -> ComparisonFile:
    """Labels of one level: each has full, and no avg. The best round's is .1 above the last one's."""
    nothing = Spread(mean=0.0, std=None)

    def run(seed: int, value: float) -> OneRun:
        zero = dict.fromkeys(("mb_down", "mb_up", "waste", "seconds"), 0.0)
        best = {"round": 2.0, "avg": None, "full": value + 0.1}
        about = {"run_id": f"r{seed}", "model_sha256": "0" * 64, "mlflow_run_id": None, "seconds_simulated": None}
        return OneRun(seed=seed, avg=None, full=value, best=best, **zero, **about)

    score = LabelScore(round=nothing, avg=None, full=nothing)
    costs = dict.fromkeys(("mb_down", "mb_up", "waste", "seconds"), nothing)
    results = {
        label: Summary(
            algorithm=label, settings={}, levels=(100.0,), last=score, best=score, **costs, seconds_simulated=None,
            reached=(), runs=tuple(run(seed, value) for seed, value in enumerate(values)),
        )
        for label, values in full.items()
    }  # fmt: skip
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
