"""How a figure of matplotlib becomes a file."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any, Literal


def save(
    figure: Any, to: Path | IO[str], kind: Literal["svg", "png"], dpi: float | Literal["figure"] = "figure"
) -> None:
    """Writes a `matplotlib.figure.Figure`, to a path whole or not at all. A fixed salt and no date, so that an equal
    figure gives equal bytes. Raises OSError."""
    import matplotlib

    part = to.with_name(f".{to.name}.part") if isinstance(to, Path) else to
    try:
        with matplotlib.rc_context({"svg.hashsalt": "flexfleet"}):
            figure.savefig(part, format=kind, dpi=dpi, metadata={"Date": None} if kind == "svg" else {"Software": None})
        if isinstance(to, Path) and isinstance(part, Path):
            part.replace(to)
    except OSError as error:
        if isinstance(part, Path):
            part.unlink(missing_ok=True)  # a full disk would not be less full
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(to)) from error  # that of a write names no file
