"""Websockets to a ComfyUI server, each with its own client id, and the assignment of runs to
them."""

import asyncio
import contextlib
import json
import logging
import uuid
from dataclasses import dataclass, replace
from urllib.parse import quote

import websockets
from websockets.asyncio.client import ClientConnection, connect

from comfyfleet.comfy.calls import BackendCalls
from comfyfleet.comfy.events import NodeStarted, NodeText, Preview, Progress, Reconnected, Started
from comfyfleet.comfy.messages import (
    CURRENT_RUN,
    MESSAGES_BYTES_MAX,
    Inbox,
    Message,
    RunOver,
    parse_message,
)
from comfyfleet.comfy.run_location import QUEUE
from comfyfleet.errors import ServerUnavailable, UnexpectedAnswer
from comfyfleet.transport.http import Call

logger = logging.getLogger(__name__)

FRAME_BYTES_MAX = MESSAGES_BYTES_MAX
RECONNECTS_MAX = 20
HELLO = json.dumps({"type": "feature_flags", "data": {"supports_preview_metadata": True}})
SOCKET = Call("GET", "/ws")
SOCKET_ERRORS = (OSError, TimeoutError, websockets.WebSocketException)


class SocketRefused(ServerUnavailable):
    """Raised if the server responds but doesn't open a websocket. Usually, a proxy is the cause."""


