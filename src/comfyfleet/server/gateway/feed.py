"""Sends the live messages of a user's runs from the run log to the user's sockets."""

import asyncio
import base64
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from time import monotonic
from typing import Any
from uuid import UUID

from comfyfleet.api.worker import RunPreview
from comfyfleet.protocol import sockets as frames
from comfyfleet.protocol.sockets import Frame
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.db import Tx
from comfyfleet.server.db.outages import as_unavailable, log_failure
from comfyfleet.server.gateway.client_socket import GatewaySocket, LogState
from comfyfleet.server.gateway.failures import redacted
from comfyfleet.server.gateway.history import started_jobs
from comfyfleet.server.gateway.model import (
    client_in_order,
    gateway_data,
    is_running,
    prompt_id_of,
)
from comfyfleet.server.gateway.visible_backends import sees_backends
from comfyfleet.server.jobs.model import Job, asks_for_previews
from comfyfleet.server.jobs.progress import Previews, PreviewWatch
from comfyfleet.server.run_log import service as run_log
from comfyfleet.server.run_log.model import (
    PICTURE,
    PREVIEWS,
    REMOVED,
    TEXT,
    Cursor,
    Event,
    LoggedEvents,
    LogLook,
    current_node,
    cursor_at,
)
from comfyfleet.server.tenants.model import Caller

logger = logging.getLogger(__name__)
# Seconds between two reads of the log with and without active prompts. They limit the delay of a
# message if a notification is lost.
BUSY_SECONDS, IDLE_SECONDS = 0.5, 5.0
# After a read, a feed pauses for as long as the read took, but not longer than this. Changes that
# arrive during the pause are sent together.
REST_SECONDS_MAX = 0.05
# Maximum seconds to hold back messages about a job whose POST hasn't been answered. This is longer
# than any response takes.
HELD_SECONDS_MAX = 30.0
# Maximum seconds that a poll waits for the sockets to catch up.
UP_TO_DATE_SECONDS_MAX = 1.0
# A client may submit a prompt before it connects. It then receives messages up to this age.
MISSED_MAX = timedelta(seconds=60)
# Maximum number of runs per user whose previews are sent at the same time.
SHOWN_RUNS_MAX = 1_000
# As in ComfyUI, these messages go to all of the user's sockets if the prompt has no client id.
BROADCAST = frozenset({"progress", "progress_state", "execution_interrupted", PICTURE})


class ShownRun:
    """A run whose client requested previews. The previews are watched only while a socket that
    receives them is open.

    `job_id` is set if the client sees its prompts one at a time.
    """

    def __init__(self, client_id: str | None, prompt_id: str, job_id: UUID | None) -> None:
        self.client_id = client_id
        self.prompt_id = prompt_id
        self.watch: PreviewWatch | None = None
        self._last_preview: RunPreview | None = None
        self._job_id = job_id

    def is_for(self, socket: GatewaySocket) -> bool:
        """Checks whether the socket receives the run's previews. As in ComfyUI, all of the user's
        sockets receive them if the prompt has no client id.
        """
        is_shown = self._job_id in (None, socket.job_id)
        return self.client_id is None or (self.client_id == socket.client_id and is_shown)

    def pop_news(self) -> Event | None:
        """Returns the newest preview, or None if there is no new one since the last call."""
        newest = None if self.watch is None else self.watch.latest
        if newest is None or newest is self._last_preview:
            return None
        self._last_preview = newest
        return PICTURE, {"base64": newest.base64, "metadata": newest.metadata}


