"""Pods as threads of this process: quicker than processes, for tests of pods' faults."""

from __future__ import annotations

import argparse
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ClientError, FlexfleetError
from fl_engine.remote.kubernetes.jobs import CLASS
from fl_engine.storage.checkpoints import Checkpoints, Row
from fl_engine.storage.s3 import open_store
from fl_engine.storage.store import FolderStore, Store
from flexfleet.worker import server as program
from flexfleet.worker.__main__ import add_options
from flexfleet.worker.mailbox import WorkerMailbox, device_of

EVERYBODY = ("training.fraction=1.0",)
"""Six clients."""
PACKED = (*EVERYBODY, "kubernetes.clients_per_pod=2")
LIFETIMES = ("run", "round")
BOUND = ("kubernetes.placement=device", "kubernetes.hostname=pi-{client}")
"""Each client has a node of its own."""
APART = "kubernetes.pools={strong: {image: other:1}}"
"""The tier `strong`, which has two of a round's three orders, is a class of its own, which shares no pods."""


def model(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def class_of(job: dict[str, Any]) -> str:
    return str(job["metadata"]["annotations"][CLASS])


def failures(row: Row) -> dict[int, str]:
    """Map each client that has failed to the reason."""
    return {line["client"]: line["failure"] for line in row.clients if "failure" in line}


def killed(*_: Any, **__: Any) -> Any:
    """Stands for SIGKILL of the coordinator."""
    raise Killed


class Killed(BaseException):
    """Ends a coordinator at a chosen instant."""


class Ended(SystemExit):
    """Stands for SIGKILL."""


class Drained(SystemExit):
    """Stands for SIGTERM of a drained node. The cluster reports the pod's end a little later."""


class Mortal(WorkerMailbox):
    """Sends and reads nothing once its pod has ended or hangs."""

    pod: Pod

    def read(self) -> Any:
        self.pod.live()
        return super().read()

    def send_heartbeat(self, *args: Any, **more: Any) -> bool:
        self.pod.live()
        return super().send_heartbeat(*args, **more)


class Working(program.Working):
    """Its thread ends with its pod, without a heartbeat."""

    def _serve(self) -> None:
        with suppress(Ended):
            super()._serve()


class Pod:
    """A container's process. `at_work` is called with each assignment, before it is executed."""

    at_work: Callable[[Pod, Any], None] = staticmethod(lambda pod, given: None)
    all: list[Pod]

    def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
        log.touch()
        self.name, self.assignments = log.parent.name, list[tuple[int, int]]()
        self.dead, self._code = threading.Event(), None
        self._said = Path(env["FLEXFLEET_TERMINATION_LOG"])
        p = argparse.ArgumentParser()
        add_options(p)
        assert command[1:3] == ["-m", "flexfleet.worker"]
        self.options = p.parse_args(command[3:])
        device, folder = device_of(self.options.invite, Path(self.options.folder))
        self.mailbox = Mortal(FolderStore(folder, 0o600), device, env["FLEXFLEET_WORKER"])
        self.mailbox.pod = self
        self.all.append(self)
        threading.Thread(target=self._live, daemon=True).start()

    def live(self) -> None:
        if self.dead.is_set():
            raise Ended

    def _live(self) -> None:
        mine.pod = self
        try:
            program.Server(self.mailbox, self._restart).serve(program.POD_SILENCE_S, self.options.once)
            code = 0
        except FlexfleetError as error:
            self._said.write_text(str(error))
            code = 42 if isinstance(error, ClientError) else 6
        except Drained:
            self.mailbox.send_heartbeat("gone")
            time.sleep(1.0)
            code = 143
        except Ended:
            code = 137
        except BaseException:
            traceback.print_exc()
            code = 1
        with suppress(BaseException):
            self.mailbox.send_heartbeat("gone")
        self._code = code

    def _restart(self, why: str) -> Any:
        self.dead.set()
        raise Ended(why)

    def poll(self) -> int | None:
        return 137 if self.dead.is_set() else self._code

    def kill(self) -> None:
        self.dead.set()

    def hang(self) -> None:
        """Let the threads that train and that send heartbeats hang."""
        hung = threading.Event()
        self.live = hung.wait  # type: ignore[method-assign, assignment]
        hung.wait()


@dataclass
class Runs:
    """Runs on a fake cluster, whose ledgers are in a bucket under `prefix`."""

    cluster: Any
    prefix: str
    alone: Callable[..., Path]
    """`alone("name", "a.b=c", ..., resume=False, watcher=None)`: the folder of a run without the cluster."""
    expected: Callable[[int], bytes]
    """The model after so many rounds without a cluster."""
    pods: type[Pod] = Pod

    @property
    def remote(self) -> tuple[str, ...]:
        """Settings of a run on the cluster."""
        return "run.backend=kubernetes", f"run.remote={self.prefix}"

    def start(self, name: str, *sets: str, **more: Any) -> Path:
        """Run on the cluster, and return the run's folder."""
        return self.alone(name, *self.remote, *sets, **more)

    def at_work(self, act: Callable[[Pod, Any], None]) -> None:
        self.pods.at_work = staticmethod(act)

    def jobs(self) -> list[dict[str, Any]]:
        return [each for each in self.cluster.created if each["kind"] == "Job"]

    def executed(self) -> list[tuple[int, int]]:
        """Return the round and client of each assignment that a pod has begun."""
        return sorted(assignment for pod in self.pods.all for assignment in pod.assignments)

    def store(self, name: str) -> Store:
        return open_store(f"{self.prefix}/{name}")

    def rows(self, name: str) -> list[Row]:
        return Checkpoints(self.store(name)).rows()


mine = threading.local()


@contextmanager
def threads_on(cluster: Any) -> Iterator[type[Pod]]:
    """Let the cluster's pods be such threads."""

    class Here(Pod):
        all: list[Pod] = []  # noqa: RUF012

    execute = program.execute

    def noted(lease: Any, *rest: Any) -> None:
        pod, given = mine.pod, lease.assignment
        pod.assignments += [(given.round, client) for client in given.clients]
        Here.at_work(pod, given)
        pod.live()
        execute(lease, *rest)

    cluster.start = Here
    cluster.slots = threading.Semaphore(1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "execute", noted)
        patch.setattr(program, "Working", Working)
        patch.setattr("fl_engine.remote.kubernetes.provisioner.POLL_S", 0.1)
        yield Here
        for pod in Here.all:
            pod.kill()
