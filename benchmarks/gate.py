"""Let a contestant run rounds on request. A gate reads round counts from stdin and writes round times to stdout.

A contestant calls `Gate.round_begins()` at the start of each round. The call blocks until the contestant's turn. The
time of a round is measured from one call to the next, so it includes work between rounds. This module uses only the
standard library, because contestants have separate environments.
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
        # Redirect the stdout of libraries to stderr, because stdout is reserved for the reports.
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._marks: list[float] = []
        self._left = 0
        self._begun = False

    def round_begins(self) -> None:
        """Wait until the next round may start. Exit the process after the last round."""
        now = time.perf_counter()
        if not self._begun:
            self._report({"ready": True})
            self._begun = True
        elif self._left:
            self._marks.append(now)
            self._left -= 1
        if not self._left:
            if self._marks:
                self._report({"seconds": [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]})
            line = sys.stdin.readline().strip()
            if not line:
                self._report({"peak_mb": _peak_mb()})
                os._exit(0)
            self._left = int(line)
            self._marks = [time.perf_counter()]

    def _report(self, what: dict[str, Any]) -> None:
        print(json.dumps(what), file=self._out, flush=True)


def family(pid: int) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yield a pair for the process `pid` and for each of its descendants. Each pair contains the fields of
    /proc/<pid>/status, and the values of /proc/<pid>/stat without the first two values. Outside Linux, yield nothing.
    """
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            lines = (folder / "status").read_text("utf-8").splitlines()
            values = (folder / "stat").read_text("utf-8").rpartition(")")[2].split()
        except OSError:  # The process has already ended.
            continue
        found[int(folder.name)] = dict(line.split(":", 1) for line in lines if ":" in line), values
    members = {pid}
    while grown := {other for other, (fields, _) in found.items() if int(fields["PPid"]) in members} - members:
        members |= grown
    return (found[member] for member in members if member in found)


def _peak_mb() -> float:
    """Return the total peak resident memory of this process and its descendants; 0 outside Linux."""
    return sum(float(fields.get("VmHWM", "0 kB").split()[0]) for fields, _ in family(os.getpid())) / 1024
