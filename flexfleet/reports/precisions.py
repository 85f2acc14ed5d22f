"""Compare the precisions of exported ONNX files. Quality and cost of each precision are relative to fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_engine.models import onnx_precisions
from fl_engine.models.onnx_precisions import Precisions
from flexfleet.files.measure import Measure
from flexfleet.reports.page import Table

EXPORT = "export"
"""Name of the subfolder of a run folder that contains the exported levels."""


def of_run(folder: Path, levels: Sequence[str], model_sha256: str) -> tuple[Precisions, ...]:
    """Read the measurements of the given levels, in the order of `levels`. Levels are omitted if they were not measured
    for the current model. Raises IntegrityError if a file is damaged."""
    found = (onnx_precisions.read(folder / EXPORT / level) for level in levels)
    return tuple(each for each in found if each is not None and each.model_sha256 == model_sha256)


def to_json(found: Sequence[Precisions]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return {level: {precision: measurements}}. A rejected precision has the value `{"refused": reason}`."""
    return {
        each.level: {
            **{name: figures.model_dump() for name, figures in each.precisions.items()},
            **{name: {"refused": why} for name, why in each.refused.items()},
        }
        for each in found
    }


def metrics(found: Precisions) -> Mapping[str, float]:
    """Return the measurements as MLflow metrics: {`precision/<level>/<precision>/<name>`: value}."""
    return {
        f"precision/{found.level}/{name}/{key}": float(value)
        for name, figures in found.precisions.items()
        for key, value in {found.metric: figures.value, **figures.model_dump(exclude={"file", "value"})}.items()
        if value is not None
    }


def refusals(found: Sequence[Precisions]) -> list[str]:
    return [f"{each.level}: {name} was rejected: {why}" for each in found for name, why in each.refused.items()]


def as_table(found: Sequence[Precisions], none: str = "-") -> Table:
    """Return a table with a row for each level and precision. Missing values are shown as `none`."""
    measure, rows = Measure(found[0].metric), []
    for each in found:
        fp32 = each.precisions["fp32"]
        for name, figures in each.precisions.items():
            cells = (
                each.level,
                name,
                measure.number(figures.value),
                none if figures.agreement is None else f"{100 * figures.agreement:.2f}",
                f"{figures.bytes / 1e3:,.1f}",
                f"{figures.bytes / fp32.bytes:.2f}",
                f"{figures.latency_ms:,.3f}",
                f"{figures.latency_ms / fp32.latency_ms:.2f}",
                f"{100 * figures.share:.1f}",
            )
            rows.append(cells)
    head = ("level", "precision", measure.column, "same class %", "kB", "of fp32", "ms", "of fp32", "weights %")
    return Table("Precision of the exported levels", head, rows)


def table(found: Sequence[Precisions]) -> str:
    """Format the table as text, followed by one line for each rejected precision."""
    return "\n".join([as_table(found).text(left=2), *refusals(found)])
