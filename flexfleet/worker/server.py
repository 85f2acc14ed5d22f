"""The loop of a worker: it reads messages, executes leases and sends heartbeats.

A device stores its state in its folder, so it may be killed at any time and restarted by the same command. The main
thread trains; a second thread sends heartbeats and polls messages. If the lease has ended, or the assignment takes too
long, the second thread replaces the whole process (`exec`), even if the main thread hangs. The process is also replaced
after RECYCLE assignments, so that its memory stays constant.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import filelock

from fl_engine.backends.in_process import check_device
from fl_engine.core.errors import ClientError, ConfigError, EnvironmentFailure, FlexfleetError, IntegrityError, Stopped
from fl_engine.remote.messages import MOST_S, Lease, Message, pause
from fl_engine.storage import code
from fl_engine.storage.outage import waiting
from fl_engine.storage.store import FolderStore
from fl_engine.training import cgroup
from flexfleet.files.signals import stopping_at_once
from flexfleet.worker.execute import Prepared, execute, prepare
from flexfleet.worker.mailbox import HEARTBEATS, WorkerMailbox, device_of

log = logging.getLogger("flexfleet")

SILENCE_S = 604_800.0
"""Seven days, after which no URL is valid any more."""
POD_SILENCE_S = PATIENCE_S = 600.0
"""How long a pod waits for a silent coordinator, and a worker for a store that does not answer."""
RECYCLE = 200
"""Number of assignments after which the process is replaced."""
STARTS_S = 10.0
"""Seconds after the start in which a pod's first message may be missing."""
IDLE_S = 10.0, 600.0
"""The least and the most seconds between two heartbeats of an idle worker."""
REPORT_S = 600.0
"""Seconds between two log lines about messages that cannot be read."""
TOO_OLD = ". The URLs of this device may have expired; then invite it again (`flexfleet invite` on the server)"
PROCESS, DONE = "FLEXFLEET_WORKER", "FLEXFLEET_WORKER_DONE"
"""Environment: this process's id, which Kubernetes sets to the pod's UID; and the last lease that is over."""


class Working:
    """Sends heartbeats and polls messages while the main thread executes a lease. Replaces the process if the lease is
    over."""

    def __init__(self, mailbox: WorkerMailbox, message: Message, lease: Lease, restart: Callable[[str], NoReturn]):
        self._mailbox, self._every, self._lease = mailbox, message.lease_s / HEARTBEATS, lease
        self._restart, self._until = restart, time.monotonic() + lease.seconds
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="heartbeats")

    def __enter__(self) -> None:
        self._mailbox.lease = self._lease.id
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        with self._lock:  # wait if the process is being replaced
            self._over.set()

    def _serve(self) -> None:
        self._mailbox.beat("working", over=self._over)
        while not self._over.wait(self._every):
            try:
                self._look()
            except Exception:  # only this thread can end an assignment that hangs
                log.exception("cannot read the message")

    def _look(self) -> None:
        if why := self._ended():
            with self._lock:
                if not self._over.is_set():
                    os.environ[DONE] = self._lease.id
                    self._restart(why)

    def _ended(self) -> str | None:
        if time.monotonic() > self._until:
            return f"the assignment has taken more than {self._lease.seconds:.0f} s"
        self._mailbox.beat("working", over=self._over)
        try:
            message = self._mailbox.read()
        except ClientError as error:
            return str(error)
        except FlexfleetError as error:
            log.warning("cannot read the message: %s", error)
            return None
        if message.lease is not None and message.lease.id == self._lease.id:
            return None
        return "the assignment was withdrawn"


