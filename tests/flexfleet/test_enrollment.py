"""Invitations, and the devices that `flexfleet status` lists."""

from __future__ import annotations

import stat
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError
from fl_engine.remote.messages import HEARTBEAT, Heartbeat, Invitation, enrolled_key
from fl_engine.storage.store import FolderStore
from fl_engine.storage.urls import Upload
from flexfleet.cli.main import dispatch as main
from flexfleet.config import parse
from flexfleet.pipeline import enrollment
from flexfleet.worker.mailbox import FILE, device_of

ID = "1d" * 16


def sets(tmp_path: Path, *more: str) -> list[str]:
    return [part for each in (f"run.store={tmp_path / 'runs'}", *more) for part in ("--set", each)]


@pytest.fixture
def invited(tmp_path: Path, capsys: Any) -> Invitation:
    main(["invite", "--out", str(tmp_path / "out"), *sets(tmp_path)])
    capsys.readouterr()
    return Invitation.of((tmp_path / "out" / "device-1.json").read_bytes(), "")


def beat(invited: Invitation, key: str | None = None, **told: Any) -> None:
    heartbeat = Heartbeat(name=invited.name, worker="ab" * 8, number=1, **{"id": ID, "state": "idle", **told})
    signed = heartbeat.signed(key or enrolled_key(invited.key, heartbeat.id))
    FolderStore(Path(str(invited.folder))).put(HEARTBEAT, signed.text())


def row(tmp_path: Path) -> dict[str, Any]:
    (found,) = enrollment.status(parse({"run": {"store": str(tmp_path / "runs")}}))
    return found


def test_folders_with_keys_are_readable_by_their_owner_only(tmp_path: Path, invited: Invitation) -> None:
    for folder in (enrollment.MAILBOXES, enrollment.REGISTRY):
        assert stat.S_IMODE((tmp_path / "runs" / folder).stat().st_mode) == 0o700


def test_device_without_a_written_invitation_is_not_invited(tmp_path: Path) -> None:
    config, out = parse({"run": {"store": str(tmp_path / "runs")}}), tmp_path / "out"
    out.mkdir()
    (out / "device-2.json").touch()
    with pytest.raises(ConfigError):
        enrollment.invite(config, None, 3, out)
    assert enrollment.registry_of(config).names() == ["device-1"]


@pytest.mark.parametrize("hours", [-5, 5])
def test_status_shows_a_failed_device_and_its_wrong_clock(
    tmp_path: Path, capsys: Any, invited: Invitation, hours: int
) -> None:
    assert row(tmp_path)["state"] == "never seen"
    at = int(time.time()) + hours * 3600
    beat(invited, state="failed", error="no data here", at=at)
    assert main(["status", *sets(tmp_path)]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert "failed" in line and datetime.fromtimestamp(at, timezone.utc).isoformat() in line and "no data here" in line


@pytest.mark.parametrize("who", ["with another key", "second"])
def test_status_shows_a_device_that_is_not_obeyed(tmp_path: Path, invited: Invitation, who: str) -> None:
    if who == "second":
        registry = enrollment.registry_of(parse({"run": {"store": str(tmp_path / "runs")}}))
        registry.put(registry.member(invited.name).model_copy(update={"id": ID}))
        beat(invited, id="2d" * 16)
    else:
        beat(invited, "cd" * 32)
    assert row(tmp_path)["state"] == "unknown" and row(tmp_path)["said"]


@pytest.mark.parametrize("address", ["http://s3.example/message", "https://[s3.example/message"])
def test_invitation_with_a_wrong_address_is_not_stored(tmp_path: Path, invited: Invitation, address: str) -> None:
    file, folder = tmp_path / "device-1.json", tmp_path / "device"
    heartbeat = Upload(verb="PUT", url="https://s3.example/heartbeat", fields={}, size=9)
    wrong = {"folder": None, "message": address, "heartbeat": heartbeat}
    file.write_text(invited.model_copy(update=wrong).model_dump_json())
    with pytest.raises(ConfigError):
        main(["agent", "--invite", str(file), "--folder", str(folder)])
    assert not (folder / FILE).exists()


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no /dev/zero")
def test_oversized_invitation_is_not_read_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "long.json"
    with open(file, "wb") as opened:
        opened.truncate(2**40)
    for each in ("/dev/zero", str(file)):
        with pytest.raises(ConfigError):
            device_of(each, tmp_path / "device")
