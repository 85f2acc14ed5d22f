"""Python 3.10 runs devices only; the coordinator needs 3.11 or newer."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from fl_engine.core.errors import EnvironmentFailure
from flexfleet.cli import main as cli

ROOT = Path(__file__).parents[2]


def test_the_classifiers_name_every_python_from_the_oldest_on() -> None:
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [line.rpartition(" ")[2] for line in about["classifiers"] if line.startswith("Programming Language")]
    assert named == ["3.10", "3.11", "3.12", "3.13", "3.14"] and about["requires-python"] == f">={named[0]}"
    assert f"Python {named[1]} to {named[-1]}" in (ROOT / "README.md").read_text()
    assert f"Python {named[0]}" in (ROOT / "docs" / "guides" / "agents.md").read_text()


def test_on_python_3_10_commands_of_the_coordinator_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "sys", SimpleNamespace(version_info=(3, 10, 12)))
    for command in (["run"], ["compare", "--algorithms", "flexfl"], ["invite"]):
        with pytest.raises(EnvironmentFailure, match=r"`flexfleet \w+` needs Python 3\.11 or newer.*agent, check, "):
            cli.dispatch(command)
    assert cli.dispatch(["list", "algorithms", "--json"]) == 0
