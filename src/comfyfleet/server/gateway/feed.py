"""Live messages: what runs told, from the durable log to the sockets of their owner."""

import asyncio
import base64
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Iterable
from datetime import timedelta
from itertools import takewhile
from time import monotonic
from uuid import UUID

from comfyfleet.errors import FleetError
from comfyfleet.protocol import sockets as frames
from comfyfleet.protocol.sockets import Frame, Socket
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.gateway.history import active_jobs
from comfyfleet.server.gateway.model import (
    end_events,
    events_in,
    gateway_data,
    prompt_id_of,
)
from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.run_log import service as run_log
from comfyfleet.server.run_log.model import Event, LoggedEvents
from comfyfleet.server.tenants.model import Caller

logger = logging.getLogger(__name__)
# Changes that another control plane saw are noticed after so long, where no hint tells of them.
BUSY_SECONDS, IDLE_SECONDS = 0.5, 5.0
# A feed that has much to tell rests as long as it took, at most: it then tells many changes at once.
REST_SECONDS_MAX = 0.05
# Longer than any answer to a POST takes.
HELD_SECONDS_MAX = 30.0
# For so long a client that was away may come back and miss nothing.
REMEMBERED_SECONDS = 600.0
CURSORS_MAX = 10_000
# A client may submit first and listen then: what it has missed is not older than this.
MISSED_MAX = timedelta(seconds=60)
# Without a client id these go to all sockets of their user, and the rest to none: as in ComfyUI.
BROADCAST = frozenset({"progress", "progress_state", "execution_interrupted"})
TEXT, PICTURE = "comfyfleet_text", "comfyfleet_picture"


class GatewaySocket(Socket):
    """One connection of a client. `seen`: the last report that it was sent."""

    def __init__(self, client_id: str, seen: int) -> None:
        super().__init__()
        self.client_id = client_id
        self.seen = seen

    @property
    def wants_metadata(self) -> bool:
        return self.features.get("supports_preview_metadata") is True


class UserFeed:
    """All sockets of one user in this process, and the task that reads the log for them."""

    def __init__(self, plane: ControlPlane, caller: Caller) -> None:
        self._plane = plane
        self._caller = caller
        self._sockets: set[GatewaySocket] = set()
        self._woken = asyncio.Event()
        self._active: frozenset[UUID] = frozenset()
        self._held: dict[UUID, float] = {}
        self._remaining: int | None = None
        self._task: asyncio.Task[None] | None = None
        self._unsubscribe = plane.context.notifier.subscribe_user(caller.user_id, self._woken.set)

    @property
    def is_empty(self) -> bool:
        return not self._sockets and not self._held

    def hold(self, job_id: UUID) -> None:
        """Nothing about this job goes out until it is released: its POST has not been answered."""
        self._held[job_id] = monotonic() + HELD_SECONDS_MAX

    def release(self, job_id: UUID) -> None:
        self._held.pop(job_id, None)
        self._woken.set()

    def _drop_old_holds(self) -> None:
        """A client that has gone never had its answer, and its other clients wait."""
        now = monotonic()
        self._held = {job_id: until for job_id, until in self._held.items() if until > now}

    def add(self, socket: GatewaySocket) -> None:
        self._sockets.add(socket)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="gateway-feed")
        self._woken.set()

    def remove(self, socket: GatewaySocket) -> None:
        self._sockets.discard(socket)

    async def close(self) -> None:
        self._unsubscribe()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            pause = BUSY_SECONDS if self._active else IDLE_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._woken.wait()
            self._woken.clear()
            started = monotonic()
            try:
                await self._tell()
            except FleetError as error:
                logger.warning("live messages are late: %s", error.message)
                await asyncio.sleep(BUSY_SECONDS)
            except Exception:  # without this task all sockets of the user would be deaf
                logger.exception("live messages could not be sent")
                await asyncio.sleep(IDLE_SECONDS)
            await asyncio.sleep(min(monotonic() - started, REST_SECONDS_MAX))

    async def _tell(self) -> None:
        """What has happened since the last look, in the order in which ComfyUI would tell it.

        A run's last report and the end of its job are seen together, as they are written together.
        """
        active, rows = await self._look()
        self._drop_old_holds()
        # Of one whose POST has not been answered nothing is told, nor of what came after.
        rows = list(takewhile(lambda row: row.job_id not in self._held, rows))
        active -= self._held.keys()
        self._tell_status(len(active | self._active))
        ended: set[UUID] = set()
        for row in rows:
            if row.record is not None:
                ended.add(row.job_id)
            self._tell_row(row, len((active | self._active) - ended))
        if len(rows) == run_log.EVENTS_PER_READ_MAX:
            self._woken.set()
        else:
            await self._tell_other_ends(self._active - active - ended, len(active - ended))
        self._active = active - ended
        self._tell_status(len(self._active))

    async def _look(self) -> tuple[frozenset[UUID], list[LoggedEvents]]:
        """Prompts that have not ended, and what no socket, or not all of them, have been sent."""
        tenant_id, user_id = self._caller.tenant.id, self._caller.user_id
        after = min((socket.seen for socket in self._sockets), default=None)
        async with self._plane.context.tenant(tenant_id) as tx:
            active = await jobs.active_prompt_ids(tx, tenant_id, user_id)
            if after is None:
                return active, []
            return active, await run_log.events_after(tx, tenant_id, user_id, after_id=after)

    async def _tell_other_ends(self, gone: Iterable[UUID], remaining: int) -> None:
        """Of jobs that have ended without a report: cancelled, or given up."""
        tenant_id = self._caller.tenant.id
        for job_id in gone:
            async with self._plane.context.tenant(tenant_id) as tx:
                ended = await jobs.find(tx, tenant_id, job_id)
                rows = await run_log.events_of_job(tx, tenant_id, job_id)
            if ended is None:
                continue
            was_told = any(row.record and row.lease_number == ended.lease_number for row in rows)
            if was_told or not (ended.started_at or rows):
                continue
            client_id = gateway_data(ended).get("client_id")
            for socket in self._sockets:
                self._push(socket, end_events(ended, events_in(rows)), client_id)
                self._push_end(socket, client_id, prompt_id_of(ended), remaining)

    def _tell_row(self, row: LoggedEvents, remaining: int) -> None:
        for socket in self._sockets:
            if socket.seen < row.id:
                socket.seen = row.id
                self._push(socket, row.events, row.client_id)
                if row.record is not None:
                    self._push_end(socket, row.client_id, row.prompt_id, remaining)
        if row.record is not None:
            self._remaining = remaining

    def _push(self, socket: GatewaySocket, events: Iterable[Event], client_id: str | None) -> None:
        for frame in self._frames(events, client_id, socket):
            socket.push(frame)

    def _push_end(
        self, socket: GatewaySocket, client_id: str | None, prompt_id: str, remaining: int
    ) -> None:
        """As ComfyUI does at the end of each run: by now history has it."""
        socket.push(frames.json_frame("status", _status(remaining)))
        if client_id is not None and socket.client_id == client_id:
            socket.push(frames.json_frame("executing", {"node": None, "prompt_id": prompt_id}))

    def _frames(
        self, events: Iterable[Event], client_id: str | None, socket: GatewaySocket
    ) -> Iterable[Frame]:
        for kind, data in events:
            is_for_all = kind in (TEXT,) or (client_id is None and kind in (*BROADCAST, PICTURE))
            if not is_for_all and client_id != socket.client_id:
                continue
            if kind == "execution_start":
                yield frames.json_frame("status", _status(self._remaining or 1))
            if kind == TEXT:
                yield frames.text_frame(str(data.get("node")), str(data.get("text")))
            elif kind == PICTURE:
                picture = base64.b64decode(data["base64"])
                if picture:
                    yield frames.image_frame(picture)
            else:
                yield frames.json_frame(kind, data)

    def _tell_status(self, remaining: int) -> None:
        if remaining == self._remaining:
            return
        self._remaining = remaining
        frame = frames.json_frame("status", _status(remaining))
        for socket in self._sockets:
            socket.push(frame)


