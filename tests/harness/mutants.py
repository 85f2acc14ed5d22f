"""Changes the engine in one small place at a time, and checks whether the fast tests notice it.

    python -m tests.harness.mutants --only exchange/updates,storage/run_lock --limit 50 --seed 1 --json

A mutant is a module with one of the `changes`. It exists only in a forked process, which runs the tests of that
module until one fails. Prints the mutants that no test noticed: a test is missing, or the change has no effect. Exit
code 0: all mutants were tried; 1: the tests fail without any change.

mutmut and cosmic-ray neither leave out statements nor replace `min` by `max`, the changes that matter most here.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.util
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]

TESTS = {
    "aggregation/averaging": ("laws/test_aggregation",),
    "aggregation/privacy": ("laws/test_privacy", "laws/test_private_runs"),
    "exchange/manifest": ("laws/test_updates", "fuzz/test_ledger"),
    "exchange/mailbox": ("laws/test_ledger", "laws/test_updates", "laws/test_resume"),
    "exchange/updates": ("laws/test_updates", "fuzz/test_ledger"),
    "rounds/acceptance": ("laws/test_acceptance",),
    "rounds/ledger": ("laws/test_ledger", "laws/test_updates"),
    "storage/checkpoints": ("laws/test_ledger", "laws/test_packing", "laws/test_run_lock", "laws/test_resume"),
    "storage/run_lock": ("laws/test_run_lock",),
}
"""The tests that should notice a change, by file of the engine."""

PRELOADED = ("hypothesis", "numpy", "pydantic", "safetensors.torch", "torch", "yaml")
"""Modules that take long to import. They are imported once, before the processes are forked."""
PATIENCE = 4.0
"""A mutant hangs if its tests take so many times longer than those of the unchanged module."""


# ------------------------------------------------------------------------------------------------------ changes
@dataclass(frozen=True)
class Mutant:
    line: int
    said: str
    make: Callable[[], None]
    """Makes the change in the tree in which it was found."""


COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult,
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
LEFT_OUT = (ast.Raise, ast.AugAssign, ast.Continue, ast.Break, ast.Delete)
NOT_LOOKED_INTO = {"annotation", "returns", "decorator_list", "bases"}


def changes(parent: ast.AST, field: str, node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yields (description, new node) for each replacement of `node`."""
    if isinstance(node, LEFT_OUT) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield f"left out: {_said(node)}", ast.Pass()
    if isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple):
        yield f"left out: {_said(node)}", ast.Pass()
    if field == "test" and isinstance(parent, ast.If | ast.IfExp | ast.While):
        yield f"negated: {_said(node)}", ast.UnaryOp(ast.Not(), node)  # type: ignore[arg-type]
    if field == "ifs":
        yield f"always: {_said(node)}", ast.Constant(True)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"negated: {_said(node)}", node.operand
    if isinstance(node, ast.BoolOp):
        for i, value in enumerate(node.values):
            rest = node.values[:i] + node.values[i + 1 :]
            yield f"{_said(node)} without {_said(value)}", ast.BoolOp(node.op, rest) if rest[1:] else rest[0]
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
        yield f"{_said(node)} -> {_said(other)}", other
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_text(node.left):
        swapped = ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
        yield f"{_said(node)} -> {_said(swapped)}", swapped
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in CALLS:
            swapped_call = ast.Call(ast.Name(CALLS[name], ast.Load()), node.args, node.keywords)
            yield f"{_said(node)} -> {CALLS[name]}", swapped_call
        for i, keyword in enumerate(node.keywords):
            without = ast.Call(node.func, node.args, node.keywords[:i] + node.keywords[i + 1 :])
            yield f"{_said(node)} without {keyword.arg}", without
    if isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        value = not node.value if isinstance(node.value, bool) else node.value + 1  # type: ignore[operator]
        yield f"{node.value} -> {value}", ast.Constant(value)
    if isinstance(node, ast.JoinedStr):
        for i, part in enumerate(node.values):
            if isinstance(part, ast.FormattedValue):
                less = ast.JoinedStr(node.values[:i] + node.values[i + 1 :])
                yield f"{_said(node)} without {_said(part.value)}", less


