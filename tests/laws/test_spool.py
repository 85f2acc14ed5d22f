"""Tensors that wait, in memory or in a file."""

from __future__ import annotations

import resource

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_engine.aggregation.spool import Spool
from fl_engine.core.errors import EnvironmentFailure

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=8),
    st.integers(0, 200),
    st.data(),
)
def test_tensors_from_memory_and_file_are_equal(
    tensors: list[tuple[torch.dtype, list[int]]], held_bytes: int, data: st.DataObject
) -> None:
    spool, put = Spool(held_bytes), []
    for dtype, shape in tensors:
        one = {"w": (torch.randn(shape) * 100).to(dtype), "b": torch.arange(3)}
        assert spool.put(one) == len(put)
        put.append(one)
    for entry, one in enumerate(put):
        found = spool.get(entry)
        assert found.keys() == one.keys()
        for name, tensor in one.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
            if tensor.dim():
                first = data.draw(st.integers(0, len(tensor)))
                last = data.draw(st.integers(first, len(tensor) + 1))
                assert torch.equal(spool.rows(entry, name, first, last), tensor[first:last])


def test_only_so_much_stays_in_memory() -> None:
    spool, tensor = Spool(held_bytes=1000), torch.zeros(100)
    for _ in range(10):
        spool.put({"w": tensor})
    assert sum(spool.get(entry)["w"] is tensor for entry in range(10)) == 2


def test_file_that_cannot_grow_names_tmpdir() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(EnvironmentFailure, match="TMPDIR"):
            Spool(held_bytes=0).put({"w": torch.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
