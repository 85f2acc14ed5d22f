"""How a call from Python ends and what it shows: expected errors in one line, and progress as lines or a bar."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from fl_engine.core.errors import EnvironmentFailure, FlexfleetError
from fl_engine.storage import code
from flexfleet.files.doctor import EXTRAS
from flexfleet.files.progress import hidden
from flexfleet.files.terminal import missing, told_of
from flexfleet.tracking.console import brief

log = logging.getLogger("flexfleet")

T = TypeVar("T")

ARGUMENTS = {"--set ": "", "--resume": "resume=True", "--run-id": "run_id", "--id": "id", "--over": "over"}
"""Options of the command line in messages, and what Python has instead."""


def told(call: Callable[[], T]) -> T:
    """Return what `call` returns. An expected error comes as one line, without the frames below this one. What
    `run.code` names can be imported only inside."""
    __tracebackhide__ = True  # IPython and pytest leave out this frame too
    try:
        with code.enabled_within():
            return call()
    except FlexfleetError as error:
        if error.args and isinstance(error.args[0], str):
            message = error.args[0]
            for option, argument in ARGUMENTS.items():
                message = message.replace(option, argument)
            error.args = (message, *error.args[1:])
        raise error.with_traceback(None) from None
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {module for modules, _ in EXTRAS.values() for module in modules}:
            raise  # of somebody else's code
        raise EnvironmentFailure(missing(str(error.name))) from None
    except OSError as error:
        said = told_of(error)
        raise EnvironmentFailure(said[0] if said else str(error)) from error


# ------------------------------------------------------------------------------------------------- progress
def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and "IPKernelApp" in shell.config


class Bar:
    """A tracker: how many rounds are committed, the last one's figures, and the time that is left."""

    def __init__(self) -> None:
        self._bar: Any = None

    def params(self, values: Mapping[str, Any]) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=int(values["rounds.stop"]), unit="round", file=sys.stderr)

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        if rows:
            number, values = rows[-1]
            self._bar.set_postfix_str(brief(values), refresh=False)
            self._bar.update(number - self._bar.n)

    def finish(self, status: str) -> None:
        if self._bar is not None:
            if status == "FINISHED":
                self._bar.total = self._bar.n  # fewer than rounds.stop where the simulated clock ended the run
            self._bar.close()


def barred(progress: bool | None) -> bool:
    """Whether to show a bar instead of lines."""
    return progress is None and in_notebook()


@contextmanager
def shown(progress: bool | None) -> Iterator[None]:
    """Show the package's log on stderr, or by the process's own handlers; with a bar only warnings. The log's own level
    is respected, except with a bar. If `progress` is False, the log is unchanged and no line of the terminal is
    rewritten."""
    level, propagate, handler = log.level, log.propagate, None
    token = hidden.set(progress is False)
    if barred(progress):
        log.setLevel(logging.WARNING)
    elif progress is not False:
        log.setLevel(level or logging.INFO)
        if not (log.handlers or logging.getLogger().handlers):
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
            log.propagate = False
            log.addHandler(handler)
    try:
        yield
    finally:
        hidden.reset(token)
        if handler is not None:
            log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate
