"""Call a webhook if a nightly regression run fails or ends without a verdict."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import urllib3

from fl_engine.core.errors import GateFailed, Stopped, first_line, masked, printable

log = logging.getLogger("flexfleet")

VARIABLE = "FLEXFLEET_WEBHOOK"
"""Environment variable with the address, which is a secret: anyone who knows it can post."""
WAIT_S = 10.0
"""Timeout of each try in seconds."""
AGAIN_S = (2.0, 8.0)
"""Seconds to wait before each new try."""


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
    """Post `{"text": text}` without passwords, as Slack and Mattermost expect, if the environment has an address. An
    error is logged as a warning without the address."""
    url = os.environ.get(VARIABLE)
    if not url:
        return
    for seconds in (0.0, *AGAIN_S):
        time.sleep(seconds)
        if not (why := _post(url, masked(text))):
            return
    log.warning("the webhook (%s) could not be called: %s", VARIABLE, why)


def _post(url: str, text: str) -> str:
    """Return why the text was not accepted; empty if it was. The address is a secret, so no error text is returned."""
    try:
        answer = urllib3.request(
            "POST", url, json={"text": text}, timeout=WAIT_S, retries=False, redirect=False, preload_content=False
        )
        answer.close()
        return "" if answer.status < 300 else f"HTTP {answer.status}"
    except urllib3.exceptions.HTTPError as error:
        return type(error).__name__
