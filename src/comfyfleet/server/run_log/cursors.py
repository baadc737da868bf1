"""Stores how much of a user's run log each client was sent, and shares it with all control planes.
A client that reconnects to any of them misses nothing and receives few messages twice.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import islice
from time import monotonic
from uuid import UUID

from comfyfleet.errors import Unavailable
from comfyfleet.server.db import Database
from comfyfleet.server.db.coordination import NotifyChannel
from comfyfleet.server.run_log.model import Cursor, cursor_at

logger = logging.getLogger(__name__)
CHANNEL = "comfyfleet_cursors"
# Seconds for which a disconnected client may come back without missing anything.
REMEMBERED_SECONDS = 600.0
CURSORS_MAX = 10_000
# Messages may still be on their way to a client that listens, so other control planes learn its position one or two
# such rounds later. If a control plane is killed, the client receives the messages since then again. The position of
# a client that has left is sent at once, because the client may reconnect to another control plane immediately.
SEND_SECONDS = 1.0
# A control plane that stops tries to send the last positions for this long.
LAST_SEND_SECONDS_MAX = 2.0
PER_MESSAGE_MAX = 60  # up to 120 characters each, and a message has at most 8,000


class ClientCursors:
    """Cursors by a hash of user and client, with the time at which they were stored."""

    def __init__(self, central: Database, name: str) -> None:
        self._hints = NotifyChannel(central, CHANNEL)
        self._name = name  # identifies the messages that this process has sent
        self._seen: OrderedDict[str, tuple[Cursor, float]] = OrderedDict()
        self._left: dict[str, Cursor] = {}
        self._due: dict[str, Cursor] = {}
        self._new: dict[str, Cursor] = {}
        self._has_left = asyncio.Event()
        self._unsent: deque[str] = deque()

    async def run(self) -> None:
        """Runs until cancelled. Returns at once on SQLite, where there is one process."""
        if self._hints.reach_others:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._hints.listen(self.heard, lambda: None))
                both.create_task(self._speak())

    async def close(self) -> None:
        """Sends the remaining positions, because clients now reconnect to other control planes."""
        if self._hints.reach_others:
            self._unsent += [*self.messages(), *self.messages()]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_SEND_SECONDS_MAX):
                    await self._send()
        await self._hints.close()

    def keep(self, user_id: UUID, client_id: str, seen: Cursor) -> None:
        """Stores the position of a client that disconnects, and sends it to other control planes at
        once.
        """
        key = _key(user_id, client_id)
        self._store(key, seen)
        self._new.pop(key, None)
        self._due.pop(key, None)
        if self._hints.reach_others and len(self._left) < CURSORS_MAX:
            self._left[key] = seen
            self._has_left.set()

    def note(self, user_id: UUID, client_id: str, seen: Cursor) -> None:
        """Stores the position of a connected client, so that other control planes know it if this
        process ends.
        """
        if self._hints.reach_others and len(self._new) < CURSORS_MAX:
            self._new[_key(user_id, client_id)] = seen

    def of(self, user_id: UUID, client_id: str) -> Cursor | None:
        seen, at = self._seen.get(_key(user_id, client_id), (None, 0.0))
        return seen if monotonic() - at < REMEMBERED_SECONDS else None

    def heard(self, message: str) -> None:
        said = json.loads(message)
        if said["from"] == self._name:
            return
        # Older control planes send no places, because their clients were sent everything up to
        # `floor`.
        places = said.get("places") or [None] * len(said["seen"])
        for (key, floor), place in zip(said["seen"], places, strict=True):
            cursor = cursor_at(floor)
            if place is not None:
                seen, start_id, row = place
                cursor = Cursor(seen, start_id, row, floor)
            known, _ = self._seen.get(key, (cursor, 0.0))
            self._store(key, max(cursor, known))

    def messages(self, *, ends_round: bool = True) -> Iterator[str]:
        """Returns the messages to other control planes. They contain clients that have left and, at
        the end of a round, connected clients as well.
        """
        told, self._left = self._left, {}
        if ends_round:
            told = self._due | told
            self._due, self._new = self._new, {}
        due = iter(told.items())
        while few := list(islice(due, PER_MESSAGE_MAX)):
            floors = [(key, cursor.floor) for key, cursor in few]
            places = [cursor[:-1] for _, cursor in few]
            yield json.dumps({"from": self._name, "seen": floors, "places": places})

    def _store(self, key: str, seen: Cursor) -> None:
        self._seen[key] = (seen, monotonic())
        self._seen.move_to_end(key)
        if len(self._seen) > CURSORS_MAX:
            self._seen.popitem(last=False)

    async def _speak(self) -> None:
        round_end = monotonic() + SEND_SECONDS
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, round_end - monotonic())):
                    await self._has_left.wait()
            self._has_left.clear()
            ends_round = monotonic() >= round_end
            if ends_round:
                round_end = monotonic() + SEND_SECONDS
            self._unsent += self.messages(ends_round=ends_round)
            await self._send()

    async def _send(self) -> None:
        """Sends the unsent messages. If this is cancelled, the message being sent remains unsent."""
        try:
            while self._unsent:
                await self._hints.send(self._unsent[0])
                self._unsent.popleft()
        except (Unavailable, OSError, TimeoutError) as error:
            self._unsent.clear()
            logger.debug("cursors can't be told to other control planes: %s", error)


def _key(user_id: UUID, client_id: str) -> str:
    return hashlib.sha256(user_id.bytes + client_id.encode()).hexdigest()[:32]
