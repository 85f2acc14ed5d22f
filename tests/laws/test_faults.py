"""Injected faults: who is struck, with what, and that all backends and resumed runs meet the same faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_engine.algorithms import FlexFL
from fl_engine.backends import InProcess, Processes
from fl_engine.codecs import Half
from fl_engine.core.types import ClientFailure, ClientResult, ClientUpdate, Codecs, Params, RoundPlan
from fl_engine.exchange import coding
from fl_engine.rounds import fault_injection
from fl_engine.rounds.acceptance import measure_movement
from fl_engine.rounds.fault_injection import Fault, false_weights, fault_of, parse
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.storage.store import encode
from fl_engine.testing import rounds
from fl_engine.testing.tiny import TRAINING, assert_same_results, context_of, start_of, tiny_site

ALL = "drop=0.2,slow=0.1x5,nan=0.1,scale=0.1x100,flip=0.1,corrupt=0.1,uphill=0.1,backdoor=0.1x2"


@pytest.mark.parametrize(
    "text",
    [
        "dorp=0.1", "drop", "drop=0_1", "drop=\u0660.\u0665", "slow=0.1x1_0", "drop=0.1x5", "slow=0.1", "slow=0.1x0",
        "flip=1.5", "flip=nan", "scale=0.1xinf", "drop=0.6,flip=0.6", "drop=0.1,drop=0.1", "drop=0.1,,",
        "uphill=0.1x", "backdoor=0.1x-1",
    ],
)  # fmt: skip
def test_wrong_list_of_faults_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


def test_each_fault_has_its_share_of_assignments() -> None:
    found = parse(ALL)
    struck = Counter(
        fault.kind if (fault := fault_of(found, 1, round, client, 50)) else "none"
        for round in range(100) for client in range(50)
    )  # fmt: skip
    for fault in found.faults:
        assert struck[fault.kind] == pytest.approx(fault.share * 5000, abs=5 * (fault.share * 5000) ** 0.5)
    assert [fault_of(found, 1, 3, c, 50) for c in range(50)] != [fault_of(found, 2, 3, c, 50) for c in range(50)]


def test_always_strikes_same_clients_in_exact_shares() -> None:
    found = parse("flip=0.1,scale=0.2x9,always")
    for round in (0, 7):
        kinds = [fault.kind if (fault := fault_of(found, 5, round, c, 20)) else "none" for c in range(20)]
        assert Counter(kinds) == {"flip": 2, "scale": 4, "none": 14}
        kept = [fault.kind if (fault := fault_of(found, 5, 0, c, 20)) else "none" for c in range(20)]
        assert kinds == kept


def test_false_weights_by_hand() -> None:
    old, new = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.5, 1.0])}
    assert false_weights(Fault("scale", 1.0, 10.0), old, new)["w"].tolist() == [6.0, -8.0]
    assert false_weights(Fault("flip", 1.0), old, new)["w"].tolist() == [0.5, 3.0]
    assert false_weights(Fault("nan", 1.0), old, new)["w"].isnan().tolist() == [True, False]
    assert new["w"].tolist() == [1.5, 1.0], "what was trained stays"


def results(run: Run, plan: RoundPlan, backend: InProcess | Processes) -> list[ClientResult]:
    found = fault_injection.run_with_faults(faults_of(run, plan), run.algorithm, plan, backend)
    pairs = ((plan.assignment_of[result.client], result) for result in found)
    arrived = [run.inject_fault(result, assignment) for assignment, result in pairs]
    return sorted(arrived, key=lambda result: result.client)


def faults_of(run: Run, plan: RoundPlan) -> dict[int, Fault]:
    return {a.client: fault for a in plan.assignments if (fault := run.fault(a))}


def run_of(algorithm: Any, text: str | None, codecs: Codecs = Codecs()) -> tuple[Run, RoundPlan]:  # noqa: B008
    """A run with these faults, and its first round."""
    site = tiny_site(algorithm)
    plan = algorithm.plan(start_of(algorithm, site), context_of(site, 0, site.seed))
    options = RoundsConfig(stop=3, evaluate_every=1000, commit_every=1, faults=text)
    return Run(algorithm, site, options, codecs=codecs), coding.encode_plan(plan, site.pool, codecs, site.seed)


@pytest.mark.parametrize("codecs", [Codecs(), Codecs(Half(), Half())], ids=["plain", "half"])
def test_every_backend_meets_the_same_faults(tmp_path: Path, codecs: Codecs) -> None:
    algorithm = FlexFL(training=replace(TRAINING, fraction=1.0))
    run, plan = run_of(algorithm, f"{ALL},always", codecs)
    here = results(run, plan, InProcess(run.site))
    workers = Processes(run.site, ("cpu",))
    try:
        assert_same_results(results(run, plan, workers), here)
    finally:
        workers.close()
    honest = run_of(algorithm, None, codecs)[0]
    undisturbed = {o.client: o for o in results(honest, plan, InProcess(run.site))}
    seen = set()
    for result in here:
        fault, before = run.fault(plan.assignment_of[result.client]), undisturbed[result.client]
        assert isinstance(before, ClientUpdate)
        kind = fault.kind if fault else "none"
        seen.add(kind)
        if kind in ("none", "slow"):
            assert_same_results([result], [before])
        elif kind in ("scale", "flip", "uphill", "backdoor"):
            assert isinstance(result, ClientUpdate)
            assert _change(result, before.payload) > 0
            if kind in ("uphill", "backdoor"):
                assignment, layout = plan.assignment_of[result.client], run.site.layout
                norms = [measure_movement(update, assignment, layout).weights for update in (result, before)]
                assert norms[0] == pytest.approx(fault.times * norms[1], rel=1e-3)
            assert {n: t.shape for n, t in result.travels.items()} == {n: t.shape for n, t in before.travels.items()}
        else:
            wanted = {"drop": "drop: the client", "nan": "validate: finite: ", "corrupt": "validate: checksum: "}
            assert isinstance(result, ClientFailure)
            assert f"{result.stage}: {result.reason}".startswith(wanted[kind])
    assert seen == {"none", "drop", "slow", "nan", "scale", "flip", "corrupt", "uphill", "backdoor"}


@pytest.mark.parametrize("share", ["drop=0.5", "drop=1", "nan=0.5", "scale=1x3"])
def test_backend_waits_for_updates_that_can_come(share: str) -> None:
    run, plan = run_of(FlexFL(training=replace(TRAINING, fraction=1.0)), share)
    kinds = [fault.kind for assignment in plan.assignments if (fault := run.fault(assignment))]
    got: list[RoundPlan] = []

    class Noting(InProcess):
        def run(self, algorithm: Any, plan: RoundPlan) -> Iterator[ClientResult]:
            got.append(plan)
            return iter(())

    count = len(plan.assignments)
    asked = replace(plan, wanted=count - 2)
    assert len(
        list(fault_injection.run_with_faults(faults_of(run, plan), run.algorithm, asked, Noting(run.site)))
    ) == kinds.count("drop")
    sent = count - kinds.count("drop")
    assert len(got[0].assignments) == sent
    assert got[0].wanted == min(count - 2 + kinds.count("nan"), sent)


@pytest.mark.parametrize("codecs", [Codecs(), Codecs(Half(), Half())], ids=["plain", "half"])
def test_a_run_killed_anywhere_applies_each_fault_once(
    codecs: Codecs, memory_store: Any, new_store: Any, killed_at_writes: Any
) -> None:
    """The store keeps honest updates, which a resumed run reads again."""
    run, _ = run_of(FlexFL(training=replace(TRAINING, fraction=1.0, epochs=1)), f"{ALL},always", codecs)

    def federated(store: Any, keep_updates: bool = True) -> bytes:
        options = run.options.model_copy(update={"keep_updates": keep_updates, "stop": 2})
        return encode(rounds.federated(replace(run, options=options), store)[0].params)

    killed_at_writes(federated, 13, first=2)
    assert federated(memory_store, keep_updates=False) == federated(new_store())


def _change(update: ClientUpdate, before: Params) -> float:
    return max(float((tensor - before[name]).abs().max()) for name, tensor in update.payload.items())
