"""Errors have a stable code with a cause and a cure, and configuration errors have the parameter's path."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_engine.core import errors
from fl_engine.core.errors import CODES, FlexfleetError, SeveralErrors
from flexfleet.config import read

ROOT = Path(__file__).parents[2]


def _kinds(of: type[FlexfleetError]) -> Iterator[type[FlexfleetError]]:
    yield of
    for kind in of.__subclasses__():
        yield from _kinds(kind)


def test_every_code_in_the_source_has_a_cause_and_a_cure() -> None:
    classes = {kind.__name__: kind.code for kind in _kinds(FlexfleetError) if kind.__module__ == errors.__name__}
    used = set(classes.values())
    for folder in ("fl_engine", "flexfleet"):
        for path in (ROOT / folder).rglob("*.py"):
            for call in ast.walk(ast.parse(path.read_text("utf-8"))):
                kind = getattr(call.func, "value", call.func) if isinstance(call, ast.Call) else None  # Kind or Kind.at
                if isinstance(call, ast.Call) and getattr(kind, "id", None) in classes:
                    used |= {
                        k.value.value for k in call.keywords if k.arg == "code" and isinstance(k.value, ast.Constant)
                    }
    assert used <= set(CODES)


def test_several_config_errors_keep_their_paths() -> None:
    with pytest.raises(SeveralErrors) as caught:
        read.parse({"rounds": {"stop": 0, "mode": "sideways"}})
    assert {error.path for error in caught.value.errors} == {"rounds.stop", "rounds.mode"}
