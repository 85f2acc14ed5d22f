"""How far updates move, which updates a round merges, and how many samples a client may claim."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

import pytest
import torch

from fl_engine.algorithms import FedAvg, FlexFL
from fl_engine.backends import InProcess
from fl_engine.core.costs import macs, steps
from fl_engine.core.slicing import is_statistic
from fl_engine.core.types import (
    FULL,
    Assignment,
    ClientFailure,
    ClientResult,
    ClientUpdate,
    Device,
    RoundPlan,
    TaskContext,
)
from fl_engine.exchange.client import execute
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import key_of, pack_result, sign
from fl_engine.models.chains import SmallCNN
from fl_engine.rounds import acceptance
from fl_engine.rounds.acceptance import AVERAGED, FIRST, REMEMBERED, Moved, MovementHistory, measure_movement, remember
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.recorder import RoundResults
from fl_engine.rounds.run import Run
from fl_engine.rounds.server import ServerSite
from fl_engine.storage.store import FolderStore
from fl_engine.testing.rounds import federated
from fl_engine.testing.tiny import SEED, TRAINING, assert_same_bits, context_of, first_plan, start_of, tiny_site
from tests.harness.jobs import Through
from tests.harness.stores import MemoryStore


class Arrival(NamedTuple):
    moved: Moved
    seconds: float


def refused(plan: RoundPlan, arrived: dict[int, Arrival], *rest: Any) -> dict[int, ClientFailure]:
    moved = {client: arrival.moved for client, arrival in arrived.items()}
    return acceptance.find_refused(plan, moved, {client: a.seconds for client, a in arrived.items()}, *rest)


def of_others(moved: Moved, n: int = 3) -> MovementHistory:
    """A round of clients that are not asked again."""
    return MovementHistory(rounds=((moved,) * n,))


USUAL = of_others(Moved(1.0))
SIZE = Moved(10.0, 0.7)
"""Of the weights that are sent, and of their statistics."""


def asking(round: int, clients: int, over: float = 1.0) -> RoundPlan:
    """A plan that asks so many clients, `over` times as many as it wants."""
    assignments = tuple(Assignment(round, client, FULL, {}, client, 0) for client in range(clients))
    return RoundPlan(round, assignments, math.ceil(clients / over - 1e-9))


def arrivals(*seconds: float) -> dict[int, Arrival]:
    return {client: Arrival(Moved(1.0), s) for client, s in enumerate(seconds)}


def stages(found: dict[int, ClientFailure]) -> dict[int, str]:
    return {client: failure.stage for client, failure in found.items()}


def moving(*moved: float) -> dict[int, Arrival]:
    return {client: Arrival(Moved(far), 0.0) for client, far in enumerate(moved)}


def test_update_far_beyond_the_median_movement_is_refused() -> None:
    options = RoundsConfig(norm_bound=10.0)
    assert refused(asking(0, 3), {}, options, USUAL) == {}
    just = moving(1.0, 1.1, 0.9, 10.0)
    assert refused(asking(0, 4), just, options, USUAL) == {}
    (failure,) = refused(asking(7, 4), just | {3: Arrival(Moved(11.0), 0.0)}, options, USUAL).values()
    assert (failure.round, failure.client, failure.stage) == (7, 3, "validate")
    assert failure.code == "norm" and "rounds.norm_bound = 10" in failure.reason and "null" in failure.reason
    for no_number in (float("inf"), float("nan")):
        assert stages(refused(asking(0, 4), just | {3: Arrival(Moved(no_number), 0.0)}, options, USUAL)) == {
            3: "validate"
        }


def test_statistics_are_compared_with_statistics() -> None:
    options, history = RoundsConfig(norm_bound=10.0), of_others(Moved(1.0, 0.01))
    honest = {0: Arrival(Moved(1.1, 0.02), 0.0), 1: Arrival(Moved(9.0, 0.01), 0.0)}
    assert refused(asking(0, 2), honest, options, history) == {}
    (failure,) = refused(asking(0, 2), honest | {1: Arrival(Moved(0.9, 0.2), 0.0)}, options, history).values()
    assert failure.code == "statistics"


@pytest.mark.parametrize("others", [(), (1.2,), (1.2, 0.8)])
def test_the_first_round_has_a_bound_too(others: tuple[float, ...]) -> None:
    options = RoundsConfig(norm_bound=8.0)
    assert refused(asking(0, 3), moving(1.0, *others), options, MovementHistory(), SIZE) == {}
    for attack in (90.0, 1e3, 1e30):
        assert list(refused(asking(0, 3), moving(attack, *others), options, MovementHistory(), SIZE)) == [0]
    alone = {0: Arrival(Moved(1.0, 8.1 * FIRST.statistics * 0.7), 0.0)}
    assert "statistics" in refused(asking(0, 1), alone, options, MovementHistory(), SIZE)[0].reason


def working(*moved: tuple[float, float]) -> dict[int, Arrival]:
    """(how far, in how many steps)."""
    return {client: Arrival(Moved(far, 0.0, steps), 0.0) for client, (far, steps) in enumerate(moved)}


def test_movement_may_grow_with_the_root_of_the_steps() -> None:
    """By hand: in the median one step moves 1, and one over its root too, so that 100 steps usually move 10."""
    options, others = RoundsConfig(norm_bound=5.0), [(1.0, 1.0)] * 4
    history = MovementHistory(rounds=((Moved(1.0),) * 4,))
    assert refused(asking(0, 5), working(*others, (50.0, 100.0)), options, history) == {}
    (failure,) = refused(asking(0, 5), working(*others, (51.0, 100.0)), options, history).values()
    assert failure.code == "norm"
    assert set(refused(asking(0, 5), working(*others, (5.1, 1.0)), options, history)) == {4}, "nobody else may"


@pytest.mark.parametrize(("before", "now", "taken"), [
    ((), 7.9, True),  # once, nobody knows
    ((1.0,), 7.0, True), ((1.0,), 7.1, False),
    ((2.0, 2.0, 2.0), 7.9, True), ((3.0, 3.0, 3.0), 6.9, True), ((3.0, 3.0, 3.0), 7.1, False),
    ((1e6, 1.0, 1.0), 1.0, True), ((1e6, 1.0, 1.0), 4.0, True), ((1e6, 1.0, 1.0), 4.1, False),
])  # fmt: skip
def test_one_long_update_is_merged_after_short_ones(before: tuple[float, ...], now: float, taken: bool) -> None:
    assert AVERAGED == 4
    history = replace(of_others(Moved(1.0), 40), times={0: tuple(Moved(times) for times in before), 7: (Moved(9.0),)})
    arrived = {client: Arrival(Moved(far), 0.0) for client, far in ((0, now), (1, 1.0), (2, 1.0))}
    found = refused(asking(0, 3), arrived, RoundsConfig(norm_bound=8.0), history)
    assert list(found) == ([] if taken else [0])


def test_update_after_the_deadline_is_a_straggler() -> None:
    found = refused(asking(0, 3), arrivals(1.0, 5.0, 5.1), RoundsConfig(norm_bound=None, deadline_s=5.0))
    assert stages(found) == {2: "straggle"}
    assert "5.1 s" in found[2].reason and "rounds.deadline_s = 5" in found[2].reason
    found = refused(asking(0, 1), arrivals(0.034), RoundsConfig(norm_bound=None, deadline_s=0.02))
    assert "0.034 s" in found[0].reason and "rounds.deadline_s = 0.02" in found[0].reason


def test_over_provision_merges_the_first_updates() -> None:
    options = RoundsConfig(norm_bound=None, over_provision=2.0)
    assert stages(refused(asking(0, 6, 2.0), arrivals(3, 1, 2, 3, 9, 8), options)) == {
        3: "straggle",
        5: "straggle",
        4: "straggle",
    }
    assert refused(asking(0, 6, 2.0), {4: Arrival(Moved(1.0), 9.0)}, options) == {}, "fewer came: all are taken"


def test_quorum_counts_wanted_updates_not_asked_clients() -> None:
    options = RoundsConfig(norm_bound=None, quorum=1.0, over_provision=1.5)
    assert stages(refused(asking(0, 6, 1.5), arrivals(1, 2, 3, 4, 5), options)) == {4: "straggle"}
    assert set(stages(refused(asking(0, 6, 1.5), arrivals(1, 2, 3), options)).values()) == {"quorum"}


def test_longer_honest_movements_become_the_usual_ones() -> None:
    """What is refused is remembered: after as many as are remembered of before, they are the usual."""
    history, options = of_others(Moved(0.01), REMEMBERED), RoundsConfig(norm_bound=8.0)
    rounds = 0
    while refused(asking(rounds, 2), moving(1.0, 1.0), options, history, SIZE):
        history = remember(history, {0: Moved(1.0), 1: Moved(1.0)}, SIZE)
        rounds += 1
    assert rounds == REMEMBERED // 2


ALGORITHM = FlexFL(training=TRAINING)
SITE = tiny_site(ALGORITHM, SmallCNN((1, 8, 8), 4, width=0.25, norm="static"))
PLAN = first_plan(ALGORITHM, SITE)
ASSIGNMENT = PLAN.assignments[0]


def moved_by(weights: float, statistics: float = 0.0) -> ClientUpdate:
    """An update of the network with statistics, each of whose numbers moved by so much."""
    payload = {n: t + (statistics if is_statistic(n) else weights) for n, t in ASSIGNMENT.payload.items()}
    return ClientUpdate(0, ASSIGNMENT.client, ASSIGNMENT.spec, payload, 8, {})


def test_movement_by_hand() -> None:
    weights = sum(t.numel() for name, t in ASSIGNMENT.payload.items() if not is_statistic(name))
    assert measure_movement(moved_by(0.0), ASSIGNMENT, SITE.layout) == Moved(0.0, 0.0)
    assert measure_movement(moved_by(2.0), ASSIGNMENT, SITE.layout) == (pytest.approx(2 * weights**0.5), 0.0, 1.0)
    assert measure_movement(moved_by(0.0, 3.0), ASSIGNMENT, SITE.layout) == (0.0, pytest.approx(3.0), 1.0)
    without = tiny_site(ALGORITHM)
    assignment = first_plan(ALGORITHM, without).assignments[0]
    honest = execute(ALGORITHM, assignment, without)
    assert isinstance(honest, ClientUpdate)
    weights, statistics, steps = measure_movement(honest, assignment, without.layout)
    assert weights > 0 and statistics == 0.0, "a network without statistics"
    assert steps == honest.metrics["steps"] > 1


def test_movement_does_not_depend_on_memory_layout() -> None:
    honest = execute(ALGORITHM, ASSIGNMENT, SITE)
    assert isinstance(honest, ClientUpdate)
    last = torch.channels_last
    other = {n: t.contiguous(memory_format=last) if t.dim() == 4 else t for n, t in honest.payload.items()}
    assert any(not t.is_contiguous() for t in other.values())
    assert measure_movement(replace(honest, payload=other), ASSIGNMENT, SITE.layout) == measure_movement(
        honest, ASSIGNMENT, SITE.layout
    )


def test_size_of_the_sent_weights() -> None:
    params = {"w": torch.tensor([3.0, -3.0]), "bn.running_var": torch.tensor([1.0]), "bn.running_mean": torch.zeros(1)}
    plan = RoundPlan(0, (replace(ASSIGNMENT, payload=params),))
    assert acceptance.size_sent(plan) == (pytest.approx(18**0.5), pytest.approx(0.5**0.5), 1.0)


def test_claimed_samples_of_a_device_are_bounded() -> None:
    """With partition.rule=local: 19 clients of 8 samples that stay where they are, and one that claims partition.most,
    and the steps and multiply-adds of so many, and moves by 1. So the mean moves by the liar's weight."""
    most = 100_000
    algorithm = FedAvg(training=replace(TRAINING, fraction=1.0))
    known = tiny_site(algorithm, fleet=tuple(Device(c, "strong", 120.0, 0.0) for c in range(20)))
    state = start_of(algorithm, known)
    plan, liar = algorithm.plan(state, context_of(known, 0, SEED)), 0
    box = Mailbox(
        MemoryStore({}), replace(replace(known, most=most).rules, algorithm=algorithm), key_of(b"a run's own")
    )
    assert box.key is not None
    assignment = plan.assignment_of[liar]
    honest = execute(algorithm, assignment, known)
    assert isinstance(honest, ClientUpdate)
    task = algorithm.task(assignment, TaskContext(known.layout, known.pool, known.fleet[liar], honest.metrics["free"]))

    def claims(samples: int, counted: int) -> ClientResult:
        """What the coordinator makes of so many samples, with the steps of as many as are `counted`."""
        made = {"steps": float(steps(task, counted)), "macs": macs(known.family, task, counted)}
        payload = {name: assignment.payload[name] + 1.0 for name in honest.payload}
        lie = replace(honest, num_examples=samples, payload=payload, metrics={**honest.metrics, **made})
        manifest, value = pack_result(lie, assignment)
        assert value is not None
        box.store.put(f"rounds/00000/updates/{liar}.safetensors", bytes(value))
        box.store.put(
            f"rounds/00000/updates/{liar}.json", sign(manifest, box.key(assignment)).model_dump_json().encode()
        )
        return box.receive(plan, liar)

    for samples, counted, code in ((most + 1, most + 1, "examples"), (most, 8, "metrics"), (8, most, "metrics")):
        refused = claims(samples, counted)
        assert isinstance(refused, ClientFailure) and refused.code == code
    results = RoundResults()
    results.add(claims(most, most))
    for other in plan.assignments[1:]:
        results.add(ClientUpdate(0, other.client, honest.spec, {n: other.payload[n] for n in honest.payload}, 8, {}))
    merged = algorithm.merge(state, plan, results, ServerSite(known))
    weights = torch.cat([(merged.params[n] - state.params[n]).flatten() for n in honest.payload])
    assert len(plan.assignments) == 20 and weights.mean().item() == pytest.approx(most / (most + 19 * 8), abs=1e-4)
    assert f"{weights.mean().item():.2%}" == "99.85%", "docs/guides/partitions.md says so"
    for bound, share in ((10.0, "34.48%"), (3.0, "13.64%")):  # 80 / (80 + 19 * 8), 24 / (24 + 19 * 8)
        limited = RoundResults()
        for answer in results:
            limited.add(answer)
        limited.limit(bound)
        merged = algorithm.merge(state, plan, limited, ServerSite(known))
        weights = torch.cat([(merged.params[n] - state.params[n]).flatten() for n in honest.payload])
        assert f"{weights.mean().item():.2%}" == share and limited.limited == {liar: most}


