"""Most of the attacks; `make soak` tries all.

Tests that need radosgw are skipped without it. `.ci/run` installs it, and lets them fail if it is missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.harness.attacks import runs, stored, urls
from tests.harness.attacks.servers import World, served
from tests.harness.attacks.table import Attack, Tally, try_all
from tests.harness.world import missing

REQUIRED = "FLEXFLEET_TEST_RADOSGW"
"""If it is `required`, tests that need radosgw fail without it instead of being skipped."""
QUICK = (
    "flexfl, 90 times the change",
    "flexfl, 90 times, in a first round of one",
    "cohort from the seed",
)


def test_honest_clients_are_accepted() -> None:
    runs.control(key for key in runs.RUINS if f"{key[0]}, {key[2]}" in QUICK)


@pytest.mark.parametrize("attack", [a for a in runs.ATTACKS if a.name in QUICK], ids=lambda attack: attack.name)
def test_the_engine_refuses(attack: Attack) -> None:
    assert attack.run() is None


@pytest.fixture(scope="module", params=["moto", "radosgw"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    why = missing(request.param)
    if why is not None:
        (pytest.fail if os.environ.get(REQUIRED) == "required" else pytest.skip)(why)
    with served(request.param, tmp_path_factory.mktemp("s3")) as found:
        yield found


def test_server_refuses_what_was_not_signed(world: World) -> None:
    tally = Tally()
    try_all(urls.ATTACKS, tally, world, enforces=world.kind != "moto")
    assert tally.open == []
    if world.kind == "moto":
        assert tally.refused == [], "a refusal by moto proves nothing"
        assert {name.partition(":")[0] for name in tally.not_enforced} > {"another key", "read, wrong signature"}
    else:
        assert len(tally.refused) == len(urls.ATTACKS)


def test_client_cannot_stop_a_run_by_its_own_files(world: World) -> None:
    tally = Tally()
    some = [a for a in stored.attacks(world.kind) if not a.name.startswith("manifest") and "late" not in a.name]
    try_all(some, tally, world)
    assert tally.open == [] and len(tally.refused) == len(some)
