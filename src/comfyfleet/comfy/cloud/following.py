"""A run of the cloud, from what it tells by itself and what it answers when asked.

Only an answer ends a run. What is told by itself may be late, lost or told twice: it makes the run
livelier and says when to ask.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from comfyfleet.comfy.calls import Calls
from comfyfleet.comfy.events import Cancelled, Event, Failed, Queued, Reconnected, Succeeded
from comfyfleet.comfy.inbox import Inbox
from comfyfleet.comfy.messages import Message, RunOver
from comfyfleet.comfy.places import Absent, Place, Waiting
from comfyfleet.comfy.settings import Limits
from comfyfleet.comfy.story import Chapter, Story, hear, see
from comfyfleet.kernel.errors import RunLost, RunStalled, RunTimedOut, UnexpectedAnswer

T = TypeVar("T")
Look: TypeAlias = Callable[[], Awaitable[Place]]

# A job that was just accepted may not be known everywhere at once.
ABSENT_LOOKS_MAX = 3
# The end is told a moment before it can be read.
FIRST_LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Watch:
    """When something was last heard and when to look again. All in seconds of one clock."""

    began: float
    heard: float | None
    next_look: float
    pause: float
    absences: int = 0


async def follow(
    run_id: str,
    inbox: Inbox,
    look: Look,
    calls: Calls,
    *,
    is_heard: bool = False,
) -> AsyncGenerator[Event]:
    """`is_heard`: all that the run tells is in the inbox, so a look at once would only spoil it."""
    limits, clock = calls.limits, calls.surroundings.clock
    story, now = Story(run_id), clock()
    first_look = now + limits.poll_seconds if is_heard else now
    watch = Watch(began=now, heard=None, next_look=first_look, pause=limits.poll_seconds)
    if is_heard:
        yield Queued(run_id)
    while True:
        if clock() >= watch.next_look:
            place = await patiently(look, calls)
            watch = after_look(watch, place, clock(), limits)
            chapter = see(story, place)
        else:
            message = await inbox.get(watch.next_look - clock())
            if message is None:
                continue
            watch = after_message(watch, message, clock())
            chapter = _chapter(story, message)
        story = chapter.story
        for event in chapter.news:
            yield event
        if story.over and story.end is not None:
            yield story.end
            return
        check(run_id, watch, clock(), limits)


async def patiently(look: Callable[[], Awaitable[T]], calls: Calls) -> T:
    """A garbled answer is counted, and asked for again: the run must not be lost for it."""
    for attempt in range(1, calls.limits.max_retries + 1):
        try:
            return await look()
        except UnexpectedAnswer:
            await calls.surroundings.back_off(attempt)
    return await look()


def _chapter(story: Story, message: Message) -> Chapter:
    """An end that was told is no news yet: the answer to the next look will be."""
    if is_end(message):
        return Chapter(story)
    return Chapter(story, (message,)) if isinstance(message, Reconnected) else hear(story, message)


def is_end(message: Message) -> bool:
    return isinstance(message, Succeeded | Failed | Cancelled | RunOver)


def after_look(watch: Watch, place: Place, now: float, limits: Limits) -> Watch:
    pause = min(watch.pause * 2, limits.poll_seconds)
    absences = watch.absences + 1 if isinstance(place, Absent) else 0
    # Who waits for others makes no progress, and does not stall either.
    heard = None if isinstance(place, Waiting) else watch.heard
    return replace(watch, next_look=now + pause, pause=pause, absences=absences, heard=heard)


def after_message(watch: Watch, message: Message, now: float) -> Watch:
    heard = replace(watch, heard=now)
    if not is_end(message) and not isinstance(message, Reconnected):
        return heard
    return replace(heard, next_look=now, pause=FIRST_LOOK_SECONDS)


def check(run_id: str, watch: Watch, now: float, limits: Limits) -> None:
    if watch.absences >= ABSENT_LOOKS_MAX:
        raise RunLost(f"the cloud does not know the run {run_id}")
    if now - watch.began > limits.job_seconds:
        raise RunTimedOut(f"the run {run_id} took more than {limits.job_seconds:g} s")
    # Where nothing is told by itself, silence says nothing about the run.
    if watch.heard is not None and now - watch.heard > limits.stall_seconds:
        raise RunStalled(f"the run {run_id} was silent for {limits.stall_seconds:g} s")
