"""What may be a name, one rule wherever one comes in; and the lock of the folder that a name becomes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError
from flexfleet.config import Config
from flexfleet.config.run_names import LONGEST, new_name, plain
from flexfleet.files.run_folder import folder_lock

GOOD = ("a", "flexfl-s0-20261122-101010", "my run", "größe", "package.module:NAME-s0", "a" * LONGEST, "_x", "a.b")
BAD = (
    "", ".", "..", ".hidden", "-rf", "a/b", "/tmp/x", "a\\b", "a\nb", "a\n", "\ra", "a\tb", "a\0b", "a\x1b[31m", " a",
    "a ", "a\u202eb", "a\u200bb", "a\u2028b", "\ud800", "a" * (LONGEST + 1), "é" * (LONGEST // 2 + 1), "a" * 100_000,
)  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_a_plain_name_is_taken_as_it_is(name: str) -> None:
    assert plain(name, "run_id") == name


@pytest.mark.parametrize("name", BAD, ids=lambda name: ascii(name)[:20])
def test_what_is_no_plain_name_is_refused_in_one_short_line(name: str) -> None:
    with pytest.raises(ConfigError, match="run_id is a plain name") as error:
        plain(name, "run_id")
    assert str(error.value).isprintable() and len(str(error.value)) < 400


def test_runs_of_the_same_second_get_different_names(
    flexfleet: Any, quick: Sequence[str], tmp_path: Path, no_drawings: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda *_: "20261122-101010")
    sets = [*quick, "rounds.stop=1", "central.epochs=1"]
    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(lambda _: new_name(Config()), range(64)))) == 64
    names = [flexfleet("central", "--json", sets=sets).json["run_id"] for _ in range(2)]
    assert len({*names, *(path.name for path in Path("runs").iterdir())}) == 2


# ------------------------------------------------------------------------------------------------------ the lock
def test_a_folder_has_one_lock(tmp_path: Path) -> None:
    with folder_lock(tmp_path), pytest.raises(ConfigError, match="another process"), folder_lock(tmp_path):
        pass
    with folder_lock(tmp_path):
        pass
