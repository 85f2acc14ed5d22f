"""The search space of a study, its first trial, and whether sizes fit into the devices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fl_engine.algorithms import FedAvg, HeteroFL, QuantizedFedAvg
from fl_engine.core.contracts import Interval
from fl_engine.core.errors import ConfigError
from fl_engine.core.types import FULL, Pool, PoolModel
from fl_engine.models.chains import SmallCNN
from fl_engine.testing.tiny import tiny_pool
from flexfleet.config import Config, Range, load_config
from flexfleet.experiments import tune_report, tune_space
from flexfleet.experiments.tune import tune
from flexfleet.pipeline.partition import server_of
from flexfleet.pipeline.prepare import Resolved
from tests.harness.settings import refused_at

FAMILY = SmallCNN((1, 8, 8), 10)
ON_DIGITS = ("dataset.name=digits", "model.name=small_cnn", "algorithm.use_apoz=false")


def of_shares(*shares: float, gammas: tuple[float | None, ...] = (None,) * 3) -> Pool:
    return tuple(
        PoolModel(f"M{i}", FULL, 1, share, 1, True, True, gamma=gamma)
        for i, (share, gamma) in enumerate(zip(shares, gammas, strict=False), 1)
    )


def flexfl(*sets: str) -> tuple[Config, Pool]:
    """FlexFL without anything measured, and its pool."""
    resolved = Resolved.of(load_config(None, (*ON_DIGITS, *sets)))
    return resolved.config, resolved.algorithm.pool(resolved.family, {}, server_of(resolved))


# ------------------------------------------------------------------------------------------------- the space
POOL = of_shares(0.3, 0.5, 1.0, gammas=(1.0, 1.21, None))


def test_flexfl_has_a_default_search_space() -> None:
    found = tune_space.space_of(Config(), POOL)
    assert list(found) == [
        "algorithm.gammas.0", "algorithm.gammas.1", "algorithm.kd_weight", "algorithm.adaptive_size"
    ]  # fmt: skip
    first, second = found["algorithm.gammas.0"], found["algorithm.gammas.1"]
    # Up to a fifth away: 1 / 1.2 and 1.21 * 1.2; and the middle of 1 and 1.21, as factors go, is 1.1.
    assert (first.low, first.high) == (pytest.approx(1 / 1.2), pytest.approx(1.1))
    assert (second.low, second.high) == (pytest.approx(1.1), pytest.approx(1.452))
    weight, points = found["algorithm.kd_weight"], found["algorithm.adaptive_size"]
    assert (weight.low, weight.high, weight.log) == (0.1, 100.0, True) and first.log and second.log
    assert (points.low, points.high, points.log) == (2.0, 20.0, False)
    expected = {"algorithm.gammas.0": 1.0, "algorithm.gammas.1": 1.21}
    expected |= {"algorithm.kd_weight": 10.0, "algorithm.adaptive_size": 10.0}
    assert tune_space.defaults(Config(), found, POOL) == expected
    told = tune_report.listed(expected, tune_space.symbols(Config(), found))
    gamma = "\N{GREEK SMALL LETTER GAMMA}"
    assert told == f"{gamma} (gammas.0) 1, {gamma} (gammas.1) 1.21, λ (kd_weight) 10, Γ (adaptive_size) 10"


@pytest.mark.parametrize("name", ["heterofl", f"{__name__}:Backwards"])
def test_missing_or_impossible_search_space_is_refused(name: str) -> None:
    config = load_config(None, (f"algorithm.name={name}",))
    with refused_at("tune.space"):
        tune_space.space_of(config, POOL)


@dataclass(frozen=True)
class Swept(HeteroFL):
    """An algorithm of one's own that says what is worth a search."""

    rate: float | None = None

    def search_space(self, pool: Pool) -> dict[str, Interval]:
        return {
            "rate": Interval(0.1, 1.0, log=True, start=float(len(pool)) / 10),
            "widths.0": Interval(0.3, 0.6),
            "weighting": Interval(choices=("examples", "uniform")),
        }


class Backwards(HeteroFL):
    def search_space(self, pool: Pool) -> dict[str, Interval]:
        return {"widths.0": Interval(low=0.6, high=0.3)}


def test_own_algorithm_declares_its_search_space() -> None:
    """`widths` is (0.5, 0.71, 1.0); `rate` is null, and the algorithm then makes 0.3 of a pool of three."""
    config = load_config(None, (f"algorithm.name={__name__}:Swept",))
    found = tune_space.space_of(config, POOL)
    assert found == {
        "algorithm.rate": Range(low=0.1, high=1.0, log=True), "algorithm.widths.0": Range(low=0.3, high=0.6),
        "algorithm.weighting": Range(choices=("examples", "uniform")),
    }  # fmt: skip
    weighting = {"algorithm.weighting": "examples"}
    start = tune_space.defaults(config, found, POOL)
    assert start == weighting | {"algorithm.rate": 0.3, "algorithm.widths.0": 0.5}
    given = load_config(None, (f"algorithm.name={__name__}:Swept", "algorithm.rate=0.7", "algorithm.widths=[0.2,1.0]"))
    assert tune_space.defaults(given, found, POOL) == weighting | {"algorithm.rate": 0.7}, "0.2 is not in the space"