class Server:
    """Executes leases, one after the other. `restart` replaces the process."""

    def __init__(self, mailbox: WorkerMailbox, restart: Callable[[str], NoReturn], device: str | None = None) -> None:
        self._mailbox, self._restart, self._device = mailbox, restart, device
        self._done = os.environ.get(DONE, "")
        self._began, self._orders = time.monotonic(), 0
        self._prepared: tuple[str, Prepared] | None = None
        self._failed = ""
        """The lease whose failure the coordinator may not have read yet. Until then no other heartbeat is sent."""
        self._warned = -math.inf

    def serve(self, silence_s: float, once: bool) -> None:
        """Serve until the coordinator has been silent for `silence_s`: it has written no message, and its lock has not
        changed. `once`: until one lease is over. Raises ClientError if the device was revoked."""
        began = heard = looked = time.monotonic()
        number, about, sent = -1, None, -math.inf
        sign: bytes | None = None
        while True:
            message = self._read()
            now = time.monotonic()
            if message is not None:
                if message.number != number:
                    number, heard = message.number, now
                if about != (about := (message.run, message.site, message.lease and message.lease.id)):
                    sent = -math.inf
                lease = message.lease
                if lease is not None and lease.id != self._done:
                    ok = self._execute(message, lease)
                    if once:
                        if not ok:
                            raise EnvironmentFailure("the assignment failed; the reason is above")
                        return
                    if self._orders >= RECYCLE:
                        os.environ[DONE] = self._done
                        self._restart(f"{self._orders} clients have a result")
                    # The time of the assignment does not count as silence.
                    began = heard = time.monotonic()
                    sent = -math.inf
                    continue
                if lease is None or lease.id != self._failed:
                    self._failed = ""
            if now - looked > silence_s / 10 and (found := self._sign()) is not None:
                # The first value of the lock is not a change.
                heard, looked = (heard if sign in (None, found) else now), now
                sign = found
            if now - heard > silence_s:
                log.info("the server has been silent for %.0f s", now - heard)
                return
            idle = now - began
            if not self._failed and now - sent >= min(max(IDLE_S[0], idle / 2), IDLE_S[1]):
                sent = now
                self._mailbox.beat("idle")
            time.sleep(pause(idle, min(MOST_S, self._mailbox.lease_s / 2, silence_s / 10)))

    def _read(self) -> Message | None:
        try:
            message = self._mailbox.read()
        except (EnvironmentFailure, IntegrityError) as error:
            now = time.monotonic()
            if now - self._began > STARTS_S and now - self._warned >= REPORT_S:
                self._warned = now
                log.warning("cannot read the message: %s%s", error, TOO_OLD if "HTTP 403" in str(error) else "")
            return None
        self._warned = -math.inf
        return message

    def _sign(self) -> bytes | None:
        """Return the coordinator's lock; None if it cannot be read."""
        try:
            return self._mailbox.sign()
        except (ConfigError, EnvironmentFailure, IntegrityError) as error:
            log.debug("cannot read the coordinator's lock: %s", error)
            return None

    def _execute(self, message: Message, lease: Lease) -> bool:
        """Execute a lease, and return whether all its assignments have a result."""
        error = None
        with Working(self._mailbox, message, lease, self._restart):
            try:
                waiting(lambda: self._train(message, lease), PATIENCE_S)
            except (FlexfleetError, OSError, MemoryError) as problem:
                error = f"{type(problem).__name__}: {problem}"
                log.warning("%s, round %d: %s", message.run, lease.assignment.round + 1, error)
            except Exception as problem:  # a bug, of ours or in the run's own code, must not end the worker
                error = f"{type(problem).__name__}: {problem}"
                log.exception("%s, round %d", message.run, lease.assignment.round + 1)
                self._prepared = None
        self._done = lease.id
        self._failed = "" if error is None else lease.id
        if error is not None:
            self._mailbox.failed(error)
        self._mailbox.lease = None
        self._orders += len(lease.assignment.clients)
        return error is None

    def _train(self, message: Message, lease: Lease) -> None:
        started, given, pod = time.monotonic(), lease.assignment, self._mailbox.device.pod
        if self._device is not None:
            given = given.model_copy(update={"device": self._device})
            lease = lease.model_copy(update={"assignment": given})
        self._mailbox.check_own(given)
        store = given.open()
        if self._prepared is None or self._prepared[0] != message.site:
            self._prepared = None  # free its memory before the next one is loaded
            self._prepared = message.site, prepare(given, store, pod)
        prepared = self._prepared[1]
        self._mailbox.numerics = prepared.numerics
        # A pod has a memory limit, so its node's free memory must not be used instead.
        room = cgroup.room if pod else cgroup.room_of_device
        execute(lease, self._mailbox.device.key, message.site, store, prepared, room)
        clients = ", ".join(map(str, given.clients))
        seconds = time.monotonic() - started
        log.info("%s, round %d, client %s: results sent after %.1f s", message.run, given.round + 1, clients, seconds)


def run(args: argparse.Namespace) -> int:
    """Serve, and return the exit code."""
    if args.device is not None:
        check_device(args.device, "--device")
    device, folder = device_of(args.invite, args.folder)
    process = os.environ.setdefault(PROCESS, secrets.token_hex(8))

    def restart(why: str) -> NoReturn:
        log.info("replacing this process: %s", why)
        sys.stdout.flush()
        sys.stderr.flush()
        code.clear()  # last, because the main thread may still import from it
        os.execv(sys.executable, [sys.executable, "-m", "flexfleet.worker", *_again(args)])

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with filelock.FileLock(folder / ".lock", timeout=0), stopping_at_once():
            mailbox = WorkerMailbox(FolderStore(folder, 0o600), device, process)
            log.info("%s waits for assignments; its folder is %s", device.name, folder)
            try:
                Server(mailbox, restart, args.device).serve(POD_SILENCE_S if device.pod else SILENCE_S, args.once)
            except ClientError:
                if mailbox.revoked:  # only this reason is signed
                    mailbox.forget()
                raise
            finally:  # also after signals, so that another worker gets the assignment at once
                mailbox.beat("gone")
                log.info("%d requests to the store since the start", mailbox.requests)
    except filelock.Timeout:
        raise ConfigError(f"another process uses {folder}. Wait for it, or set --folder") from None
    except Stopped:
        return 143
    return 0


def _again(args: argparse.Namespace) -> list[str]:
    """Return the same options as a list."""
    flags = [f"--{name}" for name in ("once", "quiet", "verbose") if getattr(args, name)]
    named = [f"--{name}={value}" for name in ("folder", "device") if (value := getattr(args, name))]
    return [f"--invite={args.invite}", *named, *flags]
