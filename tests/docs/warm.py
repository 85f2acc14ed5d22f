"""Commands of the documentation as processes that are forked from one that has imported everything: the imports of a
`flexfleet` take five seconds, and the pages have more than a hundred of them.

`python -m tests.docs.warm SOCKET` is that process. For each connection, which brings arguments, folder, environment,
stdin, stdout and stderr, it forks one that does what stand_in.py says, and answers with its exit code. `ASK`, the text
of a script, is the other end.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
ASK = """\
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as ends:
    ends.connect(os.environ["DOCS_WARM"])
    order = json.dumps({"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}).encode()
    socket.send_fds(ends, [len(order).to_bytes(8, "big")], [0, 1, 2])
    ends.sendall(order)
    code = ends.recv(4)
sys.exit(int.from_bytes(code, "big", signed=True) if code else "the process of tests/docs/warm.py has ended")
"""


@contextmanager
def warm() -> Iterator[str]:
    """Such a process: the path of its socket."""
    with tempfile.TemporaryDirectory(prefix="docs") as folder:
        path = f"{folder}/warm"
        command = [sys.executable, "-m", __name__, path]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield path


# ------------------------------------------------------------------------------------------ inside the process
def _serve(path: str) -> None:
    from fl_engine.data import figures
    from tests.harness.pictures import titles_alone
    from tests.harness.processes import mains

    mains()
    import matplotlib.figure  # noqa: F401

    figures.save = titles_alone  # type: ignore[assignment]
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
        _live(json.loads(b"".join(parts)), streams)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):  # whoever asked may be gone
        connection.sendall(code.to_bytes(4, "big", signed=True))
    os._exit(0)


def _live(order: dict[str, Any], streams: list[int]) -> NoReturn:
    code: Any = 0
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.environ.clear()
        os.environ.update(order["env"])
        os.chdir(order["cwd"])
        sys.path[0] = os.getcwd()
        from tests.docs.stand_in import command_of

        command = command_of(*order["argv"])
        match command:
            case []:
                pass
            case [sys.executable, "-m", "flexfleet.cli", *words]:
                sys.argv = ["flexfleet", *words]
                runpy.run_module("flexfleet.cli", run_name="__main__")
            case [sys.executable, "-c", text, *words]:
                sys.argv = ["-c", *words]
                exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
            case _:
                os.execvp(command[0], command)
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    _serve(sys.argv[1])
