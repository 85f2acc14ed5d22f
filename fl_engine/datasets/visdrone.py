"""VisDrone: images of 224 x 224 taken by drones, with boxes of people and vehicles in 12 categories.

Zhu et al., Detection and Tracking Meet Drones Challenge, IEEE TPAMI 2021, task 1 (objects in images). From
https://github.com/VisDrone/VisDrone-Dataset, three archives that unpack to

    VisDrone2019-DET-train/       6,471 images
    VisDrone2019-DET-val/           548
    VisDrone2019-DET-test-dev/    1,610
        images/<name>.jpg
        annotations/<name>.txt    one box per line: left, top, width and height in pixels, score, category, truncation,
                                  occlusion, with commas between

Instead of annotations/ a part may have labels/, the text form of YOLO: category, centre x, centre y, width and height,
as shares of the image, with spaces between.

As in FedAIoT (Alam, Federated Learning Benchmarks and Frameworks for Artificial Intelligence of Things, Michigan State
University 2023, sections 2.2.1 and 2.2.3) the 6,471 images are for training and the 1,610 for testing, all 12
categories are learnt, and pixels are scaled to 0..1. Departs from the challenge, which scores only categories 1 to 10,
not 0 (an ignored region) and 11 (others). Images and their boxes are resized to 224 x 224, whatever their aspect ratio.

Without VisDrone2019-DET-train, only the validation images are used, for trials: every fifth by name is a test image. An
image's clip, the first number of its name, is the natural client.

Pillow, which is installed with Matplotlib, decodes the images.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fl_engine.core.boxes import NONE
from fl_engine.core.samples import Data
from fl_engine.data.files import damaged, read, require_by_hand
from fl_engine.data.image_files import BILINEAR, open_jpeg
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
"""The most boxes of an image. The largest number in the set is about 900."""
MOST_TEXT = 2**18
"""The most bytes of an image's file of boxes."""
MOST_PICTURE = 2**24
MOST_PIXELS = 2**24
"""The most pixels of an image file. Those of the set have up to 2000 x 1500."""

NAME = re.compile(r"(\d{1,9})_\d{1,9}_d_\d{1,9}", re.ASCII)
WHOLE = re.compile(r"-?\d{1,6}", re.ASCII)
SHARE = re.compile(r"\d{1,2}(\.\d{1,20})?(e-\d{1,2})?", re.ASCII)
ROUNDING = 1e-4
"""A box that reaches beyond the edge by this share of the image was only rounded."""

log = logging.getLogger(__name__)

Box = tuple[int, float, float, float, float]
"""Category, centre x, centre y, width, height, as shares of the image."""


def load(root: Path) -> Data:
    """Load `root`/visdrone: uint8 (N, 3, 224, 224), boxes (N, 1024, 5).

    Raises DataError if files are missing or damaged, an image has no file of boxes or a file of boxes no image, a box
    is not in its image, or a part has too many images; EnvironmentFailure without Pillow.
    """
    folder = root / FOLDER
    whole = (folder / TRAIN).is_dir()
    parts = (TRAIN, TEST) if whole else (VALIDATION,)
    require_by_hand("visdrone", root, [f"{FOLDER}/{part}/images/*.jpg" for part in parts], HOW)
    pictures = [[(folder / part, name) for name in _names(folder / part, IMAGES[part])] for part in parts]
    if whole:
        train, test = pictures
    else:
        log.warning("visdrone: %s is missing, so every fifth validation image tests, and the others train", TRAIN)
        test, train = pictures[0][::5], [picture for at, picture in enumerate(pictures[0]) if at % 5]
        if not train:
            raise damaged(folder / VALIDATION, "at least 2 images", 1)
    clip = [int(name.partition("_")[0]) for _, name in train]
    task = Detection(len(CATEGORIES), MOST_BOXES)
    scale = ((0.0,) * 3, (1.0,) * 3)  # 0..1
    return Data("visdrone", task, *_read(train), *_read(test), *scale, natural_client=torch.tensor(clip))


def _names(folder: Path, most: int) -> list[str]:
    """The names of a part's images, without .jpg, sorted. Each image must have a file of boxes, and each file of boxes
    an image."""
    found = sorted(path.stem for path in (folder / "images").glob("*.jpg"))
    texts = {path.stem for path in _texts(folder).glob("*.txt")}
    if wrong := [name for name in found if not NAME.fullmatch(name)]:
        raise damaged(folder / "images", "names as 0000001_02999_d_0000005.jpg", f"{wrong[0][:80]!r}")
    if apart := sorted(texts.symmetric_difference(found)):
        raise damaged(folder, "an image and boxes of each name", f"only one of them called {apart[0][:80]!r}")
    if len(found) > most:
        raise damaged(folder, f"at most {most} images", len(found))
    if len(found) < most:
        log.warning("visdrone: %s has %d of its %d images", folder.name, len(found), most)
    return found


