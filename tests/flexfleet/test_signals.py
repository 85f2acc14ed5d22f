"""What the rounds of a run do not wait for once they are asked to stop."""

from __future__ import annotations

import signal
import time

import pytest
from pydantic import BaseModel, model_serializer
from pydantic_core import PydanticSerializationError

from fl_engine.core.errors import Stopped
from flexfleet.files import signals
from flexfleet.files.signals import brief_once_stopped, stop_on_signals, stopping_at_once

ENDS = [(signal.SIGTERM, Stopped), (signal.SIGINT, KeyboardInterrupt)]
"""Each signal, and what ends the run then."""


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "GRACE_S", 0.05)
    monkeypatch.setattr(signals, "AGAIN_S", 0.05)


@pytest.mark.parametrize(("number", "raised"), ENDS)
def test_a_wait_ends_soon_after_a_signal(number: signal.Signals, raised: type[BaseException]) -> None:
    with pytest.raises(raised), stop_on_signals(), brief_once_stopped():
        signal.raise_signal(number)
        time.sleep(30)
        pytest.fail("it waited")


@pytest.mark.parametrize(("number", "raised"), ENDS)
def test_a_wait_that_begins_after_a_signal_is_short(number: signal.Signals, raised: type[BaseException]) -> None:
    with pytest.raises(raised), stop_on_signals():
        signal.raise_signal(number)
        with brief_once_stopped():
            time.sleep(30)
        pytest.fail("it waited")


def test_what_is_done_in_time_is_not_disturbed_and_the_run_knows_that_it_shall_stop() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with stop_on_signals() as asked:
        with brief_once_stopped():
            signal.raise_signal(signal.SIGINT)
        time.sleep(0.2)  # as long as a client trains
        assert asked() and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_second_ctrl_c_ends_a_wait_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "GRACE_S", 1000.0)
    with pytest.raises(KeyboardInterrupt), stop_on_signals(), brief_once_stopped():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it went on")


def test_a_run_within_a_run_leaves_the_outer_one_its_own() -> None:
    with pytest.raises(Stopped), stop_on_signals():
        with stop_on_signals():
            pass
        with brief_once_stopped():
            signal.raise_signal(signal.SIGTERM)
            time.sleep(30)
    assert not signals._running


def test_a_wait_within_a_wait_ends_with_the_outer_one() -> None:
    with pytest.raises(Stopped), stop_on_signals(), brief_once_stopped():
        with brief_once_stopped():
            signal.raise_signal(signal.SIGTERM)
        time.sleep(30)
        pytest.fail("it waited")


def test_without_rounds_nothing_changes() -> None:
    with brief_once_stopped():
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


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
