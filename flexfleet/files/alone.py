"""One process at a time in a folder."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TextIO

from fl_engine.core.errors import ConfigError, EnvironmentFailure
from fl_engine.core.system import of_posix


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Keeps a second process from writing the same folder, which is made. The lock ends with the process, however that
    ends. Raises ConfigError where another process has it, EnvironmentFailure where a file, or a link to nowhere, is in
    the way of the folder, where the lock cannot be written, and on Windows, which has no such lock."""
    fcntl = of_posix("fcntl")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        wrong = next(path for path in (*reversed(out.parents), out) if not path.is_dir())
        gone = "a file" if wrong.exists() else "not there"
        what = f"a link to {os.readlink(wrong)}, which is {gone}" if wrong.is_symlink() else "a file"
        told = f"{out} cannot be made: {wrong} is {what}; delete it, or choose another folder"
        raise EnvironmentFailure(told) from error
    with _lock_file(out / ".lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read(200).strip() or "another process"
            raise ConfigError(f"{out} is being run by {holder}: wait for it, or stop it first") from None
        lock.truncate(0)
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        told = f"another process: {os.getpid()} on {socket.gethostname()} (since {now})\n"
        try:
            os.write(lock.fileno(), told.encode())  # past the file's buffer, which would try again when it is closed
        except OSError as error:
            raise EnvironmentFailure(f"{out / '.lock'}: {error.strerror or error}") from error
        yield


def _lock_file(path: Path) -> TextIO:
    """Opens the file, or makes it. Follows no link: the file behind it belongs to somebody else and would be
    emptied."""
    try:
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if not path.is_symlink():
            raise
        told = f"{path} is a link to {os.readlink(path)}, a file is expected: see who made it, and delete it"
        raise ConfigError(told) from error
    return os.fdopen(opened, "a+", errors="replace")
