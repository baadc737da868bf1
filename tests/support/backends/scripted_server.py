"""A real HTTP server on the loopback interface. The test scripts its responses and aborts."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

HEAD_BYTES_MAX = 64 * 1024


@dataclass(frozen=True, slots=True)
class ScriptedRequest:
    """A request as it arrived, with its header names in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


class Reaction:
    """Base class for the server's reactions to a request."""


@dataclass(frozen=True, slots=True)
class Reply(Reaction):
    """A response. The connection is closed after `sent_bytes_max` bytes of its body."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    sent_bytes_max: int | None = None


class Cut(Reaction):
    """Closes the connection without a response, once the request has been read."""


Script = Callable[[ScriptedRequest], Reaction]


@dataclass(slots=True)
class ScriptedServer:
    url: str
    asked: list[ScriptedRequest]

    def paths(self, method: str = "POST") -> list[str]:
        return [asked.path for asked in self.asked if asked.method == method]


def json_reply(value: object, status: int = 200, **headers: str) -> Reply:
    names = {name.replace("_", "-"): text for name, text in headers.items()}
    body = json.dumps(value).encode()
    return Reply(status, body, {"content-type": "application/json", **names})


def by_route(replies: Mapping[str, Reaction | Sequence[Reaction]]) -> Script:
    """Replies by method and path; of a list each request takes the next, and the last one repeats."""
    left = {route: [r] if isinstance(r, Reaction) else [*r] for route, r in replies.items()}

    def answer(asked: ScriptedRequest) -> Reaction:
        queue = left.get(f"{asked.method} {asked.path}", [Reply(404)])
        return queue.pop(0) if len(queue) > 1 else queue[0]

    return answer


@contextlib.asynccontextmanager
async def serving_script(script: Script) -> AsyncIterator[ScriptedServer]:
    asked: list[ScriptedRequest] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            request = await _read(reader)
            asked.append(request)
            writer.write(_bytes(script(request)))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        yield ScriptedServer(f"http://127.0.0.1:{port}", asked)


async def _read(reader: asyncio.StreamReader) -> ScriptedRequest:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *rest = head.strip().split("\r\n")
    method, target, _ = first.split(" ")
    pairs = (line.split(": ", 1) for line in rest)
    headers = {name.lower(): value for name, value in pairs}
    if headers.get("transfer-encoding") == "chunked":
        return ScriptedRequest(method, target, headers, await _chunks(reader))
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return ScriptedRequest(method, target, headers, body)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return body


def _bytes(reply: Reaction) -> bytes:
    if not isinstance(reply, Reply):
        return b""
    headers = {"content-length": str(len(reply.body)), "connection": "close", **reply.headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 {reply.status} X\r\n{lines}\r\n".encode("latin-1")
    return head + reply.body[: reply.sent_bytes_max]
