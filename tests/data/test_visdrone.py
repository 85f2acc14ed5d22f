"""VisDrone on generated pictures: boxes, parts, and damaged files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fl_engine.core import boxes
from fl_engine.core.errors import DataError
from fl_engine.datasets import visdrone
from fl_engine.tasks import Detection
from tests.data import made

SIZE = (96, 64)
CAR, REGION = (4, 12, 8, 24, 16), (0, 48, 32, 48, 32)
IMAGES = {f"000000{n}_0000{n}_d_000000{n}": [CAR, REGION] for n in range(1, 8)}
FIRST = next(iter(IMAGES))


@pytest.fixture
def val(tmp_path: Path) -> Path:
    return made.visdrone_files(tmp_path, "val", IMAGES, SIZE)


def test_visdrone_reads_and_resizes_images_and_boxes(val: Path) -> None:
    data = visdrone.load(val.parents[1])
    assert isinstance(data.task, Detection) and data.task.outputs == 16
    assert data.train_x.shape == (5, 3, 224, 224) and data.train_y.shape == (5, 1024, 5)
    expected = [[4, 0.25, 0.25, 0.25, 0.25], [0, 0.75, 0.75, 0.5, 0.5], [boxes.NONE, 0, 0, 0, 0]]
    torch.testing.assert_close(data.train_y[0, :3], torch.tensor(expected))
    # The car lies where its box says, in the resized picture.
    low, high = (224 * each[0, 0] for each in boxes.corners(data.train_y[:, :1, 1:]))
    inside = data.train_x[0, :, int(low[1]) + 3 : int(high[1]) - 3, int(low[0]) + 3 : int(high[0]) - 3]
    assert int(inside.min()) > 230 and int(data.train_x[0, :, : int(low[1]) - 3].max()) < 130
    assert (float(data.normalise(data.train_x).min()), float(data.normalise(data.train_x).max())) <= (0.5, 1.0)
    assert data.task.labels(data.train_y).tolist() == [0] * 5


def test_visdrone_splits_the_validation_images_if_alone(val: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = visdrone.load(val.parents[1])
    assert (len(data.train_x), len(data.test_x)) == (5, 2)
    assert data.natural_client is not None and data.natural_client.tolist() == [2, 3, 4, 5, 7]
    assert "VisDrone2019-DET-val contains only 7 of 548 published images" in caplog.text


def test_visdrone_uses_the_training_and_test_parts(val: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = val.parents[1]
    made.visdrone_files(root, "train", {"0000012_00001_d_0000003": [CAR], "0000009_00001_d_0000003": [CAR]}, SIZE)
    with pytest.raises(DataError):
        visdrone.load(root)
    made.visdrone_files(root, "test-dev", {"9999999_00001_d_0000003": [REGION]}, SIZE)
    data = visdrone.load(root, {visdrone.TRAIN: 2, visdrone.TEST: 1})
    assert (len(data.train_x), len(data.test_x)) == (2, 1) and caplog.text == ""
    assert data.natural_client is not None and data.natural_client.tolist() == [9, 12]
    with pytest.raises(DataError):
        visdrone.load(root, {visdrone.TRAIN: 1, visdrone.TEST: 1})


def test_visdrone_logs_boxes_that_it_leaves_out_or_cuts(val: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = val / "annotations" / f"{list(IMAGES)[1]}.txt"
    text.write_text("12,8,24,16,1,4,0,0,\n20,20,0,5,1,1,0,0\n90,8,12,16,1,2,0,0\n")
    data = visdrone.load(val.parents[1])
    assert data.train_y[0, :3, 0].tolist() == [4, 2, boxes.NONE]
    torch.testing.assert_close(data.train_y[0, 1, 1:], torch.tensor([93 / 96, 0.25, 6 / 96, 0.25]))
    assert "omitted 1 boxes without width or height, and cropped 1 boxes" in caplog.text


def test_visdrone_refuses_an_image_without_boxes(val: Path) -> None:
    root = val.parents[1]
    text = val / "annotations" / f"{FIRST}.txt"
    text.rename(val / "annotations" / "0000099_00000_d_0000001.txt")
    with pytest.raises(DataError):
        visdrone.load(root)
    (val / "images" / f"{FIRST}.jpg").unlink()
    with pytest.raises(DataError):
        visdrone.load(root)
