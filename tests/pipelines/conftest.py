from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

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
