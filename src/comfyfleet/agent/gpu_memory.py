"""How much of a GPU's memory is used: told by NVIDIA's driver, or by a command of the operator's."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pynvml

from comfyfleet.agent.command_words import filled_words
from comfyfleet.agent.machine import Machine
from comfyfleet.kernel.errors import InvalidInput

COMMAND_SECONDS_MAX = 10.0
ANSWER_BYTES_MAX = 10_000


class Memory(NamedTuple):
    used: int
    total: int


ReadMemory: TypeAlias = Callable[[], Awaitable[Memory | None]]


def driver_memory(folder: Path, environ: Mapping[str, str], nvml: Any = pynvml) -> ReadMemory:
    """Of the GPU that `environ` names. `folder`: any of this machine."""
    machine = Machine(folder, environ, nvml=nvml)

    async def read() -> Memory | None:
        reading = await machine.read()
        used, total = reading.gpu_memory_used_bytes, reading.gpu_memory_total_bytes
        return None if used is None or total is None else Memory(used, total)

    return read


def command_memory(command: str, gpu: str) -> ReadMemory:
    """A command that prints the used and the total bytes of the GPU that it is told as `{gpu}`."""
    arguments = filled_words("--gpu-memory-command", command, {"gpu": gpu})

    async def read() -> Memory | None:
        return memory_in(await _output(arguments))

    return read


def memory_in(text: str) -> Memory | None:
    """The first two numbers, if they can be used and total."""
    words = text.split()
    if len(words) < 2 or not all(word.isascii() and word.isdigit() for word in words[:2]):
        return None
    used, total = int(words[0]), int(words[1])
    return Memory(used, total) if used <= total > 0 else None


async def require_memory(read: ReadMemory, gpu: str, command: str | None) -> None:
    """Raises InvalidInput where nobody tells the GPU's memory."""
    if await read() is not None:
        return
    if command is not None:
        raise InvalidInput(
            f"--gpu-memory-command does not tell the memory of GPU {gpu}",
            hint="It prints two whole numbers, the used and the total bytes, and ends with 0.",
        )
    raise InvalidInput(
        f"--per-gpu auto must know how much memory of GPU {gpu} is used, and NVIDIA's driver does not tell",
        hint="Give --per-gpu a number, or --gpu-memory-command a command that prints used and total bytes.",
    )


async def _output(arguments: list[str]) -> str:
    """Nothing, if the command fails or takes too long."""
    try:
        process = await asyncio.create_subprocess_exec(
            *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )
    except OSError:
        return ""
    try:
        async with asyncio.timeout(COMMAND_SECONDS_MAX):
            told, _ = await process.communicate()
    except TimeoutError:
        return ""
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return told[:ANSWER_BYTES_MAX].decode(errors="replace") if process.returncode == 0 else ""
