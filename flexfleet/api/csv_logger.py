"""Define a callback that logs the metrics of a run to a CSV file."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_engine.core.text import path_of
from flexfleet.api.callbacks import Callback, Round

if TYPE_CHECKING:
    from flexfleet.api.results import Result


class CSVLogger(Callback):
    """Write a CSV file with one row for each round. A cell is empty if the round does not have the metric. A resumed
    run writes the file again, including all rounds that were committed before.

    Args:
        path: Path of the CSV file. An existing file is replaced. If None, `metrics.csv` in the run's folder is used.

    Examples:
        >>> flexfleet.run(callbacks=[flexfleet.CSVLogger("metrics.csv")])
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._path = None if path is None else path_of(path).absolute()

    def on_start(self, result: Result) -> None:
        self._file = self._path or result.folder / "metrics.csv"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._rows: list[dict[str, Any]] = result._history
        self._columns = list(dict.fromkeys(name for row in self._rows for name in row))
        self._write("w", self._rows)

    def on_round(self, round: Round) -> None:
        row = {"round": round.number, **round.metrics}
        self._rows.append(row)
        if row.keys() <= set(self._columns):
            self._write("a", [row])
        else:
            self._columns = list(dict.fromkeys([*self._columns, *row]))
            self._write("w", self._rows)

    def _write(self, mode: str, rows: list[dict[str, Any]]) -> None:
        with open(self._file, mode, encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            if mode == "w" and self._columns:
                writer.writeheader()
            writer.writerows(rows)
