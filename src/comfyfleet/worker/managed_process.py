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

# `${HOME}` is left alone, because it is meant for a shell.
PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")


def split_command(option: str, command: str) -> list[str]:
    """Splits a command into words. Raises InvalidInput if it is empty or has an unclosed quote."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InvalidInput(f"{option} can't be read: {error}") from error
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
    for name in (found for word in words for found in PLACEHOLDER.findall(word)):
        if name not in values:
            known = ", ".join(f"{{{each}}}" for each in values)
            raise InvalidInput(
                f"{option} has {{{name}}}, which is not filled in; known: {known}",
                hint="A program that needs such a text itself can be started by a script.",
            )
    return [PLACEHOLDER.sub(lambda found: values[found[1]], word) for word in words]


logger = logging.getLogger(__name__)

STOP_SECONDS_MAX = 15.0
POLL_SECONDS = 0.05
# Windows has no process groups. A child needs its own console group there, so that Ctrl-C doesn't
# reach it.
HAS_GROUPS = hasattr(os, "killpg")
SET_APART = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
# Seconds. A process that ends sooner after its start will probably do so again, so its restarts are
# delayed.
SHORT_LIFE_SECONDS = 60.0
PAUSE_SECONDS_MAX = 60.0
# Limits for the process's log: the current file and older, numbered ones.
LOG_BYTES_MAX = 10 * 1024**2
LOG_FILES_MAX = 5
LOG_SECONDS = 10.0
# Node packs are third-party code and must not see the worker's keys, database addresses and object
# stores.
SECRET_PREFIXES = ("COMFYFLEET_", "COMFY_CLOUD_")
ENGINE_PREFIXES = ("COMFYFLEET_ENGINE_", "COMFYFLEET_MAX_PICTURE_PIXELS")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process id with its start time. Ids are reused, so only both together identify a
    process."""

    pid: int
    created: float  # seconds since 1970, as the system reports it

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
        """Whether the process leads its own process group, as all processes started by the worker
        do, and not the worker's group.

        Signals go to the group. The ids 0 and -1 would mean the worker's own group and all
        processes.
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

    `note` is the file that stores its identity, so that the next worker owns the process too.
    `environ` contains additional variables. The process inherits all others except the worker's own
    settings. `log` is the file for its output. Without one, the output goes where the worker's
    output goes.
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
        self._known: ProcessIdentity | None = None
        self.started_at = 0.0  # by the monotonic clock
        self._short_lives = 0
        self._was_stopped = False  # by the worker

    @property
    def is_running(self) -> bool:
        if self._child is not None:
            return self._child.returncode is None
        return self._known is not None and self._known.is_alive

    @property
    def pid(self) -> int | None:
        return self._known.pid if self._known is not None else None

    def take_up(self) -> bool:
        """Takes ownership of the process that an earlier worker started. Returns whether it is
        still running."""
        known = _read(self._note)
        if known is None or not known.is_own_group or not known.is_alive:
            return False
        self._known = known
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
        self._known = _known(self._child.pid)
        try:
            await asyncio.to_thread(_write, self._note, self._known)
        except OSError as error:
            # A later worker will use this ComfyUI as one that it didn't start.
            logger.warning("ComfyUI's process id can't be stored", extra={"reason": str(error)})
        logger.info("ComfyUI was started", extra={"pid": self._child.pid})

    async def stop(self) -> None:
        if self._known is None or not self.is_running:
            return
        self._was_stopped = True
        for end in (self._ask, self.kill):
            end()
            try:
                async with asyncio.timeout(STOP_SECONDS_MAX):
                    await self._ended()
            except TimeoutError:
                continue
            break
        self._note.unlink(missing_ok=True)
        logger.info("ComfyUI was stopped", extra={"pid": self._known.pid})

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
            # for example a full disk, which is detected elsewhere
            with contextlib.suppress(OSError):
                await asyncio.to_thread(rotate_log, self._log)

    @property
    def memory_bytes(self) -> int:
        """The memory in bytes of the process and its descendants. Reading it blocks."""
        try:
            process = psutil.Process(self.pid or 0) if self.is_running else None
            family = [process, *process.children(recursive=True)] if process else []
            return sum(each.memory_info().rss for each in family)
        except psutil.Error:
            return 0

    def kill(self) -> None:
        """Kills the process at once. A `stop` in progress then returns."""
        if self._known is None or not self.is_running:
            return
        if HAS_GROUPS:
            _signal_group(self._known.pid, signal.SIGKILL)
        else:
            _kill_tree(self._known.pid)

    def _ask(self) -> None:
        """Asks the whole session to end. On Windows, kills the process, because a program without a
        window can't be asked."""
        if self._known is None:
            return
        if HAS_GROUPS:
            _signal_group(self._known.pid, signal.SIGTERM)
        else:
            _kill_tree(self._known.pid)

    async def _ended(self) -> None:
        if self._child is not None:
            await self._child.wait()
            return
        # The process isn't a child of this worker, so its end must be polled.
        while self.is_running:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)

    def _log_exit(self) -> None:
        if self._child is None or self._was_stopped:
            return
        logger.warning(
            "ComfyUI has ended by itself (%s) and is started again; its output is %s",
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
    """Moves a large log's content into numbered files and deletes the oldest one. This call blocks.

    The content is copied and the file is truncated, because the process keeps it open.
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


def _known(pid: int) -> ProcessIdentity | None:
    try:
        return ProcessIdentity(pid, psutil.Process(pid).create_time())
    except psutil.Error:
        return None  # it has already ended


def _read(note: Path) -> ProcessIdentity | None:
    try:
        data = json.loads(note.read_bytes())
        return ProcessIdentity(int(data["pid"]), float(data["created"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _write(note: Path, known: ProcessIdentity | None) -> None:
    if known is None:
        note.unlink(missing_ok=True)
        return
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps({"pid": known.pid, "created": known.created}))
