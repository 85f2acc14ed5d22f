"""Progress of a run: a line for each round, and repeated warnings."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from flexfleet.files.progress import counted_warnings
from flexfleet.tracking.console import Console

log = logging.getLogger("flexfleet")

WORK = {"clients_trained": 5.0, "clients_pruned": 0.0, "clients_failed": 0.0, "train_loss": 0.41234}
LEVELS = {"accuracy/M1": 0.7, "loss/M1": 1.0, "accuracy/M2": 0.8, "loss/M2": 0.9, "accuracy/M3": 0.9, "loss/M3": 0.8}
ROW = {"avg": 0.8, "full": 0.9, **LEVELS, **WORK, "seconds_round": 2.0}


def test_round_line_has_levels_loss_clients_and_eta(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flexfleet"):
        console = Console(40)
        console.metrics([(1, ROW), (2, ROW | {"seconds_round": 4.0})])
    assert caplog.messages == [
        "round 1/40  avg 80.0 % (M1 70.0, M2 80.0, M3 90.0)  loss 0.412  5 trained  2.0 s  ETA 78 s",
        "round 2/40  avg 80.0 % (M1 70.0, M2 80.0, M3 90.0)  loss 0.412  5 trained  4.0 s  ETA 2 min",  # 38 x 3 s
    ]


def test_the_loop_tells_how_many_have_answered(job: Any, memory_store: Any) -> None:
    from fl_engine.rounds import loop
    from fl_engine.rounds.ledger import Ledger
    from fl_engine.rounds.options import RoundsConfig
    from fl_engine.rounds.run import Run
    from fl_engine.testing.tiny import Memory

    heard: list[tuple[int, int, int]] = []
    run = Run(job.algorithm, job.site, RoundsConfig(stop=2, evaluate_every=2))
    loop.federate(
        run, job.initial(), job.backend, Ledger(memory_store), Memory(), on_result=lambda *told: heard.append(told)
    )
    for round in (0, 1):
        of_round = [(answered, asked) for r, answered, asked in heard if r == round]
        asked = of_round[0][1]
        assert asked > 1 and of_round == [(answered, asked) for answered in range(asked + 1)]


def test_a_repeated_warning_is_told_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flexfleet"), counted_warnings():
        for client in range(44):
            log.warning("round %d, client %d: nothing to merge: prune: %.1f %% is free", 1, client, client + 0.5)
        log.warning("another one")
        log.info("round 1/2")
        log.info("round 2/2")
        log.error("client 1")
        log.error("client 2")
    said = "round 1, client 0: nothing to merge: prune: 0.5 % is free"
    more = f"43 more warnings differ only in numbers (-v shows all): {said}"
    assert caplog.messages == [said, "another one", "round 1/2", "round 2/2", "client 1", "client 2", more]
    log.warning("client 2: after it")
    assert caplog.messages[-1] == "client 2: after it"
