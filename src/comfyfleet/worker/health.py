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

LOOK_SECONDS = 0.5
IDLE_LOOK_SECONDS = 10.0
CLOSED_SECONDS = 60.0
MISSED_LOOKS_MAX = 2
# A process that lives and doesn't answer: it may still be loading its node packs.
STARTING_SECONDS_MAX = 300.0
FREE_BYTES_MIN = 256 * 1024 * 1024
CURED_BY_RESTART = frozenset(
    {BackendCondition.DOWN, BackendCondition.HUNG, BackendCondition.POISONED}
)
CONDITION_TEXTS = {
    BackendCondition.DOWN: "the backend doesn't answer",
    BackendCondition.HUNG: "the backend is stuck",
    BackendCondition.POISONED: "the backend's GPU is in an error state that only a restart clears",
    BackendCondition.CLOSED: "the backend refuses us",
    BackendCondition.DISK_FULL: "the disk is full",
}


class BackendHealth:
    """Watches and repairs one backend.

    `probe`: the same backend without retries. `changed` is called when the backend fails or has
    recovered. `place`: the backend's address, for messages.
    """

    def __init__(
        self,
        probe: Backend,
        *,
        place: str,
        folder: Path,
        owned: ManagedProcess | None,
        changed: Callable[[], None],
        recovered: Callable[[], Awaitable[None]],
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self.ill: BackendCondition | None = None
        self._probe = probe
        self._place = place
        self._trouble = ""
        self._is_other = False  # what answers there is no ComfyUI
        self._stranger_told = False
        self._folder = folder
        self._owned = owned
        self._changed = changed
        self._recovered = recovered
        self._look_seconds = look_seconds
        self._fell_ill = asyncio.Event()

    def note(self, fault: BackendFault, detail: str) -> None:
        if fault.ill is None or self.ill is not None:
            return
        self.ill = fault.ill
        remedy = "it is restarted" if self._restarts() else "no jobs are taken until it is well"
        logger.error(
            "%s at %s: %s",
            CONDITION_TEXTS[fault.ill],
            self._place,
            remedy,
            extra={"ill": fault.ill.value, "detail": detail},
        )
        self._fell_ill.set()
        self._changed()

    async def watch(self, is_idle: Callable[[], bool]) -> None:
        """Runs until cancelled.

        While prompts run it does not probe: those who follow them notice a failure first.
        """
        missed = 0
        while True:
            if await self._fails_within(IDLE_LOOK_SECONDS):
                await self._repair()
                missed = 0
            elif is_idle():
                missed = 0 if await self._answers() else missed + 1
                if missed >= MISSED_LOOKS_MAX:
                    self.note(BackendFault("backend_down", BackendCondition.DOWN), self._trouble)

    async def wait_until_ready(self) -> None:
        """Waits at the start: a ComfyUI takes minutes to load its node packs."""
        since: float | None = None
        if self._owned is not None and self._owned.take_up():
            logger.info("ComfyUI runs from before, and is ours", extra={"pid": self._owned.pid})
            since = time.monotonic()  # it has had its time to start
        told: bool | None = None
        while not await self._answers():
            await self._keep_process(since=since)
            if told is not self._is_other:
                self._log_wait()
                told = self._is_other
            await asyncio.sleep(self._look_seconds)
        if self._owned is not None and not self._owned.is_running:
            self._log_foreign_backend()
        if told is not None:
            logger.warning("the backend at %s answers", self._place)

    def _log_wait(self) -> None:
        if not self._is_other:
            logger.warning("waiting for the backend at %s: %s", self._place, self._trouble)
            return
        logger.error(
            "what answers at %s is no ComfyUI: end it, or choose another port with --backend",
            self._place,
            extra={"detail": self._trouble},
        )

    async def _fails_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._fell_ill.wait()
        except TimeoutError:
            return False
        return True

    async def _repair(self) -> None:
        began, ill = time.monotonic(), self.ill
        if ill in (BackendCondition.HUNG, BackendCondition.POISONED) and await self._replaced():
            ill = BackendCondition.DOWN
        was_down = ill is BackendCondition.DOWN
        while True:
            await self._keep_process(since=began)
            answers = await self._answers()
            was_down = was_down or not answers
            if answers and await self._is_over(ill, was_down=was_down):
                break
            await asyncio.sleep(
                CLOSED_SECONDS if ill is BackendCondition.CLOSED else self._look_seconds
            )
        await self._recovered()
        self.ill = None
        self._fell_ill.clear()
        seconds = round(time.monotonic() - began, 1)
        logger.warning("the backend at %s is well again", self._place, extra={"seconds": seconds})
        self._changed()

    async def _is_over(self, ill: BackendCondition | None, *, was_down: bool) -> bool:
        match ill:
            case BackendCondition.POISONED:
                return was_down
            case BackendCondition.HUNG:
                return was_down or await self._is_empty()
            case BackendCondition.DISK_FULL:
                free = await asyncio.to_thread(shutil.disk_usage, self._folder)
                return free.free >= FREE_BYTES_MIN
        return True

    async def _keep_process(self, since: float | None = None) -> None:
        """Starts the process again when it has ended, or when it has not answered for too long."""
        if self._owned is None:
            return
        if not self._owned.is_running:
            # Never beside another one, or another program: it could not have the address.
            if not await self._answers() and not self._is_other:
                await self._owned.start()
        elif since is not None:
            since = max(since, self._owned.started_at)
            if time.monotonic() - since > STARTING_SECONDS_MAX:
                await self._replaced()

    async def _replaced(self) -> bool:
        """Restarts our process; False if something that we did not start answers at its address."""
        if self._owned is None:
            return False
        await self._owned.stop()
        if await self._answers():
            self._log_foreign_backend()
            return False
        await self._owned.start()
        return True

    def _log_foreign_backend(self) -> None:
        if not self._stranger_told:
            self._stranger_told = True
            logger.warning(
                "a ComfyUI that this worker did not start answers at %s: it is used, no second one "
                "is started, and it can't be restarted from here",
                self._place,
            )

    def _restarts(self) -> bool:
        if self._owned is None or self.ill not in CURED_BY_RESTART:
            return False
        return self._owned.is_running or self.ill is BackendCondition.DOWN

    async def _answers(self) -> bool:
        try:
            await self._probe.queue_length()
        except FleetError as error:
            self._trouble = error.message
            self._is_other = isinstance(error, UnexpectedAnswer)
            return False
        return True

    async def _is_empty(self) -> bool:
        try:
            return await self._probe.queue_length() == 0
        except FleetError:
            return False
