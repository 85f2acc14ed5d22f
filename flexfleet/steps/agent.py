"""A device that stays: waits for orders, carries out what it is lent, and answers (`fl_engine.exchange.letters`).

What it has to remember is in its folder: its key and URLs, which change, and what it did last. So it may be killed at
any time, and started again by the same command. The main thread trains; another one beats and reads letters meanwhile.
When that one reads that the order is not this device's any more, or the order has taken too long, it starts the whole
process anew (`exec`), which no order that hangs can prevent. After `recycle` orders the process starts anew as well, so
that its memory stays what it was.

Exit codes: 0: the server was silent for too long, or --once: one order was answered; 42: the device was revoked, or
cannot take part; 143: SIGTERM, or its terminal was closed.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from fl_engine.backends.in_process import check_device
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import (
    ClientError,
    ConfigError,
    EnvironmentFailure,
    FlexfleetError,
    IntegrityError,
    Stopped,
)
from fl_engine.exchange import code
from fl_engine.exchange.client import Site
from fl_engine.exchange.letters import (
    MOST_S,
    Leased,
    Letter,
    Loan,
    pause,
)
from fl_engine.storage.store import FolderStore, Store
from fl_engine.training import cgroup
from flexfleet.files import agent_options, terminal
from flexfleet.files.alone import alone
from flexfleet.files.signals import stopping_at_once
from flexfleet.steps.agent_line import BEATS, Line, known_of
from flexfleet.steps.answer import carry_out_all, prepared

log = logging.getLogger("flexfleet")

IDLE_BEAT_S = 10.0, 600.0
"""The least and the most seconds between two beats of an idle device."""
SAY_AGAIN_S = 600.0
"""Seconds after which a device warns again that it cannot read its letter, or the lease, for the same reason."""
TOO_OLD = ". This device's URLs may be too old: then it needs another invitation (`flexfleet invite` on the server)"
"""The end of that warning where the store refuses access."""


class Seldom:
    """Warns of an error that comes again and again: once, and then every SAY_AGAIN_S seconds."""

    def __init__(self, what: str) -> None:
        self._what, self._why, self._at = what, "", -math.inf

    def warn(self, error: Exception, more: str = "") -> None:
        why = str(error).partition(" <")[0]  # what follows is a server's page, which has another number each time
        if why != self._why or time.monotonic() - self._at >= SAY_AGAIN_S:
            self._why, self._at = why, time.monotonic()
            log.warning("%s: %s%s", self._what, error, more)

    def over(self) -> None:
        self._why = ""


class Working:
    """While the main thread carries out a loan's orders: beats, reads letters, starts anew where the loan is over."""

    def __init__(self, line: Line, letter: Letter, loan: Loan, restart: Callable[[str], NoReturn]) -> None:
        self._line, self._every, self._loan, self._restart = line, letter.lease_s / BEATS, loan, restart
        self._until = time.monotonic() + loan.seconds
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="beats")

    def __enter__(self) -> None:
        self._line.loan = self._loan.id
        self._line.beat("working")
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        with self._lock:  # not while it starts the process anew
            self._over.set()

    def _serve(self) -> None:
        while not self._over.wait(self._every):
            try:
                self._look()
            except Exception:  # without this thread nobody would end an order that hangs
                log.exception("no look for a letter; the next one follows")

    def _look(self) -> None:
        if why := self._ended():
            with self._lock:
                if not self._over.is_set():
                    self._line.remember(done=self._loan.id)
                    self._restart(why)

    def _ended(self) -> str | None:
        if time.monotonic() > self._until:  # first: the beat may take a while
            return f"the order has taken more than {self._loan.seconds:.0f} s"
        self._line.beat("working", over=self._over)
        try:
            letter = self._line.read()
        except ClientError as error:
            return str(error)
        except FlexfleetError as error:
            log.warning("no letter: %s", error)
            return None
        if letter.loan is not None and letter.loan.id == self._loan.id:
            return None
        return "the order is another device's now, or is not needed any more"


