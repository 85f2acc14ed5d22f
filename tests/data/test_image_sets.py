"""EMNIST, CIFAR-100, FEMNIST and Tiny ImageNet, on small files of their official formats."""

from __future__ import annotations

import gzip
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_engine.core.errors import DataError
from fl_engine.core.samples import Data
from fl_engine.data.downloads import RemoteFile
from fl_engine.data.transforms import byte_statistics, fingerprint
from fl_engine.datasets import femnist, tiny_imagenet
from fl_engine.datasets.cifar import CIFAR100
from fl_engine.datasets.mnist import EMNIST_BALANCED
from fl_engine.testing.datasets import DatasetSuite
from tests.data import made

SPLIT = replace(EMNIST_BALANCED, classes=5, samples=(30, 10))
CIFAR = replace(CIFAR100, samples=(200, 100))
WRITERS = ({f"f{number:04}_41": 10 for number in range(62)}, {"f0999_1": 9})


# --------------------------------------------------------------------------------------------------- statistics
def test_byte_statistics_are_those_of_numpy_per_channel() -> None:
    images = np.random.default_rng(0).integers(0, 256, (10, 2, 5, 4), dtype=np.uint8)
    images[:, 1] //= 3
    mean, std = byte_statistics(images)
    np.testing.assert_allclose(mean, images.mean((0, 2, 3)) / 255, atol=5.1e-5)
    np.testing.assert_allclose(std, images.std((0, 2, 3)) / 255, atol=5.1e-5)
    assert byte_statistics(np.full((2, 1, 3, 3), 255, dtype=np.uint8)) == ((1.0,), (1.0,))


# ------------------------------------------------------------------------------------------------------- EMNIST
def test_emnist_stands_upright(tmp_path: Path) -> None:
    made.idx_files(tmp_path, SPLIT.files, (30, 10), 5)
    data = SPLIT.load(tmp_path)
    assert (data.train_x.shape, data.test_x.shape, data.task.outputs) == ((30, 1, 28, 28), (10, 1, 28, 28), 5)
    content = gzip.decompress((tmp_path / SPLIT.files[0]).read_bytes())[16:]
    image = data.train_x[7, 0]
    # The file goes down the columns: its bytes 1, 2, ... are below the first one.
    assert [int(image[down, 0]) for down in range(3)] == list(content[7 * 784 : 7 * 784 + 3])
    assert int(image[2, 5]) == content[7 * 784 + 5 * 28 + 2]


def test_emnist_is_unpacked_from_the_archive_of_all_splits(tmp_path: Path) -> None:
    made.idx_files(tmp_path, SPLIT.files, (30, 10), 5)
    path = tmp_path / "gzip.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../evil", "evil")
        archive.writestr("gzip/emnist-letters-mapping.txt", "1 65 97")
        for file in SPLIT.files:
            archive.write(tmp_path / file, f"gzip/{Path(file).name}")
    copy = tmp_path / "a" / "copy"
    replace(SPLIT, archive=made.remote(path)).fetch(copy)
    assert fingerprint(SPLIT.load(copy)) == fingerprint(SPLIT.load(tmp_path))
    found = {path.relative_to(copy).as_posix() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert found == {*SPLIT.files, "emnist/gzip.zip"}
    replace(SPLIT, archive=RemoteFile("file:///nowhere/gzip.zip", "md5:0")).fetch(copy)  # all files exist


# ---------------------------------------------------------------------------------------------------- CIFAR-100
def test_cifar100_reads_the_fine_labels(tmp_path: Path) -> None:
    made.cifar100_files(tmp_path, (200, 100))
    data = CIFAR.load(tmp_path)
    assert (data.train_x.shape, data.test_x.shape) == ((200, 3, 32, 32), (100, 3, 32, 32))
    assert data.train_y.tolist() == [*range(100), *range(100)]
    record = (tmp_path / CIFAR.files[0]).read_bytes()[3 * 3074 : 4 * 3074]
    assert [int(data.train_x[3, colour, 1, 2]) for colour in range(3)] == [record[2 + c * 1024 + 34] for c in range(3)]


# ------------------------------------------------------------------------------------------------------ FEMNIST
@pytest.fixture(scope="module")
def leaf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...]]:
    root = tmp_path_factory.mktemp("femnist")
    return root, made.femnist_files(root, *(made.femnist_file(writers, at) for at, writers in enumerate(WRITERS)))


