"""Sensors of power, on boards that are folders."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from fl_engine.training import power
from fl_engine.training.power import Energy, Power, metered, sensors


def board(root: Path, files: dict[str, object]) -> Path:
    for name, value in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return root


def ina(chip: int, channels: dict[str, tuple[int, int]]) -> dict[str, object]:
    """An INA3221 as JetPack 5 and 6 show it: label, millivolts and milliamperes of each channel."""
    files: dict[str, object] = {f"class/hwmon/hwmon{chip}/name": "ina3221"}
    for number, (label, (volts, current)) in enumerate(channels.items(), 1):
        files |= {
            f"class/hwmon/hwmon{chip}/in{number}_label": label,
            f"class/hwmon/hwmon{chip}/in{number}_input": volts,
            f"class/hwmon/hwmon{chip}/curr{number}_input": current,
        }
    return files


def read(found: tuple[power.Sensor, ...]) -> dict[str, float]:
    return {each.name: pytest.approx(each.read()) for each in found}


def test_a_jetson_s_input_is_the_whole_board(tmp_path: Path) -> None:
    """5 V times 1.2 A are 6 W; what the processor takes of them is not added again."""
    files = ina(3, {"VDD_CPU_GPU_CV": (5000, 700), "VDD_IN": (5000, 1200), "VDD_SOC": (5000, 300)})
    assert read(sensors(board(tmp_path, files))) == {"VDD_IN": 6.0}


def rapl(zone: str, name: str, microjoules: int) -> dict[str, object]:
    folder = f"class/powercap/{zone}"
    return {f"{folder}/name": name, f"{folder}/energy_uj": microjoules, f"{folder}/max_energy_range_uj": 10_000_000}


def test_rapl_counts_joules(tmp_path: Path) -> None:
    zones = rapl("intel-rapl:0", "package-0", 3_000_000) | rapl("intel-rapl:0:0", "core", 2_000_000)
    zones |= rapl("intel-rapl:0:1", "dram", 500_000) | {"class/powercap/intel-rapl/enabled": 1}
    assert read(sensors(board(tmp_path, zones))) == {"package-0": 3.0, "dram": 0.5}
    psys = sensors(board(tmp_path, rapl("intel-rapl:1", "psys", 7_000_000)))
    assert read(psys) == {"psys": 7.0}


def test_watts_are_integrated_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ramp from 0 W, by 10 W a second: after t seconds 5 t^2 joules, whatever the readings' times. The clock goes on
    when it is read, by more each time."""
    ticks, enough = [0.0], threading.Event()

    def clock() -> float:
        ticks.append(ticks[-1] + 0.01 * (len(ticks) - 1))
        if len(ticks) > 8:
            enough.set()
        return ticks[-1]

    monkeypatch.setattr(power, "time", SimpleNamespace(monotonic=clock))
    with metered([Power("ramp", lambda: 10 * ticks[-1])], every_s=0.001) as used:
        assert enough.wait(60)
    assert used.seconds == ticks[-1] > 0.2
    assert used.joules == pytest.approx(5 * used.seconds**2)


def test_counters_are_read_at_the_ends_and_may_begin_anew() -> None:
    """From 9 J over the end of the range, 10 J, to 2 J: 3 J. And one of 4 J beside it."""
    wraps, beside = iter([9.0, 2.0]), iter([1.0, 5.0])
    counters = [Energy("a", lambda: next(wraps), 10.0), Energy("b", lambda: next(beside), 10.0)]
    with metered(counters) as used:
        pass
    assert used.joules == pytest.approx(7.0)
