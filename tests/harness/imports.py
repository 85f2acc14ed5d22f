"""What the modules of this project import. What stands under `if TYPE_CHECKING` does not count."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


def modules(*packages: str) -> list[Path]:
    found = [p for package in packages for p in sorted((ROOT / package).rglob("*.py"))]
    return [p for p in found if "__pycache__" not in p.parts]


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path: Path, functions: bool = False) -> tuple[str, ...]:
    """Dotted names that a module imports when it is imported (with `functions`: also later)."""
    return tuple(_imports(path, functions))


def _imports(path: Path, functions: bool) -> Iterator[str]:

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


def reach(names: Iterable[str]) -> set[str]:
    """The files, relative to the root, of these modules and of all of this project that they import, also later."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        parts = waiting.pop().split(".")
        for end in range(1, len(parts) + 1):  # a module's packages are imported with it
            path = ROOT.joinpath(*parts[:end])
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            if path.exists() and (file := str(path.relative_to(ROOT))) not in found:
                found.add(file)
                waiting += imports(path, functions=True)
    return found