def serve(line: Line, silence_s: float, recycle: int, once: bool, restart: Callable[[str], NoReturn]) -> None:
    """Carries out orders until the server has been silent for `silence_s`: no letter is new, and its lease, where
    letters say where that is, does not change. Raises ClientError where the device was revoked."""
    site: tuple[str, Algorithm, Site] | None = None
    began = heard = time.monotonic()
    carried, number, about = 0, -1, None
    failed = ""
    """The loan whose failure the coordinator may not have read: as long as letters name it, no other beat covers it."""
    last_sign: bytes | None = None
    beaten = -math.inf
    unread, unseen = Seldom("no letter"), Seldom("no sign of the coordinator")
    while True:
        try:
            letter = line.read()
            unread.over()
        except (EnvironmentFailure, IntegrityError) as error:
            unread.warn(error, TOO_OLD if "HTTP 403" in str(error) else "")
            letter = None
        now = time.monotonic()
        loan = None
        if letter is not None:
            if letter.number != number:
                number, heard = letter.number, now
            if about != (about := _about(letter)):
                beaten = -math.inf
            loan = letter.loan if letter.loan is not None and letter.loan.id != line.known.done else None
        if loan is not None and letter is not None:
            with Working(line, letter, loan, restart):
                site, wrong = _carry_out(line, letter, loan, site)
            failed = loan.id if wrong is not None else ""
            if wrong is not None:
                line.failed(wrong)
            line.loan = None
            carried += len(loan.assignment.clients)
            if once:
                return
            if carried >= recycle:
                restart(f"{carried} orders are answered")
            began = beaten = heard = time.monotonic()  # the order was no silence, however long it took
            continue
        if now - heard > silence_s / 2 and (sign := _sign_of(line, unseen)) not in (None, last_sign):
            heard = heard if last_sign is None else now  # the first one shows no change
            last_sign = sign
        if now - heard > silence_s:
            log.info("the server is silent for %.0f s", now - heard)
            return
        idle = now - began
        if letter is not None and (letter.loan is None or letter.loan.id != failed):
            failed = ""
        if not failed and now - beaten >= min(max(IDLE_BEAT_S[0], idle), IDLE_BEAT_S[1]):
            beaten = now
            line.beat("idle")
        time.sleep(pause(idle, min(MOST_S, line.lease_s / 2)))


def _sign_of(line: Line, unseen: Seldom) -> bytes | None:
    """The coordinator's lease; None: it shows nothing."""
    try:
        sign = line.sign()
    except (ConfigError, EnvironmentFailure, IntegrityError) as error:
        unseen.warn(error)
        return None
    unseen.over()
    return sign


def _about(letter: Letter) -> tuple[object, ...]:
    """What a device answers with a new beat when a letter changes it; a letter that only renews URLs does not."""
    return letter.generation, letter.run, letter.site, letter.loan and letter.loan.id, letter.account.lost


def _carry_out(
    line: Line, letter: Letter, loan: Loan, site: tuple[str, Algorithm, Site] | None
) -> tuple[tuple[str, Algorithm, Site] | None, str | None]:
    """Answers a loan's orders; gives what the next ones of this run need too, and why not all have an answer."""
    told, started = loan.assignment, time.monotonic()
    if line.device is not None:
        told = told.model_copy(update={"device": line.device})
    about = f"{letter.run}, round {told.round + 1}, client {', '.join(map(str, told.clients))}"
    try:
        line.check_own(told)
        store: Store = Leased(told.open(), loan.id) if told.store else told.open()
        if site is None or site[0] != letter.site:
            site = None  # before the next one is loaded
            site = (letter.site, *prepared(told, store, line.known.plain))
        failures = told.failures + int(line.known.begun == loan.id)
        if told.observe == "cgroup":
            line.remember(begun=loan.id)
        # A cluster's pod has a limit: where that cannot be read, what the node has free says nothing.
        room = cgroup.room if line.known.plain else cgroup.room_of_device
        carry_out_all(told, store, site[1], site[2], failures, room)
    except (SystemExit, KeyboardInterrupt):  # ended, not killed
        line.remember(begun="")
        raise
    except (FlexfleetError, OSError, MemoryError) as error:
        said = f"{type(error).__name__}: {error}"
        log.warning("%s: %s", about, said)
        line.remember(done=loan.id)
        return site, said
    except Exception as error:  # a bug, of ours or in the run's own code: the device stays
        log.exception("%s", about)
        line.remember(done=loan.id)
        return None, f"{type(error).__name__}: {error}"
    log.info("%s: answered after %.1f s", about, time.monotonic() - started)
    line.remember(done=loan.id, orders=line.known.orders + len(told.clients))
    return site, None


def run(args: argparse.Namespace) -> int:
    """`flexfleet agent`."""
    agent_options.check(args)
    if args.device is not None:
        check_device(args.device, "--device")
    known, folder = known_of(args.invite, args.folder)

    def restart(why: str) -> NoReturn:
        log.info("starting anew: %s", why)
        sys.stdout.flush()
        sys.stderr.flush()
        code.clear()  # last: another thread may still be at work
        os.execv(sys.executable, [sys.executable, "-m", "flexfleet.steps.agent", *agent_options.again(args)])

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with alone(folder), stopping_at_once():
            line = Line(FolderStore(folder, 0o600), known, args.device)
            line.remember()
            log.info("%s waits for orders; it remembers in %s", line.known.name, folder)
            try:
                serve(line, args.silence, args.recycle, args.once, restart)
            except ClientError:
                line.forget()
                raise
            finally:  # also on signals and Ctrl-C: the order goes to another device at once
                line.beat("gone")
                log.info("%d requests to the store since the start", line.requests)
    except Stopped:
        return 143
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    agent_options.add(p)
    terminal.add_loudness(p)
    return run(terminal.parsed(p, argv))


if __name__ == "__main__":
    terminal.run_main(main)
