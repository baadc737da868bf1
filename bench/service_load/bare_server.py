"""Runs the cheapest possible server: bare Starlette and the driver, with as many statements.

    bare_server.py FOLDER URL PROFILE

PROFILE is JSON. For each route it contains the number of statements that `read` and `write`, and of
transactions that `begin`. Without a URL the database is SQLite in the folder, as durable as ours.
"""

import asyncio
import json
import os
import socket
import sqlite3
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from uuid import uuid4

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Profile = Mapping[str, int]
Send = Callable[[Profile], Awaitable[None]]
ROWS, BODY = 1000, "x" * 200
CONNECTIONS = 10
MAKE = "CREATE TABLE floor_rows (id INTEGER PRIMARY KEY, body TEXT)"
# About as long as the answer to a worker's poll.
ANSWER = json.dumps({"job": {"prompt": "x" * 1000}}).encode()


def on_sqlite(folder: Path) -> Send:
    database = sqlite3.connect(folder / "floor.sqlite3", isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.execute(MAKE)
    for number in range(ROWS):
        database.execute("INSERT INTO floor_rows VALUES (?, ?)", (number, BODY))

    async def send(profile: Profile) -> None:
        for number in range(profile.get("read", 0)):
            database.execute("SELECT body FROM floor_rows WHERE id = ?", (number,)).fetchall()
        for writes in shares(profile):
            database.execute("BEGIN IMMEDIATE")
            for _ in range(writes):
                database.execute("INSERT INTO floor_rows (body) VALUES (?)", (BODY,))
            database.execute("COMMIT")

    return send


async def on_postgres(url: str) -> Send:
    import asyncpg

    async def as_it_is(_: object) -> None:
        """Skips the reset statement that asyncpg's pool would send for each connection."""

    pool = await asyncpg.create_pool(url, min_size=1, max_size=CONNECTIONS, reset=as_it_is)
    await pool.execute(MAKE.replace("INTEGER", "BIGSERIAL"))
    insert = "INSERT INTO floor_rows (body) VALUES ($1)"
    await pool.executemany(insert, [(BODY,)] * ROWS)

    async def send(profile: Profile) -> None:
        async with pool.acquire() as connection:
            for number in range(profile.get("read", 0)):
                await connection.fetch("SELECT body FROM floor_rows WHERE id = $1", number)
            for writes in shares(profile):
                await connection.execute("BEGIN")
                for _ in range(writes):
                    await connection.fetch(insert, BODY)
                await connection.execute("COMMIT")

    return send


def shares(profile: Profile) -> list[int]:
    """Returns the number of writes of each transaction."""
    transactions, writes = profile.get("begin", 0), profile.get("write", 0)
    return [
        writes // transactions + (number < writes % transactions) for number in range(transactions)
    ]


def stored(folder: Path, data: bytes) -> None:
    part, place = folder / f"{uuid4()}.part", folder / f"{uuid4()}.png"
    with part.open("wb") as file:
        file.write(data)
        os.fsync(file.fileno())
    part.rename(place)
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def app_of(folder: Path, send: Send, profiles: Mapping[str, Profile]) -> Starlette:
    async def answer(request: Request) -> Response:
        body = await request.body()
        if request.method == "PUT":
            await asyncio.to_thread(stored, folder, body)
        elif body:
            json.loads(body)
        await send(profiles.get(request.path_params["route"], {}))
        return Response(ANSWER, media_type="application/json")

    return Starlette(routes=[Route("/{route}", answer, methods=["GET", "POST", "PUT"])])


async def main(folder: Path, url: str, profiles: Mapping[str, Profile]) -> None:
    send = await on_postgres(url) if url else on_sqlite(folder)
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"Floor at http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(app_of(folder, send, profiles), log_config=None)
    await uvicorn.Server(config).serve([listener])


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])))
