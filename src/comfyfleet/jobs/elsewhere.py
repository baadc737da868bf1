"""Progress from one control plane to the others, and only of jobs that somebody follows there.

A worker tells its progress to the control plane that it happens to reach; a customer may ask
another. That one asks around, and is told for a while. Nothing is sent for jobs nobody looks at.
"""

import asyncio
import json
import logging
from collections.abc import Collection, Iterator, Mapping
from time import monotonic
from typing import Any
from uuid import UUID

from pydantic import ValidationError

from comfyfleet.db.notify import Hints
from comfyfleet.jobs.progress import Progresses
from comfyfleet.kernel.errors import Unavailable
from comfyfleet.wire.messages import Progress

CHANNEL = "comfyfleet_progress"
SPEAK_SECONDS = 0.5
ASK_AGAIN_SECONDS = 10.0
TELL_SECONDS = 25.0  # after a question, unless it is asked again
ASKED_PER_MESSAGE = 100  # 36 characters each, and a message has at most 8,000
TEXT_CHARACTERS_MAX = 200
logger = logging.getLogger(__name__)


class Elsewhere:
    def __init__(self, progresses: Progresses, hints: Hints, name: str) -> None:
        self._progresses = progresses
        self._hints = hints
        self._name = name  # tells our own messages from those of others
        self._asked_at: dict[UUID, float] = {}
        self._tell_until: dict[UUID, float] = {}
        self._new: set[UUID] = set()  # asked for just now: told even if nothing changes

    async def run(self) -> None:
        """Until cancelled. On SQLite there is one process, and nobody to ask."""
        if self._hints.reach_others:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._hints.listen(self.heard, lambda: None))
                both.create_task(self._speak())

    async def close(self) -> None:
        await self._hints.close()

    async def _speak(self) -> None:
        while True:
            await asyncio.sleep(SPEAK_SECONDS)
            try:
                for message in self.messages(monotonic()):
                    await self._hints.send(message)
            except (Unavailable, OSError, TimeoutError) as error:
                logger.debug("progress can't be told to other control planes: %s", error)

    def messages(self, now: float) -> Iterator[str]:
        """What is to be said now: questions first."""
        questions = list(self._questions(now))
        for start in range(0, len(questions), ASKED_PER_MESSAGE):
            few = questions[start : start + ASKED_PER_MESSAGE]
            yield self._message(ask=[each.hex for each in few])
        for token in self._due(now):
            if (progress := self._progresses.own(token)) is not None:
                yield self._message(of=token.hex, progress=_short(progress))

    def _questions(self, now: float) -> Iterator[UUID]:
        self._asked_at = _since(self._asked_at, now - ASK_AGAIN_SECONDS)
        for token in self._progresses.take_missed() - self._asked_at.keys():
            self._asked_at[token] = now
            yield token

    def _due(self, now: float) -> Collection[UUID]:
        self._tell_until = _since(self._tell_until, now)
        new, self._new = self._new, set()
        return (self._progresses.take_changed() & self._tell_until.keys()) | new

    def _message(self, **said: Any) -> str:
        return json.dumps({"from": self._name, **said})

    def heard(self, message: str) -> None:
        said = json.loads(message)
        if said["from"] == self._name:
            return
        for each in said.get("ask", ()):
            self._tell_until[UUID(each)] = monotonic() + TELL_SECONDS
            self._new.add(UUID(each))
        if "of" in said:
            try:
                self._progresses.hear(UUID(said["of"]), Progress(**said["progress"]))
            except ValidationError as error:
                logger.warning("another control plane's progress is not understood: %s", error)


def _since(times: Mapping[UUID, float], least: float) -> dict[UUID, float]:
    return {token: time for token, time in times.items() if time > least}


def _short(progress: Progress) -> dict[str, Any]:
    """Without its picture, which no message of the database could hold."""
    said = progress.model_dump(mode="json", exclude_none=True, exclude={"preview"})
    if len(said.get("node", "")) > TEXT_CHARACTERS_MAX:
        del said["node"]
    return said
