"""Runs commands as real processes, forked from one that has imported everything: a start takes 0.1 s instead of 5.

`python -m tests.harness.processes DIR` is that process, the nursery. It reads requests, a line of JSON each. It replies
to each with a line: a command's process id, or its exit code once it has ended.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
LOOK_S = 0.005
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


def refused(done: Done, code: int = 2) -> str:
    """The one line on stderr that an expected error is."""
    assert done.code == code, done.err
    assert done.out == ""
    lines = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.err
    assert done.err.rstrip().endswith(lines[0]), "an error is one line, and the last"
    return lines[0]


def with_sets(argv: Sequence[str], sets: Sequence[str]) -> list[str]:
    return [*argv, *(part for pair in sets for part in ("--set", pair))]


class Child:
    """A real process in which a command runs."""

    def __init__(self, nursery: Nursery, pid: int, out: Path, err: Path) -> None:
        self._nursery = nursery
        self._lock = threading.Lock()
        self._code: int | None = None
        self._out = out
        self._err = err
        self.pid = pid

    def send(self, number: signal.Signals) -> None:
        with self._lock:
            if self._code is None:
                os.kill(self.pid, number)  # the id cannot be another process's before `poll` has seen the end

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    @property
    def err(self) -> str:
        """Its stderr so far."""
        return self._err.read_text() if self._err.exists() else ""

    def poll(self) -> int | None:
        """Its exit code, -n if signal n ended it; None while it runs."""
        with self._lock:
            if self._code is None:
                self._code = self._nursery.ask({"poll": self.pid})
            return self._code

    def wait(self, timeout_s: float = float("inf")) -> Done:
        """Waits for its end. Raises TimeoutError if it does not end."""
        until = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise TimeoutError(f"process {self.pid} has not ended after {timeout_s:.0f} s:\n{self.err[-3000:]}")
            time.sleep(LOOK_S)
        return Done(code, self._out.read_text(), self._err.read_text())


class Nursery:
    """Starts commands. Several threads may use it."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._count = 0
        self._unread = 0
        """Answers that nobody has read: a signal's handler has ended the request."""
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(scratch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "OPENBLAS_NUM_THREADS": "1"},
        )

    def ask(self, order: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._unread += 1
            self._process.stdin.flush()
            while self._unread:
                answer = self._process.stdout.readline()
                self._unread -= 1
        if not answer:
            raise RuntimeError("the nursery has ended: see its messages on stderr")
        return json.loads(answer)

    def start(
        self,
        main: str,
        *argv: str,
        cwd: Path,
        sets: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        faults: Mapping[str, Any] | None = None,
    ) -> Child:
        """`main`: a name in `mains`. `env`: added to the nursery's environment. `log`: the file for stderr; stdout
        goes beside it. `faults`: arguments of `faults.install`."""
        with self._lock:
            self._count += 1
            err = log or self._scratch / f"{self._count}.err"
        out = err.with_suffix(".out")
        order = {"main": main, "argv": with_sets(argv, sets), "cwd": str(cwd), "out": str(out), "err": str(err)}
        return Child(self, self.ask(order | {"env": dict(env or {}), "faults": faults}), out, err)

    def close(self) -> None:
        self._process.communicate()  # closes its stdin, which ends it


# --------------------------------------------------------------------------------------- inside the nursery
def mains() -> dict[str, Callable[[list[str]], int]]:
    """Imports all that commands need. Returns the commands by name: `flexfleet`, single steps, and `mlflow`, which
    creates MLflow's tables."""
    import boto3.session  # noqa: F401
    import kubernetes  # noqa: F401
    import mlflow
    import mlflow.store.tracking.sqlalchemy_store
    import sklearn.datasets  # noqa: F401

    import flexfleet.pipeline.federate
    import flexfleet.pipeline.model_pool
    import flexfleet.pipeline.partition
    import flexfleet.pipeline.pretrain
    import flexfleet.pipeline.run
    import flexfleet.reports.report
    import flexfleet.worker.__main__
    import flexfleet.worker.server
    from flexfleet import pipeline
    from flexfleet.cli import main as cli

    def create_tables(argv: list[str]) -> int:
        mlflow.MlflowClient(argv[0]).search_experiments()
        return 0

    names = ("federate", "model_pool", "partition", "pretrain")
    own = {"flexfleet": cli.dispatch, "mlflow": create_tables, "worker": flexfleet.worker.__main__.main}
    return own | {name: getattr(pipeline, name).main for name in names}


def prepared(scratch: Path) -> dict[str, Callable[[list[str]], int]]:
    """Makes this process ready to be forked: imports what commands need, does once what is the same in each, and draws
    no figures. Returns `mains`."""
    import numpy

    from fl_engine.data import heat_map
    from flexfleet.reports import figure, page, report
    from flexfleet.tracking import record
    from tests.harness.pictures import titles_alone

    known = mains()
    # The list of installed packages is the same in every command, and takes half a second: read it once.
    record.environment = functools.cache(record.environment)
    record.environment()
    heat_map.save_figure = titles_alone  # type: ignore[assignment]
    with figure.style(figure.STYLE):
        heat_map.draw(numpy.ones((2, 2), dtype=int), scratch / "nothing.svg")  # imports matplotlib
    page.template("flexfleet.reports", "report.html", tuple(report.FILTERS.items()))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background processes with SIGINT ignored
    return known


def _serve(scratch: Path) -> None:
    import tests.harness.faults  # noqa: F401

    known, codes = prepared(scratch), dict[int, int]()
    for line in sys.stdin:
        order = json.loads(line)
        if "poll" in order:
            pid = order["poll"]
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            print(json.dumps(codes.get(pid)), flush=True)
            continue
        child = os.fork()
        if not child:
            _live(order, known)
        codes.pop(child, None)  # another process's, which had this id before
        print(child, flush=True)


def _live(order: Mapping[str, Any], mains: Mapping[str, Callable[[list[str]], int]]) -> NoReturn:
    """Runs the command in the forked child."""
    from flexfleet.files import terminal
    from tests.harness import faults

    def work() -> None:
        for number, path in ((1, order["out"]), (2, order["err"])):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.environ.update(order["env"])
        os.chdir(order["cwd"])
        with faults.install(**order["faults"] or {}):
            terminal.run_main(lambda _: mains[order["main"]](order["argv"]))

    lived(work)


def lived(work: Callable[[], object]) -> NoReturn:
    """What a forked process does, and its end as Python's own would be, but for what the parent has left to do at its
    end."""
    from fl_engine.storage.code import clear

    code: Any = 0
    try:
        work()
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    clear()  # as Python's own end does
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


# ------------------------------------------------------------------------------------------ what the system knows
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


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
