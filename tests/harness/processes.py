"""Commands as real processes, forked by the server in `forking`; and what the system reports about processes."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.forking import requested
from tests.harness.wheel import clean_environment

ROOT = Path(__file__).parents[2]
LOOK_S = 0.005
PROGRAMS: dict[str, tuple[str, ...]] = {
    "flexfleet": ("flexfleet",),
    "worker": ("flexfleet.worker",),
    "federate": ("flexfleet.pipeline", "federate"),
}
"""The programs that `ForkServer.start` runs, by name."""
QUICK = (
    "tracking.mlflow=null",
    "dataset.train_samples=240",
    "dataset.test_samples=60",
    "partition.clients=6",
    "partition.minimum=5",
    "partition.proxy=0.1",
    "pretrain.epochs=1",
    "model.name=small_cnn",
    "model.width=0.5",
    "algorithm.name=flexfl",
    "training.fraction=0.5",
    "training.epochs=1",
    "rounds.stop=3",
)
"""Settings of FlexFL on the digits that train in well under a second."""


def until(condition: Callable[[], Any], what: str, patience_s: float = 120.0) -> Any:
    """Wait until a condition is true, and return its value."""
    end = time.monotonic() + patience_s
    while not (found := condition()):
        assert time.monotonic() < end, f"{what} did not happen within {patience_s:.0f} s"
        time.sleep(LOOK_S)
    return found


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Stdout, which has to be exactly one JSON object."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value

    def ok(self) -> Done:
        """Return this command's end, which must be a success."""
        assert self.code == 0, self.err
        return self


def refused(done: Done, code: int = 2) -> str:
    """Return the line on stderr of an expected error."""
    assert done.code == code, done.err
    assert not done.out or done.json["error"]["exit_code"] == code
    lines = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.err
    assert done.err.rstrip().endswith(lines[0]), "an error is one line, and the last"
    return lines[0]


def with_sets(argv: Sequence[str], sets: Sequence[str]) -> list[str]:
    return [*argv, *(part for pair in sets for part in ("--set", pair))]


class Child:
    """A real process in which a command runs. It is killed if this object is deleted."""

    def __init__(self, connection: socket.socket, pid: int, pidfd: int, out: Path, err: Path) -> None:
        self._connection, self._pidfd = connection, pidfd
        self._out, self._err = out, err
        self._code: int | None = None
        self._lock = threading.Lock()
        self.pid = pid

    def send(self, number: signal.Signals) -> None:
        with self._lock, suppress(ProcessLookupError):
            if self._code is None:
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    @property
    def err(self) -> str:
        """Its stderr so far."""
        return self._err.read_text() if self._err.exists() else ""

    def poll(self) -> int | None:
        """Return the exit code, -n if signal n ended the process; None while it runs."""
        with self._lock:
            if self._code is None and select.select([self._connection], [], [], 0)[0]:
                code = self._connection.recv(4, socket.MSG_WAITALL)
                assert code, "the fork server has ended: see its messages on stderr"
                self._code = int.from_bytes(code, "big", signed=True)
                self._connection.close()
                os.close(self._pidfd)
            return self._code

    def wait(self, timeout_s: float = float("inf")) -> Done:
        """Wait for the end of the process. Raises TimeoutError if it does not end."""
        until = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise TimeoutError(f"process {self.pid} has not ended after {timeout_s:.0f} s:\n{self.err[-3000:]}")
            time.sleep(LOOK_S)
        return Done(code, self._out.read_text(), self._err.read_text())


class ForkServer:
    """Starts commands in processes that are forked by `forking`. Several threads may use it.

    Args:
        folder: An empty folder with a short path, for its socket.
        variables: Environment variables of the server.

    Attributes:
        python: The script that stands in for `python`.
    """

    def __init__(self, folder: Path, **variables: str) -> None:
        self._folder, self._numbers = folder, itertools.count(1)
        self.python = folder / "python"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.forking", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env=clean_environment() | LIBRARIES | variables,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "the fork server does not start"

    def start(
        self,
        program: str,
        *argv: str,
        cwd: Path,
        sets: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        faults: Mapping[str, Any] | None = None,
    ) -> Child:
        """Start a program.

        Args:
            program: A key of PROGRAMS.
            sets: Parameters for `--set`.
            env: Variables that are added to this process's environment.
            log: File for stderr; stdout is written beside it.
            faults: Arguments of `faults.install`.
        """
        err = log or self._folder / f"{next(self._numbers)}.err"
        out = err.with_suffix(".out")
        words = ["-m", *PROGRAMS[program], *with_sets(argv, sets)]
        with open(os.devnull) as none, out.open("a") as to, err.open("a") as log_to:
            streams = none.fileno(), to.fileno(), log_to.fileno()
            environment = os.environ | LIBRARIES | (env or {})
            asked = requested(
                f"{self._folder}/socket", words, str(cwd), environment, streams, sys.executable, faults or {}
            )
        return Child(*asked, out, err)

    def close(self) -> None:
        self._process.communicate()  # closes its stdin, which ends it


LIBRARIES = {"MLFLOW_DISABLE_TELEMETRY": "true", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Variables that libraries read when they are imported."""


@contextmanager
def fork_server(**variables: str) -> Iterator[ForkServer]:
    """A server in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="fork") as folder:
        found = ForkServer(Path(folder), **variables)
        try:
            yield found
        finally:
            found.close()


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended meanwhile
            found += [int(child) for child in task.read_text().split()]
    return found


def workers(pid: int) -> list[int]:
    """The worker processes of a coordinator: its grandchildren, since multiprocessing's server process starts them."""
    return sorted(worker for server in children(pid) for worker in children(server))


def marked(token: str) -> list[int]:
    """Processes with `token` in the environment that they were started with, which their children inherit."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if token.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:  # another user's, or it has ended meanwhile
            continue
    return found
