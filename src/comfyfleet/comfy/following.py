"""Following one run on a ComfyUI server: what its socket tells, and looks where it is silent."""

from collections.abc import AsyncIterator, Awaitable, Callable

from comfyfleet.comfy.calls import Calls
from comfyfleet.comfy.channel import Channel
from comfyfleet.comfy.events import End, Event, Queued, Reconnected
from comfyfleet.comfy.inbox import Inbox
from comfyfleet.comfy.messages import Message, RunOver
from comfyfleet.comfy.places import Absent, Ended, Place, Running, Waiting, locate
from comfyfleet.comfy.settings import Limits
from comfyfleet.comfy.story import Chapter, Story, hear, see
from comfyfleet.kernel.errors import RunLost, RunStalled, RunTimedOut, UnexpectedAnswer

WORRY_PART = 0.25
# Between a run's verdict and its last message, when history is written.
LAST_WORD_SECONDS = 0.5
SOON_SECONDS = 0.2
SOON_PART = 0.1


class Patience:
    """How long a run may still take, and how long it has shown nothing."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._began = self._sign = clock()
        self._place: Place | None = None
        self._worries = 0

    def progressed(self) -> None:
        self._sign = self._clock()
        self._worries = 0

    def saw(self, place: Place, *, is_deaf: bool) -> None:
        """Behind another run, waiting is no stall: that one shows its progress to others only.

        Who has no socket hears of no progress at all: that it runs must do.
        """
        behind = isinstance(place, Waiting) and place.running is not None
        runs = is_deaf and isinstance(place, Running)
        if behind or runs or place != self._place:
            self.progressed()
        self._place = place

    def worried(self) -> bool:
        """Now and then while there is no sign: it may be us who don't hear."""
        quiet = (self._clock() - self._sign) / self._limits.stall_seconds
        again = quiet >= WORRY_PART * (self._worries + 1)
        self._worries += again
        return again

    def seconds(self, *, is_deaf: bool) -> float:
        """Until the next look; without a socket the first ones come soon, for short runs."""
        now = self._clock()
        soon = max(SOON_SECONDS, SOON_PART * (now - self._began)) if is_deaf else float("inf")
        job = self._began + self._limits.job_seconds - now
        stall = self._sign + self._limits.stall_seconds - now
        return max(0.0, min(self._limits.poll_seconds, soon, job, stall))

    def check(self, run_id: str) -> None:
        now = self._clock()
        if now - self._began >= self._limits.job_seconds:
            raise RunTimedOut(
                f"run {run_id} has not ended after {self._limits.job_seconds:g} s; it may go on",
                run_id=run_id,
            )
        if now - self._sign >= self._limits.stall_seconds:
            raise RunStalled(
                f"run {run_id} has shown no progress for {self._limits.stall_seconds:g} s: "
                f"{_standing(self._place)}",
                run_id=run_id,
            )


def _standing(place: Place | None) -> str:
    if isinstance(place, Waiting):
        return "it waits, nothing runs, so the server's prompt thread must be dead; restart it"
    return "its node is stuck or the server's prompt thread is dead"


class Follower:
    """Follows one run to its end, whatever becomes of the socket."""

    def __init__(self, calls: Calls, run_id: str, inbox: Inbox, channel: Channel | None) -> None:
        self._calls = calls
        self._run_id = run_id
        self._inbox = inbox
        self._channel = channel
        self._patience = Patience(calls.limits, calls.surroundings.clock)
        self._story = Story(run_id)
        self._heard = False

    async def events(self, *, look_first: bool) -> AsyncIterator[Event]:
        """`look_first`: it has not just been submitted, anything may have happened."""
        if look_first:
            for event in await self._look():
                yield event
        else:
            yield Queued(self._run_id)
        while (end := self._end()) is None:
            for event in await self._next():
                yield event
        yield end

    @property
    def _is_deaf(self) -> bool:
        return self._channel is None or not self._channel.open

    def _end(self) -> End | None:
        return self._story.end if self._story.over else None

    async def _next(self) -> tuple[Event, ...]:
        seconds = self._patience.seconds(is_deaf=self._is_deaf)
        if self._story.end is not None:
            seconds = min(seconds, LAST_WORD_SECONDS)
        message = await self._inbox.get(seconds)
        if message is None:
            return await self._after_silence()
        self._patience.check(self._run_id)
        if isinstance(message, Reconnected):
            return (message, *await self._look())
        return await self._hear(message)

    async def _hear(self, message: Message) -> tuple[Event, ...]:
        self._heard = True
        before = self._story
        news = self._take(hear(before, message))
        if news or self._story != before:
            self._patience.progressed()
        if self._story.over and self._story.end is None:
            # The run is over and how it ended was missed: history knows.
            return (*news, *await self._look())
        return news

    async def _after_silence(self) -> tuple[Event, ...]:
        news = await self._look()
        if self._end() is None:
            self._patience.check(self._run_id)
            if self._channel is not None and self._patience.worried():
                await self._channel.renew()
        return news

    async def _look(self) -> tuple[Event, ...]:
        place = await _patiently(self._calls, lambda: locate(self._calls, self._run_id))
        self._patience.saw(place, is_deaf=self._is_deaf)
        if isinstance(place, Absent):
            return self._vanished()
        if isinstance(place, Ended) and self._channel is not None and not self._heard:
            # It has missed a whole run: no error tells of a connection that was cut on its way.
            self._channel.worn = True
        return self._take(see(self._story, place))

    def _vanished(self) -> tuple[Event, ...]:
        if self._story.end is None:
            raise RunLost(
                f"run {self._run_id} is neither in the server's queue nor in its history: "
                "it was deleted, or the server has restarted",
                run_id=self._run_id,
            )
        return self._take(hear(self._story, RunOver(self._run_id)))

    def _take(self, chapter: Chapter) -> tuple[Event, ...]:
        self._story = chapter.story
        return chapter.news


async def _patiently(calls: Calls, look: Callable[[], Awaitable[Place]]) -> Place:
    """A garbled answer is counted, and asked for again: the run must not be lost for it."""
    for attempt in range(1, calls.limits.max_retries + 1):
        try:
            return await look()
        except UnexpectedAnswer:
            await calls.surroundings.back_off(attempt)
    return await look()
