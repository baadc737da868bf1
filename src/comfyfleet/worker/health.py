"""Tracks whether a worker's backend can take jobs, and repairs it."""

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from comfyfleet.comfy import Backend
from comfyfleet.errors import FleetError, UnexpectedAnswer
from comfyfleet.worker.failures import BackendCondition, BackendFault
from comfyfleet.worker.managed_process import ManagedProcess

logger = logging.getLogger(__name__)

PROBE_SECONDS = 0.5
IDLE_PROBE_SECONDS = 2.0
# While prompts run, the backend counts as down after this many refused connections in a row. Slow
# responses don't count, because ComfyUI may be busy.
REFUSALS_MAX = 4
CONNECT_SECONDS = 1.0
CLOSED_SECONDS = 60.0
FAILED_PROBES_MAX = 2
# Seconds after which a process that doesn't respond is restarted. Until then, it may still be
# loading its node packs.
STARTING_SECONDS_MAX = 300.0
# A full disk counts as usable again when this many bytes are free. For a small disk, this share of
# its size is enough.
FREE_BYTES_MIN = 256 * 1024 * 1024
FREE_SHARE_MIN = 0.1
# The first and the longest pause in seconds after the disk was full. The pause gets longer if the
# disk fills up again within FULL_AGAIN_SECONDS after the previous one.
FULL_SECONDS_FIRST = 2.0
FULL_SECONDS_MAX = 300.0
FULL_AGAIN_SECONDS = 600.0
CURED_BY_RESTART = frozenset(
    {
        BackendCondition.DOWN,
        BackendCondition.HUNG,
        BackendCondition.POISONED,
        BackendCondition.GROWN,
    }
)
CONDITION_TEXTS = {
    BackendCondition.DOWN: "the backend isn't responding",
    BackendCondition.HUNG: "the backend is stuck",
    BackendCondition.POISONED: "the backend's GPU is in an error state that only a restart clears",
    BackendCondition.CLOSED: "the backend denies access",
    BackendCondition.DISK_FULL: "the disk is full",
    BackendCondition.GROWN: "the backend didn't free its memory",
}


