"""The energy that a board takes, read from its sensors in /sys.

The first of these sources that exists is read. What it covers depends on its sensors:

    INA chips      a channel's voltage times its current: Jetson boards, single-board computers (hwmon, on older Jetsons
                   iio). The channel of the whole board if there is one (VDD_IN, POM_5V_IN), else the sum of all
    RAPL           counters of energy: psys, which is the whole board, else the processors' packages with their memory.
                   On Linux, only root can read them
    other hwmon    the first power of each chip, added

Power sensors are read several times a second and integrated over time, counters at the beginning and at the end.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

EVERY_S = 0.1
"""Seconds between two readings of a power sensor."""
BOARD = re.compile(r"(^|_)IN$")
"""Names of the channels that feed the whole board."""


@dataclass(frozen=True)
class Power:
    name: str
    read: Callable[[], float]
    """Watts."""


@dataclass(frozen=True)
class Energy:
    name: str
    read: Callable[[], float]
    """Joules, which start from 0 again after `wraps`."""
    wraps: float

    def between(self, before: float, after: float) -> float:
        return after - before if after >= before else after - before + self.wraps


Sensor = Power | Energy


@dataclass
class Used:
    joules: float = 0.0
    seconds: float = 0.0


def sensors(sys: Path | None = None) -> tuple[Sensor, ...]:
    """The sensors whose values are to be added. `sys`: by default FLEXFLEET_SYS, or /sys."""
    sys = sys or Path(os.environ.get("FLEXFLEET_SYS", "/sys"))
    channels = [*_ina_hwmon(sys), *_ina_iio(sys)]
    if channels:
        board = [channel for channel in channels if BOARD.search(channel.name)]
        return tuple(board[:1] or channels)
    return tuple(_rapl(sys)) or tuple(_hwmon(sys))


@contextmanager
def metered(found: Sequence[Sensor], every_s: float = EVERY_S) -> Iterator[Used]:
    """Measure the energy that is taken inside the context. The yielded object is filled in at its end."""
    used, over, watts = Used(), threading.Event(), [each for each in found if isinstance(each, Power)]
    counters = [each for each in found if isinstance(each, Energy)]
    readings: list[tuple[float, float]] = []
    failed: list[Exception] = []

    def look() -> None:
        readings.append((time.monotonic(), sum(each.read() for each in watts)))

    def serve() -> None:
        try:
            while not over.wait(every_s):
                look()
        except (OSError, ValueError) as error:
            failed.append(error)

    look()
    before = [each.read() for each in counters]
    thread = threading.Thread(target=serve, daemon=True, name="power")
    thread.start()
    try:
        yield used
    finally:
        over.set()
        thread.join()
    if failed:
        raise OSError(f"a power sensor cannot be read any more: {failed[0]}")
    look()
    counted = sum(c.between(b, c.read()) for c, b in zip(counters, before, strict=True))
    used.joules, used.seconds = counted + _integral(readings), readings[-1][0] - readings[0][0]


def _integral(readings: Sequence[tuple[float, float]]) -> float:
    """The integral of watts over seconds, by the trapezoidal rule."""
    return sum((later - now) * (watts + after) / 2 for (now, watts), (later, after) in pairwise(readings))


# --------------------------------------------------------------------------------------------------- the sources
def _ina_hwmon(sys: Path) -> Iterator[Power]:
    for chip in sorted(sys.glob("class/hwmon/hwmon*")):
        if not _text(chip / "name").startswith("ina"):
            continue
        for current in sorted(chip.glob("curr[123]_input")):  # an INA3221's curr4 is their sum, its in4 a shunt's
            number = current.name.removeprefix("curr").removesuffix("_input")
            volts, name = chip / f"in{number}_input", _text(chip / f"in{number}_label")
            yield from _readable(name or f"{chip.name}/{number}", _product(volts, current))


def _ina_iio(sys: Path) -> Iterator[Power]:
    for rail in sorted(sys.glob("bus/i2c/drivers/ina3221x/*/iio*device*/rail_name_*")):
        watts = rail.with_name(f"in_power{rail.name.rpartition('_')[2]}_input")
        yield from _readable(_text(rail), _scaled(watts, 1e-3))


def _rapl(sys: Path) -> Iterator[Energy]:
    zones = [zone for zone in sorted(sys.glob("class/powercap/*-rapl:*")) if _text(zone / "name")]
    board = [zone for zone in zones if _text(zone / "name") == "psys"]
    packages = [zone for zone in zones if _text(zone / "name").startswith(("package", "dram"))]
    for zone in board[:1] or packages:
        read, wraps = _scaled(zone / "energy_uj", 1e-6), _scaled(zone / "max_energy_range_uj", 1e-6)
        try:
            read()
            yield Energy(_text(zone / "name"), read, wraps())
        except (OSError, ValueError):
            continue


def _hwmon(sys: Path) -> Iterator[Power]:
    for chip in sorted(sys.glob("class/hwmon/hwmon*")):
        for each in sorted(chip.glob("power1_input")) or sorted(chip.glob("power1_average")):
            yield from _readable(_text(chip / "power1_label") or _text(chip / "name"), _scaled(each, 1e-6))


def _readable(name: str, read: Callable[[], float]) -> Iterator[Power]:
    """The sensor, if it can be read."""
    try:
        read()
    except (OSError, ValueError):
        return
    yield Power(name, read)


def _scaled(path: Path, factor: float) -> Callable[[], float]:
    return lambda: factor * int(path.read_text(encoding="utf-8"))


def _product(millivolts: Path, milliamperes: Path) -> Callable[[], float]:
    return lambda: 1e-6 * int(millivolts.read_text(encoding="utf-8")) * int(milliamperes.read_text(encoding="utf-8"))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
