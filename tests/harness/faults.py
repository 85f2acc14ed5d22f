"""Fault points: operations of the run store at which a process kills itself, as a power cut would.

There are fault points at the store's own methods (put, list, delete, ...), at the system calls that FolderStore makes
in them (write, rename, unlink, ...) and at the requests that S3Store sends to the server (PutObject, UploadPart, ...).
`install` patches them into a process that was forked for this purpose; the product has no code for them.
"""

from __future__ import annotations

import functools
import json
import os
import pkgutil
import signal
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn

from botocore.client import BaseClient

from fl_engine.backends import processes
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.store import FolderStore
from flexfleet.worker import execute as execution

When = Literal["before", "middle", "after"]

READS = ("get", "uri", "presign", "upload")
"""Methods of a store that change nothing. They have no fault points, because a kill there is like one at any time."""
SYSTEM = {"fsync": "write", "replace": "rename", "link": "link", "unlink": "unlink", "mkdir": "mkdir", "rmdir": "rmdir"}
"""Functions of `os`, and the operations that they are. A file is written before it is synced, so `fsync` is the write;
`middle` cuts the file to half its size."""


@contextmanager
def install(
    operation: str = "",
    when: When = "before",
    number: int = 0,
    counts: str | None = None,
    constants: Mapping[str, Any] = MappingProxyType({}),
    slow: float = 1.0,
) -> Iterator[None]:
    """Kills this process at the `number`-th `operation`, counted from now. `counts`: a file for the number of each
    operation, written in the end. `constants`: values by `module.NAME`, which are set first. `slow`: a client in this
    process takes so many times longer to train."""
    for where, value in constants.items():
        owner, _, name = where.rpartition(".")
        getattr(pkgutil.resolve_name(owner), name)  # raises AttributeError for an unknown name
        setattr(pkgutil.resolve_name(owner), name, value)
    if slow != 1.0:
        for module in (processes, execution):
            module.train = _slowly(module.train, slow)  # type: ignore[attr-defined]
    if not operation and counts is None:
        yield
        return
    points = _Points(operation, when, number)
    for store in (FolderStore, S3Store):
        for name, method in list(vars(store).items()):
            if callable(method) and not name.startswith("_") and name not in READS:
                setattr(store, name, points.method(name, method))
    for name, called in SYSTEM.items():
        setattr(os, name, points.system(called, getattr(os, name)))
    BaseClient._make_api_call = points.request(BaseClient._make_api_call)
    socket.socket.sendall = points.sendall(socket.socket.sendall)  # type: ignore[method-assign]
    try:
        yield
    finally:
        if counts is not None:
            Path(counts).write_text(json.dumps(points.counts))


def _slowly(train: Callable[..., Any], times: float) -> Callable[..., Any]:
    @functools.wraps(train)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        found = train(*args, **kwargs)
        time.sleep((times - 1) * (time.monotonic() - began))
        return found

    return wrapped


class _Points:
    def __init__(self, operation: str, when: When, number: int) -> None:
        self.counts: Counter[str] = Counter()
        self._at = operation, number
        self._when = when
        self._lock = threading.Lock()
        self._here = threading.local()

    def _reached(self, operation: str) -> When | None:
        with self._lock:
            self.counts[operation] += 1
            return self._when if (operation, self.counts[operation]) == self._at else None

    def method(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a method of a store."""

        @functools.wraps(act)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            outer, self._here.inside = getattr(self._here, "inside", False), True
            try:
                return self._pass(name, act, *args, **kwargs)
            finally:
                self._here.inside = outer

        return wrapped

    def system(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function of `os`, which counts only if a store calls it."""

        @functools.wraps(act)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            folder = name == "write" and not stat.S_ISREG(os.fstat(args[0]).st_mode)
            if not getattr(self._here, "inside", False) or folder:
                return act(*args, **kwargs)
            return self._pass(name, act, *args, **kwargs)

        return wrapped

    def request(self, act: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps requests to the server."""

        @functools.wraps(act)
        def wrapped(client: Any, operation: str, given: Any) -> Any:
            if operation.startswith(("Get", "Head")):
                return act(client, operation, given)
            return self._pass(operation, act, client, operation, given)

        return wrapped

    def sendall(self, act: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(act)
        def wrapped(connection: socket.socket, data: Any, *flags: int) -> Any:
            if getattr(self._here, "torn", False):
                act(connection, bytes(data)[:-1], *flags)
                _die()
            return act(connection, data, *flags)

        return wrapped

    def _pass(self, operation: str, act: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        when = self._reached(operation)
        if when == "before":
            _die()
        if when == "middle":
            if operation == "write":
                os.ftruncate(args[0], os.fstat(args[0]).st_size // 2)
                _die()
            self._here.torn = True  # `sendall` leaves out the last byte of the request
        found = act(*args, **kwargs)
        if when is not None:
            _die()
        return found


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL was not obeyed")
