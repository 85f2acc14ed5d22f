"""`flexfleet status` where runs lie in folders of comparisons and studies, and where a ledger's server is gone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes import refused


def test_status_finds_the_runs_of_comparisons_and_studies(
    flexfleet: Any, finished: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A study deletes the ledger of a trial that has ended, and its runs have no result.json."""
    run, _ = finished
    for place in ("c/one-s0", "c/two-s0", "s/trials/0-s0", "s/held-out/best-t0-s7"):
        shutil.copytree(run, Path("runs", place))
    for place in ("s/trials/0-s0", "s/held-out/best-t0-s7"):
        for name in ("result.json", "manifest.json"):
            Path("runs", place, name).unlink()
    shutil.rmtree("runs/s/trials/0-s0/rounds")
    Path("runs/c/two-s0/run.json").write_text("torn")
    (Path("runs") / "begun").mkdir()
    assert "runs/begun" in refused(flexfleet("status", "runs/begun"))
    alone = flexfleet("status", "runs/a", "--json").json
    found = flexfleet("status", "--json").json["runs"]
    assert [row["run_id"] for row in found] == ["a", "c/one-s0", "c/two-s0", "s/trials/0-s0", "s/held-out/best-t0-s7"]
    assert found[2]["status"] == "unreadable" and "run.json" in found[2]["why"]
    assert [row | {"run_id": "a"} for row in (found[1], *found[3:])] == [alone] * 3
    assert flexfleet("status", "runs/s", "--json").json == {"runs": found[3:]}
    lines = flexfleet("status", "runs/c").out.splitlines()
    assert [line.split()[:2] for line in lines] == [["c/one-s0", "finished"], ["c/two-s0", "unreadable"]]
    shutil.rmtree(run)
    assert len(flexfleet("status").out.splitlines()) == 4, "a store that holds no run of its own"
    monkeypatch.chdir(run.parent / "s" / "trials")
    assert flexfleet("status", "0-s0", "--json").json | {"run_id": "a"} == alone
