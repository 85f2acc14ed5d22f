"""Sensor data sets: small files in the official formats, and the real files if they exist."""

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
from fl_engine.data.moments import moments
from fl_engine.data.transforms import fingerprint, random_split
from fl_engine.datasets import DATASETS, aep, casas, data_root, epic_sounds, uthar, visdrone, widar, wisdm
from fl_engine.tasks import Regression
from fl_engine.testing.datasets import DatasetSuite
from tests.data import sensors

LOADS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Data]]] = {
    "aep": (sensors.write_aep, partial(aep.load, rows=sensors.AEP_ROWS)),
    "casas": (sensors.write_casas, casas.load),
    "uthar": (sensors.write_uthar, partial(uthar.load, samples=sensors.UTHAR_SAMPLES)),
    "uthar_antennas": (sensors.write_uthar, partial(uthar.load, antennas=True, samples=sensors.UTHAR_SAMPLES)),
    "widar": (sensors.write_widar, widar.load),
    "wisdm_watch": (sensors.write_wisdm, DATASETS["wisdm_watch"].load),
    "wisdm_phone_code": (partial(sensors.write_wisdm, device="phone"), DATASETS["wisdm_phone_code"].load),
}


class TestSmallFiles(DatasetSuite):
    @pytest.fixture(scope="module", params=sorted(LOADS))
    def load(self, request: pytest.FixtureRequest) -> Iterator[Callable[[], Data]]:
        write, load = LOADS[request.param]
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder))
            assert DATASETS[request.param].missing(Path(folder)) == ()
            yield partial(load, Path(folder))

    def test_is_called_as_it_is_listed(self, data: Data, request: pytest.FixtureRequest) -> None:
        assert data.name == request.node.callspec.params["load"]


WATCH = f"{wisdm.RAW}/watch/accel/data_1600_accel_watch.txt"
PROFILE = f"{widar.FOLDER}/test/1-Draw-1/user1-1-0.csv"
READING = b'"2016-01-12 03:00:00"," '


