"""Write small data sets in the official formats of AEP, CASAS, UCI-HAR, UT-HAR, Widar and WISDM."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_engine.datasets import aep, casas, uci_har, uthar, widar, wisdm
from tests.data.made import write

AEP_ROWS = 60
UCI_HAR_SAMPLES = (24, 12)
UTHAR_SAMPLES = (21, 14)
NAMES = ("date", "Appliances", "lights", *(f"{what}{room}" for room in range(1, 10) for what in ("T", "RH_")),
         "T_out", "Press_mm_hg", "RH_out", "Windspeed", "Visibility", "Tdewpoint", "rv1", "rv2")  # fmt: skip


# --------------------------------------------------------------------------------------------------------- AEP
def aep_table(rows: int = AEP_ROWS) -> bytes:
    """Return a table that is quoted and padded like the official file, with a reading every ten hours."""
    rng = np.random.default_rng(0)
    lines = [",".join(f'"{name}"' for name in NAMES)]
    for row in range(rows):
        date = np.datetime64("2016-01-11T17:00:00") + np.timedelta64(600 * row, "m")
        values = rng.uniform(20, 60, len(NAMES) - 1).round(3)
        values[0] = 10 * rng.integers(1, 50)
        values[-1] = values[-2]  # rv2 is rv1
        lines.append(",".join([f'"{str(date).replace("T", " ")}"', *(f'" {value:.3f}"' for value in values)]))
    return ("\n".join(lines) + "\n").encode()


def write_aep(root: Path, rows: int = AEP_ROWS) -> None:
    write(root / aep.FILES[0], aep_table(rows))


# ------------------------------------------------------------------------------------------------------- WISDM
def wisdm_lines(subject: int, readings: int, sensor: int = 0, letters: str = "ABCDEFGHIJKLMOPQRS") -> bytes:
    """Return 20 readings per second of each activity. Each value encodes sensor, activity, reading and axis."""
    lines = []
    for a, letter in enumerate(letters):
        for i in range(readings):
            time = 10**9 * 1000 * a + 50_000_000 * i
            values = ",".join(f"{sensor + a / 20 + i / 1000 + axis / 8 * (-1) ** i:.6f}" for axis in range(3))
            lines.append(f"{subject},{letter},{time},{values};\n")
    return "".join(lines).encode()


def write_wisdm(
    root: Path, device: str = "watch", subjects: Sequence[int] = (1600, 1604), readings: int = 1000
) -> None:
    for subject in subjects:
        for i, sensor in enumerate(wisdm.SENSORS):
            name = f"data_{subject}_{sensor}_{device}.txt"
            write(root / wisdm.RAW / device / sensor / name, wisdm_lines(subject, readings, 5 * i))


# ------------------------------------------------------------------------------------------------------- CASAS
ONE_EACH = (
    "R1_Work", "Take_medicine", "Sleep", "R2_Leave_Home", "Breakfast", "Bed_to_Toilet", "R1_shower", "R1_Enter_Home",
    "R2_Personal_Hygiene", "Watch_TV", "Meal_Preparation",
)  # fmt: skip
"""One activity of each class except `other`."""


def casas_lines(days: int = 3) -> bytes:
    """Return four events of each activity per day, with one event without an activity between two activities."""
    lines = []
    for day in range(days):
        for a, name in enumerate(ONE_EACH):
            clock = f"2009-10-{16 + day}\t{a:02}:00:0"
            lines += [
                f"{clock}1.000059\tM0{a:02}\tON\t{name} begin",
                f"{clock}2.000012\tD001\tOPEN",
                f"{clock}3.5\tT002\t{18 + a / 2}",
                f"{clock}4\tM0{a:02}\tOFF\t{name} end",
                f"{clock}5.1\tM099\tON",
            ]
    return ("\n".join(lines) + "\n").encode()


def write_casas(root: Path, days: int = 3) -> None:
    for file in casas.FILES:
        write(root / file, casas_lines(days))


# ----------------------------------------------------------------------------------------------------- UCI-HAR
def write_uci_har(root: Path, samples: tuple[int, int] = UCI_HAR_SAMPLES) -> None:
    """Window w has the activity w % 6 + 1 and the person w // 3 + 1. Signal s has the values s + w / 100 + t / 1000 at
    reading t, written like the official files."""
    for part, count in zip(uci_har.PARTS, samples, strict=True):
        folder = root / uci_har.FOLDER / part
        write(folder / f"y_{part}.txt", "".join(f"{w % 6 + 1}\n" for w in range(count)).encode())
        write(folder / f"subject_{part}.txt", "".join(f"{w // 3 + 1}\n" for w in range(count)).encode())
        for s, signal in enumerate(uci_har.SIGNALS):
            lines = ("".join(f" {s + w / 100 + t / 1000: .7e}" for t in range(128)) + "\n" for w in range(count))
            write(folder / "Inertial Signals" / f"{signal}_{part}.txt", "".join(lines).encode())


# ------------------------------------------------------------------------------------------------------ UT-HAR
def npy(values: NDArray[np.generic]) -> bytes:
    out = io.BytesIO()
    np.save(out, values, allow_pickle=False)
    return out.getvalue()


def uthar_files(samples: tuple[int, int] = UTHAR_SAMPLES) -> dict[str, bytes]:
    """Map each file name (.csv) to a NumPy array's bytes. The validation part is included but not read."""
    rng = np.random.default_rng(1)
    found = {}
    for part, count in zip(("train", "test", "val"), (*samples, 7), strict=True):
        found[f"data/X_{part}.csv"] = npy(rng.uniform(0, 40, (count, 250, 90)).round(2))
        found[f"label/y_{part}.csv"] = npy((np.arange(count) % 7 if part != "val" else np.zeros(7)).astype(float))
    return found


def write_uthar(root: Path, samples: tuple[int, int] = UTHAR_SAMPLES) -> None:
    for name, content in uthar_files(samples).items():
        write(root / uthar.FOLDER / name, content)


# ------------------------------------------------------------------------------------------------------- Widar
@cache
def widar_lines(seed: int) -> bytes:
    """22 lines of 400 numbers, most of which are zero."""
    rng = np.random.default_rng(seed)
    values = np.where(rng.random((22, 400)) < 0.1, rng.uniform(0, 0.2, (22, 400)).round(4), 0)
    return b"".join(",".join(map(str, line.tolist())).encode() + b"\n" for line in values)


def write_widar(root: Path, users: int = 6, gestures: Sequence[int] = (*widar.GESTURES, 2)) -> None:
    """User u has u samples of every gesture; 2 is not of the nine."""
    for gesture in gestures:
        for user in range(1, users + 1):
            for take in range(user):
                part = "train" if take else "test"  # Widardata's own split, which FedAIoT does not keep
                path = root / widar.FOLDER / part / f"{gesture}-Draw-{gesture}" / f"user{user}-{gesture}-{take}.csv"
                write(path, widar_lines(take))
