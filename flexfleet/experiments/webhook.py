"""Call a webhook if a nightly regression run fails or ends without a verdict."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import urllib3

from fl_engine.core.errors import ConfigError, GateFailed, Stopped, first_line, masked, printable
from fl_engine.storage.proxies import pool_of

log = logging.getLogger("flexfleet")

VARIABLE = "FLEXFLEET_WEBHOOK"
"""Environment variable with the webhook's address, which is secret because posting does not require a password."""
TIMEOUT_S = 10.0
BACKOFF_S = (2.0, 8.0)


@contextmanager
def reported_errors(id: str) -> Iterator[None]:
    """Call the webhook if the code in the `with` block raises an error other than Stopped."""
    try:
        yield
    except Stopped:
        raise
    except Exception as error:
        ended = "failed" if isinstance(error, GateFailed) else "has no verdict"
        call(f"{id} {ended}: {type(error).__name__}: {printable(first_line(error))}")
        raise


def call(text: str, backoff_s: tuple[float, ...] = BACKOFF_S) -> None:
    """Post `{"text": text}`, as Slack and Mattermost expect, if VARIABLE is set. Passwords are masked. Log messages
    about errors do not contain the address. `backoff_s` contains the seconds to wait before each retry."""
    if not (url := os.environ.get(VARIABLE)):
        return
    for seconds in (0.0, *backoff_s):
        time.sleep(seconds)
        try:  # do not use urllib3's own retries, which log the address
            pool = pool_of(url, timeout=TIMEOUT_S, retries=False)
            status = pool.request("POST", url, json={"text": masked(text)}, redirect=False).status
            if status < 300:
                return
            why = f"HTTP {status}"
        except (urllib3.exceptions.HTTPError, ConfigError) as error:
            why = type(error).__name__
    log.warning("the webhook (%s) could not be called: %s", VARIABLE, why)