class BackendHealth:
    """Watches and repairs one backend.

    `probe` is the same backend without retries. `on_change` is called when the backend fails or has
    recovered. `place` is the backend's address for messages. `address` is its host and port, or
    None for a cloud backend.
    """

    def __init__(
        self,
        probe: Backend,
        *,
        place: str,
        folder: Path,
        owned: ManagedProcess | None,
        on_change: Callable[[], None],
        on_recovery: Callable[[], Awaitable[None]],
        probe_seconds: float = PROBE_SECONDS,
        address: tuple[str, int] | None = None,
    ) -> None:
        self.condition: BackendCondition | None = None
        self._probe = probe
        self._place = place
        self._last_error = ""
        self._is_not_comfyui = False  # whether another program responds at the address
        self._is_foreign_logged = False
        self._folder = folder
        self._owned = owned
        self._on_change = on_change
        self._on_recovery = on_recovery
        self._probe_seconds = probe_seconds
        self._failed = asyncio.Event()
        self._address = address
        self._full_until = float("-inf")
        self._full_seconds = FULL_SECONDS_FIRST

    def note(self, fault: BackendFault, detail: str) -> None:
        if fault.condition is None or self.condition is not None:
            return
        self.condition = fault.condition
        text, place = CONDITION_TEXTS[fault.condition], self._place
        remedy = "restarting it" if self._restarts() else "taking no jobs until it works again"
        if fault.condition is BackendCondition.DISK_FULL:
            self._note_full()
            place, remedy = str(self._folder), "taking no jobs until there is space again"
        extra = {"condition": fault.condition.value, "detail": detail}
        logger.error("%s (%s): %s", text, place, remedy, extra=extra)
        self._failed.set()
        self._on_change()

    async def watch(self, is_idle: Callable[[], bool]) -> None:
        """Watches the backend until cancelled.

        While prompts run, the code that follows them detects most failures. This loop only checks
        whether connections are refused, which that code would report much later.
        """
        failed_probes = 0
        while True:
            pause = self._probe_seconds if failed_probes else IDLE_PROBE_SECONDS
            if await self._fails_within(pause):
                await self._repair()
                failed_probes = 0
                continue
            idle = is_idle()
            is_well = await self._answers() if idle else not await self._is_refused()
            failed_probes = 0 if is_well else failed_probes + 1
            if failed_probes >= (FAILED_PROBES_MAX if idle else REFUSALS_MAX):
                self.note(BackendFault("backend_down", BackendCondition.DOWN), self._last_error)

    async def _is_refused(self) -> bool:
        """Checks whether the backend's address refuses connections."""
        if self._address is None:
            return False
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(*self._address)
        except ConnectionRefusedError as error:
            self._last_error = str(error)
            return True
        except (OSError, TimeoutError):
            return False
        writer.close()
        return False

    async def wait_until_ready(self) -> None:
        """Waits until the backend responds. ComfyUI may take minutes to load its node packs."""
        since: float | None = None
        if self._owned is not None and self._owned.take_up():
            logger.info(
                "ComfyUI is still running from an earlier start of this worker",
                extra={"pid": self._owned.pid},
            )
            # The process's start time is unknown, so the time limit starts now.
            since = time.monotonic()
        logged: bool | None = None
        while not await self._answers():
            await self._keep_process(since=since)
            if logged is not self._is_not_comfyui:
                self._log_wait()
                logged = self._is_not_comfyui
            await asyncio.sleep(self._probe_seconds)
        if self._owned is not None and not self._owned.is_running:
            self._log_foreign_backend()
        if logged is not None:
            logger.warning("the backend at %s is ready", self._place)

    def _log_wait(self) -> None:
        if not self._is_not_comfyui:
            logger.warning("waiting for the backend at %s: %s", self._place, self._last_error)
            return
        logger.error(
            "the program at %s isn't ComfyUI. Stop it, or choose another port with --backend",
            self._place,
            extra={"detail": self._last_error},
        )

    async def _fails_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._failed.wait()
        except TimeoutError:
            return False
        return True

    async def _repair(self) -> None:
        began, condition = time.monotonic(), self.condition
        if (
            condition in (BackendCondition.HUNG, BackendCondition.POISONED, BackendCondition.GROWN)
            and await self._restart()
        ):
            condition = BackendCondition.DOWN
        was_down = condition is BackendCondition.DOWN
        pause = self._probe_seconds
        if condition is BackendCondition.CLOSED:
            # Probes succeed even if the account has no credits, so wait before taking jobs again.
            pause = CLOSED_SECONDS
            await asyncio.sleep(pause)
        while True:
            await self._keep_process(since=began)
            answers = await self._answers()
            was_down = was_down or not answers
            if answers and await self._has_recovered(condition, was_down=was_down):
                break
            await asyncio.sleep(pause)
        await self._on_recovery()
        self.condition = None
        self._failed.clear()
        seconds = {"seconds": round(time.monotonic() - began, 1)}
        if condition is BackendCondition.DISK_FULL and not was_down:
            logger.warning("the disk with %s has enough space again", self._folder, extra=seconds)
        else:
            logger.warning("the backend at %s works again", self._place, extra=seconds)
        self._on_change()

    async def _has_recovered(self, condition: BackendCondition | None, *, was_down: bool) -> bool:
        match condition:
            case BackendCondition.POISONED:
                return was_down
            case BackendCondition.HUNG:
                return was_down or await self._is_empty()
            case BackendCondition.DISK_FULL:
                return time.monotonic() >= self._full_until and await self._has_room()
        return True

    async def _has_room(self) -> bool:
        usage = await asyncio.to_thread(shutil.disk_usage, self._folder)
        return usage.free >= min(FREE_BYTES_MIN, FREE_SHARE_MIN * usage.total)

    def _note_full(self) -> None:
        """Sets the pause after the disk was full. The pause doubles each time the disk fills up
        again soon after the previous one."""
        now = time.monotonic()
        is_again = now < self._full_until + FULL_AGAIN_SECONDS
        self._full_seconds = (
            min(2 * self._full_seconds, FULL_SECONDS_MAX) if is_again else FULL_SECONDS_FIRST
        )
        self._full_until = now + self._full_seconds

    async def _keep_process(self, since: float | None = None) -> None:
        """Restarts the owned process if it has ended or hasn't responded for too long."""
        if self._owned is None:
            return
        if not self._owned.is_running:
            # No process is started while another ComfyUI or another program uses the address.
            if not await self._answers() and not self._is_not_comfyui:
                await self._owned.start()
        elif since is not None:
            since = max(since, self._owned.started_at)
            if time.monotonic() - since > STARTING_SECONDS_MAX:
                await self._restart()

    async def _restart(self) -> bool:
        """Restarts the owned process. Returns False if the worker owns no process, or if a process
        that it doesn't own responds at the address."""
        if self._owned is None:
            return False
        await self._owned.stop()
        if await self._answers():
            self._log_foreign_backend()
            return False
        await self._owned.start()
        return True

    def _log_foreign_backend(self) -> None:
        if not self._is_foreign_logged:
            self._is_foreign_logged = True
            logger.warning(
                "using the ComfyUI at %s, which this worker did not start and can't restart",
                self._place,
            )

    def _restarts(self) -> bool:
        if self._owned is None or self.condition not in CURED_BY_RESTART:
            return False
        return self._owned.is_running or self.condition is BackendCondition.DOWN

    async def _answers(self) -> bool:
        try:
            await self._probe.queue_length()
        except FleetError as error:
            self._last_error = error.message
            self._is_not_comfyui = isinstance(error, UnexpectedAnswer)
            return False
        return True

    async def _is_empty(self) -> bool:
        try:
            return await self._probe.queue_length() == 0
        except FleetError:
            return False
