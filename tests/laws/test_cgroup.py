"""What a container can still take, by the files of its cgroup and of its node, and in a real cgroup."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_engine.core.errors import EnvironmentFailure
from fl_engine.training import cgroup

MIB = 2**20
V1_NONE = 2**63 - 4096


def v2(root: Path, limit: object = 1000 * MIB, usage: object = 700 * MIB, cache: int = 100 * MIB) -> Path:
    (root / "memory.max").write_text(f"{limit}\n")
    (root / "memory.current").write_text(f"{usage}\n")
    (root / "memory.stat").write_text(f"anon 500\nfile 600\nkernel 7\ninactive_file {cache}\nactive_file 40\n")
    return root


def v1(root: Path, limit: object = 1000 * MIB, usage: object = 700 * MIB, cache: int = 100 * MIB) -> Path:
    (root / "memory").mkdir()
    (root / "memory" / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (root / "memory" / "memory.usage_in_bytes").write_text(f"{usage}\n")
    told = f"cache 5\ninactive_file 1\ntotal_cache 9\ntotal_inactive_file {cache}\n"
    (root / "memory" / "memory.stat").write_text(told)
    return root


def node(proc: Path, available_kb: int | None = None, stalled: str | None = None) -> Path:
    proc.mkdir()
    if available_kb is not None:
        told = f"MemTotal:       64000000 kB\nMemFree:         1 kB\nMemAvailable: {available_kb:>9} kB\n"
        (proc / "meminfo").write_text(told)
    if stalled is not None:
        (proc / "pressure").mkdir()
        (proc / "pressure" / "memory").write_text(pressure(stalled))
    return proc


def pressure(full: str) -> str:
    return (
        "some avg10=99.00 avg60=50.00 avg300=25.00 total=123456\n"
        f"full avg10={full} avg60=77.00 avg300=66.00 total=12345\n"
    )


@pytest.mark.parametrize("version", [v1, v2])
def test_room_is_the_limit_less_the_working_set(tmp_path: Path, version: object) -> None:
    root = version(tmp_path)  # type: ignore[operator]
    assert cgroup.limit(root) == 1000 * MIB and cgroup.used(root) == 600 * MIB
    assert cgroup.room(0, root, tmp_path / "none") == 400 * MIB
    (root / "memory" / "memory.usage_in_bytes" if version is v1 else root / "memory.current").write_text("5\n")
    assert cgroup.used(root) == 0, "less than the cache, which was counted a moment later"


@pytest.mark.parametrize("version", [v1, v2])
def test_what_is_free_is_looked_at_anew(tmp_path: Path, version: object) -> None:
    for usage, left in ((100, 1000), (600, 500), (1100, 0), (1200, 0)):
        here = tmp_path / str(usage)
        here.mkdir()
        root = version(here, usage=usage * MIB)  # type: ignore[operator]
        assert cgroup.room(0, root, tmp_path / "none") == left * MIB


def test_pressure_takes_its_share(tmp_path: Path) -> None:
    root = v2(tmp_path)
    assert cgroup.room(0, root, node(tmp_path / "a", stalled="25.00")) == 300 * MIB
    (root / "memory.pressure").write_text(pressure("50.00"))
    assert cgroup.room(0, root, tmp_path / "a") == 200 * MIB
    assert cgroup.room(0, root, node(tmp_path / "b", stalled="100.00")) == 0
    assert cgroup.stalled(tmp_path / "none", tmp_path / "none") == 0.0, "a kernel that does not measure it"


@pytest.mark.parametrize(("version", "text"), [(v2, "max"), (v2, V1_NONE), (v2, ""), (v1, V1_NONE)])
def test_no_limit_is_said(tmp_path: Path, version: object, text: object) -> None:
    root = version(tmp_path, limit=text)  # type: ignore[operator]
    for look in (cgroup.limit, lambda root: cgroup.room(0, root, tmp_path / "none")):
        with pytest.raises(EnvironmentFailure, match=r"kubernetes\.pools"):
            look(root)


SERVICE = "system.slice/flexfleet-agent.service"


@pytest.mark.parametrize(("version", "line"), [(v2, "0::"), (v1, "9:memory:")])
def test_the_limit_of_a_service_is_its_own_or_that_of_its_slice(tmp_path: Path, version: object, line: str) -> None:
    proc = node(tmp_path / "proc", available_kb=5000 * 1024)
    (proc / "self").mkdir()
    (proc / "self" / "cgroup").write_text(f"3:cpu,cpuacct:/\n{line}/{SERVICE}\n")
    root = tmp_path / "memory" if version is v1 else tmp_path
    own = root / SERVICE
    own.mkdir(parents=True)

    def limits(folder: Path, limit: object, usage: int) -> None:
        files = tmp_path / f"{folder.name}-files"
        files.mkdir()
        version(files, limit, usage * MIB)  # type: ignore[operator]
        for file in (files / "memory" if version is v1 else files).glob("*.*"):
            file.rename(folder / file.name)

    limits(own, V1_NONE, 700)
    assert cgroup.room_of_device(0, tmp_path, proc) == 5000 * MIB
    (own / ("memory.limit_in_bytes" if version is v1 else "memory.max")).write_text(str(1000 * MIB))
    assert cgroup.room_of_device(0, tmp_path, proc) == 400 * MIB
    limits(own.parent, 2000 * MIB, 1900)
    assert cgroup.room_of_device(0, tmp_path, proc) == 200 * MIB
    if version is v2:
        (own / "memory.pressure").write_text(pressure("50.00"))
        assert cgroup.room_of_device(0, tmp_path, proc) == 100 * MIB
    (proc / "self" / "cgroup").write_text(f"{line}/../{SERVICE}\n")
    assert cgroup.room_of_device(0, tmp_path, proc) == 5000 * MIB, "what lies outside of what is seen"
