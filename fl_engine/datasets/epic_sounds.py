"""EPIC-SOUNDS: sounds in kitchens, in 44 classes, as log-mel spectrograms of 400 x 128.

Huh et al., EPIC-SOUNDS: A Large-Scale Dataset of Actions that Sound, ICASSP 2023. Annotations:
https://github.com/epic-kitchens/epic-sounds-annotations; a row is a segment of a video's sound, in samples at 24 kHz.
The sound is that of EPIC-KITCHENS-100, whose videos a script of the publisher's downloads, without a form
(https://github.com/epic-kitchens/download-scripts-100). Auditory SlowFast
(https://github.com/ekazakos/auditory-slow-fast, audio_extraction/extract_audio.py), to which the publisher refers,
extracts `<video_id>.wav` from each: 24 kHz, one channel, 16 bits. These files are read, not the HDF5 file into which it
packs them.

The spectrogram is that of FedAIoT (Alam et al., 2023: the text's Sec. 2.2.3, and its code where the text is silent):
Hann windows of 10 ms every 5 ms, centred, with silence before and after the segment; magnitudes of a Fourier transform
of 2,048 points; 128 triangular mel filters of height 1 from 0 to 12 kHz, by HTK's formula; the natural logarithm of
their outputs + 1e-6; the last frame is repeated up to 400. Departs from FedAIoT, which takes 1.999 s of a longer
segment at random in each epoch, and five such clips for a test; here it is the middle 1.999 s in both parts, so that a
sample is one tensor. Values are rounded to 1/1024, so that machines whose last bits differ get the same data.

The 60,055 training segments are the training part, the 8,035 validation segments the test part, since the labels of the
test segments are not published. FedAIoT's text has 40,175 test samples (Sec. 2.2.1), more than the publisher's
validation and test tables have together. A participant is the natural client.

Computing the spectrograms takes about ten minutes, so they are stored in epic-sounds/packed (14 GB), by
`fl_engine.data.array_cache`, and mapped into memory.
"""

from __future__ import annotations

import csv
import io
import re
import struct
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_engine.core.samples import Data
from fl_engine.data.array_cache import packed
from fl_engine.data.files import damaged, read, require_by_hand, warn_of_other_counts
from fl_engine.tasks import Classification

ABOUT = (
    "EPIC-SOUNDS, 1x400x128 log-mel, 44 classes, 60,055 + 8,035; licence CC BY-NC 4.0; 17 GB of WAV, by hand, and "
    "14 GB of spectrograms made of it"
)
FOLDER = "epic-sounds"
ANNOTATIONS = f"{FOLDER}/epic-sounds-annotations"
AUDIO = f"{FOLDER}/audio"
FILES = (f"{ANNOTATIONS}/EPIC_Sounds_train.csv", f"{ANNOTATIONS}/EPIC_Sounds_validation.csv", f"{AUDIO}/*.wav")
URL = "https://github.com/epic-kitchens/epic-sounds-annotations"
VIDEOS = "https://github.com/epic-kitchens/download-scripts-100"
EXTRACT = "https://github.com/ekazakos/auditory-slow-fast"
HOW = (
    f"Clone {URL} there (10 MB), download EPIC-KITCHENS-100's videos with {VIDEOS} (CC BY-NC 4.0, no form), and put "
    f"their sound, as extract_audio.py of Auditory SlowFast ({EXTRACT}) makes it, into {AUDIO} as <video_id>.wav "
    "(17 GB)"
)
VERSION = 1
"""The version of the stored arrays, which changes if the same files are read in another way."""
CLASSES = 44
MOST_BYTES = 2**25
"""The largest annotation file. The training file has about 6 MB."""
PUBLISHED = (60_055, 8_035)
"""Training and test segments."""
MOST_SEGMENTS = 100_000

RATE = 24_000
"""Samples of sound per second."""
CLIP = 47_976
"""Samples of the longest segment, 1.999 s."""
WINDOW, STEP, POINTS = 240, 120, 2048
"""The length of a window, the step to the next window, and the length of the Fourier transform, in samples."""
FRAMES, MELS = 400, 128
FLOOR = 1e-6
GRID = 1024.0

VIDEO = re.compile(r"P\d{2}_\d{2,3}", re.ASCII)
NUMBER = re.compile(r"\d{1,10}", re.ASCII)
COLUMNS = ("participant_id", "video_id", "start_sample", "stop_sample", "class_id")


@dataclass(frozen=True)
class Segment:
    """A row of an annotation file."""

    participant: str
    video: str
    start: int
    """The start of the segment, in samples of the video's sound."""
    stop: int
    label: int


def load(root: Path) -> Data:
    """Load `root`/epic-sounds: maps (N, 1, 400, 128), not normalised.

    Raises DataError for annotations or sound that are missing or damaged, and for a segment outside its video's sound.
    """
    require_by_hand("epic_sounds", root, FILES, HOW)
    parts = tuple(segments(root / file) for file in FILES[:2])
    videos = sorted({segment.video for part in parts for segment in part})
    require_by_hand("epic_sounds", root, [f"{AUDIO}/{video}.wav" for video in videos], HOW)
    inputs = [root / file for file in (*FILES[:2], *(f"{AUDIO}/{video}.wav" for video in videos))]
    arrays = packed(root / FOLDER / "packed", VERSION, inputs, partial(_pack, root / AUDIO, parts))
    data = Data("epic_sounds", Classification(CLASSES, top5=True), mean=(), std=(), **arrays)
    warn_of_other_counts(data, *PUBLISHED)
    return data


