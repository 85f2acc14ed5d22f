"""Execute commands, each with one thread and a log file: as processes side by side, or one by one in this process. A
command that fails does not stop the others."""

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
from threading import current_thread, main_thread
from typing import TextIO

from fl_engine.core import allowed
from fl_engine.core.errors import FlexfleetError, Stopped
from flexfleet.files.progress import Live
from flexfleet.files.signals import stopping

log = logging.getLogger("flexfleet")

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
POLL_S = 0.05
TAIL_BYTES = 4096
ROUND = re.compile(r"(round \d+(?:/\d+)?|epoch \d+(?:/\d+)?)(?:  ((?:avg|full) -?[\d.]+(?: %)?))?")
BEGINS = "$ "
"""Begins the line in a log with the command whose output follows."""


@dataclass(frozen=True)
class Command:
    name: str
    module: str
    """`python -m <module>`"""
    argv: tuple[str, ...]
    log: Path
    """Its stdout and stderr are appended here."""
    stdin: str = ""
    """The command's stdin, for secrets: no process list and no log shows it."""
    call: Callable[[], object] | None = None
    """Function that does the same in this process."""


def side_by_side(commands: Sequence[Command], at_once: int) -> dict[str, int]:
    """Run the commands as processes, and map their names to exit codes (128 + n if signal n ended one).

    SIGTERM, Ctrl-C and the end of the terminal are passed on to the running processes; no other process starts. Then
    raises Stopped or KeyboardInterrupt. After any other error all processes are killed.
    """
    codes: dict[str, int] = {}
    live = Live()
    waiting = list(commands)
    running: dict[Command, tuple[subprocess.Popen[bytes], float]] = {}
    try:
        with _passing_signals_on(running) as received:
            while running or (waiting and not received):
                while waiting and len(running) < at_once and not received:
                    command = waiting.pop(0)
                    running[command] = (_start(command), time.monotonic())
                    if received:  # a signal came during the start, so that this process did not get it
                        running[command][0].send_signal(received[-1])
                for command, (process, started) in list(running.items()):
                    code = process.poll()
                    if code is not None:
                        del running[command]
                        codes[command.name] = code if code >= 0 else 128 - code
                        _tell(command, codes, len(commands), time.monotonic() - started)
                if running and live.due():
                    live.show(f"{len(codes)} of {len(commands)} done; {', '.join(map(_progress, running))}")
                time.sleep(POLL_S)
    finally:
        live.close()
        for process, _ in running.values():
            process.kill()
            process.wait()
    if received:
        if signal.SIGINT in received:
            raise KeyboardInterrupt
        raise Stopped("stopped on request")
    return codes


def one_by_one(commands: Sequence[Command], at_once: int = 1) -> dict[str, int]:
    """Call the commands' `call` in this process, and map their names to exit codes.

    An expected error (FlexfleetError) is written into the command's log and becomes its exit code. Stopped, Ctrl-C and
    unexpected errors leave this function at once; a note of an unexpected error names the command.
    """
    codes: dict[str, int] = {}
    for command in commands:
        assert command.call is not None, f"{command.name} can only be run as a process"
        started = time.monotonic()
        log.info("%s begins (%d of %d)", command.name, len(codes) + 1, len(commands))
        with _logging_to(command) as file:
            try:
                command.call()
                codes[command.name] = 0
            except Stopped:
                raise
            except FlexfleetError as error:
                codes[command.name] = error.exit_code
                file.write(f"error: {' '.join(str(error).split())}\n")
            except Exception as error:
                error.add_note(f"in {command.name} ({len(codes) + 1} of {len(commands)}); finished runs are kept")
                raise
        _tell(command, codes, len(commands), time.monotonic() - started)
    return codes


@contextmanager
def _logging_to(command: Command) -> Iterator[TextIO]:
    """Open the command's log, and write flexfleet's log into it too."""
    command.log.parent.mkdir(parents=True, exist_ok=True)
    with open(command.log, "a", encoding="utf-8") as file:
        file.write(_head(command))
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
        try:
            yield file
        finally:
            log.removeHandler(handler)


def _head(command: Command) -> str:
    return f"{BEGINS}{shlex.join(('python', '-m', command.module, *command.argv))}\n"


def _start(command: Command) -> subprocess.Popen[bytes]:
    command.log.parent.mkdir(parents=True, exist_ok=True)
    with open(command.log, "ab") as file:
        file.write(_head(command).encode())
        file.flush()
        # -P: do not import a folder `flexfleet` of the working directory instead of this package. Own process group: a
        # Ctrl-C in the terminal reaches the process only once, through this process.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", command.module, *command.argv],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | ONE_THREAD | allowed.for_child(),
            process_group=0,
        )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stdin:  # the process may have ended already
        stdin.write(command.stdin.encode())
    return process


def _tell(command: Command, codes: dict[str, int], total: int, seconds: float) -> None:
    code = codes[command.name]
    how = "finished" if code == 0 else f"ended with exit code {code}, see {command.log},"
    log.info("%s %s after %.1f s (%d of %d)", command.name, how, seconds, len(codes), total)


def _progress(command: Command) -> str:
    """Return the progress from the end of the command's log, like `flexfl-s0 round 12/40 avg 81.3 %`."""
    with open(command.log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        *_, text = file.read().decode(errors="replace").rpartition(f"\n{BEGINS}")
    found = [" ".join(part for part in match.groups() if part) for match in ROUND.finditer(text)]
    return f"{command.name} {found[-1] if found else 'begins'}"


@contextmanager
def _passing_signals_on(running: dict[Command, tuple[subprocess.Popen[bytes], float]]) -> Iterator[list[int]]:
    """Yield the list of the signals passed on so far: SIGINT, else SIGTERM. A process stops cleanly at the first
    signal, and at once at a second Ctrl-C."""
    received: list[int] = []

    def pass_on(signum: int, _: object) -> None:
        told = signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM
        received.append(told)
        for process, _started in list(running.values()):
            process.send_signal(told)

    if current_thread() is not main_thread():
        yield received
        return
    before = {number: signal.signal(number, pass_on) for number in stopping()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def told_failures(codes: Mapping[str, int], logs: Mapping[str, Path]) -> str:
    """Log why commands failed, and return their names and logs for an error message."""
    failed = {name: code for name, code in codes.items() if code}
    for name, code in failed.items():
        log.error("%s: exit code %d, %s: %s", name, code, logs[name], last_words(logs[name]))
    return ", ".join(f"{name} ({logs[name]})" for name in failed)


def last_words(path: Path) -> str:
    """Return the error line of a log's last command, else its last line."""
    if not path.exists():
        return "no output"
    *_, text = path.read_text(encoding="utf-8", errors="replace").rpartition(f"\n{BEGINS}")
    lines = [line for line in text.splitlines()[1:] if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no output"])[-1].removeprefix("error: ").strip()
