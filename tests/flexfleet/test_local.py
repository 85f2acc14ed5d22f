"""`partition.rule: local`: the same folders, simulated on one machine and each on a device of its own, end in the same
bits; a device sees nothing of others."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_engine.core.clients import LEASE_S
from fl_engine.core.errors import ClientError, IntegrityError
from fl_engine.data.local_data import FORM
from fl_engine.datasets import digits
from fl_engine.fleet.devices import fleet
from fl_engine.remote.messages import Lease
from fl_engine.storage.store import FolderStore
from fl_engine.testing.tiny import measured_alike
from flexfleet.api.results import load
from flexfleet.config import load_config
from flexfleet.files.artifacts import EvaluationFile, RunFile
from flexfleet.pipeline import enrollment, federate
from flexfleet.worker.execute import execute, prepare
from tests.harness.alike import run_of
from tests.harness.played import Act, Played, played_clock
from tests.harness.processes import refused
from tests.harness.run_folders import rounds_of

READER = '''
from pathlib import Path

import numpy as np

from fl_engine.core.samples import Data
from fl_engine.datasets import Source
from fl_engine.tasks import Classification
from tests.harness.processes import refused


def load(root: Path) -> Data:
    """The images in data.npz; normalised by their own mean."""
    parts = np.load(root / "data.npz")
    x, y = parts["x"], parts["y"]
    return Data("own", Classification(10), x, y, x[:20], y[:20], (float(x.mean() / 255),), (0.4,))


SOURCE = Source("images of a device", load, files=("data.npz",))
'''
SIZES = (40, 25, 60, 33, 18, 50)
"""Training samples of each client."""
SETS = (
    "dataset.name=own_reader:SOURCE", "partition.rule=local", "partition.clients=6", "pretrain.epochs=1",
    "training.fraction=0.5", "training.epochs=1", "rounds.stop=2", "tracking.mlflow=null", "evaluate.on=clients",
)  # fmt: skip


@pytest.fixture(autouse=True)
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_drawings: None) -> None:
    """server/ with the server's data, clients/d-1 to d-6 with theirs, and the reader."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_reader.py").write_text(READER)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = digits.load(Path())
    x, y, end = data.train_x.numpy(), data.train_y.numpy(), 150
    folders = {"server": (0, 150)}
    for client, size in enumerate(SIZES):
        folders[f"clients/d-{client + 1}"] = (end, end + size)
        end += size
    for name, (first, last) in folders.items():
        (tmp_path / name).mkdir(parents=True)
        np.savez(tmp_path / name / "data.npz", x=x[first:last], y=y[first:last])


def simulated(*more: str) -> list[str]:
    return [*SETS, "dataset.root=server", "partition.folders=clients", *more]


def tiers_of(sets: Sequence[str]) -> list[str]:
    """Return the tier of each client."""
    config = load_config(None, sets)
    return [device.tier for device in fleet(config.fleet.tiers, config.partition.clients, config.seed)]


def folders_in(path: Path) -> list[Path]:
    """Return the folder of each client."""
    return [path / "clients" / f"d-{client + 1}" for client in range(len(SIZES))]


class Reading(FolderStore):
    """Records which keys were read."""

    read: list[str] = []  # noqa: RUF012 - of all devices

    def get(self, key: str, limit: int | None = None) -> bytes:
        self.read.append(key)
        return super().get(key, limit)


@pytest.fixture
def on_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[Played]]:
    """Simulated devices for a run in this process; each reads its own folder, as `flexfleet agent` does."""
    clock, devices = played_clock(monkeypatch), list[Played]()

    def turn() -> bool:
        for device in devices:
            device.turn()
        return False

    @contextmanager
    def stops() -> Iterator[Callable[[], bool]]:
        yield turn

    monkeypatch.setattr(federate, "stop_on_signals", stops)

    def act_in(folder: Path) -> Act:
        def act(device: Played, lease: Lease, worked: float) -> None:
            given = lease.assignment
            assert given.store is not None
            store, site = Reading(given.store), device.message().site
            monkeypatch.setenv("FLEXFLEET_DATA", str(folder))
            execute(lease, device.key, site, store, prepare(given, store, pod=False), lambda taken: 0)
            monkeypatch.delenv("FLEXFLEET_DATA")
            device.done = lease.id

        return act

    def begin(sets: Sequence[str], tiers: Sequence[str], folders: Sequence[Path]) -> list[Played]:
        config = load_config(None, sets)
        mailboxes, registry = enrollment.mailboxes_of(config), enrollment.registry_of(config)
        for tier, folder in zip(tiers, folders, strict=True):
            devices.append(Played(mailboxes, mailboxes.invite(registry, tier, tier), clock, act_in(folder)))
        return devices

    return begin


