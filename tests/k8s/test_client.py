"""A client's process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pydantic import BaseModel, model_serializer
from pydantic_core import PydanticSerializationError

from fl_engine.exchange.assignment import Assignment
from flexfleet.steps import answer, client

ROOT = Path(__file__).parents[2]


def test_a_client_that_is_ended_while_it_imports_torch_ends_as_one_that_was_told_to(tmp_path: Path) -> None:
    """The first process of a container has to handle SIGTERM itself. What takes seconds to import is replaced by what
    takes for ever."""
    (tmp_path / "torch.py").write_text("import time\nprint('importing torch', flush=True)\ntime.sleep(600)\n")
    (tmp_path / "assignment.json").write_text("{}")
    command = [sys.executable, "-m", "flexfleet.steps.client", str(tmp_path / "assignment.json")]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "importing torch\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 143
        finally:
            process.kill()


def test_a_client_that_is_ended_while_it_writes_its_answer_ends_as_one_that_was_told_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pydantic makes another error of whatever ends its serializers."""

    class Manifest(BaseModel):
        @model_serializer
        def ended(self) -> str:
            signal.raise_signal(signal.SIGTERM)
            return ""

    def answered(*_: object) -> None:
        with pytest.raises(PydanticSerializationError):
            Manifest().model_dump_json()
        time.sleep(10)
        pytest.fail("it went on")

    monkeypatch.setattr(Assignment, "read", lambda _: None)
    monkeypatch.setattr(answer, "answer", answered)
    assert client.main(["assignment.json"]) == 143
