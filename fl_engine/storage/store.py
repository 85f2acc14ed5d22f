"""The run store maps keys to bytes. Tensors are stored as safetensors. A key is a relative path with slashes.

A write is atomic, and is durable when the method returns. A reader always gets either the old or the new bytes, even
after a process was killed during the write. Values are written in pieces, because a large model and its file may not
fit into memory together.

The safetensors format (https://github.com/huggingface/safetensors, "Format") consists of the header's length in 8 bytes
(little-endian), the header, and the tensors' bytes. The header is JSON with the type, shape and offsets of each tensor.
This module writes the same bytes as the safetensors package, which can only build a whole file in memory or write it to
disk. Files are read with the package, because their content is not trusted.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from fl_engine.core.errors import ClientError, EnvironmentFailure, IntegrityError, TooLarge, first_line
from fl_engine.core.state import RANKS
from fl_engine.core.types import Params

TRIES = 100
"""Maximum number of attempts to create a folder, because other processes delete empty folders."""
PIECE = 2**24
"""Maximum size in bytes of the pieces in which a tensor is written."""
MOST_HEADER = 100_000_000
"""Maximum bytes of a header that the safetensors package accepts."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """A byte string in several parts. A part may be a tensor, which must not change until all parts are written."""

    parts: tuple[bytes | Tensor, ...]

    def __iter__(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes. Copy a tensor only if the tensor is not contiguous or not in CPU memory."""
        for part in self.parts:
            if isinstance(part, bytes):
                yield part
            else:
                memory = bytes_of(part.detach().cpu().contiguous())
                yield from (memory[start : start + PIECE] for start in range(0, len(memory), PIECE))

    def __len__(self) -> int:
        return sum(len(part) if isinstance(part, bytes) else part.nbytes for part in self.parts)

    def __bytes__(self) -> bytes:
        return b"".join(self)


Value = bytes | Pieces


def digest(kind: str, value: Value) -> bytes:
    """Hash a value. `kind` is sha256, or md5 to detect transfer errors."""
    found = hashlib.new(kind, usedforsecurity=kind != "md5")
    for piece in (value,) if isinstance(value, bytes) else value:
        found.update(piece)
    return found.digest()


