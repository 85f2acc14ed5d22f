"""Devices that prune to their free memory (`agents.observe=cgroup`): a worker as a thread of this process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError
from fl_engine.remote.messages import Message
from fl_engine.storage.store import FolderStore
from fl_engine.training.memory import Peaks
from flexfleet.files.artifacts import PoolFile, RunFile
from flexfleet.pipeline import enrollment
from flexfleet.pipeline import federate as step
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.resume import Attempt, known_run
from flexfleet.worker.mailbox import WorkerMailbox, device_of
from flexfleet.worker.server import Server
from tests.harness.prepared import prepare
from tests.harness.run_folders import rounds_of

MIB = 2**20


def test_device_prunes_each_assignment_to_its_free_memory(
    quick: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process stays the same. A client takes 100 MiB, and training a level 40 MiB and 60 for its share of the
    parameters. According to the fleet's numbers no client prunes."""
    place, over = tmp_path / "device-memory", threading.Event()
    place.mkdir()
    for name in ("FLEXFLEET_CGROUP", "FLEXFLEET_PROC"):
        monkeypatch.setenv(name, str(place))

    def memory(mib: int) -> None:
        """What the machine reports from now on."""
        (place / "meminfo").write_text(f"MemAvailable: {mib * 1024} kB\n")

    sets = ("run.backend=agents", "agents.observe=cgroup", f"run.store={tmp_path}", "rounds.stop=2")
    resolved = Resolved.load(None, (*quick, *sets, "fleet.tiers=[{name: any, share: 1.0, memory: 200.0}]"))
    prepare(resolved, tmp_path)
    levels = PoolFile.read(tmp_path / "pool" / "pool.json").levels
    found = Peaks(100 * MIB, tuple(140 * MIB + int(60 * MIB * level.share) for level in levels))
    monkeypatch.setattr(step, "peaks_of", lambda *_: found)
    (invitation,) = enrollment.invite(resolved.config, None, 1, tmp_path)
    device, folder = device_of(str(invitation), tmp_path / "device")

    class Ending(WorkerMailbox):
        def read(self) -> Message:
            return sys.exit() if over.is_set() else super().read()

    server = Server(Ending(FolderStore(folder, 0o600), device, "00" * 8), lambda why: sys.exit())

    def live() -> None:
        with suppress(SystemExit):
            server.serve(3600.0, False)

    thread = threading.Thread(target=live, daemon=True)
    memory(900)
    thread.start()
    try:
        watcher: Any = SimpleNamespace(update=lambda *_: None, round=lambda number, *_: number == 1 and memory(60))
        out = step.federate(
            resolved, tmp_path / "partition", tmp_path / "pool", tmp_path / "a", Attempt(watcher=watcher)
        )
    finally:
        over.set()
        thread.join(30)
    assert not thread.is_alive()
    first, second = (row["clients"] for row in rounds_of(out.parent))
    assert first and all(line["trained"] == line["sent"] and line["free"] > 100 for line in first)
    assert second and all(line["free"] < 50 for line in second)
    assert any(line["trained"] != line["sent"] for line in second)


def test_resumed_run_must_observe_memory_in_the_same_way(quick: Sequence[str], tmp_path: Path) -> None:
    def config(*sets: str) -> Any:
        return Resolved.load(None, [*quick, "agents.observe=cgroup", *sets]).config

    began = config("run.backend=agents").model_dump(mode="json")
    sums = {"pool_sha256": "0" * 64, "partition_sha256": "1" * 64}
    RunFile(run_id="a", config=began, numerics={}, **sums).write(tmp_path / "run.json")
    (tmp_path / "history.json").touch()
    assert known_run(config("run.backend=agents"), tmp_path, resume=True) is not None
    with pytest.raises(ConfigError, match=r"run\.backend"):
        known_run(config(), tmp_path, resume=True)
