"""What is different in Python 3.10 and in 3.12 to 3.14, seen without having them: what 3.10 lacks, how processes start,
when annotations are read, and which certificates are taken."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import mypy
import pytest

from fl_engine.core.errors import EnvironmentFailure
from flexfleet.cli import main as cli

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("fl_engine", "flexfleet", "components", "pipelines", "benchmarks", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def test_the_classifiers_name_every_python_from_the_oldest_on() -> None:
    """The oldest is for devices alone."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [line.rpartition(" ")[2] for line in about["classifiers"] if line.startswith("Programming Language")]
    assert named == ["3.10", "3.11", "3.12", "3.13", "3.14"] and about["requires-python"] == f">={named[0]}"
    assert f"Python {named[1]} to {named[-1]}" in (ROOT / "README.md").read_text()
    assert f"Python {named[0]}" in (ROOT / "docs" / "guides" / "agents.md").read_text()


# ------------------------------------------------------------------------------------------- what Python 3.10 lacks
STUBS = Path(mypy.__file__).parent / "typeshed" / "stdlib"
OWN = [path for path in SOURCES if path.is_relative_to(ROOT / "fl_engine") or path.is_relative_to(ROOT / "flexfleet")]


def names_of(body: Sequence[ast.stmt], version: tuple[int, int]) -> Iterator[str]:
    """What a stub defines for a version of Python, at its top."""
    for node in body:
        if isinstance(node, ast.If):
            known = {"sys": SimpleNamespace(version_info=version, platform="linux"), "TYPE_CHECKING": True}
            holds = eval(compile(ast.Expression(node.test), "stub", "eval"), known)
            yield from names_of(node.body if holds else node.orelse, version)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)


@cache
def newer(module: str) -> frozenset[str]:
    """Names of a module of Python's that 3.10 does not have."""
    path = STUBS.joinpath(*module.split("."))
    path = path / "__init__.pyi" if path.is_dir() else path.with_suffix(".pyi")
    if not path.exists():
        return frozenset()
    body = ast.parse(path.read_text()).body
    return frozenset(names_of(body, (3, 14))) - frozenset(names_of(body, (3, 10)))


@cache
def new_modules() -> frozenset[str]:
    lines = [line.partition("#")[0].partition(":") for line in (STUBS / "VERSIONS").read_text().splitlines()]
    begins = {name: since.strip().partition("-")[0] for name, _, since in lines if since}
    return frozenset(name for name, since in begins.items() if tuple(map(int, since.split("."))) > (3, 10))


def lacking(source: str) -> list[str]:
    """What a source uses of Python's modules that 3.10 does not have. Raises SyntaxError for what it cannot read."""
    tree = ast.parse(source, feature_version=(3, 10))
    modules: dict[str, str] = {}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
            found += [alias.name for alias in node.names if alias.name in new_modules()]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{a.name}" for a in node.names if a.name in newer(node.module)]
            found += [node.module] if node.module in new_modules() else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (module := modules.get(ast.unparse(node.value))):
            found += [f"{module}.{node.attr}"] if node.attr in newer(module) else []
    return found


def test_python_3_10_has_what_the_sources_use() -> None:
    found = {str(path.relative_to(ROOT)): lacking(path.read_text()) for path in OWN}
    assert len(found) > 300 and {path: names for path, names in found.items() if names} == {}


def test_on_python_3_10_commands_of_the_coordinator_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "sys", SimpleNamespace(version_info=(3, 10, 12)))
    for command in (["run"], ["compare", "--algorithms", "flexfl"], ["invite"]):
        with pytest.raises(EnvironmentFailure, match=r"`flexfleet \w+` needs Python 3\.11 or newer.*agent, check, "):
            cli.dispatch(command)
    assert cli.dispatch(["list", "algorithms", "--json"]) == 0


# ------------------------------------------------------------------------------------- when annotations are read
def test_annotations_are_read_through_typing() -> None:
    """`__annotations__` of 3.14 is computed when it is asked for, and is in no class's `__dict__`."""
    direct = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        if path != Path(__file__) and "__annotations__" in (source := path.read_text())
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Attribute) and node.attr == "__annotations__")
        or (isinstance(node, ast.Constant) and node.value == "__annotations__")
    ]
    assert direct == [], "typing.get_type_hints"
