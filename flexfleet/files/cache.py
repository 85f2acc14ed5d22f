"""Keeps results that take long to compute in the run store, as `<run.store>/.kept/<name>-<digest>.json`. The digest is
that of all inputs, so a result is found again for the same inputs. (No run's name begins with a dot.)
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from fl_engine.core.errors import EnvironmentFailure, IntegrityError, brief
from fl_engine.core.fields import adapter
from fl_engine.storage.store import FolderStore, sha256
from flexfleet.files.artifacts import Artifact

FOLDER = ".kept"
log = logging.getLogger("flexfleet")
T = TypeVar("T")


class Kept(Artifact):
    inputs: str
    """The digest of all inputs."""
    sha256: str
    """The checksum of `value`."""
    value: str
    """The result as JSON."""


def find(store: Path, name: str, inputs: Mapping[str, Any], kind: type[T] | Any) -> T | None:
    """The result kept for these inputs, if any; none where it is another user's, who lets nobody read it. Raises
    IntegrityError, which names the file, if it is damaged."""
    path, digest = _place(store, name, inputs)
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        log.info("%s is not taken over: %s: %s", name, error.filename, error.strerror)
        return None
    found = Kept.of(content, str(path))
    try:
        if found.inputs != digest or sha256(found.value.encode()) != found.sha256:
            raise ValueError("not what was written")
        value: T = adapter(kind).validate_json(found.value)
    except ValueError as error:  # includes pydantic's errors
        said = brief(error) if isinstance(error, ValidationError) else error
        raise IntegrityError(f"{path} is damaged ({said}): delete it, then it is computed again") from error
    log.info("%s is taken over from %s: its inputs are the same", name, path)
    return value


def keep(store: Path, name: str, inputs: Mapping[str, Any], kind: type[T] | Any, value: T) -> None:
    """Keeps a result. If the store cannot be written, nothing is kept, and the log says so."""
    path, digest = _place(store, name, inputs)
    text = adapter(kind).dump_json(value).decode()
    entry = Kept(inputs=digest, sha256=sha256(text.encode()), value=text)
    try:
        FolderStore(path.parent).put(path.name, (entry.model_dump_json() + "\n").encode())
    except (OSError, EnvironmentFailure) as error:
        log.info("%s is not kept: %s", name, error)


def kept(store: Path, name: str, inputs: Mapping[str, Any], kind: type[T] | Any, make: Callable[[], T]) -> T:
    """The kept result for these inputs, or else the result of `make`, which is then kept."""
    found = find(store, name, inputs, kind)
    if found is None:
        found = make()
        keep(store, name, inputs, kind, found)
    return found


def _place(store: Path, name: str, inputs: Mapping[str, Any]) -> tuple[Path, str]:
    digest = sha256(json.dumps(inputs, sort_keys=True).encode())
    return store / FOLDER / f"{name}-{digest[:16]}.json", digest
