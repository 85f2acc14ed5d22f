"""A PostgreSQL server on 127.0.0.1, which a test may stop, kill and start again."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ADMIN, PASSWORD = "admin", "pl4nted-word"


def programs() -> Path | None:
    """Return the folder of the newest PostgreSQL server, which Debian keeps out of PATH; None without one."""
    folders = [Path(found).resolve().parent for found in [shutil.which("pg_ctl")] if found]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda each: float(each.parent.name), reverse=True)
    return next((each for each in folders if (each / "pg_ctl").exists()), None)


class Postgres:
    """The server of a folder, with an empty database. `user` runs it; None: the user of the tests."""

    def __init__(self, folder: Path, port: int, user: str | None) -> None:
        self.folder, self.port, self._user = folder, port, user
        (folder / "word").write_text(PASSWORD)
        options = f"-U {ADMIN} -A scram-sha-256 --pwfile={folder / 'word'} -N -E UTF8"
        self._control("initdb", "-o", options)

    def url(self, login: str = f"{ADMIN}:{PASSWORD}", database: str = "postgres") -> str:
        return f"postgresql+psycopg://{login}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        own = {"listen_addresses": "127.0.0.1", "port": self.port, "unix_socket_directories": "", "fsync": "off"}
        options = " ".join(f"-c {key}='{value}'" for key, value in own.items())
        self._control("start", "-o", options, "-l", self.folder / "server.log")

    def stop(self, mode: str = "fast") -> None:
        """`mode`: "fast" closes the connections, as a restart does; "immediate" ends like a crash."""
        self._control("stop", "-m", mode)

    def connected(self, database: str = "postgres") -> Any:
        import psycopg

        return psycopg.connect(self.url(database=database).replace("+psycopg", ""), autocommit=True)

    def execute(self, command: str) -> None:
        with self.connected() as connection:
            connection.execute(command)

    def texts(self, database: str) -> bytes:
        """Return every row of every table."""
        with self.connected(database) as connection:
            tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
            rows = [row for (name,) in tables for row in connection.execute(f'SELECT t::text FROM "{name}" t')]
        return "\n".join(text for (text,) in rows).encode()

    def _control(self, verb: str, *words: Any) -> None:
        """Run pg_ctl, which waits until the server has started or ended."""
        found = programs()
        assert found is not None, "tests skip without a server"
        log = self.folder / "log"
        with log.open("ab") as to:
            done = subprocess.run(
                [found / "pg_ctl", verb, "-D", self.folder / "data", *words], cwd=self.folder, user=self._user,
                stdout=to, stderr=to, env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
            )  # fmt: skip
        assert done.returncode == 0, log.read_text()


@contextmanager
def serving() -> Iterator[Postgres]:
    """Yield a started server. PostgreSQL refuses to run as root, so then another user runs it."""
    user = next(each.pw_name for each in pwd.getpwall() if each.pw_uid) if os.getuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="flexfleet-postgres-") as made:
        folder = Path(made)
        if user is not None:
            shutil.chown(folder, user)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = Postgres(folder, port, user)
        server.start()
        try:
            yield server
        finally:
            if (folder / "data" / "postmaster.pid").exists():
                server.stop()
