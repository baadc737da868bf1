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
# While prompts run, only a refused connection counts: a busy ComfyUI may be slow to answer.
REFUSALS_MAX = 4
CONNECT_SECONDS = 1.0
CLOSED_SECONDS = 60.0
FAILED_PROBES_MAX = 2
# A process that lives and doesn't answer: it may still be loading its node packs.
STARTING_SECONDS_MAX = 300.0
# A full disk has room again with so many bytes, or with this share of a small disk.
FREE_BYTES_MIN = 256 * 1024 * 1024
FREE_SHARE_MIN = 0.1
# A disk that fills up again soon after a pause gets a longer one.
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
    BackendCondition.DOWN: "the backend doesn't answer",
    BackendCondition.HUNG: "the backend is stuck",
    BackendCondition.POISONED: "the backend's GPU is in an error state that only a restart clears",
    BackendCondition.CLOSED: "the backend refuses us",
    BackendCondition.DISK_FULL: "the disk is full",
    BackendCondition.GROWN: "the backend keeps memory that it was asked to free",
}


class BackendHealth:
    """Watches and repairs one backend.

    `probe`: the same backend without retries. `on_change` is called when the backend fails or has
    recovered. `place`: the backend's address, for messages. `address`: its host and port, unless it is a cloud.
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
        self._is_not_comfyui = False  # what answers there is no ComfyUI
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
        remedy = "it is restarted" if self._restarts() else "no jobs are taken until it works again"
        if fault.condition is BackendCondition.DISK_FULL:
            self._note_full()
            place, remedy = str(self._folder), "no jobs are taken until it has room again"
        extra = {"condition": fault.condition.value, "detail": detail}
        logger.error("%s at %s: %s", text, place, remedy, extra=extra)
        self._failed.set()
        self._on_change()

    async def watch(self, is_idle: Callable[[], bool]) -> None:
        """Runs until cancelled.

        While prompts run, those who follow them notice most failures; only that nothing listens
        any more is noticed here, because they try for longer.
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
        """Whether nothing listens at the backend's address any more."""
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
        """Waits at the start: a ComfyUI takes minutes to load its node packs."""
        since: float | None = None
        if self._owned is not None and self._owned.take_up():
            logger.info(
                "ComfyUI still runs from an earlier start of this worker",
                extra={"pid": self._owned.pid},
            )
            since = time.monotonic()  # it has had its time to start
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
            logger.warning("the backend at %s answers", self._place)

    def _log_wait(self) -> None:
        if not self._is_not_comfyui:
            logger.warning("waiting for the backend at %s: %s", self._place, self._last_error)
            return
        logger.error(
            "what answers at %s is no ComfyUI: stop it, or choose another port with --backend",
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
            # An account without credits still answers probes.
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
            logger.warning("the disk of %s has room again", self._folder, extra=seconds)
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
        """Pauses longer each time, as long as the disk fills up again soon after each pause."""
        now = time.monotonic()
        is_again = now < self._full_until + FULL_AGAIN_SECONDS
        self._full_seconds = (
            min(2 * self._full_seconds, FULL_SECONDS_MAX) if is_again else FULL_SECONDS_FIRST
        )
        self._full_until = now + self._full_seconds

    async def _keep_process(self, since: float | None = None) -> None:
        """Starts the process again when it has ended, or when it has not answered for too long."""
        if self._owned is None:
            return
        if not self._owned.is_running:
            # Never while another ComfyUI or program has the address.
            if not await self._answers() and not self._is_not_comfyui:
                await self._owned.start()
        elif since is not None:
            since = max(since, self._owned.started_at)
            if time.monotonic() - since > STARTING_SECONDS_MAX:
                await self._restart()

    async def _restart(self) -> bool:
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
        if not self._is_foreign_logged:
            self._is_foreign_logged = True
            logger.warning(
                "a ComfyUI that this worker did not start answers at %s: it is used, no second one "
                "is started, and it can't be restarted from here",
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
