"""What the comparison of lifetimes runs; it takes minutes, and tests/k8s/test_backend.py has such runs."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from benchmarks.lifetimes import below, contestants, resident_mb, seconds_of
from fl_engine.remote.kubernetes import jobs
from flexfleet.config import load_config


@pytest.mark.parametrize(("clients", "pods", "packed"), [(3, 3, 1), (50, 2, 25), (50, 3, 17)])
def test_each_contestant_has_so_many_pods_or_workers(clients: int, pods: int, packed: int) -> None:
    found = {name: load_config(None, list(sets)) for name, sets in contestants(pods, clients).items()}
    assert len(found["processes"].run.devices) == pods and len(found["in_process"].run.devices) == 1
    assert (found["run"].kubernetes.lifetime, found["round"].kubernetes.lifetime) == ("run", "round")
    for name in ("run", "round"):
        assert found[name].kubernetes.clients_per_pod == packed
        assert jobs.shares([clients], -(-clients // packed)) == [pods]


def test_processes_are_looked_at_as_the_system_tells_them() -> None:
    before = below(os.getpid())
    child = subprocess.Popen(["sh", "-c", "sleep 60 & wait"])
    try:
        until = time.monotonic() + 30
        while len(found := below(os.getpid()) - before) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        assert len(found) == 2 and child.pid in found, "what it has started belongs to it"
        assert resident_mb(os.getpid()) > 10 > resident_mb(child.pid) > 0
    finally:
        for process in found:
            os.kill(process, signal.SIGKILL)
        child.wait()
    assert seconds_of(os.getpid()) == pytest.approx(time.process_time(), abs=0.5)
    assert seconds_of(child.pid) == resident_mb(child.pid) == 0.0, "gone"
