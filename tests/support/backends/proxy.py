"""A TCP proxy that parses enough HTTP and websocket to inject faults into single steps of a conversation.

A step is a request (`POST /prompt`, `GET /history`: without ids and query; `GET /ws 2` for the
second one), or a frame that the server sends on a websocket (`frame`, `frame 2`…).
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import urlsplit

HEAD_END = b"\r\n\r\n"
GARBAGE_FRAME = b"\x81\x07garbage"
ERROR_FRAME = b"\x88\x02\x03\xf3"  # close, 1011
SERVER_ERROR = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 5\r\n\r\nsorry"
GARBAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 9\r\n\r\n<garbage>"


class Fault(Enum):
    """A fault to inject. For names that end with `UNSEEN`, the server hasn't received the request
    when the fault occurs."""

    CUT_UNSEEN = "cut before the server has it"
    CUT = "cut instead of the answer"
    DELAY = "answer late"
    DELAY_UNSEEN = "deliver after the client has given up"
    TRUNCATE = "half an answer, then cut"
    DUPLICATE = "answer twice"
    ERROR_UNSEEN = "500 without the server"
    ERROR = "500 instead of the answer"
    GARBAGE_UNSEEN = "garbage without the server"
    GARBAGE = "garbage instead of the answer"


UNSEEN = (Fault.CUT_UNSEEN, Fault.DELAY_UNSEEN, Fault.ERROR_UNSEEN, Fault.GARBAGE_UNSEEN)
FRAME_FAULTS = (
    Fault.CUT,
    Fault.DELAY,
    Fault.TRUNCATE,
    Fault.DUPLICATE,
    Fault.ERROR,
    Fault.GARBAGE,
)


class Cut(Exception):
    """Raised to end the connection at this step."""


@dataclass
class Proxy:
    """A proxy that injects each of `faults` once, at the first step with its name. `steps` lists
    the steps so far."""

    target: str
    faults: dict[str, Fault] = field(default_factory=dict)
    delay_seconds: float = 0.5
    url: str = ""
    socket_status: int | None = None  # what every websocket is answered with, if it is refused
    steps: list[str] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)
    _writers: dict[asyncio.StreamWriter, bool] = field(default_factory=dict)
    _talks: set["asyncio.Task[None]"] = field(default_factory=set)

    def cut_sockets(self) -> int:
        """Closes every websocket; returns their number."""
        sockets = [writer for writer, is_socket in self._writers.items() if is_socket]
        for writer in sockets:
            writer.transport.abort()
        return len(sockets)

    async def end(self) -> None:
        for writer in [*self._writers]:
            writer.transport.abort()
        talks = [*self._talks]
        for talk in talks:
            talk.cancel()
        await asyncio.gather(*talks, return_exceptions=True)
        # An abort takes effect in the loop's next round.
        await asyncio.sleep(0)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talk = asyncio.create_task(self.serve(reader, writer))
        self._talks.add(talk)
        talk.add_done_callback(self._talks.discard)

    def step(self, name: str) -> Fault | None:
        number = self._counts[name] = self._counts[name] + 1
        self.steps.append(f"{name} {number}" if number > 1 else name)
        return self.faults.pop(self.steps[-1], None)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers[writer] = False
        parts = urlsplit(self.target)
        try:
            up = await asyncio.open_connection(parts.hostname, parts.port)
        except OSError:
            self._writers.pop(writer)
            writer.transport.abort()
            return
        try:
            while await self._exchange(reader, writer, *up):
                pass
        except (Cut, OSError, asyncio.IncompleteReadError):
            writer.transport.abort()
        finally:
            self._writers.pop(writer, None)
            up[1].transport.abort()
            writer.transport.abort()

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        up_reader: asyncio.StreamReader,
        up_writer: asyncio.StreamWriter,
    ) -> bool:
        """Passes one request and its answer; returns whether another may follow."""
        head = await reader.readuntil(HEAD_END)
        request = head + await _body(head, reader)
        fault = self.step(_name(head))
        if self.socket_status is not None and _name(head).startswith("GET /ws"):
            writer.write(f"HTTP/1.1 {self.socket_status} No\r\nContent-Length: 0\r\n\r\n".encode())
            await writer.drain()
            return False
        if fault in UNSEEN:
            await self._leave_out(fault, writer, up_writer, request)
            return False
        up_writer.write(request)
        answer_head = await up_reader.readuntil(HEAD_END)
        answer = answer_head + await _body(answer_head, up_reader)
        await self._answer(fault, writer, answer)
        if fault in (Fault.ERROR, Fault.GARBAGE):
            return False
        if b" 101 " in answer_head.split(b"\r\n", 1)[0]:
            self._writers[writer] = True
            await self._talk(reader, writer, up_reader, up_writer)
            return False
        return fault is None

    async def _leave_out(
        self,
        fault: Fault | None,
        writer: asyncio.StreamWriter,
        up_writer: asyncio.StreamWriter,
        request: bytes,
    ) -> None:
        match fault:
            case Fault.DELAY_UNSEEN:
                await asyncio.sleep(self.delay_seconds)
                up_writer.write(request)
                await asyncio.sleep(self.delay_seconds)
            case Fault.ERROR_UNSEEN:
                writer.write(SERVER_ERROR)
                await writer.drain()
            case Fault.GARBAGE_UNSEEN:
                writer.write(GARBAGE)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()
            await writer.wait_closed()

    async def _answer(
        self, fault: Fault | None, writer: asyncio.StreamWriter, answer: bytes
    ) -> None:
        match fault:
            case Fault.CUT:
                raise Cut
            case Fault.DELAY:
                await asyncio.sleep(self.delay_seconds)
                writer.write(answer)
            case Fault.TRUNCATE:
                writer.write(answer[: max(len(answer) - 8, 1)])
                await writer.drain()
                writer.close()
                raise Cut
            case Fault.DUPLICATE:
                writer.write(answer + answer)
            case Fault.ERROR:
                writer.write(SERVER_ERROR)
            case Fault.GARBAGE:
                writer.write(GARBAGE)
            case _:
                writer.write(answer)
        await writer.drain()

    async def _talk(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        up_reader: asyncio.StreamReader,
        up_writer: asyncio.StreamWriter,
    ) -> None:
        async with asyncio.TaskGroup() as group:
            upwards = group.create_task(_pump(reader, up_writer))
            await self._frames(writer, up_reader)
            upwards.cancel()

    async def _frames(self, writer: asyncio.StreamWriter, up: asyncio.StreamReader) -> None:
        with contextlib.suppress(Cut, OSError, asyncio.IncompleteReadError):
            while True:
                frame = await _frame(up)
                await self._pass_frame(self.step("frame"), writer, frame)
        writer.transport.abort()

    async def _pass_frame(
        self, fault: Fault | None, writer: asyncio.StreamWriter, frame: bytes
    ) -> None:
        match fault:
            case Fault.ERROR:
                writer.write(ERROR_FRAME)
            case Fault.GARBAGE:
                writer.write(GARBAGE_FRAME)
            case _:
                await self._answer(fault, writer, frame)
        await writer.drain()


def _name(head: bytes) -> str:
    method, target = head.split(b" ", 2)[:2]
    return f"{method.decode()} /{target.decode().split('?')[0].split('/')[1]}"


async def _body(head: bytes, reader: asyncio.StreamReader) -> bytes:
    fields = head.lower().split(b"\r\n")
    if b"transfer-encoding: chunked" in fields:
        return await _chunks(reader)
    lengths = [line.split(b":", 1)[1] for line in fields if line.startswith(b"content-length:")]
    return await reader.readexactly(int(lengths[0])) if lengths else b""


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while True:
        size = await reader.readuntil(b"\r\n")
        body += size + await reader.readexactly(int(size, 16) + 2)
        if int(size, 16) == 0:
            return body


async def _frame(reader: asyncio.StreamReader) -> bytes:
    """Reads a frame of a server, which is not masked."""
    head = await reader.readexactly(2)
    size = head[1] & 0x7F
    more = await reader.readexactly({126: 2, 127: 8}.get(size, 0))
    return head + more + await reader.readexactly(int.from_bytes(more) if more else size)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.transport.abort()


@contextlib.asynccontextmanager
async def faulty_proxy(
    target: str, faults: Mapping[str, Fault] | None = None, *, delay_seconds: float = 0.5
) -> AsyncIterator[Proxy]:
    proxy = Proxy(target, dict(faults or {}), delay_seconds)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.end()