def claiming(_: RoundPlan, found: Iterator[ClientResult]) -> Iterator[ClientResult]:
    """Client 0 says that it holds 100,000 samples."""
    for result in found:
        assert isinstance(result, ClientUpdate)
        yield replace(result, num_examples=100_000) if result.client == 0 else result


@pytest.mark.parametrize("more", [{}, {"mode": "buffered", "buffer": 2}], ids=["synchronous", "buffered"])
@pytest.mark.parametrize("bound", [None, 1e9, 4.0])
def test_a_claim_counts_for_a_multiple_of_the_round_s_median(
    tmp_path: Path, bound: float | None, more: dict[str, Any]
) -> None:
    algorithm = FedAvg(training=replace(TRAINING, fraction=1.0, epochs=1))
    site = tiny_site(algorithm, fleet=tuple(Device(c, "strong", 120.0, 0.0) for c in range(4)))
    options = RoundsConfig(stop=3, commit_every=1, keep_updates=True, norm_bound=None, samples_bound=bound, **more)
    run, backend = Run(algorithm, site, options), Through(InProcess(site), claiming)
    final, rows = federated(run, FolderStore(tmp_path / "whole"), backend)
    lines = [line for row in rows for line in row.clients if line["client"] == 0]
    assert lines and all(line["examples"] == 100_000 for line in lines)
    for row in rows:
        others = {line["client"]: line["examples"] for line in row.clients if line["client"] != 0}
        limited = bound == 4.0 and len(others) < len(row.clients)
        assert row.metrics.get("clients_limited", 0.0) == limited
        if limited:
            (own,) = (line for line in row.clients if line["client"] == 0)
            assert own["counted"] == 4 * median_low(others.values())
    if bound == 1e9:
        free = replace(run, options=options.model_copy(update={"samples_bound": None}))
        assert_same_bits(final.params, federated(free, FolderStore(tmp_path / "free"), backend)[0].params)
