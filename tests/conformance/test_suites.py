"""What the suites are for: each notices what breaks one of its laws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fl_engine.algorithms import DepthFL
from fl_engine.backends import InProcess
from fl_engine.core.contracts import Algorithm
from fl_engine.core.types import ClientUpdate, Outcome, RoundPlan
from fl_engine.testing.backends import BackendSuite
from fl_engine.testing.personal import PersonalHeads


class LosesMemory(InProcess):
    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]:
        return super().run(algorithm, replace(plan, orders=tuple(replace(o, memory={}) for o in plan.orders)))


class LosesState(InProcess):
    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]:
        for outcome in super().run(algorithm, plan):
            yield replace(outcome, state={}) if isinstance(outcome, ClientUpdate) else outcome


@pytest.mark.parametrize(
    ("broken", "kind"), [(LosesMemory, DepthFL), (LosesMemory, PersonalHeads), (LosesState, PersonalHeads)]
)
def test_a_backend_that_loses_what_is_kept(broken: type[InProcess], kind: type) -> None:
    with pytest.raises(AssertionError):
        BackendSuite().test_what_is_kept_for_a_client_travels_both_ways(broken, kind)
