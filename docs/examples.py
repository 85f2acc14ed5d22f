"""Add the notebooks of examples/ to the site as pages. Building the site executes them, so pages have results.

`mkdocs serve` shows notebooks without results, so that changes appear immediately. EXECUTED_EXAMPLES names a folder
with executed notebooks.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TIMEOUT_S = 600
"""Timeout for one cell, also on a busy machine."""
FENCE = "~" * 6
NOTEBOOKS = re.compile(r"\(\.\./((?:\.\./)*)examples/(\w+)\.ipynb\)")
"""A link to a notebook on a page in docs/."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
serving = False


def on_startup(command: str, **_: Any) -> None:
    global serving
    serving = command == "serve"


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path in sorted(EXAMPLES.glob("*.ipynb")):
        files.append(File.generated(config, f"examples/{path.stem}.md", content=page(results(path), path.name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links to notebooks by links to their pages."""
    return NOTEBOOKS.sub(r"(\1examples/\2.md)", markdown)


def results(path: Path) -> Any:
    """Return the notebook, executed if the site is built."""
    import nbformat

    done = os.environ.get("EXECUTED_EXAMPLES")
    if serving or done:
        return nbformat.read(Path(done) / path.name if done and not serving else path, as_version=4)
    with TemporaryDirectory() as folder:
        return execute(path, Path(folder))


def execute(path: Path, folder: Path, **environment: str) -> Any:
    """Execute all cells in a new kernel with the working directory `folder`. Raises CellExecutionError if a cell
    fails."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, kernel_name="python3", timeout=TIMEOUT_S, allow_errors=False, resources=where)
    client.execute(env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    return notebook


def page(notebook: Any, name: str) -> str:
    """Return the notebook as Markdown."""
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        else:
            parts.append(f"{FENCE} python\n{cell.source}\n{FENCE}")
            parts += [shown(output) for output in cell.get("outputs", [])]
    parts.append(f"The notebook is `examples/{name}`.")
    return "\n\n".join(parts) + "\n"


def shown(output: Any) -> str:
    """Return a cell's printed text, or the richest representation of its value that a page can show."""
    if output.output_type == "stream":
        return _text(output.text)
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img alt="{_alt(data)}" src="data:image/png;base64,{"".join(data["image/png"].split())}">'
    if "text/html" in data:  # without empty lines, which would end the block
        return "<div>" + "\n".join(line for line in data["text/html"].splitlines() if line.strip()) + "</div>"
    return _text(data.get("text/plain", ""))


def _text(text: str) -> str:
    return f"{FENCE} text\n{COLOURS.sub('', text).rstrip()}\n{FENCE}"


def _alt(data: Any) -> str:
    return re.sub(r'[<>"&]', "", data.get("text/plain", "a figure"))
