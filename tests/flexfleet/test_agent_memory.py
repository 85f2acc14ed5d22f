"""Devices that prune to the memory that is free (`agents.observe=cgroup`): an agent as a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError
from fl_engine.storage.store import FolderStore
from fl_engine.training.memory import Peaks
from flexfleet.files.artifacts import History, PoolFile, RunFile
from flexfleet.steps import agent, invitations
from flexfleet.steps import federate as step
from flexfleet.steps.agent_line import Line, known_of
from flexfleet.steps.model_pool import model_pool
from flexfleet.steps.partition import partition
from flexfleet.steps.prepare import Resolved
from flexfleet.steps.pretrain import pretrain
from flexfleet.steps.resumed import known_run

MIB = 2**20
Rounds = Callable[..., list[Any]]


class Off(BaseException):
    pass


class Device(Line):
    """Until it is switched off."""

    over: threading.Event

    def read(self) -> Any:
        if self.over.is_set():
            raise Off
        return super().read()


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, int]], None]:
    """`memory({"memory.max": 180})`: what the device's cgroup and machine say from here on, in MiB."""
    place = tmp_path / "device-memory"
    place.mkdir()
    monkeypatch.setenv("FLEXFLEET_CGROUP", str(place))
    monkeypatch.setenv("FLEXFLEET_PROC", str(place))

    def says(values: Mapping[str, int]) -> None:
        for name, value in values.items():
            text = f"MemAvailable: {value * 1024} kB\n" if name == "meminfo" else str(value * MIB)
            (place / name).write_text(text)

    return says


@pytest.fixture
def rounds(quick: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rounds:
    """`rounds(watcher)`: of each round of a run with one device, what it tells of its clients. The coordinator has
    found that a client takes 100 MiB, and training a level 40 MiB and 60 for its share of the parameters on top."""
    sets = ("run.backend=agents", "agents.observe=cgroup", f"run.store={tmp_path}", "rounds.stop=2")
    # By the fleet's numbers nobody prunes.
    tiers = "fleet.tiers=[{name: any, share: 1.0, memory: 200.0}]"
    resolved = Resolved.load(None, (*quick, *sets, tiers))
    partition(resolved, tmp_path / "partition")
    pretrain(resolved, tmp_path / "partition", tmp_path / "pretrain")
    model_pool(resolved, tmp_path / "pretrain", tmp_path / "pool")
    levels = PoolFile.read(tmp_path / "pool" / "pool.json").levels
    found = Peaks(100 * MIB, tuple(140 * MIB + int(60 * MIB * level.share) for level in levels))
    monkeypatch.setattr(step, "peaks_of", lambda *_: found)
    (invitation,) = invitations.invite(resolved.config, None, 1, tmp_path)

    def run(watcher: Any) -> list[Any]:
        line = Device(FolderStore(tmp_path / "device", 0o600), known_of(str(invitation), tmp_path / "device")[0])
        line.over = threading.Event()

        def live() -> None:
            with suppress(Off):
                agent.serve(line, 3600.0, 1000, False, lambda why: line.over.set())  # type: ignore[arg-type]

        device = threading.Thread(target=live, daemon=True)
        device.start()
        try:
            out = step.federate(resolved, tmp_path / "partition", tmp_path / "pool", tmp_path / "a", watcher=watcher)
        finally:
            line.over.set()
            device.join(30)
        assert not device.is_alive()
        return [row["clients"] for row in History.read(out).rounds]

    return run


class After:
    """Calls `then` after the first round."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def update(self, *_: Any) -> None:
        pass

    def round(self, number: int, *_: Any) -> bool:
        if number == 1:
            self._then()
        return False


@pytest.mark.parametrize(
    ("much", "little"),
    [
        ({"memory.max": 1000, "memory.current": 100}, {"memory.current": 940}),
        ({"meminfo": 900}, {"meminfo": 60}),
        ({"memory.max": 1000, "memory.current": 100, "meminfo": 900}, {"meminfo": 60}),
    ],
    ids=["limit", "machine", "both"],
)
def test_a_device_prunes_order_by_order_to_what_is_free(
    rounds: Rounds, memory: Callable[[Mapping[str, int]], None], much: dict[str, int], little: dict[str, int]
) -> None:
    """It stays the same process, with the same orders' site."""
    memory(much)
    first, second = rounds(After(lambda: memory(little)))
    assert first and all(line["trained"] == line["sent"] and line["free"] > 100 for line in first)
    assert second and all(line["free"] < 50 for line in second)
    assert any(line["trained"] != line["sent"] for line in second)


def test_a_run_goes_on_by_the_rules_that_it_began_with(quick: Sequence[str], tmp_path: Path) -> None:
    def config(*sets: str) -> Any:
        return Resolved.load(None, [*quick, "agents.observe=cgroup", *sets]).config

    began = config("run.backend=agents").model_dump(mode="json")
    sums = {"pool_sha256": "0" * 64, "partition_sha256": "1" * 64}
    RunFile(run_id="a", config=began, numerics={}, **sums).write(tmp_path / "run.json")
    assert known_run(config("run.backend=agents"), tmp_path, resume=True) is not None
    with pytest.raises(ConfigError, match=r"run\.backend = agents, with in_process clients would decide by other"):
        known_run(config(), tmp_path, resume=True)
