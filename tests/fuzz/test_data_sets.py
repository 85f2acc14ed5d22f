"""The readers of data sets: a file with something wrong in it is refused by its name, or what comes of it is whole."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fl_engine.core.errors import DataError
from fl_engine.core.samples import Data
from fl_engine.data.downloads import extract
from fl_engine.datasets import (
    aep,
    casas,
    epic_sounds,
    femnist,
    shakespeare,
    tiny_imagenet,
    uci_har,
    uthar,
    visdrone,
    wisdm,
)
from fl_engine.datasets.cifar import CIFAR100
from fl_engine.datasets.mnist import FASHION_MNIST
from fl_engine.datasets.widar import profile
from tests.data import made, sensors
from tests.fuzz.mutations import answer, damaged, json_like, law

Damage = Callable[[bytes], SearchStrategy[bytes]]


class Reader(NamedTuple):
    write: Callable[[Path], object]
    load: Callable[[Path], Data]
    files: tuple[str, ...]
    """The files that are damaged, one at a time."""
    says: tuple[str, ...] = ()
    """What an error may name instead of the file."""
    damage: Damage = damaged


def unpacked_too(content: bytes) -> SearchStrategy[bytes]:
    return damaged(content) | damaged(gzip.decompress(content)).map(lambda value: gzip.compress(value, 1, mtime=0))


def header_first(length: int) -> Damage:
    """Damage the header in most cases, because sizes are declared there."""
    return lambda valid: damaged(valid[:length]).map(lambda header: header + valid[length:]) | damaged(valid)


LEAF = made.femnist_file({"f0001_41": 10, "f0002_9": 1})
for each in LEAF["user_data"].values():
    each["x"] = [[0, 1] * 392] * len(each["y"])  # short in JSON
FASHION = replace(FASHION_MNIST, checksums={}, samples=(3, 3))
CIFAR = replace(CIFAR100, samples=(2, 1))
ROWS = [("P01_01", 0, 500, 3), ("P01_02", 100, 72_000, 1)]
CLIPS = {f"000000{n}_00000_d_0000001": [(4, 8, 8, 16, 24), (10, 40, 30, 4, 6), (1, 60, 8, 3, 3)] for n in range(2)}
WAV = f"{epic_sounds.AUDIO}/P01_02.wav"
VAL = "visdrone/VisDrone2019-DET-val"
TINY = tiny_imagenet.FOLDER
HOME = sensors.casas_lines(1)
ODD_TEXT = st.text(st.sampled_from("A: \n\t\r\u2028\x00é\U0001f600"), max_size=60).map(lambda text: text.encode())
WATCH = tuple(f"{wisdm.RAW}/watch/{sensor}/data_1600_{sensor}_watch.txt" for sensor in wisdm.SENSORS)


def write_watch(root: Path) -> None:
    for subject in (1600, 1601):
        for file, sensor in zip(WATCH, (0, 5), strict=True):
            made.write(root / file.replace("1600", str(subject)), sensors.wisdm_lines(subject, 500, sensor, "AL"))


READERS = {
    "fashion_mnist": Reader(
        lambda root: made.idx_files(root, FASHION.files, (3, 3), 3),
        FASHION.load,
        FASHION.files,
        ("-images-", "-labels-"),
        unpacked_too,
    ),
    "cifar100": Reader(partial(made.cifar100_files, records=(2, 1)), CIFAR.load, CIFAR.files),
    "femnist": Reader(
        lambda root: made.femnist_files(root, LEAF),
        partial(femnist.load, files=femnist.FILES[:1]),
        femnist.FILES[:1],
        damage=lambda _: json_like(LEAF),
    ),
    "tiny_imagenet": Reader(
        lambda root: made.tiny_imagenet_files(root, made.WNIDS[:2], 1, 1),
        tiny_imagenet.load,
        (
            *(f"{TINY}/{name}" for name in ("wnids.txt", "val/val_annotations.txt", "val/images/val_0.JPEG")),
            f"{TINY}/train/{made.WNIDS[0]}/images/{made.WNIDS[0]}_0.JPEG",
        ),
        ("tiny_imagenet: test_x",),  # an empty list of validation pictures
    ),
    "visdrone": Reader(
        lambda root: made.visdrone_files(root, "val", CLIPS),
        visdrone.load,
        (f"{VAL}/annotations/0000000_00000_d_0000001.txt", f"{VAL}/images/0000000_00000_d_0000001.jpg"),
        ("visdrone: test_y",),  # the test part may hold no box
    ),
    "shakespeare": Reader(
        made.shakespeare_file,
        partial(shakespeare.load, checksum=None),
        shakespeare.FILES,
        damage=lambda valid: damaged(valid) | ODD_TEXT,
    ),
    "shakespeare_text": Reader(
        made.shakespeare_file,
        partial(shakespeare.load_text, checksum=None),
        shakespeare.FILES,
        damage=lambda valid: damaged(valid) | ODD_TEXT,
    ),
    "epic_sounds": Reader(
        lambda root: made.epic_sounds_files(root, ROWS, ROWS[:1]),
        epic_sounds.load,
        (WAV,),
        damage=header_first(44),
    ),
    "aep": Reader(sensors.write_aep, partial(aep.load, rows=sensors.AEP_ROWS), aep.FILES, ("aep: ",)),
    "wisdm": Reader(write_watch, partial(wisdm.load, device="watch"), WATCH, ("person 1600", "wisdm_watch: ")),
    "casas": Reader(partial(sensors.write_casas, days=1), casas.load, casas.FILES[1:2]),
    "uci_har": Reader(
        partial(sensors.write_uci_har, samples=(3, 2)),
        partial(uci_har.load, samples=(3, 2)),
        uci_har.FILES[:3],
        ("uci_har: ",),
    ),
    "uthar": Reader(
        partial(sensors.write_uthar, samples=(3, 2)),
        partial(uthar.load, samples=(3, 2)),
        uthar.FILES,
        ("uthar: ",),
        header_first(128),
    ),
}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def root(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        READERS[name].write(folder)
        return folder

    return root


@contextmanager
def spoiled(path: Path, content: bytes) -> Iterator[None]:
    """Give a file other content for a while."""
    valid = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(valid)


def whole(data: Data) -> None:
    """`Data` has checked that samples are finite, and targets those of the task."""
    assert len(data.train_x) == len(data.train_y) > 0
    assert len(data.test_x) == len(data.test_y) > 0


def is_read(name: str, root: Path, file: str, content: bytes) -> bool:
    """Return whether a file with this content is accepted. If so, the data must be whole, else an error names it."""
    reader = READERS[name]
    with spoiled(root / file, content):
        found = answer(partial(reader.load, root), Path(file).name, *reader.says, kind=DataError)
    if found is not None:
        whole(found)
    return found is not None


@pytest.mark.filterwarnings("ignore:Reading")
@pytest.mark.parametrize("name", READERS)
@law(30)
@given(data=st.data())
def test_damaged_file_is_named_or_read_whole(roots: Any, name: str, data: st.DataObject) -> None:
    root, file = roots(name), data.draw(st.sampled_from(READERS[name].files))
    is_read(name, root, file, data.draw(READERS[name].damage((root / file).read_bytes())))


@pytest.mark.parametrize("name", READERS)
def test_undamaged_files_are_read(roots: Any, name: str) -> None:
    whole(READERS[name].load(roots(name)))


# -------------------------------------------------------------------------------------------------- by hand
def huge(width: int, height: int) -> bytes:
    """A picture whose header declares another size."""
    content = made.jpeg(0)
    at = content.index(b"\xff\xc0")
    return content[: at + 5] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + content[at + 9 :]


def npy(descr: str, shape: str, numbers: int = 0) -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}".encode()
    return b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + bytes(numbers)


TABLE, ACCEL = sensors.aep_table(), sensors.wisdm_lines(1600, 500, 0, "AL")
TEXT = f"{VAL}/annotations/0000001_00000_d_0000001.txt"
PICTURE = f"{VAL}/images/0000001_00000_d_0000001.jpg"
JPEG = f"{TINY}/val/images/val_1.JPEG"
LABELS, PACKETS = f"{uthar.FOLDER}/label/y_test.csv", f"{uthar.FOLDER}/data/X_test.csv"
GIGANTIC = ((65_535, 65_535), (12_000, 12_000), (0, 64))
WRONG: dict[str, tuple[str, str, bytes]] = {
    "4 GiB in 4 MB": ("fashion_mnist", FASHION.files[0], gzip.compress(bytes(2**24), mtime=0) * 256),
    "2^96 values": ("fashion_mnist", FASHION.files[2], gzip.compress(bytes((0, 0, 8, 3)) + b"\xff" * 12)),
    **{f"a JPEG of {size}": ("tiny_imagenet", JPEG, huge(*size)) for size in (*GIGANTIC, (64, 65_535))},
    **{f"a photo of {size}": ("visdrone", PICTURE, huge(*size)) for size in GIGANTIC},
    "numbers of megabytes": ("visdrone", TEXT, b"1" * 2**20),
    "more boxes than there is room for": ("visdrone", TEXT, b"1,1,2,2,1,1,0,0\n" * 4000),
    "other digits": ("visdrone", TEXT, "\u0661,1,2,2,1,1,0,0".encode()),
    "of negative size": ("visdrone", TEXT, b"9,9,-3,4,1,1,0,0"),
    "half a character": ("shakespeare", shakespeare.FILES[0], b"A:\n" + b"\xed\xa0\x80\n" * 5),
    "a sound without end": ("epic_sounds", WAV, b"RIFF\xff\xff\xff\xffWAVEfmt \xff\xff\xff\x7f"),
    "a late date": ("aep", aep.FILES[0], TABLE.replace(b'"2016-01-12', b'"9' + b"9" * 30 + b"-01-12")),
    "beyond float": ("aep", aep.FILES[0], TABLE.replace(b'" ', b'"' + b"9" * 400)),
    "a quote without end": ("aep", aep.FILES[0], TABLE + b'"' + b"x" * 200_000),
    "a time beyond int64": ("wisdm", WATCH[0], ACCEL.replace(b",A,", b",A," + b"9" * 40)),
    "empty lines": ("wisdm", WATCH[0], b"\n" * 100_000),
    "infinite degrees": ("casas", casas.FILES[1], HOME + b"2009-10-16 1 T001 1e999\n2009-10-16 1 T001 inf"),
    "zeros": ("casas", casas.FILES[1], b"\0" * 100_000),
    "a product beyond int64": ("uthar", PACKETS, npy("<f8", "(2, 4611686018427387904)")),
    "negative sizes": ("uthar", PACKETS, npy("<f8", "(2, -250, -90)", 2**19)),
    "an array of arrays": ("uthar", PACKETS, npy("(9999999,)f8", "(2, 250, 90)")),
    "objects": ("uthar", PACKETS, npy("|O", "(2, 250, 90)", 360_000)),
    "a deep header": ("uthar", PACKETS, npy("<f8", "(" * 9000)),
    "a label beyond int64": ("uthar", LABELS, sensors.npy(np.array([3, 2**63], dtype=np.uint64))),
}  # fmt: skip


@pytest.mark.filterwarnings("error", "ignore:Reading")
@pytest.mark.parametrize("case", WRONG)
def test_wrong_file_is_refused(roots: Any, case: str) -> None:
    name, file, content = WRONG[case]
    assert not is_read(name, roots(name), file, content)


@pytest.mark.parametrize(
    ("name", "file", "content"),
    [
        ("femnist", femnist.FILES[0], json.dumps(LEAF).replace("f0002_9", r"\ud800").encode()),
        ("femnist", femnist.FILES[0], json.dumps(made.femnist_file({"\ud800": 10})).encode()),
        ("wisdm", WATCH[0], ACCEL.replace(b"1600,A", b"1600,B")),
        ("casas", casas.FILES[1], HOME + b" ".join([b"2009-10-16 1 M001 ON", b"x" * 100_000, b"begin"])),
    ],
    ids=["a lone surrogate", "its only writer", "one activity", "a long name"],
)
def test_odd_file_is_read_whole(roots: Any, name: str, file: str, content: bytes) -> None:
    assert is_read(name, roots(name), file, content)


def test_wisdm_refuses_readings_of_one_time(tmp_path: Path) -> None:
    """Joined with each other they would be 400 million."""
    write_watch(tmp_path)
    for file in WATCH:
        (tmp_path / file).write_bytes(b"1600,A,1,1.0,1.0,1.0;\n" * 20_000)
    assert answer(partial(wisdm.load, tmp_path, "watch"), "person 1600", kind=DataError) is None


# ----------------------------------------------------------------------------------------------- parts of files
@law(60)
@given(damaged(made.annotations(ROWS).encode()))
def test_annotations_are_whole_or_refused(tmp_path: Path, content: bytes) -> None:
    path = made.write(tmp_path / "EPIC_Sounds_train.csv", content)
    found = answer(lambda: epic_sounds.segments(path), path.name, kind=DataError)
    for segment in found or ():
        assert 0 <= segment.start < segment.stop
        assert 0 <= segment.label < 44
        assert "/" not in segment.video


PROFILE = sensors.widar_lines(0)


@law(60)
@given(damaged(PROFILE))
@example(b"," * 2**20)
@example(PROFILE.replace(b"0.0,", b"1e39,"))
@example(PROFILE.replace(b"\n", b"\n\n"))
def test_widar_profile_is_whole_or_its_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = made.write(tmp_path / "user1-1-1.csv", content)
    found = answer(lambda: profile(path), "user1-1-1.csv", kind=DataError)
    assert found is None or (found.shape == (22, 20, 20) and np.isfinite(found).all())


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


def zipped() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("a" * 120, "c"):
            archive.writestr(name, bytes(range(250)) * 3)
    return out.getvalue()


ARCHIVES = {f"archive.tar.{each}": tar(each) for each in ("", "gz", "bz2", "xz")} | {"archive.zip": zipped()}
ENDLESS = b"".join(
    tarfile.TarInfo._create_gnu_long_header(f"x{i}", tarfile.GNUTYPE_LONGNAME, "utf-8", "strict")  # type: ignore[attr-defined]
    for i in range(2000)
)
"""Each header announces a longer name of the next one."""


@law(100)
@given(st.sampled_from(sorted(ARCHIVES)).flatmap(lambda name: st.tuples(st.just(name), damaged(ARCHIVES[name]))))
@example(("archive.tar", ENDLESS))
def test_archive_gives_its_members_or_is_named(tmp_path: Path, archive: tuple[str, bytes]) -> None:
    name, content = archive
    path, out = tmp_path / name, tmp_path / "out"
    path.write_bytes(content)
    out.unlink(missing_ok=True)
    answer(lambda: extract(path, {"c": out}), name, kind=DataError)
    assert not out.exists() or out.stat().st_size <= 750
    assert not list(tmp_path.glob("*.part"))