def laid_out(tensors: Params) -> Pieces:
    """Return the tensors as the content of a safetensors file. Equal tensors result in identical bytes."""
    order = sorted(tensors, key=lambda name: (RANKS[tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": {}} if tensors else {}
    start = 0
    for name in order:
        tensor, end = tensors[name], start + tensors[name].nbytes
        header[name] = {"dtype": RANKS[tensor.dtype][1], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    return Pieces((_header(text + b" " * (-len(text) % 8)), *(tensors[name] for name in order)))


def padded(value: Pieces, length: int) -> Pieces:
    """Pad the header of a safetensors file with spaces, so that the file has `length` bytes. Raises ClientError if the
    file or the padded header would be too long."""
    first, *rest = value.parts
    assert isinstance(first, bytes)
    more = length - len(value)
    if more < 0 or len(first) - 8 + more > MOST_HEADER:
        raise ClientError(
            f"an update of {len(value)} bytes cannot be padded to {length}. Use an S3 server that supports POST"
        )
    return Pieces((_header(first[8:] + b" " * more), *rest))


def _header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def bytes_of(whole: Tensor) -> memoryview:
    """Return a view of a contiguous tensor's bytes."""
    if not whole.numel():  # `view` does not support some strides of empty tensors
        return memoryview(bytearray())
    return whole.view(-1).view(torch.uint8).numpy().data


class Store(Protocol):
    """A key-value store. Each method raises EnvironmentFailure if the store is full, inaccessible or unreachable.

    A store on a server has an attribute `at_once` with the maximum number of overlapping requests (`overlapping`)."""

    def put(self, key: str, value: Value) -> None: ...

    def create(self, key: str, value: bytes) -> bool:
        """Write the value only if the key does not exist. Return whether the value was written."""

    def get(self, key: str, limit: int | None = None) -> bytes:
        """Return a value. Raises IntegrityError if the key does not exist or the value exceeds `limit` bytes."""

    def list(self, prefix: str) -> list[str]:
        """Return the sorted keys that start with `prefix`."""

    def delete(self, *keys: str) -> None:
        """Delete keys. Ignore missing keys, because an earlier deletion may have been interrupted."""

    def sweep(self, prefix: str) -> None:
        """Delete temporary files of interrupted writes under `prefix`. No process may write there at the same time."""

    def uri(self, key: str = "") -> str: ...


class FolderStore:
    """A store in a local folder. `mode` contains the permissions of new files before the umask is applied."""

    def __init__(self, root: str | Path, mode: int = 0o666) -> None:
        self.root = Path(root)
        self.mode = mode

    def put(self, key: str, value: Value) -> None:
        self._write(key, value, os.replace)

    def create(self, key: str, value: bytes) -> bool:
        try:
            self._write(key, value, os.link)
        except FileExistsError:
            return False
        return True

    def _write(self, key: str, value: Value, name: Callable[[Path, Path], None]) -> None:
        """Write a temporary file next to the target, then rename or link the file to the target."""
        path = self.root / key
        part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
        with self._explained(key):
            # Without fsync on a folder, a power failure may remove new files from the folder.
            changed = [path.parent, *(folder.parent for folder in path.parents if not folder.exists())]
            try:
                with self._opened(part) as file:
                    file.writelines((value,) if isinstance(value, bytes) else value)
                    file.flush()
                    os.fsync(file.fileno())
                name(part, path)
            except (OSError, KeyboardInterrupt):
                part.unlink(missing_ok=True)
                raise
            part.unlink(missing_ok=True)  # after `create` has linked the file, the temporary name still exists
            for folder in changed:
                with suppress(FileNotFoundError):  # another process has deleted the value and its folder
                    _sync(folder)

    def _opened(self, part: Path) -> BinaryIO:
        for _ in range(TRIES):
            with suppress(FileNotFoundError, FileExistsError):  # another process has just deleted the empty folder
                part.parent.mkdir(parents=True, exist_ok=True)
                return open(part, "wb", opener=lambda path, flags: os.open(path, flags, self.mode))
        raise EnvironmentFailure(f"{part.parent} cannot be created. Check that the parent is a folder")

    def get(self, key: str, limit: int | None = None) -> bytes:
        name = self.uri(key)
        with self._explained(key):
            try:
                with (self.root / key).open("rb") as file:
                    value = file.read(-1 if limit is None else limit + 1)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                raise IntegrityError(f"{name} is missing from the run store") from None
        check_size(name, len(value), limit)
        return value

    def list(self, prefix: str) -> list[str]:
        base = self.root / prefix.rpartition("/")[0]
        with self._explained(prefix):
            if not base.is_dir():
                return []
            found = []
            for folder, _, names in os.walk(base, onerror=_unreadable):
                here = Path(folder).relative_to(self.root)
                found += [(here / name).as_posix() for name in names if not name.endswith(".part")]
            return sorted(key for key in found if key.startswith(prefix))

    def sizes(self, prefix: str) -> dict[str, tuple[int, float]]:
        """Map each key that starts with `prefix` to its size in bytes and the time of its last change."""
        found = {}
        for key in self.list(prefix):
            with suppress(FileNotFoundError):  # another process has deleted the file
                stat = (self.root / key).stat()
                found[key] = stat.st_size, stat.st_mtime
        return found

    def delete(self, *keys: str) -> None:
        for key in keys:
            path = self.root / key
            with self._explained(key):
                path.unlink(missing_ok=True)
            for folder in path.parents:
                if folder == self.root:
                    break
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    continue
                except OSError:  # not empty
                    break

    def sweep(self, prefix: str) -> None:
        with self._explained(prefix):
            for part in (self.root / prefix).rglob(".*.part"):
                part.unlink(missing_ok=True)

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, FileExistsError):
            raise
        except OSError as error:
            raise EnvironmentFailure(f"{self.uri(key)}: {error.strerror or error}") from error

    def uri(self, key: str = "") -> str:
        return str(self.root / key)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unreadable(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # another process has deleted the file
        raise error


def check_size(name: str, size: int, limit: int | None) -> None:
    """Raise TooLarge if `size` exceeds `limit`."""
    if limit is not None and size > limit:
        raise TooLarge(f"{name} must have at most {limit} bytes, got {size}")


def canonical(value: Any) -> bytes:
    """Convert a value to JSON. Equal values result in identical bytes. Raises ValueError for non-finite numbers."""
    return json.dumps(value, sort_keys=True, allow_nan=False).encode()


def sha256(value: Value) -> str:
    return digest("sha256", value).hex()


def encode(tensors: Params) -> bytes:
    """Return the content of a safetensors file as bytes, for small tensors."""
    return bytes(laid_out(tensors))


def decode(value: bytes, name: str) -> Params:
    """Return the tensors in a safetensors file. Raises IntegrityError with the file's `name` for an invalid file."""
    try:
        tensors: Params = safetensors.torch.load(value)
    # The parser does not check the sizes in the header, so torch raises an error if a size overflows.
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, AssertionError, OverflowError) as error:
        raise IntegrityError(f"{name} must be a valid safetensors file: {first_line(error)}") from error
    return tensors


def tensor_bytes(tensors: Params) -> int:
    """Return the total size of the tensors in bytes, without a file header."""
    return sum([t.nbytes for t in tensors.values()])