def test_values_of_lists_are_set_together() -> None:
    found = tune_space.applied(Config(), {"algorithm.gammas.1": 1.5, "algorithm.gammas.0": 0.9, "training.lr": 0.1})
    assert (found.algorithm["gammas"], found.training.lr) == ([0.9, 1.5], 0.1)
    with pytest.raises(ConfigError, match=r"algorithm\.gammas"):
        tune_space.applied(Config(), {"algorithm.gammas.1": 1.5})


@pytest.mark.parametrize(
    ("sets", "path"),
    [
        ("tune.space={seed: {low: 0, high: 9, whole: true}}", "tune.space"),
        ("tune.space={run.precision: {choices: [fp32, bf16]}}", "tune.space"),
        ("tune.space={algorithm: {choices: [heterofl]}}", "tune.space"),
        ("tune.space={training.epochs: {low: 1.5, high: 4, whole: true}}", "tune.space.training.epochs"),
        ("tune.held_out=[0]", "tune.held_out"),
        ("tune.seeds=[1, 1]", "tune.seeds"),
    ],
)
def test_impossible_search_is_refused(quick: tuple[str, ...], own_folder: None, sets: str, path: str) -> None:
    with refused_at(path):
        tune(load_config(None, (*quick, sets)), "a")
    assert not Path("runs").exists()


def test_names_that_require_each_other_can_be_searched() -> None:
    given = "{algorithm.name: {choices: [flexfl, heterofl]}, algorithm.kd_weight: {low: 0, high: 1}}"
    tune_space.check_names(load_config(None, ("algorithm.name=heterofl", f"tune.space={given}")))
    given = given.replace("[flexfl, heterofl]", "[heterofl, flexfl, all_large]")  # whatever the order of the choices
    tune_space.check_names(load_config(None, ("algorithm.name=heterofl", f"tune.space={given}")))


# ------------------------------------------------------------------------------------------------- the first trial
@pytest.mark.parametrize(
    ("sets", "searched"),
    [
        ((), {"kd_weight": 10.0, "adaptive_size": 10.0}),
        (("algorithm.kd_weight=0.0",), {"adaptive_size": 10.0}),
        (("algorithm.adaptive_size=null",), {"kd_weight": 10.0}),
        (("algorithm.kd_weight=0.01", "algorithm.adaptive_size=24.0"), {"kd_weight": 0.01, "adaptive_size": 24.0}),
    ],
    ids=["default", "without teachers", "without adaptive models", "far from the default"],
)
def test_first_trial_has_the_configured_values(sets: tuple[str, ...], searched: dict[str, float]) -> None:
    config, pool = flexfl(*sets)
    gammas = {f"algorithm.gammas.{i}": m.gamma for i, m in enumerate(m for m in pool if m.dispatched) if m.gamma}
    found = tune_space.space_of(config, pool)
    assert len(gammas) == 2
    expected = gammas | {f"algorithm.{name}": value for name, value in searched.items()}
    assert list(found) == list(expected)
    assert tune_space.defaults(config, found, pool) == expected


# ------------------------------------------------------------------------------------------------- sizes
def test_level_must_fit_into_its_tier() -> None:
    """Tiers of 35, 60 and 110 %. A device needs more than the size of a model, and no search shrinks the full one."""
    assert tune_space.excess(of_shares(0.3, 0.5, 1.0), Config(), FAMILY) == {
        "size/weak": pytest.approx(-5), "size/medium": pytest.approx(-10)
    }  # fmt: skip
    assert tune_space.excess(of_shares(0.3, 0.6, 0.9), Config(), FAMILY) == {
        "size/weak": pytest.approx(-5), "size/medium": pytest.approx(1e-9), "size/strong": pytest.approx(-20)
    }  # fmt: skip
    two = "fleet.tiers=[{name: small, share: 0.5, memory: 35.0}, {name: large, share: 0.5, memory: 110.0}]"
    assert tune_space.excess(of_shares(0.4, 1.0), load_config(None, [two]), FAMILY) == {"size/small": pytest.approx(5)}


@pytest.mark.parametrize("algorithm", [FedAvg(), QuantizedFedAvg(), QuantizedFedAvg(level="medium")])
def test_level_that_is_sent_alone_has_no_tier(algorithm: Any) -> None:
    pool = tiny_pool(algorithm, FAMILY)
    assert pool[0].share > 0.35, "the weak tier cannot hold it"
    assert tune_space.excess(pool, Config(), FAMILY) == {}
