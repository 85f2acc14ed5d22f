"""Limits that the owner of a device sets: hours of the day, bytes per day, and epochs per assignment.

The device counts its own bytes, and stores the counts of the last 24 hours in `traffic.json` in its folder.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from fl_engine.core.errors import ClientError, EnvironmentFailure, TooLarge

if TYPE_CHECKING:  # importing the store imports torch
    from fl_engine.storage.store import FolderStore, Store, Value

log = logging.getLogger("flexfleet")

FILE = "traffic.json"
TIMES = re.compile(r"(\d{1,2})(?::([0-5]\d))?-(\d{1,2})(?::([0-5]\d))?")
DAY_H = 24
SAVE_BYTES = 2**20
"""Number of new bytes after which the counts are stored."""
LOOK_S, FORGET_S = 30.0, 3600.0
"""Seconds between two checks of the limits, and seconds after which `Limits.need` is forgotten."""


def _window(text: str) -> tuple[int, int]:
    """Parse `22-6` or `22:30-6:00`, and return the start and the end in minutes after midnight."""
    found = TIMES.fullmatch(text)
    start, end = (60 * int(found[i]) + int(found[i + 1] or 0) for i in (1, 3)) if found else (0, 0)
    if start == end or max(start, end) > 60 * DAY_H:
        raise argparse.ArgumentTypeError(f"must be two times of the day, such as 22-6 or 22:30-6:00, got {text!r}")
    return start, end


def _hours(text: str) -> str:
    _window(text)
    return text


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        with suppress(ValueError):
            if 0 < (number := kind(text)) < float("inf"):
                return number
        raise argparse.ArgumentTypeError(f"must be a number greater than 0, got {text!r}")

    return parse


def add_options(p: argparse.ArgumentParser) -> None:
    hours = "local time in which this device accepts assignments, such as 22-6 (default: always)"
    p.add_argument("--hours", type=_hours, metavar="H-H", help=hours)
    megabytes = "maximum megabytes that this device receives and sends in 24 hours (default: unlimited)"
    p.add_argument("--mb-per-day", type=_positive(float), metavar="MB", help=megabytes)
    epochs = "decline assignments with more than N epochs (default: unlimited)"
    p.add_argument("--epochs", type=_positive(int), metavar="N", help=epochs)


class Limits:
    """The limits of a device. Without arguments, nothing is limited."""

    def __init__(self, place: FolderStore | None = None, options: argparse.Namespace | None = None) -> None:
        """Read the counts in the device's folder `place`. `options` are the parsed options of `add_options`."""
        self._hours: str | None = getattr(options, "hours", None)
        mb: float | None = getattr(options, "mb_per_day", None)
        self._most = None if mb is None else int(mb * 1e6)
        self.epochs: int | None = getattr(options, "epochs", None)
        """Maximum number of epochs of an assignment; None without a limit."""
        self.need = 0
        """Bytes that the next assignment may need, according to its upload URLs and to earlier assignments."""
        self._place, self._lock, self._unsaved = place, threading.Lock(), 0
        self._bytes: dict[int, int] = {}
        """Map each hour since 1970 to the bytes that were received and sent in this hour."""
        if place is not None and FILE in place.list(FILE):
            self._bytes = {int(hour): count for hour, count in json.loads(place.get(FILE)).items()}

    def closed(self) -> str:
        """Return why the device accepts no assignment now; empty if it accepts one."""
        if self._hours is not None:
            start, end = _window(self._hours)
            now = 60 * time.localtime().tm_hour + time.localtime().tm_min
            if not (start <= now < end if start < end else now >= start or now < end):
                return f"the time is outside of --hours {self._hours}"
        if self._most is not None and (left := self.left()) < max(1, self.need):
            need = f", but an assignment may need {self.need / 1e6:.1f} MB" if left else ""
            return f"{left / 1e6:.1f} of --mb-per-day {self._most / 1e6:g} are left{need}"
        return ""

    def wait(self, report: Callable[[str], object]) -> bool:
        """Wait while the limits allow no assignment. Return whether the device has waited. `report` is called with the
        reason. `need` is forgotten every hour, because the assignments of another run may need fewer bytes."""
        if not (why := self.closed()):
            return False
        log.info("accepting no assignments: %s", why)
        report(why)
        self.save()
        until = time.monotonic() + FORGET_S
        while self.closed():
            if time.monotonic() < until:
                time.sleep(LOOK_S)
            else:
                self.need, until = 0, until + FORGET_S
        return True

    def left(self) -> int:
        """Return the bytes that may be received and sent now. Up to an hour before the last 24 hours also counts. Times
        that differ by more than a day are from a wrong clock, and are ignored."""
        hour = int(time.time() // 3600)
        with self._lock:
            self._bytes = {each: count for each, count in self._bytes.items() if abs(hour - each) <= DAY_H}
            return max(0, (self._most or 0) - sum(self._bytes.values()))

    def count(self, size: int) -> None:
        """Add bytes to the count of this hour."""
        hour = int(time.time() // 3600)
        with self._lock:
            self._bytes[hour] = self._bytes.get(hour, 0) + size
            self._unsaved += size
        if self._unsaved >= SAVE_BYTES:
            self.save()

    def save(self) -> None:
        """Store the counts. An error is only a warning, because a full disk must not end the heartbeats."""
        if self._place is None or not self._unsaved:
            return
        with self._lock:
            text, self._unsaved = json.dumps(self._bytes), 0
        try:
            self._place.put(FILE, text.encode())
        except EnvironmentFailure as error:
            log.warning("the number of bytes could not be stored: %s", error)

    def counted(self, store: Store, bounded: bool = False) -> Store:
        """Return the store with its bytes counted. If `bounded` is True, the store is the store of an assignment, and a
        request for more bytes than are left raises ClientError."""
        return store if self._most is None else cast("Store", _Counted(store, self, bounded))


class _Counted:
    def __init__(self, store: Store, limits: Limits, bounded: bool) -> None:
        self._store, self._limits, self._bounded, self._used = store, limits, bounded, 0

    def put(self, key: str, value: Value) -> None:
        self._count(len(value), self._limits.left())
        self._store.put(key, value)

    def get(self, key: str, limit: int | None = None) -> bytes:
        left = self._limits.left()
        most = left if self._bounded and (limit is None or left < limit) else limit
        try:
            value = self._store.get(key, most)
        except TooLarge:
            if most != limit:
                self._limits.count(left)
                self._count(left + 1, left)
            raise
        self._count(len(value), left)
        return value

    def _count(self, size: int, left: int) -> None:
        if self._bounded:
            self._used += size
            self._limits.need = max(self._limits.need, self._used)
            if size > left:
                raise ClientError(f"the assignment needs more than the {left / 1e6:.1f} MB that --mb-per-day leaves")
        self._limits.count(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
