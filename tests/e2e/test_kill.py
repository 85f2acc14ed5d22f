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
from tests.harness.processes import until

SETS = ("rounds.stop=10", "rounds.commit_every=1", "training.epochs=3")
Start = Callable[..., Any]


def starting(fork_server: Any, quick: Sequence[str], cwd: Path) -> Start:
    """Return a function that starts the run `a` in `cwd`."""

    def start(*argv: str, sets: Sequence[str] = (), run_id: str = "a") -> Any:
        given = ("run", "--json", "--run-id", run_id, *argv)
        return fork_server.start("flexfleet", *given, cwd=cwd, sets=[*quick, *SETS, *sets])

    return start


@pytest.fixture
def start(fork_server: Any, quick: Sequence[str], tmp_path: Path) -> Start:
    return starting(fork_server, quick, tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of the run."""
    return tmp_path / "runs" / "a"


@pytest.fixture(scope="module")
def undisturbed(fork_server: Any, quick: Sequence[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The sha256 of the model of an undisturbed run."""
    done = starting(fork_server, quick, tmp_path_factory.mktemp("undisturbed"))().wait().ok()
    return str(done.json["model_sha256"])


def test_typed_command_survives_a_kill(
    start: Start, run: Path, quick: Sequence[str], undisturbed: str, tmp_path: Path
) -> None:
    """It runs in a new interpreter, and resumes in another kind of process."""
    command = [sys.executable, "-m", "flexfleet.cli.main", "run", "--json", "--run-id", "a"]
    command += [part for pair in (*quick, *SETS) for part in ("--set", pair)]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until((run / "rounds").exists, "a round")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert start("--resume").wait().json["model_sha256"] == undisturbed


def test_kill_while_mlflow_creates_tables_is_survived(start: Start, tmp_path: Path) -> None:
    """MLflow creates its tables for seconds in the first run. Then two runs start at once, each with half of the
    tables."""
    sets = ["rounds.stop=1", "tracking.mlflow=sqlite:///mlflow.db"]

    def written() -> int:
        return sum(path.stat().st_size for path in tmp_path.glob("*mlflow.db*") if path.exists())

    child = start("--resume", sets=sets)
    until(lambda: written() > 250_000, "half of the tables")
    child.send(signal.SIGKILL)
    assert child.wait().code == -signal.SIGKILL
    for done in [child.wait() for child in [start("--resume", sets=sets, run_id=run_id) for run_id in "ab"]]:
        assert done.code == 0, done.err[-500:]


def test_second_process_of_a_run_is_refused(start: Start, run: Path) -> None:
    """A killed process leaves no lock."""
    first = start("--resume", sets=["training.epochs=1000000"])
    until((run / "run.json").exists, "the beginning of the rounds")
    second = start("--resume", sets=["training.epochs=1000000"]).wait()
    first.send(signal.SIGKILL)
    first.wait()
    assert second.code == 2
    assert "another process" in second.err
    shutil.rmtree(run / "rounds", ignore_errors=True)
    (run / "run.json").unlink()
    assert start("--resume").wait().code == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 3), (signal.SIGINT, 130)])
def test_stopped_run_resumes_after_its_last_round(start: Start, run: Path, number: signal.Signals, code: int) -> None:
    child = start(sets=["rounds.keep_updates=true", "rounds.stop=200"])
    until((run / "rounds" / "00000" / "COMMITTED").exists, "the first commit")
    child.send(number)
    done = child.wait()
    assert done.code == code and "--resume" in done.err and "Traceback" not in done.err
    committed = len(list((run / "rounds").glob("*/COMMITTED")))
    done = start("--resume", sets=["rounds.keep_updates=true", f"rounds.stop={committed + 1}"]).wait().ok()
    assert f"resuming after round {committed}" in done.err
    assert len(History.read(run / "history.json").rounds) == committed + 1


def test_second_ctrl_c_ends_at_once(start: Start, run: Path) -> None:
    """The first Ctrl-C waits for the running client, which takes an hour here."""
    child = start(sets=["training.epochs=100000"])
    until((run / "run.json").exists, "the beginning of the rounds")
    time.sleep(0.3)
    child.send(signal.SIGINT)
    time.sleep(0.3)
    for _ in range(10):  # two that arrive during one long call of a kernel are one to Python
        child.send(signal.SIGINT)
        with suppress(AssertionError):
            until(lambda: "interrupted" in child.err, "the end", patience_s=10)
            break
    done = child.wait()
    assert done.code == 130
    assert "interrupted" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 3), (signal.SIGINT, 130)])
def test_signal_before_the_rounds_ends_the_command(start: Start, run: Path, number: signal.Signals, code: int) -> None:
    """Pre-training may take an hour, and must not delay the end."""
    child = start(sets=["pretrain.epochs=100000"])
    until((run / "partition" / "partition.json").exists, "the partition step")
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
