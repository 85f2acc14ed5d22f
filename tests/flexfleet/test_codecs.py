"""Encoded weights through the whole of `flexfleet run`: every backend, resumed, with codecs of one's own, and what a
configuration may say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flexfleet.files.artifacts import History, PoolFile

pytestmark = pytest.mark.usefixtures("own_folder", "no_drawings")

QSGD = ("codec.down.name=qsgd", "codec.down.bits=8", "codec.up.name=qsgd", "codec.up.bits=8")
HALF = ("codec.down.name=half", "codec.up.name=half")


def run_of(flexfleet: Any, name: str, sets: Sequence[str], *argv: str) -> Any:
    done = flexfleet("run", "--json", "--run-id", name, *argv, sets=sets)
    assert done.code == 0, done.err
    return done.json


def test_half_gives_equal_models_for_half_the_bytes(flexfleet: Any, quick: Sequence[str], tmp_path: Path) -> None:
    plain = run_of(flexfleet, "plain", quick)
    ways = {"memory": (), "processes": ("run.backend=processes",)}
    found = {name: run_of(flexfleet, name, [*quick, *HALF, *more]) for name, more in ways.items()}
    run_of(flexfleet, "again", [*quick, *HALF, "rounds.stop=1"])
    found["again"] = run_of(flexfleet, "again", [*quick, *HALF], "--resume")
    assert len({each["model_sha256"] for each in found.values()} - {plain["model_sha256"]}) == 1
    for each in found.values():
        assert each["bytes"] == {way: bytes // 2 for way, bytes in plain["bytes"].items()}
        assert each["waste"] == plain["waste"]
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
    kept = [each for each in quick if not each.startswith("algorithm.name")]
    sets = [*kept, f"algorithm.name={algorithm}", *QSGD]
    ways = {"memory": (), "processes": ("run.backend=processes",), "threads": ("run.devices=[cpu,cpu]",)}
    found = {name: run_of(flexfleet, name, [*sets, *more]) for name, more in ways.items()}
    run_of(flexfleet, "again", [*sets, "rounds.stop=1"])
    found["again"] = run_of(flexfleet, "again", sets, "--resume")
    for said in ("model_sha256", "bytes", "waste"):
        assert len({str(each[said]) for each in found.values()}) == 1, said
    pool = PoolFile.read(tmp_path / "runs/memory/pool/pool.json")
    rows = History.read(tmp_path / "runs/memory/history.json").rounds
    most = {level.name: level.bytes for level in pool.levels}
    assert all(level.bytes < 1.5 * level.params for level in pool.levels), "9 bits of 32, a norm of 512"
    for row in rows:
        assert 0 < row["metrics"]["bytes_down"] <= sum(most[line["sent"]] for line in row["clients"])


@pytest.mark.parametrize("algorithm", ["dadaquant", "adagq"])
def test_assignment_codecs_give_same_bits_on_every_backend(
    flexfleet: Any, quick: Sequence[str], algorithm: str, tmp_path: Path
) -> None:
    kept = [each for each in quick if not each.startswith("algorithm.name")]
    sets = [*kept, f"algorithm.name={algorithm}", "algorithm.fine_tuning={gamma: 0}"]
    found = {name: run_of(flexfleet, name, [*sets, f"run.backend={name}"]) for name in ("in_process", "processes")}
    run_of(flexfleet, "again", [*sets, "rounds.stop=1"])
    found["again"] = run_of(flexfleet, "again", sets, "--resume")
    for said in ("model_sha256", "bytes", "waste"):
        assert len({str(each[said]) for each in found.values()}) == 1, said
    pool = PoolFile.read(tmp_path / "runs/processes/pool/pool.json")
    assert [level.name for level in pool.levels] == ["small", "medium", "large"]
    for row in History.read(tmp_path / "runs/processes/history.json").rounds:
        metrics = row["metrics"]
        assert 0 < metrics["bits_up"] < metrics["bits_down"] / 2
        assert metrics["seconds_encode"] == 0 < metrics["seconds_decode"]
        assert metrics["seconds_encode_clients"] == pytest.approx(
            sum(c.get("seconds_encode", 0) for c in row["clients"])
        )


@pytest.mark.long
def test_digits_are_learnt_about_as_well(flexfleet: Any, quick: Sequence[str]) -> None:
    longer = [each for each in quick if not each.startswith("rounds.stop")]
    longer += ["rounds.stop=8", "rounds.evaluate_every=8", "training.epochs=4", "training.fraction=1.0"]
    scores = {
        name: run_of(flexfleet, name, [*longer, *sets])["metrics"]["avg"]
        for name, sets in (("plain", ()), ("half", HALF), ("qsgd", QSGD))
    }
    assert scores["plain"] > 0.5, "a guess is right in one of ten"
    assert abs(scores["half"] - scores["plain"]) < 0.05
    assert abs(scores["qsgd"] - scores["plain"]) < 0.1
