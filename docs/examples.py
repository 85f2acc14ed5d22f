"""Add the notebooks of examples/ to the site as pages, with their stored outputs.

`python docs/examples.py` executes all notebooks and stores their outputs.
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
TABLE_STYLE = re.compile(r"<style.*?</style>| border=\"1\" class=\"dataframe\"| style=\"[^\"]*\"", re.DOTALL)
"""How pandas styles the table of a DataFrame."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def on_files(files: Any, config: Any) -> Any:
    import nbformat
    from mkdocs.structure.files import File

    for path in sorted(EXAMPLES.glob("*.ipynb")):
        content = page(nbformat.read(path, as_version=4), path.name)
        files.append(File.generated(config, f"examples/{path.stem}.md", content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links to notebooks by links to their pages."""
    return NOTEBOOKS.sub(r"(\1examples/\2.md)", markdown)


def execute(path: Path, folder: Path, **environment: str) -> Any:
    """Execute all cells in a new kernel with the working directory `folder`, and return the notebook without log lines
    and progress (stderr). Raises CellExecutionError if a cell fails."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(folder)}}
    options = {"coalesce_streams": True, "record_timing": False}  # without details that depend on time
    client = NotebookClient(notebook, kernel_name="python3", timeout=TIMEOUT_S, resources=where, **options)
    client.execute(env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata.language_info = {"name": "python"}  # without the version of the executing Python
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
    if "text/html" in data:  # a table in the style of the site, without empty lines, which would end the block
        text = TABLE_STYLE.sub("", data["text/html"])
        return "<div>" + "\n".join(line for line in text.splitlines() if line.strip()) + "</div>"
    return _text(data.get("text/plain", ""))


def _text(text: str) -> str:
    return f"{FENCE} text\n{COLOURS.sub('', text).rstrip()}\n{FENCE}"


def _alt(data: Any) -> str:
    return re.sub(r'[<>"&]', "", data.get("text/plain", "a figure"))


if __name__ == "__main__":
    import nbformat

    for path in sorted(EXAMPLES.glob("*.ipynb")):
        with TemporaryDirectory() as folder:
            nbformat.write(execute(path, Path(folder)), path)
