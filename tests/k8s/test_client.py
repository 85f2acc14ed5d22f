"""A client's process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

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
