"""What a message names exists: parameters and the values that it recommends, flags, commands, Python names, variables
and files. Every text with a space is read, so that hints in constants and log lines count too."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path

import pytest
import yaml

import flexfleet
from fl_engine.core.errors import ConfigError, SeveralErrors
from flexfleet.cli.main import parser
from flexfleet.config import read
from flexfleet.config.parameters import everything
from flexfleet.config.schema import Config
from flexfleet.kubeflow.retarget import VARIABLES

ROOT = Path(__file__).parents[2]
UNKNOWN = "\0"
"""What stands for a value that is inserted into an f-string."""
PARAMETER = rf"(?<![\w./{{{UNKNOWN}-])((?:{'|'.join(Config.model_fields)})(?:\.[a-z_]\w*)+)(?![\w(/:{UNKNOWN}-]|\.\w)"
VALUE = rf"(?<![\w./{{-])([a-z_]+(?:\.[a-z_]\w*)+)=(\{{[^}}]*\}}|[^\s,;)`{UNKNOWN}]+)"
FILES = ("json", "svg", "onnx", "safetensors")
OTHER_FLAGS = {"--sf", "--backend-store-uri", "--format"}
"""Flags of other programs."""


@cache
def texts() -> list[tuple[Path, str]]:
    """The texts in the source, without docstrings."""
    found = []
    for folder in ("fl_engine", "flexfleet", "components", "pipelines"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text("utf-8"))
            docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            found += [(path.relative_to(ROOT), text) for text in _texts(tree, docstrings) if " " in text.strip()]
    return found


def _texts(node: ast.AST, docstrings: set[int]) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else UNKNOWN for part in node.values)
        nested = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
        yield node.value
        return
    else:
        nested = list(ast.iter_child_nodes(node))
    for child in nested:
        yield from _texts(child, docstrings)


@cache
def parameters() -> dict[str, str]:
    """Map each parameter, section and component's `name` to a component that has it; empty for other parameters."""
    found = {row.name: row.of for row in everything()}
    for name, of in list(found.items()):
        parts = name.split(".")
        for count in range(1, len(parts)):
            found.setdefault(".".join(parts[:count]), of)
    return {f"{name}.name": of for name, of in found.items()} | found


@cache
def commands() -> dict[str, set[str]]:
    """Map each command to its flags."""
    (choices,) = [a.choices for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return {name: {flag for a in each._actions for flag in a.option_strings} for name, each in choices.items()}


def wrong(pattern: str, is_right: Callable[..., bool]) -> tuple[int, list[str]]:
    """Return the number of matches in all texts, and the texts with a match that is not right."""
    found = [(path, text, match) for path, text in texts() for match in re.finditer(pattern, text)]
    return len(found), [f"{path}: {match[0]}: {text}" for path, text, match in found if not is_right(*match.groups())]


def is_accepted(name: str, value: str) -> bool:
    """Return True if the configuration accepts the value. Ignore errors of other parameters."""
    if name == "a.b" or value.startswith("s3://"):
        return True
    values: object = yaml.safe_load(value.rstrip(".:"))
    for part in reversed(name.split(".")):
        values = {part: values}
    assert isinstance(values, dict)
    if name.startswith("algorithm.") and name != "algorithm.name":
        values["algorithm"].setdefault("name", parameters()[name])
    try:
        read.parse(values)
    except ConfigError as error:
        several = error.errors if isinstance(error, SeveralErrors) else [error]
        return all(each.path != name for each in several)
    return True


def is_importable(name: str) -> bool:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        return all(hasattr(found, part) for part in parts[count : count + 1])
    return False


def is_set_somewhere(name: str) -> bool:
    files = [*ROOT.glob("fl_engine/**/*.py"), *ROOT.glob("flexfleet/**/*.py"), *ROOT.glob("pipelines/*.py")]
    return name in VARIABLES or any(f'"{name}"' in path.read_text("utf-8") for path in files)


@pytest.mark.parametrize(
    ("pattern", "is_right", "least"),
    [
        (PARAMETER, lambda name: name.rpartition(".")[2] in FILES or name in parameters(), 300),
        (VALUE, is_accepted, 50),
        (r"(?<![\w-])(--[a-z][a-z-]*)(?!\w)", lambda flag: flag in OTHER_FLAGS.union(*commands().values()), 60),
        (r"(?:`|[Rr]un |\n {2})flexfleet ([a-z][a-z-]*)", lambda command: command in commands(), 20),
        (
            r"flexfleet ([a-z]+)(?: [^-\s.;)`]+)? (--[a-z][a-z-]*)",
            lambda command, flag: command not in commands() or flag in commands()[command],
            5,
        ),
        (r"(?<![\w./-])((?:fl_engine|flexfleet)(?:\.\w+)+)", is_importable, 8),
        (
            r"(?<![\w.])(?:flexfleet\.)?((?:from|load|run|compare|tune)_?[a-z]*)\(",
            lambda name: hasattr(flexfleet, name),
            4,
        ),
        (r"(?<![\w/])((?:docs|k8s|fl_engine|flexfleet|examples)/[\w./-]+\w)", lambda path: (ROOT / path).exists(), 5),
        (r"\b(FLEXFLEET_[A-Z_]+[A-Z])\b", is_set_somewhere, 10),
    ],
    ids=[
        "parameters",
        "values",
        "flags",
        "commands",
        "both",
        "modules",
        "functions",
        "files",
        "variables",
    ],
)
def test_names_in_messages_exist(pattern: str, is_right: Callable[..., bool], least: int) -> None:
    count, found = wrong(pattern, is_right)
    assert found == [] and count >= least


def test_value_that_the_configuration_rejects_is_found() -> None:
    assert not is_accepted("rounds.mode", "never") and not is_accepted("algorithm.rule", "nearest")


def test_algorithms_name_only_their_own_options() -> None:
    for path in (ROOT / "fl_engine/algorithms").glob("*.py"):
        module = importlib.import_module(f"fl_engine.algorithms.{path.stem}".removesuffix(".__init__"))
        own = [kind for kind in vars(module).values() if is_dataclass(kind) and kind.__module__ == module.__name__]
        options = {field.name for kind in own for field in fields(kind)} | {"name"}
        named = [re.findall(r"\balgorithm\.(\w+)", text) for file, text in texts() if ROOT / file == path]
        assert {option for each in named for option in each} <= options, path.name
