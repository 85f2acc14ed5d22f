"""A pod of the fake cluster as a process, forked from one that has imported torch already. Data and algorithm, which a
run's configuration names for other pods, it gets from the test."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fl_engine.core.contracts import Algorithm, Backend
from fl_engine.core.types import Outcome, RoundPlan
from fl_engine.exchange.client import Site

PRELOADED = ["flexfleet.worker.server"]


def _live(algorithm: Algorithm, site: Site, command: list[str], env: Mapping[str, str], log: Path) -> None:
    with log.open("w") as out:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(out.fileno(), stream.fileno())
    os.environ.update(env)
    from fl_engine.backends.in_process import prepare_process
    from flexfleet.worker import server
    from flexfleet.worker.__main__ import main
    from flexfleet.worker.execute import Prepared

    def prepared(given: Any, *_: Any) -> Prepared:
        prepare_process((given.device,))
        return Prepared(algorithm, site, "")

    server.prepare = prepared
    sys.exit(main(command[3:]))


class Forked:
    """A container's process."""

    def __init__(self, algorithm: Algorithm, site: Site, command: list[str], env: dict[str, str], log: Path) -> None:
        log.touch()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._process = context.Process(target=_live, args=(algorithm, site, command, env, log), daemon=True)
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


class Played:
    """A backend whose pods have the algorithm and the site."""

    def __init__(self, inner: Backend, cluster: Any, site: Site) -> None:
        self._inner, self._cluster, self._site = inner, cluster, site
        self.durable = inner.durable

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]:
        self._cluster.start = partial(Forked, algorithm, self._site)
        return self._inner.run(algorithm, plan)


ELSEWHERE = "pods are processes of their own, which reach neither the plan nor this generator nor an earlier update"
LEFT_OUT = {
    "test_the_plan_is_only_read": ELSEWHERE,
    "test_the_global_generator_neither_moves_nor_matters": ELSEWHERE,
    "test_an_outcome_outlives_the_next": ELSEWHERE,
    "tokens": "every pod would import torch's compiler; test_alike.py has tokens, in pods that are threads",
    "series-batched": "an LSTM has no form for that: it would be series-single again",
}
"""Map parts of the names of cases that would take long, and show nothing more in pods, to the reason."""
