"""`flexfleet profile` measures this device, and a run accepts its entry of fleet.tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fl_engine.core.costs import count_params
from fl_engine.core.errors import EnvironmentFailure
from fl_engine.fleet import devices
from fl_engine.fleet.devices import Tier, simulated_seconds
from fl_engine.training.memory import Pace, TrialSite
from flexfleet.config import load_config
from flexfleet.pipeline import profile as device
from flexfleet.pipeline.prepare import Resolved
from tests.harness.processes import refused


@pytest.mark.long
def test_run_accepts_the_measured_tier(
    flexfleet: Callable[..., Any], quick: Sequence[str], tmp_path: Path, own_folder: None
) -> None:
    sets = [*quick, "algorithm.name=all_large"]
    given = ("--tier", "weak", "--seconds", "0.5", "--out", "new/tier.yaml")
    done = flexfleet("profile", "--json", *given, sets=sets).ok()
    found, tier = done.json, done.json["tier"]
    assert set(tier) == {"name", "share", "memory", "speed"} and tier["name"] == "weak"
    assert tier["memory"] > 100
    (level,) = [each for each in found["levels"] if each["size"] == 100]
    assert level["fits"] and level["peak_bytes"] > 10**6
    # The clock gives a client the seconds that were measured, over all levels.
    (one,) = devices.fleet([Tier(**tier)], 1, 0)
    clock = sum(simulated_seconds(one, each["macs_per_sample"], 0).compute for each in found["levels"])
    assert clock == pytest.approx(sum(1 / each["samples_per_second"] for each in found["levels"]), rel=1e-3)
    written = yaml.safe_load((tmp_path / "new/tier.yaml").read_text())
    assert written == {"fleet": {"tiers": [tier]}}
    assert load_config([tmp_path / "new/tier.yaml"]).fleet.tiers == (Tier(**tier),)
    flexfleet("check", "--json", "--config", "new/tier.yaml", sets=sets).ok()
    flexfleet("run", "--json", "--run-id", "a", "--config", "new/tier.yaml", sets=[*sets, "rounds.stop=1"]).ok()
    assert (tmp_path / "runs" / "a" / "run.json").exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_profile_measures_a_gpu(
    flexfleet: Callable[..., Any], quick: Sequence[str], tmp_path: Path, own_folder: None
) -> None:
    given = ("--device", "cuda", "--seconds", "0.5", "--out", "gpu.yaml")
    found = flexfleet("profile", "--json", *given, sets=[*quick, "model.width=4"]).ok().json
    assert found["about"]["device"] == torch.cuda.get_device_name() and found["room_bytes"] > 10**9
    sizes = [each["peak_bytes"] for each in sorted(found["levels"], key=lambda each: each["size"])]
    assert 0 < sizes[0] < sizes[-1] < found["room_bytes"]
    assert all(each["fits"] and each["samples_per_second"] > 10 for each in found["levels"])
    assert f"the {torch.cuda.get_device_name()} of a" in (tmp_path / "gpu.yaml").read_text()


def test_missing_torch_device_is_refused(flexfleet: Callable[..., Any], quick: Sequence[str]) -> None:
    said = refused(flexfleet("profile", "--device", "cuda:99", sets=quick), 6)
    assert "--device" in said and "'cuda:99'" in said


HELD = 200 * 10**6
KILLED = set[str]()
"""Levels whose training is killed."""


@pytest.fixture
def resolved(quick: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolved]:
    """FlexFL's pool of five. Each level takes as many MB as it has percent of the parameters, beside what is held; a
    sample takes n million multiply-adds and n ms on the n-th level."""
    monkeypatch.chdir(tmp_path)

    def run(site: TrialSite, what: str, work: Any, trials: Any, *seconds: float) -> Any:
        if seconds:
            return [Pace(1e6 * n, 1e-3 * n) for n in range(1, len(trials) + 1)]
        if trials.name in KILLED:
            raise EnvironmentFailure("ended with signal 9")
        return HELD, HELD + int(1e8 * count_params(site.family, trials.task.spec) / count_params(site.family))

    monkeypatch.setattr(TrialSite, "run", run)
    yield Resolved.load(None, list(quick))
    KILLED.clear()


def test_level_without_room_is_not_timed(resolved: Resolved) -> None:
    found = device.profile(resolved, name="pi", memory_bytes=60 * 10**6)
    fits = [level.fits for level in found.levels]
    assert fits == [level.size <= 60 for level in found.levels] and True in fits and False in fits
    assert [level.samples_per_second is None for level in found.levels] == [not fit for fit in fits]
    assert found.tier["speed"] == 1.0, "10^9 multiply-adds a second"
    (one,) = devices.fleet([Tier(**found.tier)], 1, 0)
    assert [devices.observe(one, 0, 0) > level.size for level in found.levels] == fits
    assert device.text(found).count("does not fit") == fits.count(False)


def test_level_whose_training_is_killed_does_not_fit(resolved: Resolved) -> None:
    KILLED.add("M3")
    *others, largest = (found := device.profile(resolved, memory_bytes=10**9)).levels
    assert all(level.fits for level in others) and not largest.fits and largest.peak_bytes is None
    assert found.tier["memory"] <= 100
    KILLED.update(level.name for level in others)
    with pytest.raises(EnvironmentFailure):
        device.profile(resolved, memory_bytes=10**9)


def test_device_without_memory_for_any_level_is_refused(resolved: Resolved) -> None:
    with pytest.raises(EnvironmentFailure):
        device.profile(resolved, memory_bytes=10**6)
