"""Execute the commands of a comparison, nightly regression run or study in parallel processes or in this process. Each
process uses one thread and has a log file. If a command fails, the other commands are still executed."""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from fl_engine.core import allowed
from fl_engine.core.errors import EnvironmentFailure, FlexfleetError, Stopped
from flexfleet.files.run_folder import folder_lock, how_to_resume
from flexfleet.files.signals import STARTER, handled, stopping_at_once
from flexfleet.files.terminal import LOG_FORMAT, logging_to

log = logging.getLogger("flexfleet")

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
POLL_S = 0.05
BEGINS = "$ "
"""Prefix of the log line that contains the command. The output of the command follows in the next lines."""
ROUND = re.compile(rb"^\S+ (round (\d+)/(\d+)  .*)\n", re.MULTILINE)
"""A log line with the metrics of a round (`tracking.console`), which begins with the time."""


@dataclass(frozen=True)
class Command:
    name: str
    module: str
    """`python -m <module>`"""
    argv: tuple[str, ...]
    log: Path
    """File to which the command's stdout and stderr are appended."""
    stdin: str = ""
    """Text for the command's stdin. The text may contain secrets, because process lists and logs do not show stdin."""
    call: Callable[[], object] | None = None
    """Function that executes the same work in this process."""
    has_rounds: bool = False
    """Whether the command executes the rounds of one run, which are shown as progress."""


Execute = Callable[[Sequence[Command], int], dict[str, int]]
"""Function that executes commands, at most a given number in parallel, and returns {command name: exit code}."""


class RunsFailed(FlexfleetError):
    """At least one command failed. `exit_code` is the exit code of the first failed command."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextmanager
def resumable(folder: Path, id: str) -> Iterator[None]:
    """Lock the folder, and stop at once on a signal. Append instructions for resuming `id` to the messages of Stopped,
    KeyboardInterrupt and EnvironmentFailure."""
    how = how_to_resume(id)
    try:
        with folder_lock(folder), stopping_at_once(how):
            yield
    except Stopped:
        raise Stopped(f"stopped on request: {how}") from None
    except EnvironmentFailure as error:
        raise (error if how in str(error) else type(error)(f"{error}: {how}")) from error


def side_by_side(commands: Sequence[Command], at_once: int) -> dict[str, int]:
    """Run the commands as processes, and return {command name: exit code}. Exit code 128 + n means that signal n ended
    the process. While a run is trained, its first round and then one round in ten is logged.

    Ctrl-C is forwarded to the running processes as SIGINT, and SIGTERM and SIGHUP (from a closed terminal) as SIGTERM.
    After such a signal, no new process starts. Stopped or KeyboardInterrupt is raised when all processes have ended.
    After other errors, all processes are killed. If this process is killed, the processes stop
    (`signals.end_with_starter`).
    """
    codes: dict[str, int] = {}
    waiting = list(commands)
    running: dict[Command, tuple[subprocess.Popen[bytes], float]] = {}
    rounds: dict[Command, _Rounds] = {}
    received: list[int] = []

    def pass_on(signum: int, _: object) -> None:
        """Forward a signal. A process stops cleanly after one signal, and immediately after a second Ctrl-C."""
        passed = signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM
        received.append(passed)
        for process, _started in list(running.values()):
            process.send_signal(passed)

    watched, held = os.pipe()
    try:
        with handled(pass_on):
            while running or (waiting and not received):
                while waiting and len(running) < at_once and not received:
                    command = waiting.pop(0)
                    rounds[command] = _Rounds(command)
                    running[command] = (_start(command, watched), time.monotonic())
                    if received:  # the signal arrived before this process was added to `running`
                        running[command][0].send_signal(received[-1])
                for command, (process, started) in list(running.items()):
                    code = process.poll()
                    rounds[command].show()
                    if code is not None:
                        del running[command]
                        codes[command.name] = code if code >= 0 else 128 - code
                        _log_end(command, codes, len(commands), time.monotonic() - started)
                time.sleep(POLL_S)
    finally:
        for process, _ in running.values():
            process.kill()
            process.wait()
        os.close(watched)
        os.close(held)
    if received:
        if signal.SIGINT in received:
            raise KeyboardInterrupt
        raise Stopped("stopped on request")
    return codes


def one_by_one(commands: Sequence[Command], at_once: int = 1) -> dict[str, int]:
    """Execute the commands in this process with `Command.call`, and return {command name: exit code}.

    Expected errors (FlexfleetError) are written into the command's log and determine the exit code. Stopped,
    KeyboardInterrupt and unexpected errors end the execution at once. Unexpected errors get a note with the command's
    name.
    """
    codes: dict[str, int] = {}
    for command in commands:
        assert command.call is not None, f"{command.name} can only be run as a process"
        started = time.monotonic()
        log.info("%s starts (%d of %d)", command.name, len(codes) + 1, len(commands))
        with _open_log(command) as file, logging_to(file):
            try:
                command.call()
                codes[command.name] = 0
            except Stopped:
                raise
            except FlexfleetError as error:
                codes[command.name] = error.exit_code
                file.write(f"error: {' '.join(str(error).split())}\n")
            except Exception as error:
                error.add_note(
                    f"in {command.name} ({len(codes) + 1} of {len(commands)}); finished runs are not repeated"
                )
                raise
        _log_end(command, codes, len(commands), time.monotonic() - started)
    return codes


@contextmanager
def _open_log(command: Command) -> Iterator[TextIO]:
    """Open the command's log file, and write a line with the command."""
    command.log.parent.mkdir(parents=True, exist_ok=True)
    with open(command.log, "a", encoding="utf-8") as file:
        file.write(f"{BEGINS}{shlex.join(('python', '-m', command.module, *command.argv))}\n")
        file.flush()
        yield file


