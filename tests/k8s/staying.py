"""Pods that stay, as threads of this process: quick, for what befalls them rather than what they do."""

from __future__ import annotations

import argparse
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ClientError
from fl_engine.storage.store import FolderStore
from flexfleet.files import agent_options
from flexfleet.steps import agent
from flexfleet.steps.agent_line import Line, known_of

STAY = ("kubernetes.lifetime=run", "rounds.stop=3")
EVERYBODY = ("training.fraction=1.0", "rounds.stop=2")
SHARED = ("kubernetes.lifetime=run", "kubernetes.clients_per_pod=2", *EVERYBODY)
"""Of six clients in three tiers, two share a pod."""


def model(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def jobs_of(cluster: Any) -> list[dict[str, Any]]:
    return [each for each in cluster.created if each["kind"] == "Job"]


class Killed(BaseException):
    """What ends a coordinator at an instant of the test's choice."""


class Ended(SystemExit):
    """Stands for SIGKILL."""


class Drained(SystemExit):
    """Stands for SIGTERM, as a drained node sends it. The cluster hears of the pod's end a little later."""


class Mortal(Line):
    """Says and reads nothing once its pod is dead, or cut off."""

    pod: Staying

    def read(self) -> Any:
        self.pod.live()
        return super().read()

    def beat(self, *args: Any, **more: Any) -> bool:
        self.pod.live()
        return super().beat(*args, **more)


class Working(agent.Working):
    """Its thread ends with its pod, and says nothing."""

    def _serve(self) -> None:
        with suppress(Ended):
            super()._serve()


class Staying:
    """What the kubelet needs of a process. `at_work` is called with each order, before it is carried out."""

    at_work: Callable[[Staying, Any], None] = staticmethod(lambda pod, told: None)
    all: list[Staying]

    def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
        log.touch()
        self.name, self.orders = log.parent.name, list[tuple[int, int]]()
        self.dead, self._code = threading.Event(), None
        if command[4:5] != ["--stay"]:  # a round's pod, which no thread plays
            self._code = 2
            return
        p = argparse.ArgumentParser()
        agent_options.add(p)
        self.options = p.parse_args([f"--invite={command[3]}", *command[5:]])
        known, folder = known_of(str(command[3]), log.parent / "device")
        self.line = Mortal(FolderStore(folder, 0o600), known)
        self.line.pod = self
        self.all.append(self)
        threading.Thread(target=self._live, daemon=True).start()

    def live(self) -> None:
        if self.dead.is_set():
            raise Ended

    def _live(self) -> None:
        mine.pod = self
        try:
            agent.serve(self.line, self.options.silence, self.options.recycle, False, self._restart)
            self._code = 0
        except ClientError:
            self._code = 42
        except Drained:
            self.line.beat("gone")
            time.sleep(1.0)
            self._code = 143
        except Ended:
            self._code = 137
        except BaseException:
            traceback.print_exc()
            self._code = 1

    def _restart(self, why: str) -> Any:
        self.dead.set()
        raise Ended(why)

    def poll(self) -> int | None:
        return 137 if self.dead.is_set() else self._code

    def kill(self) -> None:
        self.dead.set()

    def hang(self) -> None:
        """The thread that trains never comes back, and neither does the one that beats."""
        self.live, hung = self.kill_when_told, threading.Event()  # type: ignore[method-assign]
        hung.wait()

    def kill_when_told(self) -> None:
        threading.Event().wait()


mine = threading.local()


@contextmanager
def threads_on(cluster: Any) -> Iterator[type[Staying]]:
    """The cluster's pods are such threads."""

    class Here(Staying):
        all: list[Staying] = []  # noqa: RUF012

    carry_out = agent.carry_out_all

    def noted(told: Any, *rest: Any) -> None:
        pod = mine.pod
        pod.orders += [(told.round, client) for client in told.clients]
        Here.at_work(pod, told)
        pod.live()
        carry_out(told, *rest)

    cluster.start = Here
    cluster.slots = threading.Semaphore(1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent, "carry_out_all", noted)
        patch.setattr(agent, "Working", Working)
        yield Here
        for pod in Here.all:
            pod.kill()
