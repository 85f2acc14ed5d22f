"""Create the files of `flexfleet init`: a template of the user's own algorithm, and its test."""

from __future__ import annotations

import keyword
import sys
from collections.abc import Mapping
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from fl_engine.core.errors import ConfigError
from fl_engine.storage.store import FolderStore

OWN, CLASS = "own_algorithm", "OwnAlgorithm"
"""Placeholders in the templates."""


def algorithm_files(name: str, folder: Path) -> dict[str, str]:
    """Return the contents of `<name>.py` and `test_<name>.py`. Raises ConfigError if the name is invalid or taken."""
    free = not (folder / f"{name}.py").exists()
    hides = name.isidentifier() and free and (name in sys.modules or find_spec(name) is not None)
    if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii() or hides:
        raise ConfigError(
            f"--algorithm must be the name of a new Python module, such as my_method, got {name!r}", path="algorithm"
        )
    templates = resources.files("flexfleet.files").joinpath("new")
    files = {}
    for prefix in ("", "test_"):
        text = templates.joinpath(f"{prefix}algorithm.py.in").read_text("utf-8")
        files[f"{prefix}{name}.py"] = text.replace(OWN, name).replace(CLASS, class_name(name))
    return files


def class_name(module: str) -> str:
    """Convert a module's name (`my_method`) to the name of its class (`MyMethod`)."""
    return "".join(part[:1].upper() + part[1:] for part in module.split("_")) or "Own"


def write_new(files: Mapping[str, str], folder: Path) -> list[Path]:
    """Write the files. Raises ConfigError, and writes nothing, if one of the files exists."""
    if existing := [str(folder / name) for name in files if (folder / name).exists()]:
        raise ConfigError(f"{' and '.join(existing)} must not exist. Choose another name or folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        FolderStore(folder).put(name, text.encode())  # the write is atomic
    return [folder / name for name in files]
