"""`flexfleet status` where runs lie in folders of comparisons and studies, and where a ledger's server is gone."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

import flexfleet as ff
from fl_engine.core.errors import EnvironmentFailure, FlexfleetError
from fl_engine.storage import s3
from flexfleet.files.begun import check_looked_into
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


def test_a_folder_that_may_not_be_looked_into_hides_no_other_run(
    flexfleet: Any, finished: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path("runs") / "closed").mkdir()
    glob = Path.glob

    def forbidden(self: Path, pattern: str) -> Any:
        if "closed" in self.parts and "/" in pattern:  # pathlib gives an empty list for the folder itself
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return glob(self, pattern)

    monkeypatch.setattr(Path, "glob", forbidden)
    assert [row["run_id"] for row in flexfleet("status", "--json").json["runs"]] == ["a"]


def in_the_way(folder: Path) -> dict[str, str]:
    """Paths that are no folder of a run, each with what is said of it."""
    (folder / "file").touch()
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("/nowhere/x")
    (folder / "empty").mkdir()
    return {
        "file": "file is not a folder, but a file, or lies below one: give the folder of a run",
        "file/x": "file/x is not a folder, but a file, or lies below one",
        "loop": "loop is not a folder, but a link that leads back to itself",
        "dangling": "dangling is not a folder, but a link to /nowhere/x, which is not there",
        "none": "none is not a folder, nothing is there: give the folder of a run, e.g. runs/<run id>",
    }


def test_a_path_that_is_no_folder_is_told_as_what_it_is(
    flexfleet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, said in in_the_way(tmp_path).items():
        code = 6 if name == "loop" else 2
        for command in ("status", "report"):
            done = flexfleet(command, name)
            assert (done.code, said in done.err) == (code, True), (command, done.err)
        with pytest.raises(FlexfleetError, match=re.escape(said if os.path.lexists(name) else "there is no folder")):
            ff.load(name)
        if name != "none":  # where there is no store yet, there is no run
            done = flexfleet("status", sets=[f"run.store={name}"])
            assert (done.code, said in done.err) == (code, True), done.err
    assert "empty is not the folder of a run: it has no run.json" in flexfleet("status", "empty").err
    assert "none holds no run yet" in flexfleet("status", sets=["run.store=none"]).out


@pytest.mark.parametrize("mode", [0o000, 0o600, 0o300], ids=oct)
def test_a_folder_without_rights_is_told_as_that(
    flexfleet: Any, finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """Root may look into everything, so the answers of the system are made up where the tests are root's."""
    run, _ = finished
    run.chmod(mode)
    if os.geteuid() == 0:
        refuse_by_mode(monkeypatch, run)
    try:
        for command in ("status", "report"):
            done = flexfleet(command, str(run))
            assert (done.code, f"{run} cannot be looked into: Permission denied" in done.err) == (6, True), done.err
    finally:
        run.chmod(0o755)


def test_a_name_that_is_too_long_and_a_run_in_a_folder_without_rights_are_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether these are links cannot be seen either."""
    closed = tmp_path / "closed"
    closed.mkdir(0o600)
    if os.geteuid() == 0:
        refuse_by_mode(monkeypatch, closed)
    for folder, said in ((closed / "run", "Permission denied"), (tmp_path / ("a" * 300), "File name too long")):
        with pytest.raises(EnvironmentFailure, match=f"cannot be looked into: {said}"):
            check_looked_into(folder)


def refuse_by_mode(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    stat, scandir, mode = os.stat, os.scandir, folder.stat().st_mode

    def refuse(path: Any, bit: int) -> None:
        if not mode & bit:
            raise PermissionError(errno.EACCES, "Permission denied", path)

    def entered(path: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(path, int) and str(path).startswith(f"{folder}/"):
            refuse(path, 0o100)
        return stat(path, *args, **kwargs)

    def listed(path: Any = ".") -> Any:
        if str(path) == str(folder):
            refuse(path, 0o400)
        return scandir(path)

    monkeypatch.setattr(os, "stat", entered)
    monkeypatch.setattr(os, "scandir", listed)


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
