from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kfp import local
from kfp.local import subprocess_task_handler as tasks

from tests.harness import graphs
from tests.harness.mlflow_server import serving

graphs.quick()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory, python: Path) -> Iterator[Path]:
    """The current folder: each task of a graph runs in a process of its own, and leaves a folder in tasks/."""
    folder = tmp_path_factory.mktemp("graph")
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    replaced = tasks.replace_python_executable
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(tasks, "replace_python_executable", lambda command, _: replaced(command, str(python)))
        local.init(runner=local.SubprocessRunner(use_venv=False), pipeline_root="tasks")
        yield folder
    for number, handler in handlers.items():  # runs in this process take them
        signal.signal(number, handler)


PASSWORD = "pl4nted-secret"


@pytest.fixture(scope="module")
def mlflow_with_password(tmp_path_factory: pytest.TempPathFactory, mlflow_template: Path) -> Iterator[str]:
    """The address of an MLflow server that wants a user and PASSWORD, which are in the environment alone: there the
    Secret puts them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_USERNAME", "me")
        patch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
        with serving(tmp_path_factory.mktemp("mlflow-server"), mlflow_template, f"me:{PASSWORD}") as port:
            yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def telling() -> Callable[..., list[str]]:
    """`telling(folder, ...)`: the files there that hold PASSWORD."""

    def told(*folders: Path) -> list[str]:
        files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        assert files
        return [str(path) for path in files if PASSWORD.encode() in path.read_bytes()]

    return told
