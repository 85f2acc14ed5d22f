"""A PostgreSQL server on 127.0.0.1, which a test may stop, kill and start again."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NEEDS = ("initdb", "postgres")
"""Programs, of Debian's package `postgresql`."""
ADMIN, PASSWORD = "admin", "pl4nted-word"
WAIT_S = 30.0


def programs() -> Path | None:
    """The folder of the newest PostgreSQL server of this machine; None without one. Debian keeps it out of PATH."""
    folders = [Path(found).resolve().parent for found in [shutil.which("initdb")] if found]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda each: float(each.parent.name), reverse=True)
    return next((each for each in folders if all((each / name).exists() for name in NEEDS)), None)


class Postgres:
    """The server of a folder. `settings` are those of postgresql.conf, for the next `start`."""

    def __init__(self, folder: Path, port: int, user: str | None) -> None:
        self.folder, self.port, self._user = folder, port, user
        self._server: subprocess.Popen[bytes] | None = None

    def url(self, login: str = f"{ADMIN}:{PASSWORD}", database: str = "postgres", more: str = "") -> str:
        return f"postgresql+psycopg://{login}@127.0.0.1:{self.port}/{database}{more}"

    def start(self, **settings: Any) -> None:
        given = {"listen_addresses": "127.0.0.1", "port": self.port, "unix_socket_directories": "", "fsync": "off"}
        words = [word for key, value in (given | settings).items() for word in ("-c", f"{key}={value}")]
        self._server = self._run("postgres", "-D", self.folder / "data", *words)
        self.connected().close()

    def connected(self, database: str = "postgres") -> Any:
        """A connection, once the server has started and has room for it: one that was closed takes room for a while."""
        import psycopg

        end = time.monotonic() + WAIT_S
        while True:
            try:
                return psycopg.connect(self.url(database=database).replace("+psycopg", ""), autocommit=True)
            except psycopg.OperationalError:
                goes_on = self._server is not None and self._server.poll() is None and time.monotonic() < end
                assert goes_on, (self.folder / "log").read_text()
                time.sleep(0.02)

    def stop(self, number: int = signal.SIGINT) -> None:
        """SIGINT: breaks off what is connected, as a restart does; SIGQUIT: without a word."""
        if self._server is not None:
            self._server.send_signal(number)
            self._server.wait()
            self._server = None

    def execute(self, command: str) -> None:
        with self.connected() as connection:
            connection.execute(command)

    def texts(self, database: str) -> bytes:
        """Every row of every table."""
        with self.connected(database) as connection:
            tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
            rows = [row for (name,) in tables for row in connection.execute(f'SELECT t::text FROM "{name}" t')]
        return "\n".join(text for (text,) in rows).encode()

    def _run(self, name: str, *words: Any) -> subprocess.Popen[bytes]:
        found = programs()
        assert found is not None, "whoever has no server does not ask"
        with open(self.folder / "log", "ab") as log:
            return subprocess.Popen(
                [found / name, *map(str, words)], cwd=self.folder, user=self._user, stdout=log, stderr=log,
                env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
            )  # fmt: skip


@contextmanager
def serving() -> Iterator[Postgres]:
    """A server with an empty database. It refuses to be run by root: then another user runs it."""
    user = next(each.pw_name for each in pwd.getpwall() if each.pw_uid) if os.getuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="flexfleet-postgres-") as made, socket.socket() as free:
        folder = Path(made)
        (folder / "word").write_text(PASSWORD)
        if user is not None:
            shutil.chown(folder, user)
        free.bind(("127.0.0.1", 0))
        server = Postgres(folder, free.getsockname()[1], user)
        free.close()
        options = ("-U", ADMIN, "-A", "scram-sha-256", f"--pwfile={folder / 'word'}", "-N", "-E", "UTF8")
        assert server._run("initdb", "-D", folder / "data", *options).wait() == 0, (folder / "log").read_text()
        try:
            server.start()
            yield server
        finally:
            server.stop()
