"""Files of sensor data sets: AEP, CASAS, UT-HAR, Widar, WISDM. What is read is whole, or its file is named."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fl_engine.core.errors import DataError
from fl_engine.core.samples import Data
from fl_engine.datasets import aep, casas, uthar, widar, wisdm
from tests.data import sensors
from tests.fuzz.mutations import answer, damaged, law

ROWS = 30
SAMPLES = (3, 2)
READINGS = 500


def whole(data: Data, shape: Sequence[int]) -> None:
    """Finite and of known labels they are already: `Data` sees to it."""
    for x, y in ((data.train_x, data.train_y), (data.test_x, data.test_y)):
        assert len(x) == len(y) > 0
        assert x.shape[1:] == tuple(shape)


TABLE = sensors.aep_table(ROWS)


@law(40)
@given(damaged(TABLE))
@example(TABLE.replace(b'"2016-01-12', b'"9' + b"9" * 30 + b"-01-12"))
@example(TABLE.replace(b'" ', b'"' + b"9" * 400))
@example(TABLE + b'"' + b"x" * 200_000)
def test_aep_is_whole_or_its_file_is_named(tmp_path: Path, content: bytes) -> None:
    sensors.put(tmp_path / aep.FILES[0], content)
    found = answer(lambda: aep.load(tmp_path, ROWS), "energydata_complete.csv", "aep: ", kind=DataError)
    if found is not None:
        whole(found, found.input_shape)
        assert len(found.train_y) + len(found.test_y) == ROWS


ACCEL, GYRO = (sensors.wisdm_lines(1600, READINGS, sensor, "AL") for sensor in (0, 5))
SAME_TIME = b"1600,A,1,1.0,1.0,1.0;\n" * 20_000
"""Joined with its like it would be 400 million readings."""


@law(25)
@given(damaged(ACCEL), st.just(GYRO) | damaged(GYRO))
@example(SAME_TIME, SAME_TIME)
@example(ACCEL.replace(b"1600,A", b"1600,B"), GYRO)
@example(ACCEL.replace(b",A,", b",A," + b"9" * 40), GYRO)
@example(b"\n" * 100_000, GYRO)
def test_wisdm_is_whole_or_its_file_or_its_person_is_named(tmp_path: Path, accel: bytes, gyro: bytes) -> None:
    for sensor, content in zip(wisdm.SENSORS, (accel, gyro), strict=True):
        sensors.put(tmp_path / wisdm.RAW / "watch" / sensor / f"data_1600_{sensor}_watch.txt", content)
    found = answer(partial(wisdm.load, tmp_path, "watch"), "_1600_", "person 1600", "wisdm_watch: ", kind=DataError)
    if found is not None:
        whole(found, (200, 6))


HOME = sensors.casas_lines(1)


@law(60)
@given(damaged(HOME))
@example(HOME + b"2009-10-16 1 T001 1e999\n2009-10-16 1 T001 inf")
@example(HOME + b" ".join([b"2009-10-16 1 M001 ON", b"x" * 100_000, b"begin"]))
@example(b"\0" * 100_000)
def test_casas_is_whole_or_its_file_is_named(tmp_path: Path, content: bytes) -> None:
    for file in casas.FILES:
        sensors.put(tmp_path / file, content if file == casas.FILES[1] else HOME)
    found = answer(lambda: casas.load(tmp_path), "twor.2009/data", kind=DataError)
    if found is not None:
        whole(found, (2000,))
        assert int(found.train_x.min()) >= 0


ARRAYS = sensors.uthar_files(SAMPLES)
HEADER = 128
"""Bytes of a .npy file in front of its numbers."""


def header(text: bytes, version: bytes = b"\1\0") -> bytes:
    return b"\x93NUMPY" + version + len(text).to_bytes(2 if version == b"\1\0" else 4, "little") + text


@pytest.mark.filterwarnings("ignore:Reading")
@law(60)
@given(
    st.sampled_from([f"{what}_{part}.csv" for what in ("data/X", "label/y") for part in ("train", "test")]).flatmap(
        lambda name: st.tuples(
            st.just(name),
            damaged(ARRAYS[name]) | damaged(ARRAYS[name][:HEADER]).map(lambda start: start + ARRAYS[name][HEADER:]),
        )
    )
)
@example(("data/X_test.csv", header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (2, 4611686018427387904)}")))
@example(
    ("data/X_test.csv", header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (2, -250, -90)}") + bytes(2**19))
)
@example(("data/X_test.csv", header(b"{'descr': '(9999999,)f8', 'fortran_order': False, 'shape': (2, 250, 90)}")))
@example(
    ("data/X_test.csv", header(b"{'descr': '|O', 'fortran_order': False, 'shape': (2, 250, 90)}") + bytes(360_000))
)
@example(("data/X_test.csv", header(b"(" * 9000)))
@example(("label/y_test.csv", sensors.npy(np.array([3, 2**63], dtype=np.uint64))))
def test_uthar_is_whole_or_refused_by_the_name_of_a_file(tmp_path: Path, broken: tuple[str, bytes]) -> None:
    for name, content in (ARRAYS | dict([broken])).items():
        sensors.put(tmp_path / uthar.FOLDER / name, content)
    file = Path(broken[0]).name
    found = answer(lambda: uthar.load(tmp_path, samples=SAMPLES), file, "uthar: ", kind=DataError)
    if found is not None:
        whole(found, (1, 250, 90))
        assert (len(found.train_y), len(found.test_y)) == SAMPLES


PROFILE = sensors.widar_lines(0)


@law(60)
@given(damaged(PROFILE))
@example(b"," * 2**20)
@example(PROFILE.replace(b"0.0,", b"1e39,"))
@example(PROFILE.replace(b"\n", b"\n\n"))
def test_a_profile_of_widar_is_whole_or_its_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = sensors.put(tmp_path / "user1-1-1.csv", content)
    found = answer(lambda: widar.profile(path), "user1-1-1.csv", kind=DataError)
    if found is not None:
        assert found.shape == (22, 20, 20)
        assert np.isfinite(found).all()
