"""A run with a trace, from the command line: the same in every backend, after a stop, and recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.fields import Moves
from flexfleet.config import moves
from flexfleet.files.artifacts import RunFile
from tests.harness.alike import WAYS, alike, run_of
from tests.harness.processes import refused
from tests.harness.run_folders import rounds_of

pytestmark = pytest.mark.usefixtures("own_folder", "no_drawings")

DRAWN = (
    "fleet.trace={name: lognormal, online_s: 3, offline_s: 3, bandwidth_s: 1, speed: 0.001, bandwidth: 0.5, "
    "speed_data: 0.5, repeat_s: 500}",
    "rounds.stop=8",
)


def told(folder: Path) -> list[Any]:
    """What a run's history says of its rounds, without what is measured by the clock on the wall."""
    rows = rounds_of(folder)
    names = ("seconds_simulated", "simulated_wait", "clients_online", "clients_dropped", "avg")
    return [
        ([row["metrics"].get(name) for name in names], [(c["client"], c.get("failure")) for c in row["clients"]])
        for row in rows
    ]


@pytest.mark.long
def test_trace_gives_same_model_and_clock_on_every_backend(
    flexfleet: Any, quick: Sequence[str], tmp_path: Path
) -> None:
    ways = {"memory": (), "store": ("rounds.keep_updates=true",), "processes": WAYS["processes"]}
    alike(flexfleet, [*quick, *DRAWN], ways)
    expected = told(tmp_path / "runs" / "memory")
    assert all(told(tmp_path / "runs" / name) == expected for name in ("store", "processes", "again"))
    failures = [failure for _, clients in expected for _, failure in clients if failure]
    assert any(failure.startswith("drop:") for failure in failures)
    assert len({metrics[2] for metrics, _ in expected}) > 1, "now more are online, now fewer"


def test_a_file_is_recorded_by_its_content(flexfleet: Any, quick: Sequence[str], tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("client,time,online\n" + "".join(f"{c},{10 if c % 2 else 0},1\n" for c in range(6)))
    sets = [*quick, f"fleet.trace={file}", "rounds.stop=1"]
    run_of(flexfleet, "a", sets)
    assert all(client % 2 == 0 for _, clients in told(tmp_path / "runs" / "a") for client, _ in clients)
    run = RunFile.read(tmp_path / "runs" / "a" / "run.json")
    assert run.config["fleet"]["trace"] == {"name": "file", "path": str(file), "repeat_s": None}
    assert run.trace_sha256 is not None and len(run.trace_sha256) == 64
    file.write_text(file.read_text() + "0,99,0\n")
    more = [*sets[:-1], "rounds.stop=2"]
    assert "another trace" in refused(flexfleet("run", "--run-id", "a", "--resume", sets=more), 4)
    file.write_text(file.read_text().removesuffix("0,99,0\n"))
    assert flexfleet("run", "--run-id", "a", "--resume", sets=more).code == 0


def test_measured_run_is_simulated_with_its_own_times(flexfleet: Any, quick: Sequence[str]) -> None:
    run_of(flexfleet, "real", [*quick, "run.backend=processes"])
    history = Path("runs/real/history.json")
    found = flexfleet("trace", "runs/real", "--json").json
    assert (found["file"], found["rounds"]) == ("trace.csv", 3) and 0 <= found["error"]["median"] <= found["error"][
        "p90"
    ]
    run_of(flexfleet, "simulated", [*quick, "fleet.trace=trace.csv"])
    for real, again in zip(rounds_of(history.parent), rounds_of(Path("runs/simulated")), strict=True):
        seconds = {line["client"]: line["seconds"] for line in real["clients"]}
        assert {line["client"]: line["seconds_simulated"] for line in again["clients"]} == pytest.approx(seconds)
        assert again["metrics"]["seconds_simulated"] == pytest.approx(max(seconds.values()))
    assert "no measured times" in refused(flexfleet("trace", "runs/simulated"))
    assert "runs/missing" in refused(flexfleet("trace", "runs/missing"))

    lost = json.loads(history.read_text())
    client = lost["rounds"][1]["clients"].pop()["client"]
    lost["rounds"][1]["clients"].append({"client": client, "sent": "M1", "failure": "pod: lost", "code": "pod"})
    history.write_text(json.dumps(lost))
    flexfleet("trace", "runs/real", "--out", "new/lost.csv").ok()
    lines = Path("new/lost.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines if line.endswith(",0")] == [str(client)]
    run_of(flexfleet, "again", [*quick, "fleet.trace=new/lost.csv"])
    dropped = [line for line in rounds_of(Path("runs/again"))[1]["clients"] if line.get("code") == "drop"]
    assert [line["client"] for line in dropped] == [client]


def test_wrong_trace_is_refused_before_training(flexfleet: Any, quick: Sequence[str], tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("client,time,online\n0,0,1\n999,0,1\n")
    assert "bad.csv, line 3: client must be" in refused(flexfleet("check", sets=[*quick, "fleet.trace=bad.csv"]))
    (tmp_path / "late.csv").write_text("client,time,online\n0,5000,1\n")
    assert "fleet.wait_s" in refused(flexfleet("check", sets=[*quick, "fleet.trace=late.csv", "fleet.wait_s=100"]))
    assert flexfleet("check", sets=[*quick, "fleet.trace=none.csv"]).code == 2
    assert flexfleet("check", sets=[*quick, DRAWN[0]]).code == 0


def test_a_run_that_waited_too_long_goes_on_with_a_longer_wait(
    flexfleet: Any, quick: Sequence[str], tmp_path: Path
) -> None:
    rows = [f"{c},{at},{at != 1e-3}" for c in range(6) for at in (0, 1e-3, 500)]
    (tmp_path / "t.csv").write_text("\n".join(["client,time,online", *rows]))
    sets = [*quick, "fleet.trace=t.csv", "rounds.stop=2"]
    assert "fleet.wait_s" in refused(flexfleet("run", "--run-id", "a", sets=[*sets, "fleet.wait_s=10"]))
    assert flexfleet("run", "--run-id", "a", "--resume", sets=sets).code == 0
    assert moves("fleet.wait_s") is Moves.LENGTH and moves("fleet.trace.path") is Moves.RESULT
