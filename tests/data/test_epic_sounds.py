"""EPIC-SOUNDS: the spectrogram by definition, segments of generated sound, and the real annotations."""

from __future__ import annotations

import cmath
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fl_engine.datasets import epic_sounds
from tests.data import made

TRAIN = [("P01_01", 1000, 13_000, 4), ("P01_02", 0, 72_000, 43), ("P22_107", 5, 6, 0)]
TEST = [("P01_02", 24_000, 48_000, 43)]


# --------------------------------------------------------------------------------------------- the spectrogram
def mel(hertz: float) -> float:
    return 2595 * math.log10(1 + hertz / 700)


def written_out(sound: NDArray[np.float64], frame: int, band: int) -> float:
    """Compute one value of the spectrogram by its definition, without FFT and matrices."""
    edges = [700 * (10 ** (mel(12_000) * point / 129 / 2595) - 1) for point in range(130)]
    left, middle, right = edges[band : band + 3]
    passed = 0.0
    for number in range(1025):
        hertz = number * 24_000 / 2048
        if not left < hertz < right:
            continue
        height = (hertz - left) / (middle - left) if hertz <= middle else (right - hertz) / (right - middle)
        total = 0j
        for at in range(240):
            sample = 120 * frame + at - 120
            if 0 <= sample < len(sound):
                hann = 0.5 - 0.5 * math.cos(2 * math.pi * at / 240)
                total += sound[sample] * hann * cmath.exp(-2j * math.pi * number * at / 2048)
        passed += height * abs(total)
    return math.log(passed + 1e-6)


@pytest.mark.parametrize("frame", [0, 57, 100])
def test_a_spectrogram_is_what_the_definition_says(frame: int) -> None:
    sound = np.random.default_rng(frame).normal(0, 0.1, 12_000)
    found = epic_sounds.log_mel(sound)
    assert found.shape == (400, 128)
    for band in (0, 1, 17, 64, 126, 127):
        assert found[frame, band] == pytest.approx(written_out(sound, frame, band), abs=0.6 / 1024)


@pytest.mark.parametrize(("samples", "frames"), [(1, 1), (119, 1), (120, 2), (47_976, 400), (12_000, 101)])
def test_the_last_frame_is_repeated(samples: int, frames: int) -> None:
    found = epic_sounds.log_mel(np.random.default_rng(0).normal(size=samples))
    assert (found[frames - 1 :] == found[frames - 1]).all()
    assert frames == 1 or (found[frames - 2] != found[frames - 1]).any()


# --------------------------------------------------------------------------------------------------- segments
@pytest.fixture
def sounds(tmp_path: Path) -> Path:
    made.epic_sounds_files(tmp_path, TRAIN, TEST)
    return tmp_path


def audio(root: Path, video: str) -> Path:
    return root / "epic-sounds" / "audio" / f"{video}.wav"


def test_segments_become_spectrograms_of_their_sound(sounds: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = epic_sounds.load(sounds)
    assert "epic_sounds has 3 training and 1 test samples" in caplog.text
    assert (data.train_x.shape, data.test_x.shape) == ((3, 1, 400, 128), (1, 1, 400, 128))
    assert (data.train_y.tolist(), data.test_y.tolist()) == ([4, 43, 0], [43])
    assert data.natural_client is not None
    assert data.natural_client.tolist() == [0, 0, 1]
    answers = torch.arange(44.0)[None]  # class 43 is the first, 39 the fifth
    for label, top5 in ((39, 1.0), (38, 0.0)):
        found = data.task.measure([data.task.observe(answers, torch.tensor([label]))])
        assert found.values == {"accuracy": 0.0, "top5": top5}
    sound = np.frombuffer(audio(sounds, "P01_01").read_bytes()[44:], dtype="<i2") / 32768
    assert np.array_equal(data.train_x[0, 0], epic_sounds.log_mel(sound[1000:13_000]).astype(np.float32))
    # Of three seconds the middle 1.999: (72,000 - 47,976) / 2 = 12,012.
    sound = np.frombuffer(audio(sounds, "P01_02").read_bytes()[44:], dtype="<i2") / 32768
    assert np.array_equal(data.train_x[1, 0], epic_sounds.log_mel(sound[12_012:59_988]).astype(np.float32))
    assert torch.equal(data.normalise(data.train_x), data.train_x)
