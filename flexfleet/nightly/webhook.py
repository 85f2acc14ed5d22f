"""Tells a chat or a pager that a night has failed."""

from __future__ import annotations

import logging
import os
import time

import urllib3

log = logging.getLogger("flexfleet")

VARIABLE = "FLEXFLEET_WEBHOOK"
"""Environment variable with the address, which is a secret: anyone who knows it can post."""
WAIT_S = 10.0
AGAIN_S = (2.0, 8.0)
"""Seconds to wait before each further try."""


def call(text: str) -> None:
    """Posts `{"text": text}`, which Slack, Mattermost and others take, if the environment names an address. An error
    becomes a warning without the address, so that it does not hide the night's own outcome."""
    url = os.environ.get(VARIABLE)
    if not url:
        return
    for seconds in (0.0, *AGAIN_S):
        time.sleep(seconds)
        try:  # urllib3's own retries would write the address into the log
            answer = urllib3.request("POST", url, json={"text": text}, timeout=WAIT_S, retries=False, redirect=False)
            why = "" if answer.status < 300 else f"HTTP {answer.status}"
        except (urllib3.exceptions.HTTPError, ValueError) as error:
            why = type(error).__name__
        if not why:
            return
    log.warning("the webhook (%s) was not told: %s", VARIABLE, why)