def mutants(tree: ast.Module) -> Iterator[Mutant]:
    """Every change, in the order of the lines. Messages of errors and calls of the log are not changed."""

    def walk(parent: ast.AST) -> Iterator[Mutant]:
        for field, value in ast.iter_fields(parent):
            if field in NOT_LOOKED_INTO:
                continue
            for index, node in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(node, ast.AST) or _is_log(node):
                    continue
                for said, new in changes(parent, field, node):
                    yield Mutant(_line(node, parent), said, _put(parent, field, index, new))
                if not isinstance(node, ast.Raise | ast.FormattedValue):
                    yield from walk(node)

    return walk(tree)


def _put(parent: ast.AST, field: str, index: int, new: ast.AST) -> Callable[[], None]:
    def put() -> None:
        value = getattr(parent, field)
        if isinstance(value, list):
            value[index] = new
        else:
            setattr(parent, field, new)

    return put


def _said(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 70 else f"{text[:67]}..."


def _line(node: ast.AST, parent: ast.AST) -> int:
    return int(getattr(node, "lineno", getattr(parent, "lineno", 0)))


def _is_log(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith("log.")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


# ------------------------------------------------------------------------------------------------------- trying
@dataclass(frozen=True)
class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module of the engine with a change."""

    name: str
    path: Path
    tree: ast.Module

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.tree, self.path, "exec"), module.__dict__)


def changed(source: str, number: int) -> ast.Module:
    tree = ast.parse(source)
    mutant = next(m for i, m in enumerate(mutants(tree)) if i == number)
    mutant.make()
    return ast.fix_missing_locations(tree)


def tried(module: str, tree: ast.Module, patience_s: float) -> bool:
    """Whether the module's tests pass with `tree` as the module. Tests that hang do not pass."""
    child = os.fork()
    if child == 0:
        os._exit(_tests(module, tree))
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _tests(module: str, tree: ast.Module) -> int:
    """Runs the tests in the forked process, without output. Returns pytest's exit code."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        name = f"fl_engine.{module.replace('/', '.')}"
        sys.meta_path.insert(0, _Changed(name, ROOT / f"fl_engine/{module}.py", tree))
        files = [str(ROOT / f"tests/{name}.py") for name in TESTS[module]]
        return int(pytest.main(["-x", "-q", "--tb=no", "-n", "0", f"--rootdir={ROOT}", *files]))
    except BaseException:
        return 1


def campaign(modules: Sequence[str], limit: int | None, seed: int) -> dict[str, object]:
    """Tries `limit` changes of each module, drawn at random; None: all. Raises SystemExit if the tests fail without a
    change."""
    for name in PRELOADED:
        importlib.import_module(name)
    count, survivors = 0, []
    for module in modules:
        source = (ROOT / f"fl_engine/{module}.py").read_text()
        found = list(mutants(ast.parse(source)))
        numbers = range(len(found))
        if limit is not None and limit < len(found):
            numbers = sorted(random.Random(f"{seed} {module}").sample(numbers, limit))  # type: ignore[assignment]
        started = time.monotonic()
        if not tried(module, ast.parse(source), 3600):
            raise SystemExit(f"the tests of {module} fail without any change: {', '.join(TESTS[module])}")
        patience_s = 30 + PATIENCE * (time.monotonic() - started)
        for at, number in enumerate(numbers, 1):
            count += 1
            if tried(module, changed(source, number), patience_s):
                survivors.append(f"fl_engine/{module}.py:{found[number].line}: {found[number].said}")
                print(f"{module} {at}/{len(numbers)}: survived: {survivors[-1]}", file=sys.stderr, flush=True)
    return {"tried": count, "killed": count - len(survivors), "survivors": survivors}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(TESTS), help="files of the engine, e.g. storage/run_lock")
    parser.add_argument("--limit", type=int, help="number of changes to draw for each module (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of that draw")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args(argv)
    modules = args.only.split(",")
    if unknown := set(modules) - set(TESTS):
        parser.error(f"there are no tests for {', '.join(sorted(unknown))}, only for {', '.join(TESTS)}")
    found = campaign(modules, args.limit, args.seed)
    if args.json:
        print(json.dumps(found))
    else:
        print(f"{found['killed']} of {found['tried']} changes were noticed; these not:", *found["survivors"], sep="\n")  # type: ignore[misc]
    return 0


if __name__ == "__main__":
    sys.exit(main())
