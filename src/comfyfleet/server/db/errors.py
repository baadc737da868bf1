"""Classifies database errors (unreachable, value out of range, faulty statement), and determines
their log level.
"""

import logging
import sqlite3

from sqlalchemy.exc import DBAPIError

from comfyfleet.errors import FleetError, is_logged


def to_sqlalchemy_error(error: sqlite3.Error, sql: str) -> BaseException:
    """Wraps an error of sqlite3 as SQLAlchemy's Core does, because callers catch it by those names."""
    return DBAPIError.instance(sql, None, error, sqlite3.Error)


def is_disconnect(error: BaseException) -> bool:
    """Whether the server is lost or shutting down, so that the statement itself is not at fault."""
    import asyncpg  # optional: only whoever uses PostgreSQL has it

    away = (
        asyncpg.PostgresConnectionError,
        asyncpg.InterfaceError,
        # a statement that was sent after the server closed, before the driver noticed
        asyncpg.InternalClientError,
        asyncpg.AdminShutdownError,
        asyncpg.CannotConnectNowError,
        asyncpg.CrashShutdownError,
        asyncpg.TooManyConnectionsError,
    )
    # asyncpg also reports a value that doesn't fit its column as an interface error.
    return isinstance(error, (*away, OSError)) and not isinstance(error, asyncpg.DataError)


def is_caused_by_disconnect(error: Exception) -> bool:
    """Whether the error comes from a lost connection. SQLAlchemy wraps such errors twice and
    recognizes few of them.
    """
    driver = _postgres_error(error)
    is_invalid = isinstance(error, DBAPIError) and error.connection_invalidated
    is_lost = driver is not None and is_disconnect(driver)
    return is_invalid or is_lost or _is_of_a_closed_driver(error)


def _is_of_a_closed_driver(error: Exception) -> bool:
    """Whether asyncpg was interrupted in a call. Its connection then has no protocol any more,
    which it doesn't check.
    """
    if not isinstance(error, AttributeError) or error.obj is not None:
        return False
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    module = traceback.tb_frame.f_globals.get("__name__", "") if traceback else ""
    return str(module).startswith(("asyncpg.", "sqlalchemy.dialects.postgresql.asyncpg"))


def is_caused_by_bad_value(error: Exception) -> bool:
    """Whether a value doesn't fit its column, such as a number that is too large or a string with a
    NUL character.
    """
    driver = _postgres_error(error)
    if driver is None:
        return False
    import asyncpg

    misfits = (
        asyncpg.NumericValueOutOfRangeError,
        asyncpg.CharacterNotInRepertoireError,
        asyncpg.UntranslatableCharacterError,
        asyncpg.StringDataRightTruncationError,
    )
    # The error was raised before sending. A value of the wrong type is our own bug, and is not
    # hidden.
    is_refused = isinstance(driver.__cause__, OverflowError | UnicodeEncodeError)
    return isinstance(driver, misfits) or (isinstance(driver, asyncpg.DataError) and is_refused)


def is_caused_by_full_disk(error: Exception) -> bool:
    driver = _postgres_error(error)
    if driver is not None:
        import asyncpg

        return isinstance(driver, asyncpg.DiskFullError)
    origin = error.orig if isinstance(error, DBAPIError) else error
    return getattr(origin, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL


def _postgres_error(error: Exception) -> BaseException | None:
    """Returns the driver's own error, wrapped or not, because some statements are sent without
    SQLAlchemy.
    """
    driver: BaseException | None = error
    if isinstance(error, DBAPIError):
        driver = error.orig.__cause__ if error.orig is not None else None
    return driver if type(driver).__module__.startswith("asyncpg") else None


def log_level_of(error: FleetError) -> int:
    """Returns the log level for consequences of an error. It is DEBUG if the outage is logged
    already, because they would flood the log.
    """
    return logging.DEBUG if is_logged(error) else logging.WARNING
