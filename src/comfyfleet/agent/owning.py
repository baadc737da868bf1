"""A ComfyUI that the worker starts itself, and so may also restart."""

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import time

from comfyfleet.kernel.errors import InvalidInput

logger = logging.getLogger(__name__)

STOP_SECONDS_MAX = 15.0
# One that ends this soon after its start will do so again: starts are spaced out.
SHORT_LIFE_SECONDS = 60.0
PAUSE_SECONDS_MAX = 60.0


class OwnedProcess:
    """In a session of its own: what it has started ends with it."""

    def __init__(self, command: str) -> None:
        try:
            self._arguments = shlex.split(command)
        except ValueError as error:
            raise InvalidInput(f"--comfyui-command can't be read: {error}") from error
        if not self._arguments:
            raise InvalidInput("--comfyui-command is empty")
        self._process: asyncio.subprocess.Process | None = None
        self._started_at = 0.0
        self._short_lives = 0

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        if self.is_running:
            return
        await self._space_out()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._arguments, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            raise InvalidInput(
                f"{self._arguments[0]} can't be started: {error.strerror}"
            ) from error
        self._started_at = time.monotonic()
        logger.info("ComfyUI was started", extra={"pid": self._process.pid})

    async def stop(self) -> None:
        if self._process is None or not self.is_running:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            try:
                async with asyncio.timeout(STOP_SECONDS_MAX):
                    await self._process.wait()
            except TimeoutError:
                continue
            break
        logger.info("ComfyUI was stopped", extra={"pid": self._process.pid})

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def _space_out(self) -> None:
        if self._process is None:
            return
        lived = time.monotonic() - self._started_at
        self._short_lives = self._short_lives + 1 if lived < SHORT_LIFE_SECONDS else 0
        if self._short_lives > 1:
            await asyncio.sleep(min(2.0**self._short_lives, PAUSE_SECONDS_MAX))