class ShownRuns:
    """A user's running prompts whose clients requested previews."""

    def __init__(self, previews: Previews, tenant_id: UUID, on_picture: Callable[[], None]) -> None:
        self._previews = previews
        self._tenant_id = tenant_id
        self._on_picture = on_picture
        self._runs: dict[UUID, ShownRun] = {}

    def begin(self, job_id: UUID, client_id: str | None, prompt_id: str, *, in_order: bool) -> None:
        if job_id not in self._runs and len(self._runs) < SHOWN_RUNS_MAX:
            self._runs[job_id] = ShownRun(client_id, prompt_id, job_id if in_order else None)

    def take(self, row: LoggedEvents) -> None:
        """Starts or stops showing the previews of a run whose report has just been sent to the
        sockets."""
        if any(kind == PREVIEWS for kind, _ in row.events):
            in_order = row.start_id is not None
            self.begin(row.job_id, row.client_id, row.prompt_id, in_order=in_order)
        if row.is_last:
            self.end(row.job_id)

    def end(self, job_id: UUID) -> None:
        run = self._runs.pop(job_id, None)
        if run is not None and run.watch is not None:
            run.watch.close()

    def end_all(self) -> None:
        for job_id in [*self._runs]:
            self.end(job_id)

    def look_for(self, sockets: Sequence[GatewaySocket]) -> None:
        """Watches exactly the runs whose previews at least one of these sockets receives."""
        for job_id, run in self._runs.items():
            is_wanted = any(run.is_for(socket) for socket in sockets)
            if is_wanted and run.watch is None:
                run.watch = self._previews.watch(self._tenant_id, job_id, self._on_picture)
            elif not is_wanted and run.watch is not None:
                run.watch.close()
                run.watch = None

    def with_picture(self, row: LoggedEvents) -> LoggedEvents:
        """Inserts the newest preview before the last progress event of a report, because the worker
        reported them together.
        """
        run = self._runs.get(row.job_id)
        places = [place for place, (kind, _) in enumerate(row.events) if kind == "progress"]
        picture = run.pop_news() if run is not None and places else None
        if picture is None:
            return row
        before, after = row.events[: places[-1]], row.events[places[-1] :]
        return replace(row, events=[*before, picture, *after])

    def pop_news(self) -> Iterable[tuple[ShownRun, Event]]:
        for run in self._runs.values():
            if (picture := run.pop_news()) is not None:
                yield run, picture


