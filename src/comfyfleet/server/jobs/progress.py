"""Stores the progress and live previews of running jobs in memory, and relays them between control
planes.

A worker reports to whichever control plane it reaches, and a customer may be connected to another
one. That one subscribes for a while, so nothing is sent for jobs that nobody follows.

A client that shows a job's previews opens a watch. The responses to the worker's heartbeats contain
whether the job has watches, and the worker only sends images if it has. If watch and worker are at
different control planes, the image is relayed through a table of the tenant's database, which has
one row per such job while it runs. A notification announces each new image.
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
CHARACTERS_MAX = 64 * 1024 * 1024


class ProgressCache:
    """Stores the newest progress of each lease, reported to this control plane or received from
    another one.

    Progress is removed when the lease ends at this control plane. The end of a lease elsewhere is
    not noticed, and each entry may hold an image. So the oldest entries are dropped when all of
    them exceed `CHARACTERS_MAX`.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[UUID, Progress] = OrderedDict()
        self._characters = 0
        self._heard: OrderedDict[UUID, Progress] = OrderedDict()
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
        """Removes the progress of a lease that has ended, or before newer progress is stored."""
        self._heard.pop(token, None)
        self._missed.discard(token)
        self._changed.discard(token)
        if (known := self._kept.pop(token, None)) is not None:
            self._characters -= _characters(known)

    def hear(self, token: UUID, progress: Progress) -> None:
        """Stores progress from another control plane, unless the worker reports to this one."""
        if token not in self._kept:
            self._heard[token] = progress
            self._heard.move_to_end(token)
            if len(self._heard) > PROGRESS_KEPT_MAX:
                self._heard.popitem(last=False)

    def of(self, token: UUID | None) -> Progress | None:
        if token is None:
            return None
        if (known := self._kept.get(token)) is not None:
            return known
        if len(self._missed) < PROGRESS_KEPT_MAX:
            self._missed.add(token)
        return self._heard.get(token)

    def own(self, token: UUID) -> Progress | None:
        """Returns the progress that the worker reported to this control plane."""
        return self._kept.get(token)

    def pop_missed(self) -> set[UUID]:
        """Returns leases whose progress was requested here but is reported to another control
        plane.
        """
        missed, self._missed = self._missed, set()
        return missed

    def pop_changed(self) -> set[UUID]:
        changed, self._changed = self._changed, set()
        return changed


def _characters(progress: Progress) -> int:
    return len(progress.preview or "") + len(progress.node or "")


CHANNEL = "comfyfleet_progress"
SEND_SECONDS = 0.5
RENEW_SECONDS = 10.0
SUBSCRIPTION_SECONDS = 25.0  # after a request, unless it is renewed
JOBS_PER_MESSAGE_MAX = 100  # 36 characters each, and a message has at most 8,000
TEXT_CHARACTERS_MAX = 200
logger = logging.getLogger(__name__)


class ProgressRelay:
    def __init__(self, progress_cache: ProgressCache, hints: NotifyChannel, name: str) -> None:
        self._progress_cache = progress_cache
        self._hints = hints
        self._name = name  # identifies the messages that this process has sent
        self._asked_at: dict[UUID, float] = {}
        self._tell_until: dict[UUID, float] = {}
        # newly requested leases, whose progress is sent even if it has not changed
        self._new: set[UUID] = set()

    async def run(self) -> None:
        """Runs until cancelled. Returns at once on SQLite, where there is one process."""
        if self._hints.reach_others:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._hints.listen(self.heard, lambda: None))
                both.create_task(self._speak())

    async def close(self) -> None:
        await self._hints.close()

    async def _speak(self) -> None:
        while True:
            await asyncio.sleep(SEND_SECONDS)
            try:
                for message in self.messages(monotonic()):
                    await self._hints.send(message)
            except (Unavailable, OSError, TimeoutError) as error:
                logger.debug("progress can't be told to other control planes: %s", error)

    def messages(self, now: float) -> Iterator[str]:
        """Yields the messages to send now, requests first."""
        questions = list(self._questions(now))
        for start in range(0, len(questions), JOBS_PER_MESSAGE_MAX):
            few = questions[start : start + JOBS_PER_MESSAGE_MAX]
            yield self._message(ask=[each.hex for each in few])
        for token in self._due(now):
            if (progress := self._progress_cache.own(token)) is not None:
                yield self._message(of=token.hex, progress=_short(progress))

    def _questions(self, now: float) -> Iterator[UUID]:
        self._asked_at = _since(self._asked_at, now - RENEW_SECONDS)
        for token in self._progress_cache.pop_missed() - self._asked_at.keys():
            self._asked_at[token] = now
            yield token

    def _due(self, now: float) -> Collection[UUID]:
        self._tell_until = _since(self._tell_until, now)
        new, self._new = self._new, set()
        return (self._progress_cache.pop_changed() & self._tell_until.keys()) | new

    def _message(self, **said: Any) -> str:
        return json.dumps({"from": self._name, **said})

    def heard(self, message: str) -> None:
        content = json.loads(message)
        if content["from"] == self._name:
            return
        for token in content.get("ask", ()):
            self._tell_until[UUID(token)] = monotonic() + SUBSCRIPTION_SECONDS
            self._new.add(UUID(token))
        if "of" in content:
            try:
                self._progress_cache.hear(UUID(content["of"]), Progress(**content["progress"]))
            except ValidationError as error:
                logger.warning("another control plane's progress is not understood: %s", error)


