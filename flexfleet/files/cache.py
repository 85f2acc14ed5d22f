"""Results that take long to compute, stored in the run store as `<run.store>/.kept/<name>-<digest>.json`. The digest is
that of all inputs. Names of runs do not begin with a dot.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fl_engine.core.errors import EnvironmentFailure, IntegrityError
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
    """Return the stored result for these inputs, or None. Raises IntegrityError if the file is damaged."""
    path, digest = _place(store, name, inputs)
    if not path.exists():
        return None
    found = Kept.read(path)
    if found.inputs != digest or sha256(found.value.encode()) != found.sha256:
        raise IntegrityError(f"{path} is damaged. Delete it, and it is computed again")
    value: T = adapter(kind).validate_json(found.value)
    log.info("%s is taken from %s, which has the same inputs", name, path)
    return value


def keep(store: Path, name: str, inputs: Mapping[str, Any], kind: type[T] | Any, value: T) -> None:
    """Store a result. If the store cannot be written, log it and continue."""
    path, digest = _place(store, name, inputs)
    text = adapter(kind).dump_json(value).decode()
    entry = Kept(inputs=digest, sha256=sha256(text.encode()), value=text)
    try:
        FolderStore(path.parent).put(path.name, (entry.model_dump_json() + "\n").encode())
    except (OSError, EnvironmentFailure) as error:
        log.info("%s is not stored: %s", name, error)


def kept(store: Path, name: str, inputs: Mapping[str, Any], kind: type[T] | Any, make: Callable[[], T]) -> T:
    """Return the stored result for these inputs, or call `make` and store its result."""
    found = find(store, name, inputs, kind)
    if found is None:
        found = make()
        keep(store, name, inputs, kind, found)
    return found


def _place(store: Path, name: str, inputs: Mapping[str, Any]) -> tuple[Path, str]:
    digest = sha256(json.dumps(inputs, sort_keys=True).encode())
    return store / FOLDER / f"{name}-{digest[:16]}.json", digest