def _start(command: Command, watched: int) -> subprocess.Popen[bytes]:
    """Start the command's process, which stops when the pipe `watched` closes."""
    with _open_log(command) as file:
        # With -P, a folder `flexfleet` in the working directory cannot shadow this package. With process_group, only
        # this process receives Ctrl-C from the terminal and forwards the signal once.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", command.module, *command.argv],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            # `last_words` reads the log, so its format is text.
            env=os.environ | ONE_THREAD | allowed.for_child() | {STARTER: str(watched), LOG_FORMAT: "text"},
            pass_fds=(watched,),
            process_group=0,
        )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stdin:  # the new process may have ended already
        stdin.write(command.stdin.encode())
    return process


class _Rounds:
    """Progress of a run: the lines about rounds that its process appends to its log file."""

    def __init__(self, command: Command) -> None:
        self._command, self._tenths = command, -1
        self._read = command.log.stat().st_size if command.log.exists() else 0

    def show(self) -> None:
        """Log the new lines about the first round and about one round in ten."""
        if not self._command.has_rounds:
            return
        with open(self._command.log, "rb") as file:
            file.seek(self._read)
            text = file.read()
        self._read += text.rfind(b"\n") + 1  # the process may still be writing the last line
        for line, number, total in ROUND.findall(text):
            tenths = 10 * int(number) // int(total)
            if tenths > self._tenths:
                self._tenths = tenths
                log.info("%s: %s", self._command.name, line.decode())


def _log_end(command: Command, codes: dict[str, int], total: int, seconds: float) -> None:
    code = codes[command.name]
    how = "finished" if code == 0 else f"ended with exit code {code}, see {command.log},"
    log.info("%s %s after %.1f s (%d of %d)", command.name, how, seconds, len(codes), total)


def report_failures(codes: Mapping[str, int], commands: Sequence[Command]) -> str:
    """Log the error of each failed command, and return the names and log files of these commands as text."""
    failed = [command for command in commands if codes.get(command.name)]
    for each in failed:
        log.error("%s: exit code %d, %s: %s", each.name, codes[each.name], each.log, last_words(each.log))
    return ", ".join(f"{each.name} ({each.log})" for each in failed)


def last_words(path: Path) -> str:
    """Return the error message of the last command in a log file, or the last line if there is no message."""
    if not path.exists():
        return "no output"
    *_, text = path.read_text(encoding="utf-8", errors="replace").rpartition(f"\n{BEGINS}")
    lines = [line for line in text.splitlines()[1:] if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no output"])[-1].removeprefix("error: ").strip()
