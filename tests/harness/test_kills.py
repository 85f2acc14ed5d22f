"""A short run of the kills: `make soak` runs hundreds."""

from __future__ import annotations

import json

import pytest

from tests.harness import kills
from tests.harness.world import VARIANTS, missing


@pytest.mark.parametrize(("stores", "count"), [(("folder", "moto"), 20), (("radosgw",), 6)], ids=["any", "radosgw"])
def test_killed_runs_end_like_undisturbed_ones(
    capsys: pytest.CaptureFixture[str], stores: tuple[str, ...], count: int
) -> None:
    if why := next(filter(None, map(missing, stores)), None):
        pytest.skip(why)
    names = [variant.name for variant in VARIANTS if variant.store in stores]
    code = kills.main(["--kills", str(count), "--only", ",".join(names), "--rounds", "3", "--json"])
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert code == 0, said.err
    assert (found["kills"], found["survived"], found["lost"], found["identical"]) == (count, count, 0, True)
    assert list(found["variants"]) == names
