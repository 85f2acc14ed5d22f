"""Signals during a run."""

from __future__ import annotations

import signal
import time

import pytest

from fl_engine.core.errors import Stopped
from flexfleet.files.signals import stopping_at_once


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, Stopped), (signal.SIGINT, KeyboardInterrupt)])
def test_signal_ends_what_is_inside_with_its_own_error(number: signal.Signals, raised: type[BaseException]) -> None:
    ended = False
    with pytest.raises(raised, match="resume it"), stopping_at_once("resume it"):
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(signal.SIGTERM)  # does not disturb the end
            time.sleep(0.01)
            ended = True
    assert ended
