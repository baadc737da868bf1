"""Which socket each run is heard on."""

import asyncio
import logging
from dataclasses import dataclass

from comfyfleet.comfy.calls import Calls
from comfyfleet.comfy.channel import Channel, SocketRefused
from comfyfleet.comfy.inbox import Inbox
from comfyfleet.comfy.places import QUEUE
from comfyfleet.kernel.errors import ServerUnavailable

logger = logging.getLogger(__name__)

# Runs that were submitted and never followed are forgotten at last.
LINES_MAX = 1000
# A server that has refused a WebSocket is asked for one again after so long.
DEAF_SECONDS = 300.0


@dataclass(slots=True)
class Line:
    """How one run is heard. `fresh`: from its beginning, and nobody has listened yet."""

    inbox: Inbox
    channel: Channel | None
    fresh: bool


class Lines:
    """The channels of one server: one for new runs, others as long as their runs last.

    Never two at once under one client id: when the older closes, the server forgets the newer.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._channels: dict[str, Channel] = {}
        self._lines: dict[str, Line] = {}
        self._current: Channel | None = None
        self._opening = asyncio.Lock()
        self._is_deaf = False
        self._deaf_until = float("-inf")

    def get(self, run_id: str) -> Line | None:
        return self._lines.get(run_id)

    async def open(self) -> Channel | None:
        """The channel for a new run; None: the server has none for us. Raises ServerUnavailable."""
        async with self._opening:
            if self._calls.surroundings.clock() < self._deaf_until:
                return None
            if self._current is not None and self._current.open and not self._current.worn:
                return self._current
            before, self._current = self._current, None
            await self._close_if_idle(before)
            channel = Channel(self._calls, self._calls.surroundings.new_id())
            try:
                await channel.start()
            except SocketRefused as error:
                await self._go_without(error)
                return None
            self._is_deaf = False
            self._current = self._channels[channel.client_id] = channel
            return channel

    async def _go_without(self, error: SocketRefused) -> None:
        """If the server answers everything else, runs are looked after by polling."""
        await self._calls.ask_json(QUEUE)
        if not self._is_deaf:
            logger.warning("no WebSocket to the backend: runs are polled. %s", error.message)
        self._is_deaf = True
        self._deaf_until = self._calls.surroundings.clock() + DEAF_SECONDS

    async def add(self, run_id: str, channel: Channel | None) -> None:
        inbox = channel.join(run_id) if channel else Inbox()
        await self._keep(run_id, Line(inbox, channel, fresh=True))

    async def adopt(self, run_id: str, client_id: str | None) -> Line:
        """Listen for a run that somebody else has submitted, in the place of that client."""
        channel = await self._channel_of(run_id, client_id) if client_id else None
        line = Line(channel.join(run_id) if channel else Inbox(), channel, fresh=False)
        await self._keep(run_id, line)
        return line

    async def _keep(self, run_id: str, line: Line) -> None:
        self._lines[run_id] = line
        while len(self._lines) > LINES_MAX:
            await self.drop(next(iter(self._lines)))

    async def _channel_of(self, run_id: str, client_id: str) -> Channel | None:
        async with self._opening:
            if known := self._channels.get(client_id):
                return known
            channel = Channel(self._calls, client_id)
            # The server may not have noticed yet that the socket before is gone.
            channel.worn = True
            channel.join(run_id)
            try:
                await channel.start()
            except ServerUnavailable:
                return None
            self._channels[client_id] = channel
            return channel

    async def drop(self, run_id: str) -> None:
        line = self._lines.pop(run_id, None)
        if line is None or line.channel is None:
            return
        line.channel.leave(run_id)
        if line.channel is not self._current:
            await self._close_if_idle(line.channel)

    async def aclose(self) -> None:
        for channel in [*self._channels.values()]:
            await channel.aclose()
        self._channels.clear()
        self._lines.clear()

    async def _close_if_idle(self, channel: Channel | None) -> None:
        if channel is not None and channel.idle:
            self._channels.pop(channel.client_id, None)
            await channel.aclose()
