"""A relay that passes bytes to a server and back until its connections are cut."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit


class TcpRelay:
    def __init__(self, target: str) -> None:
        self._target = urlsplit(target)
        self._writers: set[asyncio.StreamWriter] = set()
        self._talks: set[asyncio.Task[None]] = set()

        self.url = ""
        self._frozen: set[asyncio.StreamWriter] = set()

    def freeze(self) -> None:
        """Passes nothing on any more over the connections that are open now, and keeps them open."""
        self._frozen |= self._writers

    def cut(self) -> int:
        """Cuts all connections; returns how many there were."""
        writers = [*self._writers]
        for writer in writers:
            writer.transport.abort()
        return len(writers)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talk = asyncio.create_task(self._talk(reader, writer))
        self._talks.add(talk)
        talk.add_done_callback(self._talks.discard)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection(self._target.hostname, self._target.port)
        self._writers.add(writer)

        def is_frozen() -> bool:
            return writer in self._frozen

        try:
            await asyncio.gather(_pump(reader, forth, is_frozen), _pump(back, writer, is_frozen))
        finally:
            self._writers.discard(writer)
            forth.transport.abort()
            writer.transport.abort()

    async def close(self) -> None:
        self.cut()
        talks = [*self._talks]
        for talk in talks:
            talk.cancel()
        await asyncio.gather(*talks, return_exceptions=True)
        await asyncio.sleep(0)  # an abort takes effect in the loop's next round


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_frozen: Callable[[], bool]
) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            if is_frozen():
                continue
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


@contextlib.asynccontextmanager
async def freezing_relay(target: str) -> AsyncIterator[TcpRelay]:
    relay = TcpRelay(target)
    server = await asyncio.start_server(relay.accept, "127.0.0.1", 0)
    relay.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield relay
    finally:
        server.close()
        await relay.close()


@contextlib.asynccontextmanager
async def tcp_relay(target: str) -> AsyncIterator[tuple[str, Callable[[], int]]]:
    """Its address, and what cuts all its connections."""
    async with freezing_relay(target) as relay:
        yield relay.url, relay.cut
