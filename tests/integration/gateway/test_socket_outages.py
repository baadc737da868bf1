"""A WebSocket that is opened during a database outage is closed with a reason, and nothing is logged as a bug."""

from types import SimpleNamespace
from typing import Any

from comfyfleet.errors import Unavailable
from comfyfleet.server.http.gateway.sockets import TRY_AGAIN_LATER, serve_socket


class FakeSocket:
    def __init__(self) -> None:
        self.query_params: dict[str, str] = {}
        self.actions: list[Any] = []

    async def accept(self) -> None:
        self.actions.append("accept")

    async def close(self, code: int) -> None:
        self.actions.append(code)


class UnavailableFeeds:
    async def join(self, caller: object, client_id: str) -> None:
        raise Unavailable("the database can't be reached")


async def test_a_socket_is_closed_while_the_database_is_away() -> None:
    call: Any = SimpleNamespace(gateway=SimpleNamespace(feeds=UnavailableFeeds()), caller=None)
    socket: Any = FakeSocket()
    await serve_socket(call, socket)
    assert socket.actions == ["accept", TRY_AGAIN_LATER]
