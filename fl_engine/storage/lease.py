"""The lock of a run that several machines can reach: one coordinator at a time.

    lease/00003.json    the third coordinator: who it is, and a count that it raises every BEAT_S seconds

A coordinator takes over by creating the file with the next number; only one can succeed. It may do so if the holder has
released the lease, if the holder is a process of this machine that has ended, or if the holder has not raised its count
for TTL_S seconds on the clock of the one that waits (the two clocks are never compared). The time of the store's
answers does not count, because a slow store says nothing about the holder. Otherwise the newcomer stops, and its error
names the holder.

A holder that was paused or cut off, and was replaced meanwhile, looks for a higher number before each commit, and
stops. Even if it is paused right after it looked, it does no harm: a commit and its files carry their writer's number,
the highest number counts, and nobody deletes files with a higher number than its own (`storage.checkpoints`).
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
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from fl_engine.core.errors import EnvironmentFailure, FlexfleetError, IntegrityError, InUse, Replaced
from fl_engine.storage.store import Store

log = logging.getLogger("flexfleet")

BEAT_S = 5.0
TTL_S = 20.0
POLL_S = 0.5
LET_GO_S = 5.0
"""Seconds that the end of a run waits for the store to take the release of the lease."""
SOMEBODY = "another coordinator"
"""The name of a holder whose file cannot be read."""
BEGAN = datetime.now(timezone.utc).replace(microsecond=0)
"""No lease of this process is older."""


class Holder(BaseModel):
    """`machine` is equal for two processes that share their process numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: Literal[1] = 1
    host: str
    machine: str
    pid: int
    since: str
    beats: int = 0
    released: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.since})"


class Lease:
    """`number` counts the coordinators that the run has had."""

    def __init__(self, store: Store, number: int, holder: Holder) -> None:
        self._store = store
        self._holder = holder
        self._ended = threading.Event()
        self.number = number

    @property
    def key(self) -> str:
        """The lease's key in the store. Its value changes every BEAT_S seconds."""
        return _key(self.number)

    def check(self) -> None:
        """Raise Replaced if another coordinator has taken over."""
        number = _newest(self._store)
        if number > self.number:
            other = _holder(_content(self._store, number)) or SOMEBODY
            raise Replaced(
                f"{self._store.uri()}: {other} has taken over while this one did not answer. Nothing is lost"
            )

    def _beat(self) -> None:
        """Raise the count until the holder ends, then release the lease. One thread writes, so that no later beat
        overwrites the release."""
        while not self._ended.wait(BEAT_S):
            self._write(beats=self._holder.beats + 1)
        self._write(released=True)

    def _write(self, **changed: Any) -> None:
        self._holder = self._holder.model_copy(update=changed)
        # A store that fails now may answer the next beat. Without the release, the next coordinator waits TTL_S.
        with suppress(FlexfleetError):
            self._store.put(_key(self.number), self._holder.model_dump_json().encode())

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Beat inside, then release the lease. A store that does not answer delays the end by at most LET_GO_S."""
        thread = threading.Thread(target=self._beat, daemon=True, name="lease")
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join(LET_GO_S)


@contextmanager
def held(store: Store, ttl_s: float | None = None) -> Iterator[Lease]:
    """Hold the lease of the run in `store` until the block ends. `ttl_s`: how long a holder may be silent, else TTL_S;
    0 if another lease implies that there is no holder any more. Raises InUse if another coordinator holds it, and
    EnvironmentFailure if the store cannot keep two coordinators apart."""
    lease = _acquire(store, TTL_S if ttl_s is None else ttl_s)
    with lease.beating():
        yield lease


def _acquire(store: Store, ttl_s: float) -> Lease:
    machine, now = _machine(), datetime.now(timezone.utc).isoformat(timespec="seconds")
    mine = Holder(host=socket.gethostname(), machine=machine, pid=os.getpid(), since=now)
    while True:
        newest = _newest(store)
        if newest:
            _wait_for(store, newest, machine, ttl_s)
        if store.create(_key(newest + 1), mine.model_dump_json().encode()):
            if store.create(_key(newest + 1), b""):
                raise EnvironmentFailure(
                    f"{store.uri()}: this server ignores If-None-Match, so two coordinators could run at once. Update "
                    "the server, or keep the ledger in a folder"
                )
            store.delete(*(key for key in store.list("lease/") if _number(key) <= newest))
            return Lease(store, newest + 1, mine)


def _wait_for(store: Store, number: int, machine: str, ttl_s: float) -> None:
    """Return when this lease may be taken over. Raises InUse if its holder is alive."""
    first = now = _content(store, number)
    silent, logged = 0.0, False
    while True:
        holder = _holder(now)
        if holder is not None and holder.released:
            return
        who = holder or SOMEBODY
        if now is not None and now != first:
            raise InUse(f"{store.uri()} is being run by {who}: wait for it, or stop it first")
        gone = holder is not None and holder.machine == machine and not _alive(holder.pid)
        if gone or silent >= ttl_s:
            if holder is None or not (gone and _is_this_process(holder)):
                log.warning("taking over from %s, which did not release its lease", who)
            return
        if not logged:
            log.info("the run was held by %s: waiting up to %.0f s for a sign of life", who, ttl_s)
            logged = True
        time.sleep(POLL_S)
        asked = time.monotonic()
        if _newest(store) > number:
            return  # another coordinator was quicker; its lease is looked at next
        now = _content(store, number)
        if time.monotonic() - asked <= BEAT_S:
            silent += POLL_S
        else:  # the holder's beats may be as slow
            silent = min(silent, ttl_s - 2 * BEAT_S)


def _content(store: Store, number: int) -> bytes | None:
    try:
        return store.get(_key(number))
    except IntegrityError:  # deleted by the next coordinator
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
    """The boot and the namespace of process numbers, because in another container the same number is another
    process."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with suppress(OSError):
            parts.append(os.readlink(path) if path.endswith("pid") else Path(path).read_text(encoding="utf-8").strip())
    return json.dumps(parts)


def _is_this_process(holder: Holder) -> bool:
    """Whether this process has the lease of a `holder` on this machine. The store did not answer when the lease should
    have been released, or its answer to the acquisition was lost."""
    return holder.pid == os.getpid() and datetime.fromisoformat(holder.since) >= BEGAN


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False  # an earlier process with this number, as the first one of a restarted container
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