def test_femnist_reads_the_json_of_leaf(leaf: tuple[Path, tuple[str, ...]]) -> None:
    data = femnist.load(*leaf)
    assert (len(data.train_x), len(data.test_x)) == (62 * 9 + 9, 62)
    assert data.natural_client is not None
    assert data.natural_client.bincount().tolist() == [9] * 63
    assert data.train_y.bincount().tolist() == [18, *[9] * 61], "the last writer's character is that of the first"
    image = torch.tensor(made.femnist_file(WRITERS[0])["user_data"]["f0000_41"]["x"][0]).mul(255).round()
    assert any(torch.equal(image.view(28, 28), each.float()) for each in torch.cat((data.train_x, data.test_x))[:, 0])
    assert not (set(map(bytes, data.train_x.numpy())) & set(map(bytes, data.test_x.numpy())))


# ------------------------------------------------------------------------------------------------ Tiny ImageNet
@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tiny")
    made.tiny_imagenet_files(root)
    return root


@pytest.fixture
def own(tiny: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage; the folder of the set."""
    return Path(shutil.copytree(tiny / "tiny-imagenet-200", tmp_path / "tiny-imagenet-200"))


def test_tiny_imagenet_reads_pictures_and_their_classes(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = tiny_imagenet.load(tiny)
    assert (data.train_x.shape, data.test_x.shape, data.task.outputs) == ((12, 3, 64, 64), (6, 3, 64, 64), 3)
    assert data.train_y.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert data.test_y.tolist() == [0, 1, 2, 0, 1, 2]
    assert "3 of 200 classes" in caplog.text
    # Pictures by name, and the file's own colours, but for what JPEG takes: the middle of a patch.
    rng = np.random.default_rng(int(made.WNIDS[1][1:]) + 3)
    patches = torch.from_numpy(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).permute(2, 0, 1)
    assert (data.train_x[7, :, 3::8, 3::8].float() - patches.float()).abs().mean() < 8
    grey = data.train_x[1]
    assert torch.equal(grey[0], grey[1]) and torch.equal(grey[0], grey[2])


def test_tiny_imagenet_refuses_a_missing_picture(own: Path) -> None:
    lost = own / "train" / made.WNIDS[2] / "images" / f"{made.WNIDS[2]}_3.JPEG"
    lost.unlink()
    with pytest.raises(DataError):
        tiny_imagenet.load(own.parent)
    shutil.copy(own / "train" / made.WNIDS[0] / "images" / f"{made.WNIDS[0]}_0.JPEG", lost)
    (own / "val" / "images" / "val_201.JPEG").unlink()
    with pytest.raises(DataError):
        tiny_imagenet.load(own.parent)


def test_tiny_imagenet_unpacks_only_its_own_members(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny-imagenet-200.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("../evil", "tiny-imagenet-200/../evil", "tiny-imagenet-200/test/images/test_0.JPEG"):
            archive.writestr(name, "evil")
        for file in sorted(tiny.rglob("*.*")):
            archive.write(file, file.relative_to(tiny).as_posix())
    copy = tmp_path / "a" / "copy"
    tiny_imagenet.fetch(copy, made.remote(path, "sha256"))
    assert fingerprint(tiny_imagenet.load(copy)) == fingerprint(tiny_imagenet.load(tiny))
    found = {path.relative_to(copy) for path in (tmp_path / "a").rglob("*.*") if path.is_file()}
    assert found == {path.relative_to(tiny) for path in tiny.rglob("*.*")} | {Path(path.name)}
    lost = next((copy / "tiny-imagenet-200" / "train").rglob("*.JPEG"))
    lost.unlink()
    tiny_imagenet.fetch(
        copy, replace(made.remote(path, "sha256"), url=f"file:///nowhere/{path.name}")
    )  # from the archive
    assert lost.is_file()
    (copy / path.name).unlink()
    tiny_imagenet.fetch(copy, RemoteFile(f"file:///nowhere/{path.name}", "md5:0"))  # as someone else unpacked it
    path.write_bytes(b"no archive")
    with pytest.raises(DataError):
        tiny_imagenet.fetch(tmp_path / "b", made.remote(path, "sha256"))


# ------------------------------------------------------------------------------------------- the shared suite
class TestMadeSets(DatasetSuite):
    """Data sets that compute their own mean and deviation."""

    @pytest.fixture(scope="module", params=["emnist", "femnist", "tiny_imagenet"])
    def load(
        self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, leaf: Any, tiny: Path
    ) -> Callable[[], Data]:
        if request.param == "femnist":
            return partial(femnist.load, *leaf)
        if request.param == "tiny_imagenet":
            return partial(tiny_imagenet.load, tiny)
        root = tmp_path_factory.mktemp("emnist")
        made.idx_files(root, SPLIT.files, (30, 10), 5)
        return partial(SPLIT.load, root)
