"""Results of preparations in one folder: `<name>.json` for each, `<name>.safetensors` for one that gives weights, and
prepared.json, which says what each was computed from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError, to_json

from fl_engine.core.contracts import Preparation
from fl_engine.core.errors import ConfigError, IntegrityError, brief
from fl_engine.core.fields import adapter
from fl_engine.core.types import Prepared
from fl_engine.preparation import preparation
from fl_engine.preparation.weights import FIELD, attached, gives_weights
from fl_engine.storage.store import decode, sha256
from flexfleet.files.artifacts import Artifact, Strict

INDEX = "prepared.json"
SCHEMA = {"schema_version": 1}


class Entry(Strict):
    inputs: str
    """Digest of everything that the result was computed from."""
    sha256: str
    """The sha256 of its JSON file."""
    weights_sha256: str | None = None
    """The sha256 of its weights; null if it gives none."""


class Index(Artifact):
    """prepared.json. `made` maps the names of preparations."""

    made: dict[str, Entry]


def file_of(name: str) -> str:
    """`apoz.json`, `package.module.NAME.json`."""
    return f"{name.replace(':', '.')}.json"


def weights_file_of(name: str) -> str:
    """`supernet.safetensors`."""
    return f"{name.replace(':', '.')}.safetensors"


def index(folder: Path) -> dict[str, Entry]:
    """Read prepared.json; empty if it does not exist."""
    path = folder / INDEX
    return dict(Index.read(path).made) if path.exists() else {}


def entry_of(inputs: str, name: str, files: Mapping[str, bytes]) -> Entry:
    """The entry of a result whose `files` are those of `content`."""
    weights = files.get(weights_file_of(name))
    sha = None if weights is None else sha256(weights)
    return Entry(inputs=inputs, sha256=sha256(files[file_of(name)]), weights_sha256=sha)


def is_there(folder: Path, name: str, entry: Entry) -> bool:
    """Whether all files of a result exist."""
    of_weights = [] if entry.weights_sha256 is None else [weights_file_of(name)]
    return all((folder / file).exists() for file in (file_of(name), *of_weights))


def content(folder: Path, name: str, entry: Entry | None) -> dict[str, bytes]:
    """Map file names to content: the weights, if there are any, then the JSON. Raises IntegrityError if a file is
    missing, or is not the one that `entry` describes."""
    found = {}
    if entry is not None and entry.weights_sha256 is not None:
        found[weights_file_of(name)] = _read(folder / weights_file_of(name), entry.weights_sha256)
    return {**found, file_of(name): _read(folder / file_of(name), None if entry is None else entry.sha256)}


def _read(path: Path, expected: str | None) -> bytes:
    try:
        value = path.read_bytes()
    except FileNotFoundError:
        raise IntegrityError(f"{path} does not exist: the step that writes it has not run") from None
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}") from error
    if expected is not None and (found := sha256(value)) != expected:
        raise IntegrityError(
            f"{path} is damaged: its sha256 is {found[:12]}, expected {expected[:12]}. Delete it, and it is computed "
            "again"
        )
    return value


def read(folder: Path, names: Iterable[str]) -> Prepared:
    """Return the results of these preparations. Raises IntegrityError, which names a file that is missing, damaged or
    invalid."""
    known = index(folder)
    return {name: _made(folder, name, known.get(name)) for name in names}


def _made(folder: Path, name: str, entry: Entry | None) -> Any:
    kind, files = preparation(name), content(folder, name, entry)
    made = decoded(kind, files[file_of(name)], str(folder / file_of(name)))
    if not gives_weights(kind):
        return made
    if entry is None:
        raise IntegrityError(
            f"{folder / INDEX} does not say what {file_of(name)} is: the step that writes it has not run"
        )
    stored = files.get(weights_file_of(name))
    return made if stored is None else attached(made, decode(stored, str(folder / weights_file_of(name))))


def encoded(kind: Preparation, name: str, made: Any) -> bytes:
    """Return the JSON file of a result, without its weights. Raises ConfigError if the result is not of the
    preparation's `artifact`, or is not JSON."""
    written, beside = adapter(kind.artifact), {FIELD} if gives_weights(kind) else None
    try:
        fields = written.dump_python(made, mode="json", warnings="error", exclude=beside)
        value = to_json({**SCHEMA, **fields}, indent=1) + b"\n"
        decoded(kind, value, file_of(name))
    except (PydanticSerializationError, TypeError, IntegrityError) as error:
        raise ConfigError(f"preparation {name!r} made what {file_of(name)} cannot hold: {error}") from error
    return value


def decoded(kind: Preparation, value: bytes, where: str) -> Any:
    """Parse the JSON file of a result. Raises IntegrityError, which names the file."""
    wanted = getattr(kind.artifact, "__name__", "JSON")
    try:
        fields = json.loads(value)
        if not isinstance(fields, dict) or fields.pop("schema_version", None) != 1:
            raise IntegrityError(f"{where} is not a valid {wanted} file: expected an object with schema_version 1")
        return adapter(kind.artifact).validate_json(json.dumps(fields))
    except ValueError as error:
        said = brief(error) if isinstance(error, ValidationError) else error
        raise IntegrityError(f"{where} is not a valid {wanted} file: {said}") from error
