"""What a person gives a partition: a map of clients to samples, and an array of features."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fl_engine.core.errors import PartitionError
from fl_engine.data.clusters import features_of
from fl_engine.data.partition import read_map
from tests.data.sensors import npy
from tests.fuzz.mutations import answer, damaged, json_like, law

SAMPLES = 12
MAP = {"clients": [[0, 3, 6, 9], [1, 4], [2, 5, 7, 8, 10, 11]]}


def test_partition_map_gives_each_sample_a_client(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text(json.dumps(MAP))
    assert read_map(path, SAMPLES).tolist() == [0, 1, 2, 0, 1, 2, 0, 2, 2, 0, 2, 2]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[[0, 1]]",
        '{"clients": [[0, 1, 2], []]}',
        '{"clients": [[0, 1], [2]], "clients": [[0], [1, 2]]}',
        '{"clients": [[0, 1, 2]], "proxy": [3]}',
        '{"clients": [[0, 1, 2], [2, 3]]}',
    ],
)
def test_other_maps_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text(text)
    for each in (path, tmp_path / "none.json", tmp_path / "no\0ne.json"):
        with pytest.raises(PartitionError):
            read_map(each, SAMPLES)


@law(60)
@given(json_like(MAP) | damaged(json.dumps(MAP).encode()))
@example(b'{"clients": [[' + b"9" * 5000 + b"]]}")
@example(b"[" * 100_000)
def test_partition_map_is_complete_or_its_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "map.json"
    path.write_bytes(content)
    found = answer(lambda: read_map(path, SAMPLES), "map.json", kind=PartitionError)
    if found is not None:
        assert found.shape == (SAMPLES,) and found.min() == 0
        assert set(found.tolist()) == set(range(found.max() + 1))


WHOLE = npy(np.arange(3.0 * SAMPLES, dtype=np.float32).reshape(SAMPLES, 3))


@law(60)
@given(damaged(WHOLE) | st.binary(max_size=200))
@example(WHOLE.replace(b"(12, 3)", b"(12,10**9)"))
@example(WHOLE.replace(b"(12, 3), }     ", b"(12, 999999999)}"))
@example(WHOLE.replace(b"<f4", b"|O8"))
@example(WHOLE[:128].replace(b"(12, 3), }" + b" " * 20, b"(%d, 0), }" % 2**70))
def test_features_are_whole_or_their_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "features.npy"
    path.write_bytes(content)
    found = answer(lambda: features_of(path, SAMPLES), "features.npy", kind=PartitionError)
    if found is not None:
        assert len(found) == SAMPLES
