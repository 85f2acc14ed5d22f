"""Invitations and the list of who is there, as the server's commands give them."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError, EnvironmentFailure
from fl_engine.exchange.letters import BEAT, Beat, Invitation
from fl_engine.storage.store import FolderStore
from fl_engine.storage.urls import Upload
from flexfleet.cli import dispatch as main
from flexfleet.cli import parser
from flexfleet.config import parse
from flexfleet.steps import invitations
from flexfleet.steps.agent_line import known_of


def sets(tmp_path: Path, *more: str) -> list[str]:
    return [part for each in (f"run.store={tmp_path / 'runs'}", *more) for part in ("--set", each)]


def test_folders_with_keys_are_the_owner_s_alone(tmp_path: Path) -> None:
    main(["invite", "--out", str(tmp_path / "out"), *sets(tmp_path)])
    for folder in (".agents", ".invited"):
        assert stat.S_IMODE((tmp_path / "runs" / folder).stat().st_mode) == 0o700


def test_git_does_not_take_invitations_with_it() -> None:
    """Each holds the key of a device, and `git add` in a checkout takes whatever is not ignored."""
    out = parser().parse_args(["invite"]).out
    assert f"/{out}/" in (Path(__file__).parents[2] / ".gitignore").read_text().split()


def test_a_file_is_no_folder_for_invitations(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ConfigError, match=r"--out names a folder .*/out is a file: name another one"):
        invitations.invite(parse({"run": {"store": str(tmp_path / "runs")}}), None, 1, tmp_path / "out")


@pytest.mark.parametrize("when", ["opened", "written"])
def test_a_device_whose_invitation_cannot_be_written_is_not_invited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    config, out, opening = parse({"run": {"store": str(tmp_path / "runs")}}), tmp_path / "out", os.open

    def full(path: Any, flags: int, *more: Any) -> int:
        if Path(path) != out / "device-2.json":
            return opening(path, flags, *more)
        if when == "opened":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        os.close(opening(path, flags, *more))
        return opening("/dev/full", os.O_WRONLY)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left on device"):
        patch.setattr(invitations.os, "open", full)
        invitations.invite(config, None, 3, out)
    assert [path.name for path in out.iterdir()] == ["device-1.json"]
    assert invitations.roster_of(config).names() == ["device-1"]


def test_status_lists_runs_whatever_becomes_of_the_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: Any
) -> None:
    def refused(*_: Any) -> None:
        raise EnvironmentFailure("no access")

    monkeypatch.setattr(invitations, "told", refused)
    assert main(["status", *sets(tmp_path)]) == 0
    assert "holds no run yet" in capsys.readouterr().out
    assert "which devices are invited cannot be said: no access" in caplog.text
    assert main(["status", "--json", *sets(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == {"runs": []}


def test_status_says_once_that_a_device_was_never_seen(tmp_path: Path, capsys: Any) -> None:
    main(["invite", "--out", str(tmp_path / "out"), *sets(tmp_path)])
    capsys.readouterr()
    assert main(["status", *sets(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(" never seen  0 answered, 0 lost")


@pytest.mark.parametrize("hours", [-5, 5])
def test_status_shows_a_device_s_clock_that_goes_wrong_and_why_it_has_failed(
    tmp_path: Path, capsys: Any, hours: int
) -> None:
    """One that is ahead would be seen just now, however long the device is dead."""
    main(["invite", "--out", str(tmp_path / "out"), *sets(tmp_path)])
    invited = Invitation.of((tmp_path / "out" / "device-1.json").read_bytes(), "")
    at = int(time.time()) + hours * 3600
    beat = Beat(name=invited.name, boot="ab" * 8, number=1, state="failed", said="no data here", at=at)
    FolderStore(Path(str(invited.folder))).put(BEAT, beat.signed(invited.key).text())
    capsys.readouterr()
    assert main(["status", *sets(tmp_path)]) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert f"failed     seen {datetime.fromtimestamp(at, timezone.utc).isoformat()}" in told
    assert told.endswith("0 answered, 0 lost: no data here")


def test_status_says_that_a_device_signs_with_another_key(tmp_path: Path, capsys: Any) -> None:
    """It has lost its folder, say, and begins again with the key of its invitation."""
    main(["invite", "--out", str(tmp_path / "out"), *sets(tmp_path)])
    invited = Invitation.of((tmp_path / "out" / "device-1.json").read_bytes(), "")
    beat = Beat(name=invited.name, boot="ab" * 8, number=1, state="gone").signed("cd" * 32)
    FolderStore(Path(str(invited.folder))).put(BEAT, beat.text())
    capsys.readouterr()
    assert main(["status", *sets(tmp_path)]) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert "unknown" in told and told.endswith(
        "is not signed with its key; a device that has lost its folder needs another invitation"
    )


def test_status_does_not_wait_for_a_server_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """One that takes the connection and says nothing."""
    main(["invite", "--out", str(tmp_path / "out"), *sets(tmp_path)])
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "k")
    monkeypatch.setattr("fl_engine.storage.s3.HASTY_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        started = time.monotonic()
        assert main(["status", *sets(tmp_path, "run.remote=s3://runs/x")]) == 0
    assert time.monotonic() - started < 10
    assert "which devices are invited cannot be said" in caplog.text


def test_devices_train_on_their_processor_and_a_configuration_says_nothing_else() -> None:
    assert parse({"run": {"backend": "agents", "devices": ["cpu", "cpu"]}}).run.apart
    with pytest.raises(ConfigError, match=r"run\.devices = \['cuda:0'\] cannot be with run\.backend=agents"):
        parse({"run": {"backend": "agents", "devices": ["cuda:0"]}})


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://s3.example/letter", "is no https address"),
        ("https://[s3.example/letter", r"not an address \(Invalid IPv6 URL\)"),
    ],
)
def test_an_address_that_no_letter_may_come_from_is_not_remembered(tmp_path: Path, address: str, said: str) -> None:
    """The device would go on with it when the invitation has been mended."""
    main(["invite", "--out", str(tmp_path), *sets(tmp_path)])
    file, folder = tmp_path / "device-1.json", tmp_path / "device"
    beat = Upload(verb="PUT", url="https://s3.example/beat", fields={}, size=9)
    to = {"folder": None, "letter": address, "beat": beat}
    file.write_text(Invitation.of(file.read_bytes(), file.name).model_copy(update=to).model_dump_json())
    with pytest.raises(ConfigError, match=rf"device-1\.json: .*{said}"):
        main(["agent", "--invite", str(file), "--folder", str(folder), "--silence", "0.1"])
    assert not (folder / "agent.json").exists()


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no /dev/zero")
def test_no_more_is_read_of_an_invitation_than_one_can_have(tmp_path: Path) -> None:
    file = tmp_path / "long.json"
    with open(file, "wb") as opened:
        opened.truncate(2**40)
    for each in ("/dev/zero", str(file)):
        with pytest.raises(ConfigError, match="is no invitation"):
            known_of(each, tmp_path / "device")
