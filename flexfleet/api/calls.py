"""Define functions that several modules of the Python API use, for errors, log lines, callbacks and tables."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from fl_engine.core.errors import ConfigError, EnvironmentFailure, FlexfleetError, Stopped
from fl_engine.core.text import path_of
from fl_engine.storage import code
from fl_engine.training.isolation import isolated
from flexfleet.api.arguments import check_keywords, check_reach
from flexfleet.api.callbacks import Callback, Watching
from flexfleet.config.run_names import check_name, new_name
from flexfleet.files.doctor import EXTRAS
from flexfleet.files.progress import hidden
from flexfleet.files.terminal import expected, logging_to, missing, set_log_format
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.resume import Attempt
from flexfleet.pipeline.run import run as run_steps

if TYPE_CHECKING:
    from pandas import DataFrame

log = logging.getLogger("flexfleet")

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_STORE = Path("runs")
IN_PYTHON = {"--set ": "", "--resume": "resume=True", "--run-id": "run_id", "--id": "id", "--jobs": "jobs"}
"""Map command-line options to Python arguments, which replace the options in error messages."""


def api_call(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator for functions of the Python API. The tracebacks of expected errors do not show internal frames. In the
    messages of these errors, Python arguments replace command-line options. Raises ConfigError for an unknown keyword.
    Modules in `run.code` can be imported only during the call."""
    parameters = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True  # IPython and pytest then hide this frame.
        try:
            if not takes_all:
                check_keywords(kwargs, [name for name in parameters if name != "self"])
            with code.enabled_within():
                return function(*args, **kwargs)
        except FlexfleetError as error:
            message = str(error)
            for option, argument in IN_PYTHON.items():
                message = message.replace(option, argument)
            error.args = (message,)
            raise error.with_traceback(None) from None
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in {name for names, _ in EXTRAS.values() for name in names}:
                raise  # An import in the user's code raised the error.
            raise EnvironmentFailure(missing(str(error.name))) from None
        except OSError as error:
            raise (expected(error) or error) from error

    return call


@contextmanager
def shown(progress: bool) -> Iterator[None]:
    """If `progress` is True, log to stderr inside the context unless the process has configured log handlers. If
    `progress` is False, logging does not change, and the terminal does not show a progress line."""
    level, token = log.level, hidden.set(not progress)
    own = progress and not (log.handlers or logging.getLogger().handlers)
    try:
        with logging_to(sys.stderr) if own else nullcontext() as handler:
            if handler is not None:
                set_log_format([handler])
            if progress:
                log.setLevel(level or logging.INFO)
            yield
    finally:
        hidden.reset(token)
        log.setLevel(level)


def run_watched(
    resolved: Resolved,
    run_id: str | None,
    resume: bool,
    callbacks: Sequence[Callback],
    progress: bool,
    result: Callable[[Path], T],
) -> T:
    """Run all steps of a run with callbacks, and return `result(folder)`, where `folder` is the run's folder."""
    if resume and run_id is None:
        raise ConfigError.at("run_id must be the name of the run to resume, because resume=True")
    config = resolved.config
    check_reach(config)
    name = new_name(config) if run_id is None else check_name(run_id, "run_id")
    folder = Path(config.run.store) / name
    watching = Watching(callbacks, lambda: result(folder))
    with isolated(), shown(progress):
        status = "failed"
        try:
            attempt = Attempt(resume, observer=watching, watcher=watching if callbacks else None)
            status = run_steps(resolved, name, attempt).status
        except Stopped:
            status = "stopped"
            if not watching.stopped:
                raise
        except KeyboardInterrupt:
            status = "stopped"
            raise
        finally:
            watching.end(status)
    return result(folder)


def find_folder(name: Any, file: str) -> Path:
    """Return the path of the folder `name`, which is in the working directory or in `runs`. If both folders exist,
    return the folder that contains `file`. `name` can also be an object with a folder, such as a `Result`. Raises
    ConfigError if the folder does not exist."""
    name = getattr(name, "folder", name)
    if not isinstance(name, str | Path):
        raise ConfigError(f"a run, comparison or study must be a folder or a name, got {name!r}")
    places = [path_of(name), DEFAULT_STORE / name]
    existing = [each for each in places if os.path.lexists(each)]
    if not existing:
        raise ConfigError(f"the folder does not exist: {' or '.join(dict.fromkeys(map(str, places)))}")
    return next((each for each in existing if (each / file).is_file()), existing[0])


def table(rows: Sequence[Mapping[str, Any]], index: Sequence[str] = ()) -> DataFrame:
    """Return rows as a pandas DataFrame whose row names are `index`. Return a list if pandas is not installed. The
    annotated type is DataFrame, because editors do not complete methods of a union type."""
    found: Any = [dict(row) for row in rows]
    try:
        import pandas
    except ImportError:
        return found
    return pandas.DataFrame(found, index=index or None)
