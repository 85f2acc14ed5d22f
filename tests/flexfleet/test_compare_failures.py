"""`flexfleet compare`: resume, failed runs, and runs that cannot be compared."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError
from fl_engine.storage.store import sha256
from flexfleet.config import Config
from flexfleet.config.comparison_runs import PlannedRun
from flexfleet.experiments import comparison_report, executor, summarise
from flexfleet.files.artifacts import Apoz, RunFile
from tests.harness.comparisons import LABELS, SEEDS, TWO, Compared
from tests.harness.processes import refused, until

pytestmark = pytest.mark.usefixtures("quick_comparisons")


@pytest.fixture
def sets(quick: Sequence[str]) -> list[str]:
    return [given for given in quick if not given.startswith("algorithm.name=")]


@pytest.fixture
def _no_manifests(compared: Compared) -> None:
    """Tests edit files of these runs, which would not be read otherwise."""
    for path in compared.folder.glob("*/manifest.json"):
        path.unlink()


def test_resume_executes_only_missing_runs(compared: Compared, flexfleet: Any, sets: list[str]) -> None:
    (compared.folder / "flexfl-s1" / "manifest.json").unlink()
    shutil.rmtree(compared.folder / "all_large-s0")
    kept = [compared.folder / name for name in ("flexfl-s0", "all_large-s1")]
    before = {path: path.read_bytes() for run in kept for path in (*run.rglob("*"), run.with_name(f"{run.name}.log"))
              if path.is_file()}  # fmt: skip
    done = flexfleet("compare", *TWO, "--id", "both", "--resume", "--json", sets=sets).ok()
    assert {path: path.read_bytes() for path in before} == before
    for label in LABELS:
        now, then = done.json["results"][label]["runs"], compared.json["results"][label]["runs"]
        assert [one["model_sha256"] for one in now] == [one["model_sha256"] for one in then]
        assert done.json["results"][label]["last"] == compared.json["results"][label]["last"]
    assert "pretrain" not in (compared.folder / "shared-s0.log").read_text().split(executor.BEGINS)[2:]


def test_resume_with_more_rounds_algorithms_and_seeds(compared: Compared, flexfleet: Any, sets: list[str]) -> None:
    argv = ("--algorithms", "flexfl,no_kd=flexfl", "--seeds", "1,2", "--id", "both", "--resume", "--json")
    given = [*sets, "rounds.stop=4", "no_kd:algorithm.kd_weight=0"]
    found = flexfleet("compare", *argv, sets=given).json
    assert (found["labels"], found["seeds"], found["rounds"]) == (["flexfl", "no_kd"], [1, 2], 4)
    # A run that joins later takes over what the others started from.
    late, shared = (Apoz.read(compared.folder / name / "pretrain" / "apoz.json") for name in ("no_kd-s1", "shared-s1"))
    assert late == shared
    assert "pretrain:" not in (compared.folder / "no_kd-s1.log").read_text()


def test_changed_settings_are_refused(compared: Compared, flexfleet: Any, sets: list[str]) -> None:
    text = refused(flexfleet("compare", *TWO, "--id", "both", "--resume", sets=[*sets, "training.lr=0.01"]))
    assert "training.lr: 0.05 -> 0.01" in text and "--id" in text and "--run-id" not in text


def test_fewer_rounds_are_refused_before_training(compared: Compared, flexfleet: Any, sets: list[str]) -> None:
    before = {name: (compared.folder / name).read_bytes() for name in comparison_report.FILES}
    assert "rounds.stop" in refused(
        flexfleet("compare", *TWO, "--id", "both", "--resume", sets=[*sets, "rounds.stop=2"])
    )
    assert {name: (compared.folder / name).read_bytes() for name in comparison_report.FILES} == before


def test_changed_code_is_refused_before_training(
    flexfleet: Any, sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept_on.py").write_text(BREAKS)
    monkeypatch.syspath_prepend(tmp_path)
    argv = ("compare", "--algorithms", "mine=kept_on:Breaks", "--id", "a")
    flexfleet(*argv, sets=[*sets, "rounds.stop=1"]).ok()
    (tmp_path / "kept_on.py").write_text(f"{BREAKS}# a change\n")
    assert "kept_on:Breaks" in refused(flexfleet(*argv, "--seeds", "1,2", "--resume", sets=[*sets, "rounds.stop=1"]))
    assert not Path("runs/a/mine-s2").exists()
    (tmp_path / "kept_on.py").write_text(BREAKS)
    assert flexfleet(*argv, "--resume", sets=[*sets, "rounds.stop=1"]).code == 0


# ---------------------------------------------------------------------------------------------------- failures
BREAKS = """
from collections.abc import Iterable
from dataclasses import dataclass
from fl_engine.algorithms import FedAvg
from fl_engine.core.errors import DataError

