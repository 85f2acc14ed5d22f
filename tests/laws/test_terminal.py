"""What all commands tell a terminal."""

from __future__ import annotations

import argparse
import ast

import pytest

from flexfleet.cli import main as cli
from tests.harness.imports import dotted, modules


def test_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    whole = cli.parser()
    (commands,) = (action for action in whole._actions if isinstance(action, argparse._SubParsersAction))
    helps = {name: each.format_help() for name, each in {"": whole, **commands.choices}.items()}
    assert len(helps) > 15
    assert [(name, line) for name, text in helps.items() for line in text.splitlines() if len(line) > 80] == []


def test_nothing_but_show_prints_on_stdout() -> None:
    found = [
        dotted(path)
        for path in modules("flexfleet")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if (isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write"))
        and not any(each.arg == "file" and ast.unparse(each.value) != "sys.stdout" for each in node.keywords)
    ]
    # Ctrl-C can end `flexfleet.__main__` before `flexfleet.files.terminal.show` can be imported.
    assert found == ["flexfleet.__main__", "flexfleet.files.terminal"]
