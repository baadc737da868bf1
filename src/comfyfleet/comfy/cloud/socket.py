"""The websocket of API v1: all messages of the user, whatever the client id."""

import asyncio
import contextlib
import json
import logging
from collections import deque
from urllib.parse import urlencode

import httpx
import websockets
from websockets.asyncio.client import ClientConnection, connect

from comfyfleet.comfy.calls import Call, Calls
from comfyfleet.comfy.events import Reconnected
from comfyfleet.comfy.inbox import Inbox
from comfyfleet.comfy.messages import CURRENT_RUN, Message, parse_message
from comfyfleet.kernel.errors import UnexpectedAnswer

logger = logging.getLogger(__name__)

FRAME_BYTES_MAX = 256 * 1024 * 1024
# Messages of runs that nobody follows yet: a quick run tells all before its submit is answered.
STRAYS_MAX = 500
SOCKET = Call("GET", "/ws")
SOCKET_ERRORS = (OSError, TimeoutError, websockets.WebSocketException)
HELLO = json.dumps({"type": "feature_flags", "data": {"supports_preview_metadata": True}})
# The key stands in the address, and the library would log it: it gets a log that nobody keeps.
SILENT = logging.Logger("silent", level=logging.CRITICAL + 1)


class CloudSocket:
    """Hands each message to the run that it names. Never raises: without it, runs are polled."""

    def __init__(self, calls: Calls, key: str, client_id: str) -> None:
        self._calls = calls
        self._address = socket_address(calls.client.base_url, key, client_id)
        self._runs: dict[str, Inbox] = {}
        self._strays: deque[tuple[str, Message]] = deque(maxlen=STRAYS_MAX)
        self._reader: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        return self._reader is not None and not self._reader.done()

    async def start(self) -> None:
        """Listen from now on, if that is possible."""
        async with self._opening:
            if self.is_open:
                return
            opened = await self._open()
            if opened is not None:
                self._reader = asyncio.create_task(self._read(opened), name="comfy-cloud-socket")

    def join(self, run_id: str) -> Inbox:
        inbox = self._runs.setdefault(run_id, Inbox())
        strays = [*self._strays]
        self._strays.clear()
        for stray in strays:
            if stray[0] == run_id:
                inbox.put(stray[1])
            else:
                self._strays.append(stray)
        return inbox

    def leave(self, run_id: str) -> None:
        self._runs.pop(run_id, None)

    async def aclose(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader

    async def _open(self) -> ClientConnection | None:
        try:
            with self._calls.noting(SOCKET):
                socket = await connect(
                    self._address,
                    open_timeout=self._calls.limits.connect_seconds,
                    close_timeout=1,
                    max_size=FRAME_BYTES_MAX,
                    logger=SILENT,
                )
            await socket.send(HELLO)
        except SOCKET_ERRORS as error:
            # Its text may hold the address, and with it the key.
            logger.warning("no websocket, runs are polled", extra={"reason": type(error).__name__})
            return None
        return socket

    async def _read(self, socket: ClientConnection) -> None:
        current: ClientConnection | None = socket
        while current is not None:
            try:
                with contextlib.suppress(*SOCKET_ERRORS):
                    while True:
                        self._take(await current.recv())
            finally:
                await current.close()
            current = await self._come_back()

    async def _come_back(self) -> ClientConnection | None:
        """None: nobody is waiting, or there is no way; the next run tries again."""
        for attempt in range(1, self._calls.limits.max_retries + 1):
            if not self._runs:
                return None
            await self._calls.surroundings.back_off(attempt)
            if (socket := await self._open()) is not None:
                for run_id, inbox in self._runs.items():
                    inbox.put(Reconnected(run_id))
                return socket
        return None

    def _take(self, raw: str | bytes) -> None:
        try:
            with self._calls.reading("websocket"):
                message = parse_message(raw)
        except UnexpectedAnswer:
            # Counted and logged; what it may have told is found by polling.
            return
        # Jobs of a user run side by side: what does not name its run can be anybody's.
        run_id = getattr(message, "run_id", CURRENT_RUN)
        if run_id == CURRENT_RUN:
            return
        if inbox := self._runs.get(run_id):
            inbox.put(message)
        else:
            self._strays.append((run_id, message))


def socket_address(base: httpx.URL, key: str, client_id: str) -> str:
    scheme = "wss" if base.scheme == "https" else "ws"
    query = urlencode({"clientId": client_id, "token": key})
    return f"{base.copy_with(scheme=scheme, path='/ws')}?{query}"
