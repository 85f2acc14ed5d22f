"""A run that the simulated clock ends before `rounds.stop`: what the console, status, results and comparisons say."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from flexfleet import load
from flexfleet.config import load_config
from flexfleet.experiments.compare import finished
from tests.harness.alike import run_of
from tests.harness.run_folders import rounds_of

LABELS, SEEDS = ("flexfl", "all_large"), (0, 1)


def clocks(folder: Path) -> list[float]:
    rounds = rounds_of(folder)
    return list(accumulate(each["metrics"]["seconds_simulated"] for each in rounds))


@pytest.fixture(scope="module")
def compared(module_folder: Path, flexfleet: Any, quick: Sequence[str], python: Path) -> tuple[list[str], float]:
    """A comparison of at most 6 rounds, within the time of all_large's first 2: its settings, and this time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        run_of(flexfleet, "probe", [*quick, "algorithm.name=all_large", "rounds.stop=2"])
        limit = clocks(Path("runs/probe"))[1]
        task = [each for each in quick if not each.startswith("algorithm.name=")]
        sets = [*task, "rounds.stop=6", f"rounds.stop_simulated_s={limit!r}"]
        flexfleet("compare", "--id", "c", "--algorithms", ",".join(LABELS), "--seeds", "0,1", sets=sets).ok()
    return sets, limit


def runs() -> list[tuple[str, int, Path]]:
    return [(label, seed, Path("runs/c") / f"{label}-s{seed}") for label in LABELS for seed in SEEDS]


def test_every_run_ends_with_the_round_that_passes_the_limit(compared: Any) -> None:
    sets, limit = compared
    ends = {}
    for label, seed, run in runs():
        times = clocks(run)
        assert times[-1] >= limit and all(before < limit for before in times[:-1])
        ends[label, seed] = len(times)
        assert finished(load_config(None, [*sets, f"algorithm.name={label}", f"seed={seed}"]), run)
        more = [each for each in sets if "stop_simulated_s" not in each]
        assert not finished(load_config(None, [*more, f"algorithm.name={label}", f"seed={seed}"]), run)
    assert ends["all_large", 0] == 2 and all(end <= 6 for end in ends.values())
    assert len(set(ends.values())) > 1, "some runs have more rounds than others"


def test_status_and_result_say_that_it_has_finished(compared: Any, flexfleet: Any) -> None:
    for _, _, run in runs():
        end = len(clocks(run))
        told = flexfleet("status", str(run), "--json").json
        assert (told["status"], told["round"], told["stop"]) == ("finished", end, end)
        assert f"round {end}/{end}" in flexfleet("status", str(run)).out
        result = load(run)
        assert result.status == "finished" and result.model_sha256 is not None
        assert len(result.history) == end


def test_raised_limit_continues_and_stopped_run_is_unfinished(
    compared: Any, flexfleet: Any, quick: Sequence[str]
) -> None:
    sets = [*quick, "algorithm.name=all_large", "rounds.stop=4"]
    limit = clocks(Path("runs/probe"))[0]
    run_of(flexfleet, "r", [*sets, f"rounds.stop_simulated_s={limit!r}"])
    assert len(clocks(Path("runs/r"))) == 1
    recorded = Path("runs/r/run.json")
    file = json.loads(recorded.read_text())
    file["config"]["rounds"]["stop_simulated_s"] = 100 * limit
    recorded.write_text(json.dumps(file))
    Path("runs/r/manifest.json").unlink()
    assert flexfleet("status", "runs/r", "--json").json["status"] == "unfinished"
    assert flexfleet("status", "runs/r", "--json").json["stop"] == 4
    assert load("runs/r").status == "stopped"
    done = run_of(flexfleet, "r", sets, "--resume")
    assert len(clocks(Path("runs/r"))) == 4
    assert run_of(flexfleet, "plain", sets)["model_sha256"] == done["model_sha256"]
