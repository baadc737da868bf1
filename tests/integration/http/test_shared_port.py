"""Several servers behind one port: connections are distributed by count, move, and outlive a server that never
took them."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from tests.support.server.asgi import free_listener

from comfyfleet.server.http import shared_port
from comfyfleet.server.http.connections import note_valid_key
from comfyfleet.server.http.listener import SharedPort, serve
from comfyfleet.server.http.shared_port import ChildLine, ConnectionDispatcher, ParentLine
from comfyfleet.server.http.strangers import AddressLimiter, KeylessRequests

PATIENCE_SECONDS = 20
SERVERS = 4
REQUEST = b"GET /%b HTTP/1.1\r\nHost: control.test\r\n\r\n"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@dataclass
class Server:
    """One of several servers; the parent talks to it by `line`."""

    name: str
    line: ChildLine
    parent: ParentLine
    stop: asyncio.Event
    serving: "asyncio.Task[None]"

    async def end(self) -> None:
        self.stop.set()
        await self.serving
        self.parent.close()


@dataclass
class Port:
    dispatcher: ConnectionDispatcher
    listener: socket.socket
    servers: list[Server] = field(default_factory=list)
    clients: list["Client"] = field(default_factory=list)

    async def add_server(self) -> Server:
        ours, theirs = socket.socketpair()
        name, stop = f"server-{len(self.servers)}", asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] == "/key":
                note_valid_key(scope)
            await Response(name)(scope, receive, send)

        line = ChildLine(ours, self.dispatcher.remove)
        parent = ParentLine(theirs, stop)
        parent.start()
        counted = KeylessRequests(app)
        serving = asyncio.create_task(serve(counted, None, stop, shared=SharedPort(parent)))
        server = Server(name, line, parent, stop, serving)
        self.servers.append(server)
        await line.ready.wait()
        return server

    async def client(self, path: bytes = b"") -> "Client":
        reader, writer = await asyncio.open_connection(*self.listener.getsockname())
        client = Client(reader, writer)
        self.clients.append(client)
        client.ask(path)
        return client

    def counts(self) -> list[int]:
        return [server.line.connections for server in self.servers]


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    closes: bool = False

    def ask(self, path: bytes = b"") -> None:
        self.writer.write(REQUEST % path)

    async def answer(self) -> str:
        async with asyncio.timeout(PATIENCE_SECONDS):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
            size = int(head.partition("content-length: ")[2].split("\r\n")[0])
            self.closes = "connection: close" in head
            return (await self.reader.readexactly(size)).decode()


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    listener = free_listener()
    limits: Any = AddressLimiter(20, is_exempt=lambda _: False)
    port = Port(ConnectionDispatcher(listener, limits), listener)
    try:
        yield port
    finally:
        port.dispatcher.close()
        for client in port.clients:
            client.writer.close()
        for server in port.servers:
            await server.end()
            server.line.close()


async def serving_port(port: Port) -> None:
    for _ in range(SERVERS):
        server = await port.add_server()
        port.dispatcher.add(server.line)
    port.dispatcher.open()


async def test_each_server_gets_the_same_number_of_connections(port: Port) -> None:
    await serving_port(port)
    for _ in range(20):
        await (await port.client()).answer()
    assert port.counts() == [5, 5, 5, 5]
    for client in port.clients[:4]:
        client.writer.close()
    await until(lambda: sum(port.counts()) == 16)
    for _ in range(4):
        await (await port.client()).answer()
    assert port.counts() == [5, 5, 5, 5]


async def test_nothing_is_accepted_before_the_port_is_open(port: Port) -> None:
    clients = [await port.client() for _ in range(8)]
    for _ in range(SERVERS):
        port.dispatcher.add((await port.add_server()).line)
    assert port.counts() == [0, 0, 0, 0]
    port.dispatcher.open()
    names = [await client.answer() for client in clients]
    assert sorted(names) == sorted([server.name for server in port.servers] * 2)


async def test_connections_without_a_key_are_limited_over_all_servers(port: Port) -> None:
    await serving_port(port)
    for _ in range(20):
        await (await port.client()).answer()
    refused = await port.client()
    assert "without a valid key" in await refused.answer()
    port.clients[0].ask(b"key")
    await port.clients[0].answer()
    await until(lambda: port.dispatcher._limits._counts["127.0.0.1"] == 19)
    assert (await (await port.client()).answer()).startswith("server-")
    port.clients[-1].writer.close()
    port.clients[0].ask()
    await port.clients[0].answer()
    await until(lambda: port.dispatcher._limits._counts["127.0.0.1"] == 20)
    assert "without a valid key" in await (await port.client()).answer()


async def test_a_server_with_more_than_its_share_closes_connections(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_port, "BALANCE_SECONDS", 0.05)
    first = await port.add_server()
    port.dispatcher.add(first.line)
    port.dispatcher.open()
    clients = [await port.client(b"key") for _ in range(16)]
    for client in clients:
        await client.answer()
    second = await port.add_server()
    port.dispatcher.add(second.line)

    async def exchange() -> None:
        """Asks again by each connection; those that close are opened anew."""
        for client in list(clients):
            client.ask(b"key")
            await client.answer()
            if client.closes:
                clients.remove(client)
                client.writer.close()
                clients.append(await port.client(b"key"))
                await clients[-1].answer()

    async with asyncio.timeout(PATIENCE_SECONDS):
        while max(port.counts()) > 10:
            await exchange()
            await asyncio.sleep(0.01)
    assert sum(port.counts()) == 16
    moved = len(port.clients) - 16
    assert moved <= 10, "no more than needed, and a few chosen twice"


async def test_sockets_that_a_dead_server_never_took_go_to_another(port: Port) -> None:
    ours, theirs = socket.socketpair()
    stuck = ChildLine(ours, port.dispatcher.remove)
    port.dispatcher.add(stuck)
    port.dispatcher.open()
    clients = [await port.client() for _ in range(3)]
    await until(lambda: stuck.connections == 3)
    healthy = await port.add_server()
    port.dispatcher.add(healthy.line)
    theirs.close()  # it dies
    assert [await client.answer() for client in clients] == [healthy.name] * 3
    await until(lambda: port.dispatcher._limits._counts["127.0.0.1"] == 3)
    stuck.close()


async def test_a_server_that_stands_still_gets_no_more_connections(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_port, "STUCK_SECONDS", 0.0)
    ours, theirs = socket.socketpair()
    stuck = ChildLine(ours, port.dispatcher.remove)
    port.dispatcher.add(stuck)
    healthy = await port.add_server()
    port.dispatcher.add(healthy.line)
    port.dispatcher.open()
    clients = [await port.client() for _ in range(9)]
    await until(lambda: stuck.connections + healthy.line.connections == 9)
    assert (stuck.connections, healthy.line.connections) == (1, 8)
    theirs.close()
    assert [await client.answer() for client in clients] == [healthy.name] * 9
    stuck.close()


async def test_no_server_at_all_leaves_connections_in_the_systems_queue(port: Port) -> None:
    first = await port.add_server()
    port.dispatcher.add(first.line)
    port.dispatcher.open()
    assert await (await port.client()).answer() == first.name
    port.dispatcher.remove(first.line)
    waiting = await port.client()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            assert await waiting.reader.read(1) == b"", "nobody answers"
            raise AssertionError
    second = await port.add_server()
    port.dispatcher.add(second.line)
    assert await waiting.answer() == second.name
