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


def _peak_mb() -> float:
    """Peak resident memory of this process plus the peaks of its descendants (on Linux; elsewhere 0)."""
    parents, peaks = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            lines = (folder / "status").read_text().splitlines()
        except OSError:  # the process has ended meanwhile
            continue
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        pid = int(folder.name)
        parents[pid], peaks[pid] = int(fields["PPid"]), float(fields.get("VmHWM", "0 kB").split()[0])
    ours = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= grown
    return sum(peaks.get(pid, 0.0) for pid in ours) / 1024
