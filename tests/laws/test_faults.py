"""Faults on purpose: who is struck, with what, and that every backend meets the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from fl_engine.algorithms import FlexFL, HeteroFL
from fl_engine.backends import InProcess, Processes
from fl_engine.core.errors import ConfigError
from fl_engine.core.types import ClientFailure, ClientUpdate, Outcome, Params, RoundPlan
from fl_engine.exchange.client import Site
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.fleet import faults
from fl_engine.fleet.faults import Fault, Faults, befalls, lie, parse
from fl_engine.storage.store import FolderStore
from fl_engine.testing.personal import PersonalHeads
from fl_engine.testing.tiny import TRAINING, assert_same_outcomes, context_of, start_of, tiny_site
from fl_engine.training import local

ALL = "drop=0.2,slow=0.1x5,nan=0.1,scale=0.1x100,flip=0.1,corrupt=0.1"


# ------------------------------------------------------------------------------------------------ who is struck
def test_a_list_of_faults_is_read() -> None:
    assert parse(None) == parse(" ") == faults.NONE
    found = parse("drop=0.2, slow=0.1x5,always")
    assert found == Faults((Fault("drop", 0.2), Fault("slow", 0.1, 5.0)), always=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dorp=0.1", "no kind 'dorp' .did you mean 'drop'"),
        ("drop", "drop=<share> is expected where 'drop' stands"),
        ("drop=0_1", "drop=<share> is expected where 'drop=0_1' stands"),
        ("drop=\u0660.\u0665", "drop=<share> is expected where"),
        ("slow=0.1x1_0", "slow=<share>x<times> is expected"),
        ("drop=0.1x5", "drop=<share>, "),
        ("slow=0.1", "slow=<share>x<times>, "),
        ("slow=0.1x0", "times above 0"),
        ("flip=1.5", "a share from 0 to 1"),
        ("flip=nan", "a share from 0 to 1"),
        ("scale=0.1xinf", "times above 0"),
        ("drop=0.6,flip=0.6", "add up to more than 1"),
        ("drop=0.1,drop=0.1", "given twice"),
        ("drop=0.1,,", "no kind ''"),
    ],
)
def test_a_list_that_cannot_be_meant_is_an_error_that_says_why(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(text)


def test_each_fault_strikes_its_share_of_the_orders() -> None:
    found = parse(ALL)
    struck = Counter(
        fault.kind if (fault := befalls(found, 1, round, client, 50)) else "none"
        for round in range(100) for client in range(50)
    )  # fmt: skip
    for fault in found.faults:
        assert struck[fault.kind] == pytest.approx(fault.share * 5000, abs=5 * (fault.share * 5000) ** 0.5)
    assert [befalls(found, 1, 3, c, 50) for c in range(50)] != [befalls(found, 2, 3, c, 50) for c in range(50)]


def test_always_strikes_the_same_clients_and_exactly_as_many_as_the_shares_say() -> None:
    found = parse("flip=0.1,scale=0.2x9,always")
    for round in (0, 7):
        kinds = [fault.kind if (fault := befalls(found, 5, round, c, 20)) else "none" for c in range(20)]
        assert Counter(kinds) == {"flip": 2, "scale": 4, "none": 14}
        kept = [fault.kind if (fault := befalls(found, 5, 0, c, 20)) else "none" for c in range(20)]
        assert kinds == kept


# ------------------------------------------------------------------------------------------- what it does
def test_lies_are_what_they_are_called() -> None:
    old, new = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.5, 1.0])}
    assert lie(None, old, new) is new
    assert lie(Fault("scale", 1.0, 10.0), old, new)["w"].tolist() == [6.0, -8.0]
    assert lie(Fault("flip", 1.0), old, new)["w"].tolist() == [0.5, 3.0]
    assert lie(Fault("nan", 1.0), old, new)["w"].isnan().tolist() == [True, False]
    assert new["w"].tolist() == [1.5, 1.0], "what was trained stays"


def test_statistics_of_batch_norm_stay() -> None:
    old, new = {"bn.running_var": torch.tensor([1.0])}, {"bn.running_var": torch.tensor([3.0])}
    assert lie(Fault("flip", 1.0), old, new) == new


@pytest.mark.parametrize(
    "algorithm",
    [
        PersonalHeads(training=replace(TRAINING, fraction=1.0)),
        HeteroFL(training=replace(TRAINING, fraction=1.0), mask_labels=True),
    ],
    ids=["a head of its own", "rows of its labels"],
)
def test_what_is_spoilt_is_sent(algorithm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first parameter, or its first row, stays with the client."""
    train = local.train

    def head_first(*given: Any) -> list[local.Trained]:
        return [replace(each, params=dict(reversed(each.params.items()))) for each in train(*given)]

    monkeypatch.setattr(local, "train", head_first)
    site = replace(tiny_site(algorithm), faults=parse("nan=1"))
    plan = algorithm.plan(start_of(algorithm, site), context_of(site, 0, site.seed))
    for outcome in InProcess(site).run(algorithm, plan):
        assert isinstance(outcome, ClientFailure) and outcome.reason.startswith("finite: ")


def outcomes(site: Site, backend: InProcess | Processes, plan: RoundPlan) -> list[Outcome]:
    return sorted(backend.run(FlexFL(training=TRAINING), plan), key=lambda outcome: outcome.client)


def test_every_backend_meets_the_same_faults(tmp_path: object) -> None:
    algorithm = FlexFL(training=replace(TRAINING, fraction=1.0))
    honest = tiny_site(algorithm)
    site = replace(honest, faults=parse(ALL))
    plan = algorithm.plan(start_of(algorithm, site), context_of(site, 0, site.seed))
    here = outcomes(site, InProcess(site), plan)
    ledger = Mailbox(FolderStore(str(tmp_path)), rules=site.rules)
    workers = Processes(site, ("cpu",), ledger)
    try:
        assert_same_outcomes(outcomes(site, workers, plan), here)
    finally:
        workers.close()
    undisturbed: dict[int, Outcome] = {o.client: o for o in outcomes(honest, InProcess(honest), plan)}
    seen = set()
    for outcome in here:
        fault, before = site.befalls(plan.order_of[outcome.client]), undisturbed[outcome.client]
        assert isinstance(before, ClientUpdate)
        kind = fault.kind if fault else "none"
        seen.add(kind)
        if kind in ("none", "slow"):
            assert_same_outcomes([outcome], [before])
        elif kind in ("scale", "flip"):
            assert isinstance(outcome, ClientUpdate)
            assert _change(outcome, before.payload) > 0
        else:
            wanted = {"drop": "drop: dropped out", "nan": "validate: finite: ", "corrupt": "validate: checksum: "}
            assert isinstance(outcome, ClientFailure)
            assert f"{outcome.stage}: {outcome.reason}".startswith(wanted[kind])
    assert seen == {"none", "drop", "slow", "nan", "scale", "flip", "corrupt"}


def test_a_change_that_overflows_fails_validation_in_this_process_too() -> None:
    algorithm = FlexFL(training=TRAINING)
    site = replace(tiny_site(algorithm), faults=parse("scale=1x1e40"))
    for outcome in outcomes(
        site, InProcess(site), algorithm.plan(start_of(algorithm, site), context_of(site, 0, site.seed))
    ):
        assert isinstance(outcome, ClientFailure)
        assert (outcome.stage, outcome.reason.partition(":")[0]) == ("validate", "finite")


def _change(update: ClientUpdate, before: Params) -> float:
    return max(float((tensor - before[name]).abs().max()) for name, tensor in update.payload.items())