def _pack(audio: Path, parts: Sequence[list[Segment]], folder: Path) -> None:
    for name, part in zip(("train", "test"), parts, strict=True):
        np.save(folder / f"{name}_y.npy", np.array([segment.label for segment in part]))
        with (folder / f"{name}_x.npy").open("wb") as file:  # one by one, since all do not fit into memory
            shape = (len(part), 1, FRAMES, MELS)
            np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
            for segment in part:
                file.write(log_mel(_sound(audio / f"{segment.video}.wav", segment)).astype("<f4").tobytes())
    participants = sorted({segment.participant for segment in parts[0]})
    source = [participants.index(segment.participant) for segment in parts[0]]
    np.save(folder / "natural_client.npy", np.array(source))


def segments(path: Path) -> list[Segment]:
    """Return the rows of an annotation file. Raises DataError for other columns or values, no rows or too many."""
    found: list[Segment] = []
    try:
        rows = csv.DictReader(io.StringIO(read(path, most=MOST_BYTES).decode(), newline=""))
        if absent := set(COLUMNS) - set(rows.fieldnames or ()):
            raise damaged(path, f"the columns {', '.join(COLUMNS)}", f"no {min(absent)}")
        for row in rows:
            found.append(_segment(f"{path}: line {rows.line_num}", [row[name] or "" for name in COLUMNS]))
    except (UnicodeDecodeError, csv.Error) as error:
        raise damaged(path, "a table in CSV", error) from error
    if not 0 < len(found) <= MOST_SEGMENTS:
        raise damaged(path, f"1 to {MOST_SEGMENTS} segments", len(found))
    return found


def _segment(where: str, values: list[str]) -> Segment:
    participant, video, *numbers = values
    if not VIDEO.fullmatch(video) or not video.startswith(f"{participant}_"):
        raise damaged(where, "a participant and a video, as P01 and P01_11", f"{participant[:20]!r} and {video[:20]!r}")
    if not all(map(NUMBER.fullmatch, numbers)):
        raise damaged(where, "start, stop and class", f"{', '.join(numbers)[:80]!r}")
    start, stop, label = map(int, numbers)
    if start >= stop or label >= CLASSES:
        raise damaged(where, f"a start before the stop and a class in 0..{CLASSES - 1}", f"{start}, {stop} and {label}")
    return Segment(participant, video, start, stop, label)


def _sound(path: Path, segment: Segment) -> NDArray[np.float64]:
    """The middle of the segment, at most 1.999 s, with values in -1..1."""
    length = min(segment.stop - segment.start, CLIP)
    start = segment.start + (segment.stop - segment.start - length) // 2
    try:
        with path.open("rb") as file, wave.open(file) as sound:
            form = (sound.getframerate(), sound.getnchannels(), sound.getsampwidth())
            if form != (RATE, 1, 2):
                raise damaged(path, f"{RATE} samples a second, 1 channel, 2 bytes a sample", form)
            if segment.stop <= sound.getnframes():
                sound.setpos(start)
                content = sound.readframes(length)
            else:
                content = b""
    except (OSError, EOFError, wave.Error, struct.error, ValueError, RuntimeError, MemoryError) as error:
        raise damaged(path, "a WAV file", error) from error
    if len(content) != 2 * length:
        raise damaged(path, f"the samples {segment.start} to {segment.stop} of a segment", "a shorter file")
    return np.frombuffer(content, dtype="<i2") / 32768


def log_mel(sound: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the spectrogram (400, 128) of 1 to 47,999 samples at 24 kHz: a frame every 5 ms, and the logarithm of 128
    mel bands, low ones first."""
    silence = np.zeros(WINDOW // 2)
    padded = np.concatenate([silence, sound, silence])
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::STEP]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    magnitudes = np.abs(np.fft.rfft(frames * hann, POINTS))
    frequencies, weights, starts = _mel_filters()
    bands = np.add.reduceat(magnitudes[:, frequencies] * weights, starts, axis=1)
    found = np.pad(np.log(bands + FLOOR), ((0, FRAMES - len(bands)), (0, 0)), mode="edge")
    return np.round(found * GRID) / GRID


@cache
def _mel_filters() -> tuple[NDArray[np.intp], NDArray[np.float64], NDArray[np.intp]]:
    """The 128 filters as three arrays: the frequencies that pass each filter, filter by filter; their weights; and the
    position where each filter's frequencies begin. Of 130 frequencies at equal distances in mel = 2595 log10(1 + Hz /
    700), filter m rises from the m-th to the next and falls to the one after."""
    top = 2595 * np.log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, MELS + 2) / 2595) - 1)[:, None]
    hertz = np.linspace(0, RATE / 2, POINTS // 2 + 1)
    rising = (hertz - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - hertz) / (edges[2:] - edges[1:-1])
    passing = np.maximum(0, np.minimum(rising, falling))
    filters, frequencies = passing.nonzero()
    return frequencies, passing[filters, frequencies], np.searchsorted(filters, np.arange(MELS))
