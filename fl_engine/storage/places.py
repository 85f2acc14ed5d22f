"""A run store by its address."""

from __future__ import annotations

from fl_engine.core.errors import ConfigError, masked
from fl_engine.core.text import folder_hint, is_meant
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.store import FolderStore, Store


def open_store(uri: str, hasty: bool = False, patience_s: float = 0.0) -> Store:
    """`s3://bucket/prefix`, or a folder. `hasty`: does not wait long for a server that does not answer; `patience_s`:
    waits so long for a server that is away. Raises
    ConfigError for another address, and for a text that was meant as one: a folder of that name would be a place that
    nobody looks at, and in a pod one that is gone with it."""
    return S3Store(uri, hasty=hasty, patience_s=patience_s) if is_meant(uri) else FolderStore(uri)


def check_place(name: str, uri: str | None) -> None:
    """Raises ConfigError unless the parameter of this name says an address of a store, or nothing. Nobody is asked."""
    if uri is not None and uri != uri.strip():
        raise ConfigError(f"{name}: {masked(uri)!r} begins or ends with a blank, which would be a part of the address")
    try:
        open_store(uri or "")
    except ConfigError:
        got = masked(uri or "")
        raise ConfigError(f"{name} is s3://bucket/prefix or a folder, got {got!r}{folder_hint(got)}") from None
