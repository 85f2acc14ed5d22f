"""Sensor data sets: small files in the official formats."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fl_engine.core.errors import DataError
from fl_engine.core.samples import Data
from fl_engine.data.transforms import moments, random_split
from fl_engine.datasets import DATASETS, aep, casas, uci_har, uthar, widar, wisdm
from fl_engine.tasks import Classification, Regression
from fl_engine.testing.datasets import DatasetSuite
from tests.data import sensors
from tests.data.made import write

LOADS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Data]]] = {
    "aep": (sensors.write_aep, partial(aep.load, rows=sensors.AEP_ROWS)),
    "casas": (sensors.write_casas, casas.load),
    "uci_har": (sensors.write_uci_har, partial(uci_har.load, samples=sensors.UCI_HAR_SAMPLES)),
    "uthar": (sensors.write_uthar, partial(uthar.load, samples=sensors.UTHAR_SAMPLES)),
    "widar": (sensors.write_widar, widar.load),
    "wisdm_watch": (sensors.write_wisdm, DATASETS["wisdm_watch"].load),
    "wisdm_phone": (partial(sensors.write_wisdm, device="phone"), DATASETS["wisdm_phone"].load),
}


class TestSmallFiles(DatasetSuite):
    @pytest.fixture(scope="module", params=sorted(LOADS))
    def load(self, request: pytest.FixtureRequest) -> Iterator[Callable[[], Data]]:
        fill, load = LOADS[request.param]
        with tempfile.TemporaryDirectory() as folder:
            fill(Path(folder))
            assert DATASETS[request.param].missing(Path(folder)) == ()
            yield partial(load, Path(folder))

    def test_is_called_as_it_is_listed(self, data: Data, request: pytest.FixtureRequest) -> None:
        assert data.name == request.node.callspec.params["load"]


# --------------------------------------------------------------------------------------------------------- AEP
def columns(**values: object) -> aep.Table:
    return {name: np.array(value, dtype=np.float64) for name, value in values.items()}


def test_aep_clips_the_test_part_by_the_training_part() -> None:
    """Of 0, 1, ..., 10 the tenth percentile is 1 and the ninetieth 9."""
    constant = {name: np.ones(11) for name in aep.COLUMNS if name not in ("appliances", "lights", "date")}
    days = 86_400.0 * np.arange(11)
    train = constant | columns(lights=np.arange(11), date=days)
    found, test = aep.prepared(train, {name: value[:2] + 100 * (name == "lights") for name, value in train.items()})
    assert found["lights"].tolist() == [1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9]
    assert test["lights"].tolist() == [9, 9]
    assert "day" not in found  # the second of January at the earliest, and as lights from there on: much alike


def test_aep_adds_means_and_days() -> None:
    rooms = {f"t{room}": [room, 0] for room in range(1, 10)} | {f"rh_{room}": [10 * room, 90] for room in range(1, 10)}
    seconds = [np.datetime64(date, "s").astype(np.int64) for date in ("2016-01-11T17:00:00", "2016-05-31T23:59:59")]
    found = aep.with_means_and_day(columns(t_out=[99, 99], rh_out=[99, 99], date=seconds, **rooms))
    assert found["avg_house_temp"].tolist() == [5, 0]
    assert found["avg_humidity_percentage"].tolist() == [50, 90]
    assert (found["day"].tolist(), found["month"].tolist(), "date" in found) == ([11, 31], [1, 5], False)


def test_aep_finds_the_axes_along_which_readings_differ_most() -> None:
    """Readings along (3, 4) / 5 for the most part, a little across it, and hardly along the third column."""
    along, across, third = (
        np.array([-5, 5, -5, 5, 0, 0]),
        np.array([1, 1, -1, -1, 0, 0]),
        np.array([0, 0, 0, 0, 0.1, -0.1]),
    )
    table = columns(a=2 + 0.6 * along - 0.8 * across, b=7 + 0.8 * along + 0.6 * across, c=third)
    centre, axes = aep.principal(table)
    np.testing.assert_allclose(centre, [2, 7, 0], atol=1e-12)
    np.testing.assert_allclose(axes, [[0.6, 0.8, 0], [0.8, -0.6, 0], [0, 0, 1]], atol=1e-12)
    found = aep.with_components(table, centre, axes)
    np.testing.assert_allclose(found["pca_1"], along, atol=1e-12)
    np.testing.assert_allclose(found["pca_2"], -across, atol=1e-12)


def test_aep_leaves_out_what_is_much_alike_an_earlier_feature() -> None:
    """c follows b, which follows a; b is left out, and c too, though it is unlike what is kept."""
    a, b = np.array([1.0, 2, 3, 4, 5]), np.array([1.0, 2, 3, 4, 7])
    c = np.array([1.0, 1, 1, 1, 9])
    table = columns(a=a, same=[3, 3, 3, 3, 3], minus=-a, b=b, c=c, other=[1, -1, 0, -1, 1])
    r = np.corrcoef(np.stack([a, b, c]))
    assert r[0, 1] > 0.85 and r[1, 2] > 0.85 > r[0, 2]
    assert aep.uncorrelated(table) == ["a", "same", "other"]


def test_aep_reads_targets_as_logarithms(tmp_path: Path) -> None:
    sensors.write_aep(tmp_path)
    data = aep.load(tmp_path, sensors.AEP_ROWS)
    assert data.task == Regression()
    lines = sensors.aep_table().decode().replace('"', "").splitlines()[1:]
    use = [float(line.split(",")[1]) for line in lines]
    train, test = random_split(sensors.AEP_ROWS, 0.2)
    np.testing.assert_allclose(data.train_y[:, 0], np.log([use[i] for i in train]), atol=1e-5)
    np.testing.assert_allclose(data.test_y[:, 0], np.log([use[i] for i in test]), atol=1e-5)


# ------------------------------------------------------------------------------------------------------- WISDM
def readings(*rows: tuple[str, int, float]) -> np.ndarray:
    return np.array([(1600, a.encode(), time, value, value, value) for a, time, value in rows], wisdm.LINE)


def test_wisdm_joins_sensors_where_their_times_are_equal() -> None:
    accel = readings(("B", 30, 3), ("A", 10, 1), ("A", 20, 2), ("B", 40, 4))
    gyro = readings(("A", 40, 14), ("A", 5, 10), ("A", 10, 11), ("A", 30, 13))
    activity, values = wisdm.joined(accel, gyro)
    assert activity.tolist() == [b"A", b"B", b"B"]
    assert values.tolist() == [[1, 1, 1, 11, 11, 11], [3, 3, 3, 13, 13, 13], [4, 4, 4, 14, 14, 14]]


def test_wisdm_joins_a_time_that_repeats_with_each_of_its_like() -> None:
    accel, gyro = (
        readings(("A", 10, 1), ("A", 10, 2), ("A", 20, 3)),
        readings(("A", 20, 13), ("A", 10, 11), ("A", 10, 12)),
    )
    assert wisdm.joined(accel, gyro)[1][:, [0, 3]].tolist() == [[1, 11], [1, 12], [2, 11], [2, 12], [3, 13]]
    with pytest.raises(DataError):
        wisdm.joined(*[readings(*[("A", 10, 1.0)] * 3)] * 2)


def test_wisdm_windows_begin_every_100_readings_but_the_first() -> None:
    """Of 1,100 readings of A windows begin at 200 to 900. Of 399 readings there is no window, of 400 there is one."""
    counts = {"A": 1100, "H": 399, "L": 400, "M": 1000}
    rows = [(letter, 10_000 * k + i, i) for k, (letter, n) in enumerate(counts.items()) for i in range(n)]
    x, y = wisdm.windows(readings(*rows), readings(*rows))
    assert x[:, 0, 0].tolist() == [200, 300, 400, 500, 600, 700, 800, 900, 200]
    assert x[:, -1, 5].tolist() == [399, 499, 599, 699, 799, 899, 999, 1099, 399]
    assert y.tolist() == [0] * 8 + [7]


def test_wisdm_splits_people_and_all_meals_are_eating(tmp_path: Path) -> None:
    sensors.write_wisdm(tmp_path)
    data = DATASETS["wisdm_watch"].load(tmp_path)
    assert data.train_y.bincount().tolist() == data.test_y.bincount().tolist() == [7] * 7 + [28] + [7] * 4
    assert data.natural_client is not None
    assert data.natural_client.unique().tolist() in ([1600], [1604])


# ------------------------------------------------------------------------------------------------------- CASAS
LINES = b"""\
2009-10-16 00:01:04.000059\tM017\tON
2009-10-16 00:01:05.0\tI006\tPRESENT
2009-10-16 00:01:06.0\tM018\tON\tR1_Bed_to_Toilet begin
2009-10-16 00:01:07\tT001\t21.3
2009-10-16\t00:01:08\tD001\tOPEN\tR1_Bed_to_Toilet end
2009-10-16 00:01:09\tM017\tOFf\tR2 sleep begin
2009-10-16 00:01:10\tM018\tON0\tR1 Wake begin
"""


def test_casas_takes_the_events_of_an_activity_and_those_of_none() -> None:
    found = list(casas.samples(casas.events(Path("data"), LINES)))
    assert found == [
        ("", ["M017=on"]),
        ("r1_bed_to_toilet", ["M018=on", "T001=21.5", "D001=open"]),
        ("r2_sleep", ["M017=off"]),
        ("r1_wake", ["M018=on"]),
    ]
    assert [casas.CLASSES[casas.label_of(name)] for name, _ in found] == ["other", "bed to toilet", "sleep", "other"]


def test_casas_numbers_a_sensors_value_the_same_in_every_home(tmp_path: Path) -> None:
    sensors.write_casas(tmp_path)
    write(tmp_path / casas.FILES[1], b"2009-10-16 01:01:01\tD000\tCLOSE\n" + sensors.casas_lines())
    data = casas.load(tmp_path)
    assert data.input_shape == (2000,)
    x = torch.cat((data.train_x, data.test_x))
    # D000=closed, D001=open, 11 sensors on and off, M099=on, 11 temperatures; 0 pads in front.
    assert x.unique().tolist() == list(range(26 + 11))
    assert int(x[:, :-4].max()) == 0
    assert (x[:, -1] > 0).all()
    assert ((x[:, -1] == 1).sum(), (x == 2).sum()) == (1, 5 * 3 * 11)
    assert data.natural_client is not None
    assert data.natural_client.unique().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("line", [b"2009-10-16 00:01:04 M017", b"hello 00:01:04 M017 ON", b"2009-10-16 1 T001 nan",
                                  b"2009-10-16 1 M001 x", b"2009-10-16 1 T001 ON",
                                  b"2009-10-16 1 T001 2_1"])  # fmt: skip
def test_casas_counts_a_few_garbled_lines_and_refuses_more(
    tmp_path: Path, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    sensors.write_casas(tmp_path, days=4)  # 220 lines
    path = tmp_path / casas.FILES[2]
    content = path.read_bytes()
    path.write_bytes(content + 2 * (line + b"\n"))
    casas.load(tmp_path)
    assert "skipped 2 unreadable lines of 222 (first: 221)" in caplog.text
    path.write_bytes(line + b"\n" + content + 2 * (line + b"\n"))
    with pytest.raises(DataError):
        casas.load(tmp_path)


def test_casas_counts_unknown_activities_as_other_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sensors.write_casas(tmp_path)
    path = tmp_path / casas.FILES[4]
    path.write_bytes(path.read_bytes().replace(b"Sleep", b"Slep"))
    with caplog.at_level(logging.WARNING):
        casas.load(tmp_path)
    assert "milan/data: assigned 1 unknown activities to the class 'other': ['slep']" in caplog.text
    path.write_bytes(path.read_bytes().replace(b"begin", b"starts"))
    with pytest.raises(DataError):
        casas.load(tmp_path)


# ------------------------------------------------------------------------------------------------------ UT-HAR
def test_uthar_pairs_test_samples_with_their_own_labels(tmp_path: Path) -> None:
    sensors.write_uthar(tmp_path)
    data = uthar.load(tmp_path, samples=sensors.UTHAR_SAMPLES)
    assert (data.train_x.shape, data.test_x.shape) == ((21, 1, 250, 90), (14, 1, 250, 90))
    assert data.test_y.tolist() == [*range(7), *range(7)]  # those of the validation part are all 0
    packets = np.load(tmp_path / uthar.FOLDER / "data" / "X_test.csv")
    assert float(data.test_x[3, 0, 17, 65]) == pytest.approx(packets[3, 17, 65])


# ----------------------------------------------------------------------------------------------------- UCI-HAR
def load_uci_har(root: Path) -> Data:
    return uci_har.load(root, sensors.UCI_HAR_SAMPLES)


def test_uci_har_stacks_signals_and_keeps_people(tmp_path: Path) -> None:
    sensors.write_uci_har(tmp_path)
    data = load_uci_har(tmp_path)
    assert (data.input_shape, data.task) == ((128, 9), Classification(6))
    assert data.natural_client is not None and data.natural_client.tolist() == [w // 3 + 1 for w in range(24)]
    assert data.test_y.tolist() == [0, 1, 2, 3, 4, 5] * 2
    assert float(data.train_x[7, 100, 5]) == pytest.approx(5 + 0.07 + 0.1)  # z of the gyroscope


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("train/y_train.txt", "6\n", "7\n"),
        ("train/y_train.txt", "6\n", "6.0\n"),
        ("train/subject_train.txt", "8\n", "0\n"),
        ("test/subject_test.txt", "4\n", ""),
        ("test/Inertial Signals/total_acc_x_test.txt", "6.0000000e+00", "inf"),
        ("test/Inertial Signals/total_acc_x_test.txt", "6.0000000e+00", ""),
        ("train/Inertial Signals/body_gyro_y_train.txt", " 4", " 4,"),
    ],
)
def test_uci_har_rejects_damaged_file(tmp_path: Path, name: str, old: str, new: str) -> None:
    sensors.write_uci_har(tmp_path)
    path = tmp_path / uci_har.FOLDER / name
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new, 1))
    with pytest.raises(DataError) as caught:
        load_uci_har(tmp_path)
    assert path.name in str(caught.value)


# ------------------------------------------------------------------------------------------------------- Widar
def test_widar_tests_on_other_users_than_it_trains_on(tmp_path: Path) -> None:
    """Of six users, one with as many samples as its number has, the last two train."""
    sensors.write_widar(tmp_path)
    data = widar.load(tmp_path)
    assert data.natural_client is not None
    assert data.natural_client.bincount().tolist() == [0] * 5 + [5 * 9, 6 * 9]
    assert data.test_y.bincount().tolist() == [1 + 2 + 3 + 4] * 9
    assert data.input_shape == (22, 20, 20)


def test_widar_scales_and_places_a_profile(tmp_path: Path) -> None:
    path = write(tmp_path / "user1-1.csv", sensors.widar_lines(3))
    lines = path.read_text().splitlines()
    assert widar.profile(path)[7, 13, 5] == float(lines[7].split(",")[13 * 20 + 5])
    sensors.write_widar(tmp_path)
    data = widar.load(tmp_path)
    found, raw = data.test_x[0], widar.profile(min((tmp_path / widar.FOLDER).glob("*/*/*.csv")))
    np.testing.assert_allclose(found, (raw - 0.0025) / 0.0119, rtol=1e-6)


# ----------------------------------------------------------------------------------------------------- helpers
def test_a_random_split_is_the_one_of_scikit_learn() -> None:
    """The example of its documentation: of five samples with a third to test, seed 42."""
    assert [part.tolist() for part in random_split(5, 0.33)] == [[0, 2, 3], [1, 4]]


def test_moments_are_per_entry_of_an_axis() -> None:
    x = np.array([[[1, 5], [3, 5]], [[1, 5], [3, 9]]], dtype=np.float32)
    assert moments(x) == ((2.0, 6.0), (1.0, 1.732051))
    assert moments(x, axis=1) == ((3.0, 5.0), (2.0, 2.44949))
    assert str(moments(np.array([[-1e-9]], dtype=np.float32))[0]) == "(0.0,)"


@pytest.mark.parametrize(("scale", "std"), [(1e-3, 0.001118), (1e-4, 1.11803e-4), (1e-30, 1.11803e-30)])
def test_moments_of_small_deviations_have_six_digits(scale: float, std: float) -> None:
    x = (np.array([[1.0], [2.0], [3.0], [4.0]]) * scale).astype(np.float32)
    (mean,), found = moments(x)
    assert found == (std,)
    assert mean == pytest.approx(2.5 * scale, abs=1e-3 * std)
