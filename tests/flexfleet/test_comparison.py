"""The arithmetic of a comparison, on histories that a person can check: what an accuracy took, means, deviations."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fl_engine.models.chains import SmallCNN
from fl_engine.storage.checkpoints import Row
from fl_engine.testing.tiny import tiny_pool
from flexfleet.config import Config, Range, algorithm, load_config
from flexfleet.experiments import comparison_report, summarise
from flexfleet.experiments.comparison_file import ComparisonFile, Spread, spread
from flexfleet.experiments.comparison_tables import cell, differences
from flexfleet.experiments.tune_report import Tuned, beats, text
from flexfleet.files.measure import highest
from flexfleet.reports.page import NONE
from tests.harness.comparisons import summary


def rows(*measured: tuple[float | None, float], simulated: bool = True) -> tuple[Row, ...]:
    """A round for each (full, MB down and up), each of 2 s, or 10 s on the fleet; full None: not evaluated."""
    out = []
    for i, (full, mb) in enumerate(measured):
        metrics = {"bytes_down": 0.75e6 * mb, "bytes_up": 0.25e6 * mb, "seconds_round": 2.0, "clients_trained": 3.0}
        metrics |= {"seconds_simulated": 10.0} if simulated else {}
        metrics |= {"avg": full - 0.1, "full": full} if full is not None else {}
        out.append(Row(round=i, metrics=metrics, clients=()))
    return tuple(out)


SLOW = rows((0.2, 1), (0.4, 1), (None, 1), (0.5, 1), (0.3, 1))
FAST = rows((0.4, 2), (0.5, 2), (0.7, 2), (0.6, 2), (0.6, 2))


def near(found: Spread | None, mean: float, std: float | None) -> bool:
    return found is not None and found.model_dump() == {"mean": pytest.approx(mean), "std": pytest.approx(std)}


def test_highest_value_within_shares_of_the_rounds() -> None:
    """With five rounds, 50 % are the first three and 80 % the first four."""
    slow, fast = ([row.metrics for row in rows] for rows in (SLOW, FAST))
    assert highest(slow, "full") == {50: 0.4, 80: 0.5, 100: 0.5}
    assert highest(slow, "avg") == pytest.approx({50: 0.3, 80: 0.4, 100: 0.4})
    assert highest(fast[::-1], "full") == {50: 0.7, 80: 0.7, 100: 0.7}
    assert highest(slow[2:4], "full") == {50: None, 80: 0.5, 100: 0.5}, "not evaluated in the first half"
    assert highest(fast[:1], "full") == {50: 0.4, 80: 0.4, 100: 0.4}


def test_cost_until_an_accuracy_is_reached() -> None:
    """SLOW reaches 40 % in round 2 after 2 MB, FAST in round 1 after 2 MB."""
    found = summarise.reached((0, 1), (SLOW, FAST), 0.4)
    assert (found.accuracy, found.seeds) == (0.4, (0, 1))
    assert near(found.rounds, 1.5, 0.5**0.5)
    assert near(found.mb, 2, 0)
    assert near(found.seconds, 3, 2**0.5)
    assert near(found.seconds_simulated, 15, 50**0.5)


def test_accuracy_that_only_some_seeds_reach() -> None:
    some = summarise.reached((5, 7), (SLOW, FAST), 0.55)
    assert (some.seeds, some.rounds, some.mb) == ((7,), Spread(mean=3, std=None), Spread(mean=6, std=None))
    none = summarise.reached((5, 7), (SLOW, FAST), 0.8)
    assert (none.seeds, none.rounds, none.mb, none.seconds, none.seconds_simulated) == ((), None, None, None, None)
    # What is not evaluated is not known: round 3 of SLOW may have been there, round 4 is the first that is.
    assert summarise.reached((0,), (SLOW,), 0.45).rounds == Spread(mean=4, std=None)
    assert summarise.reached((0,), (SLOW,), 0.5).rounds == Spread(mean=4, std=None), "the accuracy itself counts"


def test_simulated_clock_is_optional() -> None:
    assert summarise.simulated(SLOW) == 50
    untimed = rows((0.5, 1), (0.6, 1), simulated=False)
    assert summarise.simulated(untimed) is None
    assert summarise.simulated((*SLOW[:1], *untimed)) is None, "a part of the rounds is no sum"
    assert summarise.reached((0,), (untimed,), 0.5).seconds_simulated is None
    idle = untimed[0].model_copy(update={"metrics": untimed[0].metrics | {"clients_trained": 0.0}})
    assert summarise.simulated((*SLOW[:1], idle)) == 10, "nobody trained: nobody was waited for"


@pytest.mark.parametrize(
    ("best", "targets"),
    [
        (0.72, (0.55, 0.6, 0.65, 0.7)),
        (0.7, (0.5, 0.55, 0.6, 0.65)),
        (0.12, (0.05, 0.1)),
        (0.05, ()),
        (1.0, (0.8, 0.85, 0.9, 0.95)),
    ],
)
def test_default_accuracies_to_reach(best: float, targets: tuple[float, ...]) -> None:
    measured = {"a": rows((best / 2, 1)), "b": rows((best, 1), (best / 3, 1))}
    runs: Any = {label: [SimpleNamespace(rows=each)] for label, each in measured.items()}
    assert summarise.default_targets(runs) == targets


def test_means_and_sample_standard_deviations() -> None:
    assert near(spread([1.0, 2.0, 6.0]), 3, 7**0.5)
    assert spread([4.0]) == Spread(mean=4.0, std=None)
    assert spread([]) is None
    assert spread([1.0, None]) is None
    assert cell(Spread(mean=0.8523, std=0.0051), 100) == "85.23 ± 0.51"
    assert cell(Spread(mean=1234.5, std=None)) == "1,234.50"
    assert cell(None) == NONE


# ------------------------------------------------------------------------------------- tables of what it took
def test_energy_to_reach_an_accuracy_is_shown_if_it_is_known() -> None:
    slow, fast = (
        [row.model_copy(update={"metrics": row.metrics | {"joules": 4.0}}) for row in each] for each in (SLOW, FAST)
    )
    reached = (summarise.reached((0, 1), (slow, fast), 0.4),)
    results = {"a": summary("all_large", reached=reached, joules=spread([summarise.joules(slow), 10.0]))}
    c = ComparisonFile(id="x", labels=("a",), seeds=(0, 1), rounds=5, settings={}, results=results)
    *_, cost, target = comparison_report.tables(c)
    assert dict(zip(cost.head, cost.rows[0], strict=True))["joules"] == "15.00 ± 7.07"
    assert dict(zip(target.head, target.rows[0], strict=True))["joules"] == "6.00 ± 2.83"
    assert summarise.joules(SLOW) is None


def test_cost_to_reach_accuracies() -> None:
    """40 % after (2, 1) rounds of 10 s and (2, 2) MB; 60 % in the second seed only, after 3 rounds; 80 % never."""
    reached = tuple(summarise.reached((0, 1), (SLOW, FAST), target) for target in (0.4, 0.6, 0.8))
    clock = spread([summarise.simulated(each) for each in (SLOW, FAST)])
    results = {"a": summary("all_large", reached=reached, seconds_simulated=clock)}
    c = ComparisonFile(id="x", labels=("a",), seeds=(0, 1), rounds=5, settings={}, results=results)
    table = comparison_report.tables(c)[-1]
    assert table.title == "Cost to reach an accuracy with the full model"
    assert table.head == ("algorithm", "to reach", "seeds", "rounds", "simulated s", "MB down", "MB up")
    assert table.rows == (
        ("a", "40 %", "2 of 2", "1.5 ± 0.7", "15.0 ± 7.1", "1.50 ± 0.00", "0.50 ± 0.00"),
        ("a", "60 %", "1 of 2", "3", "30.0", "4.50", "1.50"),
        ("a", "80 %", "0 of 2", NONE, NONE, NONE, NONE),
    )
    found = comparison_report.figures(c)["a"]
    assert [found[f"seeds_to_{to}"] for to in ("0.4", "0.6", "0.8")] == [2, 1, 0]
    assert (found["rounds_to_0.4"], found["seconds_simulated_to_0.4"]) == (1.5, 15)
    assert found["seconds_simulated_to_0.4_std"] == pytest.approx(50**0.5)
    assert found["seconds_simulated_to_0.6"] == 30 and "seconds_simulated_to_0.6_std" not in found
    assert not any(name.startswith(("rounds_to_0.8", "seconds_simulated_to_0.8")) for name in found)


def test_clock_of_a_curve_is_the_mean_over_seeds() -> None:
    """Rounds 1, 2, 4 and 5 of SLOW are scored; the other seed's rounds take twice as long."""
    later = tuple(row.model_copy(update={"metrics": row.metrics | {"seconds_simulated": 20.0}}) for row in SLOW)
    runs: Any = [SimpleNamespace(rows=each) for each in (SLOW, later)]
    assert summarise.clock(runs, "full") == [15, 30, 60, 75]
    untimed: Any = [SimpleNamespace(rows=rows((0.5, 1), simulated=False))]
    assert summarise.clock(untimed, "full") == []


