from __future__ import annotations

import base64
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kfp import local


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder: each task of a graph runs in a process of its own, and leaves a folder in tasks/."""
    folder = tmp_path_factory.mktemp("graph")
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        local.init(runner=local.SubprocessRunner(use_venv=False), pipeline_root="tasks")
        yield folder
    for number, handler in handlers.items():  # runs in this process take them
        signal.signal(number, handler)


PASSWORD = "pl4nted-secret"


@pytest.fixture(scope="module")
def mlflow_with_password(tmp_path_factory: pytest.TempPathFactory, mlflow_template: Path) -> Iterator[str]:
    """The address of an MLflow server that wants a user and PASSWORD, which are in the environment alone: there the
    Secret puts them."""
    from mlflow.server import app, constants, handlers
    from werkzeug.serving import make_server

    folder = tmp_path_factory.mktemp("mlflow-server")
    shutil.copy(mlflow_template, folder / "mlflow.db")
    wanted = f"Basic {base64.b64encode(f'me:{PASSWORD}'.encode()).decode()}"

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if environ.get("HTTP_AUTHORIZATION") == wanted:
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", "Basic"), ("Content-Type", "text/plain")])
        return [b"who asks?"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(constants.BACKEND_STORE_URI_ENV_VAR, f"sqlite:///{folder}/mlflow.db")
        patch.setenv(constants.ARTIFACT_ROOT_ENV_VAR, f"file://{folder}/artifacts")
        patch.setenv("MLFLOW_TRACKING_USERNAME", "me")
        patch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
        patch.setattr(handlers, "_tracking_store", None)
        patch.setattr(handlers, "_model_registry_store", None)
        server = make_server("127.0.0.1", 0, guarded, threaded=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.port}"
        server.shutdown()


@pytest.fixture(scope="session")
def telling() -> Callable[..., list[str]]:
    """`telling(folder, ...)`: the files there that hold PASSWORD."""

    def told(*folders: Path) -> list[str]:
        files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        assert files
        return [str(path) for path in files if PASSWORD.encode() in path.read_bytes()]

    return told
