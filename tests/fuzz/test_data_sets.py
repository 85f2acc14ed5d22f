"""The readers of data sets: a file with something wrong in it is refused by its name, or what comes of it is whole."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fl_engine.core.errors import DataError
from fl_engine.core.samples import Data
from fl_engine.data.downloads import extract
from fl_engine.datasets import cifar100, epic_sounds, femnist, shakespeare, tiny_imagenet, visdrone
from tests.data import made
from tests.fuzz.mutations import answer, damaged, json_like, law

ROWS = [("P01_01", 0, 500, 3), ("P01_02", 100, 72_000, 1)]


def whole(data: Data | None) -> None:
    if data is None:
        return
    for x, y in ((data.train_x, data.train_y), (data.test_x, data.test_y)):
        assert len(x) == len(y) > 0
        assert int(y.min()) >= 0 and int(y.max()) < data.task.outputs


@contextmanager
def spoiled(path: Path, content: bytes) -> Iterator[None]:
    """Give a file other content for a while."""
    valid = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(valid)


# -------------------------------------------------------------------------------------------------- CIFAR-100
@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cifar")
    made.cifar100_files(root, (2, 1))
    return root


@law(20)
@given(st.sampled_from(cifar100.FILES), st.data())
def test_cifar100_is_whole_or_refused(cifar: Path, file: str, data: st.DataObject) -> None:
    with spoiled(cifar / file, data.draw(damaged((cifar / file).read_bytes()))):
        whole(answer(lambda: cifar100.load(cifar, (2, 1)), Path(file).name, kind=DataError))


# ------------------------------------------------------------------------------------------------------ FEMNIST
LEAF = made.femnist_file({"f0001_41": 10, "f0002_9": 1})
for each in LEAF["user_data"].values():
    each["x"] = [[0, 1] * 392] * len(each["y"])  # short in JSON


@law(40)
@given(json_like(LEAF))
@example(json.dumps(LEAF).replace("f0002_9", r"\ud800").encode())
@example(json.dumps(made.femnist_file({"\ud800": 10})).encode())
def test_femnist_is_whole_or_refused(tmp_path: Path, content: bytes) -> None:
    (file,) = made.femnist_files(tmp_path, {})
    (tmp_path / file).write_bytes(content)
    whole(answer(lambda: femnist.load(tmp_path, (file,)), "all_data_0.json", kind=DataError))


# ------------------------------------------------------------------------------------------------ Tiny ImageNet
@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    made.tiny_imagenet_files(root, made.WNIDS[:2], 1, 1)
    return root


def huge(width: int, height: int) -> bytes:
    """A picture whose header declares another size."""
    content = made.jpeg(0)
    at = content.index(b"\xff\xc0")
    return content[: at + 5] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + content[at + 9 :]


@law(40)
@given(st.sampled_from(("wnids.txt", "val/val_annotations.txt", "val/images/val_0.JPEG", "train")), st.data())
def test_tiny_imagenet_is_whole_or_refused(pictures: Path, name: str, data: st.DataObject) -> None:
    folder = pictures / "tiny-imagenet-200"
    path = folder / (f"train/{made.WNIDS[0]}/images/{made.WNIDS[0]}_0.JPEG" if name == "train" else name)
    with spoiled(path, data.draw(damaged(path.read_bytes()))):
        # An empty list of validation pictures leaves the test part empty.
        whole(answer(lambda: tiny_imagenet.load(pictures), path.name, "tiny_imagenet: test_x", kind=DataError))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [(65_535, 65_535), (12_000, 12_000), (64, 65_535), (0, 64)])
def test_a_picture_that_declares_gigapixels_is_not_decoded(pictures: Path, size: tuple[int, int]) -> None:
    path = pictures / "tiny-imagenet-200" / "val" / "images" / "val_1.JPEG"
    with spoiled(path, huge(*size)):
        assert answer(lambda: tiny_imagenet.load(pictures), "val_1.JPEG", kind=DataError) is None


# ----------------------------------------------------------------------------------------------------- VisDrone
CLIPS = {f"000000{n}_00000_d_0000001": [(4, 8, 8, 16, 24), (10, 40, 30, 4, 6), (1, 60, 8, 3, 3)] for n in range(2)}


@pytest.fixture(scope="module", params=["annotations", "labels"])
def flight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.visdrone_files(tmp_path_factory.mktemp("flight"), "val", CLIPS, yolo=request.param == "labels")


def seen(data: Data | None) -> None:
    """That boxes lie in their images, of known categories, `Data` sees to."""
    if data is not None:
        assert (len(data.train_x), len(data.test_x)) == (1, 1)
        assert data.train_y.shape[1:] == (visdrone.MOST_BOXES, 5)


@law(40)
@given(st.sampled_from(("txt", "jpg")), st.data())
def test_visdrone_is_whole_or_refused(flight: Path, kind: str, data: st.DataObject) -> None:
    path = next(flight.glob(f"*/0000000_*.{kind}"))
    with spoiled(path, data.draw(damaged(path.read_bytes()))):
        # A file that lists nothing is of a picture without objects; then the test part may hold none at all.
        seen(answer(lambda: visdrone.load(flight.parents[1]), path.name, "visdrone: test_y", kind=DataError))


ODD_BOXES = {
    "numbers of megabytes": b"1" * 2**20,
    "more boxes than there is room for": b"1 0.5 0.5 0.1 0.1\n1,1,2,2,1,1,0,0\n" * 4000,
    "other digits": "\u0661,1,2,2,1,1,0,0".encode(),
    "of negative size": b"9,9,-3,4,1,1,0,0\n1 0.5 0.5 -0.1 0.1",
}


@pytest.mark.parametrize("content", ODD_BOXES.values(), ids=list(ODD_BOXES))
def test_odd_boxes_are_refused(flight: Path, content: bytes) -> None:
    path = next(flight.glob("*/0000001_*.txt"))
    with spoiled(path, content):
        assert answer(lambda: visdrone.load(flight.parents[1]), path.name, kind=DataError) is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [(65_535, 65_535), (12_000, 12_000), (0, 64)])
def test_image_that_declares_gigapixels_is_not_decoded(flight: Path, size: tuple[int, int]) -> None:
    path = next(flight.glob("*/0000001_*.jpg"))
    with spoiled(path, huge(*size)):
        assert answer(lambda: visdrone.load(flight.parents[1]), path.name, kind=DataError) is None


def zipped() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a" * 120, bytes(range(250)) * 3)
        archive.writestr("c", bytes(range(250)) * 3)
    return out.getvalue()


@law(60)
@given(damaged(zipped()))
def test_a_zip_file_gives_its_members_or_is_named(tmp_path: Path, content: bytes) -> None:
    path, out = tmp_path / "archive.zip", tmp_path / "out"
    path.write_bytes(content)
    out.unlink(missing_ok=True)
    answer(lambda: extract(path, {"c": out}), "archive.zip", kind=DataError)
    assert not out.exists() or out.stat().st_size <= 750
    assert not list(tmp_path.glob("*.part"))


# -------------------------------------------------------------------------------------------------- Shakespeare
ODD_TEXT = st.text(st.sampled_from("A: \n\t\r\u2028\x00é\U0001f600"), max_size=60).map(lambda text: text.encode())


@law(80)
@given(damaged(made.PLAY.encode()) | ODD_TEXT)
@example(b"A:\n" + b"\xed\xa0\x80\n" * 5)
def test_shakespeare_is_whole_or_refused(tmp_path: Path, content: bytes) -> None:
    made.write(tmp_path / "shakespeare" / "input.txt", content)
    whole(answer(lambda: shakespeare.load(tmp_path, None), "input.txt", kind=DataError))
    whole(answer(lambda: shakespeare.load_text(tmp_path, None), "input.txt", kind=DataError))


# -------------------------------------------------------------------------------------------------- EPIC-SOUNDS
@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sounds")
    made.epic_sounds_files(root, ROWS, ROWS[:1])
    return root


@law(60)
@given(damaged(made.annotations(ROWS).encode()))
def test_annotations_are_whole_or_refused(tmp_path: Path, content: bytes) -> None:
    path = made.write(tmp_path / "EPIC_Sounds_train.csv", content)
    found = answer(lambda: epic_sounds.segments(path), path.name, kind=DataError)
    for segment in found or ():
        assert 0 <= segment.start < segment.stop
        assert 0 <= segment.label < 44
        assert "/" not in segment.video


HEADER = 44
"""Bytes of a WAV file before its sound."""


@law(40)
@given(data=st.data())
@example(None)
def test_sound_is_whole_or_refused(sounds: Path, data: st.DataObject | None) -> None:
    path = sounds / "epic-sounds" / "audio" / "P01_02.wav"
    valid = path.read_bytes()
    # Mostly the header: it is there that sizes are declared.
    content = (
        b"RIFF\xff\xff\xff\xffWAVEfmt \xff\xff\xff\x7f"
        if data is None
        else data.draw(damaged(valid[:HEADER]).map(lambda header: header + valid[HEADER:]) | damaged(valid))
    )
    with spoiled(path, content):
        whole(answer(lambda: epic_sounds.load(sounds), "P01_02.wav", kind=DataError))


def test_the_made_files_are_whole(cifar: Path, pictures: Path, flight: Path, sounds: Path, tmp_path: Path) -> None:
    """Without damage all files are accepted."""
    whole(cifar100.load(cifar, (2, 1)))
    whole(femnist.load(tmp_path, made.femnist_files(tmp_path, LEAF)))
    whole(tiny_imagenet.load(pictures))
    seen(visdrone.load(flight.parents[1]))
    made.shakespeare_file(tmp_path)
    whole(shakespeare.load(tmp_path, None))
    whole(epic_sounds.load(sounds))
