"""Official file formats on small files, downloads, padding and subsets."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import logging
import os
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch

from fl_engine.core.errors import DataError, EnvironmentFailure
from fl_engine.core.samples import Data
from fl_engine.data import downloads, files
from fl_engine.data.downloads import Remote
from fl_engine.datasets import cifar10, data_root, digits, fashion_mnist, fingerprint, pad, subset
from fl_engine.tasks import Classification
from fl_engine.testing.kinds import tiny_boxes
from tests.data import made
from tests.data.made import idx

RECORDS = 20
FASHION = tuple(
    f"fashion-mnist/{part}-{what}-ubyte.gz" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1")
)


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
    made.idx_files(tmp_path, FASHION, (30, 10), 10)
    return tmp_path


def test_fashion_mnist_reads_what_the_files_say(fashion: Path) -> None:
    data = fashion_mnist.load(fashion, {})
    assert data.train_x.shape == (30, 1, 28, 28)
    assert data.test_x.shape == (10, 1, 28, 28)
    assert data.test_y.tolist() == list(range(10))
    pixels = gzip.decompress((fashion / "fashion-mnist" / "train-images-idx3-ubyte.gz").read_bytes())[16:]
    assert data.train_x.numpy().tobytes() == pixels


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train-labels-idx1", idx(np.full(30, 10, dtype=np.uint8))),
        ("train-labels-idx1", idx(np.zeros(29, dtype=np.uint8))),
        ("train-labels-idx1", idx(np.zeros(30, dtype=np.uint8)) + b"\0"),
        ("train-images-idx3", idx(np.zeros((30, 28, 27), dtype=np.uint8))),
        ("train-images-idx3", idx(np.zeros((30, 28, 28), dtype=np.uint8))[:500]),
    ],
)
def test_fashion_mnist_refuses_other_idx_files(fashion: Path, name: str, content: bytes) -> None:
    (fashion / "fashion-mnist" / f"{name}-ubyte.gz").write_bytes(gzip.compress(content))
    with pytest.raises(DataError):
        fashion_mnist.load(fashion, {})


def test_fashion_mnist_names_missing_files_and_the_cure(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        fashion_mnist.load(tmp_path)
    assert "flexfleet fetch fashion_mnist" in str(error.value)


# ------------------------------------------------------------------------------------------------ CIFAR-10
@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    folder = tmp_path / "cifar10" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name in (*cifar10.TRAIN, *cifar10.TEST):
        records = rng.integers(0, 256, (RECORDS, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(RECORDS) % 10
        (folder / name).write_bytes(records.tobytes())
    return tmp_path


def batch(root: Path, name: str) -> Path:
    return root / "cifar10" / "cifar-10-batches-bin" / name


def test_cifar10_reads_what_the_files_say(cifar: Path) -> None:
    data = cifar10.load(cifar, {}, RECORDS)
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
        cifar10.load(cifar, records=RECORDS)


@pytest.mark.parametrize("size", [0, (RECORDS - 1) * 3073, RECORDS * 3073 + 1])
def test_cifar10_refuses_another_size(cifar: Path, size: int) -> None:
    path = batch(cifar, "data_batch_4.bin")
    path.write_bytes((path.read_bytes() + b"\0")[:size])
    with pytest.raises(DataError):
        cifar10.load(cifar, {}, RECORDS)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
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
def test_download_keeps_what_is_right_and_logs_progress(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "CHUNK", 64)
    content = bytes(range(256))
    (tmp_path / "there").write_bytes(content)
    remote = Remote((tmp_path / "there").as_uri(), "here", md5(content))
    with caplog.at_level(logging.INFO):
        path = downloads.download(remote, tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "here"
    assert path.read_bytes() == content
    assert [message.split()[1] for message in caplog.messages] == ["25", "50", "75", "100"]
    (tmp_path / "there").unlink()
    assert downloads.download(remote, tmp_path / "new" / "folder") == path  # it is there: no address is opened


def test_download_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "here").write_bytes(b"mine")
    with pytest.raises(DataError):
        downloads.download(Remote("file:///nowhere", "here", md5(b"right")), tmp_path)
    assert (tmp_path / "here").read_bytes() == b"mine"


class Answers(BaseHTTPRequestHandler):
    """The path is the status and the Content-Length; the body is always `whole`."""

    def do_GET(self) -> None:
        status, length = self.path[1:].split("/")
        self.send_response(int(status))
        if length:
            self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(b"whole")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answers) as there:
        thread = Thread(target=there.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{there.server_port}"
        there.shutdown()
        thread.join()


def test_download_tells_what_a_server_answers(server: str, tmp_path: Path) -> None:
    for length in ("5", "", "five", "-5"):
        remote = Remote(f"{server}/200/{length}", f"whole{length}", md5(b"whole"))
        assert downloads.download(remote, tmp_path / "new").read_bytes() == b"whole"
    for path, raised in (
        ("403/", EnvironmentFailure),
        ("503/5", EnvironmentFailure),
        ("200/", DataError),
        ("200/9", EnvironmentFailure),
    ):
        with pytest.raises(raised):
            downloads.download(Remote(f"{server}/{path}", "here", md5(b"right")), tmp_path / "other")
    assert not any((tmp_path / "other").iterdir())


def archive(root: Path, to: Path, names: tuple[str, ...] = (*cifar10.TRAIN, *cifar10.TEST)) -> Remote:
    """Write an archive in the official layout, with an additional member `../evil`."""
    with tarfile.open(to, "w:gz") as tar:
        evil = tarfile.TarInfo("../evil")
        evil.size = 4
        tar.addfile(evil, io.BytesIO(b"evil"))
        for name in names:
            tar.add(batch(root, name), f"cifar-10-batches-bin/{name}")
    return Remote(to.as_uri(), "cifar-10-binary.tar.gz", md5(to.read_bytes()))


def test_fetch_cifar10_unpacks_the_batches_and_nothing_else(cifar: Path, tmp_path: Path) -> None:
    remote, copy = archive(cifar, tmp_path / "there.tar.gz"), tmp_path / "a" / "copy"
    cifar10.fetch(copy, remote, {})
    assert fingerprint(cifar10.load(copy, {}, RECORDS)) == fingerprint(cifar10.load(cifar, {}, RECORDS))
    expected = {copy / file for file in cifar10.FILES} | {copy / "cifar10" / remote.filename}
    assert {path for path in (tmp_path / "a").rglob("*") if path.is_file()} == expected

    (copy / "cifar10" / remote.filename).unlink()
    cifar10.fetch(copy, replace(remote, url="file:///nowhere"), {})  # all is there: nothing to download
    with pytest.raises(DataError):
        cifar10.fetch(copy, remote)


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


def test_what_a_killed_writer_left_is_removed_a_day_later(tmp_path: Path) -> None:
    left, alive, other = (tmp_path / name for name in ("f[0].1a2b1a2b.part", "f[0].3c4d3c4d.part", "f0.5e6f5e6f.part"))
    for path in (left, alive, other):
        path.write_bytes(b"half")
    for path in (left, other):
        os.utime(path, (0, 0))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("member", b"whole")
    downloads.extract(tmp_path / "a.zip", {"member": tmp_path / "f[0]"})
    assert {path.name for path in tmp_path.iterdir()} == {"a.zip", "f[0]", alive.name, other.name}


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
def test_boxes_stay_around_what_they_are_about(side: int) -> None:
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


def test_fingerprint_sees_everything_that_counts() -> None:
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
