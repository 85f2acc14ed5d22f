"""The thread that polls Kubernetes does not delay rounds."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from fl_engine.remote.kubernetes.controller import Controller, Demand
from fl_engine.remote.kubernetes.jobs import PodClass
from fl_engine.remote.kubernetes.objects import Job
from fl_engine.remote.settings import NodePool

OVER = {
    "metadata": {"name": "job", "uid": "u", "labels": {}},
    "spec": {"parallelism": 1},
    "status": {"conditions": [{"type": "Complete", "status": "True"}], "completedIndexes": "0"},
}


def test_rounds_do_not_wait_while_the_api_deletes_a_job() -> None:
    asked, answers, done = threading.Event(), threading.Event(), threading.Event()
    found = Job(OVER, PodClass("weak", NodePool()), [])

    def delete(job: Job) -> None:
        asked.set()
        assert answers.wait(30)

    objects: Any = SimpleNamespace(
        adopted=lambda *_: iter([found]),
        refusals=dict,
        jobs=lambda: [OVER],
        pods=list,
        delete=delete,
        write_secret=print,
        most=1,
    )
    controller = Controller(objects, {}, room=1, attempts=1, patience_s=60.0, shares=False)

    def go_on() -> None:
        controller.update(Demand(), ())
        done.set()

    with controller.watched():
        controller.begin(Demand())
        controller.update(Demand(), ())
        assert asked.wait(30)
        threading.Thread(target=go_on, daemon=True).start()
        try:
            assert done.wait(10)
        finally:
            answers.set()
