"""Heartbeats extend a lease, report its start and progress, and return the control plane's
orders."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from comfyfleet.api.values import Asset, OutputSlot, WantedOutput
from comfyfleet.api.worker import (
    FILLED_IN_MAX,
    FilledIn,
    Heartbeat,
    HeartbeatAnswer,
    Job,
    Progress,
    Reading,
    RunPreview,
)
from comfyfleet.comfy.events import Preview
from comfyfleet.errors import (
    FleetError,
    InvalidInput,
    LeaseLost,
    Refused,
    Unauthenticated,
    Unavailable,
    WorkerRevoked,
)
from comfyfleet.transport.retry import RetryPolicy
from comfyfleet.worker.control_client import ControlClient
from comfyfleet.worker.platform import RenewAsset
from comfyfleet.worker.run_progress import reported_preview
from comfyfleet.worker.run_record import LastReport, RunRecord

logger = logging.getLogger(__name__)

PROGRESS_SECONDS_MIN = 0.5
# Seconds before a start is reported. A run that ends sooner reports its start together with its end
# and needs no heartbeat.
START_SECONDS = 0.1
# Minimum seconds between heartbeats of a recorded run, which a user may be watching in an editor.
RECORD_SECONDS_MIN = 0.15
RETRY_SECONDS = 5.0
# Maximum heartbeat interval as a share of the lease, so that two lost heartbeats in a row don't end
# the lease.
LEASE_PART_MAX = 0.3
# Seconds after which the worker starts to listen for orders about a lease that hasn't started. Such
# a lease waits behind another lease and may be recalled at any moment.
LISTEN_AFTER_SECONDS = 0.5
# Seconds after the start of a recorded run until the worker listens for interruptions by clients.
RECORD_LISTEN_AFTER_SECONDS = 0.2
LISTEN_SECONDS_MAX = 30.0


def heartbeat_interval(heartbeat_seconds: float, lease_seconds: float) -> float:
    return min(heartbeat_seconds, LEASE_PART_MAX * lease_seconds)


class HeartbeatLoop:
    """Sends a lease's heartbeats. `on_answer` receives each response, and `on_lost` receives the
    error if the lease is lost.

    Missing responses don't stop the loop, because the worker may still hold the lease.
    """

    def __init__(
        self,
        control: ControlClient,
        job: Job,
        *,
        seconds: float,
        reading: Callable[[], Awaitable[Reading | None]],
        on_answer: Callable[[HeartbeatAnswer], None],
        on_lost: Callable[[FleetError], None],
        retry: RetryPolicy | None = None,
    ) -> None:
        self._control = control
        self._job = job
        self._seconds = heartbeat_interval(seconds, job.lease_seconds)
        self._reading = reading
        self._on_answer = on_answer
        self._on_lost = on_lost
        self._retry = retry or RetryPolicy()
        self._started = False
        self._filled_in: FilledIn | None = None
        self._progress: Progress | None = None
        self._record: RunRecord | None = None
        self._picture: Preview | None = None
        self._is_watched = False
        self._changed = asyncio.Event()
        self._urgent = asyncio.Event()
        self.run_started = asyncio.Event()
        self._start_told_at = time.monotonic()
        self._last = time.monotonic()
        self._sending = asyncio.Lock()

    def start(self) -> None:
        """Reports the start of the prompt after a short delay. Many runs are finished by then and
        need no heartbeat.

        A recall that arrives during the delay is ignored, because the worker knows that the prompt
        is running.
        """
        if self._started:
            return
        self._started = True
        self.run_started.set()
        self._changed.set()
        self._start_told_at = time.monotonic() + START_SECONDS
        asyncio.get_running_loop().call_later(START_SECONDS, self._urgent.set)

    def set_filled_in(self, filled_in: FilledIn) -> None:
        """Reports the values that were filled into the prompt. They are sent with the next
        heartbeat."""
        self._filled_in = filled_in if len(filled_in) <= FILLED_IN_MAX else {}
        self._changed.set()

    @property
    def unreported(self) -> FilledIn | None:
        """The filled-in values that no heartbeat has reported yet."""
        return self._filled_in

    def set_progress(self, progress: Progress) -> None:
        if progress != self._progress:
            self._progress = progress
            self._changed.set()

    def show_record(self, record: RunRecord) -> None:
        """Sends the record's messages with the next heartbeats."""
        self._record = record
        if record.has_live:
            self._changed.set()

    async def take_last(self, record: RunRecord) -> LastReport:
        """Returns the messages that remain for the final report. Waits for a heartbeat in progress,
        because its messages come first."""
        async with self._sending:
            return record.pop_last()

    def set_preview(self, picture: Preview) -> None:
        """Sends a preview with the next heartbeat if a user is watching. A newer preview replaces
        one that hasn't been sent."""
        self._picture = picture
        if self._is_watched:
            self._changed.set()

    async def beat(self) -> None:
        """Sends heartbeats until the lease is lost or the task is cancelled."""
        while True:
            await self._until_due()
            try:
                await self._send()
            except (LeaseLost, WorkerRevoked):
                return
            except FleetError as error:
                level = logging.DEBUG if isinstance(error, Unavailable) else logging.WARNING
                logger.log(level, "a heartbeat failed", extra=self._ids(error))
                await asyncio.sleep(min(RETRY_SECONDS, self._seconds) * self._jitter())
                self._changed.set()

    async def listen(self) -> None:
        """Keeps one heartbeat waiting at the control plane until the run starts, so that orders
        such as a recall arrive immediately. If a client may interrupt the run, this continues until
        the task is cancelled."""
        seconds = min(self._seconds, LISTEN_SECONDS_MAX)
        ended = asyncio.Event() if self._job.records_run else self.run_started
        has_begun = await _set_within(self.run_started, time.monotonic() + LISTEN_AFTER_SECONDS)
        if has_begun and self._job.records_run:
            await asyncio.sleep(RECORD_LISTEN_AFTER_SECONDS)
        while not ended.is_set():
            attempted_at = time.monotonic()
            listening = asyncio.create_task(self._listen_once(seconds))
            begun = asyncio.create_task(ended.wait())
            try:
                await asyncio.wait({listening, begun}, return_when=asyncio.FIRST_COMPLETED)
                if listening.done() and not listening.result():
                    return
            finally:
                listening.cancel()
                begun.cancel()
            # A control plane that doesn't support waiting responds immediately, so wait before the
            # next heartbeat.
            await _set_within(ended, attempted_at + seconds / 2)

    async def _listen_once(self, seconds: float) -> bool:
        """Sends one waiting heartbeat. Returns whether to send another."""
        message = Heartbeat(
            dispatch_id=self._job.dispatch_id,
            lease_token=self._job.lease_token,
            wait_seconds=seconds,
        )
        try:
            answer = await self._control.heartbeat(message)
            self._on_answer(answer)
            if answer.interrupt:
                return False
        except (LeaseLost, WorkerRevoked) as error:
            self._on_lost(error)
            return False
        except FleetError as error:
            logger.info(
                "a waiting heartbeat failed; orders will arrive with the next regular one",
                extra=self._ids(error),
            )
        return True

    async def send_now(self) -> None:
        """Sends one heartbeat. Raises LeaseLost, Unavailable, Unauthenticated."""
        await self._send()

    async def renew_outputs(self, outputs: Sequence[WantedOutput]) -> dict[str, OutputSlot]:
        answer = await self._ask_until_answered(want_outputs=tuple(outputs))
        slots = {slot.name: slot for slot in answer.outputs}
        if missing := [output.name for output in outputs if output.name not in slots]:
            raise Unavailable(f"the control plane sent no upload URL for {', '.join(missing)}")
        return slots

    async def renew_asset(self, asset: Asset) -> Asset:
        answer = await self._ask_until_answered(want_assets=(asset.name,))
        for fresh in answer.assets:
            if fresh.name == asset.name:
                return fresh
        raise InvalidInput(f"the input {asset.name!r} is no longer available")

    @property
    def renew(self) -> RenewAsset:
        return self.renew_asset

    async def _ask_until_answered(
        self,
        want_outputs: tuple[WantedOutput, ...] = (),
        want_assets: tuple[str, ...] = (),
    ) -> HeartbeatAnswer:
        """Requests URLs until the control plane responds, because the job can't continue without
        them."""
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self._send(want_outputs, want_assets)
            except (Unavailable, Unauthenticated) as error:
                logger.warning("could not get new URLs; retrying", extra=self._ids(error))
                await self._retry.back_off(min(attempt, 6))
            except Refused as error:
                raise InvalidInput(error.message) from error

    async def _send(
        self,
        want_outputs: tuple[WantedOutput, ...] = (),
        want_assets: tuple[str, ...] = (),
    ) -> HeartbeatAnswer:
        async with self._sending:
            reading = await self._reading()
            self._changed.clear()
            self._urgent.clear()
            report = self._record.next_report() if self._record and self._started else None
            message = Heartbeat(
                dispatch_id=self._job.dispatch_id,
                lease_token=self._job.lease_token,
                started=self._started,
                progress=self._progress,
                want_outputs=want_outputs,
                want_assets=want_assets,
                reading=reading,
                filled_in=self._filled_in,
                events=report.events if report else (),
                outputs=report.outputs if report else (),
                report=report.number if report and self._job.numbers_reports else None,
                preview=self._pop_preview(),
            )
            self._last = time.monotonic()
            if self._record and report and report.outputs:
                self._record.told_outputs = True
            try:
                answer = await self._control.heartbeat(message)
            except (LeaseLost, WorkerRevoked) as error:
                self._on_lost(error)
                raise
            except BaseException as error:
                if self._record:
                    self._record.note_silence(is_refused=isinstance(error, Refused))
                raise
            self._note_watched(is_watched=answer.previews)
            if message.filled_in is not None:
                self._filled_in = None
            if report and self._record:
                self._record.note_answer()
                if self._record.has_live:
                    self._changed.set()  # some messages did not fit into the report
        self._on_answer(answer)
        return answer

    def _note_watched(self, *, is_watched: bool) -> None:
        """Notes whether a user is watching. A user who starts watching gets the newest preview
        immediately."""
        if is_watched and not self._is_watched and self._picture is not None:
            self._changed.set()
        self._is_watched = is_watched

    def _pop_preview(self) -> RunPreview | None:
        if not self._is_watched:
            return None
        picture, self._picture = self._picture, None
        return reported_preview(picture)

    async def _until_due(self) -> None:
        if await _set_within(self._changed, self._last + self._seconds):
            await _set_within(self._urgent, self._last + self._pause())

    def _pause(self) -> float:
        """Returns the minimum number of seconds between two heartbeats. A recorded run that hasn't
        started has nothing to report, and a start is reported only after a delay."""
        if self._started and time.monotonic() < self._start_told_at:
            return self._seconds
        if not self._job.records_run:
            return PROGRESS_SECONDS_MIN
        return RECORD_SECONDS_MIN if self._started else self._seconds

    def _jitter(self) -> float:
        return 0.5 + self._retry.chance() / 2

    def _ids(self, error: FleetError) -> dict[str, object]:
        return {
            "dispatch_id": self._job.dispatch_id,
            "job_id": str(self._job.job_id),
            "reason": error.message,
        }


async def _set_within(event: asyncio.Event, deadline: float) -> bool:
    """Waits for the event until a deadline of the monotonic clock. Returns whether it was set."""
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            await event.wait()
    except TimeoutError:
        return event.is_set()
    return True
