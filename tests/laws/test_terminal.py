"""What all commands tell a terminal."""

from __future__ import annotations

import argparse

import pytest

from flexfleet import cli


def test_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    whole = cli.parser()
    (commands,) = (action for action in whole._actions if isinstance(action, argparse._SubParsersAction))
    helps = {name: each.format_help() for name, each in {"": whole, **commands.choices}.items()}
    assert len(helps) > 15
    assert [(name, line) for name, text in helps.items() for line in text.splitlines() if len(line) > 80] == []
