"""Draw the form and the graph of the pipeline `train` for the guide, from the compiled pipeline.

python -m pipelines.drawings    # writes docs/images/kubeflow-form.svg and docs/images/kubeflow-graph.svg
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from flexfleet.kubeflow.retarget import documents, shipped

IMAGES = Path(__file__).parents[1] / "docs" / "images"
FONT = "Helvetica, Arial, DejaVu Sans, sans-serif"
FILLED = {"store_uri": "s3://bucket/runs", "mlflow_uri": "http://mlflow.flexfleet:5000"}
"""Values that the drawn form has in place of the defaults."""
FIRST = ("algorithm", "dataset", "rounds", "store_uri", "mlflow_uri")
"""Fields that are drawn in the accent colour."""
PAGES = ("Markdown", "HTML", "Metrics", "ClassificationMetrics")
"""Types of artifacts that Kubeflow's UI shows as a page."""

WIDTH, COLUMNS, ROW = 860, 2, 50
TASK, CHIP_GAP, CHIP_PAD = 276, 8, 12
INK, SOFT, LINE, ACCENT, DONE = "#1b2733", "#5b6570", "#c4ccd4", "#0b5c97", "#2e7d32"


def form(spec: Mapping[str, Any]) -> str:
    """Return the drawing of a pipeline's form: its fields with their values, as an SVG."""
    fields = spec["root"]["inputDefinitions"]["parameters"]
    rows = -(-len(fields) // COLUMNS)
    parts = [_text(20, 32, "Run parameters", size=18, weight="bold")]
    for place, (name, about) in enumerate(sorted(fields.items())):
        column, row = divmod(place, rows)
        parts += _field(20 + column * (WIDTH // COLUMNS), 58 + row * ROW, name, about)
    return _svg(58 + rows * ROW + 4, "The form of the pipeline train: every field with its default", parts)


def _field(x: int, y: int, name: str, about: Mapping[str, Any]) -> Iterator[str]:
    width, colour = WIDTH // COLUMNS - 40, ACCENT if name in FIRST else LINE
    value = FILLED.get(name, about.get("defaultValue", ""))
    shown = value if isinstance(value, str) else json.dumps(_whole(value))
    stroke = f'stroke="{colour}" stroke-width="{2 if name in FIRST else 1}"'
    yield f'<rect x="{x}" y="{y}" width="{width}" height="36" rx="4" fill="none" {stroke}/>'
    yield f'<rect x="{x + 9}" y="{y - 7}" width="{_width(name, 12) + 8}" height="14" fill="#ffffff"/>'
    yield _text(x + 13, y + 4, name, size=12, colour=ACCENT if name in FIRST else SOFT)
    yield _text(x + 13, y + 24, shown)
    if "literals" in about:
        yield f'<path d="M{x + width - 24} {y + 15} h12 l-6 7 z" fill="{SOFT}"/>'


def _whole(value: Any) -> Any:
    """Return 20 for 20.0, as the form shows numbers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def graph(spec: Mapping[str, Any]) -> str:
    """Return the drawing of a pipeline's tasks, each with its artifacts, as an SVG. The tasks have to be a chain in the
    order of their names."""
    tasks = sorted(spec["root"]["dag"]["tasks"].values(), key=lambda task: str(task["taskInfo"]["name"]))
    parts, y = [], 20
    for place, task in enumerate(tasks):
        if place:
            parts.append(f'<path d="M{20 + TASK // 2} {y - 28} v26" stroke="{SOFT}" marker-end="url(#end)"/>')
        parts += _task(y, task["taskInfo"]["name"])
        outputs = spec["components"][task["componentRef"]["name"]]["outputDefinitions"]["artifacts"]
        x = 20 + TASK + 26
        parts.append(f'<path d="M{20 + TASK} {y + 20} H{x}" stroke="{LINE}"/>')
        for name, about in outputs.items():
            kind = str(about["artifactType"]["schemaTitle"]).removeprefix("system.")
            width = max(_width(name, 13), _width(kind, 11)) + 2 * CHIP_PAD
            parts += _artifact(x, y, width, name, kind)
            x += width + CHIP_GAP
        y += 68
    return _svg(y - 8, "The graph of the pipeline train: six tasks and their artifacts", parts)


def _task(y: int, name: str) -> Iterator[str]:
    yield f'<rect x="20" y="{y}" width="{TASK}" height="40" rx="6" fill="#ffffff" stroke="{SOFT}"/>'
    yield _text(34, y + 25, name, weight="bold")
    x = 20 + TASK - 20
    yield f'<circle cx="{x}" cy="{y + 20}" r="8" fill="{DONE}"/>'
    yield f'<path d="M{x - 4} {y + 20} l3 3 l5 -6" stroke="#ffffff" stroke-width="2" fill="none"/>'


def _artifact(x: int, y: int, width: int, name: str, kind: str) -> Iterator[str]:
    is_page = kind in PAGES
    fill, stroke = ("#e6f1f9", ACCENT) if is_page else ("#f6f8fa", LINE)
    yield f'<rect x="{x}" y="{y}" width="{width}" height="40" rx="14" fill="{fill}" stroke="{stroke}"/>'
    yield _text(x + CHIP_PAD, y + 18, name, size=13)
    yield _text(x + CHIP_PAD, y + 32, kind, size=11, colour=ACCENT if is_page else SOFT)


def _width(text: str, size: int) -> int:
    return round(len(text) * size * 0.6)


def _text(x: int, y: int, text: str, size: int = 14, colour: str = INK, weight: str = "normal") -> str:
    bold = ' font-weight="bold"' if weight == "bold" else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}"{bold}>{escape(text)}</text>'


def _svg(height: int, label: str, parts: list[str]) -> str:
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" role="img" aria-label="{label}">',
        f'<defs><marker id="end" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0 L10 5 L0 10 z" fill="{SOFT}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    return "\n".join([*lines, *parts, "</svg>", ""])


def drawings() -> dict[str, str]:
    """Return the text of each file by its name."""
    spec = documents(shipped("train"))[0]
    return {"kubeflow-form.svg": form(spec), "kubeflow-graph.svg": graph(spec)}


if __name__ == "__main__":
    for name, text in drawings().items():
        (IMAGES / name).write_text(text, encoding="utf-8")