def rows_of(run: Path) -> list[Any]:
    rows = rounds_of(run)
    kept = ("avg", "full", "accuracy", "loss", "on_clients", "bytes", "clients_", "simulated_", "train_loss")
    lines = [[measured_alike(line) for line in row["clients"]] for row in rows]
    metrics = [{k: v for k, v in row["metrics"].items() if k.startswith(kept)} for row in rows]
    return [metrics, lines]


def test_devices_with_own_data_give_the_bits_of_a_simulation(flexfleet: Any, tmp_path: Path, on_devices: Any) -> None:
    one = run_of(flexfleet, "one", simulated())
    two = run_of(flexfleet, "two", simulated("run.backend=processes", "run.devices=[cpu, cpu]"))
    sets = [*SETS, "dataset.root=server", "run.backend=agents"]
    played = on_devices(sets, tiers_of(sets), folders_in(tmp_path))
    Reading.read.clear()
    three = run_of(flexfleet, "three", sets)

    assert one["model_sha256"] == two["model_sha256"] == three["model_sha256"]
    runs = tmp_path / "runs"
    assert rows_of(runs / "one") == rows_of(runs / "two") == rows_of(runs / "three")
    assert one["metrics"] == three["metrics"] and one["metrics"]["on_clients"]["failed"] == 0
    assert "local" not in one["metrics"] and not EvaluationFile.read(runs / "one" / "evaluation.json").local
    told = [line for row in rounds_of(runs / "three") for line in row["clients"]]
    held_out = [max(2, round(size * 0.2)) for size in SIZES]
    assert {line["client"]: line["examples"] for line in told}.items() <= {
        client: size - out for client, (size, out) in enumerate(zip(SIZES, held_out, strict=True))
    }.items(), "what a client says it trained on"

    assert flexfleet("trace", "runs/three", "--json").json["clients"] == len({line["client"] for line in told})
    run_of(flexfleet, "four", simulated("fleet.trace=trace.csv"))
    for line, again in zip(told, (c for row in rounds_of(runs / "four") for c in row["clients"]), strict=True):
        assert again["seconds_simulated"] == pytest.approx(max(line["seconds"], line[LEASE_S])), "with the transfers"

    clients = json.loads((runs / "three" / "site" / "devices.json").read_text())["clients"]
    assert clients == {device.name: client for client, device in enumerate(played)}
    for client, device in enumerate(played):
        assert {*device.taken} == {(client,)}, "an order goes only to the device that is its client"
    assert f"site/{FORM}" in Reading.read and not [key for key in Reading.read if "partition" in key]
    assert not (runs / "three" / "site" / "partition.json").exists()
    form = json.loads((runs / "three" / "site" / FORM).read_text())
    mean = np.load(tmp_path / "server" / "data.npz")["x"].mean() / 255
    assert form["mean"] == [pytest.approx(mean)]
    assert set(form) == {"schema_version", "shape", "dtype", "task", "mean", "std"}


def test_simulation_resumes_with_the_same_data_only(flexfleet: Any, tmp_path: Path) -> None:
    run_of(flexfleet, "a", simulated("rounds.stop=1"))
    run, folder = load(tmp_path / "runs" / "a"), folders_in(tmp_path)[1] / "data.npz"
    client = rounds_of(run.folder)[0]["clients"][0]["client"]
    run.replay(1, client)
    parts = np.load(folder)
    np.savez(folder, x=255 - parts["x"], y=parts["y"])
    assert flexfleet("run", "--run-id", "a", "--resume", sets=simulated("rounds.stop=2")).code == 4
    with pytest.raises(IntegrityError):
        run.replay(1, client)


