"""A store that calls a function before each write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fl_engine.storage.store import Store


class Writing:
    """Passes everything on to `inner`; calls `before(what, key)` before each put, create and deletion of a key."""

    def __init__(self, inner: Store, before: Callable[[str, str], object]) -> None:
        self.inner, self.before = inner, before

    def put(self, key: str, value: bytes) -> None:
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
