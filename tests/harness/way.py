"""A TCP proxy between devices and the object store, which can cut off single processes.

A cut begins at once, or during a request: `at` are parts of its key, and `after` is the number of bytes of request and
response that still pass. From then on, for `seconds`:

    refused   connections are broken, and new ones are closed at once
    hangs     connections stay open without data; the data arrive late, after the cut
    breaks    connections are broken, and each new one is broken after `after` bytes

Linux reports to which process a connection belongs (`/proc`).
"""

from __future__ import annotations

import math
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

How = Literal["refused", "hangs", "breaks"]
BEGINS = (b"GET ", b"PUT ", b"POST ")
"""Beginnings of requests."""
Address = tuple[str, int]
"""Host and port."""


def _inode(here: Address, there: Address) -> int:
    """Return the inode of the TCP socket of `here` that is connected to `there`; 0 if it is closed."""
    sides = [f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}" for host, port in (here, there)]
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines())
    return next((int(parts[9]) for parts in lines if parts[1:3] == sides), 0)


@dataclass(frozen=True)
class Cut:
    how: How = "refused"
    at: tuple[bytes, ...] = ()
    """Parts of keys: begins in the next request that names one of them; empty: at once."""
    after: int = 0
    """Bytes."""
    seconds: float = math.inf


@dataclass
class _Connection:
    pid: int
    ends: tuple[socket.socket, socket.socket]
    passed: int = 0
    """Bytes, since the request in which a cut begins, or since the connection was opened during a cut."""

    def end(self) -> None:
        for each in self.ends:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@dataclass
class _Cutting:
    """A process's cut. `within`: the connection whose request it begins in."""

    cut: Cut
    within: _Connection | None = None
    begun: float | None = None
    lifted: threading.Event = field(default_factory=threading.Event)
    """By somebody: before its time."""

    @property
    def over(self) -> bool:
        return self.begun is not None and time.monotonic() - self.begun >= self.cut.seconds

    def wait(self) -> None:
        """Until it is over, or lifted."""
        assert self.begun is not None
        left_s = self.begun + self.cut.seconds - time.monotonic()
        self.lifted.wait(None if math.isinf(left_s) else max(0.0, left_s))


@dataclass
class Way:
    """`to`: the server's host and port. `pids`: the processes that may be cut off. Devices call `url`."""

    to: Address
    pids: Callable[[], Iterable[int]]
    _cuts: dict[int, _Cutting] = field(default_factory=dict)
    _open: dict[int, list[_Connection]] = field(default_factory=dict)
    _closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def cut_off(self, pid: int, cut: Cut = Cut()) -> None:
        self.let_back(pid)
        with self._lock:
            self._cuts[pid] = cutting = _Cutting(cut)
        if not cut.at:
            self._begin(pid, cutting)

    def has_begun(self, pid: int) -> bool:
        """Whether the last cut of this process has; it may be over."""
        cutting = self._cuts.get(pid)
        return cutting is not None and cutting.begun is not None

    def let_back(self, pid: int) -> None:
        with self._lock:
            cutting = self._cuts.pop(pid, None)
        if cutting is not None:
            cutting.lifted.set()

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._server.close()
        for pid in list(self._cuts):
            self.let_back(pid)
        for connection in [each for some in list(self._open.values()) for each in some]:
            connection.end()

    def _serve(self) -> None:
        while not self._closed:
            try:
                here, address = self._server.accept()
            except OSError:
                return
            pid = self._owner(address)
            cutting = self._cuts.get(pid)
            if cutting is not None and cutting.begun and not cutting.over and cutting.cut.how == "refused":
                here.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, no farewell
                here.close()
                continue
            try:
                there = socket.create_connection(self.to)
            except OSError:  # the server has ended
                here.close()
                continue
            connection = _Connection(pid, (here, there))
            with self._lock:
                self._open.setdefault(pid, []).append(connection)
            for source, target, asks in ((here, there, True), (there, here, False)):
                threading.Thread(target=self._pass, args=(connection, source, target, asks), daemon=True).start()

    def _owner(self, caller: Address) -> int:
        """The process that has called from there; 0: none of `pids`."""
        called = f"socket:[{_inode(caller, self._server.getsockname())}]"
        for pid in self.pids():
            with suppress(OSError):
                for each in Path(f"/proc/{pid}/fd").iterdir():
                    with suppress(OSError):
                        if os.readlink(each) == called:
                            return pid
        return 0

    def _pass(self, connection: _Connection, source: socket.socket, target: socket.socket, asks: bool) -> None:
        """`asks`: from the device to the server."""
        with suppress(OSError):
            while data := source.recv(2**16):
                self._forward(connection, target, data, asks)
        connection.end()
        with self._lock, suppress(KeyError, ValueError):
            self._open[connection.pid].remove(connection)
        cutting = self._cuts.get(connection.pid)
        if cutting is not None and cutting.within is connection:  # the request was over before it could be cut
            self._begin(connection.pid, cutting)

    def _forward(self, connection: _Connection, target: socket.socket, data: bytes, asks: bool) -> None:
        """Sends on what has arrived, as far as the process's cut allows. Raises OSError where that breaks it off."""
        while data:
            cutting, room = self._room(connection, data, asks)
            if cutting is None or room > len(data):
                target.sendall(data)
                return
            target.sendall(data[:room])
            data = data[room:]
            self._begin(connection.pid, cutting)
            if cutting.cut.how != "hangs":
                raise ConnectionAbortedError
            cutting.wait()
            if self._closed:
                raise ConnectionAbortedError

    def _room(self, connection: _Connection, data: bytes, asks: bool) -> tuple[_Cutting | None, int]:
        """The cut that this connection meets, if any, and how many bytes pass before it does."""
        with self._lock:
            cutting = self._cuts.get(connection.pid)
            if cutting is None or cutting.over:
                return None, 0
            cut = cutting.cut
            if cutting.begun is None:
                if cutting.within is None and asks and any(part in data for part in cut.at):
                    cutting.within, connection.passed = connection, 0
                elif cutting.within is connection and asks and data.startswith(BEGINS):
                    return cutting, 0  # the request was shorter: between it and the next one
                if cutting.within is not connection:
                    return None, 0
            elif cut.how != "breaks":
                return cutting, 0
            room = max(0, cut.after - connection.passed)
            connection.passed += len(data)
            return cutting, room

    def _begin(self, pid: int, cutting: _Cutting) -> None:
        with self._lock:
            if cutting.begun is not None or self._cuts.get(pid) is not cutting:
                return
            cutting.begun = time.monotonic()
            broken = [] if cutting.cut.how == "hangs" else self._open.pop(pid, [])
        # The one that is cut ends last: a device that has noticed has no other connection left.
        for connection in sorted(broken, key=lambda each: each is cutting.within):
            connection.end()
