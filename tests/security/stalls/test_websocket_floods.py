"""What a client sends over its websocket keeps no other client waiting."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.support.databases.factory import Databases
from tests.support.server.gateway import GatewayInProcess, GatewayUser, gateway_on
from tests.support.server.loop_stalls import LoopStalls
from tests.support.server.outside import (
    CLOSE,
    TEXT,
    RawAnswer,
    raw_websocket,
    send_from_outside,
    websocket_frame,
)
from websockets.asyncio.client import connect

from comfyfleet.server.http import listener
from comfyfleet.server.http.gateway import sockets
from comfyfleet.server.http.websockets import (
    FRAME_BYTES_MAX,
    FRAMES_AT_ONCE_MAX,
    UNANSWERED_PINGS_MAX,
    LimitedWebSocket,
)

CONT, BINARY, PING, PONG = 0, 2, 9, 10
DEEP = b"[" + b"[]," * 349_000
FEATURES = json.dumps({"type": "feature_flags", "data": {"supports_preview_metadata": True}})


@pytest.fixture
async def server(sqlite_databases: Databases, tmp_path: Path) -> AsyncIterator[GatewayInProcess]:
    async with gateway_on(sqlite_databases, tmp_path, engines=0) as server:
        yield server


@pytest.fixture
async def user(server: GatewayInProcess) -> GatewayUser:
    return await server.new_user()


async def attack(
    user: GatewayUser, *frames: bytes, sockets: int = 1, closes: bool = True
) -> RawAnswer:
    request = raw_websocket("/ws?clientId=attacker", frames, key=user.key, closes=closes)
    async with LoopStalls(f"{len(frames)} frames over {sockets} sockets"):
        answers = await send_from_outside(user.url, [request] * sockets)
    return answers[-1]


async def test_compressed_frames_are_refused_before_they_are_unpacked(user: GatewayUser) -> None:
    frames = [websocket_frame(DEEP, is_compressed=True)] * 8
    answer = await attack(user, *frames)
    assert b"permessage-deflate" not in answer.raw.partition(b"\r\n\r\n")[0]
    assert answer.close_code == 1002


async def test_a_frame_may_have_16_kib(user: GatewayUser) -> None:
    text = (b"[" + b"[]," * FRAME_BYTES_MAX)[:FRAME_BYTES_MAX]
    answer = await attack(user, *[websocket_frame(text)] * FRAMES_AT_ONCE_MAX)
    assert answer.close_code == 1000


async def test_a_frame_of_more_than_16_kib_closes_the_socket(user: GatewayUser) -> None:
    answer = await attack(user, websocket_frame(b"x" * (FRAME_BYTES_MAX + 1)))
    assert answer.close_code == 1009


@pytest.mark.parametrize(
    "opcode", [TEXT, BINARY, PING, PONG], ids=["text", "bytes", "ping", "pong"]
)
async def test_a_socket_accepts_20_frames_at_once_and_no_more(
    user: GatewayUser, opcode: int
) -> None:
    frame = websocket_frame(b"x", opcode=opcode)
    taken = await attack(user, *[frame] * FRAMES_AT_ONCE_MAX)
    assert taken.close_code == 1000
    refused = await attack(user, *[frame] * (FRAMES_AT_ONCE_MAX + 3), closes=False)
    assert refused.close_code == 1008
    assert b"20 frames in a burst" in refused.raw


@pytest.mark.parametrize("opcode", [TEXT, CONT, PING], ids=["text", "parts", "ping"])
async def test_a_flood_of_tiny_frames_is_not_parsed(user: GatewayUser, opcode: int) -> None:
    """A megabyte of them would take seconds."""
    start = bytearray(websocket_frame(b""))
    start[0] &= 0x7F  # the first part of a message
    tiny = bytearray(websocket_frame(b"", opcode=opcode))
    if opcode == CONT:
        tiny[0] &= 0x7F
    first = bytes(start) if opcode == CONT else b""
    answer = await attack(user, first + bytes(tiny) * 170_000, sockets=4, closes=False)
    assert answer.close_code == 1008


@pytest.fixture
def short_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "PING_SECONDS", 0.01)


async def next_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    first, size = await reader.readexactly(2)
    if size == 126:
        (size,) = struct.unpack(">H", await reader.readexactly(2))
    return first & 0x0F, await reader.readexactly(size)


@pytest.mark.usefixtures("short_pings")
async def test_a_client_that_answers_its_pings_late_stays_connected(
    sqlite_databases: Databases, tmp_path: Path
) -> None:
    """`websocket-client` answers them only while the program reads."""
    async with gateway_on(sqlite_databases, tmp_path, engines=0) as server:
        user = await server.new_user()
        address = urlsplit(user.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        handshake, close = raw_websocket("/ws?clientId=late", [], key=user.key)
        writer.write(handshake)
        await reader.readuntil(b"\r\n\r\n")
        pings: list[bytes] = []
        while len(pings) < UNANSWERED_PINGS_MAX:
            opcode, payload = await next_frame(reader)
            assert opcode != CLOSE
            pings += [payload] if opcode == PING else []
        answers = [websocket_frame(each, opcode=PONG) for each in pings]
        writer.write(b"".join([*answers, close]))
        while (frame := await next_frame(reader))[0] != CLOSE:
            pass
        assert struct.unpack(">H", frame[1][:2]) == (1000,)
        writer.close()


async def test_the_first_text_tells_features(user: GatewayUser) -> None:
    url = user.url.replace("http", "ws", 1) + "/ws"
    async with connect(url, additional_headers=user.headers) as socket:
        await socket.send(FEATURES)
        assert json.loads(await socket.recv())["type"] == "status"
        assert json.loads(await socket.recv())["type"] == "feature_flags"


class Texts:
    """A websocket that receives these texts and is then closed."""

    def __init__(self, *texts: str) -> None:
        self._texts = iter(texts)

    async def receive(self) -> dict[str, Any]:
        text = next(self._texts, None)
        return {
            "type": "websocket.disconnect" if text is None else "websocket.receive",
            "text": text,
        }


@pytest.mark.parametrize("first", [FEATURES, "no JSON"])
async def test_no_other_text_is_parsed(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    monkeypatch.setattr(
        sockets, "_take_features", lambda socket, text, features: parsed.append(text)
    )
    texts: Any = Texts(first, FEATURES, FEATURES)
    no_socket: Any = None
    await sockets._listen(texts, no_socket, {})
    assert parsed == [first]


class Clock:
    now = 0.0

    def time(self) -> float:
        return self.now


def test_a_socket_earns_one_frame_per_second_up_to_20() -> None:
    clock = Clock()
    socket = LimitedWebSocket.__new__(LimitedWebSocket)
    socket.loop = clock  # type: ignore[assignment]
    socket._allowed, socket._counted_at, socket._is_refused = float(FRAMES_AT_ONCE_MAX), 0.0, False
    socket._refuse = lambda: setattr(socket, "_is_refused", True)  # type: ignore[method-assign]

    def take(count: int) -> list[bool]:
        return [socket._may_take_frame() for _ in range(count)]

    assert all(take(FRAMES_AT_ONCE_MAX))
    for _ in range(30):
        clock.now += 1.0
        assert take(1) == [True]
    clock.now += 3600.0
    assert all(take(FRAMES_AT_ONCE_MAX)), "no more than 20 are saved up"
    clock.now += 0.9
    assert take(1) == [False]
