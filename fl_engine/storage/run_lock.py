"""The lock of a run that several machines can access. Only one coordinator at a time can hold the lock.

    `lease/00003.json`: The third coordinator's identity, and a count that increases every HEARTBEAT_S seconds.

A coordinator acquires the lock by creating the file with the next number, and only one coordinator can succeed. The
lock is free if its holder has released it, if the holder is an ended process on this machine, or if the holder has not
increased its count for 20 seconds. The new coordinator measures time only between its own requests, so clocks and slow
stores have no effect. If the lock is not free, `hold` raises an error with the holder's name.

A holder may be replaced while it is paused or disconnected. Before each commit the holder stops if a file with a higher
number exists. A pause between this check and the commit is harmless, because the names of a commit's files contain the
writer's number, and readers use the highest number. A coordinator never deletes files with higher numbers.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fl_engine.core.errors import EnvironmentFailure, FlexfleetError, IntegrityError, InUse, Replaced
from fl_engine.core.records import Record
from fl_engine.storage.store import Store

log = logging.getLogger("flexfleet")

HEARTBEAT_S = 5.0
RELEASE_S = 5.0
"""Maximum seconds for releasing the lock at the end of a run."""
SOMEBODY = "another coordinator"
"""Name of a holder whose lock file is not valid."""


class Holder(Record):
    """The holder of the lock. `machine` is the same for all processes in one PID namespace."""

    host: str
    machine: str
    pid: int
    since: str
    heartbeats: int = 0
    released: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.since})"


class RunLock:
    """An acquired lock. `number` counts the coordinators of the run, including this coordinator."""

    def __init__(self, store: Store, number: int, holder: Holder, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._store, self._holder, self._heartbeat_s = store, holder, heartbeat_s
        self.number, self.ended = number, threading.Event()

    @property
    def key(self) -> str:
        """Store key of the lock. The value at this key changes every HEARTBEAT_S seconds."""
        return _key(self.number)

    def check(self) -> None:
        """Raise Replaced if another coordinator has taken over."""
        number = _newest(self._store)
        if number > self.number:
            other = _holder(_content(self._store, number)) or SOMEBODY
            raise Replaced(f"{self._store.uri()}: {other} has taken over the run. No results are lost")

    def send_heartbeats(self) -> None:
        """Increase the count until the event `ended` is set, then release the lock. Only this thread writes to the
        lock, so that a late heartbeat cannot overwrite the release."""
        while not self.ended.wait(self._heartbeat_s):
            self._write(heartbeats=self._holder.heartbeats + 1)
        self._write(released=True)

    def _write(self, **changed: Any) -> None:
        self._holder = self._holder.model_copy(update=changed)
        # Ignore errors, because the next heartbeat may succeed. If a release fails, the next coordinator waits 20 s.
        with suppress(FlexfleetError):
            self._store.put(self.key, self._holder.model_dump_json().encode())


@contextmanager
def hold(store: Store, ttl_s: float | None = None, heartbeat_s: float = HEARTBEAT_S) -> Iterator[RunLock]:
    """Hold the lock of the run in `store` until the block ends.

    Args:
        store: The run's store.
        ttl_s: Seconds without a heartbeat after which the lock is free. None: four heartbeat intervals; 0: no wait.
        heartbeat_s: Seconds between two heartbeats. All holders must use the same value.

    Raises:
        InUse: Another coordinator holds the lock.
        EnvironmentFailure: The store does not support conditional writes.
    """
    machine, now = _machine(), datetime.now(timezone.utc).isoformat(timespec="seconds")
    mine = Holder(host=socket.gethostname(), machine=machine, pid=os.getpid(), since=now)
    while True:
        newest = _newest(store)
        if newest:
            _wait_for(store, newest, machine, 4 * heartbeat_s if ttl_s is None else ttl_s, heartbeat_s / 10)
        if store.create(_key(newest + 1), mine.model_dump_json().encode()):
            break
    if store.create(_key(newest + 1), b""):
        raise EnvironmentFailure(
            f"{store.uri()}: the server must support If-None-Match. Update the server, or set run.remote=null"
        )
    store.delete(*(key for key in store.list("lease/") if _number(key) <= newest))
    lock = RunLock(store, newest + 1, mine, heartbeat_s)
    thread = threading.Thread(target=lock.send_heartbeats, daemon=True, name="run lock")
    thread.start()
    try:
        yield lock
    finally:
        lock.ended.set()
        thread.join(RELEASE_S)


def check_free(store: Store) -> None:
    """Raise InUse if a coordinator holds the lock. Wait up to four heartbeats if this is not certain."""
    if newest := _newest(store):
        _wait_for(store, newest, _machine(), 4 * HEARTBEAT_S, HEARTBEAT_S / 10)


def _wait_for(store: Store, number: int, machine: str, ttl_s: float, poll_s: float) -> None:
    """Wait until the lock is free. Raises InUse if the lock's holder is running."""
    first = _content(store, number)
    holder = _holder(first)
    who = holder or SOMEBODY
    if holder is not None and holder.released:
        return
    if holder is None or holder.machine != machine or _alive(holder.pid):
        log.info("%s may still hold the run's lock; waiting up to %.0f s for its next heartbeat", who, ttl_s)
        silent = 0.0
        while silent < ttl_s:
            time.sleep(poll_s)
            silent += poll_s
            if _newest(store) > number:
                return  # another coordinator was faster, so the caller must wait for the new lock
            now = _content(store, number)
            if now not in (None, first):
                found = _holder(now) or SOMEBODY
                if isinstance(found, Holder) and found.released:
                    return
                raise InUse(f"{store.uri()} is being run by {found}. Wait for this process, or stop it")
    log.warning("taking over from %s, which did not release its lock", who)


def _content(store: Store, number: int) -> bytes | None:
    try:
        return store.get(_key(number))
    except IntegrityError:  # the next coordinator has deleted the file
        return None


def _holder(content: bytes | None) -> Holder | None:
    try:
        return None if content is None else Holder.model_validate_json(content)
    except ValidationError:
        return None


def _newest(store: Store) -> int:
    return max((_number(key) for key in store.list("lease/")), default=0)


def _key(number: int) -> str:
    return f"lease/{number:05d}.json"


def _number(key: str) -> int:
    name = key.removeprefix("lease/").removesuffix(".json")
    return int(name) if name.isdecimal() else 0


def _machine() -> str:
    """Return the host name, boot ID and PID namespace, because PIDs in different containers may be equal."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with suppress(OSError):
            parts.append(os.readlink(path) if path.endswith("pid") else Path(path).read_text(encoding="utf-8").strip())
    return json.dumps(parts)


def _alive(pid: int) -> bool:
    """Return whether another process with this PID runs on this machine. Return False for the PID of this process,
    because a restarted container may reuse the PID of an ended process."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