def test_liar_among_devices_is_rejected_by_default(flexfleet: Any, tmp_path: Path, on_devices: Any) -> None:
    """One of six devices sends 90 times its change. In a simulation its update is merged."""
    sets = [*SETS, "dataset.root=server", "algorithm.name=heterofl", "training.fraction=1.0", "evaluate.on=server"]
    sets += ["rounds.faults='scale=0.167x90,always'"]
    there = [*sets, "run.backend=agents", "agents.wait_s=60"]
    on_devices(there, tiers_of(there), folders_in(tmp_path))
    refused, ends = {}, {"here": [*sets, "partition.folders=clients"], "there": there}
    for name, wanted in ends.items():
        run_of(flexfleet, name, wanted)
        lines = [line for row in rounds_of(tmp_path / "runs" / name) for line in row["clients"]]
        refused[name] = [line["client"] for line in lines if "rounds.norm_bound" in line.get("failure", "")]
    assert refused["here"] == [] and len(refused["there"]) == 2 and len(set(refused["there"])) == 1
    bounds = [RunFile.read(tmp_path / "runs" / name / "run.json").config["rounds"]["norm_bound"] for name in ends]
    assert bounds == [None, 5.0]


def test_absent_device_is_a_failure_of_its_client(flexfleet: Any, tmp_path: Path, on_devices: Any) -> None:
    sets = [*SETS, "dataset.root=server", "run.backend=agents", "agents.wait_s=30", "training.fraction=1.0"]
    sets += ["rounds.stop=1", "algorithm.name=heterofl"]
    played = on_devices(sets, tiers_of(sets), folders_in(tmp_path))
    played[3].there = False
    run_of(flexfleet, "a", sets)
    (row,) = rounds_of(tmp_path / "runs" / "a")
    failed = {line["client"]: line["failure"] for line in row["clients"] if "failure" in line}
    assert failed.keys() == {3} and "with the client's data" in failed[3] and failed[3].startswith("pod")
    assert row["metrics"]["on_clients/failed"] == 1


def test_device_without_own_data_does_not_read_the_servers(
    flexfleet: Any, tmp_path: Path, on_devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = [*SETS, "dataset.root=server", "run.backend=agents", "agents.wait_s=30", "agents.attempts=1"]
    said: list[str] = []

    def act(device: Played, lease: Lease, worked: float) -> None:
        assert lease.assignment.store is not None and "FLEXFLEET_DATA" not in os.environ
        with pytest.raises(ClientError, match="FLEXFLEET_DATA") as error:
            prepare(lease.assignment, FolderStore(lease.assignment.store), pod=False)
        said.append(str(error.value))
        device.done = lease.id
        device.beat("failed", lease.id, error=str(error.value))

    monkeypatch.delenv("FLEXFLEET_DATA", raising=False)
    for device in on_devices(sets, tiers_of(sets), [tmp_path] * 6):
        device.act = act
    flexfleet("run", "--run-id", "a", sets=[*sets, "rounds.stop=1"])
    assert said


@pytest.mark.parametrize(
    "setting",
    [
        "partition.folders=null", "run.backend=kubernetes", "partition.clients=5", "partition.most=59",
        "algorithm.name=fedsgd", "partition.rule=iid",
    ],
)  # fmt: skip
def test_settings_that_need_the_clients_data_are_refused(flexfleet: Any, setting: str) -> None:
    assert flexfleet("check", sets=simulated(setting)).code == 2


def test_invalid_data_of_a_device_is_named(flexfleet: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "clients" / "d-2" / "data.npz", x=np.zeros((3, 1, 8, 8), np.uint8), y=np.arange(9, 12))
    assert "clients/d-2" in refused(flexfleet("check", sets=simulated()))
    (tmp_path / "clients" / "d-2" / "data.npz").write_text("half written")
    assert refused(flexfleet("check", sets=simulated())).count("clients/d-2") == 1
