"""`flexfleet compare`: one that fails or is stopped costs nothing but itself, and runs that differ make no table."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError
from fl_engine.storage.store import sha256
from flexfleet.experiments import comparison_report, executor, summarise
from flexfleet.files.artifacts import Apoz, RunFile
from tests.harness.comparisons import LABELS, SEEDS, TWO, Compared
from tests.harness.processes import refused

pytestmark = pytest.mark.usefixtures("quick_comparisons")


@pytest.fixture
def sets(quick: Sequence[str]) -> list[str]:
    return [given for given in quick if not given.startswith("algorithm.name=")]


@pytest.fixture
def _no_manifests(compared: Compared) -> None:
    """Tests edit files of these runs, which would not be read otherwise."""
    for path in compared.folder.glob("*/manifest.json"):
        path.unlink()


def test_resume_makes_what_is_missing_and_keeps_the_rest(compared: Compared, flexfleet: Any, sets: list[str]) -> None:
    (compared.folder / "flexfl-s1" / "manifest.json").unlink()
    shutil.rmtree(compared.folder / "all_large-s0")
    kept = [compared.folder / name for name in ("flexfl-s0", "all_large-s1")]
    before = {path: path.read_bytes() for run in kept for path in (*run.rglob("*"), run.with_name(f"{run.name}.log"))
              if path.is_file()}  # fmt: skip
    done = flexfleet("compare", *TWO, "--id", "both", "--resume", "--json", sets=sets)
    assert done.code == 0, done.err
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
    given = [*sets, "rounds.stop=4", "seed=1", "algorithm.name=flexfl"]
    plain = flexfleet("run", "--json", "--run-id", "a", sets=given)
    assert found["results"]["flexfl"]["runs"][0]["model_sha256"] == plain.json["model_sha256"]
    # A run that joins later takes over what the others started from.
    late, shared = (Apoz.read(compared.folder / name / "pretrain" / "apoz.json") for name in ("no_kd-s1", "shared-s1"))
    assert late == shared
    assert "pretrain:" not in (compared.folder / "no_kd-s1.log").read_text()


def test_changed_settings_are_refused(compared: Compared, flexfleet: Any, sets: list[str]) -> None:
    text = refused(flexfleet("compare", *TWO, "--id", "both", "--resume", sets=[*sets, "training.lr=0.01"]))
    assert "training.lr: 0.05 -> 0.01" in text and "--id" in text and "--run-id" not in text
    text = refused(flexfleet("compare", *TWO, "--id", "both", "--resume", sets=[*sets, "flexfl:algorithm.epsilon=3"]))
    assert "algorithm.epsilon" in text


def test_fewer_rounds_are_refused_before_anything_trains(compared: Compared, flexfleet: Any, sets: list[str]) -> None:
    before = {name: (compared.folder / name).read_bytes() for name in comparison_report.FILES}
    text = refused(flexfleet("compare", *TWO, "--id", "both", "--resume", sets=[*sets, "rounds.stop=2"]))
    assert "rounds.stop must be at least 3" in text
    assert {name: (compared.folder / name).read_bytes() for name in comparison_report.FILES} == before


def test_changed_code_is_refused_before_anything_trains(
    flexfleet: Any, sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept_on.py").write_text(BREAKS)
    monkeypatch.syspath_prepend(tmp_path)
    argv = ("compare", "--algorithms", "mine=kept_on:Breaks", "--id", "a")
    done = flexfleet(*argv, sets=[*sets, "rounds.stop=1"])
    assert done.code == 0, done.err
    (tmp_path / "kept_on.py").write_text(f"{BREAKS}# a change\n")
    text = refused(flexfleet(*argv, "--seeds", "0,1", "--resume", sets=[*sets, "rounds.stop=1"]))
    assert "mine, seed 0: runs/a/mine-s0 was started with another source of kept_on:Breaks: undo the change" in text
    assert not Path("runs/a/mine-s1").exists()
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


def test_a_run_that_fails_does_not_stop_the_others(
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
        assert f"breaks-s{seed}: exit code 2, runs/a/breaks-s{seed}.log: no merge of the second round" in caplog.text
        assert all((Path("runs/a") / f"{label}-s{seed}" / "result.json").is_file() for label in LABELS)
    assert "--resume" in text
    assert list(Path("runs/a").glob("comparison.*")) == [], "half a comparison is none"
    found = flexfleet("compare", *TWO[:2], *argv, "--resume", sets=[*sets, "rounds.commit_every=1"])
    assert found.code == 0, found.err
    assert found.json["labels"] == list(LABELS)


@pytest.mark.usefixtures("_no_manifests")
def test_runs_that_differ_are_not_tabulated(compared: Compared) -> None:
    folders = {f"{label}-s{seed}": compared.folder / f"{label}-s{seed}" for label in LABELS for seed in SEEDS}

    def change(name: str, path: str, value: Any) -> Callable[[], None]:
        file = folders[name] / "run.json"
        before = file.read_text()
        changed = json.loads(before)
        *parents, last = path.split(".")
        here = changed["config"]
        for part in parents:
            here = here[part]
        here[last] = value
        file.write_text(json.dumps(changed))
        return lambda: file.write_text(before) and None

    def wrong() -> str:
        with pytest.raises(ConfigError) as error:
            summarise.read(LABELS, SEEDS, folders)
        return str(error.value)

    others = {"training.lr": 0.1, "partition.alpha": 0.3, "rounds.stop": 2, "rounds.evaluate_every": 3}
    for path, value in others.items():
        undo = change("flexfl-s1", path, value)
        assert "seed 1" in wrong() and path in wrong()
        undo()
    for path, value in {
        "run.patience_s": 2.0,
        "rounds.keep_every": 7,
        "run.store": "there",
        "tune.trials": 3,
    }.items():
        undo = change("flexfl-s1", path, value)  # as after --resume --set run.patience_s=2.0
        assert summarise.read(LABELS, SEEDS, folders)
        undo()
    undo = change("flexfl-s1", "algorithm.kd_weight", 0)
    assert "the runs of flexfl differ in more than the seed: algorithm.kd_weight" in wrong()
    undo()
    undo = change("flexfl-s1", "seed", 0)
    assert "seed 1" in wrong()
    undo()
    for label in LABELS:
        change(f"{label}-s1", "training.lr", 0.1)
    assert "differ in more than the seed: training.lr: 0.05 (seed 0), 0.1 (seed 1)" in wrong()


@pytest.mark.usefixtures("_no_manifests")
def test_other_data_are_not_tabulated(compared: Compared) -> None:
    folders = {f"{label}-s{seed}": compared.folder / f"{label}-s{seed}" for label in LABELS for seed in SEEDS}

    def change(name: str, section: str, **data: Any) -> None:
        manifest, file = folders[name] / "partition" / "partition.json", folders[name] / "run.json"
        known = RunFile.read(file)
        config = known.config | {section: {**known.config[section], **data}}
        known.model_copy(update={"config": config, "partition_sha256": sha256(manifest.read_bytes())}).write(file)

    for seed in SEEDS:
        change(f"flexfl-s{seed}", "partition", alpha=0.3)
    assert summarise.read(LABELS, SEEDS, folders, ["partition.alpha"]), "each seed cuts its own samples"
    manifest = folders["flexfl-s0"] / "partition" / "partition.json"
    before = manifest.read_bytes()
    manifest.write_text(json.dumps(json.loads(before) | {"data_sha256": "f" * 64}))
    change("flexfl-s0", "partition")
    with pytest.raises(ConfigError, match=r"seed 0 .* the data \(sha256\): ffffffffffff \(flexfl\), "):
        summarise.read(LABELS, SEEDS, folders, ["partition.alpha"])
    manifest.write_bytes(before)
    for name in folders:
        change(name, "dataset", train_samples=None, test_samples=None)
    with pytest.raises(ConfigError, match=r"flexfl differ in more than the seed: the data \(sha256\): "):
        summarise.read(LABELS, SEEDS, folders, ["partition.alpha"])


# ----------------------------------------------------------------------------------------------- real processes
@pytest.mark.long
def test_a_stopped_comparison_goes_on(sets: list[str], flexfleet: Any, caplog: pytest.LogCaptureFixture) -> None:
    given = [*sets, "rounds.stop=400", "rounds.commit_every=1", "rounds.evaluate_every=200"]
    argv = ["compare", *TWO[:2], "--id", "a", "--jobs", "2", *(word for one in given for word in ("--set", one))]
    command = subprocess.Popen(
        [sys.executable, "-m", "flexfleet.cli.main", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 300
    while not all(list(Path("runs/a", f"{label}-s0", "rounds").glob("*/COMMITTED")) for label in LABELS):
        assert command.poll() is None, command.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    command.send_signal(signal.SIGTERM)
    out, err = command.communicate(timeout=120)
    assert (command.returncode, out) == (3, ""), err
    assert err.splitlines()[-1] == "error: stopped on request: the same command with --id a --resume goes on"
    assert "exit code 3" in err
    ledgers = [sorted(Path("runs/a", f"{label}-s0", "rounds").iterdir()) for label in LABELS]
    assert all(ledgers) and not list(Path("runs/a").glob("*/result.json"))
    rounds = max(int(ledger[-1].name) for ledger in ledgers) + 2
    short = [*given, f"rounds.stop={rounds}"]
    with caplog.at_level("INFO", "flexfleet"):
        found = flexfleet("compare", *TWO[:2], "--id", "a", "--resume", "--json", sets=short)
    assert found.code == 0, found.err
    assert caplog.text.count("resuming after round") == 2
    for label in LABELS:
        plain = flexfleet("run", "--json", "--run-id", label, sets=[*short, f"algorithm.name={label}"])
        assert plain.json["model_sha256"] == found.json["results"][label]["runs"][0]["model_sha256"]
