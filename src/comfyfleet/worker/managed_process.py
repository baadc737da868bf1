"""A ComfyUI process that the worker starts itself and may therefore restart, and the operator's
command that starts it."""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from comfyfleet.errors import InvalidInput

# A placeholder such as `{port}`. Shell variables such as `${HOME}` don't match.
PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")


def split_command(option: str, command: str) -> list[str]:
    """Splits a command into words. Raises InvalidInput if it is empty or has an unclosed quote."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InvalidInput(f"{option} isn't a valid command: {error}") from error
    if not words:
        raise InvalidInput(f"{option} is empty")
    return words


def fill_command(option: str, command: str, values: Mapping[str, str]) -> list[str]:
    """Returns the words of the command with each `{name}` replaced by its value, which may contain
    spaces.

    Raises InvalidInput for an unknown name, because it is probably misspelled and the program would
    receive it unreplaced.
    """
    words = split_command(option, command)
    for name in (name for word in words for name in PLACEHOLDER.findall(word)):
        if name not in values:
            supported = ", ".join(f"{{{value}}}" for value in values)
            raise InvalidInput(
                f"{option} contains the unknown placeholder {{{name}}}. Use {supported}.",
                hint="If the program itself needs this text, start the program from a script.",
            )
    return [PLACEHOLDER.sub(lambda match: values[match[1]], word) for word in words]


logger = logging.getLogger(__name__)

STOP_SECONDS_MAX = 15.0
POLL_SECONDS = 0.05
# Windows has no process groups. There, a child is started in a new console group, so that Ctrl-C
# doesn't reach it.
HAS_GROUPS = hasattr(os, "killpg")
SET_APART = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
# A process that ends within this many seconds after its start will probably do so again, so its
# restarts are delayed.
SHORT_LIFE_SECONDS = 60.0
PAUSE_SECONDS_MAX = 60.0
# The log of the process is rotated when it reaches this size. Older parts are kept in numbered
# files.
LOG_BYTES_MAX = 10 * 1024**2
LOG_FILES_MAX = 5
LOG_SECONDS = 10.0
# Variables with these prefixes are hidden from ComfyUI. Node packs are third-party code and must
# not see the worker's keys, or the addresses of databases and object stores.
SECRET_PREFIXES = ("COMFYFLEET_", "COMFY_CLOUD_")
ENGINE_PREFIXES = ("COMFYFLEET_ENGINE_", "COMFYFLEET_MAX_PICTURE_PIXELS")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process id with its start time. Ids are reused, so only both together identify a
    process."""

    pid: int
    created: float  # start time reported by the system, in seconds since 1970

    @property
    def is_alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return (
                process.create_time() == self.created and process.status() != psutil.STATUS_ZOMBIE
            )
        except psutil.Error:
            return False

    @property
    def is_own_group(self) -> bool:
        """Whether the process leads a process group other than the worker's, like every process
        that the worker starts.

        This is checked because signals are sent to the group, and the ids 0 and -1 would address
        the worker's own group and all processes.
        """
        if not HAS_GROUPS:
            return self.pid > 1
        try:
            return self.pid > 1 and os.getpgid(self.pid) == self.pid != os.getpgrp()
        except (OSError, OverflowError):
            return False


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _kill_tree(pid: int) -> None:
    """Kills a process and its descendants on systems without process groups."""
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in [*root.children(recursive=True), root]:
            with contextlib.suppress(psutil.Error):
                process.kill()


