"""Keeps the progress and live previews of running jobs in memory, and relays them between control
planes.

A worker reports to one control plane, and a customer may be connected to another one. That one
subscribes to the job's progress for a short time, so nothing is sent for jobs without followers.

A client that shows a job's previews opens a watch. The responses to heartbeats report whether the
job is watched, and the worker only sends images if it is. If the watch and the worker are at
different control planes, images are relayed through a table in the tenant's database, which has one
row for each such job while it runs. A notification announces each new image.
"""

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from time import monotonic
from types import TracebackType
from typing import Any, NamedTuple
from uuid import UUID

from pydantic import ValidationError

from comfyfleet.api.worker import Heartbeat, Progress, RunPreview
from comfyfleet.clock import Clock
from comfyfleet.errors import FleetError, Unavailable
from comfyfleet.server.db import Database
from comfyfleet.server.db.coordination import NotifyChannel
from comfyfleet.server.jobs import store_prompts

PROGRESS_KEPT_MAX = 10_000
# Maximum total size of the images that are kept, in base64 characters.
CHARACTERS_MAX = 64 * 1024 * 1024


class ProgressCache:
    """Stores the newest progress of each lease, whether its worker reported it here or another
    control plane sent it.

    Progress is removed when the lease ends at this control plane. A lease that ends elsewhere is
    not noticed here, and each entry may contain an image. So the oldest entries are dropped when
    their total size exceeds `CHARACTERS_MAX`.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[UUID, Progress] = OrderedDict()
        self._characters = 0
        self._received: OrderedDict[UUID, Progress] = OrderedDict()
        self._missed: set[UUID] = set()
        self._changed: set[UUID] = set()

    def note(self, token: UUID, progress: Progress) -> None:
        self.forget(token)
        self._kept[token] = progress
        self._characters += _characters(progress)
        while len(self._kept) > PROGRESS_KEPT_MAX or self._characters > CHARACTERS_MAX:
            _, oldest = self._kept.popitem(last=False)
            self._characters -= _characters(oldest)
        if len(self._changed) < PROGRESS_KEPT_MAX:
            self._changed.add(token)

    def forget(self, token: UUID) -> None:
        """Removes the progress of a lease, because the lease has ended or newer progress will be
        stored.
        """
        self._received.pop(token, None)
        self._missed.discard(token)
        self._changed.discard(token)
        if (known := self._kept.pop(token, None)) is not None:
            self._characters -= _characters(known)

    def hear(self, token: UUID, progress: Progress) -> None:
        """Stores progress from another control plane. Ignores it if the worker reports to this
        one.
        """
        if token not in self._kept:
            self._received[token] = progress
            self._received.move_to_end(token)
            if len(self._received) > PROGRESS_KEPT_MAX:
                self._received.popitem(last=False)

    def of(self, token: UUID | None) -> Progress | None:
        if token is None:
            return None
        if (known := self._kept.get(token)) is not None:
            return known
        if len(self._missed) < PROGRESS_KEPT_MAX:
            self._missed.add(token)
        return self._received.get(token)

    def own(self, token: UUID) -> Progress | None:
        """Returns the progress that the worker reported to this control plane."""
        return self._kept.get(token)

    def pop_missed(self) -> set[UUID]:
        """Returns and clears the leases whose progress was read here without having been reported
        here.
        """
        missed, self._missed = self._missed, set()
        return missed

    def pop_changed(self) -> set[UUID]:
        changed, self._changed = self._changed, set()
        return changed


def _characters(progress: Progress) -> int:
    return len(progress.preview or "") + len(progress.node or "")


CHANNEL = "comfyfleet_progress"
SEND_SECONDS = 0.5  # time between messages to other control planes
RENEW_SECONDS = 10.0  # time after which a subscription or watch is renewed
SUBSCRIPTION_SECONDS = 25.0  # lifetime of a subscription, unless it is renewed
JOBS_PER_MESSAGE_MAX = 100  # each id takes 36 of the 8,000 characters that a message may have
TEXT_CHARACTERS_MAX = 200
logger = logging.getLogger(__name__)


class ProgressRelay:
    """Exchanges progress between control planes: requests it for jobs that are followed here, and
    sends it for jobs that are followed elsewhere.
    """

    def __init__(self, progress_cache: ProgressCache, hints: NotifyChannel, name: str) -> None:
        self._progress_cache = progress_cache
        self._hints = hints
        self._name = name  # identifies the messages that this process has sent
        self._requested_at: dict[UUID, float] = {}
        self._subscribed_until: dict[UUID, float] = {}
        # leases that were just requested, whose progress is sent even if it hasn't changed
        self._new: set[UUID] = set()

    async def run(self) -> None:
        """Runs until cancelled. Returns immediately on SQLite, where there is only one process."""
        if self._hints.reach_others:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._hints.listen(self.heard, lambda: None))
                both.create_task(self._run_sender())

    async def close(self) -> None:
        await self._hints.close()

    async def _run_sender(self) -> None:
        while True:
            await asyncio.sleep(SEND_SECONDS)
            try:
                for message in self.messages(monotonic()):
                    await self._hints.send(message)
            except (Unavailable, OSError, TimeoutError) as error:
                logger.debug("progress could not be sent to the other control planes: %s", error)

    def messages(self, now: float) -> Iterator[str]:
        """Yields the messages that are due, starting with requests."""
        requests = list(self._requests_due(now))
        for start in range(0, len(requests), JOBS_PER_MESSAGE_MAX):
            few = requests[start : start + JOBS_PER_MESSAGE_MAX]
            yield self._message(ask=[token.hex for token in few])
        for token in self._due(now):
            if (progress := self._progress_cache.own(token)) is not None:
                yield self._message(of=token.hex, progress=_short(progress))

    def _requests_due(self, now: float) -> Iterator[UUID]:
        self._requested_at = _since(self._requested_at, now - RENEW_SECONDS)
        for token in self._progress_cache.pop_missed() - self._requested_at.keys():
            self._requested_at[token] = now
            yield token

    def _due(self, now: float) -> Collection[UUID]:
        self._subscribed_until = _since(self._subscribed_until, now)
        new, self._new = self._new, set()
        return (self._progress_cache.pop_changed() & self._subscribed_until.keys()) | new

    def _message(self, **content: Any) -> str:
        return json.dumps({"from": self._name, **content})

    def heard(self, message: str) -> None:
        content = json.loads(message)
        if content["from"] == self._name:
            return
        for token in content.get("ask", ()):
            self._subscribed_until[UUID(token)] = monotonic() + SUBSCRIPTION_SECONDS
            self._new.add(UUID(token))
        if "of" in content:
            try:
                self._progress_cache.hear(UUID(content["of"]), Progress(**content["progress"]))
            except ValidationError as error:
                logger.warning("another control plane sent invalid progress: %s", error)


USER_CHANNEL = "comfyfleet_users"
# Seconds during which changes are collected before they are sent in one message.
GATHER_SECONDS = 0.02
CHANGED_USERS_MAX = 10_000


class UserChange(NamedTuple):
    """The kind of change to a user's prompts. `in_lists` means that their state in lists has
    changed. `in_messages` means that their runs have logged messages.
    """

    in_lists: bool
    in_messages: bool

    def joined(self, other: "UserChange") -> "UserChange":
        return UserChange(self.in_lists or other.in_lists, self.in_messages or other.in_messages)


ALL_CHANGED = UserChange(in_lists=True, in_messages=True)
ONLY_MESSAGES = UserChange(in_lists=False, in_messages=True)
ONLY_LISTS = UserChange(in_lists=True, in_messages=False)


class UserRelay:
    """Notifies other control planes of users whose prompts have changed, because clients of these
    users may be connected there.
    """

    def __init__(
        self,
        wake: Callable[[UUID, UserChange], None],
        forget_all: Callable[[], None],
        hints: NotifyChannel,
        name: str,
    ) -> None:
        self._wake = wake
        self._forget_all = forget_all
        self._hints = hints
        self._name = name
        self._changed: dict[UUID, UserChange] = {}
        self._is_changed = asyncio.Event()

    @property
    def hears_others(self) -> bool:
        """Whether this process currently receives changes from other control planes. Always true if
        there are no others.
        """
        return self._hints.is_listening or not self._hints.reach_others

    async def run(self) -> None:
        """Runs until cancelled. Returns immediately on SQLite, where there is only one process."""
        if self._hints.reach_others:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._hints.listen(self.heard, self._forget_all))
                both.create_task(self._run_sender())

    async def close(self) -> None:
        await self._hints.close()

    def note(self, user_id: UUID, change: UserChange) -> None:
        """Schedules a notification. Changes that occur within a short time are sent together."""
        if not self._hints.reach_others or len(self._changed) >= CHANGED_USERS_MAX:
            return
        self._changed[user_id] = change.joined(self._changed.get(user_id, change))
        self._is_changed.set()

    async def _run_sender(self) -> None:
        while True:
            await self._is_changed.wait()
            await asyncio.sleep(GATHER_SECONDS)
            self._is_changed.clear()
            changed, self._changed = self._changed, {}
            try:
                for message in self._messages(changed):
                    await self._hints.send(message)
            except (Unavailable, OSError, TimeoutError) as error:
                logger.debug("changes could not be sent to the other control planes: %s", error)
                await asyncio.sleep(SEND_SECONDS)
                for user_id, change in changed.items():
                    self.note(user_id, change)

    def _messages(self, changed: Mapping[UUID, UserChange]) -> Iterator[str]:
        users = list(changed.items())
        for start in range(0, len(users), JOBS_PER_MESSAGE_MAX):
            few = users[start : start + JOBS_PER_MESSAGE_MAX]
            shown = [user_id.hex for user_id, change in few if change.in_lists]
            logged = [user_id.hex for user_id, change in few if change.in_messages]
            yield json.dumps({"from": self._name, "shown": shown, "told": logged})

    def heard(self, message: str) -> None:
        content = json.loads(message)
        if content["from"] == self._name:
            return
        for user_id in content["shown"]:
            self._wake(UUID(user_id), ONLY_LISTS)
        for user_id in content["told"]:
            self._wake(UUID(user_id), ONLY_MESSAGES)


def _since(times: Mapping[UUID, float], least: float) -> dict[UUID, float]:
    return {token: time for token, time in times.items() if time > least}


def _short(progress: Progress) -> dict[str, Any]:
    """Returns the fields of the progress without its image, which is too large for a message."""
    fields = progress.model_dump(mode="json", exclude_none=True, exclude={"preview"})
    if len(fields.get("node", "")) > TEXT_CHARACTERS_MAX:
        del fields["node"]
    return fields


PREVIEW_CHANNEL = "comfyfleet_previews"
# Seconds for which an operator's request for a preview counts as a viewer.
EXPECTED_SECONDS = 15.0
WATCH_SECONDS = 25.0  # lifetime of another control plane's watch, unless it is renewed
# A relayed image is removed if no new one arrives within this many seconds, because the job has
# then either ended at another control plane or hangs.
SHARED_SECONDS_MAX = 60.0
SHARE_SECONDS_MIN = 0.25  # minimum time between relayed images


# The id that stands for all jobs. While it has a viewer, jobs start with previews enabled.
ANY_JOB = UUID(int=0)


class PreviewWatch:
    """A watch on a job's previews. `latest` is the newest image. The watch must be closed when it
    is no longer needed.
    """

    def __init__(
        self, previews: "Previews", tenant_id: UUID, job_id: UUID, on_picture: Callable[[], None]
    ) -> None:
        self._previews = previews
        self.tenant_id = tenant_id
        self.job_id = job_id
        self.on_picture = on_picture

    @property
    def latest(self) -> RunPreview | None:
        return self._previews.latest(self.tenant_id, self.job_id)

    def close(self) -> None:
        self._previews.leave(self)

    def __enter__(self) -> "PreviewWatch":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


class _Picture(NamedTuple):
    tenant_id: UUID
    preview: RunPreview


class Previews:
    """Stores which jobs are watched, and the newest image of each job that is watched in this
    process.
    """

    def __init__(self) -> None:
        self._watches: dict[UUID, list[PreviewWatch]] = {}
        self._latest: OrderedDict[UUID, _Picture] = OrderedDict()
        self._characters = 0
        self._expected: OrderedDict[UUID, float] = OrderedDict()
        self._elsewhere: dict[UUID, dict[str, float]] = {}  # expiry times by job and control plane
        self.relay: PreviewRelay | None = None

    def watch(
        self, tenant_id: UUID, job_id: UUID, on_picture: Callable[[], None] = lambda: None
    ) -> PreviewWatch:
        """Opens a watch on a tenant's job. `on_picture` is called for each new image. The caller
        must check that the viewer may see the job.
        """
        watch = PreviewWatch(self, tenant_id, job_id, on_picture)
        is_first = job_id not in self._watches
        self._watches.setdefault(job_id, []).append(watch)
        if is_first and self.relay is not None:
            self.relay.note_watch(job_id)
        return watch

    def leave(self, watch: PreviewWatch) -> None:
        mine = self._watches.get(watch.job_id, [])
        if watch not in mine:
            return
        mine.remove(watch)
        if not mine:
            del self._watches[watch.job_id]
            self._drop(watch.job_id)
            if self.relay is not None:
                self.relay.note_left(watch.job_id)

    def expect(self, job_id: UUID) -> None:
        """Counts a viewer of the job for `EXPECTED_SECONDS`, even without an open watch."""
        self._expected[job_id] = monotonic() + EXPECTED_SECONDS
        self._expected.move_to_end(job_id)
        while self._expected and (
            len(self._expected) > PROGRESS_KEPT_MAX
            or next(iter(self._expected.values())) < monotonic()
        ):
            self._expected.popitem(last=False)
        if self.relay is not None:
            self.relay.note_watch(job_id)

    def is_watched(self, job_id: UUID) -> bool:
        """Whether the job is watched, here or at another control plane."""
        is_expected = self._expected.get(job_id, 0.0) > monotonic()
        return job_id in self._watches or is_expected or self.is_watched_elsewhere(job_id)

    def is_watched_elsewhere(self, job_id: UUID) -> bool:
        return any(until > monotonic() for until in self._elsewhere.get(job_id, {}).values())

    def watches_here(self) -> Iterable[UUID]:
        return self._watches.keys()

    def tenant_of(self, job_id: UUID) -> UUID | None:
        """Returns the tenant of a job that is watched here, or None if it isn't watched."""
        return next((watch.tenant_id for watch in self._watches.get(job_id, ())), None)

    def latest(self, tenant_id: UUID, job_id: UUID) -> RunPreview | None:
        picture = self._latest.get(job_id)
        return picture.preview if picture is not None and picture.tenant_id == tenant_id else None

    def put(self, tenant_id: UUID, job_id: UUID, preview: RunPreview) -> None:
        """Handles an image that the job's worker reported here. The image is only stored or relayed
        if the job is watched.
        """
        self.deliver(tenant_id, job_id, preview)
        if self.relay is not None and self.is_watched_elsewhere(job_id):
            self.relay.share(tenant_id, job_id, preview)

    def deliver(self, tenant_id: UUID, job_id: UUID, preview: RunPreview) -> None:
        """Stores the image and notifies the watches in this process."""
        mine = [watch for watch in self._watches.get(job_id, ()) if watch.tenant_id == tenant_id]
        if not mine:
            return
        self._drop(job_id)
        self._latest[job_id] = _Picture(tenant_id, preview)
        self._characters += len(preview.base64)
        while self._characters > CHARACTERS_MAX:
            self._drop(next(iter(self._latest)))
        for watch in mine:
            watch.on_picture()

    def withdraw(self, job_id: UUID) -> None:
        """Removes the image, because the job will run again. Watches stay open."""
        self._drop(job_id)
        if self.relay is not None:
            self.relay.withdraw(job_id)

    def forget(self, job_id: UUID) -> None:
        """Removes the images and expected viewers of a job that has ended."""
        self.withdraw(job_id)
        self._expected.pop(job_id, None)
        self._elsewhere.pop(job_id, None)

    def note_elsewhere(self, plane: str, job_ids: Iterable[UUID]) -> None:
        """Records that another control plane has viewers of these jobs."""
        self._elsewhere = {
            watched_id: current
            for watched_id, expiry_times in self._elsewhere.items()
            if (current := _unexpired(expiry_times))
        }
        until = monotonic() + WATCH_SECONDS
        for job_id in job_ids:
            if job_id in self._elsewhere or len(self._elsewhere) < PROGRESS_KEPT_MAX:
                self._elsewhere.setdefault(job_id, {})[plane] = until

    def note_left(self, plane: str, job_id: UUID) -> None:
        expiry_times = self._elsewhere.get(job_id, {})
        expiry_times.pop(plane, None)
        if not expiry_times:
            self._elsewhere.pop(job_id, None)

    def _drop(self, job_id: UUID) -> None:
        known = self._latest.pop(job_id, None)
        if known is not None:
            self._characters -= len(known.preview.base64)


