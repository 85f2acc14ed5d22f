"""The sentence with which reports, comparisons and the terminal begin: its claims follow from the results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from flexfleet.experiments import comparison_report
from flexfleet.experiments.comparison_report import answer, rows_of_interest
from flexfleet.files.measure import Measure
from flexfleet.reports import report
from flexfleet.reports.answer import Metric, Standing, compared, named, p_value, traffic
from flexfleet.reports.figure import GREY, PALETTE, SQUARES
from flexfleet.reports.finished_run import load_all
from flexfleet.reports.page import NONE, Table
from tests.flexfleet.test_first import FAR, NEAR, A
from tests.flexfleet.test_first import compared as comparison
from tests.harness.run_folders import write_run

ACCURACY = Metric(Measure())


def standing(name: str, value: float, mb: float = 10) -> Standing:
    return Standing(name, name, value, 40, mb, ("", "", "", ""))


@pytest.mark.parametrize(
    ("main", "other", "tested", "sentence"),
    [
        (0.986, 0.967, {"seeds": 1}, "a reaches 98.6 % accuracy after 40 rounds; +1.9 points over b, with 36 % fewer "
         "bytes; one seed, not tested"),
        (0.93, 0.967, {"seeds": 2}, "a reaches 93.0 % accuracy after 40 rounds; 3.7 points below b, with 36 % fewer "
         "bytes; 2 seeds, not tested"),
        (0.93, 0.967, {"seeds": 3, "p": 0.0496, "apart": True}, "a reaches 93.0 % accuracy after 40 rounds; 3.7 points "
         "below b (p = .049, 3 seeds), with 36 % fewer bytes"),
        (0.986, 0.967, {"seeds": 3, "p": 0.65}, "No significant difference between a (98.6 %) and b (96.7 %) in "
         "accuracy after 40 rounds (p = .65, 3 seeds); a sends 36 % fewer bytes"),
    ],
    ids=["one seed", "two seeds", "significant", "not significant"],
)  # fmt: skip
def test_claim_follows_from_the_test(main: float, other: float, tested: dict[str, Any], sentence: str) -> None:
    assert compared(standing("a", main, 6.4), standing("b", other), ACCURACY, **tested) == sentence


def test_metric_is_formatted_by_its_kind() -> None:
    r2, own = Metric(Measure("r2")), Metric(Measure(), on_clients=True, personal=True)
    assert (r2.score(0.5864), r2.gap(0.01), r2.gap(0.0)) == ("0.586 r2", "+0.010 over", "the same as")
    assert own.name == "accuracy on the clients' own samples"
    assert Metric(Measure(), personal=True).name == "accuracy of the global model"
    assert ACCURACY.gap(0.0004) == "+0.04 points over" and ACCURACY.gap(-0.2) == "20.0 points below"


def test_bytes_and_p_values_are_short() -> None:
    assert [traffic(a, b) for a, b in ((6.4, 10), (13, 10), (21, 10), (10, 10), (1, 0))] == [
        "36 % fewer bytes", "30 % more bytes", "2.1 times the bytes", "the same bytes", "1.0 MB instead of 0.0 MB",
    ]  # fmt: skip
    assert [p_value(p) for p in (0.0004, 0.012, 0.29, 1)] == ["p < .001", "p = .012", "p = .29", "p = 1.00"]


def test_name_of_fedavg_states_who_trains_the_full_model() -> None:
    names = [named("all_large", "all_large", eligible) for eligible in ("capable", None)]
    assert [name.startswith("FedAvg ") for name in names] == [True, True] and names[0] != names[1]
    assert (named("flexfl", "flexfl"), named("mine", "flexfl"), named("own:Mine", "own:Mine")) == (
        "FlexFL", "mine", "own:Mine",
    )  # fmt: skip


# -------------------------------------------------------------------------------------------- results on disk
def test_run_is_described_and_two_runs_are_compared(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "a", "flexfl"), write_run(tmp_path / "b", "all_large")]
    alone, both = (report.answer(load_all(folders[:n])) for n in (1, 2))
    assert (alone.id, both.id) == ("a", "a, b") and "1 of 9 updates failed" in alone.sentence
    assert "7.0 points below FedAvg" in both.sentence and both.sentence.endswith("one seed, not tested")
    assert [tile.value for tile in both.tiles] == ["65.00 %", "10.50 MB", "6.0 s", "1 of 9"]
    other_seed = report.answer(load_all([folders[0], write_run(tmp_path / "c", "flexfl", seed=1)]))
    assert "not compared" in other_seed.sentence


def test_comparison_states_only_significant_differences() -> None:
    near, far = comparison(a=A, near=NEAR), comparison(far=FAR, a=A, near=NEAR)
    assert (
        answer(near).sentence.startswith("No significant difference between a ") and "p = .074" in answer(near).sentence
    )
    assert rows_of_interest(far) == ("far", "a") and "points below a (p < .001, 3 seeds)" in answer(far).sentence
    assert answer(comparison(a=A[:2], far=FAR[:2])).sentence.endswith("2 seeds, not tested")
    assert answer(comparison(a=A)).sentence.endswith("; 3 seeds")


def test_rows_of_interest_have_the_colours_of_their_curves() -> None:
    c = comparison(far=FAR, a=A, near=NEAR)
    first_cells = {row.split(" | ")[0] for row in comparison_report.markdown(c).splitlines()}
    assert {f"| {SQUARES[PALETTE[0]]} **far**", f"| {SQUARES[PALETTE[1]]} **a**", "| near"} <= first_cells
    found = comparison_report.page(c, {"comparison.svg": ""})
    rows = re.findall(
        r'<tr( class="other")?><th scope="row"><span class="chip" style="background:(.*?)"></span>(\w+)', found
    )
    coloured = {("", PALETTE[0], "far"), ("", PALETTE[1], "a"), (' class="other"', GREY, "near")}
    assert set(rows) == coloured


def test_columns_that_are_constant_or_empty_disappear() -> None:
    rows = [("a", "5", "1", NONE), ("b", "5", "2", NONE)]
    found = Table("t", ("name", "rounds", "x", "y"), rows).varying()
    assert (found.head, found.equal) == (("name", "x"), "rounds 5")
    assert Table("t", ("name", "rounds", "x", "y"), rows[:1]).varying().head == ("name", "rounds", "x")
