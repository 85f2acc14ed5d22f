"""Imports point one way, and what has to be light stays light. (tests/harness/imports.py says what counts.)"""

from __future__ import annotations

import re
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.harness.imports import ROOT, dotted, imports, modules

HEAVY = ("mlflow", "kfp", "kubernetes", "boto3", "dvc", "optuna", "sklearn", "matplotlib", "pandas")


def room(name: str) -> str | None:
    """Return the folder that holds a module; None for other projects and for a package itself."""
    first, *rest = name.split(".")
    if first in ("components", "pipelines"):
        return first
    return f"{first}.{rest[0]}" if first in ("fl_engine", "flexfleet") and rest else None


ENGINE = [p for p in modules("fl_engine") if "testing" not in p.parts and dotted(p) != "fl_engine"]
ALL = [*ENGINE, *modules("flexfleet", "components", "pipelines")]
MODULES = {dotted(path): path for path in [*ALL, *modules("fl_engine/testing")]}


def test_engine_imports_neither_flexfleet_nor_components() -> None:
    for path in [*ENGINE, *modules("fl_engine/testing")]:
        assert [
            n for n in imports(path, functions=True) if n.startswith(("flexfleet", "components", "pipelines"))
        ] == []


def test_core_imports_no_other_room() -> None:
    for path in modules("fl_engine/core"):
        assert {room(n) for n in imports(path, functions=True)} <= {None, "fl_engine.core"}


def test_no_files_and_no_rooms_import_each_other_in_a_circle() -> None:
    files = {name: {n for n in imports(path, functions=True) if n in MODULES} for name, path in MODULES.items()}
    # A package's face imports its files; a file of the package does not need it for what it names.
    faces = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    TopologicalSorter({name: to - faces - {name} for name, to in files.items()}).prepare()  # CycleError names a circle
    rooms: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        if own := room(name):
            rooms.setdefault(own, set()).update({str(room(n)) for n in imports(path, functions=True)} - {"None", own})
    TopologicalSorter(rooms).prepare()


def test_drawing_of_folders_shows_each_import_below() -> None:
    found = re.findall(r'y="(\d+)"[^>]*class="room">(\w+)<', (ROOT / "docs/drawings/layers.svg").read_text())
    row = {folder: int(y) for y, folder in found}
    for name, path in MODULES.items():
        own = str(room(name)).split(".")[-1]
        if own in row:
            below = {str(room(n)).split(".")[-1] for n in imports(path, functions=True)} - {"None", own}
            assert all(row[each] > row[own] for each in below), f"{path}: {below}"
    assert len(row) == len({room(name) for name in MODULES} - {None, "flexfleet.__main__"})


@pytest.mark.parametrize("path", [p for p in ENGINE if "algorithms" in p.parts], ids=dotted)
def test_an_algorithm_knows_no_backend_no_tracker_and_no_cluster(path: Path) -> None:
    rooms = ("fl_engine.backends", "fl_engine.exchange", "fl_engine.storage", "flexfleet")
    banned = (*rooms, "mlflow", "kubernetes", "kfp")
    found = [name for name in imports(path, functions=True) if name.startswith(banned)]
    assert found == []


@pytest.mark.parametrize("path", ALL, ids=dotted)
def test_only_tests_import_the_suites(path: Path) -> None:
    found = [n for n in imports(path, functions=True) if n.startswith(("fl_engine.testing", "pytest", "hypothesis"))]
    assert found == []


@pytest.mark.parametrize("path", ENGINE, ids=dotted)
def test_extras_are_imported_where_they_are_used(path: Path) -> None:
    """The engine runs without tracking, cluster and tuning packages."""
    assert [name for name in imports(path) if name.split(".")[0] in HEAVY] == []


FROM = {"dp_accounting": "dp-accounting", "sklearn": "scikit-learn", "yaml": "pyyaml"}
FROM |= {"faster_coco_eval": "faster-coco-eval", "prometheus_client": "prometheus-client"}
"""Packages whose modules have another name."""
BROUGHT = {"botocore": "boto3", "urllib3": "boto3", "sqlalchemy": "optuna", "markupsafe": "jinja2"}
BROUGHT |= {"pydantic_core": "pydantic", "requests": "kubernetes", "kfp_server_api": "kfp"}
BROUGHT |= {"PIL": "matplotlib", "threadpoolctl": "scikit-learn"}
BROUGHT |= {"shtab": "dvc", "dvc_objects": "dvc", "dvc_data": "dvc"}
"""What comes with others."""
ASKED = {"mlflow", "wandb"}
"""Packages that the image has under another name (mlflow-skinny), or that the users of a callback install."""


def test_the_image_holds_what_steps_and_clients_import() -> None:
    listed = {
        line
        for name in ("requirements.txt", "requirements-alone.txt")
        for line in (ROOT / "components" / name).read_text().splitlines()
        if line and not line.startswith("#")
    }
    for path in modules("fl_engine", "flexfleet"):
        if "testing" in path.parts:
            continue
        tops = {name.split(".")[0] for name in imports(path, functions=True)}
        theirs = tops - set(sys.stdlib_module_names) - {"fl_engine", "flexfleet", "components", "pipelines"}
        needed = {BROUGHT.get(top, FROM.get(top, top)) for top in theirs - ASKED}
        assert needed <= listed, f"{path}: {sorted(needed - listed)} is not in the image"
    assert "mlflow-skinny" in listed


def loaded(statement: str, names: tuple[str, ...]) -> list[str]:
    """Which of `names` are loaded after `statement` in a fresh interpreter."""
    script = f"import sys\n{statement}\nprint(*[n for n in {names!r} if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_guest_and_a_gpu_load_no_compiler() -> None:
    use = "from fl_engine.backends.in_process import prepare_process; from fl_engine.training.isolation import isolated"
    inside = "with isolated(): prepare_process(('cuda',))"
    assert loaded(f"{use}\n{inside}", ("torch._dynamo", "torch._inductor", "sympy")) == []


def test_algorithms_load_nothing_of_the_outside() -> None:
    names = (*HEAVY, "fl_engine.backends", "flexfleet.tracking.trackers")
    assert loaded("import fl_engine.algorithms", names) == []


def test_the_engine_loads_no_extra() -> None:
    statement = "; ".join(f"import {dotted(p)}" for p in ENGINE)
    assert loaded(statement, HEAVY) == []


def test_pipelines_need_no_torch() -> None:
    """Wiring and compiling a graph has to be possible where the engine is not installed."""
    without = find_spec("kfp") is None
    found = [p for p in modules("pipelines") if not (without and any(n.split(".")[0] == "kfp" for n in imports(p)))]
    statement = "; ".join(f"import {dotted(p)}" for p in found)
    assert loaded(statement, ("torch", "fl_engine.core.slicing", "mlflow")) == []


def test_the_command_line_answers_without_torch() -> None:
    assert loaded("import flexfleet.cli.main", ("torch",)) == []