def _unexpired(expiry_times: Mapping[str, float]) -> dict[str, float]:
    now = monotonic()
    return {plane: until for plane, until in expiry_times.items() if until > now}


def preview_in(message: Heartbeat) -> RunPreview | None:
    """Returns the preview image in a heartbeat. Simple workers send it as a data: URL in the
    progress.
    """
    progress = message.progress
    if message.preview is not None or progress is None or not progress.preview:
        return message.preview
    head, _, data = progress.preview.partition(",")
    content_type = head.removeprefix("data:").partition(";")[0]
    try:
        return RunPreview(
            node_id=progress.node,
            content_type=content_type,  # type: ignore[arg-type]
            base64=data,
        )
    except ValidationError:
        return None


class PreviewRelay:
    """Notifies other control planes of jobs that are watched here, and relays images that were
    reported here.

    On SQLite, where there is only one process, it does nothing.
    """

    def __init__(
        self,
        previews: Previews,
        pool_of: Callable[[UUID], Awaitable[Database]],
        hints: NotifyChannel,
        name: str,
        clock: Clock,
    ) -> None:
        self._previews = previews
        self._pool_of = pool_of
        self._hints = hints
        self._name = name
        self._clock = clock
        self._changed = asyncio.Event()
        self._watched: dict[UUID, bool] = {}  # changes to send: True if the job is now watched here
        self._renewed_at = monotonic()
        self._to_share: OrderedDict[UUID, _Picture] = OrderedDict()
        # Tenant and time of each image row that this process has written, by job.
        self._shared: dict[UUID, tuple[UUID, float]] = {}
        self._to_remove: dict[UUID, UUID] = {}
        self._to_read: set[UUID] = set()
        if hints.reach_others:
            previews.relay = self

    async def run(self) -> None:
        """Runs until cancelled. Returns immediately on SQLite, where there is only one process."""
        if self._hints.reach_others:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._hints.listen(self.heard, self._resend_all))
                both.create_task(self._run_sender())

    async def close(self) -> None:
        await self._hints.close()

    def note_watch(self, job_id: UUID) -> None:
        self._watched[job_id] = True
        self._changed.set()

    def note_left(self, job_id: UUID) -> None:
        self._watched[job_id] = False
        self._changed.set()

    def share(self, tenant_id: UUID, job_id: UUID, preview: RunPreview) -> None:
        """Schedules an image to be relayed. If several arrive in a short time, only the newest is
        relayed.
        """
        if job_id in self._to_share or len(self._to_share) < JOBS_PER_MESSAGE_MAX:
            self._to_share[job_id] = _Picture(tenant_id, preview)
            self._changed.set()

    def withdraw(self, job_id: UUID) -> None:
        """Schedules the removal of the relayed image."""
        self._to_share.pop(job_id, None)
        if (shared := self._shared.pop(job_id, None)) is not None:
            self._to_remove[job_id] = shared[0]
            self._changed.set()

    def heard(self, message: str) -> None:
        content = json.loads(message)
        if content["from"] == self._name:
            return
        if watched := content.get("watched"):
            self._previews.note_elsewhere(content["from"], map(UUID, watched))
        for job_id in content.get("left", ()):
            self._previews.note_left(content["from"], UUID(job_id))
        here = set(self._previews.watches_here())
        if shown := {UUID(job_id) for job_id in content.get("shown", ())} & here:
            self._to_read |= shown
            self._changed.set()

    def _resend_all(self) -> None:
        """Schedules all watches to be sent and all images to be read again, because notifications
        may have been lost.
        """
        self._watched |= dict.fromkeys(self._previews.watches_here(), True)
        self._to_read |= set(self._previews.watches_here())
        self._changed.set()

    async def _run_sender(self) -> None:
        while True:
            try:
                async with asyncio.timeout(RENEW_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                pass
            await asyncio.sleep(GATHER_SECONDS)
            self._changed.clear()
            self._renew(monotonic())
            shared = list(self._to_share)
            try:
                await self._send()
                await self._read()
            except (FleetError, OSError, TimeoutError) as error:
                logger.debug(
                    "previews could not be exchanged with the other control planes: %s", error
                )
            await asyncio.sleep(SHARE_SECONDS_MIN if shared else 0)

    def _renew(self, now: float) -> None:
        """Renews the open watches, and schedules the removal of images whose jobs no longer report
        new ones.
        """
        if now - self._renewed_at >= RENEW_SECONDS:
            self._renewed_at = now
            self._watched |= dict.fromkeys(self._previews.watches_here(), True)
        for job_id, (tenant_id, at) in [*self._shared.items()]:
            if now - at > SHARED_SECONDS_MAX:
                del self._shared[job_id]
                self._to_remove[job_id] = tenant_id

    async def _send(self) -> None:
        watched, self._watched = self._watched, {}
        for key, jobs in (
            ("watched", [job_id for job_id, is_watched in watched.items() if is_watched]),
            ("left", [job_id for job_id, is_watched in watched.items() if not is_watched]),
            ("shown", await self._write()),
        ):
            for message in self._messages(key, jobs):
                await self._hints.send(message)

    def _messages(self, key: str, jobs: list[UUID]) -> Iterator[str]:
        for start in range(0, len(jobs), JOBS_PER_MESSAGE_MAX):
            few = [job_id.hex for job_id in jobs[start : start + JOBS_PER_MESSAGE_MAX]]
            yield json.dumps({"from": self._name, key: few})

    async def _write(self) -> list[UUID]:
        """Writes images to the tenants' databases, where other control planes read them. Returns
        the ids of their jobs.
        """
        pictures, self._to_share = self._to_share, OrderedDict()
        written = []
        for job_id, (tenant_id, preview) in pictures.items():
            fields: dict[str, Any] = preview.model_dump()
            async with (await self._pool_of(tenant_id)).execute_one() as tx:
                await store_prompts.put_preview(tx, tenant_id, job_id, fields, now=self._clock())
            self._shared[job_id] = tenant_id, monotonic()
            written.append(job_id)
        removed, self._to_remove = self._to_remove, {}
        for job_id, tenant_id in removed.items():
            if job_id not in pictures:
                async with (await self._pool_of(tenant_id)).execute_one() as tx:
                    await store_prompts.remove_preview(tx, tenant_id, job_id)
        return written

    async def _read(self) -> None:
        """Reads images that other control planes have relayed, and delivers them to the watches in
        this process.
        """
        jobs, self._to_read = self._to_read, set()
        for job_id in jobs:
            if (tenant_id := self._previews.tenant_of(job_id)) is None:
                continue
            async with (await self._pool_of(tenant_id)).read() as tx:
                fields = await store_prompts.get_preview(tx, tenant_id, job_id)
            if fields is None:
                continue
            try:
                self._previews.deliver(tenant_id, job_id, RunPreview.model_validate(fields))
            except ValidationError as error:
                logger.warning("another control plane stored an invalid preview: %s", error)