class UserFeed:
    """A user's sockets in this process, and the task that reads the log for them."""

    def __init__(self, plane: ControlPlane, caller: Caller) -> None:
        self._plane = plane
        self._caller = caller
        self._sockets: list[GatewaySocket] = []
        self._woken = asyncio.Event()
        self._held: dict[UUID, float] = {}
        self._remaining = 0
        self._last_sent_id: int | None = None  # id of the last sent row, or None before `start`
        self._starting = asyncio.Lock()
        # Callers that are waiting for the next pass to finish.
        self._followed: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None
        self._unsubscribe = plane.context.notifier.subscribe_user(caller.user_id, self._woken.set)
        self._shown = ShownRuns(plane.context.previews, caller.tenant.id, self._woken.set)

    @property
    def is_empty(self) -> bool:
        return not self._sockets and not self._held

    @property
    def last(self) -> int:
        return self._last_sent_id or 0

    def hold(self, job_id: UUID) -> None:
        """Holds back all messages about this job until `release`, because the client doesn't have
        the response to its POST yet.
        """
        self._held[job_id] = monotonic() + HELD_SECONDS_MAX

    def release(self, job_id: UUID) -> None:
        self._held.pop(job_id, None)
        self._woken.set()

    async def wait_until_sent(self) -> None:
        """Waits until all messages so far have been sent to the user's sockets, or until a
        timeout."""
        if not self._sockets:
            return
        looked = asyncio.get_running_loop().create_future()
        self._followed.append(looked)
        self._woken.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UP_TO_DATE_SECONDS_MAX):
                await looked

    def _drop_old_holds(self) -> None:
        """Removes expired holds. Otherwise, a client that disconnects before it gets its response
        would block the user's other clients forever.
        """
        now = monotonic()
        self._held = {job_id: until for job_id, until in self._held.items() if until > now}

    async def start(self) -> None:
        """Reads the current end of the log and starts sending later messages to the sockets."""
        async with self._starting:
            if self._last_sent_id is not None:
                return
            tenant_id, user_id = self._caller.tenant.id, self._caller.user_id
            async with self._plane.context.tenant(tenant_id) as tx:
                last = await run_log.last_id(tx, tenant_id, user_id)
                look = await run_log.look(
                    tx, tenant_id, user_id, after_id=last, but_jobs=[*self._held]
                )
            self._remaining = look.active + len(_ended_in(look.rows))
            self._last_sent_id = last
            self._task = asyncio.create_task(self._run(), name="gateway-feed")

    def add(
        self, socket: GatewaySocket, running_node: str | None, running: Sequence[Job] = ()
    ) -> None:
        """Adds a socket. As in ComfyUI, an older socket with the same client id receives no more
        messages.
        """
        for other in self._sockets:
            other.is_replaced |= other.client_id == socket.client_id
        self._sockets.append(socket)
        for job in running:
            if asks_for_previews(job.spec):
                client_id = gateway_data(job).get("client_id")
                in_order = client_in_order(job) is not None
                self._shown.begin(job.id, client_id, prompt_id_of(job), in_order=in_order)
        socket.tell("status", {**_status(self._remaining), "sid": socket.client_id})
        if running_node is not None:
            socket.tell("executing", {"node": running_node})
        self._woken.set()

    def remove(self, socket: GatewaySocket) -> None:
        self._sockets.remove(socket)
        self._shown.look_for(self._open_sockets())

    def seen_by(self, client_id: str) -> Cursor | None:
        """Returns the cursor of the client's open socket, or None if it has none. Messages after
        the cursor may not have reached the client, because its connection may be broken.
        """
        for socket in reversed(self._sockets):
            if socket.client_id == client_id and not socket.is_replaced:
                return socket.taken_cursor
        return None

    async def close(self) -> None:
        self._unsubscribe()
        self._shown.end_all()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            is_busy = self._remaining or any(map(_has_unread, self._open_sockets()))
            pause = BUSY_SECONDS if is_busy else IDLE_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._woken.wait()
            self._woken.clear()
            started, followed = monotonic(), self._followed
            self._followed = []
            try:
                await self._send_changes()
            except Exception as error:  # noqa: BLE001 — the user's sockets need this task
                log_failure(logger, error, "live messages are delayed")
                await asyncio.sleep(BUSY_SECONDS if as_unavailable(error) else IDLE_SECONDS)
            finally:
                for waiter in followed:
                    if not waiter.done():
                        waiter.set_result(None)
            await asyncio.sleep(min(monotonic() - started, REST_SECONDS_MAX))

    async def _send_changes(self) -> None:
        """Sends all messages since the last pass, in the order in which ComfyUI would send them.

        A run's last report and the end of its job are written in one transaction, so they are read
        together as well.
        """
        if self._last_sent_id is None:
            return
        self._drop_old_holds()
        tenant_id, user_id = self._caller.tenant.id, self._caller.user_id
        held = frozenset(self._held)
        async with self._plane.context.tenant(tenant_id) as tx:
            for socket in [socket for socket in self._sockets if not socket.is_live]:
                await self._catch_up(tx, socket, self._last_sent_id)
            look = await run_log.look(
                tx, tenant_id, user_id, after_id=self._last_sent_id, but_jobs=held
            )
        rows = _sendable(look.rows, held | frozenset(self._held))
        self._send_arrivals(look)
        if any(_departed(row) for row in rows):
            self._plane.context.notifier.forget_user(user_id)
        for row in rows:
            self._last_sent_id = row.id
            self._send_row(self._shown.with_picture(row))
            self._shown.take(row)
        has_read = await self._read_on()
        if rows or has_read:
            for socket in self._open_sockets():
                self._plane.cursors.note(user_id, socket.client_id, socket)
        self._send_pictures()
        if look.has_more:
            self._woken.set()
            return
        if not look.active:
            self._shown.end_all()
        self._send_departures(look.active + len(_ended_in(look.rows[len(rows) :])))

    async def _catch_up(self, tx: Tx, socket: GatewaySocket, to_id: int) -> None:
        """Sends the messages that the socket's client has missed. Messages of prompts that are
        shown in order are sent later.
        """
        socket.is_live = True
        if not socket.start_id and socket.floor >= to_id:
            socket.state = LogState.CURRENT
        if socket.seen >= to_id:
            return
        tenant_id, user_id = self._caller.tenant.id, self._caller.user_id
        after_id, has_more = socket.seen, True
        while has_more and not socket.overrun.is_set():
            rows, has_more = await run_log.events_of_client(
                tx, tenant_id, user_id, socket.client_id, after_id=after_id, to_id=to_id
            )
            for row in rows:
                self._push(socket, row, self._remaining)
            after_id = rows[-1].id if rows else after_id
        socket.note_read(to_id)

    async def _read_on(self) -> bool:
        """Continues reading the log for sockets that haven't sent all rows yet. Returns whether any
        message was sent.
        """
        waiting = [
            socket for socket in self._open_sockets() if socket.state is not LogState.CURRENT
        ]
        if not waiting:
            return False
        async with self._plane.context.tenant(self._caller.tenant.id) as tx:
            sent = [await self._read_in_order(tx, socket) for socket in waiting]
        return any(sent)

    async def _read_in_order(self, tx: Tx, socket: GatewaySocket) -> bool:
        # Another control plane may have sent the client rows that this one hasn't read yet.
        to_id = max(self.last, socket.seen)
        if socket.state is LogState.HOLDING and not await self._end_if_over(tx, socket, to_id):
            return False
        tenant_id, user_id = self._caller.tenant.id, self._caller.user_id
        if socket.job_id is None and socket.start_id:
            socket.job_id = await run_log.job_of_attempt(tx, tenant_id, socket.start_id)
        rows, has_more = await run_log.events_in_order(
            tx, tenant_id, user_id, socket.client_id, socket.cursor, to_id=to_id
        )
        for place, row in enumerate(rows):
            if socket.holds_back(row) and not await self._end_if_over(tx, socket, to_id):
                socket.state = LogState.HOLDING
                return place > 0
            if socket.is_full:
                return place > 0
            self._push(socket, row, self._remaining)
            socket.note_sent(row)
        if has_more:
            self._woken.set()
        else:
            socket.state = LogState.CURRENT
            socket.note_read(to_id)
        return bool(rows)

    async def _end_if_over(self, tx: Tx, socket: GatewaySocket, to_id: int) -> bool:
        tenant_id, start_id = self._caller.tenant.id, socket.start_id
        is_over = await run_log.is_attempt_over(tx, tenant_id, start_id, to_id=to_id)
        if is_over:
            socket.end_shown()
        return is_over

    def _send_arrivals(self, look: LogLook) -> None:
        """Sends a separate status message for each new prompt, even if the prompt has already
        ended.
        """
        departed = sum(_departed(row) for row in look.rows)
        for _ in range(look.active + departed - self._remaining):
            self._remaining += 1
            self._send_status()

    def _send_departures(self, remaining: int) -> None:
        """Sends a status message if prompts have left the queue without a report."""
        if remaining < self._remaining:
            self._remaining = remaining
            self._send_status()

    def _send_pictures(self) -> None:
        """Sends previews that arrived without a progress report. A slow socket skips to the newest
        preview.
        """
        for run, (_, data) in self._shown.pop_news():
            for socket in self._open_sockets():
                if run.is_for(socket) and not socket.is_behind:
                    with_metadata = socket.wants_metadata and run.client_id is not None
                    for frame in _picture_frames(data, run.prompt_id, with_metadata=with_metadata):
                        socket.push(frame)
        self._shown.look_for(self._open_sockets())

    def _send_row(self, row: LoggedEvents) -> None:
        status_counts = [data.get("tells", 1) for kind, data in row.events if kind == REMOVED]
        before = self._remaining
        self._remaining = max(0, before - _departed(row))
        for _ in range(sum(status_counts)):
            self._send_status()
        for socket in self._open_sockets():
            if row.id <= socket.seen:
                continue
            if socket.is_due(row):
                self._push(socket, row, before)
                socket.note_sent(row)
            socket.note_read(row.id)

    def _open_sockets(self) -> list[GatewaySocket]:
        return [socket for socket in self._sockets if socket.is_live and not socket.is_replaced]

    def _push(self, socket: GatewaySocket, row: LoggedEvents, before: int) -> None:
        """Sends a report to a socket. `before` is the number of queued and running prompts before
        the report.
        """
        for frame in self._frames(row, socket, before):
            socket.push(frame)
        if row.is_last:
            # ComfyUI sends these messages at the end of each run, when its history is complete.
            socket.tell("status", _status(self._remaining))
            if row.client_id is not None and socket.client_id == row.client_id:
                socket.tell("executing", {"node": None, "prompt_id": row.prompt_id})

    def _frames(self, row: LoggedEvents, socket: GatewaySocket, before: int) -> Iterable[Frame]:
        with_metadata = socket.wants_metadata and row.client_id is not None
        sees = sees_backends(self._plane, self._caller.tenant)
        for kind, data in row.events if with_metadata else pictures_after_progress(row.events):
            is_for_all = kind == TEXT or (row.client_id is None and kind in BROADCAST)
            if kind == "execution_start":
                yield frames.json_frame("status", _status(before))
            if kind in (REMOVED, PREVIEWS) or not (is_for_all or row.client_id == socket.client_id):
                continue
            if kind == TEXT:
                yield frames.text_frame(str(data.get("node")), str(data.get("text")))
            elif kind == PICTURE:
                yield from _picture_frames(data, row.prompt_id, with_metadata=with_metadata)
            else:
                yield frames.json_frame(kind, data if sees else redacted(kind, data))

    def _send_status(self) -> None:
        for socket in self._open_sockets():
            socket.tell("status", _status(self._remaining))


