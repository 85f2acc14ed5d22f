"""The enrolled devices of one run, and their faults: each is killed, stopped or cut off for a while, or for good as
long as one is left.

They are invited once and stay while coordinators are replaced. They reach the object store by a `Way`, without
credentials. A device that is killed is started again by the same command, after a while.
"""

from __future__ import annotations

import math
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fl_engine.remote.messages import HEARTBEAT, MESSAGE, Heartbeat
from tests.harness import cuts
from tests.harness.cuts import Until
from tests.harness.processes import LOOK_S, Child, ForkServer
from tests.harness.way import Way

COUNT = 3
SETTINGS = (
    "run.backend=agents",
    "agents.lease_s=4",
    "agents.attempts=100",
)
"""A device may be hit at any order, so that only an order's own failures could end it."""
SLOW = {"slow": 4.0}
"""Each client takes longer to train than it must, so that many devices are hit while they have an order."""
FATES = ("killed", "stopped", "cut off", "cut off")
MOMENTS = {
    "a download": (b"/assignments/", b"/site/"),
    "an upload": (b"/leases/",),
    "a look for a message": (MESSAGE.encode(),),
    "a heartbeat": (HEARTBEAT.encode(),),
}
"""The requests in which a device, or a pod, is cut off, by what their keys contain."""
IDLE_S = 120.0
"""Seconds within which a device reports that it is idle, after the run and its last fault. It looks for messages after
a tenth of its idle time, and a request that hangs has to time out first."""


@dataclass
class Devices:
    fork_server: ForkServer
    folder: Path
    sets: Sequence[str]
    """Of the run."""
    env: Mapping[str, str]
    """Address and credentials of the server, for `flexfleet invite`."""
    way: Way
    running: dict[str, Child] = field(default_factory=dict)
    back: dict[str, float] = field(default_factory=dict)
    """Unix time at which a device's last fault ends; infinite: never."""
    cuts: Counter[str] = field(default_factory=Counter)
    """How devices were cut off, and in which request."""
    _starts: Counter[str] = field(default_factory=Counter)
    _timers: list[threading.Timer] = field(default_factory=list)
    _ended: bool = False

    def __post_init__(self) -> None:
        argv = ("invite", "--json", "--count", str(COUNT))
        done = self.fork_server.start("flexfleet", *argv, cwd=self.folder, sets=self.sets, env=self.env).wait()
        assert done.code == 0, done.err
        self._files = {Path(name).stem: self.folder / name for name in done.json["invitations"]}
        for name in self._files:
            self._start(name)

    def _start(self, name: str) -> None:
        if self._ended:
            return
        self._starts[name] += 1
        given = ("agent", "--invite", str(self._files[name]), "--folder", str(self.folder / f"device-{name}"))
        log = self.folder / "logs" / f"{name}-{self._starts[name]}.err"
        none = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"), "")
        self.running[name] = self.fork_server.start(
            "flexfleet", *given, cwd=self.folder, env=none, log=log, faults=SLOW
        )

    def well(self) -> list[str]:
        """Devices without a fault now."""
        return sorted(name for name in list(self.running) if self.back.get(name, 0.0) < time.time())

    def hit(self, rng: random.Random, until: Until) -> str:
        """Inject a fault into a device that is well. The fault lasts when this returns. Returns which; empty: none."""
        lost = sum(math.isinf(end) for end in self.back.values())
        seconds = cuts.how_long(rng, for_good=lost + 1 < COUNT)
        name, fate = rng.choice(self.well()), rng.choice(FATES)
        child = self.running[name]
        if fate == "cut off":
            if not (told := cuts.cut_off(self.way, child.pid, MOMENTS, seconds, rng, until)):
                return ""
            self.cuts[told] += 1
        elif fate == "killed":
            del self.running[name]
            child.kill()
            if _end(child) != -signal.SIGKILL:
                self.running[name] = child  # it had ended by itself, which `wrong` reports
                return ""
            self._later(seconds, lambda: self._start(name))
        else:
            child.send(signal.SIGSTOP)
            self._later(seconds, lambda: child.send(signal.SIGCONT))
        self.back[name] = time.time() + seconds
        return fate

    def _later(self, seconds: float, act: Callable[[], object]) -> None:
        if math.isinf(seconds):
            return
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def wrong(self, read: Callable[[str], bytes]) -> list[str]:
        """A line for each device that has ended by itself, logged a traceback, or is not idle after the run. `read`
        returns the value of a key in the devices' mailboxes."""
        for timer in self._timers:
            timer.join()
        lines = [f"{path.name}: a traceback" for path in sorted((self.folder / "logs").glob("device-*.err"))
                 if "Traceback" in path.read_text()]  # fmt: skip
        for name, child in sorted(self.running.items()):
            end = time.monotonic() + IDLE_S
            while (code := child.poll()) is None and not self._is_idle(name, read) and time.monotonic() < end:
                time.sleep(LOOK_S * 10)
            if code is not None:
                lines.append(f"{name} has ended with {code}: {child.err[-500:].strip()}")
            elif not self._is_idle(name, read):
                lines.append(f"{name} is not idle {IDLE_S:.0f} s after the run: {child.err[-500:].strip()}")
        return lines

    def _is_idle(self, name: str, read: Callable[[str], bytes]) -> bool:
        """Whether it has reported so since its last fault. A device whose fault is for good need not."""
        back = self.back.get(name, 0.0)
        if math.isinf(back):
            return True
        try:
            heartbeat = Heartbeat.model_validate_json(read(f"{name}/{HEARTBEAT}"))
        except Exception:  # there is none yet
            return False
        return heartbeat.state == "idle" and heartbeat.at > back

    def end(self) -> None:
        self._ended = True
        for timer in self._timers:
            timer.cancel()
            timer.join()
        for child in self.running.values():
            child.kill()  # also one that is stopped
        for child in self.running.values():
            _end(child)


def _end(child: Child) -> int:
    """Wait for it, and return its exit code."""
    while (code := child.poll()) is None:
        time.sleep(LOOK_S)
    return code