def _texts(folder: Path) -> Path:
    official, plain = folder / "annotations", folder / "labels"
    return plain if plain.is_dir() and not official.is_dir() else official


def _read(pictures: list[tuple[Path, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    x = np.empty((len(pictures), 3, SIDE, SIDE), dtype=np.uint8)
    y = np.zeros((len(pictures), MOST_BOXES, 5), dtype=np.float32)
    y[..., 0] = NONE
    empty = cut = 0
    for at, (folder, name) in enumerate(pictures):
        x[at], width, height = _picture(folder / "images" / f"{name}.jpg")
        listed = boxes_of(_texts(folder) / f"{name}.txt", width, height)
        real = [box for box in listed if box[3] > 0 and box[4] > 0]
        found = [_within(box) for box in real]
        y[at, : len(found)] = np.array(found, dtype=np.float32).reshape(-1, 5)
        empty += len(listed) - len(found)
        pairs = zip(found, real, strict=True)
        cut += sum(abs(inside[3] - box[3]) + abs(inside[4] - box[4]) > ROUNDING for inside, box in pairs)
    if empty or cut:
        log.warning("visdrone: left out %d boxes without width or height, cut off %d at the image's edge", empty, cut)
    return torch.from_numpy(x), torch.from_numpy(y)


def _picture(path: Path) -> tuple[NDArray[np.uint8], int, int]:
    """The resized image (3, 224, 224), and its original width and height."""
    with open_jpeg(path, MOST_PICTURE) as image:
        width, height = image.size  # of the header: nothing is decoded yet
        if not 0 < width * height <= MOST_PIXELS:
            raise damaged(path, f"at most {MOST_PIXELS} pixels", f"{width} x {height}")
        small = image.convert("RGB").resize((SIDE, SIDE), BILINEAR)
        return np.asarray(small).transpose(2, 0, 1), width, height


def boxes_of(path: Path, width: int, height: int) -> list[Box]:
    """Return the boxes of an image of this size in pixels; some in the set have a width or height of 0. Files in
    annotations/ have the official form, others YOLO's. Raises DataError for any other line, and for a box outside the
    image."""
    official = path.parent.name == "annotations"
    form = "left,top,width,height,score,category,truncation,occlusion" if official else "category x y width height"
    try:
        lines = read(path, most=MOST_TEXT).decode("ascii").splitlines()
    except UnicodeDecodeError as error:
        raise damaged(path, "plain text", error) from error
    found = list[Box]()
    for number, line in enumerate(lines, 1):
        box = _official(line, width, height) if official else _yolo(line)
        if box is None or min(box[3:]) < 0 or min(box[3:]) > 0 >= min(_within(box)[3:]):
            raise damaged(f"{path}: line {number}", f"a box in {width} x {height} pixels, {form}", f"{line[:80]!r}")
        found.append(box)
    if len(found) > MOST_BOXES:
        raise damaged(path, f"at most {MOST_BOXES} boxes", len(found))
    return found


def _within(box: Box) -> Box:
    """The part of the box in the image; its size is negative if there is none."""
    category, x, y, width, height = box
    left, top = max(0.0, x - width / 2), max(0.0, y - height / 2)
    right, low = min(1.0, x + width / 2), min(1.0, y + height / 2)
    return category, (left + right) / 2, (top + low) / 2, right - left, low - top


def _official(line: str, width: int, height: int) -> Box | None:
    """The box of a line in the official form, else None. Some lines of the set end in a comma."""
    fields = line.strip().removesuffix(",").split(",")
    if len(fields) != 8 or not all(map(WHOLE.fullmatch, fields)):
        return None
    left, top, across, down, score, category, truncation, occlusion = map(int, fields)
    if score not in (0, 1) or not 0 <= category < len(CATEGORIES) or truncation not in (-1, 0, 1):
        return None
    if occlusion not in (-1, 0, 1, 2):
        return None
    return category, (left + across / 2) / width, (top + down / 2) / height, across / width, down / height


def _yolo(line: str) -> Box | None:
    category, *shares = line.split() or [""]
    if len(shares) != 4 or not WHOLE.fullmatch(category) or not all(map(SHARE.fullmatch, shares)):
        return None
    if not 0 <= int(category) < len(CATEGORIES):
        return None
    x, y, across, down = map(float, shares)
    return int(category), x, y, across, down