def pictures_after_progress(events: Sequence[Event]) -> Iterable[Event]:
    """Moves each preview after the next event that isn't a preview, which is usually its progress
    event. This is ComfyUI's order for sockets without preview metadata. With metadata, the preview
    comes first.
    """
    waiting: list[Event] = []
    for event in events:
        if event[0] == PICTURE:
            waiting.append(event)
            continue
        yield event
        yield from waiting
        waiting = []
    yield from waiting


def _picture_frames(
    data: Mapping[str, Any], prompt_id: str, *, with_metadata: bool
) -> Iterable[Frame]:
    try:
        picture = base64.b64decode(data["base64"])
    except (KeyError, TypeError, ValueError):
        return
    if not picture:
        return
    if with_metadata:
        sent = data.get("metadata")
        metadata = {**(sent if isinstance(sent, Mapping) else {}), "prompt_id": prompt_id}
        yield frames.image_with_metadata_frame(picture, metadata)
    else:
        yield frames.image_frame(picture)


def _sendable(rows: Sequence[LoggedEvents], held: Collection[UUID]) -> Sequence[LoggedEvents]:
    """Returns the reports before the first one that belongs to a held job."""
    for index, row in enumerate(rows):
        if row.job_id in held:
            return rows[:index]
    return rows


def _departed(row: LoggedEvents) -> int:
    """Returns the number of prompts that leave the queue with this report."""
    removed = sum(int(data.get("count", 1)) for kind, data in row.events if kind == REMOVED)
    return removed + (1 if row.is_last else 0)


