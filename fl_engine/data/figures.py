"""How a figure of matplotlib becomes a file."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any, Literal


def save(
    figure: Any, to: Path | IO[str] | IO[bytes], kind: Literal["svg", "png"], dpi: float | Literal["figure"] = "figure"
) -> None:
    """Writes a `matplotlib.figure.Figure`. A fixed salt and no date, so that an equal figure gives equal bytes."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "flexfleet"}):
        figure.savefig(to, format=kind, dpi=dpi, metadata={"Date": None} if kind == "svg" else {"Software": None})
