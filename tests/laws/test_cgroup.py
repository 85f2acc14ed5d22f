"""The memory that a container or a service can still use, from the files of its cgroup and its node."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_engine.core.errors import EnvironmentFailure
from fl_engine.training import cgroup

MIB = 2**20
SERVICE = "system.slice/flexfleet-agent.service"


def limited(folder: Path, limit: object = 1000 * MIB, usage: int = 700 * MIB, cache: int = 100 * MIB) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 500\nfile 600\ninactive_file {cache}\nactive_file 40\n")
    return folder


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXFLEET_CGROUP", str(tmp_path / "cgroup"))
    monkeypatch.setenv("FLEXFLEET_PROC", str(tmp_path / "proc"))


@pytest.mark.parametrize(("usage", "left"), [(100, 1000), (600, 500), (1100, 0), (1200, 0), (5, 1000)])
def test_room_is_limit_minus_working_set(tmp_path: Path, usage: int, left: int) -> None:
    limited(tmp_path / "cgroup", usage=usage * MIB)
    assert cgroup.room(0) == left * MIB


@pytest.mark.parametrize("limit", ["max", ""])
def test_room_without_a_limit_is_an_error(tmp_path: Path, limit: str) -> None:
    limited(tmp_path / "cgroup", limit=limit)
    with pytest.raises(EnvironmentFailure) as caught:
        cgroup.room(0)
    assert caught.value.path == "kubernetes.observe"
    with pytest.raises(EnvironmentFailure):
        cgroup.room_of_device(0)


def test_service_room_counts_its_limit_and_its_slices(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(f"0::/{SERVICE}\n")
    (proc / "meminfo").write_text(f"MemTotal:       64000000 kB\nMemAvailable: {5000 * 1024:>9} kB\n")
    own = limited(root / SERVICE, "max")
    assert cgroup.room_of_device(0) == 5000 * MIB
    limited(own)
    assert cgroup.room_of_device(0) == 400 * MIB
    limited(own.parent, 2000 * MIB, 1900 * MIB)
    assert cgroup.room_of_device(0) == 200 * MIB
    (proc / "self" / "cgroup").write_text(f"0::/../{SERVICE}\n")
    assert cgroup.room_of_device(0) == 5000 * MIB, "a folder outside of the root is not read"
