"""Names inside of SQLAlchemy, aiosqlite and uvicorn that we use: a version without them fails here, by name."""

import asyncio
import inspect
import sqlite3
import threading
import tomllib
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from packaging.requirements import Requirement
from sqlalchemy import Column, Integer, MetaData, Table, bindparam, insert, select, update
from sqlalchemy.dialects.postgresql.asyncpg import dialect as postgres
from sqlalchemy.dialects.sqlite.aiosqlite import dialect as sqlite
from sqlalchemy.engine import Dialect
from tests.support.server.asgi import free_listener, url_of
from uvicorn.config import Config
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.flow_control import CLOSE_HEADER, FlowControl
from uvicorn.server import Server, ServerState

from comfyfleet.server.db import Database
from comfyfleet.server.db.database import connect, driver_of
from comfyfleet.server.http.connections import (
    HAS_HTTPTOOLS,
    H11Connection,
    HttpConnection,
    HttptoolsConnection,
    with_limits,
)
from comfyfleet.server.http.listener import serve

THINGS = Table(
    "things",
    MetaData(),
    Column("id", Integer, primary_key=True),
    Column("count", Integer, default=lambda: 1, onupdate=lambda: 2),
)
DIALECTS = [
    pytest.param(sqlite(), id="sqlite"),
    pytest.param(postgres(), id="postgres"),  # type: ignore[no-untyped-call]
]


async def test_aiosqlite_runs_calls_on_its_connection_in_a_thread_of_its_own() -> None:
    async with AsyncExitStack() as stack:
        connection = await connect(":memory:")
        stack.push_async_callback(connection.close)
        assert isinstance(connection._conn, sqlite3.Connection)
        assert isinstance(connection._thread, threading.Thread)
        assert connection._thread.daemon
        assert await connection._execute(threading.current_thread) is connection._thread  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_sqlalchemy_compiles_tells_the_order_of_its_values(dialect: Dialect) -> None:
    built = select(THINGS).where(
        THINGS.c.count == bindparam("of_count"), THINGS.c.id > bindparam("after", 7)
    )
    compiled = built.compile(dialect=dialect)
    assert compiled.positiontup == ["of_count", "after"]
    binds = compiled.binds
    assert (binds["of_count"].required, binds["after"].required) == (True, False)
    assert binds["after"].value == 7


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_sqlalchemy_compiles_tells_what_is_not_fixed(dialect: Dialect) -> None:
    listed = select(THINGS).where(THINGS.c.id.in_([1, 2])).compile(dialect=dialect)
    assert listed.post_compile_params
    added = insert(THINGS).compile(dialect=dialect, column_keys=["id"])
    assert added.insert_prefetch
    changed = update(THINGS).values(id=bindparam("to_id")).compile(dialect=dialect)
    assert changed.update_prefetch


async def test_sqlalchemy_lends_the_drivers_own_connection(pool: Database) -> None:
    async with pool.read() as tx:
        driver = driver_of(tx)
        if pool.is_sqlite:
            assert await driver.fetch("SELECT 1", ()) == [(1,)]
        else:
            assert [tuple(row) for row in await driver.fetch("SELECT 1")] == [(1,)]
            assert (driver.is_closed(), driver.is_in_transaction()) == (False, False)


CONNECTION_METHODS = (
    "_unset_keepalive_if_required",
    "connection_lost",
    "connection_made",
    "data_received",
    "handle_websocket_upgrade",
    "on_response_complete",
    "send_400_response",
    "shutdown",
    "timeout_keep_alive_handler",
)
HTTPTOOLS_METHODS = (
    "_should_upgrade",
    "_unsupported_upgrade_warning",
    "on_body",
    "on_header",
    "on_headers_complete",
    "on_message_begin",
    "on_message_complete",
)
CONNECTION_NAMES = (
    "app_state",
    "client",
    "config",
    "connections",
    "cycle",
    "flow",
    "headers",
    "loop",
    "scope",
    "server_state",
    "timeout_keep_alive",
    "timeout_keep_alive_task",
    "transport",
)
CYCLE_NAMES = (
    "default_headers",
    "disconnected",
    "keep_alive",
    "message_event",
    "more_body",
    "response_complete",
    "response_started",
    "transport",
)
KINDS = [
    pytest.param(H11Connection, ("handle_events",), ("conn",), id="h11"),
    *(
        [
            pytest.param(
                HttptoolsConnection,
                HTTPTOOLS_METHODS,
                ("parser", "pipeline", "url"),
                id="httptools",
            )
        ]
        if HAS_HTTPTOOLS
        else []
    ),
]


@pytest.mark.parametrize(("kind", "methods", "names"), KINDS)
async def test_uvicorns_connections_have_the_names_that_ours_extend(
    kind: type[HttpConnection], methods: tuple[str, ...], names: tuple[str, ...]
) -> None:
    base = kind.__mro__[2]
    assert base.__module__.startswith("uvicorn.")
    assert {each for each in (*CONNECTION_METHODS, *methods) if not hasattr(base, each)} == set()
    found: list[HttpConnection] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        connection = scope["state"]["connection"]
        assert {
            each for each in (*CONNECTION_NAMES, *names) if not hasattr(connection, each)
        } == set()
        assert {each for each in CYCLE_NAMES if not hasattr(connection.cycle, each)} == set()
        assert connection in connection.server_state.connections
        assert isinstance(connection.flow, FlowControl)
        assert connection.flow.write_paused is False
        found.append(connection)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    listener, stop = free_listener(), asyncio.Event()
    serving = asyncio.create_task(serve(app, listener, stop, connection=with_limits(kind)))
    async with httpx.AsyncClient() as client:
        assert (await client.get(url_of(listener))).status_code == 204
    stop.set()
    await serving
    assert len(found) == 1


async def test_uvicorns_server_has_the_names_that_ours_extends() -> None:
    config = Config(lambda: None, lifespan="off", log_config=None, http=H11Connection)
    config.load()
    server = Server(config)
    names = ("capture_signals", "main_loop", "on_tick", "serve", "shutdown", "startup")
    assert {each for each in names if not hasattr(server, each)} == set()
    assert config.http_protocol_class is H11Connection
    assert isinstance(config.encoded_headers, list)
    state = server.server_state
    assert isinstance(state, ServerState)
    assert (state.connections, state.tasks, state.default_headers) == (set(), set(), [])
    assert state.total_requests == 0
    assert server.should_exit is False
    assert list(inspect.signature(H11Connection.__init__).parameters)[1:4] == [
        "config",
        "server_state",
        "app_state",
    ]
    server.lifespan = config.lifespan_class(config)
    await server.startup([])
    assert server.servers == []
    assert server.lifespan.state == {}
    assert CLOSE_HEADER == (b"connection", b"close")


def test_uvicorns_proxy_headers_tell_which_hosts_are_trusted() -> None:
    no_app: Any = None
    assert "10.1.2.3" in ProxyHeadersMiddleware(no_app, "10.0.0.0/8").trusted_hosts


def test_each_extra_bounds_the_version_of_uvicorn() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    named = [
        Requirement(text) for extra in project["optional-dependencies"].values() for text in extra
    ]
    found = [each for each in named if each.name == "uvicorn"]
    assert len(found) >= 2
    for requirement in found:
        assert {"<", ">="} <= {part.operator for part in requirement.specifier}
