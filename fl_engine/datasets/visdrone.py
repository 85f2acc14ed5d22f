"""VisDrone: images of 224 x 224 taken by drones, with boxes of people and vehicles in 12 categories.

Zhu et al., Detection and Tracking Meet Drones Challenge, IEEE TPAMI 2021, task 1 (objects in images). The archives of
https://github.com/VisDrone/VisDrone-Dataset contain the folders `VisDrone2019-DET-train/` with 6,471 images,
`VisDrone2019-DET-val/` with 548 images, and `VisDrone2019-DET-test-dev/` with 1,610 images.

Each folder contains images/<name>.jpg and annotations/<name>.txt. Each line of an annotation file describes a box as
comma-separated integers: left, top, width and height in pixels, score, category, truncation, occlusion.

As in FedAIoT (Alam, Federated Learning Benchmarks and Frameworks for Artificial Intelligence of Things, Michigan State
University 2023, sections 2.2.1 and 2.2.3), the 6,471 images are training images and the 1,610 images are test images.
All 12 categories are learned, and pixels are scaled to [0, 1]. Departs from the challenge, which scores only categories
1 to 10, and not 0 (an ignored region) or 11 (others). Images and their boxes are resized to 224 x 224, ignoring the
aspect ratio.

If VisDrone2019-DET-train is missing, only the validation images are used, and every fifth image in the order of the
file names is a test image. Each video clip, identified by the first number of the file name, is a natural client.

Pillow, which is installed with Matplotlib, decodes the images.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fl_engine.core.boxes import NONE
from fl_engine.core.samples import Data
from fl_engine.data.files import BILINEAR, damaged, open_jpeg, read_text, require_by_hand
from fl_engine.tasks import Detection

ABOUT = (
    "VisDrone-DET, 224x224 colour, boxes of 12 categories, 6,471 + 1,610; licence CC BY-NC-SA 3.0; 1.8 GB, by hand; "
    "1.4 GB in memory"
)
FOLDER = "visdrone"
TRAIN, VALIDATION, TEST = (f"VisDrone2019-DET-{part}" for part in ("train", "val", "test-dev"))
IMAGES = {TRAIN: 6471, VALIDATION: 548, TEST: 1610}
FILES = (f"{FOLDER}/VisDrone2019-DET-*/images/*.jpg",)
URL = "https://github.com/VisDrone/VisDrone-Dataset"
HOW = (
    f"Download task 1, object detection in images, from {URL} (trainset 1.4 GB, testset-dev 0.3 GB; CC BY-NC-SA 3.0, "
    f"no form; the valset alone, 0.1 GB, serves for trials), and unpack the archives in {FOLDER}/"
)
CATEGORIES = (
    "ignored region", "pedestrian", "people", "bicycle", "car", "van", "truck", "tricycle", "awning-tricycle", "bus",
    "motor", "others",
)  # fmt: skip
SIDE = 224
MOST_BOXES = 1024
"""Maximum number of boxes in an image. Images of the set have at most about 900 boxes."""
MOST_TEXT = 2**18
"""Maximum size of an annotation file in bytes."""
MOST_PICTURE = 2**24
MOST_PIXELS = 2**24
"""Maximum number of pixels of an image file. Images of the set have up to 2000 x 1500 pixels."""

NAME = re.compile(r"(\d{1,9})_\d{1,9}_d_\d{1,9}", re.ASCII)
WHOLE = re.compile(r"-?\d{1,6}", re.ASCII)
ROUNDING = 1e-4
"""Tolerance as a fraction of the image size. A box counts as cropped only if the image edge cuts off more than this
tolerance."""

log = logging.getLogger(__name__)

Box = tuple[int, float, float, float, float]
"""Category, centre x, centre y, width and height. The last four values are fractions of the image size."""


def load(root: Path, images: Mapping[str, int] = IMAGES) -> Data:
    """Load `root`/visdrone as uint8 images (N, 3, 224, 224) and boxes (N, 1024, 5). `images` maps each part to its
    number of images.

    Raises DataError if files are missing or damaged, images and annotation files do not match, a box is outside its
    image, or a part has too many images. Raises EnvironmentFailure if Pillow is not installed.
    """
    folder = root / FOLDER
    whole = (folder / TRAIN).is_dir()
    parts = (TRAIN, TEST) if whole else (VALIDATION,)
    require_by_hand("visdrone", root, [f"{FOLDER}/{part}/images/*.jpg" for part in parts], HOW)
    pictures = [[(folder / part, name) for name in _names(folder / part, images[part])] for part in parts]
    if whole:
        train, test = pictures
    else:
        log.warning("visdrone: %s is missing, so every fifth validation image is used as a test image", TRAIN)
        test, train = pictures[0][::5], [picture for at, picture in enumerate(pictures[0]) if at % 5]
        if not train:
            raise damaged(folder / VALIDATION, "at least 2 images", 1)
    clip = [int(name.partition("_")[0]) for _, name in train]
    task = Detection(len(CATEGORIES), MOST_BOXES)
    scale = ((0.0,) * 3, (1.0,) * 3)  # 0..1
    return Data("visdrone", task, *_read(train), *_read(test), *scale, natural_client=torch.tensor(clip))


def _names(folder: Path, most: int) -> list[str]:
    """Return the sorted names of a part's images, without .jpg. Images and annotation files must have the same
    names."""
    found = sorted(path.stem for path in (folder / "images").glob("*.jpg"))
    texts = {path.stem for path in (folder / "annotations").glob("*.txt")}
    if wrong := [name for name in found if not NAME.fullmatch(name)]:
        raise damaged(folder / "images", "names such as 0000001_02999_d_0000005.jpg", f"{wrong[0][:80]!r}")
    if apart := sorted(texts.symmetric_difference(found)):
        raise damaged(folder, "an image and an annotation file of each name", f"only one file {apart[0][:80]!r}")
    if len(found) > most:
        raise damaged(folder, f"at most {most} images", len(found))
    if len(found) < most:
        log.warning("visdrone: %s contains only %d of %d published images", folder.name, len(found), most)
    return found


def _read(pictures: list[tuple[Path, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    x = np.empty((len(pictures), 3, SIDE, SIDE), dtype=np.uint8)
    y = np.zeros((len(pictures), MOST_BOXES, 5), dtype=np.float32)
    y[..., 0] = NONE
    left_out = cut = 0
    for at, (folder, name) in enumerate(pictures):
        x[at], width, height = _picture(folder / "images" / f"{name}.jpg")
        boxes = read_boxes(folder / "annotations" / f"{name}.txt", width, height)
        whole = [box for box in boxes if box[3] > 0 and box[4] > 0]
        found = np.array([_within(box) for box in whole], dtype=np.float32).reshape(-1, 5)
        y[at, : len(found)] = found
        left_out += len(boxes) - len(found)
        sizes = np.array([box[3:] for box in whole]).reshape(-1, 2)
        cut += int((np.abs(found[:, 3:] - sizes).sum(1) > ROUNDING).sum())
    if left_out or cut:
        log.warning(
            "visdrone: omitted %d boxes without width or height, and cropped %d boxes at the image edge", left_out, cut
        )
    return torch.from_numpy(x), torch.from_numpy(y)


def _picture(path: Path) -> tuple[NDArray[np.uint8], int, int]:
    """Return the resized image (3, 224, 224), and its original width and height."""
    with open_jpeg(path, MOST_PICTURE) as image:
        width, height = image.size  # only the header is read at this point
        if not 0 < width * height <= MOST_PIXELS:
            raise damaged(path, f"at most {MOST_PIXELS} pixels", f"{width} x {height}")
        small = image.convert("RGB").resize((SIDE, SIDE), BILINEAR)
        return np.asarray(small).transpose(2, 0, 1), width, height


def read_boxes(path: Path, width: int, height: int) -> list[Box]:
    """Return the boxes of an image with `width` x `height` pixels. Boxes with a width or height of 0, which occur in
    the set, are included. Raises DataError if a line is malformed or a box is outside the image."""
    found = list[Box]()
    for number, line in enumerate(read_text(path, MOST_TEXT).splitlines(), 1):
        box = _box(line, width, height)
        if box is None or min(box[3:]) < 0 or min(box[3:]) > 0 >= min(_within(box)[3:]):
            form = "left,top,width,height,score,category,truncation,occlusion"
            raise damaged(f"{path}: line {number}", f"a box in {width} x {height} pixels, {form}", f"{line[:80]!r}")
        found.append(box)
    if len(found) > MOST_BOXES:
        raise damaged(path, f"at most {MOST_BOXES} boxes", len(found))
    return found


def _within(box: Box) -> Box:
    """Return the intersection of box and image, with a negative width or height if the box is outside the image."""
    category, x, y, width, height = box
    left, top = max(0.0, x - width / 2), max(0.0, y - height / 2)
    right, low = min(1.0, x + width / 2), min(1.0, y + height / 2)
    return category, (left + right) / 2, (top + low) / 2, right - left, low - top


def _box(line: str, width: int, height: int) -> Box | None:
    """Return the box in a line, or None if the line is malformed. Some lines of the set end with a comma."""
    fields = line.strip().removesuffix(",").split(",")
    if len(fields) != 8 or not all(map(WHOLE.fullmatch, fields)):
        return None
    left, top, across, down, score, category, truncation, occlusion = map(int, fields)
    known = score in (0, 1) and 0 <= category < len(CATEGORIES)
    if not known or truncation not in (-1, 0, 1) or occlusion not in (-1, 0, 1, 2):
        return None
    return category, (left + across / 2) / width, (top + down / 2) / height, across / width, down / height
