"""Follows one run, on a ComfyUI server or in the cloud: by what is told, and by asking where it is silent. The state
of a run and its transitions are pure.

In the cloud only an answer ends a run. What is told by itself may be late, lost or told twice: it makes the run
livelier and says when to ask."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

from comfyfleet.comfy.backend import BackendLimits, Cancellation
from comfyfleet.comfy.calls import BackendCalls
from comfyfleet.comfy.events import (
    Cached,
    Cancelled,
    End,
    Event,
    Failed,
    NodeDone,
    NodeStarted,
    Queued,
    Reconnected,
    Started,
    Succeeded,
)
from comfyfleet.comfy.messages import (
    Inbox,
    Message,
    NodeStates,
    QueueStatus,
    RunOver,
    UnknownMessage,
)
from comfyfleet.comfy.run_location import (
    Absent,
    Executing,
    InHistory,
    InQueue,
    RunLocation,
    locate_run,
)
from comfyfleet.comfy.sockets import ServerSocket
from comfyfleet.errors import CancelUnconfirmed, RunLost, RunStalled, RunTimedOut, UnexpectedAnswer


@dataclass(frozen=True, slots=True)
class RunState:
    """`end` is what was heard; it counts once `over`: then history has the outputs, too."""

    run_id: str
    started: bool = False
    cached: tuple[str, ...] | None = None
    done: frozenset[str] = frozenset()
    end: End | None = None
    over: bool = False
    ahead: int | None = None
    node_id: str | None = None


@dataclass(frozen=True, slots=True)
class Transition:
    """A story after something was heard or seen, and the events to tell."""

    state: RunState
    news: tuple[Event, ...] = field(default=())


def apply_message(state: RunState, message: Message) -> Transition:
    """After a message of this run."""
    match message:
        case QueueStatus() | UnknownMessage() | Queued():
            return Transition(state)
        case RunOver():
            return Transition(replace(state, over=True))
        case Succeeded():
            return Transition(replace(state, end=Succeeded(state.run_id, state.cached or ())))
        case Failed() | Cancelled():
            return Transition(replace(state, end=message))
        case Started():
            return _start(state)
        case Cached(nodes=nodes):
            begun = _start(state)
            return _then(begun, replace(begun.state, cached=nodes), message)
        case NodeStates(done=done):
            return _finish_nodes(state, done)
        case NodeDone(node_id=node_id):
            begun = _start(state)
            return _then(begun, replace(begun.state, done=begun.state.done | {node_id}), message)
        case NodeStarted(node_id=node_id):
            begun = _start(state)
            # Said again to a socket that has come back.
            news = () if node_id == state.node_id else (message,)
            return _then(begun, replace(begun.state, node_id=node_id), *news)
        case _:
            begun = _start(state)
            return _then(begun, begun.state, message)


def apply_location(state: RunState, location: RunLocation) -> Transition:
    """After a look at queue and history."""
    match location:
        case InQueue(ahead=ahead) if not state.started:
            news = () if ahead == state.ahead else (Queued(state.run_id, ahead),)
            return Transition(replace(state, ahead=ahead), news)
        case Executing():
            return _start(state)
        case InHistory(end=end, cached=cached):
            begun = _start(state)
            missed = () if begun.state.cached is not None else (Cached(state.run_id, cached),)
            told = replace(begun.state, end=end, over=True, cached=cached)
            return Transition(told, (*begun.news, *missed))
        case InQueue() | Absent():
            return Transition(state)


def _start(state: RunState) -> Transition:
    if state.started:
        return Transition(state)
    return Transition(replace(state, started=True), (Started(state.run_id),))


def _then(transition: Transition, state: RunState, *news: Event) -> Transition:
    return Transition(state, (*transition.news, *news))


def _finish_nodes(state: RunState, done: tuple[str, ...]) -> Transition:
    """A node that shows nothing has no message of its own when it is done."""
    begun = _start(state)
    known = begun.state.done | set(state.cached or ())
    fresh = [node_id for node_id in done if node_id not in known]
    told = replace(begun.state, done=begun.state.done | set(fresh))
    return _then(begun, told, *(NodeDone(state.run_id, node_id) for node_id in fresh))


SILENCE_PART = 0.25
# Between a run's verdict and its last message, when history is written.
LAST_MESSAGE_SECONDS = 0.5
SOON_SECONDS = 0.2
SOON_PART = 0.1


class RunDeadlines:
    """How long a run may still take, and how long it has shown nothing."""

    def __init__(self, limits: BackendLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._began = self._sign = clock()
        self._location: RunLocation | None = None
        self._worries = 0

    def progressed(self) -> None:
        self._sign = self._clock()
        self._worries = 0

    def saw(self, location: RunLocation, *, has_no_socket: bool) -> None:
        """Behind another run, waiting is no stall: that one shows its progress to others only.

        Who has no socket hears of no progress at all: that it runs must do.
        """
        behind = isinstance(location, InQueue) and location.running is not None
        runs = has_no_socket and isinstance(location, Executing)
        if behind or runs or location != self._location:
            self.progressed()
        self._location = location

    def worried(self) -> bool:
        """Now and then while there is no sign: it may be us who don't hear."""
        quiet = (self._clock() - self._sign) / self._limits.stall_seconds
        again = quiet >= SILENCE_PART * (self._worries + 1)
        self._worries += again
        return again

    def seconds(self, *, has_no_socket: bool) -> float:
        """Until the next look; without a socket the first ones come soon, for short runs."""
        now = self._clock()
        soon = max(SOON_SECONDS, SOON_PART * (now - self._began)) if has_no_socket else float("inf")
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
                f"{_progress_key(self._location)}",
                run_id=run_id,
            )


