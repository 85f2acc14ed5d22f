"""`flexfleet profile`: what it measures, and that a run takes its entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import boto3.session
import pytest
import torch
import yaml

from fl_engine.core.costs import count_params
from fl_engine.core.errors import EnvironmentFailure
from fl_engine.fleet import devices
from fl_engine.fleet.devices import Tier, simulated_seconds
from fl_engine.training import memory, pace
from fl_engine.training.memory import Trial
from fl_engine.training.pace import Pace
from flexfleet.config import load_config
from flexfleet.pipeline import profile as device
from flexfleet.pipeline.prepare import Resolved
from tests.harness.moto_server import moto
from tests.harness.processes import refused
from tests.laws.test_power import board, ina

WATTS = 6.0


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("FLEXFLEET_S3_UNCHECKED", "1")  # moto holds nobody to what is signed
    with moto() as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        boto3.session.Session().client("s3", region_name="us-east-1").create_bucket(Bucket="runs")
        yield "run.remote=s3://runs/x"


@pytest.mark.long
def test_the_entry_says_what_the_device_does_and_a_run_takes_it(
    flexfleet: Callable[..., Any], quick: Sequence[str], bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sets = [*quick, "algorithm.name=all_large"]
    done = flexfleet("invite", "--tier", "weak", sets=[*quick, bucket])
    assert done.code == 0, done.err
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)  # a device has none
    monkeypatch.setenv("FLEXFLEET_SYS", str(board(tmp_path / "sys", ina(1, {"VDD_IN": (5000, 1200)}))))
    given = ("--invite", "invitations/weak-1.json", "--seconds", "0.5", "--out", "new/tier.yaml")
    done = flexfleet("profile", "--json", *given, sets=sets)
    assert done.code == 0, done.err
    found, tier = done.json, done.json["tier"]
    assert set(tier) == {"name", "share", "memory", "speed", "bandwidth"} and tier["name"] == "weak"
    assert found["sensors"] == ["VDD_IN"] and found["left_out"] == {}
    assert tier["bandwidth"] > 1 and tier["memory"] > 100
    (level,) = [each for each in found["levels"] if each["size"] == 100]
    assert level["fits"] and level["peak_bytes"] > 10**6
    for each in found["levels"]:
        assert each["joules_per_sample"] == pytest.approx(WATTS / each["samples_per_second"], rel=0.3)
    # The clock gives a client the seconds that were measured, over all levels.
    (one,) = devices.fleet([Tier(**tier)], 1, 0)
    clock = sum(simulated_seconds(one, each["macs_per_sample"], 0).compute for each in found["levels"])
    assert clock == pytest.approx(sum(1 / each["samples_per_second"] for each in found["levels"]), rel=1e-3)
    # What was written is a configuration.
    written = yaml.safe_load((tmp_path / "new/tier.yaml").read_text())
    assert written == {"fleet": {"tiers": [tier]}}
    assert load_config([tmp_path / "new/tier.yaml"]).fleet.tiers == (Tier(**tier),)
    done = flexfleet("check", "--json", "--config", "new/tier.yaml", sets=sets)
    assert done.code == 0, done.err
    done = flexfleet("run", "--json", "--run-id", "a", "--config", "new/tier.yaml", sets=[*sets, "rounds.stop=1"])
    assert done.code == 0, done.err
    assert (tmp_path / "runs" / "a" / "run.json").exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_is_measured(
    flexfleet: Callable[..., Any], quick: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ("--device", "cuda", "--seconds", "0.5", "--out", "gpu.yaml")
    done = flexfleet("profile", "--json", *given, sets=[*quick, "model.width=4"])
    assert done.code == 0, done.err
    found = done.json
    assert found["about"]["device"] == torch.cuda.get_device_name() and found["room_bytes"] > 10**9
    sizes = [each["peak_bytes"] for each in sorted(found["levels"], key=lambda each: each["size"])]
    assert 0 < sizes[0] < sizes[-1] < found["room_bytes"]
    assert all(each["fits"] and each["samples_per_second"] > 10 for each in found["levels"])
    assert f"the {torch.cuda.get_device_name()} of a" in (tmp_path / "gpu.yaml").read_text()


def test_a_torch_device_that_is_not_there_is_refused(flexfleet: Callable[..., Any], quick: Sequence[str]) -> None:
    said = refused(flexfleet("profile", "--device", "cuda:99", sets=quick), 6)
    assert "--device" in said and "'cuda:99'" in said


# ------------------------------------------------------------------------------------ without training anything
HELD = 200 * 10**6


@pytest.fixture
def resolved(quick: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Resolved:
    """FlexFL's pool of five. Each level takes as many MB as it has percent of the parameters, beside what is held; a
    sample takes n million multiply-adds and n ms on the n-th level."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLEXFLEET_SYS", str(tmp_path))

    def measured(family: Any, goal: Any, trial: Trial, *_: Any) -> tuple[int, int]:
        return HELD, HELD + int(1e8 * count_params(family, trial.task.spec) / count_params(family))

    def paces(family: Any, goal: Any, trials: Sequence[Trial], *_: Any) -> list[Pace]:
        return [Pace(1e6 * n, 1e-3 * n, None) for n in range(1, len(trials) + 1)]

    monkeypatch.setattr(memory, "measured", measured)
    monkeypatch.setattr(pace, "level_paces", paces)
    return Resolved.load(None, list(quick))


def test_level_without_room_is_not_timed(resolved: Resolved) -> None:
    found = device.profile(resolved, name="pi", room=60 * 10**6)
    fits = [level.fits for level in found.levels]
    assert fits == [level.size <= 60 for level in found.levels] and True in fits and False in fits
    assert [level.samples_per_second is None for level in found.levels] == [not fit for fit in fits]
    assert found.tier["speed"] == 1.0, "10^9 multiply-adds a second"
    (one,) = devices.fleet([Tier(**found.tier)], 1, 0)
    assert [devices.observe(one, 0, 0) > level.size for level in found.levels] == fits
    assert device.text(found).count("does not fit") == fits.count(False)


def test_a_level_whose_training_dies_does_not_fit(resolved: Resolved, monkeypatch: pytest.MonkeyPatch) -> None:
    real = memory.measured

    def measured(family: Any, goal: Any, trial: Trial, *given: Any) -> tuple[int, int]:
        if trial.name == "M3":
            raise EnvironmentFailure("ended with signal 9")
        return real(family, goal, trial, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(memory, "measured", measured)
    found = device.profile(resolved, room=10**9)
    *others, largest = found.levels
    assert all(level.fits for level in others) and not largest.fits and largest.peak_bytes is None
    assert found.tier["memory"] <= 100

    def never(*_: Any) -> tuple[int, int]:
        raise EnvironmentFailure("ended with signal 9")

    monkeypatch.setattr(memory, "measured", never)
    with pytest.raises(EnvironmentFailure, match="no level of the pool can be trained here"):
        device.profile(resolved, room=10**9)


def test_a_device_without_room_for_any_level_is_told(resolved: Resolved) -> None:
    with pytest.raises(EnvironmentFailure, match=r"smallest level takes \d+ MB, and 1 MB are free"):
        device.profile(resolved, room=10**6)
