"""The run store: keys to bytes. A key is a relative path with forward slashes.

A write is atomic, and durable when it returns: a reader, or a process that starts after a kill, gets the old bytes or
the new bytes, never a part of them.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import safetensors.torch
from safetensors import SafetensorError

from fl_engine.core.errors import EnvironmentFailure, IntegrityError, TooLarge, first_line
from fl_engine.core.types import Params
from fl_engine.storage.serialization import Value, digest, laid_out, pieces_of

TRIES = 100
"""How often a write creates its folder, which other processes remove whenever it is empty."""
PROBE = "probe"
PROBE_BYTES = 4 * 2**20
LEAST_S, MOST_TURNS = 2.0, 8


class Store(Protocol):
    """Each method raises EnvironmentFailure if the store fails: no space, no access, no answer.

    A store with a server has `at_once`, the number of requests that overlap (`overlapping`)."""

    def put(self, key: str, value: Value) -> None: ...

    def create(self, key: str, value: bytes) -> bool:
        """Write the value unless the key exists; return whether it did. Only one of several writers succeeds."""

    def get(self, key: str, limit: int | None = None) -> bytes:
        """Raises IntegrityError if the key does not exist, or its value has more than `limit` bytes."""

    def list(self, prefix: str) -> list[str]:
        """Return the sorted keys that start with `prefix`."""

    def delete(self, *keys: str) -> None:
        """Keys that do not exist are ignored, because a kill may have come between two deletions."""

    def sweep(self, prefix: str) -> None:
        """Remove what killed writes left under `prefix`. Nobody else may write there meanwhile."""

    def uri(self, key: str = "") -> str: ...


class FolderStore:
    """A store in a folder of the local file system. `mode`: permissions of new files, less the umask."""

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
        """Write a temporary file beside the target, then give it the target's name."""
        path = self.root / key
        part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
        with self._explained(key):
            # Without the fsync of a folder, a power cut loses the names of its new entries.
            changed = [path.parent, *(folder.parent for folder in path.parents if not folder.exists())]
            try:
                with self._opened(part) as file:
                    file.writelines(pieces_of(value))
                    file.flush()
                    os.fsync(file.fileno())
                name(part, path)
            except (OSError, KeyboardInterrupt):
                part.unlink(missing_ok=True)
                raise
            part.unlink(missing_ok=True)  # after `create` its content has two names
            for folder in changed:
                with suppress(FileNotFoundError):  # another process has deleted the value and its folder
                    _sync(folder)

    def _opened(self, part: Path) -> BinaryIO:
        for _ in range(TRIES):
            with suppress(FileNotFoundError, FileExistsError):  # another process has just removed the empty folder
                part.parent.mkdir(parents=True, exist_ok=True)
                return open(part, "wb", opener=lambda path, flags: os.open(path, flags, self.mode))
        raise EnvironmentFailure(f"{part.parent} cannot be created: Not a directory, or removed at once")

    def get(self, key: str, limit: int | None = None) -> bytes:
        path, name = self.root / key, self.uri(key)
        with self._explained(key):
            if not path.is_file():
                raise IntegrityError(f"{name} is missing from the run store")
            try:
                with path.open("rb") as file:
                    value = file.read(-1 if limit is None else limit + 1)
            except FileNotFoundError:  # deleted since
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
    if not isinstance(error, FileNotFoundError):  # deleted since it was listed
        raise error


class MemoryStore:
    """A store in this process's memory. `files` are its first values, and the dictionary that it writes to."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.files = {} if files is None else files

    def put(self, key: str, value: Value) -> None:
        self.files[key] = bytes(value)

    def create(self, key: str, value: bytes) -> bool:
        return self.files.setdefault(key, value) is value

    def get(self, key: str, limit: int | None = None) -> bytes:
        if key not in self.files:
            raise IntegrityError(f"{self.uri(key)} is missing from the run store")
        check_size(self.uri(key), len(self.files[key]), limit)
        return self.files[key]

    def list(self, prefix: str) -> list[str]:
        return sorted(key for key in self.files if key.startswith(prefix))

    def delete(self, *keys: str) -> None:
        for key in keys:
            self.files.pop(key, None)

    def sweep(self, prefix: str) -> None:
        """Nothing to do, because no write is cut off."""

    def uri(self, key: str = "") -> str:
        return f"memory/{key}"


def check_size(name: str, size: int, limit: int | None) -> None:
    """Raise TooLarge if `size` is above `limit`."""
    if limit is not None and size > limit:
        raise TooLarge(f"{name} holds {size} bytes, at most {limit} were expected")


def canonical(value: Any) -> bytes:
    """Return JSON that is equal for equal values. Raises ValueError for a number that is not finite."""
    return json.dumps(value, sort_keys=True, allow_nan=False).encode()


def sha256(value: Value) -> str:
    return digest("sha256", value).hex()


def encode(tensors: Params) -> bytes:
    """Return `laid_out` as bytes, for small tensors."""
    return bytes(laid_out(tensors))


def decode(value: bytes, name: str) -> Params:
    """Raises IntegrityError, which names the file, if the bytes are not safetensors."""
    try:
        tensors: Params = safetensors.torch.load(value)
    # torch allocates what the header declares. Sizes that overflow are torch's errors, not the parser's.
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, AssertionError, OverflowError) as error:
        raise IntegrityError(f"{name} cannot be read as safetensors: {first_line(error)}") from error
    return tensors


def tensor_bytes(tensors: Params) -> int:
    """Return the bytes of these tensors, without a file's header."""
    return sum([t.nbytes for t in tensors.values()])


def bits_per_second(store: Store, key: str = PROBE, size: int = PROBE_BYTES) -> float:
    """Measure how fast this machine writes `size` random bytes to the store and reads them back: all bits over all
    seconds, in both directions. The value stays in the store. Raises IntegrityError if other bytes come back."""
    seconds, turns = 0.0, 0
    while turns == 0 or (turns < MOST_TURNS and seconds < LEAST_S):
        value, began = os.urandom(size), time.perf_counter()
        store.put(key, value)
        back = store.get(key, size)
        seconds, turns = seconds + time.perf_counter() - began, turns + 1
        if back != value:
            raise IntegrityError(f"{store.uri(key)}: other bytes came back than were written")
    return 2 * 8 * size * turns / seconds