USER_CHANNEL = "comfyfleet_users"
# Seconds for which changes are collected before they are sent in one message.
GATHER_SECONDS = 0.02
CHANGED_USERS_MAX = 10_000


class UserChange(NamedTuple):
    """What has changed about a user's prompts: their state in lists (`is_shown`), the messages of
    their runs (`is_told`), or both.
    """

    is_shown: bool
    is_told: bool

    def joined(self, other: "UserChange") -> "UserChange":
        return UserChange(self.is_shown or other.is_shown, self.is_told or other.is_told)


ALL_CHANGED = UserChange(is_shown=True, is_told=True)
ONLY_TOLD = UserChange(is_shown=False, is_told=True)
ONLY_SHOWN = UserChange(is_shown=True, is_told=False)


class UserRelay:
    """Notifies other control planes of users whose prompts have changed, because their clients may
    be connected there.
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
        """Whether this process currently receives changes from other control planes. True if there
        are none.
        """
        return self._hints.is_listening or not self._hints.reach_others

    async def run(self) -> None:
        """Runs until cancelled. Returns at once on SQLite, where there is one process."""
        if self._hints.reach_others:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._hints.listen(self.heard, self._forget_all))
                both.create_task(self._speak())

    async def close(self) -> None:
        await self._hints.close()

    def note(self, user_id: UUID, change: UserChange) -> None:
        """Schedules a notification. Changes within a short time are sent together."""
        if not self._hints.reach_others or len(self._changed) >= CHANGED_USERS_MAX:
            return
        self._changed[user_id] = change.joined(self._changed.get(user_id, change))
        self._is_changed.set()

    async def _speak(self) -> None:
        while True:
            await self._is_changed.wait()
            await asyncio.sleep(GATHER_SECONDS)
            self._is_changed.clear()
            changed, self._changed = self._changed, {}
            try:
                for message in self._messages(changed):
                    await self._hints.send(message)
            except (Unavailable, OSError, TimeoutError) as error:
                logger.debug("changes can't be told to other control planes: %s", error)
                await asyncio.sleep(SEND_SECONDS)
                for user_id, change in changed.items():
                    self.note(user_id, change)

    def _messages(self, changed: Mapping[UUID, UserChange]) -> Iterator[str]:
        users = list(changed.items())
        for start in range(0, len(users), JOBS_PER_MESSAGE_MAX):
            few = users[start : start + JOBS_PER_MESSAGE_MAX]
            shown = [user_id.hex for user_id, change in few if change.is_shown]
            told = [user_id.hex for user_id, change in few if change.is_told]
            yield json.dumps({"from": self._name, "shown": shown, "told": told})

    def heard(self, message: str) -> None:
        content = json.loads(message)
        if content["from"] == self._name:
            return
        for user_id in content["shown"]:
            self._wake(UUID(user_id), ONLY_SHOWN)
        for user_id in content["told"]:
            self._wake(UUID(user_id), ONLY_TOLD)


def _since(times: Mapping[UUID, float], least: float) -> dict[UUID, float]:
    return {token: time for token, time in times.items() if time > least}


def _short(progress: Progress) -> dict[str, Any]:
    """Returns the progress without its image, which is too large for a message."""
    fields = progress.model_dump(mode="json", exclude_none=True, exclude={"preview"})
    if len(fields.get("node", "")) > TEXT_CHARACTERS_MAX:
        del fields["node"]
    return fields


PREVIEW_CHANNEL = "comfyfleet_previews"
# Seconds for which the submitter of a job counts as a viewer, before its page has opened.
EXPECTED_SECONDS = 15.0
WATCH_SECONDS = 25.0  # lifetime of another control plane's watch, unless it is renewed
# A relayed image is removed this many seconds after the last one, because the job has ended at
# another control plane or hangs.
SHARED_SECONDS_MAX = 60.0
SHARE_SECONDS_MIN = 0.25


# The id that operators watch to see previews of all running jobs.
ANY_JOB = UUID(int=0)


class PreviewWatch:
    """A watch on a job's previews. `latest` is the newest image. Close the watch when it is no
    longer needed.
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
        must have checked that the viewer may see the job.
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
        """Announces a viewer. A job may begin to run before its page has opened."""
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
        """Returns the tenant of a job that is watched here, or None."""
        return next((each.tenant_id for each in self._watches.get(job_id, ())), None)

    def latest(self, tenant_id: UUID, job_id: UUID) -> RunPreview | None:
        picture = self._latest.get(job_id)
        return picture.preview if picture is not None and picture.tenant_id == tenant_id else None

    def put(self, tenant_id: UUID, job_id: UUID, preview: RunPreview) -> None:
        """Handles an image that the job's worker reported here. It is stored and relayed only if
        the job is watched.
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
        """Removes the image, because the job's run starts again. Watches stay open."""
        self._drop(job_id)
        if self.relay is not None:
            self.relay.withdraw(job_id)

    def forget(self, job_id: UUID) -> None:
        """Removes everything about a job that has ended."""
        self.withdraw(job_id)
        self._expected.pop(job_id, None)
        self._elsewhere.pop(job_id, None)

    def note_elsewhere(self, plane: str, job_ids: Iterable[UUID]) -> None:
        """Records that another control plane has viewers for these jobs."""
        self._elsewhere = {
            each: fresh for each, those in self._elsewhere.items() if (fresh := _fresh(those))
        }
        until = monotonic() + WATCH_SECONDS
        for job_id in job_ids:
            if job_id in self._elsewhere or len(self._elsewhere) < PROGRESS_KEPT_MAX:
                self._elsewhere.setdefault(job_id, {})[plane] = until

    def note_left(self, plane: str, job_id: UUID) -> None:
        those = self._elsewhere.get(job_id, {})
        those.pop(plane, None)
        if not those:
            self._elsewhere.pop(job_id, None)

    def _drop(self, job_id: UUID) -> None:
        known = self._latest.pop(job_id, None)
        if known is not None:
            self._characters -= len(known.preview.base64)


