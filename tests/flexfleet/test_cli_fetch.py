"""`flexfleet fetch`: which data sets there are, whether they are here, and how they come here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fl_engine.datasets import DATASETS
from tests.harness.processes import refused

pytestmark = pytest.mark.usefixtures("own_folder", "no_drawings")


def test_fetch_lists_what_there_is(flexfleet: Any, tmp_path: Path) -> None:
    done = flexfleet("fetch", "--root", str(tmp_path))
    assert done.code == 0
    lines = {line.split()[0]: line for line in done.out.splitlines()}
    assert lines.keys() == DATASETS.keys()
    assert "there" in lines["digits"]
    assert "missing" in lines["cifar10"]
    assert all(source.address in lines[name] for name, source in DATASETS.items())
    part = tmp_path / DATASETS["cifar10"].files[0]
    part.parent.mkdir(parents=True)
    part.touch()
    assert "1 of 6 files" in flexfleet("fetch", "--root", str(tmp_path)).out
    assert "nothing to fetch" in flexfleet("fetch", "digits").out
    assert "did you mean 'cifar10'" in refused(flexfleet("fetch", "cifar"))
    by_hand = refused(flexfleet("fetch", "casas", "--root", str(tmp_path)))
    assert f"{tmp_path}/casas/cairo/data" in by_hand
    assert "Download the data sets cairo, milan, " in by_hand


@pytest.mark.parametrize("argv", [(), ("digits",)])
def test_fetch_as_json(flexfleet: Any, tmp_path: Path, argv: tuple[str, ...]) -> None:
    found = flexfleet("fetch", *argv, "--root", str(tmp_path), "--json").json
    assert found["datasets"]["digits"] is True
    assert found["about"]["digits"] == DATASETS["digits"].about
    assert found["source"]["digits"] == DATASETS["digits"].address
