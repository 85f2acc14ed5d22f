"""EPIC-SOUNDS: recognise 44 classes of kitchen sounds from log-mel spectrograms of 400 x 128.

Huh et al., EPIC-SOUNDS: A Large-Scale Dataset of Actions that Sound, ICASSP 2023. Each row of the annotations
(https://github.com/epic-kitchens/epic-sounds-annotations) states the start and stop of a segment in a video's sound,
counted in samples at 24 kHz. The publisher's script (https://github.com/epic-kitchens/download-scripts-100) downloads
the videos of EPIC-KITCHENS-100 without a registration form. The publisher refers to Auditory SlowFast
(https://github.com/ekazakos/auditory-slow-fast, audio_extraction/extract_audio.py), which extracts `<video_id>.wav`
from each video (24 kHz, one channel, 16 bits). The reader uses these WAV files, not the HDF5 file of Auditory SlowFast.

The spectrogram follows FedAIoT (Alam et al., 2023, Sec. 2.2.3). Details that the paper omits are taken from the
authors' code. Hann windows of 10 ms are centred every 5 ms, and the segment is padded with silence at both ends. The
magnitudes of a 2,048-point Fourier transform are the input of 128 triangular mel filters of height 1 from 0 to 12 kHz
(HTK's formula). Each value is ln(1e-6 + filter output). The last frame is repeated to fill 400 frames. Departs from
FedAIoT, which draws a random clip of 1.999 s from a longer segment in each training epoch. For testing, FedAIoT draws
five random clips from such a segment. Here the middle 1.999 s of a longer segment are used, so that samples are
constant. Values are rounded to multiples of 1/1024, so that machines with different rounding errors get the same data.

The training part has the 60,055 training segments. The test part has the 8,035 validation segments, because the labels
of the test segments are not published. FedAIoT's text states 40,175 test samples (Sec. 2.2.1), which is more than all
published validation and test segments. Each participant is a natural client.

Computing the spectrograms takes about ten minutes, so `fl_engine.data.array_files` stores them in epic-sounds/packed
(14 GB) and maps them into memory.
"""

from __future__ import annotations

import csv
import io
import re
import wave
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fl_engine.core.samples import Data
from fl_engine.data.array_files import cached
from fl_engine.data.files import damaged, expecting, read, require_by_hand, warn_of_other_counts
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
"""Version of the stored arrays. Increase the version if the code computes different arrays from the same files."""
CLASSES = 44
MOST_BYTES = 2**25
"""Maximum size of an annotation file in bytes. The training file has about 6 MB."""
PUBLISHED = (60_055, 8_035)
"""Numbers of training and test segments."""
MOST_SEGMENTS = 100_000

RATE = 24_000
"""Sampling rate of the sound in Hz."""
CLIP = 47_976
"""Maximum number of audio samples that are used from a segment (1.999 s)."""
WINDOW, STEP, POINTS = 240, 120, 2048
"""Window length, hop length and length of the Fourier transform, in audio samples."""
FRAMES, MELS = 400, 128
FLOOR = 1e-6
GRID = 1024.0

VIDEO = re.compile(r"P\d{2}_\d{2,3}", re.ASCII)
NUMBER = re.compile(r"\d{1,10}", re.ASCII)
COLUMNS = ("participant_id", "video_id", "start_sample", "stop_sample", "class_id")


class Segment(NamedTuple):
    """Row of an annotation file. `start` and `stop` are indices of audio samples in the video's sound."""

    participant: str
    video: str
    start: int
    stop: int
    label: int


def load(root: Path) -> Data:
    """Load `root`/epic-sounds as spectrograms (N, 1, 400, 128), which are not normalised.

    Raises DataError if annotations or WAV files are missing or damaged, or a segment extends beyond its video's sound.
    """
    require_by_hand("epic_sounds", root, FILES, HOW)
    parts = tuple(segments(root / file) for file in FILES[:2])
    videos = sorted({segment.video for part in parts for segment in part})
    require_by_hand("epic_sounds", root, [f"{AUDIO}/{video}.wav" for video in videos], HOW)
    inputs = [root / file for file in (*FILES[:2], *(f"{AUDIO}/{video}.wav" for video in videos))]
    arrays = cached(root / FOLDER / "packed", VERSION, inputs, partial(_pack, root / AUDIO, parts))
    data = Data("epic_sounds", Classification(CLASSES, top5=True), mean=(), std=(), **arrays)
    return warn_of_other_counts(data, *PUBLISHED)