def _progress_key(location: RunLocation | None) -> str:
    if isinstance(location, InQueue):
        return "it waits, nothing runs, so the server's prompt thread must be dead; restart it"
    return "its node is stuck or the server's prompt thread is dead"


class Follower:
    """Follows one run to its end, whatever becomes of the socket."""

    def __init__(
        self, calls: BackendCalls, run_id: str, inbox: Inbox, channel: ServerSocket | None
    ) -> None:
        self._calls = calls
        self._run_id = run_id
        self._inbox = inbox
        self._channel = channel
        self._deadlines = RunDeadlines(calls.limits, calls.retry.clock)
        self._state = RunState(run_id)
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
    def _has_no_socket(self) -> bool:
        return self._channel is None or not self._channel.open

    def _end(self) -> End | None:
        return self._state.end if self._state.over else None

    async def _next(self) -> tuple[Event, ...]:
        seconds = self._deadlines.seconds(has_no_socket=self._has_no_socket)
        if self._state.end is not None:
            seconds = min(seconds, LAST_MESSAGE_SECONDS)
        message = await self._inbox.get(seconds)
        if message is None:
            return await self._after_silence()
        self._deadlines.check(self._run_id)
        if isinstance(message, Reconnected):
            return (message, *await self._look())
        return await self._receive(message)

    async def _receive(self, message: Message) -> tuple[Event, ...]:
        self._heard = True
        before = self._state
        news = self._take(apply_message(before, message))
        if news or self._state != before:
            self._deadlines.progressed()
        if self._state.over and self._state.end is None:
            # The run is over and how it ended was missed: history knows.
            return (*news, *await self._look())
        return news

    async def _after_silence(self) -> tuple[Event, ...]:
        news = await self._look()
        if self._end() is None:
            self._deadlines.check(self._run_id)
            if self._channel is not None and self._deadlines.worried():
                await self._channel.renew()
        return news

    async def _look(self) -> tuple[Event, ...]:
        location = await retry_unexpected(
            lambda: locate_run(self._calls, self._run_id), self._calls
        )
        self._deadlines.saw(location, has_no_socket=self._has_no_socket)
        if isinstance(location, Absent):
            return self._handle_absent()
        if isinstance(location, InHistory) and self._channel is not None and not self._heard:
            # It has missed a whole run: no error tells of a connection that was cut on its way.
            self._channel.degraded = True
        return self._take(apply_location(self._state, location))

    def _handle_absent(self) -> tuple[Event, ...]:
        if self._state.end is None:
            raise RunLost(
                f"run {self._run_id} is neither in the server's queue nor in its history: "
                "it was deleted, or the server has restarted",
                run_id=self._run_id,
            )
        return self._take(apply_message(self._state, RunOver(self._run_id)))

    def _take(self, transition: Transition) -> tuple[Event, ...]:
        self._state = transition.state
        return transition.news


T = TypeVar("T")
LocateRun: TypeAlias = Callable[[], Awaitable[RunLocation]]

# A job that was just accepted may not be known everywhere at once.
ABSENT_LOOKS_MAX = 3
# The end is told a moment before it can be read.
FIRST_LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class PollState:
    """When something was last heard and when to look again. All in seconds of one clock."""

    began: float
    heard: float | None
    next_look: float
    pause: float
    absent_polls: int = 0


