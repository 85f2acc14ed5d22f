"""A server that forks commands from a process that has imported everything: a start takes 0.1 s instead of 5.

`python -m tests.harness.forking FOLDER` is the server. It listens at FOLDER/socket, and FOLDER/python is a script that
stands in for `python`. A client sends Python's arguments, the working directory and the environment, with stdin, stdout
and stderr as file descriptors. It receives the PID and the pidfd of the command's process, and later its exit code. If
the client closes the connection, the command's process is killed.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

PYTHON = sys.executable
PACKAGES = ("flexfleet", "kfp", "mlflow", "tests")
"""Programs of these packages run in a forked process, all others in a new interpreter."""
SCRIPT = """\
#!/bin/sh
exec '{python}' -I -S -c '
import os, sys
sys.path.insert(0, "{folder}")
from forking import requested
connection, _, _ = requested("{socket}", sys.argv[1:], os.getcwd(), os.environ, (0, 1, 2), "{script}")
code = connection.recv(4)
sys.exit(int.from_bytes(code, "big", signed=True) if code else "the fork server has ended")
' "$@"
"""


def requested(
    path: str,
    argv: Sequence[str],
    cwd: str,
    env: Mapping[str, str],
    streams: Sequence[int],
    python: str,
    faults: Mapping[str, Any] | None = None,
) -> tuple[socket.socket, int, int]:
    """Start `python *argv` in a forked process, and return the connection, the PID and the pidfd.

    Args:
        path: The server's socket.
        streams: Descriptors of stdin, stdout and stderr.
        python: The command's `sys.executable`.
        faults: Arguments of `faults.install`.
    """
    value = {"argv": list(argv), "cwd": cwd, "env": dict(env), "python": python, "faults": faults}
    text = json.dumps(value).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    socket.send_fds(connection, [len(text).to_bytes(8, "big")], list(streams))
    connection.sendall(text)
    pid, pidfds, _, _ = socket.recv_fds(connection, 8, 1)
    return connection, int.from_bytes(pid, "big"), pidfds[0]


def _prepare(folder: str) -> None:
    """Import what commands need, compute once what is equal in all of them, and replace drawings by their titles."""
    import functools
    import multiprocessing.spawn  # noqa: F401 - it reads sys.executable when it is imported
    import signal
    from pathlib import Path

    import boto3.session  # noqa: F401
    import jinja2  # noqa: F401
    import kfp.dsl.executor_main  # noqa: F401
    import kubernetes  # noqa: F401
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
    import numpy
    import sklearn.datasets  # noqa: F401

    import flexfleet.reports.report  # noqa: F401
    import tests.harness.faults  # noqa: F401
    from fl_engine.data import heat_map
    from flexfleet.reports import figure
    from flexfleet.tracking import record
    from tests.harness.pictures import titles_alone

    record.environment = functools.cache(record.environment)  # the list of installed packages takes half a second
    record.environment()
    heat_map.save_figure = titles_alone  # type: ignore[assignment]
    with figure.style(figure.STYLE):
        heat_map.draw(numpy.ones((2, 2), dtype=int), Path(folder) / "nothing.svg")  # imports matplotlib
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background processes with SIGINT ignored


def _serve(folder: str) -> None:
    import select
    import signal

    _prepare(folder)
    path, script = f"{folder}/socket", f"{folder}/python"
    with open(script, "w", encoding="utf-8") as file:
        file.write(SCRIPT.format(python=PYTHON, folder=os.path.dirname(__file__), socket=path, script=script))
    os.chmod(script, 0o755)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaps the processes that answer
    with socket.socket(socket.AF_UNIX) as here:
        here.bind(path)
        here.listen(64)
        print("ready", flush=True)
        while sys.stdin not in select.select([here, sys.stdin], [], [])[0]:  # stdin closes when the tests end
            connection, _ = here.accept()
            with connection:
                if not os.fork():
                    _answer(connection)


def _answer(connection: socket.socket) -> NoReturn:
    """Fork the command, wait for its end, and send its exit code."""
    import contextlib
    import select
    import signal

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, streams, _, _ = socket.recv_fds(connection, 8, 3)
    text = connection.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)
    child = os.fork()
    if not child:
        connection.close()
        _run(json.loads(text), streams)
    ended = os.pidfd_open(child)
    with contextlib.suppress(OSError):
        socket.send_fds(connection, [child.to_bytes(8, "big")], [ended])
    if ended not in select.select([connection, ended], [], [])[0]:  # the client has closed the connection
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(code.to_bytes(4, "big", signed=True))
    os._exit(0)


def _run(request: dict[str, Any], streams: Sequence[int]) -> NoReturn:
    """Do in this forked process what Python does with the arguments, and end as Python does."""
    import traceback

    from fl_engine.storage.code import clear
    from tests.harness import faults

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.environ.clear()
    os.environ.update(request["env"])
    os.environ.setdefault("MKL_CBWR", "AUTO")  # as importing fl_engine does
    os.chdir(request["cwd"])
    sys.executable = request["python"]
    code: Any = 0
    try:
        with faults.install(**request["faults"] or {}):
            interpret(request["argv"])
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    clear()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def interpret(words: Sequence[str]) -> None:
    """Do in this process what `python *words` does."""
    import runpy

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


if __name__ == "__main__":
    _serve(sys.argv[1])
