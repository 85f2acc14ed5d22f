"""Tells a contestant on its stdin to run rounds, and reports on its stdout how long they took.

A contestant calls only `Gate.round_begins()`, at the start of each round. A round takes the time from one call to the
next, so that nothing between two rounds goes uncounted. The call waits until the contestant's turn. This module needs
nothing but Python, because contestants have environments of their own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Gate:
    def __init__(self) -> None:
        # Lets libraries print to stderr, because stdout is for the reports.
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._marks: list[float] = []
        self._left = 0
        self._begun = False

    def round_begins(self) -> None:
        """Returns when the next round may start. Exits the process if there is none."""
        now = time.perf_counter()
        if not self._begun:
            self._say({"ready": True})
            self._begun = True
        elif self._left:
            self._marks.append(now)
            self._left -= 1
        if not self._left:
            if self._marks:
                self._say({"seconds": [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]})
            line = sys.stdin.readline().strip()
            if not line:
                self._say({"peak_mb": _peak_mb()})
                os._exit(0)
            self._left = int(line)
            self._marks = [time.perf_counter()]

    def _say(self, what: dict[str, Any]) -> None:
        print(json.dumps(what), file=self._out, flush=True)


def family(pid: int) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Of a process and of each that it has started: the fields of /proc/<pid>/status, and the values of
    /proc/<pid>/stat from the third on (Linux; elsewhere nothing)."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            lines = (folder / "status").read_text("utf-8").splitlines()
            values = (folder / "stat").read_text("utf-8").rpartition(")")[2].split()
        except OSError:  # the process has ended meanwhile
            continue
        found[int(folder.name)] = dict(line.split(":", 1) for line in lines if ":" in line), values
    members = {pid}
    while grown := {other for other, (fields, _) in found.items() if int(fields["PPid"]) in members} - members:
        members |= grown
    return (found[member] for member in members if member in found)


def _peak_mb() -> float:
    """Largest resident memory of this process and of each that it has started, added up (Linux; elsewhere 0)."""
    return sum(float(fields.get("VmHWM", "0 kB").split()[0]) for fields, _ in family(os.getpid())) / 1024
