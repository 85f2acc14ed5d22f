"""Every registered selection, with every option that decides who is asked."""

from __future__ import annotations

import pytest

from fl_engine.core.contracts import Selector
from fl_engine.selection import SELECTIONS, ByCapacity, Curiosity, Oort, ResourceTable, Uniform
from fl_engine.testing.checks import check_silent, times_asked
from fl_engine.testing.plugins import LargestUtility
from fl_engine.testing.tiny import paper_pool, tiny_fleet

_, POOL = paper_pool()
EACH: list[Selector] = [
    *(Uniform(model=model) for model in ("capacity", "random", "largest")),
    ByCapacity(),
    ResourceTable(),
    *(Curiosity(score=score, per_type=p) for score in ("cs", "c", "s") for p in (1, 2)),
    *(Oort(model=model) for model in ("capacity", "largest")),
    Oort(cut_off=0.7, cut_off_pool=0.0, exploration_min=0.2, clip=0.98),
    LargestUtility(),
]


@pytest.mark.parametrize("selector", EACH, ids=str)
def test_a_silent_client_is_asked_no_more_often(selector: Selector) -> None:
    check_silent(selector, POOL)


def test_every_registered_selection_is_held_to_this() -> None:
    assert set(SELECTIONS.values()) <= {type(each) for each in EACH}


def test_curiosity_asks_silent_clients_least() -> None:
    """Three of 20: less often than any client that answers."""
    fleet = tiny_fleet(20)
    asked = times_asked(Curiosity(per_type=2), POOL, fleet, range(3))
    assert max(asked[client] for client in range(3)) < min(asked[client] for client in range(3, 20))
