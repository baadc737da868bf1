"""What a database's error means: it is away, a value doesn't fit, or our statement is wrong."""

import sqlite3

from sqlalchemy.exc import DBAPIError


def core_error(error: sqlite3.Error, sql: str) -> BaseException:
    """As Core tells it: callers know errors of SQLite by those names."""
    return DBAPIError.instance(sql, None, error, sqlite3.Error)


def is_loss(error: BaseException) -> bool:
    """The server is away, or about to be: nothing is wrong with what was asked."""
    import asyncpg  # optional: only whoever uses PostgreSQL has it

    away = (
        asyncpg.PostgresConnectionError,
        asyncpg.InterfaceError,
        # Of a statement right after the server's farewell, before the driver has seen the end.
        asyncpg.InternalClientError,
        asyncpg.AdminShutdownError,
        asyncpg.CannotConnectNowError,
        asyncpg.CrashShutdownError,
        asyncpg.TooManyConnectionsError,
    )
    # asyncpg calls a value that doesn't fit its column an error of the interface, too.
    return isinstance(error, (*away, OSError)) and not isinstance(error, asyncpg.DataError)


def is_loss_within(error: Exception) -> bool:
    """SQLAlchemy wraps the driver's error twice, and knows few of those that mean a loss."""
    driver = _postgres_error(error)
    is_invalid = isinstance(error, DBAPIError) and error.connection_invalidated
    return is_invalid or (driver is not None and is_loss(driver))


def is_misfit_within(error: Exception) -> bool:
    """A value that no column can hold: a number too large, a text with a NUL character."""
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
    # Before it was sent: a value of the wrong type is our own mistake, and stays one.
    is_refused = isinstance(driver.__cause__, OverflowError | UnicodeEncodeError)
    return isinstance(driver, misfits) or (isinstance(driver, asyncpg.DataError) and is_refused)


def _postgres_error(error: Exception) -> BaseException | None:
    """The driver's own, wrapped or not: some statements are sent without SQLAlchemy."""
    driver: BaseException | None = error
    if isinstance(error, DBAPIError):
        driver = error.orig.__cause__ if error.orig is not None else None
    return driver if type(driver).__module__.startswith("asyncpg") else None
