"""Run the worker's loop: read messages, execute assignments and send heartbeats.

A device stores its state in a folder, so it may be killed at any time and restarted with the same command. The main
thread trains. A second thread sends heartbeats and polls messages. If the lease has ended or the assignment takes too
long, the second thread replaces the process (`exec`), even if the main thread hangs.
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
from dataclasses import replace
from typing import NoReturn

from fl_engine.backends.in_process import check_device
from fl_engine.core.errors import ClientError, EnvironmentFailure, FlexfleetError, IntegrityError
from fl_engine.remote.messages import MOST_S, Lease, Message, pause
from fl_engine.storage import code
from fl_engine.storage.outage import waiting
from fl_engine.storage.store import FolderStore
from fl_engine.training import cgroup
from flexfleet.files.owner_limits import Limits
from flexfleet.files.run_folder import folder_lock
from flexfleet.files.terminal import expected
from flexfleet.worker.execute import Prepared, execute, prepare
from flexfleet.worker.mailbox import HEARTBEATS, WorkerMailbox, device_of

log = logging.getLogger("flexfleet")

SILENCE_S = 604_800.0
"""Seconds without a message after which the worker on a device exits, because its URLs expire after seven days."""
POD_SILENCE_S = 3600.0
"""Seconds without a message after which the worker in a pod exits. The coordinator writes no messages during merging
and evaluation, which can take most of an hour for a large model."""
PATIENCE_S = 600.0
"""Seconds for which a worker waits for a store that does not respond."""
STARTS_S = 10.0
"""Seconds after the start during which a missing message is not logged."""
IDLE_S = 10.0, 600.0
"""Minimum and maximum seconds between two heartbeats of an idle worker."""
REPORT_S = 600.0
"""Minimum seconds between two log lines about unreadable messages."""
TOO_OLD = ". The URLs of this device may have expired; then invite it again (`flexfleet invite` on the server)"
PROCESS, DONE = "FLEXFLEET_WORKER", "FLEXFLEET_WORKER_DONE"
"""Environment variables with the ID of this process (on Kubernetes, the pod's UID) and the ID of the last lease."""


class Working:
    """Sends heartbeats and polls messages during an assignment. Replaces the process if the lease ends."""

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
        with self._lock:  # Another thread may be replacing the process.
            self._over.set()

    def _serve(self) -> None:
        self._mailbox.send_heartbeat("working", over=self._over)
        while not self._over.wait(self._every):
            try:
                why = self._ended()
                with self._lock:
                    if why and not self._over.is_set():
                        os.environ[DONE] = self._lease.id
                        self._restart(why)
            except Exception:  # Keep the thread alive, because only this thread can end an assignment that hangs.
                log.exception("polling the message failed")

    def _ended(self) -> str | None:
        if time.monotonic() > self._until:
            return f"the assignment exceeded its time limit of {self._lease.seconds:.0f} s"
        self._mailbox.send_heartbeat("working", over=self._over)
        try:
            message = self._mailbox.read()
        except ClientError as error:
            return str(error)
        except FlexfleetError as error:
            log.warning("the message could not be read: %s", error)
            return None
        if message.lease is not None and message.lease.id == self._lease.id:
            return None
        return "the assignment was withdrawn"


class Server:
    """Executes the assignments of one lease at a time. `restart` replaces the process."""

    def __init__(self, mailbox: WorkerMailbox, restart: Callable[[str], NoReturn], device: str | None = None) -> None:
        self._mailbox, self._restart, self._device = mailbox, restart, device
        self._done = os.environ.get(DONE, "")
        self._began = time.monotonic()
        self._prepared: tuple[str, Prepared] | None = None
        self._failed = ""
        """ID of the last failed lease. No heartbeat is sent until the coordinator has read the failure."""
        self._warned = -math.inf

    def serve(self, silence_s: float, once: bool) -> None:
        """Execute assignments until no new message arrives for `silence_s` seconds, or until one lease has ended if
        `once` is set. Raises ClientError if the device was revoked."""
        limits, began = self._mailbox.limits, time.monotonic()
        last_new = began
        number, about, sent = -1, None, -math.inf
        while True:
            if limits.wait(lambda why: self._mailbox.send_heartbeat("paused", why)):
                began = last_new = time.monotonic()
                sent = -math.inf
            message = self._read()
            now = time.monotonic()
            if message is not None:
                if message.number != number:
                    number, last_new = message.number, now
                if about != (about := (message.run, message.site, message.lease and message.lease.id)):
                    sent = -math.inf
                lease = message.lease
                if lease is not None and lease.id != self._done:
                    limits.need = max(limits.need, sum(upload.size for upload in lease.assignment.writes.values()))
                    if limits.closed():
                        continue
                    ok = self._execute(message, lease)
                    if once:
                        if not ok:
                            raise EnvironmentFailure("the assignment failed. The log above contains the reason")
                        return
                    # Restart the timeout, which must not include the duration of the assignment.
                    began = last_new = time.monotonic()
                    sent = -math.inf
                    continue
                if lease is None or lease.id != self._failed:
                    self._failed = ""
            if now - last_new > silence_s:
                log.info("no new message from the server for %.0f s", now - last_new)
                return
            idle = now - began
            if not self._failed and now - sent >= min(max(IDLE_S[0], idle / 2), IDLE_S[1]):
                sent = now
                self._mailbox.send_heartbeat("idle")
            time.sleep(pause(idle, min(MOST_S, self._mailbox.lease_s / 2, silence_s / 10)))

    def _read(self) -> Message | None:
        try:
            message = self._mailbox.read()
        except (EnvironmentFailure, IntegrityError) as error:
            now = time.monotonic()
            if now - self._began > STARTS_S and now - self._warned >= REPORT_S:
                self._warned = now
                log.warning("the message could not be read: %s%s", error, TOO_OLD if "HTTP 403" in str(error) else "")
            return None
        self._warned = -math.inf
        return message

    def _execute(self, message: Message, lease: Lease) -> bool:
        """Execute the assignments of a lease. Returns True if all assignments have a result."""
        error = None
        with Working(self._mailbox, message, lease, self._restart):
            try:
                waiting(lambda: self._train(message, lease), PATIENCE_S)
            except (FlexfleetError, OSError, MemoryError) as problem:
                error = f"{type(problem).__name__}: {expected(problem)}"
                log.warning("%s, round %d: %s", message.run, lease.assignment.round + 1, error)
            except Exception as problem:  # A bug in flexfleet or in the user's code must not end the worker.
                error = f"{type(problem).__name__}: {problem}"
                log.exception("%s, round %d", message.run, lease.assignment.round + 1)
                self._prepared = None
        self._done = lease.id
        self._failed = "" if error is None else lease.id
        if error is not None:
            self._mailbox.failed(error)
        self._mailbox.lease = None
        return error is None

    def _train(self, message: Message, lease: Lease) -> None:
        started, assigned, pod = time.monotonic(), lease.assignment, self._mailbox.device.pod
        if self._device is not None:
            assigned = assigned.model_copy(update={"device": self._device})
            lease = lease.model_copy(update={"assignment": assigned})
        self._mailbox.check_own(assigned)
        store = self._mailbox.limits.counted(assigned.open(), bounded=True)
        if self._prepared is None or self._prepared[0] != message.site:
            self._prepared = None  # Free memory before loading the next site.
            prepared = replace(prepare(assigned, store, pod), epochs=self._mailbox.limits.epochs)
            self._prepared = message.site, prepared
        prepared = self._prepared[1]
        self._mailbox.numerics = prepared.numerics
        # A pod must have a memory limit, but a device may run without a limit.
        room = cgroup.room if pod else cgroup.room_of_device
        execute(lease, self._mailbox.device.key, message.site, store, prepared, room)
        clients = ", ".join(map(str, assigned.clients))
        seconds = time.monotonic() - started
        log.info("%s, round %d, client %s: sent results in %.1f s", message.run, assigned.round + 1, clients, seconds)


def run(args: argparse.Namespace) -> None:
    """Run a worker with the options of `flexfleet agent`. Raises ConfigError if another process uses the folder."""
    if args.device is not None:
        check_device(args.device, "--device")
    device, folder = device_of(args.invite, args.folder)
    process = os.environ.setdefault(PROCESS, secrets.token_hex(8))

    def restart(why: str) -> NoReturn:
        log.info("replacing this process: %s", why)
        sys.stdout.flush()
        sys.stderr.flush()
        flags = [f"--{name}" for name in ("once", "quiet", "verbose") if getattr(args, name)]
        options = ("folder", "device", "hours", "mb_per_day", "epochs")
        named = [f"--{name.replace('_', '-')}={value}" for name in options if (value := getattr(args, name))]
        limits.save()
        code.clear()  # Delete the code last, because the main thread may still import from it.
        command = [sys.executable, "-m", "flexfleet.worker", f"--invite={args.invite}", *named, *flags]
        os.execv(sys.executable, command)

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with folder_lock(folder):
        place = FolderStore(folder, 0o600)
        limits = Limits(place, args)
        mailbox = WorkerMailbox(place, device, process, limits)
        log.info("%s is waiting for assignments (folder %s)", device.name, folder)
        try:
            Server(mailbox, restart, args.device).serve(POD_SILENCE_S if device.pod else SILENCE_S, args.once)
        except ClientError:
            if mailbox.revoked:  # Other ClientErrors may be caused by an unsigned message.
                mailbox.forget()
            raise
        finally:  # Even after a signal, send the heartbeat, so that the coordinator reassigns the lease at once.
            mailbox.send_heartbeat("gone")
            limits.save()
            log.info("sent %d requests to the store", mailbox.requests)
