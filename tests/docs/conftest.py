"""The notebooks of examples/, each executed once, with the wheel."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.harness.wheel import ROOT

MEASURE = "import time, flexfleet; print(flexfleet.__file__, time.process_time())"
"""A cell that is run after the notebook's own: where the package came from, and the seconds that a core has worked."""


def site() -> Any:
    """The hook of the site that executes notebooks."""
    spec = importlib.util.spec_from_file_location("examples_of_the_site", ROOT / "docs" / "examples.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def executed(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By a notebook's name, its file with results; in the same folder, `<name>.measured` has what MEASURE said."""
    nbformat = pytest.importorskip("nbformat", reason="notebooks need nbclient: pip install 'flexfleet[dev]'")
    out = tmp_path_factory.mktemp("executed")

    @cache
    def execute(name: str) -> Path:
        notebook = nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)
        notebook.cells.append(nbformat.v4.new_code_cell(MEASURE))
        nbformat.write(notebook, out / f"{name}.ipynb")
        folder = tmp_path_factory.mktemp(name)
        done = site().execute(out / f"{name}.ipynb", folder, PYTHONPATH=str(installed), IPYTHONDIR=str(folder))
        (measured,) = done.cells.pop()["outputs"]
        (out / f"{name}.measured").write_text(measured["text"])
        nbformat.write(done, out / f"{name}.ipynb")
        return out / f"{name}.ipynb"

    return execute
