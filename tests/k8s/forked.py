"""A pod of the fake cluster as a process, forked from one that has imported torch already. Network, data and algorithm,
which a run's configuration tells pods elsewhere, it gets from the test."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fl_engine.core.contracts import Algorithm, Backend
from fl_engine.core.types import Outcome, RoundPlan
from fl_engine.exchange.client import Site

Live = Callable[[Algorithm, Site, list[str]], None]
"""What a pod does with its command, from its start to its end. A function of a module, by whose name the process finds
it."""
PRELOADED = ["fl_engine.backends.processes", "flexfleet.steps.agent", "flexfleet.steps.answer"]


def _begin(live: Live, algorithm: Algorithm, site: Site, command: list[str], env: Mapping[str, str], log: Path) -> None:
    with log.open("w") as out:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(out.fileno(), stream.fileno())
    os.environ.update(env)
    live(algorithm, site, command)


class Pod:
    """What the kubelet needs of a process."""

    def __init__(
        self, live: Live, algorithm: Algorithm, site: Site, command: list[str], env: dict[str, str], log: Path
    ) -> None:
        log.touch()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        told = (live, algorithm, site, command, env, log)
        self._process = context.Process(target=_begin, args=told, daemon=True)
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


class Played:
    """A backend whose pods know what is played."""

    def __init__(self, inner: Backend, cluster: Any, site: Site, live: Live) -> None:
        self._inner, self._cluster, self._site, self._live = inner, cluster, site, live
        self.durable, self.phases = inner.durable, inner.phases

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]:
        self._cluster.start = partial(Pod, self._live, algorithm, self._site)
        return self._inner.run(algorithm, plan)


ELSEWHERE = "pods are processes of their own, which reach neither the plan nor this generator nor an earlier update"
LEFT_OUT = {
    "test_the_plan_is_only_read": ELSEWHERE,
    "test_the_global_generator_neither_moves_nor_matters": ELSEWHERE,
    "test_an_outcome_outlives_the_next": ELSEWHERE,
    "tokens": "every pod would import torch's compiler; test_kinds.py has tokens, in pods that are threads",
    "series-batched": "an LSTM has no form for that: it would be series-single again",
}
"""What would take long and show nothing more in pods: parts of cases' names, and why."""