async def follow_cloud_run(
    run_id: str,
    inbox: Inbox,
    look: LocateRun,
    calls: BackendCalls,
    *,
    is_heard: bool = False,
) -> AsyncGenerator[Event]:
    """`is_heard`: all that the run tells is in the inbox, so a look at once would only spoil it."""
    limits, clock = calls.limits, calls.retry.clock
    state, now = RunState(run_id), clock()
    first_look = now + limits.poll_seconds if is_heard else now
    watch = PollState(began=now, heard=None, next_look=first_look, pause=limits.poll_seconds)
    if is_heard:
        yield Queued(run_id)
    while True:
        if clock() >= watch.next_look:
            location = await retry_unexpected(look, calls)
            watch = after_poll(watch, location, clock(), limits)
            transition = apply_location(state, location)
        else:
            message = await inbox.get(watch.next_look - clock())
            if message is None:
                continue
            watch = after_message(watch, message, clock())
            transition = _transition(state, message)
        state = transition.state
        for event in transition.news:
            yield event
        if state.over and state.end is not None:
            yield state.end
            return
        check_deadlines(run_id, watch, clock(), limits)


async def retry_unexpected(look: Callable[[], Awaitable[T]], calls: BackendCalls) -> T:
    """A garbled answer is counted, and asked for again: the run must not be lost for it."""
    for attempt in range(1, calls.limits.max_retries + 1):
        try:
            return await look()
        except UnexpectedAnswer:
            await calls.retry.back_off(attempt)
    return await look()


def _transition(state: RunState, message: Message) -> Transition:
    """An end that was told is no news yet: the answer to the next look will be."""
    if is_end_message(message):
        return Transition(state)
    return (
        Transition(state, (message,))
        if isinstance(message, Reconnected)
        else apply_message(state, message)
    )


def is_end_message(message: Message) -> bool:
    return isinstance(message, Succeeded | Failed | Cancelled | RunOver)


def after_poll(
    watch: PollState, location: RunLocation, now: float, limits: BackendLimits
) -> PollState:
    pause = min(watch.pause * 2, limits.poll_seconds)
    absent_polls = watch.absent_polls + 1 if isinstance(location, Absent) else 0
    # Who waits for others makes no progress, and does not stall either.
    heard = None if isinstance(location, InQueue) else watch.heard
    return replace(
        watch, next_look=now + pause, pause=pause, absent_polls=absent_polls, heard=heard
    )


def after_message(watch: PollState, message: Message, now: float) -> PollState:
    heard = replace(watch, heard=now)
    if not is_end_message(message) and not isinstance(message, Reconnected):
        return heard
    return replace(heard, next_look=now, pause=FIRST_LOOK_SECONDS)


def check_deadlines(run_id: str, watch: PollState, now: float, limits: BackendLimits) -> None:
    if watch.absent_polls >= ABSENT_LOOKS_MAX:
        raise RunLost(f"the cloud does not know the run {run_id}")
    if now - watch.began > limits.job_seconds:
        raise RunTimedOut(f"the run {run_id} took more than {limits.job_seconds:g} s")
    # Where nothing is told by itself, silence says nothing about the run.
    if watch.heard is not None and now - watch.heard > limits.stall_seconds:
        raise RunStalled(f"the run {run_id} was silent for {limits.stall_seconds:g} s")


PAUSE_FIRST_SECONDS = 0.02
PAUSE_SECONDS_MAX = 1.0


async def confirm_cancelled(calls: BackendCalls, run_id: str, look: LocateRun) -> Cancellation:
    clock, pause = calls.retry.clock, PAUSE_FIRST_SECONDS
    deadline = clock() + calls.limits.cancel_seconds
    while clock() < deadline:
        if (certain := cancellation_from(await look())) is not None:
            return certain
        await calls.retry.sleep(pause)
        pause = min(pause * 2, PAUSE_SECONDS_MAX)
    raise CancelUnconfirmed(
        f"run {run_id} was told to stop and had not ended after {calls.limits.cancel_seconds:g} s",
        run_id=run_id,
    )


def cancellation_from(location: RunLocation) -> Cancellation | None:
    """Of a run that was there: one that is gone without an end was taken out of the queue."""
    match location:
        case InHistory(end=Cancelled()) | Absent():
            return Cancellation.CANCELLED
        case InHistory():
            return Cancellation.ENDED_BEFORE
    return None
