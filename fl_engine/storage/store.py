"""The run store: keys to bytes. A key is a relative path with forward slashes.

A write is atomic and durable when it returns: a reader, or a process started after a kill, sees the old bytes or the
new ones, never a part.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import safetensors.torch
from safetensors import SafetensorError

from fl_engine.core.errors import EnvironmentFailure, IntegrityError, TooLarge, first_line
from fl_engine.core.types import Params
from fl_engine.storage.serialization import Value, digest, laid_out, pieces_of

TRIES = 100
"""How often a write is tried into a folder that others remove whenever it is empty."""


class Store(Protocol):
    """Every method raises EnvironmentFailure where the store fails: no space, no access, no answer.

    A store whose requests wait for a server has `at_once`, how many of them overlap (`overlapping`)."""

    def put(self, key: str, value: Value) -> None: ...

    def create(self, key: str, value: bytes) -> bool:
        """Writes the value unless the key exists; False where it does. Of several writers at once, one succeeds."""

    def get(self, key: str, limit: int | None = None) -> bytes:
        """Raises IntegrityError where the key does not exist, is no value, or holds more than `limit` bytes."""

    def list(self, prefix: str) -> list[str]:
        """Keys that start with `prefix`, sorted."""

    def delete(self, *keys: str) -> None:
        """Deleting what does not exist is no error: a kill may have come between two deletions."""

    def sweep(self, prefix: str) -> None:
        """Removes what writes under `prefix` left that a kill cut off. Only for times when nobody else writes there."""

    def uri(self, key: str = "") -> str: ...


class FolderStore:
    """A store in a folder of the local file system. `mode`: of new files, less the umask."""

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
        """Writes a temporary file beside the target, then renames it."""
        path = self.root / key
        part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
        with self._explained(key):
            changed = [path.parent]  # folders with a new entry: without their fsync a power cut forgets the name
            try:
                with self._opened(part, changed) as file:
                    file.writelines(pieces_of(value))
                    file.flush()
                    os.fsync(file.fileno())
                name(part, path)
            except (OSError, KeyboardInterrupt):
                part.unlink(missing_ok=True)  # a full disk would not be less full; nobody sweeps a user's own folder
                raise
            part.unlink(missing_ok=True)  # where its name is a second one
            for folder in dict.fromkeys(changed):
                try:
                    descriptor = os.open(folder, os.O_RDONLY)
                except FileNotFoundError:  # the value is there no more: somebody has deleted it, and the folder
                    continue
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def _opened(self, part: Path, changed: list[Path]) -> BinaryIO:
        """A new file, and its folder, which somebody who deletes the last file in it may remove again. Adds the folders
        in which it makes others to `changed`."""
        for left in reversed(range(TRIES)):
            for folder in (part.parent, *part.parent.parents):
                if _is_there(folder):
                    break
                changed.append(folder.parent)
            try:
                part.parent.mkdir(parents=True, exist_ok=True)
                return open(part, "wb", opener=lambda path, flags: os.open(path, flags, self.mode))
            except (FileNotFoundError, FileExistsError) as error:  # mkdir's, of a folder that has just gone
                if not left:
                    raise EnvironmentFailure(f"{part.parent} is removed as soon as it is there") from error
        raise AssertionError("the last try returns or raises")

    def get(self, key: str, limit: int | None = None) -> bytes:
        name = self.uri(key)
        try:
            with self._explained(key), open(self.root / key, "rb", opener=at_once) as file:
                check_size(name, os.fstat(file.fileno()).st_size, limit)
                value = file.read(-1 if limit is None else limit + 1)  # somebody may still write into it
        except FileNotFoundError:
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
                here = Path(folder).relative_to(self.root).as_posix()
                found += [name if here == "." else f"{here}/{name}" for name in names if not name.endswith(".part")]
            return sorted(key for key in found if key.startswith(prefix))

    def delete(self, *keys: str) -> None:
        for key in keys:
            path = self.root / key
            with self._explained(key):
                path.unlink(missing_ok=True)
                folder = path.parent
                while folder != self.root and _removed(folder):
                    folder = folder.parent

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


def at_once(path: str, flags: int) -> int:
    """Opens a file. Raises IntegrityError for what is none: a stranger may have put it there, and would keep whoever
    opens a pipe waiting."""
    try:
        opened = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        # A folder, a socket (on Linux, on macOS), a link that leads to itself.
        if error.errno in (errno.EISDIR, errno.ENXIO, errno.EOPNOTSUPP, errno.ELOOP):
            raise IntegrityError(f"{path} is no file: {error.strerror}") from error
        raise
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise IntegrityError(f"{path} is no file")
    return opened


def _is_there(folder: Path) -> bool:
    """Asks once, since others make and remove folders. Raises NotADirectoryError for what is no folder."""
    try:
        found = stat.S_ISDIR(os.stat(folder).st_mode)
    except FileNotFoundError:
        if not folder.is_symlink():
            return False
        found = False  # a link to nowhere
    if not found:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    return True


def _removed(folder: Path) -> bool:
    """Removes the folder if it is empty; somebody else may do so, or write into it, at the same time."""
    try:
        if not folder.is_dir() or any(folder.iterdir()):
            return False
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


class MemoryStore:
    """A store in this process's memory, which begins with `files`, by key, and keeps its own there. Puts and deletions
    are whole or not at all, as FolderStore's are."""

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
        """Nothing to do: a put is never cut off."""

    def uri(self, key: str = "") -> str:
        return f"memory/{key}"


