"""Stores for tests: in memory, and one that calls a function before each write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from fl_engine.core.errors import IntegrityError
from fl_engine.storage.store import Store, Value, check_size


class MemoryStore:
    """A store in this process's memory. `files` are its first values, and the dictionary that it writes to."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.files = {} if files is None else files
        self.puts, self.gets = Counter[str](), Counter[str]()
        """Number of requests by key."""

    def put(self, key: str, value: Value) -> None:
        self.puts[key] += 1
        self.files[key] = bytes(value)

    def create(self, key: str, value: bytes) -> bool:
        return self.files.setdefault(key, value) is value

    def get(self, key: str, limit: int | None = None) -> bytes:
        self.gets[key] += 1
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


class Writing:
    """Passes everything on to `inner`; calls `before(what, key)` before each put, create and deletion of a key."""

    def __init__(self, inner: Store, before: Callable[[str, str], object]) -> None:
        self.inner, self.before = inner, before

    def put(self, key: str, value: Value) -> None:
        self.before("put", key)
        self.inner.put(key, value)

    def create(self, key: str, value: bytes) -> bool:
        self.before("create", key)
        return self.inner.create(key, value)

    def delete(self, *keys: str) -> None:
        for key in keys:
            self.before("delete", key)
            self.inner.delete(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