def _ended_in(rows: Sequence[LoggedEvents]) -> list[int]:
    return [row.id for row in rows for _ in range(_departed(row))]


def _has_unread(socket: GatewaySocket) -> bool:
    return socket.state is LogState.READING


def _status(remaining: int) -> dict[str, object]:
    return {"status": {"exec_info": {"queue_remaining": remaining}}}


class GatewayFeeds:
    """The feeds in this process, by user."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._feeds: dict[UUID, UserFeed] = {}
        self._cursors = plane.cursors

    def of(self, caller: Caller) -> UserFeed:
        feed = self._feeds.get(caller.user_id)
        if feed is None:
            feed = self._feeds[caller.user_id] = UserFeed(self._plane, caller)
        return feed

    async def wait_until_sent(self, caller: Caller) -> None:
        """Waits until all messages so far have been sent to the caller's sockets."""
        feed = self._feeds.get(caller.user_id)
        if feed is not None:
            await feed.wait_until_sent()

    async def release(self, caller: Caller, job_id: UUID) -> None:
        """Releases a job's messages that were held back. Closes the feed if it has no sockets."""
        feed = self.of(caller)
        feed.release(job_id)
        await self._close_if_empty(caller, feed)

    async def _close_if_empty(self, caller: Caller, feed: UserFeed) -> None:
        if feed.is_empty and self._feeds.get(caller.user_id) is feed:
            del self._feeds[caller.user_id]
            await feed.close()

    async def join(self, caller: Caller, client_id: str) -> GatewaySocket:
        """Returns a new socket. It receives the messages that its client has missed and all new
        ones.
        """
        open_at = self.of(caller).seen_by(client_id)
        known = self._cursors.of(caller.user_id, client_id)
        await self.of(caller).start()
        # The feed finds runs that start from now on in the log. Earlier ones are read here.
        first, running_node, running = await self._missed(caller, client_id)
        if open_at is None:
            # The control plane that the client has just left may already have sent the client's
            # cursor.
            await self._cursors.catch_up()
            known = self._cursors.of(caller.user_id, client_id)
        cursor = max((at for at in (open_at, known) if at is not None), default=None)
        feed = self.of(caller)
        await feed.start()
        if cursor is None:
            cursor = cursor_at(feed.last if first is None else min(first - 1, feed.last))
        socket = GatewaySocket(client_id, cursor)
        # If the feed became empty in the meantime, it was closed and must be created again.
        feed = self.of(caller)
        await feed.start()
        feed.add(socket, running_node, running)
        return socket

    async def _missed(
        self, caller: Caller, client_id: str
    ) -> tuple[int | None, str | None, Sequence[Job]]:
        """Returns the id of the first report about a prompt of this client that is active or has
        just ended, the running node, and the user's running prompts.
        """
        tenant_id, user_id = caller.tenant.id, caller.user_id
        active = await started_jobs(self._plane, caller)
        running = [job for job in active if gateway_data(job).get("client_id") == client_id]
        started = [job.started_at for job in running if job.started_at]
        since = min([self._plane.clock() - MISSED_MAX, *started])
        async with self._plane.context.tenant(tenant_id) as tx:
            first = await run_log.first_id_of_client(tx, tenant_id, user_id, client_id, since=since)
            attempts = await run_log.running_attempts(tx, tenant_id, user_id) if running else ()
            shown = [attempt.job_id for attempt in attempts if attempt.client_id == client_id]
            job_ids = [*shown, *(job.id for job in running)][:1]
            messages = [
                event
                for job_id in job_ids
                for event in await run_log.messages_of_job(tx, tenant_id, job_id)
            ]
        return first, current_node(messages), [job for job in active if is_running(job)]

    async def leave(self, caller: Caller, socket: GatewaySocket) -> None:
        """Removes a socket, and sends its position to other control planes before its connection is
        closed.
        """
        feed = self.of(caller)
        feed.remove(socket)
        if not socket.is_replaced:
            self._cursors.keep(caller.user_id, socket.client_id, socket.taken_cursor)
        await self._close_if_empty(caller, feed)
        # A client that sees its connection close may be at another control plane immediately.
        await self._cursors.wait_until_sent()

    async def close(self) -> None:
        for feed in [*self._feeds.values()]:
            await feed.close()
        self._feeds.clear()
