"""A response that can't be completed: its connection is closed, and the log has a traceback only for a bug."""

import asyncio
import logging
from typing import Any

import httpx
import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from tests.support.server.asgi import free_listener, url_of

from comfyfleet.errors import LOGGED, FleetError, LimitExceeded, Unavailable
from comfyfleet.server.app import ProcessMetrics
from comfyfleet.server.http.connections import HAS_HTTPTOOLS, H11Connection, with_limits
from comfyfleet.server.http.listener import serve
from comfyfleet.server.http.middleware import AccessLog

KINDS = [H11Connection, *([None] if HAS_HTTPTOOLS else [])]  # None: the default, httptools


async def records_of(
    error: Exception, kind: Any, caplog: pytest.LogCaptureFixture
) -> list[logging.LogRecord]:
    """Returns what is logged when a response fails after its first bytes."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        raise error

    listener, stop = free_listener(), asyncio.Event()
    connection = with_limits(kind) if kind else with_limits()
    serving = asyncio.create_task(
        serve(AccessLog(app, ProcessMetrics()), listener, stop, connection=connection)
    )
    async with httpx.AsyncClient() as client:
        with caplog.at_level(logging.WARNING), pytest.raises(httpx.TransportError):
            await client.get(url_of(listener) + "/export")
    stop.set()
    await serving
    return [each for each in caplog.records if each.levelno >= logging.WARNING]


def logged_outage() -> FleetError:
    error = Unavailable("the connection to the database was lost")
    error.add_note(LOGGED)
    return error


@pytest.mark.parametrize("kind", KINDS)
async def test_an_outage_that_is_logged_adds_nothing(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert await records_of(logged_outage(), kind, caplog) == []


@pytest.mark.parametrize("kind", KINDS)
async def test_another_expected_error_is_one_line(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (record,) = await records_of(LimitExceeded("it is too large"), kind, caplog)
    assert record.getMessage() == "GET /export was interrupted: it is too large"
    assert record.exc_info is None


@pytest.mark.parametrize("kind", KINDS)
async def test_a_bug_has_a_traceback(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    records = await records_of(ValueError("bug"), kind, caplog)
    assert "unexpected error in GET /export" in [record.getMessage() for record in records]
    assert all(record.exc_info for record in records)


async def test_a_client_that_hangs_up_before_its_body_is_complete_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise ClientDisconnect

    with caplog.at_level(logging.WARNING):
        await AccessLog(app, ProcessMetrics())(scope_of("/hooks/a"), nothing, nothing)
    assert caplog.records == []


def scope_of(path: str) -> Scope:
    return {"type": "http", "method": "POST", "path": path, "headers": []}


async def nothing(*_: object) -> Any:
    raise AssertionError
