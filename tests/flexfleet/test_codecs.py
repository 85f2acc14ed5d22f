"""Encoded weights through the whole of `flexfleet run`: every backend, resumed, with codecs of one's own, and what a
configuration may say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flexfleet.files.artifacts import PoolFile
from tests.harness.alike import alike, run_of
from tests.harness.run_folders import rounds_of

pytestmark = pytest.mark.usefixtures("own_folder", "no_drawings")

QSGD = ("codec.down.name=qsgd", "codec.down.bits=8", "codec.up.name=qsgd", "codec.up.bits=8")
HALF = ("codec.down.name=half", "codec.up.name=half")
MEMORY_AND_PROCESSES = {"memory": (), "processes": ("run.backend=processes",)}


def test_half_gives_equal_models_for_half_the_bytes(flexfleet: Any, quick: Sequence[str], tmp_path: Path) -> None:
    plain = run_of(flexfleet, "plain", quick)
    half = alike(flexfleet, [*quick, *HALF], MEMORY_AND_PROCESSES)["memory"]
    assert half["model_sha256"] != plain["model_sha256"]
    assert half["bytes"] == {way: bytes // 2 for way, bytes in plain["bytes"].items()}
    assert half["waste"] == plain["waste"]
    levels, bare = (PoolFile.read(tmp_path / f"runs/{name}/pool/pool.json") for name in ("memory", "plain"))
    for level, other in zip(levels.levels, bare.levels, strict=True):
        assert (level.bytes, level.bytes_up, level.codecs) == (2 * level.params, 2 * level.params, None)
        assert (other.bytes, other.bytes_up, other.codecs) == (4 * other.params, None, None)
    assert [model.sizes for model in levels.pool()] == [(level.bytes, level.bytes_up) for level in levels.levels]
    refused = flexfleet("run", "--run-id", "memory", "--resume", sets=[*quick, "codec.up.name=half"])
    assert refused.code == 2 and "codec.down.name: 'half' -> 'identity'" in refused.err


@pytest.mark.parametrize("algorithm", ["flexfl", "heterofl"])
def test_qsgd_gives_the_same_bits_in_every_backend_and_resumed(
    flexfleet: Any, quick: Sequence[str], algorithm: str, tmp_path: Path
) -> None:
    alike(flexfleet, [*quick, f"algorithm.name={algorithm}", *QSGD])
    pool = PoolFile.read(tmp_path / "runs/one/pool/pool.json")
    rows = rounds_of(tmp_path / "runs/one")
    most = {level.name: level.bytes for level in pool.levels}
    assert all(level.bytes < 1.5 * level.params for level in pool.levels), "9 bits of 32, a norm of 512"
    for row in rows:
        assert 0 < row["metrics"]["bytes_down"] <= sum(most[line["sent"]] for line in row["clients"])


@pytest.mark.parametrize("algorithm", ["dadaquant", "adagq"])
def test_assignment_codecs_give_same_bits_on_every_backend(
    flexfleet: Any, quick: Sequence[str], algorithm: str, tmp_path: Path
) -> None:
    sets = [*quick, f"algorithm.name={algorithm}", "algorithm.fine_tuning={gamma: 0}"]
    alike(flexfleet, sets, MEMORY_AND_PROCESSES)
    pool = PoolFile.read(tmp_path / "runs/processes/pool/pool.json")
    assert [level.name for level in pool.levels] == ["small", "medium", "large"]
    for row in rounds_of(tmp_path / "runs/processes"):
        metrics = row["metrics"]
        assert 0 < metrics["bits_up"] < metrics["bits_down"] / 2
        assert metrics["seconds_encode"] == 0 < metrics["seconds_decode"]
        assert metrics["seconds_encode_clients"] == pytest.approx(
            sum(c.get("seconds_encode", 0) for c in row["clients"])
        )


@pytest.mark.long
def test_digits_are_learnt_about_as_well(flexfleet: Any, quick: Sequence[str]) -> None:
    longer = [*quick, "rounds.stop=8", "rounds.evaluate_every=8", "training.epochs=4", "training.fraction=1.0"]
    scores = {
        name: run_of(flexfleet, name, [*longer, *sets])["metrics"]["avg"]
        for name, sets in (("plain", ()), ("half", HALF), ("qsgd", QSGD))
    }
    assert scores["plain"] > 0.5, "a guess is right in one of ten"
    assert abs(scores["half"] - scores["plain"]) < 0.05
    assert abs(scores["qsgd"] - scores["plain"]) < 0.1
