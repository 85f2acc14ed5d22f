"""The same four values give the same stream in every process and on every machine."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from fl_engine.core import seeds


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0, "init"), 4_613_535_978_831_794_426),
        ((7, "select", 3, 2), 8_783_200_777_564_895_489),
        ((2**63, "client", 999, 99), 6_048_423_345_069_700_713),
    ],
    ids=str,
)
def test_golden_seeds(arguments: tuple[int, str], expected: int) -> None:
    """Written down once: whoever changes the derivation changes every stored run."""
    assert seeds.derive(*arguments) == expected


def test_golden_stream() -> None:
    assert seeds.rng(7, "select", 3, 2).integers(0, 10**9, 3).tolist() == [24199762, 37892714, 461633341]
    assert seeds.rng(7, "select", 3, 2).normal(size=2).tolist() == [0.5408150199399302, 0.3808099041913865]


def test_a_secret_seed_keys_the_generator_with_128_bits() -> None:
    """With 63, a stream could be searched for. The seeds that others see of it are the usual ones."""
    secret = 2**255 + 7
    digest = hashlib.sha256(f"flexfleet/{secret}/select/3/2".encode()).digest()
    keyed = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    assert seeds.rng(secret, "select", 3, 2).integers(0, 10**9, 3).tolist() == keyed.integers(0, 10**9, 3).tolist()
    assert seeds.derive(secret, "select", 3, 2) == int.from_bytes(digest[:8], "little") >> 1
    usual = np.random.Generator(np.random.Philox(seeds.derive(2**128 - 1, "select")))
    assert seeds.rng(2**128 - 1, "select").random() == usual.random()
