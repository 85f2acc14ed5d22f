"""The ONNX files of a run's exported levels side by side: what each precision gives and costs beside fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_engine.models import onnx_comparison
from fl_engine.models.onnx_comparison import Figures, Precisions
from fl_engine.models.onnx_quantization import OnnxPrecision
from flexfleet.files.measure import Measure

EXPORT = "export"
"""A run folder's folder of exported levels."""


def of_run(folder: Path, levels: Sequence[str], model_sha256: str) -> tuple[Precisions, ...]:
    """What was measured of these levels, in this order; without those that nothing was asked for, or that were exported
    before the run went on. Raises IntegrityError for a damaged file."""
    found = (onnx_comparison.read(folder / EXPORT / level) for level in levels)
    return tuple(each for each in found if each is not None and each.model_sha256 == model_sha256)


def to_json(found: Sequence[Precisions]) -> dict[str, dict[str, dict[str, Any]]]:
    """By level and precision: the figures, or `{"refused": why}`."""
    return {
        each.level: {
            **{name: figures.model_dump() for name, figures in each.precisions.items()},
            **{name: {"refused": why} for name, why in each.refused.items()},
        }
        for each in found
    }


def metrics(found: Precisions) -> Mapping[str, float]:
    """The figures by the names that MLflow keeps them under: `precision/<level>/<precision>/<figure>`."""
    return {
        f"precision/{found.level}/{name}/{key}": float(value)
        for name, figures in found.precisions.items()
        for key, value in {found.metric: figures.value, **figures.model_dump(exclude={"file", "value"})}.items()
        if value is not None
    }


@dataclass(frozen=True)
class PrecisionRow:
    """A line of the table, every cell as text."""

    level: str
    precision: OnnxPrecision
    value: str
    agreement: str
    kilobytes: str
    size: str
    """The file's size as a multiple of fp32's; `time` likewise."""
    latency: str
    time: str
    share: str


def rows(found: Sequence[Precisions], none: str) -> list[PrecisionRow]:
    return [
        _row(each, name, figures, each.precisions["fp32"], none)
        for each in found
        for name, figures in each.precisions.items()
    ]


def _row(of: Precisions, name: OnnxPrecision, figures: Figures, fp32: Figures, none: str) -> PrecisionRow:
    return PrecisionRow(
        level=of.level,
        precision=name,
        value=Measure(of.metric).said(figures.value),
        agreement=none if figures.agreement is None else f"{100 * figures.agreement:.2f}",
        kilobytes=f"{figures.bytes / 1e3:,.1f}",
        size=f"{figures.bytes / fp32.bytes:.2f}",
        latency=f"{figures.latency_ms:,.3f}",
        time=f"{figures.latency_ms / fp32.latency_ms:.2f}",
        share=f"{100 * figures.share:.1f}",
    )


def refusals(found: Sequence[Precisions]) -> list[str]:
    return [f"{each.level}: no {name}: {why}" for each in found for name, why in each.refused.items()]


def table(found: Sequence[Precisions]) -> str:
    """For the terminal, with a line for each refused precision below."""
    measure = Measure(found[0].metric)
    head = ("level", "precision", f"{measure.name} {measure.unit}".rstrip(), "same class %", "kB", "of fp32", "ms",
            "of fp32", "weights %")  # fmt: skip
    lines = [head]
    for r in rows(found, "-"):
        lines.append((r.level, r.precision, r.value, r.agreement, r.kilobytes, r.size, r.latency, r.time, r.share))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ]
    return "\n".join([*text, *refusals(found)])
