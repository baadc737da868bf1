"""A database that is away, told apart from a statement that is wrong."""

from sqlalchemy.exc import DBAPIError


def is_loss(error: BaseException) -> bool:
    """The server is away, or about to be: nothing is wrong with what was asked."""
    import asyncpg  # optional: only whoever uses PostgreSQL has it

    away = (
        asyncpg.PostgresConnectionError,
        asyncpg.InterfaceError,
        asyncpg.AdminShutdownError,
        asyncpg.CannotConnectNowError,
        asyncpg.CrashShutdownError,
        asyncpg.TooManyConnectionsError,
    )
    # asyncpg calls a value that doesn't fit its column an error of the interface, too.
    return isinstance(error, (*away, OSError)) and not isinstance(error, asyncpg.DataError)


def is_loss_within(error: DBAPIError) -> bool:
    """SQLAlchemy wraps the driver's error twice, and knows few of those that mean a loss."""
    driver = error.orig.__cause__ if error.orig is not None else None
    is_postgres = type(driver).__module__.startswith("asyncpg")
    return error.connection_invalidated or (is_postgres and driver is not None and is_loss(driver))
