"""What all commands tell a terminal."""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys

import pytest

from fl_engine.core.errors import Stopped
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
    """Else a reader that stops reading is an error of the system."""
    found = [
        dotted(path)
        for path in modules("flexfleet")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if (isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write"))
        and not any(each.arg == "file" and ast.unparse(each.value) != "sys.stdout" for each in node.keywords)
    ]
    assert found == ["flexfleet.files.terminal"], "flexfleet.files.terminal.show"


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="this system has no pseudo-terminals")
def test_a_terminal_that_was_closed_does_not_change_the_exit_code() -> None:
    script = """
import sys
from fl_engine.core.errors import Stopped
from flexfleet.files.terminal import run_main, show

def main(_):
    sys.stdin.readline()
    show("nobody reads it")
    raise Stopped("stopped")

run_main(main)
"""
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs) as child:
        os.close(theirs)
        os.close(ours)
        child.communicate(b"\n", timeout=60)
    assert child.returncode == Stopped.exit_code
