"""The loop of a worker: it reads messages, executes leases and sends heartbeats.

What a device has to remember is in its folder, so it may be killed at any time and started again by the same command.
The main thread trains; another one sends heartbeats and reads messages meanwhile. If that one reads that the lease has
ended, or the assignment has taken too long, it replaces the whole process by a new one (`exec`), which an assignment
that hangs cannot prevent. After RECYCLE orders the process is replaced as well, so that its memory stays constant.
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
"""Seven days: after that no URL is valid any more."""
POD_SILENCE_S = PATIENCE_S = 600.0
"""How long a pod waits for a silent coordinator, and a worker for a store that is away."""
RECYCLE = 200
"""Orders after which the process is replaced."""
STARTS_S = 10.0
"""Seconds after the start in which a pod's first message may be missing."""
IDLE_S = 10.0, 600.0
"""The least and the most seconds between two heartbeats of an idle worker."""
REPORT_S = 600.0
"""Seconds after which the same problem with a message is logged again."""
TOO_OLD = ". This device's URLs may be too old: then it needs another invitation (`flexfleet invite` on the server)"
PROCESS, DONE = "FLEXFLEET_WORKER", "FLEXFLEET_WORKER_DONE"
"""Environment: this process's id, which Kubernetes sets to the pod's UID; and the last lease that is over."""


class Repeated:
    """Warns of an error that comes again and again: once, and then every REPORT_S seconds."""

    def __init__(self, what: str) -> None:
        self._what, self._why, self._at = what, "", -math.inf

    def warn(self, error: Exception, more: str = "") -> None:
        why = str(error).partition(" <")[0]  # a server's page, which has another number each time, follows
        if why != self._why or time.monotonic() - self._at >= REPORT_S:
            self._why, self._at = why, time.monotonic()
            log.warning("%s: %s%s", self._what, error, more)

    def over(self) -> None:
        self._why = ""


