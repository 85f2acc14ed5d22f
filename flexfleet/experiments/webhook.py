"""Tells a chat or a pager that a night has failed, or has ended without a verdict."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import urllib3

from fl_engine.core.errors import GateFailed, Stopped, first_line, masked, printable

log = logging.getLogger("flexfleet")

VARIABLE = "FLEXFLEET_WEBHOOK"
"""Environment variable with the address, which is a secret: anyone who knows it can post."""
WAIT_S = 10.0
"""Seconds for each try, from the look-up of the host's name to the answer's headers."""
AGAIN_S = (2.0, 8.0)
"""Seconds to wait before each further try."""


@contextmanager
def told_without_verdict(night: str) -> Iterator[None]:
    """Call the webhook if the nightly regression run inside ends in an error, unless somebody stopped it."""
    try:
        yield
    except Stopped:
        raise
    except Exception as error:
        ended = "failed" if isinstance(error, GateFailed) else "has no verdict"
        call(f"{night} {ended}: {type(error).__name__}: {printable(first_line(error))}")
        raise


def call(text: str) -> None:
    """Posts `{"text": text}`, without passwords, which Slack, Mattermost and others take, if the environment names an
    address. An error becomes a warning without the address, so that it does not hide the night's own outcome."""
    url = os.environ.get(VARIABLE)
    if not url:
        return
    for seconds in (0.0, *AGAIN_S):
        time.sleep(seconds)
        if not (why := _post_in_time(url, masked(text))):
            return
    log.warning("the webhook (%s) was not told: %s", VARIABLE, why)


def _post_in_time(url: str, text: str) -> str:
    """Why the text was not taken; empty if it was. A socket's timeout is of each byte, and a server may send one after
    the other: so this waits for a thread, and leaves it."""
    whys = ["no answer in time"]
    thread = Thread(target=lambda: whys.append(_post(url, text)), name="webhook", daemon=True)
    thread.start()
    thread.join(WAIT_S)
    return whys[-1]


def _post(url: str, text: str) -> str:
    try:  # urllib3's own retries would write the address into the log; the body, which nobody needs, may have no end
        answer = urllib3.request(
            "POST", url, json={"text": text}, timeout=WAIT_S, retries=False, redirect=False, preload_content=False
        )
        answer.close()
        return "" if answer.status < 300 else f"HTTP {answer.status}"
    except Exception as error:  # nobody else sees what ends a thread, and its message may hold the address
        return type(error).__name__
