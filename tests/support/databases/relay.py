"""A relay to PostgreSQL that can be blocked. Connections stay open, but no data passes."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from sqlalchemy.engine import make_url

SOCKET = ".s.PGSQL.5432"


class PostgresRelay:
    """A relay that listens on a socket in its own folder. `url` is the database's URL through the
    relay."""

    def __init__(self, url: str, folder: Path) -> None:
        target = make_url(url)
        self._target = Path(str(target.query["host"])) / SOCKET
        self.socket = folder / SOCKET
        through = target.set(query={"host": str(folder)})
        self.url = through.render_as_string(hide_password=False)
        self._is_open = asyncio.Event()
        self._is_open.set()

    def block(self) -> None:
        self._is_open.clear()

    def unblock(self) -> None:
        self._is_open.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._is_open.wait()
        back, forth = await asyncio.open_unix_connection(self._target)
        await asyncio.gather(self._pass(reader, forth), self._pass(back, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await self._is_open.wait()
                writer.write(data)
        writer.close()


@asynccontextmanager
async def relayed_postgres(url: str) -> AsyncIterator[PostgresRelay]:
    with tempfile.TemporaryDirectory(prefix="comfyfleet-relay-") as folder:
        relay = PostgresRelay(url, Path(folder))
        server = await asyncio.start_unix_server(relay.serve, relay.socket)
        try:
            yield relay
        finally:
            relay.unblock()
            server.close()
