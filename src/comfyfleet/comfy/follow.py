"""Follows a run on a ComfyUI server or in the cloud by its messages, or by polling if no messages
arrive. The functions that change the run's state are pure.

In the cloud, only a poll ends a run. Messages may be late, lost or repeated. They provide live
progress and determine when to poll.
"""

import json
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
    """The state of a run. `end` is the result according to the messages. It is used only after
    `over` is set, because then the history contains the outputs."""

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
    """The new state after a message or a poll, and the events to emit."""

    state: RunState
    events: tuple[Event, ...] = field(default=())


def apply_message(state: RunState, message: Message) -> Transition:
    """Returns the transition for a message about this run."""
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
            transition = _start(state)
            return _then(transition, replace(transition.state, cached=nodes), message)
        case NodeStates(done=done):
            return _finish_nodes(state, done)
        case NodeDone(node_id=node_id):
            transition = _start(state)
            return _then(
                transition,
                replace(transition.state, done=transition.state.done | {node_id}),
                message,
            )
        case NodeStarted(node_id=node_id):
            transition = _start(state)
            # The server repeats this message for a socket that has reconnected.
            events = () if node_id == state.node_id else (message,)
            return _then(transition, replace(transition.state, node_id=node_id), *events)
        case _:
            transition = _start(state)
            return _then(transition, transition.state, message)


def apply_location(state: RunState, location: RunLocation) -> Transition:
    """Returns the transition for a poll of the queue and history."""
    match location:
        case InQueue(ahead=ahead) if not state.started:
            events = () if ahead == state.ahead else (Queued(state.run_id, ahead),)
            return Transition(replace(state, ahead=ahead), events)
        case Executing():
            return _start(state)
        case InHistory(end=end, cached=cached):
            transition = _start(state)
            missed = () if transition.state.cached is not None else (Cached(state.run_id, cached),)
            ended = replace(transition.state, end=end, over=True, cached=cached)
            return Transition(ended, (*transition.events, *missed))
        case InQueue() | Absent():
            return Transition(state)


def _start(state: RunState) -> Transition:
    if state.started:
        return Transition(state)
    return Transition(replace(state, started=True), (Started(state.run_id),))


def _then(transition: Transition, state: RunState, *events: Event) -> Transition:
    return Transition(state, (*transition.events, *events))


def _finish_nodes(state: RunState, done: tuple[str, ...]) -> Transition:
    """Emits NodeDone for nodes without their own message, because nodes that show nothing don't
    send one."""
    transition = _start(state)
    finished = transition.state.done | set(state.cached or ())
    unreported = [node_id for node_id in done if node_id not in finished]
    state = replace(transition.state, done=transition.state.done | set(unreported))
    return _then(transition, state, *(NodeDone(state.run_id, node_id) for node_id in unreported))


RENEW_PART = 0.25
# Seconds to wait for a run's last message after the message with its result. The server writes the
# history in between.
LAST_MESSAGE_SECONDS = 0.5
FIRST_POLLS_SECONDS = 0.2
FIRST_POLLS_PART = 0.1


