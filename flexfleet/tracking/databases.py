"""Databases that are servers, for MLflow and for studies: their addresses, and which errors say that one is away."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from fl_engine.core.errors import ConfigError

KINDS = ("postgresql", "mysql", "mssql")
"""Schemes (before a +) of the database servers that MLflow supports."""
SERVERS = (*KINDS, "mariadb", "oracle")
"""Schemes of the database servers that SQLAlchemy, and therefore a study, supports."""
WHO = re.compile(r"[^:/]*(?::[^@]*)?@")
"""User and password in what follows ://, as SQLAlchemy reads them."""


def is_away(error: BaseException) -> bool:
    """Whether the error, or an error that caused it, says that a database does not answer or is busy."""
    from sqlalchemy.exc import InterfaceError, OperationalError

    kinds = (OperationalError, InterfaceError)
    return any(isinstance(each, kinds) or getattr(each, "connection_invalidated", False) for each in causes(error))


def cause(error: BaseException) -> BaseException:
    """The database's own error, which Optuna wraps into one with another text."""
    from sqlalchemy.exc import SQLAlchemyError

    return next((each for each in causes(error) if isinstance(each, SQLAlchemyError)), error)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, the error that caused it, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def check_spelling(name: str, address: str) -> None:
    """Raise ConfigError if `@` or a space in the user or password of parameter `name` is not quoted. SQLAlchemy would
    read the rest of the password as a part of the host's name, which its errors show."""
    scheme, sign, rest = address.partition("://")
    kind = scheme.partition("+")[0].lower()
    if not sign or kind not in (*SERVERS, "http", "https") or not (who := WHO.match(rest)):
        return
    has_at = kind in SERVERS and "@" in rest[who.end() :].partition("?")[0]
    if has_at or any(map(str.isspace, who[0])):
        raise ConfigError(
            f"{name} = {kind}://... has {'an @' if has_at else 'a space'} in its user or password. Write @ as %40, a "
            "space as %20, / as %2F, : as %3A and % as %25"
        )


@cache
def check_connection(address: str) -> None:
    """Connect to a database server, once in a process. MLflow would repeat a first connection that fails for two
    minutes. Raises SQLAlchemy's error."""
    if address.partition(":")[0].partition("+")[0] not in KINDS:
        return
    from mlflow.store.db.utils import create_sqlalchemy_engine

    engine = create_sqlalchemy_engine(address)
    try:
        engine.connect().close()
    finally:
        engine.dispose()
