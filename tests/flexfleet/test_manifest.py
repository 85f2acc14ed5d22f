"""manifest.json: a file of a finished run that has changed is named, with exit code 4."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import flexfleet as ff
from fl_engine.core.errors import IntegrityError
from fl_engine.storage.store import sha256
from tests.harness.processes import refused
from tests.harness.run_folders import flip


def edit(path: Path) -> None:
    text = path.read_text()
    at = next(i for i in range(len(text) - 1, 0, -1) if text[i].isdigit())
    path.write_text(f"{text[:at]}{(int(text[at]) + 1) % 10}{text[at + 1 :]}")


CHANGES: dict[str, Callable[[Path], None]] = {
    "model.safetensors": flip,
    "result.json": edit,
    "run.json": edit,
    "partition/partition.safetensors": flip,
    "pretrain/apoz.json": lambda path: path.unlink(),
}


def test_manifest_lists_size_and_sha256_of_each_file(finished: Any) -> None:
    run, _ = finished
    files = json.loads((run / "manifest.json").read_text())["files"]
    assert set(CHANGES) < set(files)
    for name, told in files.items():
        value = (run / name).read_bytes()
        assert told == {"size": len(value), "sha256": sha256(value)}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_file_of_a_finished_run_is_named(name: str, finished: Any, flexfleet: Any) -> None:
    run, _ = finished
    CHANGES[name](run / name)
    with pytest.raises(IntegrityError, match=name):
        ff.load(run)
    assert name in refused(flexfleet("report", str(run), "--out", "page.html"), 4) and not Path("page.html").exists()


def test_files_added_after_the_end_change_nothing(finished: Any, flexfleet: Any) -> None:
    run, done = finished
    assert flexfleet("report", str(run), "--out", str(run / "report.html")).code == 0
    (run / "export").mkdir()
    (run / "export" / "model.onnx").write_bytes(b"x")
    (run / "notes.txt").write_text("mine")
    assert ff.load(run).metrics["avg"] == done.json["metrics"]["avg"]


def test_run_without_its_manifest_has_not_finished(finished: Any, flexfleet: Any, quick: Sequence[str]) -> None:
    run, done = finished
    (run / "manifest.json").unlink()
    edit(run / "result.json")
    assert ff.load(run).status == "stopped"
    assert flexfleet("status", str(run), "--json").json["status"] == "unfinished"
    again = flexfleet("run", "--json", "--run-id", "a", "--resume", sets=[*quick, "rounds.commit_every=1"])
    assert again.code == 0 and again.json["metrics"]["avg"] == done.json["metrics"]["avg"]
    assert ff.load(run).status == "finished"
