"""Processes side by side: their exit codes, their logs, so many at once and no more, and signals."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import IntegrityError, Stopped
from flexfleet.experiments import executor
from tests.harness.processes import ROOT, until

JOB = """
import os, signal, sys, time
name, seconds, code = sys.argv[1:]
for i in range(1, 41):
    print(f"12:00:00 round {i}/40  avg {i}.0 %", flush=True)
print(name, "begins", os.environ["OMP_NUM_THREADS"], "at", time.monotonic(), flush=True)
if code == "patient":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    print("ready", flush=True)
time.sleep(float(seconds))
print("at", time.monotonic())
print("error: something else")
print(f"error: {name} says why", flush=True)
sys.exit(int(code))
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., executor.Command]:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "one_job.py").write_text(JOB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))

    def make(name: str, seconds: float = 0, code: Any = 0) -> executor.Command:
        return executor.Command(name, "one_job", (name, str(seconds), str(code)), tmp_path / "logs" / f"{name}.log")

    return make


def test_commands_have_exit_codes_and_logs(job: Any) -> None:
    jobs = [job("a"), job("b", code=7), job("c", code=0)]
    assert executor.side_by_side(jobs, 2) == {"a": 0, "b": 7, "c": 0}
    executor.side_by_side(jobs[1:2], 1)
    log = jobs[1].log.read_text()
    assert log.count("$ python -m one_job b 0 7\n") == log.count("b begins 1") == 2, "a second attempt is added"
    assert executor.last_words(jobs[1].log) == "b says why"
    with open(jobs[1].log, "a") as file:
        file.write(f"{executor.BEGINS}again\nKilled")
    assert executor.last_words(jobs[1].log) == "Killed", "not what an earlier attempt said"
    assert executor.side_by_side([], 3) == {}


def test_progress_shows_first_round_and_every_tenth(job: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run = replace(job("run"), has_rounds=True)
    for _ in range(2):  # the second process appends to the log of the first
        caplog.clear()
        executor.side_by_side([run, job("share")], 2)
        shown = re.findall(r"(\w+): round (\d+)/40  avg", caplog.text)
        assert shown == [("run", str(number)) for number in (1, *range(4, 41, 4))]


@pytest.mark.parametrize("at_once", [1, 2, 9])
def test_at_most_at_once_commands_run(job: Any, at_once: int) -> None:
    jobs = [job(f"{i}", 0.5) for i in range(4)]
    executor.side_by_side(jobs, at_once)
    times = [[float(t) for t in re.findall(r"at ([\d.]+)", one.log.read_text())] for one in jobs]
    together = [sum(begin <= start < end for begin, end in times) for start, _ in times]
    assert max(together) == min(at_once, 4)


@pytest.fixture
def hangs_up() -> Iterator[None]:

    def unhandled(*_: object) -> None:
        raise AssertionError("nobody handles SIGHUP")

    before = signal.signal(signal.SIGHUP, unhandled)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_is_passed_on_and_no_command_starts(job: Any, number: signal.Signals, hangs_up: None) -> None:
    before = signal.getsignal(number)
    jobs = [job("a", 60, "patient"), job("b", 60, "patient"), job("c", 60)]
    watch = (
        "import os, sys, time\n"
        "while not all(os.path.exists(p) and 'ready' in open(p).read() for p in sys.argv[3:]): time.sleep(0.02)\n"
        "os.kill(int(sys.argv[1]), int(sys.argv[2]))\n"
    )
    logs = [str(one.log) for one in jobs[:2]]
    killer = subprocess.Popen([sys.executable, "-c", watch, str(os.getpid()), str(int(number)), *logs])
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else Stopped):
        executor.side_by_side(jobs, 2)
    assert killer.wait() == 0
    assert not jobs[2].log.exists()
    assert signal.getsignal(number) == before, "the caller's again (ignored in a background shell)"


def test_killed_executor_ends_its_commands(tmp_path: Path) -> None:
    child = "import os, time; from flexfleet.files.terminal import run_main\n"
    child += "def main(_): print(f'pid {os.getpid()}', flush=True); time.sleep(60)\nrun_main(main)\n"
    (tmp_path / "sleeper.py").write_text(child)
    (tmp_path / "parent.py").write_text(
        "from pathlib import Path; from flexfleet.experiments import executor\n"
        f"executor.side_by_side([executor.Command('a', 'sleeper', (), Path({str(tmp_path / 'log')!r}))], 1)\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    parent = subprocess.Popen([sys.executable, tmp_path / "parent.py"], env={**os.environ, "PYTHONPATH": paths})
    log = tmp_path / "log"
    pid = int(until(lambda: log.exists() and re.search(r"pid (\d+)", log.read_text()), "the command")[1])
    parent.kill()
    parent.wait()
    until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the command", 20)


def calls(tmp_path: Path, **each: Callable[[], object]) -> list[executor.Command]:
    made = executor.Command
    return [made(name, "some.module", ("--a", "b c"), tmp_path / f"{name}.log", call=c) for name, c in each.items()]


def fail(error: BaseException) -> Callable[[], object]:
    def call() -> object:
        logging.getLogger("flexfleet").warning("begins")
        raise error

    return call


def test_one_by_one_returns_exit_codes_and_logs_errors(tmp_path: Path) -> None:
    done: list[int] = []
    codes = executor.one_by_one(calls(tmp_path, a=fail(IntegrityError("it is\ndamaged")), b=lambda: done.append(1)))
    assert codes == {"a": IntegrityError.exit_code, "b": 0} and done == [1]
    lines = (tmp_path / "a.log").read_text().splitlines()
    assert lines[0] == "$ python -m some.module --a 'b c'"
    assert lines[1].endswith("begins") and lines[2] == "error: it is damaged"
    assert executor.last_words(tmp_path / "a.log") == "it is damaged"
    assert "begins" not in (tmp_path / "b.log").read_text()


@pytest.mark.parametrize("error", [Stopped("stopped on request"), KeyboardInterrupt(), ZeroDivisionError("own code")])
def test_one_by_one_raises_stops_and_unexpected_errors(tmp_path: Path, error: BaseException) -> None:
    done, before = list[int](), list(logging.getLogger("flexfleet").handlers)
    with pytest.raises(type(error)) as raised:
        executor.one_by_one(calls(tmp_path, a=fail(error), b=lambda: done.append(1)))
    assert raised.value is error and done == []
    assert logging.getLogger("flexfleet").handlers == before
