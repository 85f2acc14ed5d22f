"""Results that take long, in the run store: `<run.store>/.kept/<name>-<digest>.json`, found again by all that they were
computed from. A name of a run does not begin with a dot.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from fl_engine.core.errors import EnvironmentFailure, IntegrityError, brief
from fl_engine.storage.store import FolderStore, sha256
from flexfleet.files.artifacts import Artifact

FOLDER = ".kept"
log = logging.getLogger("flexfleet")
T = TypeVar("T")


class Kept(Artifact):
    inputs: str
    """Digest of all that it was computed from."""
    sha256: str
    """Of `value`."""
    value: str
    """In JSON."""


def find(store: Path, name: str, inputs: Mapping[str, Any], kind: type[T] | Any) -> T | None:
    """What was kept of these inputs. Raises IntegrityError, which names the file, for one that is damaged."""
    path, digest = _place(store, name, inputs)
    if not path.exists():
        return None
    found = Kept.read(path)
    try:
        if found.inputs != digest or sha256(found.value.encode()) != found.sha256:
            raise ValueError("not what was written")
        value: T = TypeAdapter(kind).validate_json(found.value)
    except ValueError as error:  # pydantic's too
        said = brief(error) if isinstance(error, ValidationError) else error
        raise IntegrityError(f"{path} is damaged ({said}): delete it, and it is computed again") from error
    log.info("%s is taken over from %s: its inputs are the same", name, path)
    return value


def keep(store: Path, name: str, inputs: Mapping[str, Any], kind: type[T] | Any, value: T) -> None:
    """Where the store cannot be written, nothing is kept, and the log says so."""
    path, digest = _place(store, name, inputs)
    text = TypeAdapter(kind).dump_json(value).decode()
    entry = Kept(inputs=digest, sha256=sha256(text.encode()), value=text)
    try:
        FolderStore(path.parent).put(path.name, (entry.model_dump_json() + "\n").encode())
    except (OSError, EnvironmentFailure) as error:
        log.info("%s is not kept: %s", name, error)


def kept(store: Path, name: str, inputs: Mapping[str, Any], kind: type[T] | Any, make: Callable[[], T]) -> T:
    """What `make` gives, or what it once gave of the same inputs."""
    found = find(store, name, inputs, kind)
    if found is None:
        found = make()
        keep(store, name, inputs, kind, found)
    return found


def _place(store: Path, name: str, inputs: Mapping[str, Any]) -> tuple[Path, str]:
    digest = sha256(json.dumps(inputs, sort_keys=True).encode())
    return store / FOLDER / f"{name}-{digest[:16]}.json", digest
