"""Read and encode the results of an algorithm's preparations, which run before the first round. A folder contains
`<name>.json` for each result, `<name>.safetensors` for weights, and prepared.json with the digests of the inputs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError, to_json

from fl_engine.core.contracts import Preparation
from fl_engine.core.errors import ConfigError, IntegrityError, brief
from fl_engine.core.fields import adapter
from fl_engine.core.records import Strict, read_bytes
from fl_engine.core.types import Prepared
from fl_engine.preparation import preparation
from fl_engine.preparation.weights import FIELD, attached, gives_weights
from fl_engine.storage.store import sha256
from flexfleet.files.artifacts import Artifact, read_params

INDEX = "prepared.json"


class PreparedEntry(Strict):
    inputs: str
    """Digest of the inputs of the preparation."""
    sha256: str
    """The sha256 of the JSON file."""
    weights_sha256: str | None = None
    """The sha256 of the weights; null if there are no weights."""


class Index(Artifact):
    """Contents of prepared.json: `made` maps the name of each preparation to the entry of its result."""

    made: dict[str, PreparedEntry]


def file_of(name: str, kind: Literal["json", "safetensors"] = "json") -> str:
    """Return the name of the JSON file or of the weights file, such as `apoz.json` or `package.module.NAME.json`."""
    return f"{name.replace(':', '.')}.{kind}"


def index(folder: Path) -> dict[str, PreparedEntry]:
    """Read prepared.json. Returns an empty index if the file does not exist."""
    path = folder / INDEX
    return dict(Index.read(path).made) if path.exists() else {}


def entry_of(inputs: str, name: str, files: Mapping[str, bytes]) -> PreparedEntry:
    """Return the index entry for a result. `files` maps file names to contents."""
    weights = files.get(file_of(name, "safetensors"))
    sha = None if weights is None else sha256(weights)
    return PreparedEntry(inputs=inputs, sha256=sha256(files[file_of(name)]), weights_sha256=sha)


def is_there(folder: Path, name: str, entry: PreparedEntry) -> bool:
    """Return whether all files of a result exist."""
    of_weights = [] if entry.weights_sha256 is None else [file_of(name, "safetensors")]
    return all((folder / file).exists() for file in (file_of(name), *of_weights))


def read(folder: Path, names: Iterable[str]) -> Prepared:
    """Read the results of the preparations `names`. Raises IntegrityError if a file is missing or invalid."""
    known, found = index(folder), dict[str, Any]()
    for name in names:
        if name not in known:
            raise IntegrityError(f"{folder / INDEX} has no entry for {name}. Repeat the step that writes this file")
        path = folder / file_of(name)
        made = decoded(preparation(name), read_bytes(path, known[name].sha256), str(path))
        if (sha := known[name].weights_sha256) is not None:
            made = attached(made, read_params(folder / file_of(name, "safetensors"), sha))
        found[name] = made
    return found


def encoded(kind: Preparation, name: str, made: Any) -> bytes:
    """Encode a result as JSON, without its weights. Raises ConfigError if the result does not have the type
    `kind.artifact` or cannot be stored as JSON."""
    written, beside = adapter(kind.artifact), {FIELD} if gives_weights(kind) else None
    try:
        fields = written.dump_python(made, mode="json", warnings="error", exclude=beside)
        value = to_json({"schema_version": 1, **fields}, indent=1) + b"\n"
        decoded(kind, value, file_of(name))
    except (PydanticSerializationError, TypeError, IntegrityError) as error:
        raise ConfigError(f"the result of preparation {name!r} cannot be stored as JSON: {error}") from error
    return value


def decoded(kind: Preparation, value: bytes, where: str) -> Any:
    """Parse the JSON file of a result. Raises IntegrityError if the file, which is named `where`, is invalid."""
    wanted = getattr(kind.artifact, "__name__", "JSON")
    try:
        fields = json.loads(value)
        if not isinstance(fields, dict) or fields.pop("schema_version", None) != 1:
            raise ValueError("the file must contain a JSON object with schema_version 1")
        return adapter(kind.artifact).validate_json(json.dumps(fields))
    except ValueError as error:
        reason = brief(error) if isinstance(error, ValidationError) else error
        raise IntegrityError(f"{where} is not a valid {wanted} file: {reason}") from error
