"""Sends the same statements and commits with asyncpg, without our code."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import asyncpg

sys.path.append(str(Path(__file__).parents[2]))
from tests.support.databases.recorder import BEGIN, COMMIT, ENDS, Record, RecordedStatement

Pools = Mapping[str, asyncpg.Pool]


async def open_pools(urls: Mapping[str, str], size: int) -> dict[str, Any]:
    return {
        side: await asyncpg.create_pool(
            url, min_size=size, max_size=size, init=_plain, reset=_as_it_is
        )
        for side, url in urls.items()
    }


async def _plain(connection: asyncpg.Connection) -> None:
    """Makes the connection send JSON as the recorded text."""
    for kind in ("json", "jsonb"):
        await connection.set_type_codec(
            kind, schema="pg_catalog", encoder=str, decoder=str, format="text"
        )


async def _as_it_is(_connection: asyncpg.Connection) -> None:
    """Skips the reset that asyncpg's own pool would send for each connection."""


async def replay(pools: Pools, record: Record, new: Mapping[Any, Any]) -> None:
    """Sends the recorded statements with `new` values in place of the recorded ones, and with newly
    generated ids."""
    known = dict(new)
    connections: dict[str, Any] = {}
    open_transactions: dict[str, Any] = {}
    try:
        for statement in record.said:
            if statement.text.startswith(BEGIN):
                connections[statement.side] = await pools[statement.side].acquire()
                open_transactions[statement.side] = await _begun(
                    connections[statement.side], statement.text
                )
            elif statement.text in ENDS:
                await _ended(
                    connections[statement.side],
                    open_transactions.pop(statement.side),
                    statement.text,
                )
                await pools[statement.side].release(connections.pop(statement.side))
            elif statement.side in connections:
                await _send(connections[statement.side], statement, known)
            else:  # a single-statement transaction
                async with pools[statement.side].acquire() as connection:
                    await _send(connection, statement, known)
    finally:
        for side, connection in connections.items():
            await pools[side].release(connection)


async def _begun(connection: Any, text: str) -> Any:
    if text != BEGIN:
        await connection.execute(text)
        return None
    transaction = connection.transaction()
    await transaction.start()
    return transaction


async def _ended(connection: Any, transaction: Any, text: str) -> None:
    if transaction is None:
        await connection.execute(text)
    else:
        await (transaction.commit() if text == COMMIT else transaction.rollback())


async def _send(connection: Any, statement: RecordedStatement, known: dict[Any, Any]) -> None:
    rows = await connection.fetch(
        statement.text, *(_renewed(value, known) for value in statement.values)
    )
    for before, now in zip(statement.answered, rows, strict=False):
        for old, fresh in zip(before, now, strict=True):
            # Only row numbers are replaced, because smaller numbers are counts and flags.
            if type(old) is int and old >= NUMBERS_BEGIN:
                known[old] = fresh


# The recorded databases' sequences start here, so that no other number is equal to a row's number.
NUMBERS_BEGIN = 1_000_000_000


def _renewed(value: Any, known: Mapping[Any, Any]) -> Any:
    if isinstance(value, list):
        return [_renewed(item, known) for item in value]
    if isinstance(value, str):
        for old, fresh in known.items():
            if isinstance(old, str) and old in value:
                value = value.replace(old, fresh)
        return value
    try:
        return known.get(value, value)
    except TypeError:  # an unhashable value is never replaced
        return value
