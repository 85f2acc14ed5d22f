"""Signals while a run is going on."""

from __future__ import annotations

import signal
import time

import pytest
from pydantic import BaseModel, model_serializer
from pydantic_core import PydanticSerializationError

from fl_engine.core.errors import Stopped
from flexfleet.files import signals
from flexfleet.files.signals import stopping_at_once

ENDS = [(signal.SIGTERM, Stopped), (signal.SIGINT, KeyboardInterrupt)]
"""Each signal, and what ends the run then."""


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "AGAIN_S", 0.05)


@pytest.mark.parametrize(("number", "raised"), ENDS)
def test_an_interruption_that_a_library_makes_an_error_of_comes_again(
    number: signal.Signals, raised: type[BaseException]
) -> None:
    class Section(BaseModel):
        @model_serializer
        def interrupted(self) -> str:
            signal.raise_signal(number)
            return ""

    with pytest.raises(raised), stopping_at_once():
        with pytest.raises(PydanticSerializationError, match="KeyboardInterrupt"):
            Section().model_dump()
        time.sleep(30)
        pytest.fail("it went on")
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


@pytest.mark.parametrize(("number", "raised"), ENDS)
def test_the_end_that_an_interruption_brings_is_not_disturbed(
    number: signal.Signals, raised: type[BaseException]
) -> None:
    ended = False
    with pytest.raises(raised), stopping_at_once():
        try:
            signal.raise_signal(number)
        finally:
            time.sleep(0.3)  # as long as MLflow takes to be told
            ended = True
    assert ended