def _fresh(until: Mapping[str, float]) -> dict[str, float]:
    now = monotonic()
    return {plane: each for plane, each in until.items() if each > now}


def preview_in(message: Heartbeat) -> RunPreview | None:
    """Returns the image of a heartbeat. A simple worker sends it as a data: URL with the progress."""
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
    """Notifies other control planes of the jobs that are watched here, and relays images that were
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
        self._watched: dict[UUID, bool] = {}  # changes to send: whether the job is watched here
        self._renewed_at = monotonic()
        self._to_share: OrderedDict[UUID, _Picture] = OrderedDict()
        # tenant and time of each row that this process has written
        self._shared: dict[UUID, tuple[UUID, float]] = {}
        self._to_remove: dict[UUID, UUID] = {}
        self._to_read: set[UUID] = set()
        if hints.reach_others:
            previews.relay = self

    async def run(self) -> None:
        """Runs until cancelled. Returns at once on SQLite, where there is one process."""
        if self._hints.reach_others:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._hints.listen(self.heard, self._tell_all))
                both.create_task(self._speak())

    async def close(self) -> None:
        await self._hints.close()

    def note_watch(self, job_id: UUID) -> None:
        self._watched[job_id] = True
        self._changed.set()

    def note_left(self, job_id: UUID) -> None:
        self._watched[job_id] = False
        self._changed.set()

    def share(self, tenant_id: UUID, job_id: UUID, preview: RunPreview) -> None:
        """Schedules an image to be relayed. If several arrive at once, only the newest is relayed."""
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

    def _tell_all(self) -> None:
        """Sends all watches and reads all images again, because notifications may have been lost."""
        self._watched |= dict.fromkeys(self._previews.watches_here(), True)
        self._to_read |= set(self._previews.watches_here())
        self._changed.set()

    async def _speak(self) -> None:
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
                logger.debug("previews can't be told to other control planes: %s", error)
            await asyncio.sleep(SHARE_SECONDS_MIN if shared else 0)

    def _renew(self, now: float) -> None:
        """Renews the open watches, and schedules the removal of images whose jobs report nothing
        any more.
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
        for says, jobs in (
            ("watched", [each for each, is_so in watched.items() if is_so]),
            ("left", [each for each, is_so in watched.items() if not is_so]),
            ("shown", await self._write()),
        ):
            for message in self._messages(says, jobs):
                await self._hints.send(message)

    def _messages(self, says: str, jobs: list[UUID]) -> Iterator[str]:
        for start in range(0, len(jobs), JOBS_PER_MESSAGE_MAX):
            few = [job_id.hex for job_id in jobs[start : start + JOBS_PER_MESSAGE_MAX]]
            yield json.dumps({"from": self._name, says: few})

    async def _write(self) -> list[UUID]:
        """Stores images where other control planes can read them. Returns the jobs that they belong
        to.
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
        """Reads images from other control planes for the watches in this process."""
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
                logger.warning("another control plane's preview is not understood: %s", error)
