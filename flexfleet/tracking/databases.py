"""Check the addresses of the databases that MLflow and studies use, and detect outages of these databases."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache

from fl_engine.core.errors import ConfigError, first_line, masked

KINDS = ("postgresql", "mysql", "mssql")
"""Address schemes of the database servers that MLflow supports, without the driver after `+`."""
SERVERS = (*KINDS, "mariadb", "oracle")
"""Address schemes of the database servers that SQLAlchemy supports. Studies can use any of these servers."""
WHO = re.compile(r"[^:/]*(?::[^@]*)?@")
"""Pattern of the user and password after `://`, as SQLAlchemy defines it."""


def is_away(error: BaseException) -> bool:
    """Return whether the error or one of its causes means that a database is unreachable or busy."""
    from sqlalchemy.exc import InterfaceError, OperationalError

    kinds = (OperationalError, InterfaceError)
    return any(isinstance(each, kinds) or getattr(each, "connection_invalidated", False) for each in causes(error))


def cause(error: BaseException) -> BaseException:
    """Return the original error of the database, which Optuna wraps in its own error."""
    from sqlalchemy.exc import SQLAlchemyError

    return next((each for each in causes(error) if isinstance(each, SQLAlchemyError)), error)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its chain of causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def check_spelling(name: str, address: str) -> None:
    """Raise ConfigError if the user name or password contains a space or `@` without percent-encoding. SQLAlchemy would
    otherwise print a part of the password as the host name. `name` is the parameter that contains the address."""
    scheme, sign, rest = address.partition("://")
    kind = scheme.partition("+")[0].lower()
    if not sign or kind not in (*SERVERS, "http", "https") or not (who := WHO.match(rest)):
        return
    has_at = kind in SERVERS and "@" in rest[who.end() :].partition("?")[0]
    if has_at or any(map(str.isspace, who[0])):
        raise ConfigError.at(
            f"{name} = {kind}://... must not have {'@' if has_at else 'a space'} in the user or password. Write @ as "
            "%40, a space as %20, / as %2F, : as %3A and % as %25"
        )


def check_url(name: str, address: str) -> None:
    """Raise ConfigError if a study cannot use the address, for example because its scheme is unknown. `name` is the
    parameter that contains the address."""
    check_spelling(name, address)
    with suppress(ImportError):  # without optuna, only the spelling can be checked
        from sqlalchemy import make_url
        from sqlalchemy.exc import ArgumentError

        try:
            make_url(address).get_dialect()
        except (ArgumentError, ValueError) as error:
            raise ConfigError.at(
                f"{name} must be the URL of a database, such as sqlite:///study.db or postgresql://host/studies, got "
                f"{masked(address)!r}: {first_line(error)}"
            ) from None


@cache
def check_connection(address: str) -> None:
    """Test the connection to a database once per process, because MLflow would retry a failing connection for two
    minutes. Raises SQLAlchemy's error if the test fails."""
    if address.partition(":")[0].partition("+")[0] not in (*KINDS, "sqlite"):
        return
    from mlflow.store.db.utils import create_sqlalchemy_engine
    from sqlalchemy import inspect

    engine = create_sqlalchemy_engine(address)
    try:
        inspect(engine).has_table("runs")  # SQLite opens the file at the first query
    finally:
        engine.dispose()