class Working:
    """While the main thread executes a lease: sends heartbeats, reads messages, replaces the process if the lease is
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
        with self._lock:  # not while it replaces the process
            self._over.set()

    def _serve(self) -> None:
        self._mailbox.beat("working", over=self._over)
        while not self._over.wait(self._every):
            try:
                self._look()
            except Exception:  # without this thread nobody would end an assignment that hangs
                log.exception("the message was not read; the next look follows")

    def _look(self) -> None:
        if why := self._ended():
            with self._lock:
                if not self._over.is_set():
                    os.environ[DONE] = self._lease.id
                    self._restart(why)

    def _ended(self) -> str | None:
        if time.monotonic() > self._until:  # first, because the heartbeat may take a while
            return f"the assignment has taken more than {self._lease.seconds:.0f} s"
        self._mailbox.beat("working", over=self._over)
        try:
            message = self._mailbox.read()
        except ClientError as error:
            return str(error)
        except FlexfleetError as error:
            log.warning("the message was not read: %s", error)
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
        """The lease whose failure the coordinator may not have read yet: until then no other heartbeat is sent."""

    def serve(self, silence_s: float, once: bool) -> None:
        """Until the coordinator has been silent for `silence_s`: there is no new message, and its lock does not change.
        `once`: until one lease is over. Raises ClientError if the device was revoked."""
        began = heard = looked = time.monotonic()
        number, about, sent = -1, None, -math.inf
        sign: bytes | None = None
        unread, unseen = Repeated("the message was not read"), Repeated("the coordinator's lock was not read")
        while True:
            message = self._read(unread)
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
                            raise EnvironmentFailure("the assignment could not be executed: the reason is above")
                        return
                    if self._orders >= RECYCLE:
                        os.environ[DONE] = self._done
                        self._restart(f"{self._orders} clients have a result")
                    # The assignment was not silence, however long it took.
                    began = heard = time.monotonic()
                    sent = -math.inf
                    continue
                if lease is None or lease.id != self._failed:
                    self._failed = ""
            if now - looked > silence_s / 10 and (found := self._sign(unseen)) is not None:
                # The first one shows no change.
                heard, looked = (heard if sign in (None, found) else now), now
                sign = found
            if now - heard > silence_s:
                log.info("the server is silent for %.0f s", now - heard)
                return
            idle = now - began
            if not self._failed and now - sent >= min(max(IDLE_S[0], idle / 2), IDLE_S[1]):
                sent = now
                self._mailbox.beat("idle")
            time.sleep(pause(idle, min(MOST_S, self._mailbox.lease_s / 2, silence_s / 10)))

    def _read(self, unread: Repeated) -> Message | None:
        try:
            message = self._mailbox.read()
        except (EnvironmentFailure, IntegrityError) as error:
            if time.monotonic() - self._began > STARTS_S:
                unread.warn(error, TOO_OLD if "HTTP 403" in str(error) else "")
            return None
        unread.over()
        return message

    def _sign(self, unseen: Repeated) -> bytes | None:
        """The coordinator's lock; None: it shows nothing."""
        try:
            sign = self._mailbox.sign()
        except (ConfigError, EnvironmentFailure, IntegrityError) as error:
            unseen.warn(error)
            return None
        unseen.over()
        return sign

    def _execute(self, message: Message, lease: Lease) -> bool:
        """Execute a lease; return whether all its orders have a result."""
        error = None
        with Working(self._mailbox, message, lease, self._restart):
            try:
                waiting(lambda: self._train(message, lease), PATIENCE_S)
            except (FlexfleetError, OSError, MemoryError) as problem:
                error = f"{type(problem).__name__}: {problem}"
                log.warning("%s, round %d: %s", message.run, lease.assignment.round + 1, error)
            except Exception as problem:  # a bug, of ours or in the run's own code: the worker stays
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
            self._prepared = None  # before the next one is loaded
            self._prepared = message.site, prepare(given, store, pod)
        prepared = self._prepared[1]
        self._mailbox.numerics = prepared.numerics
        # A pod has a limit: if that cannot be read, the free memory of its node says nothing.
        room = cgroup.room if pod else cgroup.room_of_device
        execute(lease, self._mailbox.device.key, message.site, store, prepared, room)
        clients = ", ".join(map(str, given.clients))
        seconds = time.monotonic() - started
        log.info("%s, round %d, client %s: results sent after %.1f s", message.run, given.round + 1, clients, seconds)


def run(args: argparse.Namespace) -> int:
    """Serve until the end, and return the exit code."""
    if args.device is not None:
        check_device(args.device, "--device")
    device, folder = device_of(args.invite, args.folder)
    process = os.environ.setdefault(PROCESS, secrets.token_hex(8))

    def restart(why: str) -> NoReturn:
        log.info("replacing this process: %s", why)
        sys.stdout.flush()
        sys.stderr.flush()
        code.clear()  # last, because another thread may still be at work
        os.execv(sys.executable, [sys.executable, "-m", "flexfleet.worker", *_again(args)])

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with filelock.FileLock(folder / ".lock", timeout=0), stopping_at_once():
            mailbox = WorkerMailbox(FolderStore(folder, 0o600), device, process)
            log.info("%s waits for assignments; its folder is %s", device.name, folder)
            try:
                Server(mailbox, restart, args.device).serve(POD_SILENCE_S if device.pod else SILENCE_S, args.once)
            except ClientError:
                if mailbox.revoked:  # otherwise the reason is unsigned, and another start may succeed
                    mailbox.forget()
                raise
            finally:  # also on signals and Ctrl-C: the assignment goes to another worker at once
                mailbox.beat("gone")
                log.info("%d requests to the store since the start", mailbox.requests)
    except filelock.Timeout:
        raise ConfigError(f"another process uses {folder}: wait for it, or name another folder by --folder") from None
    except Stopped:
        return 143
    return 0


def _again(args: argparse.Namespace) -> list[str]:
    """Return the same options as a list."""
    flags = [f"--{name}" for name in ("once", "quiet", "verbose") if getattr(args, name)]
    named = [f"--{name}={value}" for name in ("folder", "device") if (value := getattr(args, name))]
    return [f"--invite={args.invite}", *named, *flags]
