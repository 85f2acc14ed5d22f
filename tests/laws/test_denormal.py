"""Denormal numbers count as zero in all that a run computes. That all backends give the same bits of them is in
`tests.conformance.backend_suite`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch

from fl_engine.aggregation.averaging import StreamingMean
from fl_engine.backends.in_process import prepare_process
from fl_engine.core.types import FULL, Axis, ParamLayout, Slot
from fl_engine.storage.overlapping import overlapped
from fl_engine.training.numerics import flushes_now


@pytest.fixture(params=[True, False], ids=["zero", "kept"])
def flush(request: pytest.FixtureRequest) -> bool:
    prepare_process(("cpu",))
    torch.set_flush_denormal(request.param)
    return bool(request.param)


def test_computing_threads_inherit_the_denormal_setting(flush: bool) -> None:
    class Store:
        at_once: ClassVar[int] = 4

    assert flushes_now() is flush
    with ThreadPoolExecutor(2) as threads:  # as of evaluation and training on several devices
        assert list(threads.map(lambda _: flushes_now(), range(4))) == [flush] * 4
    store: Any = Store()
    assert list(overlapped(store, 0, lambda _: flushes_now(), range(4))) == [flush] * 4


def denormal(*shape: int) -> torch.Tensor:
    """2^-130 everywhere, made of its bits: to fill a tensor with it would give zeros where it counts as zero."""
    return torch.full(shape, 1 << 19, dtype=torch.int32).view(torch.float32)


def test_server_averages_obey(flush: bool) -> None:
    """In double precision these are normal numbers, so they become zero where they go back to float32."""
    average = StreamingMean({"w": torch.ones(3)}, ParamLayout({"g": 3}, {"w": Slot("b", (Axis("g"),))}))
    for weight in (1.0, 3.0):
        average.add({"w": denormal(3)}, FULL, weight)
    assert bool(average.result()["w"].view(torch.int32).any()) is not flush