@dataclass(frozen=True)
class Breaks(FedAvg):
    def merge(self, state, plan, answers, server):
        if plan.round == 1:
            raise DataError("no merge of the second round")
        return super().merge(state, plan, answers, server)
"""


def test_failed_run_does_not_stop_the_others(
    flexfleet: Any, sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "breaks_later.py").write_text(BREAKS)
    monkeypatch.syspath_prepend(tmp_path)
    argv = ("--seeds", "0,1", "--id", "a", "--json")
    all_three = ("--algorithms", "breaks=breaks_later:Breaks,flexfl,all_large")
    done = flexfleet("compare", *all_three, *argv, sets=[*sets, "rounds.commit_every=1"])
    text = refused(done, 2)
    assert "4 of 6 runs are finished" in text
    for seed in SEEDS:
        assert f"runs/a/breaks-s{seed}.log" in text
        assert f"breaks-s{seed}: exit code 2" in caplog.text and "no merge of the second round" in caplog.text
        assert all((Path("runs/a") / f"{label}-s{seed}" / "result.json").is_file() for label in LABELS)
    assert "--resume" in text
    assert list(Path("runs/a").glob("comparison.*")) == [], "an incomplete comparison has no results"
    found = flexfleet("compare", *TWO[:2], *argv, "--resume", sets=[*sets, "rounds.commit_every=1"]).ok()
    assert found.json["labels"] == list(LABELS)


@pytest.mark.usefixtures("_no_manifests")
def test_runs_on_other_data_are_not_comparable(compared: Compared) -> None:
    entries = [PlannedRun(label, seed, Config()) for label in LABELS for seed in SEEDS]
    folders = {entry.name: compared.folder / entry.name for entry in entries}
    manifest, file = folders["flexfl-s0"] / "partition" / "partition.json", folders["flexfl-s0"] / "run.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"data_sha256": "f" * 64}))
    known = RunFile.read(file)
    known.model_copy(update={"partition_sha256": sha256(manifest.read_bytes())}).write(file)
    with pytest.raises(ConfigError) as error:
        summarise.read(entries, folders)
    assert error.value.code == "config.not_comparable"


# ----------------------------------------------------------------------------------------------- real processes
@pytest.mark.long
def test_stopped_comparison_is_resumed(sets: list[str], flexfleet: Any, caplog: pytest.LogCaptureFixture) -> None:
    given = [*sets, "rounds.stop=400", "rounds.commit_every=1", "rounds.evaluate_every=200"]
    argv = ["compare", *TWO[:2], "--id", "a", "--jobs", "2", *(word for one in given for word in ("--set", one))]
    command = subprocess.Popen(
        [sys.executable, "-m", "flexfleet.cli.main", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    rounds = [Path("runs/a", f"{label}-s1", "rounds") for label in LABELS]
    until(lambda: all(list(each.glob("*/COMMITTED")) for each in rounds), "a round of both runs", 300)
    command.send_signal(signal.SIGTERM)
    out, err = command.communicate(timeout=120)
    assert (command.returncode, out) == (3, ""), err
    assert err.splitlines()[-1] == "error: stopped on request: continue with the same command and --id a --resume"
    assert "exit code 3" in err
    assert not list(Path("runs/a").glob("*/result.json"))
    last = max(int(path.name) for each in rounds for path in each.iterdir())
    short = [*given, f"rounds.stop={last + 2}"]
    with caplog.at_level("INFO", "flexfleet"):
        found = flexfleet("compare", *TWO[:2], "--id", "a", "--resume", "--json", sets=short).ok()
    assert caplog.text.count("resuming after round") == 2
    for label in LABELS:
        plain = flexfleet("run", "--json", "--run-id", label, sets=[*short, f"algorithm.name={label}"])
        assert plain.json["model_sha256"] == found.json["results"][label]["runs"][0]["model_sha256"]
