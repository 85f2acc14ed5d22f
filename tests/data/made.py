"""Write small data sets with generated contents in the official file formats."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fl_engine.data.downloads import RemoteFile


def idx(values: NDArray[np.uint8]) -> bytes:
    header = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.tobytes()


def idx_files(root: Path, files: Sequence[str], samples: tuple[int, int], classes: int) -> None:
    """Write images and labels of the training part and of the test part. Every class occurs."""
    rng = np.random.default_rng(0)
    for part, count in zip((files[:2], files[2:]), samples, strict=True):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % classes).astype(np.uint8)
        for file, values in zip(part, (images, labels), strict=True):
            write(root / file, gzip.compress(idx(values), 1, mtime=0))


def cifar10_files(root: Path, records: int) -> Path:
    """Write five training files and a test file, and return their folder."""
    rng, folder = np.random.default_rng(0), root / "cifar10" / "cifar-10-batches-bin"
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        table = rng.integers(0, 256, (records, 3073), dtype=np.uint8)
        table[:, 0] = np.arange(records) % 10
        write(folder / f"{name}.bin", table.tobytes())
    return folder


def cifar100_files(root: Path, records: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    for name, count in zip(("train", "test"), records, strict=True):
        table = rng.integers(0, 256, (count, 3074), dtype=np.uint8)
        table[:, 0], table[:, 1] = np.arange(count) % 20, np.arange(count) % 100
        write(root / "cifar100" / "cifar-100-binary" / f"{name}.bin", table.tobytes())


def femnist_file(writers: Mapping[str, int], seed: int = 0) -> dict[str, Any]:
    """Return a file of LEAF with the given number of samples per writer. Each writer writes one character only."""
    rng = np.random.default_rng(seed)
    data = {
        writer: {
            "x": [(rng.integers(0, 256, 784) / 255).tolist() for _ in range(count)],
            "y": [number % 62] * count,
        }
        for number, (writer, count) in enumerate(writers.items())
    }
    return {"users": list(writers), "num_samples": list(writers.values()), "user_data": data}


def femnist_files(root: Path, *files: dict[str, Any]) -> tuple[str, ...]:
    names = tuple(f"femnist/all_data/all_data_{number}.json" for number in range(len(files)))
    for name, content in zip(names, files, strict=True):
        write(root / name, json.dumps(content).encode())
    return names


def jpeg(seed: int, size: tuple[int, int] = (64, 64), mode: str = "RGB") -> bytes:
    """Return a picture of 8 x 8 patches, whose colours survive JPEG's compression."""
    rng = np.random.default_rng(seed)
    width, height = size
    shape = (height // 8, width // 8, *((3,) if mode == "RGB" else ()))
    patches = rng.integers(0, 256, shape, dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    out = io.BytesIO()
    Image.fromarray(patches).save(out, "JPEG", quality=95)
    return out.getvalue()


WNIDS = tuple(f"n{10_000_000 + number * 37}" for number in range(200))


def tiny_imagenet_files(root: Path, classes: Sequence[str] = WNIDS[:3], train: int = 4, val: int = 2) -> Path:
    """Write `train` and `val` pictures of each class. The list of validation pictures names all classes."""
    folder = root / "tiny-imagenet-200"
    write(folder / "wnids.txt", "".join(f"{wnid}\n" for wnid in reversed(WNIDS)).encode())
    lines = []
    for number in range(val * 200):
        wnid = WNIDS[number % 200]
        lines.append(f"val_{number}.JPEG\t{wnid}\t0\t1\t2\t3\n")
        if wnid in classes:
            write(folder / "val" / "images" / f"val_{number}.JPEG", jpeg(number))
    write(folder / "val" / "val_annotations.txt", "".join(lines).encode())
    for wnid in classes:
        for number in range(train):
            path = folder / "train" / wnid / "images" / f"{wnid}_{number}.JPEG"
            write(path, jpeg(int(wnid[1:]) + number, mode="L" if number == 1 else "RGB"))
    return folder


Rectangle = tuple[int, int, int, int, int]
"""Category, left, top, width, height, in pixels."""


def visdrone_files(
    root: Path, part: str, images: Mapping[str, Sequence[Rectangle]], size: tuple[int, int] = (96, 64)
) -> Path:
    """Write a grey picture with white rectangles for each name, and return the part's folder."""
    folder, (width, height) = root / "visdrone" / f"VisDrone2019-DET-{part}", size
    for name, rectangles in images.items():
        pixels, lines = np.full((height, width, 3), 100, dtype=np.uint8), []
        for category, left, top, across, down in rectangles:
            pixels[max(0, top) : top + down, max(0, left) : left + across] = 255
            score = int(0 < category < 11)
            lines.append(f"{left},{top},{across},{down},{score},{category},0,1")
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "JPEG", quality=95)
        write(folder / "images" / f"{name}.jpg", out.getvalue())
        text = "".join(f"{line}\n" for line in lines)
        write(folder / "annotations" / f"{name}.txt", text.encode())
    return folder


PLAY = """First Citizen:
Before we  proceed any further,
hear me speak.

All:
Speak, speak.

First Citizen:
You are all resolved
rather to die?
Resolved, a$

All:
Ay
No
Ay
Resolved! & so
Speak
"""


def shakespeare_file(root: Path, text: str = PLAY) -> Path:
    return write(root / "shakespeare" / "input.txt", text.encode())


def wav(sound: NDArray[np.int16], rate: int = 24_000, channels: int = 1) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setframerate(rate)
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.writeframes(sound.astype("<i2").tobytes())
    return out.getvalue()


ROW = "annotation_id,participant_id,video_id,start_timestamp,stop_timestamp,start_sample,stop_sample,description,class,"


def annotations(rows: Sequence[tuple[str, int, int, int]]) -> str:
    """Return the CSV file for rows of (video, start, stop, class)."""
    lines = [ROW + "class_id"]
    for number, (video, start, stop, label) in enumerate(rows):
        times = ",".join(f"00:00:{at / 24_000:06.3f}" for at in (start, stop))
        lines.append(f'{video}_{number},{video[:3]},{video},{times},{start},{stop},"thud, click",sound,{label}')
    return "".join(f"{line}\r\n" for line in lines)


def epic_sounds_files(root: Path, train: Sequence[tuple[str, int, int, int]], test: Sequence[Any]) -> Path:
    """Write three seconds of noise for each video."""
    folder = root / "epic-sounds"
    for name, rows in (("train", train), ("validation", test)):
        write(folder / "epic-sounds-annotations" / f"EPIC_Sounds_{name}.csv", annotations(rows).encode())
    for number, video in enumerate(sorted({row[0] for row in (*train, *test)})):
        sound = np.random.default_rng(number).integers(-20_000, 20_000, 72_000).astype(np.int16)
        write(folder / "audio" / f"{video}.wav", wav(sound))
    return folder


def remote(path: Path, algorithm: str = "md5") -> RemoteFile:
    """Return a file as one to download."""
    digest = hashlib.new(algorithm, path.read_bytes()).hexdigest()
    return RemoteFile(path.as_uri(), f"{algorithm}:{digest}")


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path
