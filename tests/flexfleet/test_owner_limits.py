"""Limits of a device's owner: hours, bytes and epochs, and how the coordinator handles a device that is paused."""

from __future__ import annotations

import argparse
import errno
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ClientError, TooLarge
from fl_engine.core.types import ClientUpdate
from fl_engine.remote.messages import Lease
from fl_engine.storage.store import FolderStore
from flexfleet.files.owner_limits import FILE, Limits
from flexfleet.files.terminal import expected
from tests.harness.played import Played, Scenes, scene_of  # noqa: F401 - a fixture
from tests.harness.stores import MemoryStore


def limits_of(folder: Path, **options: Any) -> Limits:
    return Limits(FolderStore(folder), argparse.Namespace(**options))


@pytest.mark.parametrize(
    "option", ["--hours=6-6", "--hours=22-25", "--hours=night", "--mb-per-day=0", "--mb-per-day=nan", "--epochs=0"]
)
def test_limit_out_of_range_is_refused(flexfleet: Callable[..., Any], option: str) -> None:
    done = flexfleet("agent", "--invite=x", option)
    assert done.code == 2 and option.partition("=")[0] in done.err


def test_hours_are_local_and_may_include_midnight(tmp_path: Path) -> None:
    hour = time.localtime().tm_hour
    for start, end, is_open in ((-1, 2, True), (1, 23, False), (3, 5, False), (-3, -2, False)):
        hours = f"{(hour + start) % 24}-{(hour + end) % 24}"
        assert (limits_of(tmp_path, hours=hours).closed() == "") == is_open


def test_bytes_are_counted_across_restarts(tmp_path: Path) -> None:
    store, limits = MemoryStore(), limits_of(tmp_path, mb_per_day=1)
    counted = limits.counted(store)
    counted.put("a", bytes(300_000))
    counted.get("a")
    limits.save()
    again = limits_of(tmp_path, mb_per_day=1)
    assert again.left() == 400_000 and not again.closed()
    again.need = 500_000
    assert again.closed()


def test_assignment_never_exceeds_the_bytes_of_the_day(tmp_path: Path) -> None:
    store, limits = MemoryStore({"small": bytes(400_000), "large": bytes(700_000)}), limits_of(tmp_path, mb_per_day=1)
    bounded = limits.counted(store, bounded=True)
    with pytest.raises(TooLarge):  # the limit of the assignment itself
        bounded.get("small", 10)
    bounded.get("small")
    with pytest.raises(ClientError):
        bounded.put("result", bytes(700_000))
    assert "result" not in store.files and limits.left() == 600_000
    with pytest.raises(ClientError):
        bounded.get("large")
    assert limits.closed()


def test_bytes_of_the_day_before_are_forgotten(tmp_path: Path) -> None:
    hour = int(time.time() // 3600)
    FolderStore(tmp_path).put(FILE, json.dumps({hour - 25: 9, hour - 2: 5, hour + 1000: 9}).encode())
    assert limits_of(tmp_path, mb_per_day=1).left() == 1_000_000 - 5


def test_device_reports_the_pause_once(tmp_path: Path) -> None:
    class Opening(Limits):
        reasons = ["night", ""] * 2

        def closed(self) -> str:
            return self.reasons.pop(0)

    limits, reported = Opening(), list[str]()
    assert limits.wait(reported.append) and reported == ["night"]


@pytest.mark.parametrize("has_started", [True, False])
def test_assignment_of_a_paused_device_goes_to_another(scene_of: Scenes, has_started: bool) -> None:  # noqa: F811
    """Although a single failed attempt would be the client's last."""

    def pauses(worker: Played, lease: Lease, worked: float) -> None:
        worker.done = lease.id
        worker.beat("paused", lease.id, "outside of its hours")

    scene = scene_of(1, attempts=1)
    paused = scene.worker(pauses, takes=has_started)
    scene.worker(scene.honest(), there=False)
    scene.between = lambda: setattr(scene.workers[1], "there", True) or scene.workers[1].beat("idle")
    assert scene.updates() == 1 and len(paused.leases) <= 1


def test_device_that_pauses_each_assignment_fails_it(scene_of: Scenes) -> None:  # noqa: F811
    """The claim cannot delay a round without end."""

    def flips(worker: Played, lease: Lease, worked: float) -> None:
        worker.done = lease.id
        worker.beat("paused", lease.id)
        scene.between = lambda: worker.beat("idle")

    scene = scene_of(1, attempts=2)
    device = scene.worker(flips)
    assert not isinstance(scene.results()[0], ClientUpdate) and len(device.leases) < 10


def test_full_folder_of_temporary_files_is_named() -> None:
    full = errno.ENOSPC, os.strerror(errno.ENOSPC)
    assert tempfile.gettempdir() in str(expected(OSError(*full)))
    assert str(expected(OSError(*full, "/elsewhere/file"))).startswith("/elsewhere/file")
