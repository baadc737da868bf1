"""Classifies database errors, for example as a lost connection or a value out of range, and
determines their log level.
"""

import logging
import sqlite3

from sqlalchemy.exc import DBAPIError

from comfyfleet.errors import FleetError, is_logged


def to_sqlalchemy_error(error: sqlite3.Error, sql: str) -> BaseException:
    """Wraps an error of sqlite3 in SQLAlchemy's error class, which callers catch."""
    return DBAPIError.instance(sql, None, error, sqlite3.Error)


def is_disconnect(error: BaseException) -> bool:
    """Checks whether the error comes from a lost or closing server and not from the statement."""
    import asyncpg  # An optional dependency, which is only installed for PostgreSQL.

    lost = (
        asyncpg.PostgresConnectionError,
        asyncpg.InterfaceError,
        # The statement was sent after the server had closed the connection, but before the driver
        # noticed it.
        asyncpg.InternalClientError,
        asyncpg.AdminShutdownError,
        asyncpg.CannotConnectNowError,
        asyncpg.CrashShutdownError,
        asyncpg.TooManyConnectionsError,
    )
    # asyncpg also reports a value that doesn't fit its column as an interface error.
    return isinstance(error, (*lost, OSError)) and not isinstance(error, asyncpg.DataError)


def is_caused_by_disconnect(error: Exception) -> bool:
    """Checks whether the error comes from a lost connection. SQLAlchemy wraps such errors twice,
    and recognizes only a few of them.
    """
    driver = _postgres_error(error)
    is_invalid = isinstance(error, DBAPIError) and error.connection_invalidated
    is_lost = driver is not None and is_disconnect(driver)
    return is_invalid or is_lost or _comes_from_closed_driver(error)


def _comes_from_closed_driver(error: Exception) -> bool:
    """Checks for the AttributeError that asyncpg raises if its connection was closed during a call.
    In that case, asyncpg accesses a missing protocol object without checking for it.
    """
    if not isinstance(error, AttributeError) or error.obj is not None:
        return False
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    module = traceback.tb_frame.f_globals.get("__name__", "") if traceback else ""
    return str(module).startswith(("asyncpg.", "sqlalchemy.dialects.postgresql.asyncpg"))


def is_caused_by_bad_value(error: Exception) -> bool:
    """Checks whether a value doesn't fit its column, for example because a number is too large or a
    string contains a NUL character.
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
    # The driver refused the value before sending it. A value of the wrong type is a bug, so it
    # isn't reported as a bad value.
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
    """Returns asyncpg's own error, or None for other errors. SQLAlchemy wraps it, but some
    statements are sent without SQLAlchemy.
    """
    driver: BaseException | None = error
    if isinstance(error, DBAPIError):
        driver = error.orig.__cause__ if error.orig is not None else None
    return driver if type(driver).__module__.startswith("asyncpg") else None


def log_level_of(error: FleetError) -> int:
    """Returns the level at which the consequences of an error are logged. This is DEBUG if the
    outage itself was already logged, because its many consequences would flood the log.
    """
    return logging.DEBUG if is_logged(error) else logging.WARNING
