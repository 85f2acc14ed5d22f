"""Tells a chat or a pager that a night has failed."""

from __future__ import annotations

import logging
import os
import time

import urllib3

log = logging.getLogger("flexfleet")

VARIABLE = "FLEXFLEET_WEBHOOK"
"""Of the environment: the address, which is a secret, since whoever knows it may post."""
WAIT_S = 10.0
AGAIN_S = (2.0, 8.0)
"""Before each further try."""


def call(text: str) -> None:
    """Posts `{"text": text}`, as Slack, Mattermost and others take it, where the environment names an address. What
    goes wrong is a warning that does not say the address: it must not hide what was to be told."""
    url = os.environ.get(VARIABLE)
    if not url:
        return
    for seconds in (0.0, *AGAIN_S):
        time.sleep(seconds)
        try:  # urllib3's own tries would say the address in the log
            answer = urllib3.request("POST", url, json={"text": text}, timeout=WAIT_S, retries=False, redirect=False)
            why = "" if answer.status < 300 else f"HTTP {answer.status}"
        except (urllib3.exceptions.HTTPError, ValueError) as error:
            why = type(error).__name__
        if not why:
            return
    log.warning("the webhook (%s) was not told: %s", VARIABLE, why)
