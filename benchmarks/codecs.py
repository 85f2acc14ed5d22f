"""Workload W8: compare the encoding and decoding speed of flexfleet's QSGD codec with a naive implementation.

Speeds are MB of float32 per CPU second of one thread, including random numbers and packing. CPU seconds are used
because other programs hardly affect them. The naive implementation computes the level of one number after another, and
appends the bits of the level to a string. It encodes only some of the numbers, because this method is slow. The
implementations alternate and produce the same levels from the same random numbers.

Usage:
    python -m benchmarks W8
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from fl_engine.codecs import Qsgd
from fl_engine.core import seeds

NUMBERS, PART = 2_400_000, 48_000
TITLE = "QSGD, 2.4 M normal numbers, 8 bits, buckets of 512"
GOALS = {"fixed": 200, "elias": 50}
"""Map each coding to the target speed of encoding and decoding in MB/s."""


def normal(count: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal(count, dtype=np.float32))


# ------------------------------------------------------------------------------------------------ the naive codec
@dataclass(frozen=True)
class Naive:
    codec: Qsgd

    def encode(self, x: torch.Tensor, seed: int) -> tuple[list[float], str]:
        """Return the norms of the buckets, and the encoded levels as a string of zeros and ones."""
        values, rng, codec = x.tolist(), seeds.rng(seed, "x"), self.codec
        size, norms, levels = codec.bucket or len(values), list[float](), list[int]()
        for start in range(0, len(values), size):
            bucket = values[start : start + size]
            norms.append(math.sqrt(sum(value * value for value in bucket)))
            for value in bucket:
                exact = value / norms[-1] * codec.s if norms[-1] else 0.0
                below = math.floor(exact)
                levels.append(below + (rng.random(dtype=np.float32) < exact - below))
        if codec.coding == "fixed":
            return norms, "".join(format(level + codec.s, f"0{codec.width}b") for level in levels)
        text, run = "", 0
        for level in levels:
            if level:
                text += codeword(run + 1) + ("1" if level < 0 else "0") + codeword(abs(level))
            run = 0 if level else run + 1
        return norms, text + codeword(run + 1) if run else text

    def decode(self, made: tuple[list[float], str], count: int) -> torch.Tensor:
        (norms, text), codec = made, self.codec
        levels, at = list[int](), 0
        if codec.coding == "fixed":
            levels = [int(text[i * codec.width : (i + 1) * codec.width], 2) - codec.s for i in range(count)]
        while len(levels) < count:
            run, at = number(text, at)
            levels += [0] * (run - 1)
            if len(levels) < count:
                level, end = number(text, at + 1)
                levels.append(-level if text[at] == "1" else level)
                at = end
        size = codec.bucket or count
        return torch.tensor([level * norms[i // size] / codec.s for i, level in enumerate(levels)])


def codeword(number: int) -> str:
    """Return the codeword of a number in Elias's omega code."""
    found = "0"
    while number > 1:
        found = f"{number:b}" + found
        number = number.bit_length() - 1
    return found


def number(text: str, at: int) -> tuple[int, int]:
    """Decode the codeword at index `at`; return the number and the index of the next codeword."""
    found = 1
    while text[at] == "1":
        found, at = int(text[at : at + found + 1], 2), at + found + 1
    return found, at + 1


# -------------------------------------------------------------------------------------------------------- the row
def compete(turns: int) -> dict[str, Any]:
    """Measure the speeds of both codecs in MB/s, for encoding and decoding with each coding. Speeds are medians of
    `turns` measurements. The result also contains the encoded size in bits per number, including the norms.
    """
    torch.set_num_threads(1)
    whole = normal(NUMBERS)
    part, header = whole[:PART].clone(), {"x": (torch.float32, (NUMBERS,))}
    found: dict[str, Any] = {"workload": "W8", "bits": {}, "ours": {}, "naive": {}, "ratios": {}, "goals": {}}
    for coding, goal in GOALS.items():
        codec = Qsgd(coding=coding)  # type: ignore[arg-type]
        naive, made = Naive(codec), codec.encode({"x": whole}, 0)
        slow = naive.encode(part, 0)
        found["bits"][coding] = 8 * sum(tensor.nbytes for tensor in made.values()) / NUMBERS
        ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "encode": (partial(codec.encode, {"x": whole}, 0), partial(naive.encode, part, 0)),
            "decode": (partial(codec.decode, made, header), partial(naive.decode, slow, PART)),
        }
        for way, (ours, other) in ways.items():
            seconds = [(_seconds(ours), _seconds(other)) for _ in range(turns)]
            key = f"{coding} {way}"
            found["ours"][key], found["naive"][key] = (
                4e-6 * count / statistics.median(each)
                for count, each in zip((NUMBERS, PART), zip(*seconds, strict=True), strict=True)
            )
            found["ratios"][key] = found["ours"][key] / found["naive"][key]
            found["goals"][key] = goal
    return found


def table(found: dict[str, Any]) -> str:
    lines = [f"W8  {TITLE}", f"{'':16}{'MB/s':>8}{'goal':>8}{'naive':>8}{'ratio':>8}{'bits':>8}"]
    for key, speed in found["ours"].items():
        bits = found["bits"][key.split()[0]]
        lines.append(
            f"{key:16}{speed:8.0f}{found['goals'][key]:8}{found['naive'][key]:8.2f}{found['ratios'][key]:8.0f}{bits:8.2f}"
        )
    return "\n".join(lines)


def _seconds(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before
