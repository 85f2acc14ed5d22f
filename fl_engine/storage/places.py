"""A run store by its address."""

from __future__ import annotations

from fl_engine.storage.s3 import S3Store
from fl_engine.storage.store import FolderStore, Store


def open_store(uri: str) -> Store:
    """`s3://bucket/prefix`, or a folder."""
    return S3Store(uri) if "://" in uri else FolderStore(uri)
