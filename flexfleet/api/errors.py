"""How an error comes to a caller in Python: without the frames of the package, in the words of Python."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from typing import TypeVar

from fl_engine.core.errors import EnvironmentFailure, FlexfleetError
from fl_engine.storage import code
from flexfleet.files.doctor import EXTRAS
from flexfleet.files.terminal import missing, told_of

T = TypeVar("T")

OURS = frozenset({"flexfleet", "fl_engine", *sys.stdlib_module_names})
CONSTANTS = {"null": "None", "true": "True", "false": "False"}
SHELL_ONLY = ("accept-numerics", "discard-damaged")
"""Options that the command line alone has."""
ARGUMENTS = ("run-id", "id", "jobs", "algorithms", "seeds", "over", "config", *SHELL_ONLY)


def told(call: Callable[[], T]) -> T:
    """What `call` gives. An expected error comes without the frames below this one, as one line that says what to do.
    What `run.code` names is imported inside alone."""
    __tracebackhide__ = True  # IPython and pytest leave out this frame too
    try:
        with code.enabled_within():
            return call()
    except FlexfleetError as error:
        if error.args and isinstance(error.args[0], str):
            error.args = (in_python(error.args[0]), *error.args[1:])
        raise error.with_traceback(None) from None
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {module for modules, _ in EXTRAS.values() for module in modules}:
            raise  # of somebody's own code
        raise EnvironmentFailure(missing(str(error.name))) from None
    except OSError as error:
        said = told_of(error)
        raise EnvironmentFailure(said[0] if said else str(error)) from (None if _within(error) else error)


def _within(error: BaseException) -> bool:
    """Whether it was raised with none but this package and Python's own on the way, so that a traceback tells nobody
    anything."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return all(str(frame.f_globals.get("__name__")).partition(".")[0] in OURS for frame in frames)


def in_python(text: str) -> str:
    """A message that names options of the command line, with the arguments of Python in their place."""
    text = re.sub(r"the same command with --id (\S+) --resume", r"the same call with id='\1', resume=True", text)
    text = re.sub(r"--set ([\w.]+)=([\w./:-]+)", _option, text)
    text = re.sub(r"--resume(?![\w-])", "resume=True", text)
    return re.sub(rf"--({'|'.join(ARGUMENTS)})(?![\w-])", _argument, text)


def _option(found: re.Match[str]) -> str:
    return f"options={{'{found[1]}': {CONSTANTS.get(found[2], repr(found[2]))}}}"


def _argument(found: re.Match[str]) -> str:
    return f"{found[0]} on the command line" if found[1] in SHELL_ONLY else found[1].replace("-", "_")
