"""AEP, Appliances Energy Prediction: predict the energy use of appliances in a house (19,735 readings).

Candanedo, Feldheim and Deramaix, Data driven prediction models of energy use of appliances in a low-energy house,
Energy and Buildings 140, 2017. The data are prepared as in FedAIoT (Alam, Federated Learning Benchmarks and Frameworks
for Artificial Intelligence of Things, Michigan State University 2023, section 2.2.3.2). The steps are in the order of
FedAIoT's published code: take logarithms, convert the visibility to 0 or 1, clip values, add two means, replace the
date by day and month, add three principal components. Features with a strong correlation to an earlier feature are left
out. Test readings are drawn at random, as in the published code. All transformations are fitted on the training
readings.

Departs from the paper, which scales the target. Here, as in the published code, the target is the logarithm of the
energy use. `Data.mean` and `Data.std` normalise the features. Features are rounded to five decimals, because the last
bits of principal components depend on the linear algebra library.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_engine.core.samples import Data
from fl_engine.data.files import damaged, expecting, read, require_by_hand
from fl_engine.data.transforms import as_tensors, moments, random_split
from fl_engine.tasks import Regression

ABOUT = "Appliances energy prediction, 18 features, the target a number (R2), 15,788 + 3,947; CC BY 4.0; 12 MB, by hand"
FILES = ("aep/energydata_complete.csv",)
URL = "https://archive.ics.uci.edu/dataset/374/appliances+energy+prediction"
HOW = f"Download {URL} (12 MB, CC BY 4.0, no form) and put its energydata_complete.csv there"
ROOMS = range(1, 10)
COLUMNS = (
    "date", "appliances", "lights", *(f"{what}{room}" for room in ROOMS for what in ("t", "rh_")),
    "t_out", "press_mm_hg", "rh_out", "windspeed", "visibility", "tdewpoint", "rv1", "rv2",
)  # fmt: skip
ROWS = 19_735
TEST_SHARE = 0.2
CLEAR = 40.0
"""Threshold in kilometres. The visibility feature is 1 for a visibility above this threshold, and 0 otherwise."""
COMPONENTS = 3
ALIKE = 0.85
"""A feature is left out if its absolute correlation with an earlier feature is above this limit."""
DECIMALS = 5
LINE = np.dtype([("date", "U20"), *((name, "f8") for name in COLUMNS[1:])])
DATE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", re.ASCII)

Table = dict[str, NDArray[np.float64]]
"""Maps column names to values of shape (N,)."""


def load(root: Path, rows: int = ROWS) -> Data:
    """Load `root`/aep/energydata_complete.csv, which has `rows` readings.

    Samples are (N, 18). Targets (N, 1) are logarithms of the energy use in Wh. Raises DataError if the file is missing,
    its columns or its number of readings are wrong, or a value is not finite or cannot be log-transformed.
    """
    require_by_hand("aep", root, FILES, HOW)
    path = root / FILES[0]
    table = _read(path, rows)
    for name, above in (("appliances", 0.0), ("t9", -1.0), ("rv1", -1.0), ("rv2", -1.0), ("windspeed", -1.0)):
        if table[name].min() <= above:
            raise damaged(path, f"{name} above {above:g}", f"{table[name].min():g}")
    target = np.log(table.pop("appliances")).round(DECIMALS)
    train, test = random_split(rows, TEST_SHARE)
    of_train, of_test = prepared(*({name: value[part] for name, value in table.items()} for part in (train, test)))
    train_x, test_x = (
        np.stack(list(part.values()), axis=1).round(DECIMALS).astype(np.float32) for part in (of_train, of_test)
    )
    tensors = as_tensors(train_x, target[train], test_x, target[test])
    return Data("aep", Regression(), *tensors, *moments(train_x))


def prepared(train: Table, test: Table) -> tuple[Table, Table]:
    """Return the features of the training and the test part. Percentiles, principal components and the selection of
    features are computed from the training part."""
    train, test = transformed(train), transformed(test)
    bounds = {name: np.percentile(value, (10, 90)) for name, value in train.items()}
    # As in the published code, clip all features, including the date.
    train, test = (
        with_means_and_day({name: np.clip(value, *bounds[name]) for name, value in part.items()})
        for part in (train, test)
    )
    centre, axes = principal(train)
    train, test = (with_components(part, centre, axes) for part in (train, test))
    kept = uncorrelated(train)
    return {name: train[name] for name in kept}, {name: test[name] for name in kept}


def transformed(table: Table) -> Table:
    """Replace the values x of four columns with log(1 + x), and the visibility with 0 or 1."""
    logarithms = {name: np.log1p(table[name]) for name in ("t9", "rv1", "rv2", "windspeed")}
    return table | logarithms | {"visibility": (table["visibility"] > CLEAR).astype(np.float64)}


def with_means_and_day(table: Table) -> Table:
    """Add the mean temperature and the mean humidity of the rooms. Column t9 already contains a logarithm. Replace the
    date, in seconds since 1970, with the day of the month and the month."""
    means = {
        "avg_house_temp": np.stack([table[f"t{room}"] for room in ROOMS]).mean(0),
        "avg_humidity_percentage": np.stack([table[f"rh_{room}"] for room in ROOMS]).mean(0),
    }
    date = table["date"].astype(np.int64).astype("datetime64[s]")
    months, days = date.astype("datetime64[M]"), date.astype("datetime64[D]")
    day = (days - months.astype("datetime64[D]")).astype(np.float64) + 1
    month = (months.astype(np.int64) % 12 + 1).astype(np.float64)
    rest = {name: value for name, value in table.items() if name != "date"}
    return rest | means | {"day": day, "month": month}


def principal(table: Table) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the means (F,) and the first three principal components (F, 3) of the unscaled columns.

    The sign of a component is arbitrary. As in scikit-learn, the weight with the largest magnitude is made positive.
    """
    values = np.stack(list(table.values()))
    centre = values.mean(1)
    _, vectors = np.linalg.eigh(np.cov(values))
    axes: NDArray[np.float64] = vectors[:, ::-1][:, :COMPONENTS]
    largest = np.take_along_axis(axes, np.abs(axes).argmax(0)[None], axis=0)
    return centre, axes * np.sign(largest)


def with_components(table: Table, centre: NDArray[np.float64], axes: NDArray[np.float64]) -> Table:
    """Append the projections of the readings onto the principal components as columns."""
    along = (np.stack(list(table.values()), axis=1) - centre) @ axes
    return table | {f"pca_{i + 1}": along[:, i] for i in range(axes.shape[1])}


def uncorrelated(table: Table) -> list[str]:
    """Return the names of columns without a strong correlation to any earlier column, including columns left out."""
    with np.errstate(invalid="ignore", divide="ignore"):  # correlations of a constant column are NaN
        alike = np.abs(np.corrcoef(np.stack(list(table.values())))) > ALIKE
    return [name for i, name in enumerate(table) if not alike[i, :i].any()]


def _read(path: Path, rows: int) -> Table:
    """Return all columns as numbers, with the date in seconds since 1970."""
    with expecting(path, f"{rows} rows of the columns {COLUMNS[0]}, ..., {COLUMNS[-1]}"):
        first, *lines = filter(None, read(path).decode("ascii").splitlines())
        if (found := first.replace('"', "").lower()) != ",".join(COLUMNS):
            raise ValueError(f"the columns {found[:400]}")
        if len(lines) != rows:
            raise ValueError(f"{len(lines)} rows")
        readings = np.loadtxt(lines, LINE, delimiter=",", comments=None, quotechar='"', ndmin=1)
        if odd := [date for date in readings["date"].tolist() if not DATE.fullmatch(date)]:
            raise ValueError(f"the date {odd[0]}")
        seconds = readings["date"].astype("datetime64[s]").astype(np.int64)
        table = {name: readings[name].copy() for name in COLUMNS[1:]}
        if not all(np.isfinite(column).all() for column in table.values()):
            raise ValueError("a value that is NaN or infinite")
    return {"date": seconds.astype(np.float64), **table}