class ServerSocket:
    """Delivers each message to its run, and reconnects when the connection is lost.

    After a reconnect, the socket is `degraded`, because the server may drop the new socket together
    with the old one (both have the same client id) and then send nothing. A socket that missed a
    whole run is degraded as well. Runs on a degraded socket are also polled, and new runs get a new
    socket.
    """

    def __init__(self, calls: BackendCalls, client_id: str) -> None:
        self.client_id = client_id
        self.degraded = False
        self._calls = calls
        self._runs: dict[str, Inbox] = {}
        self._current = CURRENT_RUN
        self._reconnects = 0
        self._socket: ClientConnection | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def open(self) -> bool:
        return self._reader is not None and not self._reader.done()

    @property
    def idle(self) -> bool:
        return not self._runs

    async def start(self) -> None:
        """Connects. Raises ServerUnavailable after retries, and SocketRefused if the server offers
        no websocket."""
        self._socket = await self._connect_with_retries()
        self._reader = asyncio.create_task(self._read(), name="comfy-channel")

    def join(self, run_id: str) -> Inbox:
        return self._runs.setdefault(run_id, Inbox())

    def leave(self, run_id: str) -> None:
        self._runs.pop(run_id, None)

    def deliver(self, run_id: str, message: Message, raw: str | None = None) -> None:
        if inbox := self._runs.get(run_id):
            inbox.put(message, raw)

    async def renew(self) -> None:
        """Closes a degraded socket that receives nothing. The reader then opens a new one."""
        if self.degraded and self.open and self._socket is not None:
            await self._socket.close()

    async def aclose(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        if self._socket is not None:
            await self._socket.close()

    async def _connect_with_retries(self) -> ClientConnection:
        for attempt in range(self._calls.limits.max_retries + 1):
            if attempt:
                await self._calls.retry.back_off(attempt)
            try:
                return await self._connect()
            except websockets.InvalidHandshake as error:
                failure: ServerUnavailable = SocketRefused(
                    self._calls.unavailable(SOCKET, error).message
                )
                if not _is_transient(error):
                    break
            except SOCKET_ERRORS as error:
                failure = self._calls.unavailable(SOCKET, error)
        raise failure

    async def _connect(self) -> ClientConnection:
        seconds = self._calls.limits.connect_seconds
        with self._calls.recorded(SOCKET):
            socket = await connect(
                self._url(),
                open_timeout=seconds,
                close_timeout=1,
                # No pings are sent, because a server whose node blocks the interpreter can't answer
                # them but is still alive.
                ping_interval=None,
                compression=None,
                max_size=FRAME_BYTES_MAX,
            )
            try:
                async with asyncio.timeout(seconds):
                    await socket.send(HELLO)
                    # Wait for the first message. It shows that the server has registered our id, so
                    # no event is lost from here on.
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
            self._socket = await self._reconnect()

    async def _read_until_lost(self, socket: ClientConnection) -> None:
        with contextlib.suppress(*SOCKET_ERRORS):
            while True:
                self._take(await socket.recv())

    async def _reconnect(self) -> ClientConnection | None:
        """Reconnects. Returns None if no run needs the socket, or if the server doesn't respond and
        runs must be polled.
        """
        self.degraded = True
        self._reconnects += 1
        if self.idle or self._reconnects > RECONNECTS_MAX:
            return None
        try:
            if self._reconnects > 1:
                await self._calls.retry.back_off(self._reconnects - 1)
            socket = await self._connect_with_retries()
        except ServerUnavailable as error:
            logger.warning("websocket lost; polling runs instead", extra={"reason": error.message})
            return None
        for run_id, inbox in self._runs.items():
            inbox.put(Reconnected(run_id))
        return socket

    def _take(self, raw: str | bytes) -> None:
        try:
            with self._calls.count_unexpected("websocket"):
                message = parse_message(raw)
        except UnexpectedAnswer:
            # The error has been counted and logged. Polling still finds the run's state and
            # outputs.
            return
        message = self._with_run_id(message)
        if isinstance(message, Started | NodeStarted):
            self._current = message.run_id
        text = raw if isinstance(raw, str) else None
        self.deliver(getattr(message, "run_id", CURRENT_RUN), message, text)
        if isinstance(message, RunOver) and message.run_id == self._current:
            self._current = CURRENT_RUN

    def _with_run_id(self, message: Message) -> Message:
        """Adds the run id to messages without one. Such messages belong to the currently executing
        run."""
        match message:
            case NodeStarted(run_id=""):
                # The server sends this message without a run id to a socket that connects while one
                # of its runs is executing. If the socket has several runs, the message could belong
                # to any of them.
                only = next(iter(self._runs)) if len(self._runs) == 1 else CURRENT_RUN
                return replace(message, run_id=self._current or only)
            case (
                RunOver(run_id="") | Progress(run_id="") | NodeText(run_id="") | Preview(run_id="")
            ):
                # Messages about other clients' runs arrive as well, but never while ours is
                # executing.
                return replace(message, run_id=self._current)
        return message


def _is_transient(error: websockets.InvalidHandshake) -> bool:
    """Checks whether another attempt may succeed, which is the case only after a 5xx or an
    unreadable response."""
    return not isinstance(error, websockets.InvalidStatus) or error.response.status_code >= 500


# Maximum number of runs that have a socket. The oldest runs lose their sockets first, because some
# submitted runs are never followed.
RUN_SOCKETS_MAX = 1000
# Seconds to use polling for runs after a server refused a websocket.
WITHOUT_SOCKET_SECONDS = 300.0


@dataclass(slots=True)
class RunSocket:
    """The socket of a run.

    `fresh` means that the socket has received the run's messages from the beginning and that they
    have not been read yet.
    """

    inbox: Inbox
    channel: ServerSocket | None
    fresh: bool


class SocketPool:
    """The sockets of a server: one for new runs, and others that exist as long as their runs.

    There are never two sockets with the same client id, because the server forgets the newer one
    when the older one closes.
    """

    def __init__(self, calls: BackendCalls) -> None:
        self._calls = calls
        self._channels: dict[str, ServerSocket] = {}
        self._run_sockets: dict[str, RunSocket] = {}
        self._current: ServerSocket | None = None
        self._opening = asyncio.Lock()
        self._has_no_socket = False
        self._polling_until = float("-inf")

    def get(self, run_id: str) -> RunSocket | None:
        return self._run_sockets.get(run_id)

    async def open(self) -> ServerSocket | None:
        """Returns the socket for a new run, or None if the server offers no websocket.

        Raises ServerUnavailable.
        """
        async with self._opening:
            if self._calls.retry.clock() < self._polling_until:
                return None
            if self._current is not None and self._current.open and not self._current.degraded:
                return self._current
            before, self._current = self._current, None
            await self._close_if_idle(before)
            channel = ServerSocket(self._calls, str(uuid.uuid4()))
            try:
                await channel.start()
            except SocketRefused as error:
                await self._use_no_socket(error)
                return None
            self._has_no_socket = False
            self._current = self._channels[channel.client_id] = channel
            return channel

    async def _use_no_socket(self, error: SocketRefused) -> None:
        """Switches to polling if the server responds to other calls."""
        await self._calls.ask_json(QUEUE)
        if not self._has_no_socket:
            logger.warning("no WebSocket to the backend; polling runs instead: %s", error.message)
        self._has_no_socket = True
        self._polling_until = self._calls.retry.clock() + WITHOUT_SOCKET_SECONDS

    async def add(self, run_id: str, channel: ServerSocket | None) -> None:
        inbox = channel.join(run_id) if channel else Inbox()
        await self._keep(run_id, RunSocket(inbox, channel, fresh=True))

    async def adopt(self, run_id: str, client_id: str | None) -> RunSocket:
        """Listens to a run that another process submitted, with the client id of that process."""
        channel = await self._channel_of(run_id, client_id) if client_id else None
        run_socket = RunSocket(channel.join(run_id) if channel else Inbox(), channel, fresh=False)
        await self._keep(run_id, run_socket)
        return run_socket

    async def _keep(self, run_id: str, run_socket: RunSocket) -> None:
        self._run_sockets[run_id] = run_socket
        while len(self._run_sockets) > RUN_SOCKETS_MAX:
            await self.drop(next(iter(self._run_sockets)))

    async def _channel_of(self, run_id: str, client_id: str) -> ServerSocket | None:
        async with self._opening:
            if existing := self._channels.get(client_id):
                return existing
            channel = ServerSocket(self._calls, client_id)
            # The server may not have noticed yet that the previous socket is closed.
            channel.degraded = True
            channel.join(run_id)
            try:
                await channel.start()
            except ServerUnavailable:
                return None
            self._channels[client_id] = channel
            return channel

    async def drop(self, run_id: str) -> None:
        run_socket = self._run_sockets.pop(run_id, None)
        if run_socket is None or run_socket.channel is None:
            return
        run_socket.channel.leave(run_id)
        if run_socket.channel is not self._current:
            await self._close_if_idle(run_socket.channel)

    async def aclose(self) -> None:
        for channel in [*self._channels.values()]:
            await channel.aclose()
        self._channels.clear()
        self._run_sockets.clear()

    async def _close_if_idle(self, channel: ServerSocket | None) -> None:
        if channel is not None and channel.idle:
            self._channels.pop(channel.client_id, None)
            await channel.aclose()
