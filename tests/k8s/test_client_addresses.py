"""What a client does with a configuration that names addresses besides its store."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ClientError
from fl_engine.exchange.assignment import Assignment
from fl_engine.storage.store import MemoryStore
from fl_engine.storage.sums import sum_of
from flexfleet.steps.answer import prepared


@dataclass
class Listener:
    """Counts who connects to it, and hangs up."""

    address: str
    connections: list[object] = field(default_factory=list)


@pytest.fixture
def evil() -> Iterator[Listener]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = Listener(f"127.0.0.1:{server.getsockname()[1]}")

        def listen() -> None:
            while True:
                try:
                    connection, peer = server.accept()
                except OSError:
                    return
                found.connections.append(peer)
                connection.close()

        threading.Thread(target=listen, daemon=True).start()
        yield found
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def told(
    quick_cluster: Any, rounds: Callable[..., Path], remote: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> Assignment:
    """The assignment of a client of a finished run."""
    seen: list[Assignment] = []
    read = Assignment.read

    def noted(path: Path) -> Assignment:
        seen.append(read(path))
        return seen[-1]

    monkeypatch.setattr(Assignment, "read", staticmethod(noted))
    rounds("a", *remote)
    monkeypatch.delenv("FLEXFLEET_DATA", raising=False)
    return seen[0]


def lied(told: Assignment, lies: dict[str, dict[str, Any]]) -> tuple[Assignment, MemoryStore]:
    """What a coordinator sends that has written `lies` into the configuration of its run."""
    store, honest = MemoryStore(), told.open()
    for name in told.site:
        store.put(f"site/{name}", honest.get(f"site/{name}"))
    run = json.loads(store.get("site/run.json"))
    for section, values in lies.items():
        run["config"][section] |= values
    value = json.dumps(run).encode()
    store.put("site/run.json", value)
    return told.model_copy(update={"site": {**told.site, "run.json": sum_of(value)}}), store


def test_client_fetches_no_data_that_the_coordinator_names(
    told: Assignment, evil: Listener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pointer = tmp_path / "data.dvc"
    pointer.write_text("outs: [{md5: 0123456789abcdef0123456789abcdef, path: data}]")
    for root in (f"http://{evil.address}/repo@main:data", f"git://{evil.address}/repo@main:data", str(pointer)):
        assignment, store = lied(told, {"dataset": {"root": root}})
        with pytest.raises(ClientError) as refused:
            prepared(assignment, store)
        assert str(refused.value).startswith("dataset.root = ")
        monkeypatch.setenv("FLEXFLEET_DATA", str(tmp_path))
        prepared(assignment, store)  # the device's own folder counts
        monkeypatch.delenv("FLEXFLEET_DATA")
    assert evil.connections == []


def test_client_calls_no_address_of_the_configuration(
    told: Assignment, evil: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{evil.address}")
    lies = {
        "model": {"init": f"http://{evil.address}/model.safetensors"},
        "tracking": {"mlflow": f"http://{evil.address}"},
        "publish": {"dvc": "s3://evil/dvc", "models": True},
        "tune": {"storage": f"postgresql://{evil.address}/study"},
        "run": {"remote": "s3://evil/runs", "secrets": "s3://other/keys"},
        "agents": {"endpoint": f"http://{evil.address}"},
        "kubernetes": {"endpoint": f"http://{evil.address}", "image": f"{evil.address}/image"},
    }
    prepared(*lied(told, lies))
    assert evil.connections == []