def _pack(audio: Path, parts: Sequence[list[Segment]], folder: Path) -> None:
    for name, part in zip(("train", "test"), parts, strict=True):
        np.save(folder / f"{name}_y.npy", np.array([segment.label for segment in part]))
        shape = (len(part), 1, FRAMES, MELS)
        x = np.lib.format.open_memmap(folder / f"{name}_x.npy", "w+", np.dtype("<f4"), shape)  # larger than memory
        for at, segment in enumerate(part):
            x[at, 0] = log_mel(_sound(audio / f"{segment.video}.wav", segment))
    participants = sorted({segment.participant for segment in parts[0]})
    source = [participants.index(segment.participant) for segment in parts[0]]
    np.save(folder / "natural_client.npy", np.array(source))


def segments(path: Path) -> list[Segment]:
    """Return the rows of an annotation file. Raises DataError for a wrong column, value or number of rows."""
    with expecting(path, f"a table in CSV with the columns {', '.join(COLUMNS)}"):
        rows = csv.DictReader(io.StringIO(read(path, most=MOST_BYTES).decode(), newline=""))
        found = [_segment(*(row.get(name) or "" for name in COLUMNS)) for row in rows]
    if not 0 < len(found) <= MOST_SEGMENTS:
        raise damaged(path, f"1 to {MOST_SEGMENTS} segments", len(found))
    return found


def _segment(participant: str, video: str, *numbers: str) -> Segment:
    known = VIDEO.fullmatch(video) and video.startswith(f"{participant}_") and all(map(NUMBER.fullmatch, numbers))
    start, stop, label = map(int, numbers) if known else (0, 0, 0)
    if start >= stop or label >= CLASSES:
        raise ValueError(f"an invalid row: {participant[:20]!r}, {video[:20]!r}, {', '.join(numbers)[:80]!r}")
    return Segment(participant, video, start, stop, label)


def _sound(path: Path, segment: Segment) -> NDArray[np.float64]:
    """Return the middle 1.999 s of the segment, or the whole segment if it is shorter, with values in [-1, 1]."""
    length = min(segment.stop - segment.start, CLIP)
    start = segment.start + (segment.stop - segment.start - length) // 2
    expected = f"a WAV file of {RATE} samples a second, 1 channel, 2 bytes a sample, up to sample {segment.stop}"
    with expecting(path, expected), path.open("rb") as file, wave.open(file) as sound:
        form = (sound.getframerate(), sound.getnchannels(), sound.getsampwidth())
        if form != (RATE, 1, 2) or segment.stop > sound.getnframes():
            raise ValueError(f"{form} and {sound.getnframes()} samples")
        sound.setpos(start)
        content = sound.readframes(length)
        if len(content) != 2 * length:
            raise ValueError("a truncated file")
    return np.frombuffer(content, dtype="<i2") / 32768


def log_mel(sound: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the log-mel spectrogram (400, 128) of a sound with 1 to 47,999 samples at 24 kHz. The frames are 5 ms
    apart, and the mel bands have ascending frequencies."""
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
    """Return the 128 filters as three arrays: the concatenated frequency indices of all filters, the weights at these
    indices, and the position of each filter's first entry. The 130 band edges are equidistant on the mel scale, 2595
    log10(1 + Hz / 700). Filter m rises from edge m to edge m + 1 and falls to edge m + 2."""
    top = 2595 * np.log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, MELS + 2) / 2595) - 1)[:, None]
    hertz = np.linspace(0, RATE / 2, POINTS // 2 + 1)
    rising = (hertz - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - hertz) / (edges[2:] - edges[1:-1])
    passing = np.maximum(0, np.minimum(rising, falling))
    filters, frequencies = passing.nonzero()
    return frequencies, passing[filters, frequencies], np.searchsorted(filters, np.arange(MELS))