@pytest.mark.parametrize(
    ("name", "file", "old", "new"),
    [
        ("aep", aep.FILES[0], b'"rv2"', b'"rv3"'),
        ("aep", aep.FILES[0], b'"2016-01-11 17:00:00"', b'"yesterday"'),
        ("aep", aep.FILES[0], b'00"\n', b'00e999"\n'),
        ("aep", aep.FILES[0], READING, READING + b"-"),
        ("wisdm_watch", WATCH, b"1600,A", b"1600,N"),
        ("wisdm_watch", WATCH, b"1600,A", b"A"),
        ("wisdm_watch", WATCH, b"0.250000;", b"nan;"),
        ("wisdm_watch", WATCH, b"0.250000;", b"0.25;0000;"),
        ("uthar", f"{uthar.FOLDER}/label/y_test.csv", b"", sensors.npy(np.full(14, 7))),
        ("uthar", f"{uthar.FOLDER}/label/y_test.csv", b"", sensors.npy(np.zeros((14, 2)))),
        ("uthar", f"{uthar.FOLDER}/data/X_test.csv", b"", sensors.npy(np.full((14, 250, 90), np.nan))),
        ("uthar", f"{uthar.FOLDER}/data/X_test.csv", b"", b"0.1,0.2\n"),
        ("widar", PROFILE, b"", b"1,2\n3\n"),
        ("widar", PROFILE, b"", b"\n".join([b",".join([b"nan"] * 400)] * 22)),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, file: str, old: bytes, new: bytes) -> None:
    """`old` is replaced by `new`; an empty `old` stands for the whole file."""
    write, load = LOADS[name]
    write(tmp_path)
    content = (tmp_path / file).read_bytes()
    assert old in content
    (tmp_path / file).write_bytes(content.replace(old, new, 1) if old else new)
    with pytest.raises(DataError):
        load(tmp_path)


# --------------------------------------------------------------------------------------------------------- AEP
def columns(**values: object) -> aep.Table:
    return {name: np.array(value, dtype=np.float64) for name, value in values.items()}


def test_aep_takes_logarithms_and_says_whether_it_is_clear() -> None:
    e = float(np.e)
    found = aep.transformed(
        columns(t9=[0, e - 1], rv1=[1, 3], rv2=[1, 3], windspeed=[0, 1], visibility=[40, 41], t1=[9, 8])
    )
    assert {name: value.round(4).tolist() for name, value in found.items()} == {
        "t9": [0, 1], "rv1": [0.6931, 1.3863], "rv2": [0.6931, 1.3863], "windspeed": [0, 0.6931], "visibility": [0, 1],
        "t1": [9, 8],
    }  # fmt: skip


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
    found = aep.with_means(columns(t_out=[99, 99], rh_out=[99, 99], **rooms))
    assert found["avg_house_temp"].tolist() == [5, 0]
    assert found["avg_humidity_percentage"].tolist() == [50, 90]
    seconds = [np.datetime64(date, "s").astype(np.int64) for date in ("2016-01-11T17:00:00", "2016-05-31T23:59:59")]
    dated = aep.with_day(columns(date=seconds, t1=[1, 2]))
    assert {name: value.tolist() for name, value in dated.items()} == {"t1": [1, 2], "day": [11, 31], "month": [1, 5]}


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
    assert aep.unlike(table) == ["a", "same", "other"]


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
    """Of 1,100 readings of A: 200 to 900, and the cut is behind 880. Of 399 and of 400 readings there is none and one,
    and the one reaches across the cut behind 320."""
    counts = {"A": 1100, "H": 399, "L": 400, "M": 1000}
    rows = [(letter, 10_000 * k + i, i) for k, (letter, n) in enumerate(counts.items()) for i in range(n)]
    found = wisdm.windows(readings(*rows), readings(*rows), wisdm.TEXT_KEY)
    assert found.x[:, 0, 0].tolist() == [200, 300, 400, 500, 600, 700, 800, 900, 200]
    assert found.x[:, -1, 5].tolist() == [399, 499, 599, 699, 799, 899, 999, 1099, 399]
    assert found.y.tolist() == [0] * 8 + [7]
    train, test, across = wisdm.TRAIN, wisdm.TEST, wisdm.ACROSS
    assert found.side.tolist() == [train] * 5 + [across] * 2 + [test] + [across]


def test_wisdm_eats_all_meals_or_sandwiches_alone(tmp_path: Path) -> None:
    sensors.write_wisdm(tmp_path)
    every, alone = (DATASETS[name].load(tmp_path) for name in ("wisdm_watch", "wisdm_watch_code"))
    assert every.train_y.bincount().tolist() == [10] * 7 + [40] + [10] * 4
    assert alone.train_y.bincount().tolist() == [10] * 12
    assert every.test_y.bincount().tolist() == [2] * 7 + [8] + [2] * 4
    assert every.natural_client is not None
    assert every.natural_client.tolist() == [1600] * 75 + [1604] * 75


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


def test_casas_tells_the_classes_of_all_homes_activities() -> None:
    """As FedAIoT tells them; the transition to the toilet is other where it has no resident."""
    told = {
        "other": "Night_wandering R1_Wandering_in_room Study Wash_Bathtub R2_wakeup Grooming Bed_toilet_transition",
        "work": "R1_work_in_office Laundry R2_Work Clean Cleaning R1_Housekeeping Chores Desk_Activity",
        "take medicine": "R2_take_medicine Morning_Meds Eve_Meds",
        "sleep": "R1_Sleeping_Not_in_Bed R2_sleep Sleep",
        "eat": "Breakfast Lunch Dinner R1_Eating Dining_Rm_Activity",
        "bed to toilet": "Bed_to_toilet R1_Bed_to_Toilet R2_Bed_Toilet_Transition",
        "bathing": "R1_shower R2_Bathing Master_Bathroom Guest_Bathroom",
        "cook": "Meal_Preparation Cooking Kitchen_Activity R2_Meal_Preparation",
        "relax": "Watch_TV R1_Watch_TV Read",
        "leave home": "Leave_Home R1_Leave_Home",
    }
    for label, names in told.items():
        assert {casas.CLASSES[casas.label_of(name.lower())] for name in names.split()} == {label}
    assert len(casas.CLASSES) == 12


def test_casas_numbers_a_sensors_value_the_same_in_every_home(tmp_path: Path) -> None:
    sensors.write_casas(tmp_path)
    sensors.put(tmp_path / casas.FILES[1], b"2009-10-16 01:01:01\tD000\tCLOSE\n" + sensors.casas_lines())
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
    assert "skipped 2 of 222 lines, first line 221" in caplog.text
    path.write_bytes(line + b"\n" + content + 2 * (line + b"\n"))
    with pytest.raises(DataError):
        casas.load(tmp_path)


def test_casas_counts_unknown_activities_as_other_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sensors.write_casas(tmp_path)
    path = tmp_path / casas.FILES[4]
    path.write_bytes(path.read_bytes().replace(b"Sleep", b"Slep"))
    with caplog.at_level(logging.WARNING):
        casas.load(tmp_path)
    assert "milan/data: 1 activities are not in the list and count as other: ['slep']" in caplog.text
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
    antennas = uthar.load(tmp_path, antennas=True, samples=sensors.UTHAR_SAMPLES)
    assert antennas.input_shape == (3, 30, 250)
    assert float(antennas.test_x[3, 2, 5, 17]) == pytest.approx(packets[3, 17, 65])


def test_uthar_never_unpickles(tmp_path: Path) -> None:
    sensors.write_uthar(tmp_path)
    path = tmp_path / uthar.FOLDER / "label" / "y_test.csv"
    with path.open("wb") as file:
        np.save(file, np.array([{}] * 14, dtype=object), allow_pickle=True)
    with pytest.raises(DataError):
        uthar.load(tmp_path, samples=sensors.UTHAR_SAMPLES)


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
    path = sensors.put(tmp_path / "user1-1.csv", sensors.widar_lines(3))
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


# -------------------------------------------------------------------------------------------------- real files
def real(name: str) -> Path:
    root = data_root()
    if missing := DATASETS[name].missing(root):
        pytest.skip(f"{missing[0].name} not under {root}")
    return root


def test_real_aep_has_the_published_numbers() -> None:
    """And the same values on every machine, to the last bit."""
    data = aep.load(real("aep"))
    assert (data.train_x.shape, data.test_x.shape) == ((15_788, 18), (3_947, 18))
    assert fingerprint(data) == "1f1f04d83056002695b80d5fe1aec3d530cad3a3356ebd255942eda4423287db"


@pytest.mark.parametrize(("device", "by_code", "by_text"), [
    ("watch", {1600: 401, 1604: 396}, {1600: 500, 1604: 495}),
    ("phone", {1600: 384, 1604: 384}, {1600: 480, 1604: 480}),
])  # fmt: skip
def test_real_wisdm_has_as_many_windows_as_are_known(
    device: str, by_code: dict[int, int], by_text: dict[int, int]
) -> None:
    folder = real(f"wisdm_{device}") / wisdm.RAW / device
    for key, counts in ((wisdm.CODE_KEY, by_code), (wisdm.TEXT_KEY, by_text)):
        for subject, count in counts.items():
            paths = [folder / sensor / f"data_{subject}_{sensor}_{device}.txt" for sensor in wisdm.SENSORS]
            if not all(path.is_file() for path in paths):
                pytest.skip(f"{paths[0].name} is not there")
            accel, gyro = (wisdm._read(path, subject) for path in paths)
            assert len(wisdm.windows(accel, gyro, key).y) == count


@pytest.mark.parametrize(("device", "samples"), [("watch", 16_569 + 4_103), ("phone", 13_714 + 4_073)])
def test_real_wisdm_of_everybody_has_the_published_sum(device: str, samples: int) -> None:
    """The paper's split is drawn without a seed, its sum is not; its code's key gave it."""
    name = f"wisdm_{device}_code"
    root = real(name)
    if len(list((root / wisdm.RAW / device / "accel").glob("data_*"))) < len(wisdm.SUBJECTS):
        pytest.skip(f"not everybody's files are under {root}")
    data = DATASETS[name].load(root)
    assert len(data.train_y) + len(data.test_y) == samples


@pytest.mark.parametrize(
    ("name", "train", "test"),
    [
        ("casas", *casas.PUBLISHED),
        ("epic_sounds", *epic_sounds.PUBLISHED),  # by its authors: FedAIoT has 40,175 test samples
        ("uthar", *uthar.SAMPLES),
        ("visdrone", 6_471, 1_610),
        ("widar", *widar.PUBLISHED),
    ],
)
def test_real_files_have_the_published_numbers(name: str, train: int, test: int) -> None:
    root = real(name)
    if name == "visdrone" and not all((root / "visdrone" / part).is_dir() for part in (visdrone.TRAIN, visdrone.TEST)):
        pytest.skip(f"only the validation images are under {root}")
    data = DATASETS[name].load(root)
    assert (len(data.train_y), len(data.test_y)) == (train, test)
