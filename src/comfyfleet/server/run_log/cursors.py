"""Stores how much of a user's run log each client has been sent, and shares this with all control
planes. A client can then reconnect to any of them without missing messages, and receives few
messages twice.
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
# Seconds within which a disconnected client can reconnect without missing messages.
REMEMBERED_SECONDS = 600.0
CURSORS_MAX = 10_000
# Seconds between rounds in which the positions of connected clients are sent. Messages may still be
# on their way to a client, so a position is sent one or two rounds late. If a control plane is
# killed, its clients receive the messages since that position again. The position of a client that
# has disconnected is sent immediately, because the client may reconnect to another control plane.
SEND_SECONDS = 1.0
# Maximum time in seconds for which a stopping control plane tries to send the last positions.
LAST_SEND_SECONDS_MAX = 2.0
PER_MESSAGE_MAX = 60  # each cursor takes up to 120 of the 8,000 characters that a message may have


class ClientCursors:
    """The cursors of clients by a hash of user and client, with the times at which they were
    stored.
    """

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
        """Runs until cancelled. Returns immediately on SQLite, where there is only one process."""
        if self._hints.reach_others:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._hints.listen(self.heard, lambda: None))
                both.create_task(self._run_sender())

    async def close(self) -> None:
        """Sends the remaining positions, because clients will reconnect to other control planes."""
        if self._hints.reach_others:
            self._unsent += [*self.messages(), *self.messages()]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_SEND_SECONDS_MAX):
                    await self._send()
        await self._hints.close()

    def keep(self, user_id: UUID, client_id: str, seen: Cursor) -> None:
        """Stores the position of a client that has disconnected, and sends it to the other control
        planes immediately.
        """
        key = _key(user_id, client_id)
        self._store(key, seen)
        self._new.pop(key, None)
        self._due.pop(key, None)
        if self._hints.reach_others and len(self._left) < CURSORS_MAX:
            self._left[key] = seen
            self._has_left.set()

    def note(self, user_id: UUID, client_id: str, seen: Cursor) -> None:
        """Schedules the position of a connected client to be sent, so that other control planes
        know it if this process ends.
        """
        if self._hints.reach_others and len(self._new) < CURSORS_MAX:
            self._new[_key(user_id, client_id)] = seen

    def of(self, user_id: UUID, client_id: str) -> Cursor | None:
        seen, at = self._seen.get(_key(user_id, client_id), (None, 0.0))
        return seen if monotonic() - at < REMEMBERED_SECONDS else None

    def heard(self, message: str) -> None:
        content = json.loads(message)
        if content["from"] == self._name:
            return
        # Older versions send no places, because their clients have been sent all rows up to
        # `floor`.
        places = content.get("places") or [None] * len(content["seen"])
        for (key, floor), place in zip(content["seen"], places, strict=True):
            cursor = cursor_at(floor)
            if place is not None:
                seen, start_id, row = place
                cursor = Cursor(seen, start_id, row, floor)
            stored, _ = self._seen.get(key, (cursor, 0.0))
            self._store(key, max(cursor, stored))

    def messages(self, *, ends_round: bool = True) -> Iterator[str]:
        """Yields the messages to other control planes. They contain the positions of disconnected
        clients. At the end of a round, the positions of connected clients are added.
        """
        positions, self._left = self._left, {}
        if ends_round:
            positions = self._due | positions
            self._due, self._new = self._new, {}
        due = iter(positions.items())
        while few := list(islice(due, PER_MESSAGE_MAX)):
            floors = [(key, cursor.floor) for key, cursor in few]
            places = [cursor[:-1] for _, cursor in few]
            yield json.dumps({"from": self._name, "seen": floors, "places": places})

    def _store(self, key: str, seen: Cursor) -> None:
        self._seen[key] = (seen, monotonic())
        self._seen.move_to_end(key)
        if len(self._seen) > CURSORS_MAX:
            self._seen.popitem(last=False)

    async def _run_sender(self) -> None:
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
        """Sends the pending messages. If this is cancelled, the current message stays in the
        queue.
        """
        try:
            while self._unsent:
                await self._hints.send(self._unsent[0])
                self._unsent.popleft()
        except (Unavailable, OSError, TimeoutError) as error:
            self._unsent.clear()
            logger.debug("cursors could not be sent to the other control planes: %s", error)


def _key(user_id: UUID, client_id: str) -> str:
    return hashlib.sha256(user_id.bytes + client_id.encode()).hexdigest()[:32]
