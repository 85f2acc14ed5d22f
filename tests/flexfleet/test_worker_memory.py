"""Devices that prune to their free memory (`agents.observe=cgroup`): a worker as a thread of this process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError
from fl_engine.storage.store import FolderStore
from fl_engine.training.memory import Peaks
from flexfleet.files.artifacts import History, PoolFile, RunFile
from flexfleet.pipeline import enrollment
from flexfleet.pipeline import federate as step
from flexfleet.pipeline.model_pool import model_pool
from flexfleet.pipeline.partition import partition
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.pretrain import pretrain
from flexfleet.pipeline.resume import known_run
from flexfleet.worker.mailbox import WorkerMailbox, device_of
from flexfleet.worker.server import Server

MIB = 2**20


@pytest.mark.parametrize(
    ("much", "little"),
    [
        ({"meminfo": 900}, {"meminfo": 60}),
        ({"memory.max": 1000, "memory.current": 100, "meminfo": 900}, {"meminfo": 60}),
    ],
    ids=["machine", "both"],
)
def test_device_prunes_each_order_to_its_free_memory(
    much: Mapping[str, int], little: Mapping[str, int], quick: Sequence[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The process stays the same. A client takes 100 MiB, and training a level 40 MiB and 60 for its share of the
    parameters. According to the fleet's numbers no client prunes."""
    place, over = tmp_path / "device-memory", threading.Event()
    place.mkdir()
    for name in ("FLEXFLEET_CGROUP", "FLEXFLEET_PROC"):
        monkeypatch.setenv(name, str(place))

    def memory(values: Mapping[str, int]) -> None:
        """What the device's cgroup and machine report from now on, in MiB."""
        for name, value in values.items():
            text = f"MemAvailable: {value * 1024} kB\n" if name == "meminfo" else str(value * MIB)
            (place / name).write_text(text)

    sets = ("run.backend=agents", "agents.observe=cgroup", f"run.store={tmp_path}", "rounds.stop=2")
    resolved = Resolved.load(None, (*quick, *sets, "fleet.tiers=[{name: any, share: 1.0, memory: 200.0}]"))
    partition(resolved, tmp_path / "partition")
    pretrain(resolved, tmp_path / "partition", tmp_path / "pretrain")
    model_pool(resolved, tmp_path / "pretrain", tmp_path / "pool")
    levels = PoolFile.read(tmp_path / "pool" / "pool.json").levels
    found = Peaks(100 * MIB, tuple(140 * MIB + int(60 * MIB * level.share) for level in levels))
    monkeypatch.setattr(step, "peaks_of", lambda *_: found)
    (invitation,) = enrollment.invite(resolved.config, None, 1, tmp_path)
    device, folder = device_of(str(invitation), tmp_path / "device")
    mailbox = WorkerMailbox(FolderStore(folder, 0o600), device, "00" * 8)
    read = mailbox.read

    monkeypatch.setattr(mailbox, "read", lambda: sys.exit() if over.is_set() else read())
    server = Server(mailbox, lambda why: sys.exit())  # type: ignore[arg-type,return-value]

    def live() -> None:
        with suppress(SystemExit):
            server.serve(3600.0, False)

    thread = threading.Thread(target=live, daemon=True)
    memory(much)
    thread.start()
    try:
        watcher: Any = SimpleNamespace(update=lambda *_: None, round=lambda number, *_: number == 1 and memory(little))
        out = step.federate(resolved, tmp_path / "partition", tmp_path / "pool", tmp_path / "a", watcher=watcher)
    finally:
        over.set()
        thread.join(30)
    assert not thread.is_alive()
    first, second = (row["clients"] for row in History.read(out).rounds)
    assert first and all(line["trained"] == line["sent"] and line["free"] > 100 for line in first)
    assert second and all(line["free"] < 50 for line in second)
    assert any(line["trained"] != line["sent"] for line in second)


def test_resumed_run_must_observe_memory_in_the_same_way(quick: Sequence[str], tmp_path: Path) -> None:
    def config(*sets: str) -> Any:
        return Resolved.load(None, [*quick, "agents.observe=cgroup", *sets]).config

    began = config("run.backend=agents").model_dump(mode="json")
    sums = {"pool_sha256": "0" * 64, "partition_sha256": "1" * 64}
    RunFile(run_id="a", config=began, numerics={}, **sums).write(tmp_path / "run.json")
    assert known_run(config("run.backend=agents"), tmp_path, resume=True) is not None
    with pytest.raises(ConfigError, match=r"run\.backend"):
        known_run(config(), tmp_path, resume=True)
