"""`flexfleet status` where runs lie in folders of comparisons and studies, and where a ledger's server is gone."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from fl_engine.storage import s3
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


def test_status_refuses_what_is_not_the_folder_of_a_run(flexfleet: Any, tmp_path: Path) -> None:
    for name, said in (("file", "file is not a folder"), ("none", "none is not a folder"), ("empty", "run.json")):
        (tmp_path / "file").touch()
        (tmp_path / "empty").mkdir(exist_ok=True)
        for command in ("status", "report"):
            done = flexfleet(command, str(tmp_path / name))
            assert done.code in (2, 4) and said in done.err, done.err
    assert "holds no run yet" in flexfleet("status", sets=[f"run.store={tmp_path / 'none'}"]).out


def test_a_server_that_does_not_answer_is_asked_once(
    flexfleet: Any, finished: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = finished
    known = json.loads((run / "run.json").read_text())
    known["config"]["run"]["remote"] = "s3://bucket/r"
    for place in ("b", "c/one-s0", "c/two-s0", "z"):
        Path("runs", place).mkdir(parents=True)
        Path("runs", place, "run.json").write_text(json.dumps(known))
    shutil.copytree(run, "runs/own")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "k")
    monkeypatch.setattr(s3, "ATTEMPTS", 2)
    asked = list[int]()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def close_each() -> None:
            while True:
                try:
                    one = server.accept()[0]
                except OSError:
                    return
                asked.append(one.fileno())
                one.close()

        threading.Thread(target=close_each, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        found = flexfleet("status", "--json").json["runs"]
        server.shutdown(socket.SHUT_RDWR)
    gone, there = found[1:4] + found[5:], (found[0], found[4])
    assert [row["run_id"] for row in gone] == ["b", "c/one-s0", "c/two-s0", "z"] and len(asked) == 2
    assert {row["status"] for row in gone} == {"unreadable"} and len({row["why"] for row in gone}) == 1
    assert "s3://bucket/r/a" in gone[0]["why"] and "cannot be reached" in gone[0]["why"]
    assert [(row["run_id"], row["status"]) for row in there] == [("a", "finished"), ("own", "finished")]
