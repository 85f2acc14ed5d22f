"""Official file formats on small files, downloads, padding and subsets."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import logging
import os
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fl_engine.core.errors import DataError, EnvironmentFailure
from fl_engine.core.samples import Data
from fl_engine.data import downloads, files
from fl_engine.data.downloads import RemoteFile
from fl_engine.datasets import data_root, digits, fingerprint, pad, subset
from fl_engine.datasets.cifar import CIFAR10
from fl_engine.datasets.mnist import FASHION_MNIST, MNIST
from fl_engine.tasks import Classification
from fl_engine.testing.kinds import tiny_boxes
from tests.data import made
from tests.harness.web import Request, serving

RECORDS = 20
FASHION = replace(FASHION_MNIST, checksums={}, samples=(30, 10))
CIFAR = replace(CIFAR10, checksums={}, samples=(5 * RECORDS, RECORDS))


def md5(content: bytes) -> str:
    return "md5:" + hashlib.md5(content).hexdigest()


def tiny(samples: int = 100, side: int = 5, natural: bool = False) -> Data:
    """Return data of 4 classes whose pixel values encode the sample."""
    x = (torch.arange(samples) % 250 + 1).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, side, side).contiguous()
    y = torch.arange(samples) % 4
    groups = torch.arange(samples) // 10 if natural else None
    return Data("tiny", Classification(4), x, y, x[:40].clone(), y[:40].clone(), (0.5,), (0.25,), groups)


# ------------------------------------------------------------------------------------------- Fashion-MNIST
@pytest.fixture
def fashion(tmp_path: Path) -> Path:
    made.idx_files(tmp_path, FASHION.files, (30, 10), 10)
    return tmp_path


def test_fashion_mnist_reads_what_the_files_say(fashion: Path) -> None:
    data = FASHION.load(fashion)
    assert data.train_x.shape == (30, 1, 28, 28)
    assert data.test_x.shape == (10, 1, 28, 28)
    assert data.test_y.tolist() == list(range(10))
    pixels = gzip.decompress((fashion / "fashion-mnist" / "train-images-idx3-ubyte.gz").read_bytes())[16:]
    assert data.train_x.numpy().tobytes() == pixels


def test_mnist_names_missing_files_and_the_cure(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        MNIST.load(tmp_path)
    assert error.value.code == "data" and "flexfleet fetch mnist" in str(error.value)


def test_mnist_fetch_downloads_each_file_and_checks_it(fashion: Path, tmp_path: Path) -> None:
    there = fashion / "fashion-mnist"
    checksums = {path.name: md5(path.read_bytes()) for path in there.iterdir()}
    published = replace(FASHION, url=there.as_uri(), checksums=checksums)
    published.fetch(tmp_path / "copy")
    assert fingerprint(published.load(tmp_path / "copy")) == fingerprint(FASHION.load(fashion))
    with pytest.raises(DataError):
        replace(published, checksums=dict.fromkeys(checksums, md5(b"other"))).fetch(tmp_path / "other")


# ------------------------------------------------------------------------------------------------ CIFAR-10
@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    made.cifar10_files(tmp_path, RECORDS)
    return tmp_path


def batch(root: Path, name: str) -> Path:
    return root / "cifar10" / "cifar-10-batches-bin" / name


def test_cifar10_reads_what_the_files_say(cifar: Path) -> None:
    data = CIFAR.load(cifar)
    assert data.train_x.shape == (5 * RECORDS, 3, 32, 32)
    assert data.test_x.shape == (RECORDS, 3, 32, 32)
    assert data.train_y[:12].tolist() == [*range(10), 0, 1]
    # Record 1 of batch 3: one label, then 1,024 bytes each of red, green and blue, row by row.
    record = batch(cifar, "data_batch_3.bin").read_bytes()[3073 : 2 * 3073]
    image = data.train_x[2 * RECORDS + 1]
    assert int(image[0, 0, 0]) == record[1]
    assert int(image[1, 0, 5]) == record[1 + 1024 + 5]
    assert int(image[2, 31, 30]) == record[1 + 2048 + 31 * 32 + 30]


def test_cifar10_checks_the_official_checksums(cifar: Path) -> None:
    with pytest.raises(DataError):
        replace(CIFAR, checksums=CIFAR10.checksums).load(cifar)


def test_unreadable_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        files.read(tmp_path)
    os.mkfifo(tmp_path / "pipe")  # nobody writes into it: to read it would wait without end
    with pytest.raises(DataError):
        files.read(tmp_path / "pipe")


# ------------------------------------------------------------------------------------------------- digits
def test_digits_are_the_same_on_every_machine(tmp_path: Path) -> None:
    data = digits.load(tmp_path)
    assert (len(data.train_x), len(data.test_x)) == (1438, 359)
    assert (int(data.train_x.min()), int(data.train_x.max())) == (0, 255)
    assert fingerprint(data) == "2f49af9d730c20fca5f4b7950528b680ba38d4f55a65c04f577698ba74382eda"
    every, test = torch.cat((data.train_y, data.test_y)).bincount(), data.test_y.bincount()
    assert (test - every / 5).abs().max() < 1


# ---------------------------------------------------------------------------------------------- downloads
def test_download_keeps_a_correct_file_and_logs_progress(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = bytes(4 * downloads.CHUNK)
    (tmp_path / "here").write_bytes(content)
    remote = RemoteFile((tmp_path / "here").as_uri(), md5(content))
    with caplog.at_level(logging.INFO):
        path = downloads.download(remote, tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "here"
    assert path.read_bytes() == content
    assert [message.split(" %")[0].split()[-1] for message in caplog.messages] == ["25", "50", "75", "100"]
    (tmp_path / "here").unlink()
    assert downloads.download(remote, tmp_path / "new" / "folder") == path  # it is there: no address is opened


def test_download_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "here").write_bytes(b"mine")
    with pytest.raises(DataError):
        downloads.download(RemoteFile("file:///nowhere/here", md5(b"right")), tmp_path)
    assert (tmp_path / "here").read_bytes() == b"mine"


@pytest.fixture
def server() -> Iterator[str]:
    """The path is the status, the Content-Length and a name; the body is always `whole`."""

    def answer(request: Request) -> None:
        status, length, _ = request.path[1:].split("/")
        request.respond(int(status), b"whole", {"Content-Length": length or None})

    with serving(answer) as address:
        yield address


def test_download_failures_are_errors_and_leave_no_file(server: str, tmp_path: Path) -> None:
    for length in ("5", "", "five", "-5"):
        remote = RemoteFile(f"{server}/200/{length}/whole{length}", md5(b"whole"))
        assert downloads.download(remote, tmp_path / "new").read_bytes() == b"whole"
    for path, raised in (
        ("403/", EnvironmentFailure),
        ("503/5", EnvironmentFailure),
        ("200/", DataError),
        ("200/9", EnvironmentFailure),
    ):
        with pytest.raises(raised):
            downloads.download(RemoteFile(f"{server}/{path}/here", md5(b"right")), tmp_path / "other")
    assert not any((tmp_path / "other").iterdir())


def archive(root: Path, to: Path) -> RemoteFile:
    """Write an archive in the official layout, with an additional member `../evil`."""
    with tarfile.open(to, "w:gz") as tar:
        evil = tarfile.TarInfo("../evil")
        evil.size = 4
        tar.addfile(evil, io.BytesIO(b"evil"))
        for file in CIFAR.files:
            tar.add(root / file, file.removeprefix("cifar10/"))
    return RemoteFile(to.as_uri(), md5(to.read_bytes()))


def test_fetch_cifar10_unpacks_the_batches_and_nothing_else(cifar: Path, tmp_path: Path) -> None:
    remote, copy = archive(cifar, tmp_path / "there.tar.gz"), tmp_path / "a" / "copy"
    replace(CIFAR, archive=remote).fetch(copy)
    assert fingerprint(CIFAR.load(copy)) == fingerprint(CIFAR.load(cifar))
    expected = {copy / file for file in CIFAR.files} | {copy / "cifar10" / remote.filename}
    assert {path for path in (tmp_path / "a").rglob("*") if path.is_file()} == expected
    (copy / "cifar10" / remote.filename).unlink()
    replace(CIFAR, archive=replace(remote, url="file:///nowhere")).fetch(copy)  # all files exist: nothing to download


def test_extract_refuses_links_and_damage(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(link)
    with pytest.raises(DataError):
        downloads.extract(tmp_path / "a.tar", {"link": tmp_path / "out"})
    (tmp_path / "b.tar").write_bytes(b"no archive")
    with pytest.raises(DataError):
        downloads.extract(tmp_path / "b.tar", {"x": tmp_path / "out"})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("number", "raised"), [(errno.ENOSPC, EnvironmentFailure), (errno.ECONNRESET, OSError)])
def test_full_disk_and_broken_network_are_different_errors(
    number: int, raised: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(raised), files.replacing(tmp_path / "file"):
        raise OSError(number, os.strerror(number))
    assert not any(tmp_path.iterdir())


def test_data_root_is_argument_then_variable_then_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXFLEET_DATA", "/from/variable")
    assert data_root("/from/argument") == Path("/from/argument")
    assert data_root() == Path("/from/variable")
    monkeypatch.delenv("FLEXFLEET_DATA")
    assert data_root() == Path.home() / ".cache" / "flexfleet" / "data"


# ------------------------------------------------------------------------- padding, subsets, fingerprint
def test_pad_centres_on_black() -> None:
    data = tiny(side=5)
    padded = pad(data, 8)
    assert padded.input_shape == (1, 8, 8)
    assert torch.equal(padded.train_x[:, :, 1:6, 1:6], data.train_x)
    assert int(padded.test_x.long().sum()) == int(data.test_x.long().sum())
    assert fingerprint(pad(data, 5)) == fingerprint(data)
    with pytest.raises(DataError):
        pad(data, 4)


@pytest.mark.parametrize("side", [16, 17, 33])
def test_padding_moves_boxes_with_their_objects(side: int) -> None:
    """Rectangles are 0 or 255 in grey noise. Padding is 0 too, so only images with one white rectangle are checked."""
    data = tiny_boxes()
    padded = pad(data, side)
    for x, y, before in ((padded.train_x, padded.train_y, data.train_y), (padded.test_x, padded.test_y, data.test_y)):
        assert torch.equal(y[..., 0], before[..., 0]) and not y[y[..., 0] < 0][:, 1:].any()
        alone = ((y[..., 0] >= 0).sum(1) == 1) & (y[:, 0, 0] == 1)
        assert alone.sum() > 2
        for image, box in zip(x[alone, 0], y[alone, 0, 1:] * side, strict=True):
            rows, columns = (image == 255).nonzero(as_tuple=True)
            width, height = columns.max() - columns.min() + 1, rows.max() - rows.min() + 1
            drawn = (columns.min() + width / 2, rows.min() + height / 2, width, height)
            assert box.tolist() == pytest.approx([float(each) for each in drawn], abs=1e-4)


def test_subset_is_stratified_and_keeps_the_writers() -> None:
    data = tiny(natural=True)
    small = subset(data, 20, 8, seed=3)
    assert small.train_y.bincount().tolist() == [5, 5, 5, 5]
    assert small.test_y.bincount().tolist() == [2, 2, 2, 2]
    sample = small.train_x[:, 0, 0, 0].long() - 1
    assert sample.tolist() == sorted(sample.tolist())
    assert torch.equal(small.train_y, sample % 4)
    assert small.natural_client is not None
    assert torch.equal(small.natural_client, sample // 10)


def test_fingerprint_depends_on_every_field() -> None:
    data = tiny(natural=True)
    flipped = data.test_x.clone()
    flipped[-1, 0, -1, -1] += 1
    others = [
        replace(data, test_x=flipped),
        replace(data, natural_client=None),
        replace(data, mean=(0.4,)),
        replace(data, task=Classification(5)),
        replace(data, train_x=data.train_x.view(100, 1, 1, 25), test_x=data.test_x.view(40, 1, 1, 25)),
    ]
    assert len({fingerprint(each) for each in [data, *others]}) == 6
    strided = replace(data, train_x=data.train_x.transpose(2, 3).contiguous().transpose(2, 3))
    assert fingerprint(strided) == fingerprint(data)
