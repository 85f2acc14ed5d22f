"""Data files: idx, CIFAR batches, archives. What is read is whole, or its file is named."""

from __future__ import annotations

import gzip
import io
import math
import struct
import tarfile
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from fl_engine.core.errors import DataError
from fl_engine.core.samples import Data
from fl_engine.data.downloads import extract
from fl_engine.data.files import read
from fl_engine.data.image_files import parse_idx
from fl_engine.datasets import fashion_mnist
from fl_engine.storage.store import sha256
from tests.fuzz.mutations import answer, damaged, law

RECORDS = 2


def idx(*shape: int) -> bytes:
    return bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + b"\1" * math.prod(shape)


IMAGES, LABELS = idx(3, 28, 28), idx(3)
FASHION = {
    f"{part}-{what}-ubyte.gz": gzip.compress(content, mtime=0)
    for part in ("train", "t10k")
    for what, content in (("images-idx3", IMAGES), ("labels-idx1", LABELS))
}
HUGE = bytes((0, 0, 8, 3)) + b"\xff" * 12
"""An idx header that declares 2^96 values."""
BOMB = gzip.compress(bytes(2**24), mtime=0) * 256
"""4 GiB in 4 MB."""
CIFAR = bytes((3, *([7] * 3072))) * RECORDS


def whole(data: Data) -> None:
    for x, y in ((data.train_x, data.train_y), (data.test_x, data.test_y)):
        assert len(x) == len(y) > 0
        assert int(y.min()) >= 0 and int(y.max()) < data.task.label_count


@law(60)
@given(st.sampled_from((1, 2, 3)), damaged(idx(2, 3, 4)) | damaged(idx(5)) | st.binary(max_size=40))
@example(3, HUGE)
@example(1, idx(0))
@example(3, idx(3, 0, 4))
def test_an_idx_file_has_as_many_values_as_it_says(axes: int, content: bytes) -> None:
    found = answer(lambda: parse_idx(Path("a.idx"), content, axes), "a.idx", kind=DataError)
    if found is not None:
        assert found.ndim == axes
        assert 0 < found.size == len(content) - 4 - 4 * axes


@law(15)
@given(
    st.sampled_from(sorted(FASHION)).flatmap(
        lambda name: st.tuples(
            st.just(name),
            damaged(FASHION[name])
            | damaged(IMAGES if "images" in name else LABELS).map(lambda value: gzip.compress(value, 1, mtime=0)),
        )
    )
)
@example(("t10k-images-idx3-ubyte.gz", gzip.compress(HUGE)))
def test_fashion_mnist_is_whole_or_refused_by_the_name_of_a_file(tmp_path: Path, broken: tuple[str, bytes]) -> None:
    (tmp_path / "fashion-mnist").mkdir(exist_ok=True)
    for name, content in (FASHION | dict([broken])).items():
        (tmp_path / "fashion-mnist" / name).write_bytes(content)
    part = broken[0].partition("-")[0]  # where the counts differ, either file may be the damaged one
    found = answer(lambda: fashion_mnist.load(tmp_path, {}), f"{part}-images", f"{part}-labels", kind=DataError)
    if found is not None:
        whole(found)


def test_a_gzip_file_that_swells_to_gigabytes_is_refused(tmp_path: Path) -> None:
    test_fashion_mnist_is_whole_or_refused_by_the_name_of_a_file.hypothesis.inner_test(  # type: ignore[attr-defined]
        tmp_path, ("train-images-idx3-ubyte.gz", BOMB)
    )


@law(20)
@given(damaged(CIFAR))
def test_a_file_with_a_checksum_is_that_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "batch.bin"
    path.write_bytes(content)
    found = answer(lambda: read(path, f"sha256:{sha256(CIFAR)}"), "batch.bin", kind=DataError)
    assert found == (CIFAR if content == CIFAR else None)


# ---------------------------------------------------------------------------------------------------- archives
def tar(compression: str) -> bytes:
    """Of a long name in a header of its own, a file, and a sparse one as GNU's tar makes them."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=f"w:{compression}", format=tarfile.PAX_FORMAT) as archive:
        for name, headers in (("a" * 120, {}), ("b", {"GNU.sparse.major": "1"}), ("c", {"mtime": "1.5"})):
            member = tarfile.TarInfo(name)
            member.size, member.pax_headers = 700, headers
            archive.addfile(member, io.BytesIO(bytes(range(250)) * 3))
    return out.getvalue()


ARCHIVES = {compression: tar(compression) for compression in ("", "gz", "bz2", "xz")}
ENDLESS = b"".join(
    tarfile.TarInfo._create_gnu_long_header(f"x{i}", tarfile.GNUTYPE_LONGNAME, "utf-8", "strict")  # type: ignore[attr-defined]
    for i in range(2000)
)
"""Each header announces a longer name of the next one."""


@law(40)
@given(st.sampled_from(sorted(ARCHIVES)).flatmap(lambda compression: damaged(ARCHIVES[compression])))
@example(ENDLESS)
def test_an_archive_gives_its_members_or_is_named(tmp_path: Path, content: bytes) -> None:
    path, out = tmp_path / "archive.tar", tmp_path / "out"
    path.write_bytes(content)
    out.unlink(missing_ok=True)
    answer(lambda: extract(path, {"c": out}), "archive.tar", kind=DataError)
    assert not list(tmp_path.glob("*.part"))
