"""MLflow's own server, in a process of its own, because it changes MLflow's addresses for the whole process.

WANTED=me:password PORT=0 python -m tests.harness.mlflow_server     refuses other logins; empty: needs no login
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@contextmanager
def serving(folder: Path, template: Path, wanted: str = "", port: int = 0) -> Iterator[int]:
    """Yields the server's port: `port`, or any. Runs and artifacts are in `folder`, also those of an earlier server;
    `template` is a database without runs; `wanted` is the login, user:password."""
    from mlflow.server import constants

    if not (folder / "mlflow.db").exists():
        shutil.copy(template, folder / "mlflow.db")
    given = {
        constants.BACKEND_STORE_URI_ENV_VAR: f"sqlite:///{folder}/mlflow.db",
        constants.ARTIFACT_ROOT_ENV_VAR: f"file://{folder}/artifacts",
        "WANTED": wanted,
        "PORT": str(port),
    }
    argv = [sys.executable, "-m", __name__]
    with subprocess.Popen(argv, cwd=ROOT, env={**os.environ, **given}, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.kill()


def main() -> None:
    from mlflow.server import app
    from werkzeug.serving import make_server

    wanted = os.environ["WANTED"]
    header = f"Basic {base64.b64encode(wanted.encode()).decode()}"

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if not wanted or environ.get("HTTP_AUTHORIZATION") == header:
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", "Basic"), ("Content-Type", "text/plain")])
        return [b"a login is needed"]

    server = make_server("127.0.0.1", int(os.environ["PORT"]), guarded, threaded=True)
    print(server.port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
