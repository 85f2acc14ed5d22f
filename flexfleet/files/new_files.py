"""Files to begin with: a params.yaml with all parameters, or an algorithm of one's own with its test."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from fl_engine.core.errors import ConfigError
from fl_engine.storage.store import FolderStore

OWN, CLASS = "own_algorithm", "OwnAlgorithm"
"""Names in the templates."""


def params_file() -> dict[str, str]:
    """params.yaml: every parameter with its default, its meaning as a comment."""
    from flexfleet.config.params_file import params_yaml

    return {"params.yaml": params_yaml()}


def algorithm_files(name: str, folder: Path) -> dict[str, str]:
    """`<name>.py` and `test_<name>.py`. Raises ConfigError where the name cannot be a module's, or hides another."""
    if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii():
        raise ConfigError(
            f"--algorithm {name!r} becomes a Python module of that name: give letters, digits and _, e.g. my_method"
        )
    if not (folder / f"{name}.py").exists() and _exists(name):
        raise ConfigError(f"--algorithm {name!r}: a Python module of this name is installed already: choose another")
    return {
        f"{prefix}{name}.py": _template(f"{prefix}algorithm.py.in").replace(OWN, name).replace(CLASS, class_name(name))
        for prefix in ("", "test_")
    }


def class_name(module: str) -> str:
    """`my_method` to `MyMethod`."""
    return "".join(part[:1].upper() + part[1:] for part in module.split("_")) or "Own"


def write_new(files: Mapping[str, str], folder: Path) -> list[Path]:
    """Writes the files; none of them if one is there already. Raises ConfigError then."""
    there = [str(folder / name) for name in files if (folder / name).exists()]
    if there:
        what = "is there already, and is" if len(there) == 1 else "are there already, and are"
        raise ConfigError(f"{' and '.join(there)} {what} not replaced: take another name, or another folder")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in files.items():
        FolderStore(folder).put(name, text.encode())  # the write is atomic
        paths.append(folder / name)
    return paths


def _exists(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # __main__
        return True


def _template(name: str) -> str:
    return resources.files("flexfleet.files").joinpath("new").joinpath(name).read_text("utf-8")
