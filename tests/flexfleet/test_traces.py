"""A run with a trace, from the command line: the same in every backend, after a stop, and recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.fields import Moves
from flexfleet.config import moves
from flexfleet.files.artifacts import History, RunFile

pytestmark = pytest.mark.usefixtures("own_folder", "no_drawings")

DRAWN = (
    "fleet.trace={name: lognormal, online_s: 3, offline_s: 3, bandwidth_s: 1, speed: 0.001, bandwidth: 0.5, "
    "speed_data: 0.5, rate: shannon, repeat_s: 500}",
    "rounds.stop=8",
)


def told(folder: Path) -> list[Any]:
    """What a run's history says of its rounds, without what is measured by the clock on the wall."""
    rows = History.read(folder / "history.json").rounds
    names = ("seconds_simulated", "simulated_wait", "clients_online", "clients_dropped", "avg")
    return [
        ([row["metrics"].get(name) for name in names], [(c["client"], c.get("failure")) for c in row["clients"]])
        for row in rows
    ]


@pytest.mark.long
def test_trace_gives_same_model_and_clock_on_every_backend(
    flexfleet: Any, quick: Sequence[str], tmp_path: Path
) -> None:
    ways = {
        "memory": (),
        "store": ("rounds.keep_updates=true",),
        "processes": ("run.backend=processes", "run.devices=[cpu, cpu]"),
    }
    models, histories = set(), []
    for name, sets in ways.items():
        done = flexfleet("run", "--json", "--run-id", name, sets=[*quick, *DRAWN, *sets])
        assert done.code == 0, done.err
        models.add(done.json["model_sha256"])
        histories.append(told(tmp_path / "runs" / name))
    assert len(models) == 1 and histories[0] == histories[1] == histories[2]
    failures = [failure for _, clients in histories[0] for _, failure in clients if failure]
    assert any(failure.startswith("drop: went offline") for failure in failures)
    assert len({metrics[2] for metrics, _ in histories[0]}) > 1, "now more are online, now fewer"
    assert flexfleet("run", "--run-id", "stopped", sets=[*quick, *DRAWN, "rounds.stop=3"]).code == 0
    done = flexfleet("run", "--json", "--run-id", "stopped", "--resume", sets=[*quick, *DRAWN])
    assert {done.json["model_sha256"]} == models and told(tmp_path / "runs" / "stopped")[4:] == histories[0][4:]


def test_a_file_is_recorded_by_its_content(flexfleet: Any, quick: Sequence[str], tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("client,time,online\n" + "".join(f"{c},{10 if c % 2 else 0},1\n" for c in range(6)))
    sets = [*quick, f"fleet.trace={file}", "rounds.stop=1"]
    assert flexfleet("run", "--run-id", "a", sets=sets).code == 0
    assert all(client % 2 == 0 for _, clients in told(tmp_path / "runs" / "a") for client, _ in clients)
    run = RunFile.read(tmp_path / "runs" / "a" / "run.json")
    assert run.config["fleet"]["trace"] == {"name": "file", "path": str(file), "repeat_s": None}
    assert run.trace_sha256 is not None and len(run.trace_sha256) == 64
    file.write_text(file.read_text() + "0,99,0\n")
    more = [*sets[:-1], "rounds.stop=2"]
    changed = flexfleet("run", "--run-id", "a", "--resume", sets=more)
    assert changed.code == 4 and "another trace" in changed.err
    file.write_text(file.read_text().removesuffix("0,99,0\n"))
    assert flexfleet("run", "--run-id", "a", "--resume", sets=more).code == 0


def test_wrong_trace_is_refused_before_training(flexfleet: Any, quick: Sequence[str], tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("client,time,online\n0,0,1\n999,0,1\n")
    done = flexfleet("check", sets=[*quick, "fleet.trace=bad.csv"])
    assert done.code == 2 and "bad.csv, line 3: client must be" in done.err
    (tmp_path / "late.csv").write_text("client,time,online\n0,5000,1\n")
    done = flexfleet("check", sets=[*quick, "fleet.trace=late.csv", "fleet.wait_s=100"])
    assert done.code == 2 and "the next comes after 5000 s; fleet.wait_s = 100" in done.err
    assert flexfleet("check", sets=[*quick, "fleet.trace=none.csv"]).code == 2
    assert flexfleet("check", sets=[*quick, DRAWN[0]]).code == 0


def test_a_run_that_waited_too_long_goes_on_with_a_longer_wait(
    flexfleet: Any, quick: Sequence[str], tmp_path: Path
) -> None:
    rows = [{"client": c, "time": at, "online": at != 1e-3} for c in range(6) for at in (0, 1e-3, 500)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sets = [*quick, "fleet.trace=t.jsonl", "rounds.stop=2"]
    short = flexfleet("run", "--run-id", "a", sets=[*sets, "fleet.wait_s=10"])
    assert short.code == 2 and "round 2: no client is online" in short.err
    assert flexfleet("run", "--run-id", "a", "--resume", sets=sets).code == 0
    assert moves("fleet.wait_s") is Moves.LENGTH and moves("fleet.trace.path") is Moves.RESULT
