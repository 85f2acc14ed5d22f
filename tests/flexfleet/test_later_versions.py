"""Files that a later version, or another user, wrote are told from damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError, IntegrityError
from flexfleet.config import Config
from flexfleet.files import cache
from flexfleet.files.artifacts import BareHistory, History, RunFile
from flexfleet.pipeline.resume import known_run

SUMS = {"pool_sha256": "0" * 64, "partition_sha256": "1" * 64}
LATER = "Perhaps a later version of flexfleet wrote it: take that one"


def run_file(folder: Path, **more: Any) -> Path:
    run = RunFile(run_id="a", config=Config().model_dump(mode="json"), numerics={}, **SUMS)
    path = folder / "run.json"
    path.write_text(json.dumps(run.model_dump(mode="json") | more))
    return path


@pytest.mark.parametrize("more", [{"newthing": 1}, {"schema_version": 2}, {"schema_version": 2, "newthing": 1}])
def test_a_file_of_a_later_version_is_said_to_be_one(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError, match=f"{LATER}$"):
        RunFile.read(run_file(tmp_path, **more))


@pytest.mark.parametrize("more", [{"run_id": 3}, {"run_id": 3, "newthing": 1}, {"schema_version": 0}])
def test_a_damaged_file_is_not(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError) as error:
        RunFile.read(run_file(tmp_path, **more))
    assert "later" not in str(error.value)


@pytest.mark.parametrize("kind", [History, BareHistory])
def test_a_history_of_a_later_version(kind: type[History]) -> None:
    content = {"rounds": [], "model_sha256": "", "seconds": 0, "newthing": 1}
    with pytest.raises(IntegrityError, match=LATER):
        kind.of(json.dumps(content).encode(), "history.json")


def test_a_run_with_a_parameter_of_a_later_version_says_whose_parameter_it_is(tmp_path: Path) -> None:
    config = Config().model_dump(mode="json")
    run_file(tmp_path, config=config | {"run": config["run"] | {"newthing": 1}})
    said = r"run\.json are not those of this version .*unknown parameter 'run\.newthing'.*: go on with the version that"
    with pytest.raises(ConfigError, match=said):
        known_run(Config(), tmp_path, resume=True)


def test_what_another_user_keeps_for_himself_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """(Root, who often runs tests, may read everything.)"""
    cache.keep(tmp_path, "x", {"a": 1}, int, 3)
    assert cache.find(tmp_path, "x", {"a": 1}, int) == 3

    def refused(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "file").write_text("")
    assert cache.find(tmp_path / "file", "x", {"a": 1}, int) is None
    monkeypatch.setattr(Path, "read_bytes", refused)
    assert cache.find(tmp_path, "x", {"a": 1}, int) is None
    assert cache.kept(tmp_path, "x", {"a": 1}, int, lambda: 4) == 4