FAMILY = SmallCNN((1, 8, 8), 10)


def found(**rows: list[str]) -> dict[str, dict[str, Any]]:
    configs = {label: load_config(None, [f"algorithm.name={name}", *sets]) for label, (name, *sets) in rows.items()}
    return differences(configs, {label: _pool(config) for label, config in configs.items()})


def _pool(config: Config) -> Any:
    method: Any = algorithm(config)
    return tiny_pool(method, method.network(FAMILY) if hasattr(method, "network") else FAMILY)


# ------------------------------------------------------------------------------------------------- what is found
def test_differences_include_defaults() -> None:
    apart = found(heterofl=["heterofl"], fedrolex=["fedrolex"], flexfl=["flexfl"])
    assert apart == {
        "algorithm.weighting": {"heterofl": "examples", "fedrolex": "uniform", "flexfl": "examples"},
        "algorithm.static_bn": {"heterofl": True, "fedrolex": True, "flexfl": False},
        "algorithm.scaler": {"heterofl": True, "fedrolex": True, "flexfl": False},
        "algorithm.mask_labels": {"heterofl": True, "fedrolex": False, "flexfl": False},
        "algorithm.selection": {"heterofl": "by_capacity", "fedrolex": "by_capacity", "flexfl": "resource_table"},
    }, "widths are equal, and overlap, rounding, rule, kd_weight are options of one row"


