"""One websocket to a ComfyUI server, under a client id of its own."""

import asyncio
import contextlib
import json
import logging
from dataclasses import replace
from urllib.parse import quote

import websockets
from websockets.asyncio.client import ClientConnection, connect

from comfyfleet.comfy.calls import Call, Calls
from comfyfleet.comfy.events import NodeStarted, NodeText, Preview, Progress, Reconnected, Started
from comfyfleet.comfy.inbox import Inbox
from comfyfleet.comfy.messages import CURRENT_RUN, Message, RunOver, parse_message
from comfyfleet.kernel.errors import ServerUnavailable, UnexpectedAnswer

logger = logging.getLogger(__name__)

FRAME_BYTES_MAX = 256 * 1024 * 1024
RETURNS_MAX = 20
HELLO = json.dumps({"type": "feature_flags", "data": {"supports_preview_metadata": True}})
SOCKET = Call("GET", "/ws")
SOCKET_ERRORS = (OSError, TimeoutError, websockets.WebSocketException)


class SocketRefused(ServerUnavailable):
    """The server answers, and doesn't speak websocket: a proxy is in between, mostly."""


class Channel:
    """Hands each message to the run that it is about, and comes back when the socket is lost.

    A channel that had to come back is `worn`: the server may drop the new socket together with the
    old one (both have the same client id) and then tells it nothing. So is one that missed a whole
    run. Its runs are looked after by polling, and new runs take a new channel.
    """

    def __init__(self, calls: Calls, client_id: str) -> None:
        self.client_id = client_id
        self.worn = False
        self._calls = calls
        self._runs: dict[str, Inbox] = {}
        self._current = CURRENT_RUN
        self._returns = 0
        self._socket: ClientConnection | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def open(self) -> bool:
        return self._reader is not None and not self._reader.done()

    @property
    def idle(self) -> bool:
        return not self._runs

    async def start(self) -> None:
        """Raises ServerUnavailable after retries, SocketRefused if it is answered otherwise."""
        self._socket = await self._connect_patiently()
        self._reader = asyncio.create_task(self._read(), name="comfy-channel")

    def join(self, run_id: str) -> Inbox:
        return self._runs.setdefault(run_id, Inbox())

    def leave(self, run_id: str) -> None:
        self._runs.pop(run_id, None)

    def tell(self, run_id: str, message: Message) -> None:
        if inbox := self._runs.get(run_id):
            inbox.put(message)

    async def renew(self) -> None:
        """Close a worn socket that tells nothing; the reader then opens another."""
        if self.worn and self.open and self._socket is not None:
            await self._socket.close()

    async def aclose(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        if self._socket is not None:
            await self._socket.close()

    async def _connect_patiently(self) -> ClientConnection:
        for attempt in range(self._calls.limits.max_retries + 1):
            if attempt:
                await self._calls.surroundings.back_off(attempt)
            try:
                return await self._connect()
            except websockets.InvalidHandshake as error:
                trouble: ServerUnavailable = SocketRefused(
                    self._calls.unavailable(SOCKET, error).message
                )
                if not _may_pass(error):
                    break
            except SOCKET_ERRORS as error:
                trouble = self._calls.unavailable(SOCKET, error)
        raise trouble

    async def _connect(self) -> ClientConnection:
        seconds = self._calls.limits.connect_seconds
        with self._calls.noting(SOCKET):
            socket = await connect(
                self._url(),
                open_timeout=seconds,
                close_timeout=1,
                # A node that holds the interpreter answers no ping and is alive all the same.
                ping_interval=None,
                compression=None,
                max_size=FRAME_BYTES_MAX,
            )
            try:
                async with asyncio.timeout(seconds):
                    await socket.send(HELLO)
                    # Its first word tells that the server knows us: no event is lost from here on.
                    self._take(await socket.recv())
            except BaseException:
                await socket.close()
                raise
            return socket

    def _url(self) -> str:
        base = self._calls.client.base_url
        scheme = "wss" if base.scheme == "https" else "ws"
        url = base.copy_with(scheme=scheme, path=f"{base.path.rstrip('/')}/ws")
        return f"{url}?clientId={quote(self.client_id)}"

    async def _read(self) -> None:
        while self._socket is not None:
            await self._read_until_lost(self._socket)
            await self._socket.close()
            self._socket = await self._come_back()

    async def _read_until_lost(self, socket: ClientConnection) -> None:
        with contextlib.suppress(*SOCKET_ERRORS):
            while True:
                self._take(await socket.recv())

    async def _come_back(self) -> ClientConnection | None:
        """None: nobody is waiting, or the server is gone; whoever follows a run finds out itself."""
        self.worn = True
        self._returns += 1
        if self.idle or self._returns > RETURNS_MAX:
            return None
        try:
            if self._returns > 1:
                await self._calls.surroundings.back_off(self._returns - 1)
            socket = await self._connect_patiently()
        except ServerUnavailable as error:
            logger.warning("socket lost for good", extra={"reason": error.message})
            return None
        for run_id, inbox in self._runs.items():
            inbox.put(Reconnected(run_id))
        return socket

    def _take(self, raw: str | bytes) -> None:
        try:
            with self._calls.reading("websocket"):
                message = parse_message(raw)
        except UnexpectedAnswer:
            # Counted and logged. The run goes on: what this may have told is found by polling.
            return
        named = self._named(message)
        if isinstance(named, Started | NodeStarted):
            self._current = named.run_id
        self.tell(getattr(named, "run_id", CURRENT_RUN), named)
        if isinstance(named, RunOver) and named.run_id == self._current:
            self._current = CURRENT_RUN

    def _named(self, message: Message) -> Message:
        """Some messages don't say whose they are: they are about the run that is at work."""
        match message:
            case NodeStarted(run_id=""):
                # Said to a socket that comes while one of its runs is at work: which, if many?
                only = next(iter(self._runs)) if len(self._runs) == 1 else CURRENT_RUN
                return replace(message, run_id=self._current or only)
            case (
                RunOver(run_id="") | Progress(run_id="") | NodeText(run_id="") | Preview(run_id="")
            ):
                # Those of other clients reach us, too, but never while a run of ours is at work.
                return replace(message, run_id=self._current)
        return message


def _may_pass(error: websockets.InvalidHandshake) -> bool:
    """A server that fails may not the next time; one that knows no such page never will."""
    return not isinstance(error, websockets.InvalidStatus) or error.response.status_code >= 500
