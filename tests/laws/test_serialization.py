"""A file of tensors has the bytes that the safetensors package writes."""

from __future__ import annotations

import hashlib

import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.core.types import Params
from fl_engine.storage.store import RANKS, digest, encode, laid_out, sha256

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(lambda n: n != "__metadata__")


def of_package(given: Params) -> bytes:
    value: bytes = safetensors.torch.save(given, {} if given else None)
    return value


@st.composite
def tensors(draw: st.DrawFn) -> Params:
    """Of any type, shape and name."""
    found: Params = {}
    for name in draw(st.sets(NAMES, max_size=6)):
        dtype = draw(st.sampled_from(list(RANKS)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        count = dtype.itemsize * int(torch.Size(shape).numel())
        memory = draw(st.binary(min_size=count, max_size=count))
        if dtype == torch.bool:
            memory = bytes(byte % 2 for byte in memory)
        whole = torch.frombuffer(bytearray(memory), dtype=dtype) if count else torch.empty(0, dtype=dtype)
        found[name] = whole.reshape(shape)
    return found


@settings(max_examples=200)
@given(given=tensors())
def test_a_file_is_the_one_that_the_safetensors_package_writes(given: Params) -> None:
    expected = of_package(given)
    value = laid_out(given)
    assert bytes(value) == encode(given) == expected
    assert len(value) == len(expected)
    assert sha256(value) == sha256(expected) == hashlib.sha256(expected).hexdigest()
    assert digest("md5", value) == hashlib.md5(expected, usedforsecurity=False).digest()


def test_slices_and_shared_memory_are_written_as_copies() -> None:
    whole = torch.arange(24.0).view(4, 6)
    cut = {"rows": whole[1:3], "columns": whole[:, 1:3], "turned": whole.T, "whole": whole, "again": whole}
    assert encode(cut) == of_package({name: tensor.clone().contiguous() for name, tensor in cut.items()})
