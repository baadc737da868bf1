"""Stores how much of a user's run log each client has been sent, and shares this with all control
planes. A client can then reconnect to any of them without missing messages, and receives only a few
messages twice.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Mapping
from itertools import islice
from time import monotonic
from typing import Protocol
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
# Maximum seconds that a control plane spends sending the positions of its sockets before it closes
# them.
LAST_SEND_SECONDS_MAX = 2.0
# Maximum seconds that a starting control plane waits until it can receive positions.
START_SECONDS_MAX = 2.0
PER_MESSAGE_MAX = 60  # each cursor takes up to 120 of the 8,000 characters in a message


class LogReader(Protocol):
    """A socket that reads the run log."""

    @property
    def taken_cursor(self) -> Cursor:
        """The position up to which the connection has taken all messages."""


class ClientCursors:
    """The cursors of clients and when they were stored, by a hash of the user id and client id."""

    def __init__(self, central: Database, name: str) -> None:
        self._hints = NotifyChannel(central, CHANNEL)
        self._name = name  # identifies the messages that this process has sent
        self._seen: OrderedDict[str, tuple[Cursor, float]] = OrderedDict()
        self._left: dict[str, Cursor] = {}
        self._due: dict[str, Cursor] = {}
        self._new: dict[str, LogReader] = {}
        self._has_left = asyncio.Event()
        self._is_sent = asyncio.Event()  # unset while positions of disconnected clients are pending
        self._is_sent.set()
        self._is_listening = asyncio.Event()

    async def run(self) -> None:
        """Runs until canceled. Returns immediately on SQLite, where there is only one process."""
        if self._hints.reach_others:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._hints.listen(self.heard, self._is_listening.set))
                both.create_task(self._run_sender())

    async def wait_until_listening(self) -> None:
        """Waits until this process receives positions from other control planes, or until a timeout.

        A process that replaces another one could otherwise miss the positions of its clients.
        """
        if self._hints.reach_others:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(START_SECONDS_MAX):
                    await self._is_listening.wait()

    async def close(self) -> None:
        """Sends all positions that this process knows, because clients will reconnect to other
        control planes. Positions of clients that disconnected earlier are sent again, because some
        control planes may have started since then.
        """
        if self._hints.reach_others:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_SEND_SECONDS_MAX):
                    await self._send(self._last())
        await self._hints.close()

    def keep(self, user_id: UUID, client_id: str, seen: Cursor) -> None:
        """Stores the position of a client that has disconnected, and sends it to the other control
        planes immediately.
        """
        key = _key(user_id, client_id)
        # Another control plane may have sent more to the client in the meantime.
        seen = self._store(key, seen)
        self._new.pop(key, None)
        self._due.pop(key, None)
        if self._hints.reach_others and len(self._left) < CURSORS_MAX:
            self._left[key] = seen
            self._is_sent.clear()
            self._has_left.set()

    async def wait_until_sent(self) -> None:
        """Waits until the positions of disconnected clients have been sent, or until a timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_SEND_SECONDS_MAX):
                await self._is_sent.wait()

    def note(self, user_id: UUID, client_id: str, reader: LogReader) -> None:
        """Schedules the position of a connected client to be sent, so that other control planes
        know it if this process ends.
        """
        if self._hints.reach_others and len(self._new) < CURSORS_MAX:
            self._new[_key(user_id, client_id)] = reader

    def of(self, user_id: UUID, client_id: str) -> Cursor | None:
        seen, at = self._seen.get(_key(user_id, client_id), (None, 0.0))
        return seen if monotonic() - at < REMEMBERED_SECONDS else None

    async def catch_up(self) -> None:
        """Waits until the positions that other control planes have already sent are known."""
        await self._hints.catch_up()

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
            self._store(key, cursor)

    async def send(self, *, ends_round: bool = True) -> None:
        """Sends the positions of disconnected clients. If `ends_round` is set, the positions of
        connected clients are sent as well."""
        await self._send(self._take_due(ends_round=ends_round))

    def _take_due(self, *, ends_round: bool) -> dict[str, Cursor]:
        due, self._left = self._left, {}
        if ends_round:
            due = _newest(due, self._due)
            self._due, self._new = self._positions(), {}
        return due

    def _positions(self) -> dict[str, Cursor]:
        return {key: reader.taken_cursor for key, reader in self._new.items()}

    def _last(self) -> dict[str, Cursor]:
        """Returns all known positions. This process's own clients come first."""
        oldest = monotonic() - REMEMBERED_SECONDS
        known = {key: seen for key, (seen, at) in reversed(self._seen.items()) if at > oldest}
        return _newest(self._left, self._due, self._positions(), known)

    def _message(self, cursors: Mapping[str, Cursor]) -> str:
        floors = [(key, cursor.floor) for key, cursor in cursors.items()]
        places = [cursor[:-1] for cursor in cursors.values()]
        return json.dumps({"from": self._name, "seen": floors, "places": places})

    def _store(self, key: str, seen: Cursor) -> Cursor:
        """Stores a position unless the client is known to be ahead of it, and returns the newest."""
        known, _ = self._seen.get(key, (seen, 0.0))
        seen = max(seen, known)
        self._seen[key] = (seen, monotonic())
        self._seen.move_to_end(key)
        if len(self._seen) > CURSORS_MAX:
            self._seen.popitem(last=False)
        return seen

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
            await self.send(ends_round=ends_round)

    async def _send(self, cursors: dict[str, Cursor]) -> None:
        """Sends positions. If this fails or is canceled, the next round sends the rest."""
        try:
            while few := _first(cursors):
                await self._hints.send(self._message(few))
                _remove(cursors, few)
        except (Unavailable, OSError, TimeoutError) as error:
            logger.debug("cursors couldn't be sent to the other control planes: %s", error)
        finally:
            unsent = _newest(self._left, cursors)
            self._left = dict(islice(unsent.items(), CURSORS_MAX))
            if not self._left:
                self._is_sent.set()


def _newest(*positions: Mapping[str, Cursor]) -> dict[str, Cursor]:
    newest: dict[str, Cursor] = {}
    for cursors in positions:
        for key, cursor in cursors.items():
            newest[key] = max(cursor, newest.get(key, cursor))
    return newest


def _first(cursors: Mapping[str, Cursor]) -> dict[str, Cursor]:
    """Returns as many positions as fit into a message."""
    return dict(islice(cursors.items(), PER_MESSAGE_MAX))


def _remove(cursors: dict[str, Cursor], sent: Mapping[str, Cursor]) -> None:
    for key in sent:
        del cursors[key]


def _key(user_id: UUID, client_id: str) -> str:
    return hashlib.sha256(user_id.bytes + client_id.encode()).hexdigest()[:32]