def test_differences_use_the_algorithms_own_training() -> None:
    """FedSGD trains one step on all samples, whatever the section says; a selection is told although it is null."""
    apart = found(fedsgd=["fedsgd"], all_large=["all_large", "algorithm.eligible=capable"], adaptivefl=["adaptivefl"])
    assert apart["training.epochs"] == {"fedsgd": 1, "all_large": 5, "adaptivefl": 5}
    for label in ("fedsgd", "all_large"):
        assert apart["algorithm.selection"][label] == {"name": "uniform", "model": "largest"}
    assert apart["algorithm.selection"]["adaptivefl"]["name"] == "curiosity"
    assert apart["algorithm.eligible"] == {"fedsgd": "all", "all_large": "capable"}, "AdaptiveFL has no such option"


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
def test_setting_that_is_not_better_is_not_shown(gain: float | None) -> None:
    worse = FOUND.model_copy(update={"gain": gain, "better": False})
    first, *_, last = text(worse, Path("runs/a")).splitlines()
    assert first.startswith("Nothing better than the default was found") and "31.42" not in first
    assert "over the default" not in first and last.endswith("params.yaml (the default)")
    assert ("may be noise" in first) == (gain == 0.004)


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
def test_best_setting_must_beat_the_noise(best: Any, default: Any, better: bool) -> None:
    assert beats(best, default) is better
