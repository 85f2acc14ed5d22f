"""Wait for an unreachable server, and log that the process waits."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TypeVar

from fl_engine.core.errors import Unreachable

log = logging.getLogger("flexfleet")

R = TypeVar("R")

REPORT_S, LONGEST_PAUSE_S = 30.0, 5.0


class Outage:
    """An outage of `server`, from the first failed request to the next successful request. Logs the first failure, and
    then at most one failure per REPORT_S seconds."""

    def __init__(self, server: str, patience_s: float) -> None:
        self._server, self._patience_s = server, patience_s
        self._began = self._reported = -math.inf

    def failed(self, error: Exception, meanwhile: str) -> bool:
        """Record a failure, and log `error` with the message `meanwhile`. Return True if the outage has lasted
        `patience_s` seconds."""
        now = time.monotonic()
        self._began = now if math.isinf(self._began) else self._began
        is_over = now - self._began >= self._patience_s
        if not is_over and now - self._reported >= REPORT_S:
            log.warning("%s; %s", error, meanwhile)
            self._reported = now
        return is_over

    def ended(self) -> None:
        if not math.isinf(self._began):
            log.info("%s is reachable again after %.0f s", self._server, time.monotonic() - self._began)
        self._began = self._reported = -math.inf


def waiting(
    call: Callable[[], R], patience_s: float, server: str = "the server", check: Callable[[], object] = lambda: None
) -> R:
    """Retry a call while a server is unreachable, for at most `patience_s` seconds. Call `check` before each retry."""
    outage, pause = Outage(server, patience_s), 0.5
    while True:
        try:
            found = call()
        except Unreachable as error:
            if outage.failed(error, f"waiting for up to {patience_s:.0f} s"):
                raise
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
            check()
        else:
            outage.ended()
            return found
