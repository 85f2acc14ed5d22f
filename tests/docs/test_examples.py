"""The notebooks of examples/ run from the first cell to the last: in a real kernel, with the wheel, within a minute;
and the site, which shows their results, builds without a dead link."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

from tests.harness.wheel import ROOT

NOTEBOOKS = sorted(path.stem for path in (ROOT / "examples").glob("*.ipynb"))
SECONDS = 60
"""Of one core's work."""


def code(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


MEASURE = "import time, flexfleet; print(flexfleet.__file__, time.process_time())"
"""A cell that is run after the notebook's own: where the package came from, and the seconds that a core has worked."""


@pytest.fixture(scope="session")
def executed(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By a notebook's name, its file with results; in the same folder, `<name>.measured` has what MEASURE said."""
    nbformat = pytest.importorskip("nbformat", reason="notebooks need nbclient: pip install -e '.[dev]'")
    out = tmp_path_factory.mktemp("executed")
    execute_and_clean = run_path(str(ROOT / "docs" / "examples.py"))["execute"]

    @cache
    def execute(name: str) -> Path:
        notebook = nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)
        notebook.cells.append(nbformat.v4.new_code_cell(MEASURE))
        nbformat.write(notebook, out / f"{name}.ipynb")
        folder = tmp_path_factory.mktemp(name)
        env = {"PYTHONPATH": str(installed), "IPYTHONDIR": str(folder)}
        done = execute_and_clean(out / f"{name}.ipynb", folder, **env)
        (measured,) = done.cells.pop()["outputs"]
        (out / f"{name}.measured").write_text(measured["text"])
        nbformat.write(done, out / f"{name}.ipynb")
        return out / f"{name}.ipynb"

    return execute


def shape(cell: dict[str, Any]) -> list[Any]:
    """The kinds of a cell's outputs, and the number of rows of each table. Numbers and pixels depend on the machine."""
    outputs = [(each["output_type"], each.get("data", {})) for each in cell["outputs"]]
    return [(kind, sorted(data), "".join(data.get("text/html", "")).count("<tr")) for kind, data in outputs]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name: str, executed: Callable[[str], Path], installed: Path) -> None:
    path = executed(name)
    cells = code(path)
    stored = code(ROOT / "examples" / path.name)
    assert list(map(shape, cells)) == list(map(shape, stored)), "run docs/examples.py to store new outputs"
    assert not any(cell["metadata"] for cell in stored), "no cell is tagged: none is skipped, and none may fail"
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2, "it shows pictures"
    assert not any(output["output_type"] == "error" for output in outputs)
    package, seconds = path.with_suffix(".measured").read_text().split()
    assert Path(package) == installed / "flexfleet" / "__init__.py"
    assert float(seconds) < SECONDS


def test_the_site_builds_without_a_dead_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site's builder is not installed: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in NOTEBOOKS:
        shown = (tmp_path / "site/examples" / name / "index.html").read_text()
        assert "data:image/png;base64," in shown and "<table" in shown, f"{name} with its pictures and tables"
    commands = (tmp_path / "site/reference/commands/index.html").read_text()
    assert "flexfleet regress" in commands and "--update" in commands
    assert "kd_weight" in (tmp_path / "site/reference/algorithms/index.html").read_text()
    assert "norm_bound" in (tmp_path / "site/reference/parameters/index.html").read_text()
    assert "SubmodelSpec" in (tmp_path / "site/reference/engine/index.html").read_text()
