"""Imports point one way, and what has to be light stays light.

Module-level imports only, and `if TYPE_CHECKING` apart: an import inside a function is a dependency that is paid for
when it is used, and that is what some of them are for.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# From what everything may import to what nothing may. A package stands for its modules.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"types", "errors", "seeds", "fields"}),
    frozenset({"slicing", "averaging", "widths", "numerics", "kernels", "lanes", "sharing", "spool", "workload"}),
    frozenset({"acceptance", "aggregation", "devices", "faults", "losses", "selection", "server_opt"})
    | frozenset({"lease", "privacy", "probe", "s3", "state", "store", "tracking"}),
    frozenset({"local", "pool", "evaluate", "updates", "ledger"}),
    frozenset({"strategy"}),
    frozenset({"algorithms", "models", "datasets", "partition"}),
    frozenset({"rounds", "client", "config", "assignment", "memory", "export"}),
    frozenset({"backends"}),
    frozenset({"tune"}),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
TOP = len(LAYERS)

HEAVY = ("mlflow", "kfp", "kubernetes", "boto3", "dvc", "optuna", "sklearn", "matplotlib", "pandas")


def modules(*packages: str) -> list[Path]:
    found = [p for package in packages for p in sorted((ROOT / package).rglob("*.py"))]
    return [p for p in found if "__pycache__" not in p.parts]


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, functions: bool = False) -> Iterator[str]:
    """Dotted names that a module imports when it is imported (with `functions`: also later)."""

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not functions:
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            yield child
            yield from walk(child)

    for node in walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            module = str(node.module)
            for alias in node.names:
                inner = ROOT.joinpath(*module.split("."), alias.name)
                is_module = inner.with_suffix(".py").exists() or (inner / "__init__.py").exists()
                yield f"{module}.{alias.name}" if is_module else module


def level(name: str) -> int | None:
    """None: not of this engine, or the package itself (which holds the version only)."""
    parts = name.split(".")
    if parts[0] in ("components", "pipelines"):
        return TOP + ("components", "pipelines").index(parts[0])
    if parts[0] != "fl_engine" or len(parts) == 1:
        return None
    return LEVEL.get(parts[1])


ENGINE = [p for p in modules("fl_engine") if "testing" not in p.parts and dotted(p) != "fl_engine"]
ALL = [*ENGINE, *modules("components", "pipelines")]


@pytest.mark.parametrize("path", ENGINE, ids=dotted)
def test_every_module_has_its_place(path: Path) -> None:
    assert dotted(path).split(".")[1] in LEVEL, "add it to LAYERS, where DESIGN section 2 would put it"


@pytest.mark.parametrize("path", ALL, ids=dotted)
def test_imports_point_one_way(path: Path) -> None:
    own = level(dotted(path))
    if own is None:
        return
    upwards = [name for name in imports(path) if (level(name) or 0) > own]
    assert upwards == []


@pytest.mark.parametrize("path", [p for p in ENGINE if "algorithms" in p.parts], ids=dotted)
def test_an_algorithm_knows_no_backend_no_tracker_and_no_cluster(path: Path) -> None:
    """Not even inside a function."""
    banned = ("fl_engine.backends", "fl_engine.tracking", "fl_engine.ledger", "mlflow", "kubernetes", "kfp")
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
"""Packages whose modules have another name."""
BROUGHT = {"botocore": "boto3", "urllib3": "boto3", "sqlalchemy": "optuna", "markupsafe": "jinja2"}
"""What comes with others."""


def test_the_image_holds_what_steps_and_clients_import() -> None:
    """Also inside functions; pipelines are compiled where kfp is."""
    listed = {
        line
        for name in ("requirements.txt", "requirements-alone.txt")
        for line in (ROOT / "components" / name).read_text().splitlines()
        if line and not line.startswith("#")
    }
    for path in modules("fl_engine", "components"):
        if "testing" in path.parts:
            continue
        tops = {name.split(".")[0] for name in imports(path, functions=True)}
        theirs = tops - set(sys.stdlib_module_names) - {"fl_engine", "components", "pipelines"}
        needed = {BROUGHT.get(top, FROM.get(top, top)) for top in theirs if top != "mlflow"}
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


def test_algorithms_load_nothing_of_the_outside() -> None:
    names = (*HEAVY, "fl_engine.backends", "fl_engine.tracking")
    assert loaded("import fl_engine.algorithms", names) == []


def test_the_engine_loads_no_extra() -> None:
    statement = "; ".join(f"import {dotted(p)}" for p in ENGINE)
    assert loaded(statement, HEAVY) == []


PIPELINES = [dotted(p) for p in modules("pipelines")]


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_needs_no_torch(name: str) -> None:
    """Wiring and compiling a graph has to be possible where the engine is not installed."""
    banned = ("torch", "fl_engine.slicing", "mlflow")
    paths = [ROOT.joinpath(*name.split(".")).with_suffix(".py"), ROOT.joinpath(*name.split("."), "__init__.py")]
    needs_kfp = any(n.split(".")[0] == "kfp" for p in paths if p.exists() for n in imports(p))
    if needs_kfp:
        pytest.importorskip("kfp")
    assert loaded(f"import {name}", banned) == []


def test_the_command_line_answers_without_torch() -> None:
    assert loaded("import components.cli", ("torch",)) == []


ROUNDS = """\
from pathlib import Path
from components import federate, model_pool, partition, pretrain
from fl_engine.config import load_config
config, here = load_config(None, {sets!r}), Path({here!r})
partition.partition(config, here / "partition")
pretrain.pretrain(config, here / "partition", here / "pretrain")
model_pool.model_pool(config, here / "pretrain", here / "pool")
federate.federate(config, here / "partition", here / "pool", here / "run")
"""


def test_a_run_on_the_digits_loads_no_compiler_and_no_scikit_learn(quick: tuple[str, ...], tmp_path: Path) -> None:
    """Each takes seconds, in every pod. Torch loads its compiler where an optimiser's class or its meta device is
    used."""
    statement = ROUNDS.format(sets=[*quick, "rounds.stop=1"], here=str(tmp_path))
    assert loaded(statement, ("torch._dynamo", "sympy", "sklearn")) == []
