"""`python` as a process that is forked from one that has imported everything: the imports of a `flexfleet` take five
seconds, and the pages of the documentation alone have more than a hundred of them.

`python -m tests.harness.warm SOCKET PYTHON` is that process. PYTHON is a script that stands in for `python`: it sends
its arguments, folder, environment, stdin, stdout and stderr through the socket, a process is forked that does with them
what `python` does, and its exit code comes back. Unlike `python` that process hears no signals: it is killed where the
script is ended. And its packages are this checkout's, whatever the current folder holds. `warm` starts the process and
writes the script.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing.spawn  # noqa: F401 - it takes sys.executable now
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tests.harness.processes import lived, prepared
from tests.harness.wheel import kept

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable
PACKAGES = ("flexfleet", "kfp", "mlflow", "tests")
"""What is imported: a program of another package is run by a new interpreter."""
ASK = """\
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as ends:
    ends.connect({socket!r})
    order = json.dumps({{"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}}).encode()
    socket.send_fds(ends, [len(order).to_bytes(8, "big")], [0, 1, 2])
    ends.sendall(order)
    code = ends.recv(4)
sys.exit(int.from_bytes(code, "big", signed=True) if code else "the process of tests/harness/warm.py has ended")
"""


@contextmanager
def warm(**variables: str) -> Iterator[Path]:
    """Such a process, with environment variables of its own: the path of the script that stands in for `python`."""
    with tempfile.TemporaryDirectory(prefix="warm") as folder:
        path, ask, python = (Path(folder) / name for name in ("socket", "ask.py", "python"))
        ask.write_text(ASK.format(socket=str(path)))
        python.write_text(f"#!/bin/sh\nexec '{PYTHON}' -I -S '{ask}' \"$@\"\n")
        python.chmod(0o755)
        command = [PYTHON, "-m", __name__, str(path), str(python)]
        env = kept() | {"OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true", **variables}
        with subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield python


# ------------------------------------------------------------------------------------------ inside the process
def interpret(words: Sequence[str]) -> None:
    """Does in this process what `python *words` does."""
    here, rest = [os.getcwd()], list(words)
    if rest[:1] == ["-P"]:
        here, rest = [], rest[1:]
    sys.path[:1] = [*here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    match rest:
        case ["-m", module, *given] if module.partition(".")[0] in PACKAGES:
            sys.argv = [module, *given]
            runpy.run_module(module, run_name="__main__")
        case ["-c", text, *given]:
            sys.argv = ["-c", *given]
            exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
        case _:
            os.execv(PYTHON, [PYTHON, *words])


def _serve(path: str, python: str) -> None:
    prepared(Path(path).parent)
    import kfp.dsl.executor_main  # noqa: F401

    sys.executable = python  # for what is started from here; multiprocessing has taken the real one
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that answer
    with socket.socket(socket.AF_UNIX) as here:
        here.bind(path)
        here.listen(16)
        print("ready", flush=True)
        while sys.stdin not in select.select([here, sys.stdin], [], [])[0]:  # which closes when the tests end
            connection, _ = here.accept()
            with connection:
                if not os.fork():
                    _answer(connection)


def _answer(connection: socket.socket) -> NoReturn:
    """Forks the command, waits for its end and tells its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, streams, _, _ = socket.recv_fds(connection, 8, 3)
    left, parts = int.from_bytes(length, "big"), []
    while left and (part := connection.recv(left)):
        parts.append(part)
        left -= len(part)
    child = os.fork()
    if not child:
        lived(partial(_live, json.loads(b"".join(parts)), streams))
    ended = os.pidfd_open(child)
    if ended not in select.select([connection, ended], [], [])[0]:  # whoever asked is gone
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(code.to_bytes(4, "big", signed=True))
    os._exit(0)


def _live(order: dict[str, Any], streams: list[int]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.environ.clear()
    os.environ.update(order["env"])
    os.environ.setdefault("MKL_CBWR", "AUTO")  # as importing fl_engine does
    os.chdir(order["cwd"])
    interpret(order["argv"])


if __name__ == "__main__":
    _serve(*sys.argv[1:])
