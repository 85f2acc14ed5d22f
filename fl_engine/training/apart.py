"""Work in a process of its own, whose memory and threads are no other work's."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from fl_engine.core import allowed
from fl_engine.core.errors import EnvironmentFailure
from fl_engine.core.system import told_exit, without_main


def answer_of(what: str, short_of_memory: str, work: Callable[..., Any], *given: Any) -> Any:
    """What `work(*given)` gives in a new process; all of it can be pickled. Raises EnvironmentFailure where the process
    dies, naming `what` it did; `short_of_memory` says what to do where it is killed, usually for lack of memory."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, allowed.trusted, work, given))
    with without_main():
        process.start()
    there.close()
    try:
        answer = here.recv()
    except EOFError:
        process.join()
        killed = process.exitcode is not None and process.exitcode < 0
        hint = short_of_memory if killed else "its error is above"
        raise EnvironmentFailure(f"{what} ended with {told_exit(process.exitcode)}: {hint}") from None
    except BaseException:  # Ctrl-C: else this process would wait for its end
        process.kill()
        raise
    process.join()
    return answer


def _serve(answer: Connection, trusted: set[str], work: Callable[..., Any], given: tuple[Any, ...]) -> None:
    allowed.trusted.update(trusted)
    found = work(*given)
    with suppress(BrokenPipeError):  # nobody waits for it any more
        answer.send(found)
