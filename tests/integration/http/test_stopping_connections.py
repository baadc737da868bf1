"""A server that stops answers what clients have sent, wherever it is: in the system's queue, on its way to another
process, or in a buffer that the event loop hasn't read."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from tests.support.server.asgi import free_listener

from comfyfleet.server.http import connections
from comfyfleet.server.http import listener as listening
from comfyfleet.server.http.acceptor import Acceptor
from comfyfleet.server.http.connections import HAS_HTTPTOOLS, H11Connection, with_limits
from comfyfleet.server.http.listener import SharedPort, serve
from comfyfleet.server.http.shared_port import ChildLine, ConnectionDispatcher, ParentLine
from comfyfleet.server.http.strangers import AddressLimiter

PATIENCE_SECONDS = 20
REQUEST = b"GET / HTTP/1.1\r\nHost: control.test\r\n\r\n"
POLL = b"POST /api/worker/poll HTTP/1.1\r\nHost: control.test\r\nContent-Length: 0\r\n\r\n"
PARSERS = ["h11", *(["httptools"] if HAS_HTTPTOOLS else [])]


@dataclass
class Running:
    """A server whose shutdown begins with `at_shutdown`, before the event loop turns again."""

    listener: socket.socket
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    polls: int = 0
    clients: "list[Client]" = field(default_factory=list)
    at_shutdown: Callable[[], object] = lambda: None
    serving: "asyncio.Task[None] | None" = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/api/worker/poll":
            self.polls += 1
            await self.release.wait()
        await Response("done")(scope, receive, send)

    async def end(self) -> None:
        assert self.serving is not None
        self.stop.set()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.serving


@pytest.fixture(params=PARSERS)
async def running(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Running]:
    running = Running(free_listener())
    shutdown = listening._Server.shutdown

    async def shut_down(server: Any, sockets: Any = None) -> None:
        running.at_shutdown()
        await shutdown(server, sockets)

    monkeypatch.setattr(listening._Server, "shutdown", shut_down)
    kind = with_limits(H11Connection) if request.param == "h11" else with_limits()
    running.serving = asyncio.create_task(
        serve(running, running.listener, running.stop, connection=kind)
    )
    yield running
    running.release.set()
    await running.end()
    for client in running.clients:
        client.writer.close()


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def connected(cls, running: Running) -> "Client":
        client = cls(*await asyncio.open_connection(*running.listener.getsockname()))
        running.clients.append(client)
        return client

    def ask(self, request: bytes = REQUEST) -> None:
        self.writer.write(request)

    async def answer(self) -> str:
        async with asyncio.timeout(PATIENCE_SECONDS):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
            await self.reader.readexactly(len("done"))
        return head

    async def rest(self) -> bytes:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.reader.read()


async def test_a_request_that_the_loop_has_not_read_is_answered(running: Running) -> None:
    client = await Client.connected(running)
    client.ask()
    await client.answer()
    running.at_shutdown = client.ask
    await running.end()
    assert "connection: close" in await client.answer()
    assert await client.rest() == b""


async def test_a_request_that_was_read_in_part_is_answered(running: Running) -> None:
    client = await Client.connected(running)
    client.ask()
    await client.answer()
    client.ask(REQUEST[:20])
    loop = asyncio.get_running_loop()
    running.at_shutdown = lambda: loop.call_soon(client.ask, REQUEST[20:])
    await running.end()
    assert "connection: close" in await client.answer()


async def test_the_first_request_of_a_new_connection_is_answered(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "FIRST_REQUEST_SECONDS", 3600.0)
    used, new = await Client.connected(running), await Client.connected(running)
    used.ask()
    await used.answer()
    running.stop.set()
    assert await used.rest() == b"", "an idle connection is closed at once"
    new.ask()
    assert "connection: close" in await new.answer()
    await running.end()


async def test_a_new_connection_without_a_request_is_closed_soon(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "FIRST_REQUEST_SECONDS", 0.0)
    monkeypatch.setattr(listening, "GRACE_SECONDS", 3600.0)
    client = await Client.connected(running)
    await running.end()
    assert await client.rest() == b""


async def test_a_poll_that_waits_for_its_turn_is_answered(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "POLLS_AT_ONCE", 1)
    clients = [await Client.connected(running) for _ in range(2)]
    for client in clients:
        client.ask(POLL)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not running.polls:  # noqa: ASYNC110
            await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    running.at_shutdown = lambda: loop.call_soon(running.release.set)
    await running.end()
    for client in clients:
        assert "connection: close" in await client.answer()


def connected_sockets(listener: socket.socket, count: int) -> list[socket.socket]:
    """Clients in the system's queue, which have sent their requests. The event loop doesn't turn."""
    clients = [socket.create_connection(listener.getsockname()) for _ in range(count)]
    for client in clients:
        client.sendall(REQUEST)
    return clients


async def responses(clients: list[socket.socket]) -> list[str]:
    def read(client: socket.socket) -> str:
        client.settimeout(PATIENCE_SECONDS)
        with client, client.makefile("rb") as file:
            return file.read().decode().lower()

    return list(await asyncio.gather(*(asyncio.to_thread(read, client) for client in clients)))


async def test_connections_in_the_systems_queue_are_accepted_at_the_end() -> None:
    taken: list[socket.socket] = []
    listener = free_listener()
    acceptor = Acceptor(listener, lambda client, _: taken.append(client))
    acceptor.start()
    clients = connected_sockets(listener, 3)
    acceptor.close()
    assert len(taken) == 3
    for client in (*clients, *taken):
        client.close()


async def test_connections_on_their_way_to_another_process_are_answered() -> None:
    """They are in the system's queue when the parent stops, and in the line when the child stops."""
    listener = free_listener()
    dispatcher = ConnectionDispatcher(listener, AddressLimiter())
    ours, theirs = socket.socketpair()
    line, stop = ChildLine(ours, dispatcher.remove), asyncio.Event()
    parent = ParentLine(theirs, stop)  # not started: it reads only what is left at the end
    served = Running(listener)
    serving = asyncio.create_task(serve(served, None, stop, shared=SharedPort(parent)))
    await line.ready.wait()
    dispatcher.add(line)
    dispatcher.open()
    clients = connected_sockets(listener, 3)
    dispatcher.close()
    stop.set()
    heads = await responses(clients)
    await serving
    assert ["200 ok" in head and "connection: close" in head for head in heads] == [True] * 3
    line.drain()
    parent.close()
    line.close()


async def test_connections_that_no_process_takes_any_more_get_503() -> None:
    listener = free_listener()
    dispatcher = ConnectionDispatcher(listener, AddressLimiter())
    ours, theirs = socket.socketpair()
    line = ChildLine(ours, dispatcher.remove)
    dispatcher.add(line)
    dispatcher.open()
    clients = connected_sockets(listener, 2)
    theirs.close()  # the only process has died
    dispatcher.close()
    line.drain()
    dispatcher.remove(line)
    for head in await responses(clients):
        assert "503 service unavailable" in head
        assert "retry-after: 1" in head
    line.close()
