"""FEMNIST from HDF5 files in TensorFlow Federated's format."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.core.errors import DataError
from fl_engine.core.samples import Data
from fl_engine.data.downloads import Remote
from fl_engine.data.files import digest
from fl_engine.datasets import femnist_tff
from fl_engine.testing.datasets import DatasetSuite

h5py = pytest.importorskip("h5py", reason="h5py is not installed: pip install 'flexfleet[hdf5]'")

WRITERS = {"f3408_26": range(0, 31), "f0000_14": range(20, 62)}
"""Map each writer to its labels. Files list writers by name."""


def images(writer: str, count: int, part: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([part, *writer.encode()]).integers(0, 256, (count, 28, 28)).astype(np.uint8)


def write(root: Path, part: int, writers: dict[str, Any] = WRITERS, column: bool = False) -> Path:
    path = root / femnist_tff.FILES[part]
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for writer, labels in writers.items():
            group = file.create_group(f"examples/{writer}")
            group["pixels"] = images(writer, len(labels), part).astype(np.float32) / np.float32(255)
            label = np.array(labels, dtype=np.int32)
            group["label"] = label[:, None] if column else label
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for part in (0, 1):
        write(tmp_path, part)
    return tmp_path


def test_it_reads_what_was_written(tmp_path: Path) -> None:
    for part in (0, 1):
        write(tmp_path, part, column=part == 1)
    data = femnist_tff.load(tmp_path)
    for part, (x, y) in enumerate(((data.train_x, data.train_y), (data.test_x, data.test_y))):
        assert y.tolist() == [*range(20, 62), *range(0, 31)], "f0000_14 comes first"
        assert np.array_equal(x[:42, 0], images("f0000_14", 42, part))
        assert np.array_equal(x[42:, 0], images("f3408_26", 31, part))
    assert data.natural_client is not None
    assert data.natural_client.tolist() == [0] * 42 + [1] * 31


BROKEN: dict[str, Callable[[Any], object]] = {
    "no examples": lambda f: f.move("examples", "others"),
    "no writers": lambda f: (f.pop("examples"), f.create_group("examples")),
    "no label": lambda f: f["examples/f0000_14"].pop("label"),
    "a small image": lambda f: put(f, "pixels", np.zeros((42, 28, 27), "f4")),
    "more than fits": lambda f: huge(f),
    "255": lambda f: put(f, "pixels", np.full((42, 28, 28), 255, "f4")),
    "not a number": lambda f: put(f, "pixels", np.full((42, 28, 28), np.nan, "f4")),
    "a label too few": lambda f: put(f, "label", np.zeros(41, "i4")),
    "a label too high": lambda f: put(f, "label", np.full(42, 62, "i4")),
    "another writer": lambda f: f.move("examples/f0000_14", "examples/x"),
}


def put(file: Any, part: str, values: Any) -> None:
    del file[f"examples/f0000_14/{part}"]
    file[f"examples/f0000_14/{part}"] = values


def huge(file: Any) -> None:
    """Create a data set that declares a petabyte and occupies nothing."""
    del file["examples/f0000_14/pixels"]
    file.create_dataset("examples/f0000_14/pixels", (2**40, 28, 28), "f4", chunks=(1, 28, 28))


@pytest.mark.parametrize("how", BROKEN.values(), ids=list(BROKEN))
def test_the_damaged_file_is_named(root: Path, how: Callable[[Any], object]) -> None:
    with h5py.File(root / femnist_tff.FILES[1], "a") as file:
        how(file)
    with pytest.raises(DataError) as error:
        femnist_tff.load(root)
    assert "fed_emnist_test.h5" in str(error.value)


@settings(max_examples=30)
@given(share=st.floats(0, 0.999))
def test_a_file_that_was_cut_is_refused(tmp_path_factory: pytest.TempPathFactory, share: float) -> None:
    root = tmp_path_factory.mktemp("cut")
    for part in (0, 1):
        path = write(root, part)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(DataError):
        femnist_tff.load(root)


def test_fetch_checks_and_unpacks_the_archive(root: Path, tmp_path: Path) -> None:
    archive = tmp_path / "there.tar.bz2"
    with tarfile.open(archive, "w:bz2") as tar:
        for file in femnist_tff.FILES:
            tar.add(root / file, Path(file).name)
    remote = Remote(archive.as_uri(), archive.name, f"sha256:{digest(archive)}")
    with pytest.raises(DataError):
        femnist_tff.load(tmp_path / "copy")
    femnist_tff.fetch(tmp_path / "copy", remote)
    assert torch.equal(femnist_tff.load(tmp_path / "copy").train_x, femnist_tff.load(root).train_x)
    with pytest.raises(DataError):
        femnist_tff.fetch(tmp_path / "other", Remote(remote.url, remote.filename, f"sha256:{'0' * 64}"))


class TestFemnistByTff(DatasetSuite):
    @pytest.fixture(scope="module")
    def load(self, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Data]:
        root = tmp_path_factory.mktemp("tff")
        for part in (0, 1):
            write(root, part)
        return partial(femnist_tff.load, root)
