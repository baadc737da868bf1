"""The progress of running jobs, kept in memory, and its relay between control planes.

A worker reports to the control plane that it happens to reach; a customer may ask another. That one
subscribes for a while, so nothing is sent for jobs that nobody follows."""

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from time import monotonic
from typing import Any
from uuid import UUID

from pydantic import ValidationError

from comfyfleet.api.worker import Progress
from comfyfleet.errors import Unavailable
from comfyfleet.server.db.coordination import NotifyChannel

PROGRESS_KEPT_MAX = 10_000
CHARACTERS_MAX = 64 * 1024 * 1024


class ProgressCache:
    """The newest progress of each lease, reported by its worker here or by another control plane.

    Forgotten when the lease ends here. The end of a lease elsewhere is not noticed, and each may
    hold a picture: beyond `CHARACTERS_MAX` in all, the oldest are dropped.
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
        """Returns what the worker reported to this control plane."""
        return self._kept.get(token)

    def pop_missed(self) -> set[UUID]:
        """Returns leases whose progress was asked for here, and whose worker reports elsewhere."""
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
SUBSCRIPTION_SECONDS = 25.0  # after a question, unless it is asked again
JOBS_PER_MESSAGE_MAX = 100  # 36 characters each, and a message has at most 8,000
TEXT_CHARACTERS_MAX = 200
logger = logging.getLogger(__name__)


class ProgressRelay:
    def __init__(self, progress_cache: ProgressCache, hints: NotifyChannel, name: str) -> None:
        self._progress_cache = progress_cache
        self._hints = hints
        self._name = name  # tells our own messages from those of others
        self._asked_at: dict[UUID, float] = {}
        self._tell_until: dict[UUID, float] = {}
        self._new: set[UUID] = set()  # asked for just now: told even if nothing changes

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
        """Yields the messages to send now, questions first."""
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
        said = json.loads(message)
        if said["from"] == self._name:
            return
        for each in said.get("ask", ()):
            self._tell_until[UUID(each)] = monotonic() + SUBSCRIPTION_SECONDS
            self._new.add(UUID(each))
        if "of" in said:
            try:
                self._progress_cache.hear(UUID(said["of"]), Progress(**said["progress"]))
            except ValidationError as error:
                logger.warning("another control plane's progress is not understood: %s", error)


USER_CHANNEL = "comfyfleet_users"
# What changes within so long is told by one message.
GATHER_SECONDS = 0.02


class UserRelay:
    """Tells other control planes whose prompts have changed: their clients may listen there."""

    def __init__(self, wake: Callable[[UUID], None], hints: NotifyChannel, name: str) -> None:
        self._wake = wake
        self._hints = hints
        self._name = name
        self._changed: set[UUID] = set()
        self._is_changed = asyncio.Event()

    async def run(self) -> None:
        """Runs until cancelled. Returns at once on SQLite, where there is one process."""
        if self._hints.reach_others:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._hints.listen(self.heard, lambda: None))
                both.create_task(self._speak())

    async def close(self) -> None:
        await self._hints.close()

    def note(self, user_id: UUID) -> None:
        """Told a moment later. More than a message holds are left out: they are looked at anyway."""
        if self._hints.reach_others and len(self._changed) < JOBS_PER_MESSAGE_MAX:
            self._changed.add(user_id)
            self._is_changed.set()

    async def _speak(self) -> None:
        while True:
            await self._is_changed.wait()
            await asyncio.sleep(GATHER_SECONDS)
            self._is_changed.clear()
            changed, self._changed = self._changed, set()
            said = {"from": self._name, "users": [each.hex for each in changed]}
            try:
                await self._hints.send(json.dumps(said))
            except (Unavailable, OSError, TimeoutError) as error:
                logger.debug("changes can't be told to other control planes: %s", error)

    def heard(self, message: str) -> None:
        said = json.loads(message)
        if said["from"] != self._name:
            for each in said["users"]:
                self._wake(UUID(each))


def _since(times: Mapping[UUID, float], least: float) -> dict[UUID, float]:
    return {token: time for token, time in times.items() if time > least}


def _short(progress: Progress) -> dict[str, Any]:
    """Returns the progress without its picture, which is too large for a message."""
    said = progress.model_dump(mode="json", exclude_none=True, exclude={"preview"})
    if len(said.get("node", "")) > TEXT_CHARACTERS_MAX:
        del said["node"]
    return said
