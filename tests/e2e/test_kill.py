"""Real processes, really killed: whatever the instant, starting again ends with the model of an undisturbed run."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flexfleet.files.artifacts import History
from flexfleet.files.signals import stop_on_signals

SETS = ("rounds.stop=10", "rounds.commit_every=1", "training.epochs=3")


def sets_for(quick: Sequence[str], *more: str) -> list[str]:
    return [*quick, *SETS, *more]


@pytest.fixture(scope="module")
def undisturbed(nursery: Any, quick: Sequence[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run."""
    cwd = tmp_path_factory.mktemp("undisturbed")
    done = nursery.start("flexfleet", "run", "--json", "--run-id", "a", cwd=cwd, sets=sets_for(quick)).wait()
    assert done.code == 0, done.err
    return cwd / "runs" / "a"


def sha_of(run: Path) -> str:
    return History.read(run / "history.json").model_sha256


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.002)


def writes(run: Path) -> int:
    """Return the newest modification time in ns of the files in the rounds."""
    times = []
    for path in (run / "rounds").rglob("*"):
        try:
            times.append(path.stat().st_mtime_ns)
        except FileNotFoundError:  # deleted between the two looks
            continue
    return max(times, default=0)


def test_typed_command_survives_a_kill(nursery: Any, quick: Sequence[str], undisturbed: Path, tmp_path: Path) -> None:
    """It runs in a new interpreter, and resumes in another kind of process."""
    run, sets = tmp_path / "runs" / "a", sets_for(quick)
    command = [sys.executable, "-m", "flexfleet.cli.main", "run", "--json", "--run-id", "a"]
    command += [part for pair in sets for part in ("--set", pair)]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: writes(run) > 0, "a round")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    done = nursery.start("flexfleet", "run", "--json", "--run-id", "a", "--resume", cwd=tmp_path, sets=sets).wait()
    assert done.json["model_sha256"] == sha_of(undisturbed)


def test_kill_while_mlflow_creates_tables_is_survived(nursery: Any, quick: Sequence[str], tmp_path: Path) -> None:
    """MLflow creates its tables for seconds in the first run. Then two runs start at once, each with half of the
    tables."""
    sets = [*quick, "rounds.stop=1", "tracking.mlflow=sqlite:///mlflow.db"]

    def start(run_id: str) -> Any:
        return nursery.start("flexfleet", "run", "--json", "--run-id", run_id, "--resume", cwd=tmp_path, sets=sets)

    def written() -> int:
        return sum(path.stat().st_size for path in tmp_path.glob("*mlflow.db*") if path.exists())

    child = start("a")
    wait_for(lambda: written() > 250_000, "half of the tables")
    child.send(signal.SIGKILL)
    assert child.wait().code == -signal.SIGKILL
    for done in [child.wait() for child in (start("a"), start("b"))]:
        assert done.code == 0, done.err[-500:]


def test_second_process_of_a_run_is_refused(nursery: Any, quick: Sequence[str], tmp_path: Path) -> None:
    """A killed process leaves no lock."""
    run = tmp_path / "runs" / "a"

    def start(*sets: str) -> Any:
        argv = ("flexfleet", "run", "--json", "--run-id", "a", "--resume")
        return nursery.start(*argv, cwd=tmp_path, sets=[*quick, *sets])

    first = start("training.epochs=1000000")
    wait_for((run / "run.json").exists, "the beginning of the rounds")
    second = start("training.epochs=1000000").wait()
    first.send(signal.SIGKILL)
    first.wait()
    assert second.code == 2
    assert "another process" in second.err
    shutil.rmtree(run / "rounds", ignore_errors=True)
    (run / "run.json").unlink()
    assert start().wait().code == 0


def interrupted(nursery: Any, quick: Sequence[str], tmp_path: Path, number: signal.Signals) -> Any:
    """Return how a run ends that gets a signal after the commit of its first round."""
    run = tmp_path / "runs" / "a"
    sets = sets_for(quick, "rounds.stop=200", "rounds.keep_updates=true")
    child = nursery.start("flexfleet", "run", "--json", "--run-id", "a", cwd=tmp_path, sets=sets)
    wait_for((run / "rounds" / "00000" / "COMMITTED").exists, "the first commit")
    child.send(number)
    return child.wait()


def goes_on(nursery: Any, quick: Sequence[str], tmp_path: Path) -> None:
    """Resume the run; committed rounds are not repeated."""
    committed = len(list((tmp_path / "runs" / "a" / "rounds").glob("*/COMMITTED")))
    stop = committed + 1
    done = nursery.start(
        "flexfleet", "run", "--json", "--run-id", "a", "--resume", cwd=tmp_path,
        sets=sets_for(quick, f"rounds.stop={stop}", "rounds.keep_updates=true"),
    ).wait()  # fmt: skip
    assert done.code == 0, done.err
    assert f"resuming after round {committed}" in done.err
    assert len(History.read(tmp_path / "runs" / "a" / "history.json").rounds) == stop


def test_sigterm_stops_resumably_with_exit_code_3(nursery: Any, quick: Sequence[str], tmp_path: Path) -> None:
    done = interrupted(nursery, quick, tmp_path, signal.SIGTERM)
    assert done.code == 3
    assert "--resume" in done.err
    assert "Traceback" not in done.err
    goes_on(nursery, quick, tmp_path)


def test_ctrl_c_stops_resumably_with_exit_code_130(nursery: Any, quick: Sequence[str], tmp_path: Path) -> None:
    done = interrupted(nursery, quick, tmp_path, signal.SIGINT)
    assert "Traceback" not in done.err
    assert done.err.endswith("\ninterrupted: the same command with --resume goes on\n")
    goes_on(nursery, quick, tmp_path)
    assert done.code == 130


def test_second_ctrl_c_ends_at_once(nursery: Any, quick: Sequence[str], tmp_path: Path) -> None:
    """The first Ctrl-C waits for the running client, which takes an hour here."""
    sets = sets_for(quick, "training.epochs=100000")
    child = nursery.start("flexfleet", "run", "--json", "--run-id", "a", cwd=tmp_path, sets=sets)
    wait_for((tmp_path / "runs" / "a" / "run.json").exists, "the beginning of the rounds")
    time.sleep(0.3)
    child.send(signal.SIGINT)
    time.sleep(0.3)
    for _ in range(10):  # two that arrive during one long call of a kernel are one to Python
        child.send(signal.SIGINT)
        with suppress(AssertionError):
            wait_for(lambda: "interrupted" in child.err, "the end", timeout_s=10)
            break
    done = child.wait()
    assert done.code == 130
    assert "interrupted" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 3), (signal.SIGINT, 130)])
def test_signal_before_the_rounds_ends_the_command(
    nursery: Any, quick: Sequence[str], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """Pre-training may take an hour, and must not delay the end."""
    sets = sets_for(quick, "pretrain.epochs=100000")
    child = nursery.start("flexfleet", "run", "--json", "--run-id", "a", cwd=tmp_path, sets=sets)
    wait_for((tmp_path / "runs" / "a" / "partition" / "partition.json").exists, "the partition step")
    time.sleep(0.2)
    child.send(number)
    done = child.wait()
    assert done.code in (code, -signal.SIGTERM), done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(("handler", "stops"), [(lambda *_: None, True), (signal.SIG_IGN, False)])
def test_closed_terminal_stops_a_run_except_with_nohup(handler: Any, stops: bool) -> None:
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with stop_on_signals() as asked:
            signal.raise_signal(signal.SIGHUP)
            assert asked() == stops
        assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)
