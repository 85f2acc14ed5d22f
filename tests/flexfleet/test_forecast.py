"""Forecasts of `flexfleet forecast` and `flexfleet check`, and forecast.json beside the real figures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexfleet.files.artifacts import Forecast
from flexfleet.pipeline.forecast import forecast
from flexfleet.pipeline.prepare import Resolved
from tests.harness.processes import refused

pytestmark = pytest.mark.usefixtures("own_folder")

LARGE = ("algorithm.name=all_large", "algorithm.eligible=all", "rounds.stop=5")
TIERS = "fleet.tiers=[{name: tiny, share: 0.5, memory: 1.0}, {name: strong, share: 0.5, memory: 110.0}]"


def figures(flexfleet: Any, sets: Sequence[str], *argv: str) -> dict[str, Any]:
    found: dict[str, Any] = flexfleet("forecast", "--json", "--probe", "0", *argv, sets=sets).ok().json
    return found


def test_bytes_and_clock_of_fedavg_are_exact(flexfleet: Any, quick: Sequence[str]) -> None:
    sets = [*quick, *LARGE]
    found = figures(flexfleet, sets)["figures"]
    real = flexfleet("run", "--json", "--run-id", "a", sets=sets).ok().json
    assert [found[name]["value"] for name in ("mb_down", "mb_up")] == [
        real["bytes"][way] / 1e6 for way in ("down", "up")
    ]
    assert found["mb_down"]["low"] == found["mb_down"]["value"] == found["mb_down"]["high"]
    assert found["pods"]["value"] == real["metrics"]["updates"]["merged"] == 15
    assert found["seconds_simulated"]["value"] == pytest.approx(real["forecast"]["seconds_simulated"]["real"])


def test_run_shows_its_forecast_beside_the_real_figures(flexfleet: Any, quick: Sequence[str]) -> None:
    done = flexfleet("run", "--json", "--run-id", "a", sets=[*quick, "rounds.stop=12", "rounds.evaluate_every=12"]).ok()
    stored = Forecast.read(Path("runs/a/forecast.json")).figures
    assert stored == done.json["forecast"] and "seconds" not in stored
    assert {name for name, each in stored.items() if not each["low"] <= each["real"] <= each["high"]} == set()
    assert stored["mb_down"]["low"] < stored["mb_down"]["high"], "at most 8 of 12 rounds are drawn"
    assert "Forecast and real figures" in Path("runs/a/report.html").read_text()


def test_forecast_changes_no_bits_of_the_run(flexfleet: Any, quick: Sequence[str], monkeypatch: Any) -> None:
    sums = [flexfleet("run", "--json", "--run-id", "a", sets=quick).ok().json["model_sha256"]]
    monkeypatch.setattr("flexfleet.pipeline.forecast.MOST_MB", 0)
    done = flexfleet("run", "--json", "--run-id", "b", sets=quick).ok().json
    assert done["forecast"] == {} and not Path("runs/b/forecast.json").exists()
    assert [*sums, done["model_sha256"]] == 2 * sums


def test_two_rounds_forecast_the_traffic_of_client_states(flexfleet: Any, quick: Sequence[str]) -> None:
    sets = [*quick, "algorithm.name=ditto", "rounds.stop=12", "rounds.evaluate_every=12"]
    found = forecast(Resolved.load(None, sets), seconds=0.0).figures["mb_down"]
    real = flexfleet("run", "--json", "--run-id", "a", sets=sets).ok().json["bytes"]["down"] / 1e6
    assert found["value"] == pytest.approx(real, rel=0.15)


def test_energy_of_all_drawn_rounds_is_exact(flexfleet: Any, quick: Sequence[str]) -> None:
    sets = [*quick, *LARGE, "fleet.tiers=[{name: pi, share: 1.0, memory: 110.0, watts: [6.0, 3.0]}]"]
    real = flexfleet("run", "--json", "--run-id", "a", sets=sets).ok().json["forecast"]["joules"]
    found = figures(flexfleet, sets)["figures"]["joules"]
    assert real["real"] > 0 and found["unit"] == "J"
    assert found["value"] == pytest.approx(real["real"]) and real["low"] <= real["real"] <= real["high"]


@pytest.mark.parametrize("ends", [(0.2, 0.8), (0.8, 0.2)], ids=["late layers", "early layers"])
def test_interval_of_flexfl_contains_pools_of_other_apoz_scores(
    ends: tuple[float, float], flexfleet: Any, quick: Sequence[str]
) -> None:
    sets = [*quick, "rounds.stop=4"]
    resolved = Resolved.load(None, sets)
    scores = np.linspace(*ends, len(resolved.family.prunable())).tolist()
    real = flexfleet("run", "--json", "--run-id", "a", sets=[*sets, f"algorithm.apoz={scores}"]).ok().json
    found = forecast(resolved).figures["seconds_simulated"]
    assert found["low"] <= real["forecast"]["seconds_simulated"]["real"] <= found["high"]


def test_forecast_ends_before_the_made_up_weights_overflow(quick: Sequence[str]) -> None:
    sets = [*quick, "algorithm.name=fednova", "rounds.stop=200", "training.epochs=5"]
    assert forecast(Resolved.load(None, sets)).figures["pods"]["value"] == 200 * 3


def test_prices_multiply_the_figures(flexfleet: Any, quick: Sequence[str]) -> None:
    Path("prices.yaml").write_text("{node_hour: 100, gb_up: 3}\n")
    found = figures(flexfleet, [*quick, *LARGE], "--prices", "prices.yaml")["figures"]
    expected = 100 * found["node_hours"]["value"] + 3 * found["mb_up"]["value"] / 1000
    assert found["money"]["value"] == pytest.approx(expected)


@pytest.mark.parametrize("text", ["gb_sideways: 1", "gb_up: -1", "gb_up: free"])
def test_bad_price_is_refused(text: str, flexfleet: Any, quick: Sequence[str]) -> None:
    Path("prices.yaml").write_text(text)
    line = refused(flexfleet("forecast", "--prices", "prices.yaml", sets=quick))
    assert text.partition(":")[0] in line and "prices.yaml" in line


def test_devices_that_hold_no_level_are_named(flexfleet: Any, quick: Sequence[str]) -> None:
    sets = [*quick, TIERS, "algorithm.selection={name: uniform}"]
    tiers = {tier["name"]: tier for tier in figures(flexfleet, sets)["tiers"]}
    assert tiers["tiny"]["levels"] == [] and "M3" in tiers["strong"]["levels"]
    shown = flexfleet("forecast", "--probe", "0", sets=sets).ok().out
    assert f"no level (clients {', '.join(map(str, tiers['tiny']['clients']))})" in shown


def test_probe_measures_real_time_and_memory(flexfleet: Any, quick: Sequence[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("fl_engine.training.memory.in_child_process", lambda what, work, *rest: work(*rest))
    found: dict[str, Any] = flexfleet("forecast", "--json", "--probe", "0.05", sets=[*quick, *LARGE]).ok().json
    seconds, (level,) = found["figures"]["seconds"], found["levels"]
    assert 0 <= seconds["low"] < seconds["value"] < seconds["high"] and level["peak"]["unit"] == "MB"


def test_check_prints_a_forecast(flexfleet: Any, quick: Sequence[str]) -> None:
    found = figures(flexfleet, quick)["figures"]
    first, second = flexfleet("check", sets=quick).ok().out.splitlines()
    assert first.startswith("ok: ") and f"mb_down {found['mb_down']['value']:.4g}" in second