class ManagedProcess:
    """A process in its own session, which ends together with the processes it started.

    The file `note` stores the identity of the process, so that the next worker can take it over.
    `environ` contains additional variables. The process inherits all others except the worker's own
    settings. `log` is the file for its output. If it is None, the output goes to the worker's own
    output.
    """

    def __init__(
        self,
        command: str,
        note: Path,
        environ: Mapping[str, str] | None = None,
        *,
        log: Path | None = None,
    ) -> None:
        self._arguments = split_command("--comfyui-command", command)
        self._note = note
        self._log = log
        self._environ = {**_inherited(os.environ), **(environ or {})}
        self._child: asyncio.subprocess.Process | None = None
        self._identity: ProcessIdentity | None = None
        self.started_at = 0.0  # monotonic time
        self._short_lives = 0
        self._was_stopped = False  # whether the worker itself stopped the process

    @property
    def is_running(self) -> bool:
        if self._child is not None:
            return self._child.returncode is None
        return self._identity is not None and self._identity.is_alive

    @property
    def pid(self) -> int | None:
        return self._identity.pid if self._identity is not None else None

    def take_up(self) -> bool:
        """Takes over the process that an earlier worker started. Returns False if that process is
        no longer running."""
        identity = _read(self._note)
        if identity is None or not identity.is_own_group or not identity.is_alive:
            return False
        self._identity = identity
        return True

    async def start(self) -> None:
        if self.is_running:
            return
        self._log_exit()
        await self._delay_restart()
        output = await asyncio.to_thread(self._open_log)
        try:
            self._child = await asyncio.create_subprocess_exec(
                *self._arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                creationflags=SET_APART,
                env=self._environ,
            )
        except OSError as error:
            raise InvalidInput(
                f"{self._arguments[0]} can't be started: {error.strerror}"
            ) from error
        finally:
            if output is not None:
                os.close(output)
        self.started_at = time.monotonic()
        self._was_stopped = False
        self._identity = _identify(self._child.pid)
        try:
            await asyncio.to_thread(_write, self._note, self._identity)
        except OSError as error:
            # The next worker will treat this ComfyUI as one that it doesn't own.
            logger.warning("ComfyUI's process id can't be stored", extra={"reason": str(error)})
        logger.info("ComfyUI was started", extra={"pid": self._child.pid})

    async def stop(self) -> None:
        if self._identity is None or not self.is_running:
            return
        self._was_stopped = True
        for end in (self._terminate, self.kill):
            end()
            try:
                async with asyncio.timeout(STOP_SECONDS_MAX):
                    await self._ended()
            except TimeoutError:
                continue
            break
        self._note.unlink(missing_ok=True)
        logger.info("ComfyUI was stopped", extra={"pid": self._identity.pid})

    def _open_log(self) -> int | None:
        """Opens the log for appending. The process writes to it directly, so that logging continues
        after the worker ends."""
        if self._log is None:
            return None
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            rotate_log(self._log)
            return os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            logger.warning("ComfyUI's log can't be written", extra={"reason": str(error)})
            return os.open(os.devnull, os.O_WRONLY)

    async def keep_log_small(self) -> None:
        """Rotates the log when it has grown too large. Runs until cancelled."""
        while self._log is not None:
            await asyncio.sleep(LOG_SECONDS)
            # An error such as a full disk is detected elsewhere.
            with contextlib.suppress(OSError):
                await asyncio.to_thread(rotate_log, self._log)

    @property
    def memory_bytes(self) -> int:
        """The memory in bytes of the process and its descendants. Reading it blocks."""
        try:
            process = psutil.Process(self.pid or 0) if self.is_running else None
            family = [process, *process.children(recursive=True)] if process else []
            return sum(member.memory_info().rss for member in family)
        except psutil.Error:
            return 0

    def kill(self) -> None:
        """Kills the process immediately. A `stop` in progress then returns."""
        if self._identity is None or not self.is_running:
            return
        if HAS_GROUPS:
            _signal_group(self._identity.pid, signal.SIGKILL)
        else:
            _kill_tree(self._identity.pid)

    def _terminate(self) -> None:
        """Sends SIGTERM to the whole process group. On Windows, kills the processes, because a
        program without a window can't be stopped gracefully."""
        if self._identity is None:
            return
        if HAS_GROUPS:
            _signal_group(self._identity.pid, signal.SIGTERM)
        else:
            _kill_tree(self._identity.pid)

    async def _ended(self) -> None:
        if self._child is not None:
            await self._child.wait()
            return
        # The process isn't a child of this worker, so its state must be polled.
        while self.is_running:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)

    def _log_exit(self) -> None:
        if self._child is None or self._was_stopped:
            return
        logger.warning(
            "ComfyUI exited unexpectedly (%s) and is being restarted; its output is %s",
            _outcome(self._child.returncode),
            "above" if self._log is None else f"in {self._log}",
            extra={"pid": self._child.pid, "seconds": round(time.monotonic() - self.started_at)},
        )

    async def _delay_restart(self) -> None:
        if self._child is None:
            return
        lived = time.monotonic() - self.started_at
        self._short_lives = self._short_lives + 1 if lived < SHORT_LIFE_SECONDS else 0
        if self._short_lives > 1:
            await asyncio.sleep(min(2.0**self._short_lives, PAUSE_SECONDS_MAX))


def rotate_log(log: Path) -> None:
    """Moves the content of a large log to a numbered file and deletes the oldest one. This call
    blocks.

    The content is copied and the log is truncated, because the process keeps the file open.
    """
    if not log.exists() or log.stat().st_size <= LOG_BYTES_MAX:
        return
    older = [log.with_name(f"{log.name}.{number}") for number in range(1, LOG_FILES_MAX)]
    for newer, next_older in reversed(list(itertools.pairwise(older))):
        if newer.exists():
            newer.replace(next_older)
    try:
        shutil.copyfile(log, older[0])
    finally:
        os.truncate(log, 0)


def _inherited(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(ENGINE_PREFIXES) or not name.startswith(SECRET_PREFIXES)
    }


def _outcome(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"


def _identify(pid: int) -> ProcessIdentity | None:
    try:
        return ProcessIdentity(pid, psutil.Process(pid).create_time())
    except psutil.Error:
        return None  # The process has already ended.


def _read(note: Path) -> ProcessIdentity | None:
    try:
        data = json.loads(note.read_bytes())
        return ProcessIdentity(int(data["pid"]), float(data["created"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _write(note: Path, identity: ProcessIdentity | None) -> None:
    if identity is None:
        note.unlink(missing_ok=True)
        return
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps({"pid": identity.pid, "created": identity.created}))
