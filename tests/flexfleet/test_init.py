"""`flexfleet init`: files to begin with, which run and pass as they are written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fl_engine.algorithms import CONTRACT
from fl_engine.core import allowed
from fl_engine.core.errors import ConfigError
from flexfleet.config import Config, load_config
from flexfleet.files.new_files import algorithm_files

pytestmark = pytest.mark.usefixtures("own_folder")


def test_the_parameters_are_the_defaults_with_their_meaning(flexfleet: Any, tmp_path: Path) -> None:
    done = flexfleet("init", "new/place", "--json")
    assert (done.code, json.loads(done.out)) == (0, {"files": ["new/place/params.yaml"]})
    assert load_config(tmp_path / "new/place/params.yaml") == Config()
    assert "# Epochs that a client trains per round." in (tmp_path / "new/place/params.yaml").read_text()


@pytest.mark.parametrize("argv", [("init",), ("init", "--algorithm", "mine")])
def test_nothing_is_replaced(flexfleet: Any, tmp_path: Path, argv: tuple[str, ...]) -> None:
    assert flexfleet(*argv).code == 0
    last = max(tmp_path.iterdir())  # params.yaml, or the test
    last.write_text("mine")
    before = {path: path.read_text() for path in tmp_path.iterdir()}
    done = flexfleet(*argv)
    said = "are there already, and are not replaced" if argv[1:] else "is there already, and is not replaced"
    assert done.code == 2 and said in done.err
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before


def test_one_file_in_the_way_and_none_is_written(flexfleet: Any, tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text("")
    assert flexfleet("init", "--algorithm", "mine").code == 2
    assert not (tmp_path / "mine.py").exists()


@pytest.mark.parametrize("name", ["my-method", "1st", "class", "a/b", "", "json", "flexfleet", "número", "__main__"])
def test_a_name_that_cannot_be_a_module_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"choose another|becomes a Python module"):
        algorithm_files(name, tmp_path)


def test_the_algorithm_runs_and_its_test_passes(
    flexfleet: Any, tmp_path: Path, quick: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = flexfleet("init", "--algorithm", "fed_mine")
    assert done.code == 0 and "flexfleet run --algorithm fed_mine:FedMine" in done.out
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_fed_mine.py"]
    tested = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout[-3000:]
    assert " passed" in tested.stdout and "skipped" not in tested.stdout
    monkeypatch.setattr(allowed, "trusted", {"fed_mine:FedMine"})
    own = CONTRACT.kind("fed_mine:FedMine")
    assert CONTRACT.misfits(own) == []
    sets = [each for each in quick if not each.startswith("algorithm.")]
    ran = flexfleet("run", "--json", "-q", "--algorithm", "fed_mine:FedMine", sets=sets)
    assert ran.code == 0, ran.err
    assert set(json.loads(ran.out)["metrics"]["levels"]) == {"0.5x", "0.71x", "1x"}
