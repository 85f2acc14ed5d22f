"""How an error comes to a caller in Python: without the frames of the package, with arguments instead of options."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fl_engine.core.errors import EnvironmentFailure, FlexfleetError
from fl_engine.storage import code
from flexfleet.files.doctor import EXTRAS
from flexfleet.files.terminal import missing, told_of

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
