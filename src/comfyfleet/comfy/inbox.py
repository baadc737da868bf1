"""The messages of one run, from the socket's reader to whoever follows the run."""

import asyncio
from collections import deque

from comfyfleet.comfy.events import NodeText, Preview, Progress
from comfyfleet.comfy.messages import Message, NodeStates

MESSAGES_MAX = 1000


class Inbox:
    """Of a slow reader's progress and previews some are lost; all else is kept."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._arrived = asyncio.Event()

    def put(self, message: Message) -> None:
        full = len(self._messages) >= MESSAGES_MAX
        if full and isinstance(message, Progress | Preview | NodeText | NodeStates):
            return
        self._messages.append(message)
        self._arrived.set()

    async def get(self, timeout_seconds: float) -> Message | None:
        """None when nothing came in time."""
        if not self._messages:
            self._arrived.clear()
            try:
                async with asyncio.timeout(timeout_seconds):
                    await self._arrived.wait()
            except TimeoutError:
                return None
        return self._messages.popleft()