def _unreadable(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # deleted since it was listed
        raise error


def check_size(name: str, size: int, limit: int | None) -> None:
    """Raises TooLarge for more than `limit` bytes."""
    if limit is not None and size > limit:
        raise TooLarge(f"{name} holds {size} bytes, at most {limit} were expected")


def canonical(value: Any) -> bytes:
    """JSON that is equal for equal values. Raises ValueError for a number that is not finite."""
    return json.dumps(value, sort_keys=True, allow_nan=False).encode()


def sha256(value: Value) -> str:
    return digest("sha256", value).hex()


def encode(tensors: Params) -> bytes:
    """`laid_out`, all of it in memory: for what is small, or has to be bytes."""
    return bytes(laid_out(tensors))


def decode(value: bytes, name: str) -> Params:
    """Raises IntegrityError naming the file where the bytes are no safetensors."""
    try:
        tensors: Params = safetensors.torch.load(value)
    # What its header declares, torch has to make: sizes that overflow are its errors, not the parser's.
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, AssertionError, OverflowError) as error:
        raise IntegrityError(f"{name} cannot be read as safetensors: {first_line(error)}") from error
    return tensors


def tensor_bytes(tensors: Params) -> int:
    """The bytes of these tensors, without a file's header."""
    return sum([t.nbytes for t in tensors.values()])


PROBE = "probe"
PROBE_BYTES = 4 * 2**20
"""The value that goes there and back: large against what a request takes before its first byte."""
LEAST_S, MOST_TURNS = 2.0, 8


def bits_per_second(store: Store, key: str = PROBE, size: int = PROBE_BYTES) -> float:
    """Writes `size` random bytes and reads them again, several times: all bits over all seconds, up and down, as the
    simulated clock counts them. The value stays there. Raises what the store raises; IntegrityError where other bytes
    come back."""
    seconds, turns = 0.0, 0
    while turns == 0 or (turns < MOST_TURNS and seconds < LEAST_S):
        value, began = os.urandom(size), time.perf_counter()
        store.put(key, value)
        back = store.get(key, size)
        seconds, turns = seconds + time.perf_counter() - began, turns + 1
        if back != value:
            raise IntegrityError(f"{store.uri(key)}: other bytes came back than were written")
    return 2 * 8 * size * turns / seconds