class RunDeadlines:
    """Enforces a run's total time limit and its limit for time without progress."""

    def __init__(self, limits: BackendLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._began = self._last_progress = clock()
        self._location: RunLocation | None = None
        self._renewals = 0

    def note_progress(self) -> None:
        self._last_progress = self._clock()
        self._renewals = 0

    def note_location(self, location: RunLocation, *, has_no_socket: bool) -> None:
        """Notes a polled location, and whether it counts as progress.

        Waiting behind another run is not a stall, because that run reports its progress only to
        other clients. Without a socket, no progress is reported at all, so executing counts as
        progress.
        """
        behind = isinstance(location, InQueue) and location.running is not None
        runs = has_no_socket and isinstance(location, Executing)
        if behind or runs or location != self._location:
            self.note_progress()
        self._location = location

    def should_renew_socket(self) -> bool:
        """Returns True from time to time while there is no progress, because the socket may have
        failed without an error."""
        quiet = (self._clock() - self._last_progress) / self._limits.stall_seconds
        is_due = quiet >= RENEW_PART * (self._renewals + 1)
        self._renewals += is_due
        return is_due

    def seconds(self, *, has_no_socket: bool, has_started: bool) -> float:
        """Returns the seconds until the next poll. Without a socket, the first polls follow each
        other quickly, so that the end of a short run is noticed soon."""
        now = self._clock()
        look = (
            self._began + self._limits.first_look_seconds - now
            if self._location is None and not has_started
            else float("inf")
        )
        soon = (
            max(FIRST_POLLS_SECONDS, FIRST_POLLS_PART * (now - self._began))
            if has_no_socket
            else float("inf")
        )
        job = self._began + self._limits.job_seconds - now
        stall = self._last_progress + self._limits.stall_seconds - now
        return max(0.0, min(self._limits.poll_seconds, soon, look, job, stall))

    def check(self, run_id: str) -> None:
        now = self._clock()
        if now - self._began >= self._limits.job_seconds:
            raise RunTimedOut(
                f"run {run_id} has not ended after {self._limits.job_seconds:g} s. "
                "It may still be running.",
                run_id=run_id,
            )
        if now - self._last_progress >= self._limits.stall_seconds:
            raise RunStalled(
                f"run {run_id} has shown no progress for {self._limits.stall_seconds:g} s: "
                f"{_progress_key(self._location)}",
                run_id=run_id,
            )


def _progress_key(location: RunLocation | None) -> str:
    if isinstance(location, InQueue):
        return (
            "the run is queued but no run is executing, so the server's prompt thread must be "
            "dead. Restart the server."
        )
    return "its node is stuck, or the server's prompt thread is dead"


class Follower:
    """Follows a run on a ComfyUI server until it ends, even if the socket is lost."""

    def __init__(
        self, calls: BackendCalls, run_id: str, inbox: Inbox, channel: ServerSocket | None
    ) -> None:
        self._calls = calls
        self._run_id = run_id
        self._inbox = inbox
        self._channel = channel
        self._deadlines = RunDeadlines(calls.limits, calls.retry.clock)
        self._state = RunState(run_id)
        self._has_message = False

    async def events(self, *, poll_first: bool) -> AsyncIterator[Event]:
        """Yields events until the end. Set `poll_first` if the run was not just submitted."""
        if poll_first:
            for event in await self._poll():
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
        seconds = self._deadlines.seconds(
            has_no_socket=self._has_no_socket, has_started=self._state.started
        )
        if self._state.end is not None:
            seconds = min(seconds, LAST_MESSAGE_SECONDS)
        message = await self._inbox.get(seconds)
        if message is None:
            return await self._poll_after_timeout()
        self._deadlines.check(self._run_id)
        if isinstance(message, Reconnected):
            return (message, *await self._poll())
        return await self._receive(message)

    async def _receive(self, message: Message) -> tuple[Event, ...]:
        self._has_message = True
        before = self._state
        events = self._take(apply_message(before, message))
        if events or self._state != before:
            self._deadlines.note_progress()
        if self._state.over and self._state.end is None:
            # The run is over and the message with its result was missed, but the result is in the
            # history.
            return (*events, *await self._poll())
        return events

    async def _poll_after_timeout(self) -> tuple[Event, ...]:
        events = await self._poll()
        if self._end() is None:
            self._deadlines.check(self._run_id)
            if self._channel is not None and self._deadlines.should_renew_socket():
                await self._channel.renew()
        return events

    async def _poll(self) -> tuple[Event, ...]:
        location = await retry_unexpected(
            lambda: locate_run(self._calls, self._run_id), self._calls
        )
        self._deadlines.note_location(location, has_no_socket=self._has_no_socket)
        if not isinstance(location, InHistory | Absent):
            return self._take(apply_location(self._state, location))
        events = self._read_arrived()
        if isinstance(location, Absent):
            return (*events, *self._handle_absent())
        if self._channel is not None and not self._has_message:
            # The socket received no messages during the whole run, so its connection must have been
            # lost.
            self._channel.degraded = True
        self._tap_missed_end(location)
        return (*events, *self._take(apply_location(self._state, location)))

    def _read_arrived(self) -> tuple[Event, ...]:
        """Reads the messages that have already arrived. The run ended before the poll, so nothing
        reads them later."""
        events: list[Event] = []
        while (message := self._inbox.pop()) is not None:
            self._has_message = self._has_message or not isinstance(message, Reconnected)
            events += self._take(apply_message(self._state, message))
        return tuple(events)

    def _tap_missed_end(self, location: InHistory) -> None:
        """Passes the server's own message about a failure or an interruption from the history to
        the tap if the socket didn't deliver it. Messages about a success are left out, because the
        messages with its results may be missing as well."""
        is_missed = self._state.end is None and not isinstance(location.end, Succeeded)
        if is_missed and location.end_message is not None and self._inbox.tap is not None:
            kind, data = location.end_message
            self._inbox.tap(json.dumps({"type": kind, "data": data}))

    def _handle_absent(self) -> tuple[Event, ...]:
        if self._state.end is None:
            raise RunLost(
                f"run {self._run_id} is neither in the server's queue nor in its history. "
                "It was deleted, or the server was restarted.",
                run_id=self._run_id,
            )
        return self._take(apply_message(self._state, RunOver(self._run_id)))

    def _take(self, transition: Transition) -> tuple[Event, ...]:
        self._state = transition.state
        return transition.events


T = TypeVar("T")
LocateRun: TypeAlias = Callable[[], Awaitable[RunLocation]]

# A run counts as lost if this many polls in a row don't find it. Right after a submit, some of the
# cloud's servers may not find it yet.
ABSENT_POLLS_MAX = 3
# The pause between polls is set to this many seconds after an end message, which arrives a moment
# before polls show the end. Each poll doubles the pause before the next poll.
FIRST_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class PollState:
    """The time of the last message and of the next poll, in seconds of the same clock."""

    began: float
    last_message: float | None
    next_poll: float
    pause: float
    absent_polls: int = 0


async def follow_cloud_run(
    run_id: str,
    inbox: Inbox,
    poll: LocateRun,
    calls: BackendCalls,
    *,
    has_live_messages: bool = False,
) -> AsyncGenerator[Event]:
    """Yields the events of a cloud run.

    `has_live_messages` means that all messages of the run are in the inbox, so it need not be
    polled immediately.
    """
    limits, clock = calls.limits, calls.retry.clock
    state, now = RunState(run_id), clock()
    first_poll = now + limits.poll_seconds if has_live_messages else now
    watch = PollState(began=now, last_message=None, next_poll=first_poll, pause=limits.poll_seconds)
    if has_live_messages:
        yield Queued(run_id)
    while True:
        if clock() >= watch.next_poll:
            location = await retry_unexpected(poll, calls)
            watch = after_poll(watch, location, clock(), limits)
            transition = apply_location(state, location)
        else:
            message = await inbox.get(watch.next_poll - clock())
            if message is None:
                continue
            watch = after_message(watch, message, clock())
            transition = _transition(state, message)
        state = transition.state
        for event in transition.events:
            yield event
        if state.over and state.end is not None:
            yield state.end
            return
        check_deadlines(run_id, watch, clock(), limits)


async def retry_unexpected(poll: Callable[[], Awaitable[T]], calls: BackendCalls) -> T:
    """Runs a poll, and retries it after a malformed response, so that a garbled response doesn't
    lose the run."""
    for attempt in range(1, calls.limits.max_retries + 1):
        try:
            return await poll()
        except UnexpectedAnswer:
            await calls.retry.back_off(attempt)
    return await poll()


def _transition(state: RunState, message: Message) -> Transition:
    """Returns the transition for a message. End messages change nothing, because only the next poll
    ends the run."""
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
    # A run that waits for others makes no progress, but isn't stalled.
    last_message = None if isinstance(location, InQueue) else watch.last_message
    return replace(
        watch,
        next_poll=now + pause,
        pause=pause,
        absent_polls=absent_polls,
        last_message=last_message,
    )


def after_message(watch: PollState, message: Message, now: float) -> PollState:
    received = replace(watch, last_message=now)
    if not is_end_message(message) and not isinstance(message, Reconnected):
        return received
    return replace(received, next_poll=now, pause=FIRST_POLL_SECONDS)


def check_deadlines(run_id: str, watch: PollState, now: float, limits: BackendLimits) -> None:
    if watch.absent_polls >= ABSENT_POLLS_MAX:
        raise RunLost(f"run {run_id} doesn't exist in the cloud")
    if now - watch.began > limits.job_seconds:
        raise RunTimedOut(f"run {run_id} took longer than {limits.job_seconds:g} s")
    # If no message has been received yet, there is probably no socket, so the run doesn't count as
    # stalled.
    if watch.last_message is not None and now - watch.last_message > limits.stall_seconds:
        raise RunStalled(f"run {run_id} sent no messages for {limits.stall_seconds:g} s")


PAUSE_FIRST_SECONDS = 0.02
PAUSE_SECONDS_MAX = 1.0


async def confirm_cancelled(calls: BackendCalls, run_id: str, poll: LocateRun) -> Cancellation:
    clock, pause = calls.retry.clock, PAUSE_FIRST_SECONDS
    deadline = clock() + calls.limits.cancel_seconds
    while clock() < deadline:
        if (confirmed := cancellation_from(await poll())) is not None:
            return confirmed
        await calls.retry.sleep(pause)
        pause = min(pause * 2, PAUSE_SECONDS_MAX)
    raise CancelUnconfirmed(
        f"run {run_id} was still running {calls.limits.cancel_seconds:g} s after a stop request",
        run_id=run_id,
    )


def cancellation_from(location: RunLocation) -> Cancellation | None:
    """Returns the result of a cancel, based on the location of a run that existed before. If it no
    longer exists, it was deleted from the queue."""
    match location:
        case InHistory(end=Cancelled()) | Absent():
            return Cancellation.CANCELLED
        case InHistory():
            return Cancellation.ENDED_BEFORE
    return None
