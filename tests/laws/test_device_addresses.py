"""A device calls its own store and no other address, whatever its coordinator sends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError, EnvironmentFailure
from fl_engine.remote.messages import (
    HEARTBEAT_BYTES,
    AssignmentMessage,
    Heartbeat,
    Invitation,
    Lease,
    Message,
    check_own,
    enrolled_key,
)
from fl_engine.storage.urls import Upload
from flexfleet.worker import server
from flexfleet.worker.__main__ import main
from flexfleet.worker.mailbox import FILE, WorkerDevice
from tests.harness.web import serving_values

KEY, ID, PROCESS = "0b" * 32, "1d" * 16, "00" * 8


def heartbeat_at(url: str) -> Upload:
    return Upload(verb="PUT", url=f"{url}/heartbeat", fields={}, size=HEARTBEAT_BYTES)


def lease(url: str, **lie: Any) -> Lease:
    files = ("run.json", "pool.json")
    reads, site = {f"site/{name}": f"{url}/site/{name}" for name in files}, dict.fromkeys(files, f"{'0' * 64}:9")
    told = AssignmentMessage(round=0, clients=(3,), **{"reads": reads, "site": site, **lie})
    return Lease(id="1f" * 8, seconds=60, assignment=told)


LIES: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "the next message": lambda own, evil: {"message": f"{evil}/message"},
    "the heartbeat": lambda own, evil: {"heartbeat": heartbeat_at(evil)},
    "a download": lambda own, evil: {"lease": lease(evil)},
    "a download without a port": lambda own, evil: {"lease": lease("http://127.0.0.1")},
    "an upload": lambda own, evil: {"lease": lease(own, writes={"rounds/00000/updates/3.json": heartbeat_at(evil)})},
    "a store": lambda own, evil: {"lease": lease(own, store="s3://evil/runs")},
    "a folder": lambda own, evil: {"lease": lease(own, store="/etc")},
    "a redirect": lambda own, evil: {"lease": lease(own)},
}


@pytest.mark.parametrize("lie", LIES)
def test_device_calls_no_other_server_than_its_store(lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SILENCE_S", 0.5)
    with serving_values() as own, serving_values() as evil:
        env = {"ENDPOINT_URL": evil.url, "ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "k"}
        for name, value in {**{f"AWS_{name}": value for name, value in env.items()}, server.PROCESS: PROCESS}.items():
            monkeypatch.setenv(name, value)
        own.elsewhere = f"{evil.url}/site/run.json"
        at: dict[str, Any] = {"message": f"{own.url}/message", "heartbeat": heartbeat_at(own.url)}
        (tmp_path / "invitation").write_text(Invitation(name="weak-1", key=KEY, tier=None, **at).model_dump_json())
        (tmp_path / FILE).write_text(
            WorkerDevice(name="weak-1", id=ID, invited=KEY, folder=None, **at).model_dump_json()
        )
        message = Message(name="weak-1", number=0, worker=PROCESS, **{**at, **LIES[lie](own.url, evil.url)})
        own.files["message"] = message.signed(enrolled_key(KEY, ID)).text()
        with nullcontext() if message.lease is None else pytest.raises(EnvironmentFailure):
            assert main(["--once", f"--invite={tmp_path / 'invitation'}", f"--folder={tmp_path}"]) == 0
    assert evil.asked == [] and "message" in own.asked
    assert any("site" in path for path in own.asked) == (lie == "a redirect")
    assert Heartbeat.model_validate_json(own.files["heartbeat"]).state == "gone"


@pytest.mark.parametrize("other", ["https://evil.example", "http://s3.example", "https://s3.example:8443"])
def test_invitation_names_one_server(other: str) -> None:
    good, bad = heartbeat_at("https://s3.example"), heartbeat_at(other)
    invited = Invitation(name="a", key=KEY, tier=None, message="https://s3.example:443/a", heartbeat=good)
    assert Invitation.of(invited.model_dump_json().encode(), "it") == invited
    with pytest.raises(ConfigError):
        Invitation.of(invited.model_copy(update={"heartbeat": bad}).model_dump_json().encode(), "it")


@pytest.mark.parametrize("folder", ["/home/pi/läufe/.agents/weak-1", "s3://bucket/some/prefix/.agents/weak-1"])
def test_device_with_a_folder_stays_in_its_place(folder: str) -> None:
    place = folder.removesuffix("/.agents/weak-1")
    for own in (place, f"{place}/run", f"{place}/compared/run-s0", f"{place}/.agents/lease"):
        check_own(own, None, folder)
    for other in (f"{place}2/run", f"{place}/../other", "s3://bucket/other", "https://evil.example", "/etc", ""):
        with pytest.raises(ConfigError):
            check_own(other, None, folder)