def _status(remaining: int) -> dict[str, object]:
    return {"status": {"exec_info": {"queue_remaining": remaining}}}


class ClientCursors:
    """What clients that went away had seen."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[UUID, str], tuple[int, float]] = OrderedDict()

    def keep(self, user_id: UUID, socket: GatewaySocket) -> None:
        self._seen[user_id, socket.client_id] = (socket.seen, monotonic())
        self._seen.move_to_end((user_id, socket.client_id))
        if len(self._seen) > CURSORS_MAX:
            self._seen.popitem(last=False)

    def of(self, user_id: UUID, client_id: str) -> int | None:
        seen, at = self._seen.get((user_id, client_id), (None, 0.0))
        return seen if monotonic() - at < REMEMBERED_SECONDS else None


class GatewayFeeds:
    """The feeds of this process, by user."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._feeds: dict[UUID, UserFeed] = {}
        self._cursors = ClientCursors()

    def of(self, caller: Caller) -> UserFeed:
        feed = self._feeds.get(caller.user_id)
        if feed is None:
            feed = self._feeds[caller.user_id] = UserFeed(self._plane, caller)
        return feed

    async def release(self, caller: Caller, job_id: UUID) -> None:
        """Lets out what was held back; a feed that nobody listens to is closed."""
        feed = self.of(caller)
        feed.release(job_id)
        await self._close_if_empty(caller, feed)

    async def _close_if_empty(self, caller: Caller, feed: UserFeed) -> None:
        if feed.is_empty and self._feeds.get(caller.user_id) is feed:
            del self._feeds[caller.user_id]
            await feed.close()

    async def join(self, caller: Caller, client_id: str) -> GatewaySocket:
        """A socket that is told everything from now on, and what its client has not seen before."""
        seen = self._cursors.of(caller.user_id, client_id)
        if seen is None:
            seen = await self._first_unseen(caller, client_id)
        return GatewaySocket(client_id, seen)

    async def _first_unseen(self, caller: Caller, client_id: str) -> int:
        """Before the first report of a prompt of this client that goes on, or has just ended."""
        tenant_id, user_id = caller.tenant.id, caller.user_id
        started = [
            job.started_at
            for job in await active_jobs(self._plane, caller)
            if gateway_data(job).get("client_id") == client_id and job.started_at
        ]
        since = min([self._plane.clock() - MISSED_MAX, *started])
        async with self._plane.context.tenant(tenant_id) as tx:
            last = await run_log.last_id(tx, tenant_id, user_id)
            first = await run_log.first_id_of_client(tx, tenant_id, user_id, client_id, since=since)
        return last if first is None else first - 1

    async def leave(self, caller: Caller, socket: GatewaySocket) -> None:
        feed = self.of(caller)
        feed.remove(socket)
        self._cursors.keep(caller.user_id, socket)
        await self._close_if_empty(caller, feed)

    async def close(self) -> None:
        for feed in [*self._feeds.values()]:
            await feed.close()
        self._feeds.clear()
