"""Databases that are servers: their addresses, and what they say through SQLAlchemy, that they are away, which another
try may mend, or that they let nobody in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from fl_engine.core.errors import ConfigError

KINDS = ("postgresql", "mysql", "mssql")
"""Schemes of addresses (before a +) of databases that are servers, as MLflow takes them."""
SERVERS = (*KINDS, "mariadb", "oracle")
"""As SQLAlchemy, and so a study, takes them."""
WHO = re.compile(r"[^:/]*(?::[^@]*)?@")
"""User and password of an address, as SQLAlchemy reads what follows its ://."""
MEANT = re.compile(rf"({'|'.join(SERVERS)})(\+\w+)?(:/|//)", re.IGNORECASE)
"""How an address of these begins, also with a colon or a slash too few."""
AWAY = re.compile(
    # A connection that cannot be made, or is lost: what the system, PostgreSQL, MySQL and SQL Server say.
    r"[Cc]onnection (refused|reset|aborted|broken|timed out|already closed|(is|has been) (lost|closed))|timeout expired"
    r"|could not (connect|translate host|receive data from|send data to)|failed to resolve host|closed the connection"
    r"|No route to host|Network is unreachable|Can't connect to|Lost connection to|has gone away|SSL SYSCALL error"
    r"|Communication link failure"
    # A server that stops, starts, recovers, or serves as many as it can.
    r"|terminating connection|database system is|not currently accepting connections|[Tt]oo many (clients|connections)"
    r"|connection slots are reserved|max_user_connections|shutdown in progress|QueuePool limit|Can't reconnect"
    # Another transaction is in the way.
    r"|database is locked|deadlock detected|Deadlock found|Lock wait timeout|could not serialize access"
)
REFUSES = re.compile(
    r"authentication failed|no password supplied|(Access denied|Login failed) for user|denied to user"
    r"|no pg_hba\.conf entry|(role|database) \"[^\"]*\" does not exist|Unknown database|permission denied for database"
    r"|not permitted to log in|SSL was required|certificate verify failed|CERTIFICATE_VERIFY_FAILED",
)
"""What a database's server says, or its driver, if it does not let somebody in, or do it, however often they ask."""


def is_away(error: BaseException) -> bool:
    """Whether the error, or one that it was raised from, is of a database that does not answer for now. A server that
    refuses has answered, though others of its addresses may not have (of `localhost`, ::1 and 127.0.0.1)."""
    lost = any(getattr(each, "connection_invalidated", False) for each in _chain(error))
    return (lost or _says(AWAY, error)) and not refuses(error)


def was_lost(error: BaseException) -> bool:
    """As `is_away`, for a database that has answered before: then a driver's error of operation, whatever it says, is
    no wrong address."""
    from sqlalchemy.exc import InterfaceError, OperationalError

    by_kind = isinstance(cause(error), OperationalError | InterfaceError)
    return is_away(error) or (by_kind and not refuses(error))


def refuses(error: BaseException) -> bool:
    """Whether a database does not let somebody in: password, name of the database, TLS."""
    return _says(REFUSES, error)


def _says(what: re.Pattern[str], error: BaseException) -> bool:
    """Whether the error says it, or one that it was raised from; what SQLAlchemy adds are the values of a command."""
    return any(what.search(str(each).partition("[SQL: ")[0]) for each in _chain(error))


def cause(error: BaseException) -> BaseException:
    """The error of the database, of which Optuna makes another one that speaks of something else."""
    from sqlalchemy.exc import SQLAlchemyError

    return next((each for each in _chain(error) if isinstance(each, SQLAlchemyError)), error)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def check_spelling(name: str, address: str) -> None:
    """Raises ConfigError for an address whose user or password is not quoted, where SQLAlchemy reads the rest of a
    password as the host's name, which errors tell, or where no text shows its end; and for one whose :// is misspelt,
    in which `masked` finds no password. `name`: of the parameter."""
    scheme, sign, rest = address.partition("://")
    if not sign and (meant := MEANT.match(address)):
        raise ConfigError(f"{name} = {meant[1].lower()}... cannot be used: :// is expected after its scheme")
    kind = scheme.partition("+")[0].lower()
    if not sign or kind not in (*SERVERS, "http", "https") or not (who := WHO.match(rest)):
        return
    many = kind in SERVERS and "@" in rest[who.end() :].partition("?")[0]
    if many or any(map(str.isspace, who[0])):
        raise ConfigError(
            f"{name} = {kind}://... cannot be used: {'an @' if many else 'a space'} in its user or password is to be "
            f"quoted, as {'%40' if many else '%20'} (and / as %2F, : as %3A, % as %25)"
        )


@cache  # of a process, which asks once
def check_let_in(address: str) -> None:
    """Connects as MLflow would, certificates of its own settings included. Raises what SQLAlchemy does if the database
    answers and refuses; MLflow would ask it again for two minutes. One that is away is MLflow's to wait for."""
    if address.partition(":")[0].partition("+")[0] not in KINDS:
        return
    from mlflow.store.db.utils import create_sqlalchemy_engine
    from sqlalchemy.exc import DBAPIError

    engine = create_sqlalchemy_engine(address)
    try:
        engine.connect().close()
    except DBAPIError as error:
        if not is_away(error):
            raise
    finally:
        engine.dispose()
