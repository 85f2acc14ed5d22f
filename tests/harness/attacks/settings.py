"""Names of runs and paths that would open a hole. The engine has to refuse them before anything is trained."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fl_engine.core.errors import BadInput, FlexfleetError
from flexfleet.cli import main as cli
from flexfleet.files.run_folder import folder_lock
from tests.harness.attacks.table import Attack
from tests.harness.processes import QUICK


@contextlib.contextmanager
def elsewhere() -> Iterator[Path]:
    """Changes to a new, empty folder."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


def a_runs_name(name: str) -> str | None:
    with elsewhere() as here, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            cli.dispatch(["run", f"--run-id={name}", *(f"--set={s}" for s in (*QUICK, "rounds.stop=1"))])
        except (BadInput, SystemExit):
            made = [p.name for p in here.rglob("*")]
            return f"refused, but left {made}" if made else None
    return "ran"


def a_lock_that_is_a_link() -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        target, out = Path(folder) / "target", Path(folder) / "run"
        target.write_text("precious")
        out.mkdir()
        (out / ".lock").symlink_to(target)
        with contextlib.suppress(FlexfleetError, OSError), folder_lock(out):
            pass
        return None if target.read_text() == "precious" else "overwrote what the link points to"


def _attack(name: str, tries: str, run: Callable[..., str | None], *given: Any) -> Attack:
    return Attack(name, tries, "engine", partial(run, *given))


ATTACKS = (
    _attack("a run's name: line break", "to forge lines of the log", a_runs_name, "a\nb"),
    _attack("a run's name: escape", "the same", a_runs_name, "a\x1b[2J"),
    _attack("a run's name: turned around", "the same", a_runs_name, "a\u202eb"),
    _attack("a run's name: another folder", "to write elsewhere", a_runs_name, "../a"),
    _attack("a run's name: an option", "to be read as one", a_runs_name, "-a"),
    _attack("a lock that is a link", "to empty somebody's file", a_lock_that_is_a_link),
)
