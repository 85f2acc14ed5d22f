"""Real devices' processes, killed, hung and cut off in the middle of an order: the model is that of one process."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3.session
import pytest
import torch

from fl_engine.remote.messages import Heartbeat, Invitation, Message
from fl_engine.storage.store import FolderStore, Store
from tests.harness.moto_server import moto
from tests.harness.processes import until
from tests.harness.way import Way

SLOW = {"slow": 30.0}
"""Each client takes longer to train than it must, so that an order can be met half-way."""
LEASE = ("agents.lease_s=3", "agents.attempts=100", "rounds.stop=3")
PATIENCE_S = 120.0


@dataclass
class Scene:
    """A run's folder and its devices."""

    fork_server: Any
    cwd: Path
    sets: list[str]
    mailboxes: Store
    env: dict[str, str] = field(default_factory=dict)
    devices: dict[str, Any] = field(default_factory=dict)
    others: list[Any] = field(default_factory=list)

    def flexfleet(self, *argv: str, sets: Sequence[str] = ()) -> Any:
        child = self.fork_server.start("flexfleet", *argv, cwd=self.cwd, sets=sets, env=self.env)
        self.others.append(child)
        return child

    def invite(self, *argv: str) -> list[Path]:
        done = self.flexfleet("invite", "--json", *argv, sets=self.sets).wait(PATIENCE_S).ok()
        return [self.cwd / name for name in done.json["invitations"]]

    def agent(self, invitation: Path, *argv: str) -> Any:
        name = Invitation.of(invitation.read_bytes(), "").name
        given = ("agent", "--invite", str(invitation), "--folder", str(self.cwd / f"device-{name}"), *argv)
        # A device has no credentials, whatever the server has.
        gone = {variable: "" for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL")}
        self.devices[name] = self.fork_server.start("flexfleet", *given, cwd=self.cwd, env=gone, faults=SLOW)
        return self.devices[name]

    def run(self, *argv: str) -> Any:
        sets = [*self.sets, *LEASE, "run.backend=agents"]
        return self.flexfleet("run", "-v", "--json", "--run-id", "a", *argv, sets=sets)

    def expected(self, device: str = "cpu") -> str:
        sets = [*self.sets, *LEASE, f"run.devices=[{device}]"]
        done = self.flexfleet("run", "--json", "--run-id", f"one-{device}", sets=sets).wait(PATIENCE_S).ok()
        return str(done.json["model_sha256"])

    def message(self, name: str) -> Message:
        return Message.model_validate_json(self.mailboxes.get(f"{name}/message.json"))

    def at_work(self) -> str | None:
        """Return a device that executes an assignment."""
        for name in self.devices:
            with suppress(Exception):
                heartbeat = Heartbeat.model_validate_json(self.mailboxes.get(f"{name}/heartbeat.json"))
                lease = self.message(name).lease
                if heartbeat.state == "working" and lease is not None and heartbeat.lease == lease.id:
                    return name
        return None

    def close(self) -> None:
        for child in (*self.devices.values(), *self.others):
            child.send(signal.SIGCONT)
            child.kill()
            child.wait()


@pytest.fixture
def scene(fork_server: Any, quick: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    found = Scene(fork_server, tmp_path, list(quick), FolderStore(tmp_path / "runs" / ".agents"))
    with closing(found):
        yield found


def finished(run: Any) -> dict[str, Any]:
    return dict(run.wait(PATIENCE_S).ok().json)


def test_killed_and_hung_devices_give_the_bits_of_one_process(scene: Scene) -> None:
    expected = scene.expected()
    for invitation in scene.invite("--count", "3"):
        scene.agent(invitation)
    run = scene.run()
    killed = until(scene.at_work, "an assignment at work")
    scene.devices.pop(killed).kill()
    hung = until(scene.at_work, "another order at work")
    before = scene.message(hung).lease
    assert before is not None
    scene.devices[hung].send(signal.SIGSTOP)
    until(lambda: f"{hung} has sent no heartbeat for" in run.err, "the end of the hung device's lease")
    scene.devices[hung].send(signal.SIGCONT)  # its late answer goes to a place that nobody looks at
    assert finished(run)["model_sha256"] == expected
    assert f"{killed} has sent no heartbeat for" in run.err
    left = [p for p in (scene.cwd / "runs" / "a" / "rounds").rglob("*") if p.is_file() and before.id in p.parts]
    assert not left or {p.parent.name for p in left} == {before.id}, "the late answer replaced nothing"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_devices_with_a_gpu_give_the_bits_of_one_process(scene: Scene) -> None:
    scene.sets.append("algorithm.use_apoz=false")
    for invitation in scene.invite("--count", "3"):
        scene.agent(invitation, "--device", "cuda")
    found = finished(scene.run())["model_sha256"]
    assert found == scene.expected("cuda") != scene.expected()


def test_revoked_device_ends_and_the_others_continue(scene: Scene) -> None:
    expected = scene.expected()
    for invitation in scene.invite("--count", "2"):
        scene.agent(invitation)
    run = scene.run()
    revoked = until(scene.at_work, "an assignment at work")
    scene.flexfleet("invite", "--revoke", revoked, sets=scene.sets).wait(PATIENCE_S).ok()
    assert finished(run)["model_sha256"] == expected
    ended = scene.devices.pop(revoked).wait(PATIENCE_S)
    assert ended.code == 42 and "was revoked" in ended.err
    told = scene.flexfleet("status", "--json", sets=scene.sets).wait(PATIENCE_S).json["agents"]
    (other,) = told
    assert other["name"] in scene.devices and other["answers"] >= 1 and other["last"].startswith("a, round ")


def test_restarted_device_continues_with_assignments(scene: Scene) -> None:
    """It is the only device, so the run waits for it. SIGTERM ends its lease at once."""
    (invitation,) = scene.invite("--tier", "weak")
    sets = ["fleet.tiers=[{name: weak, share: 1.0, memory: 100.0, sigma: [0.0]}]"]
    scene.sets += sets
    expected = scene.expected()
    scene.agent(invitation)
    run = scene.run()
    name = until(scene.at_work, "an assignment at work")
    scene.devices[name].send(signal.SIGTERM)
    assert scene.devices.pop(name).wait(PATIENCE_S).code == 143
    until(lambda: f"{name} has ended" in run.err, "the order's return")
    scene.agent(invitation)
    assert finished(run)["model_sha256"] == expected


# ------------------------------------------------------------------------------------------- over the network
@pytest.fixture
def bucket() -> Iterator[tuple[Any, tuple[str, int], dict[str, str]]]:
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    with moto() as endpoint:
        s3 = boto3.session.Session("k", "s", region_name="us-east-1").client("s3", endpoint_url=endpoint)
        s3.create_bucket(Bucket="runs")
        env = {"AWS_ENDPOINT_URL": endpoint, "FLEXFLEET_S3_UNCHECKED": "1", **keys}
        url = urlsplit(endpoint)
        yield s3, (url.hostname, url.port), env


@pytest.mark.parametrize("comes_back", [False, True])
def test_device_cut_off_during_an_assignment_changes_no_bit(
    fork_server: Any,
    quick: Sequence[str],
    tmp_path: Path,
    bucket: Any,
    monkeypatch: pytest.MonkeyPatch,
    comes_back: bool,
) -> None:
    """The device has URLs only. Another device executes its assignment. If it returns, it gets other assignments,
    and its late results change nothing."""
    from fl_engine.storage.s3 import S3Store

    s3, address, env = bucket
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with ExitStack() as opened:
        devices: dict[str, Any] = {}
        way = opened.enter_context(closing(Way(address, lambda: [child.pid for child in list(devices.values())])))
        place = tmp_path.name  # the server of another case may have the same bucket
        sets = [*quick, f"run.remote=s3://runs/{place}", f"agents.endpoint={way.url}"]
        mailboxes = S3Store(f"s3://runs/{place}/.agents")
        scene = opened.enter_context(closing(Scene(fork_server, tmp_path, sets, mailboxes, env, devices)))
        files = scene.invite("--count", "2")
        for file in files:
            text = file.read_text()
            told = json.loads(text)
            assert told["folder"] is None and told["message"].startswith(way.url), "URLs alone"
            assert "AWS_SECRET" not in text and '"s"' not in text
            assert file.stat().st_mode & 0o777 == 0o600
            scene.agent(file)
        scene.sets = [each for each in sets if not each.startswith("run.remote")]
        expected = scene.expected()
        scene.sets = sets
        run = scene.run()
        name = until(scene.at_work, "an assignment at work")
        lost = scene.message(name).lease
        assert lost is not None
        way.cut_off(scene.devices[name].pid)
        until(lambda: f"{name} has sent no heartbeat for" in run.err, "the end of the lease")
        if comes_back:
            way.let_back(scene.devices[name].pid)
            until(lambda: scene.message(name).lease not in (None, lost), "an order for the device that is back")
        assert finished(run)["model_sha256"] == expected
        keys = [item["Key"] for item in s3.list_objects_v2(Bucket="runs", Prefix=f"{place}/")["Contents"]]
        late = [key for key in keys if comes_back and lost.id in key.split("/")]  # may come after the run's end
        assert not [key for key in keys if key not in late and ("/updates/" in key or key.endswith("secret/key"))]
