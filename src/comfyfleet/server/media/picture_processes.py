"""Processes that decode images from other people. Each one handles a single image, with limits for
time and memory, and without the control plane's environment. Each control plane has one pool of
these processes, which tenants use in turn."""

import asyncio
import contextlib
import errno
import os
import sys
from collections.abc import AsyncIterator, Hashable, Mapping
from contextlib import AbstractAsyncContextManager

from comfyfleet.server.turns import FairTurns

AT_ONCE_MAX = 2
WAITING_PER_TENANT_MAX = 50
PROCESS_SECONDS_MAX = 30.0
OUTPUT_BYTES_MAX = 1_000
# The environment variables that locate Python, its packages and temporary files. All others, such
# as those for databases, keys and proxies, are left out.
_PASSED_ON = frozenset(
    {"APPDATA", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONUSERBASE", "SYSTEMROOT", "TEMP",
     "TMP", "TMPDIR", "USERPROFILE"}
)  # fmt: skip


class PictureProcesses:
    def __init__(self) -> None:
        self._turns = FairTurns(AT_ONCE_MAX, waiting_each_max=WAITING_PER_TENANT_MAX)

    def turn(self, tenant: Hashable) -> AbstractAsyncContextManager[None]:
        """Waits for a free process. Raises TooManyCalls if too many images of the tenant are
        waiting."""
        return self._turns.turn(tenant)

    async def run(self, module: str, *arguments: str) -> str | None:
        """Runs a module with these arguments. Returns the beginning of its output, or None if it
        failed or took too long.

        Raises OSError if there was no space for its result. Must be called within a turn."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # no imports from the current folder, which may belong to someone else
            "-m",
            module,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=passed_environ(os.environ),
        )
        async with _killed_at_the_end(process):
            assert process.stdout is not None  # noqa: S101
            try:
                async with asyncio.timeout(PROCESS_SECONDS_MAX):
                    output = await process.stdout.read(OUTPUT_BYTES_MAX)
                    code = await process.wait()
            except TimeoutError:
                return None
        if code == errno.ENOSPC:
            raise OSError(code, os.strerror(code))
        return output.decode(errors="replace").strip() if code == 0 else None


@contextlib.asynccontextmanager
async def _killed_at_the_end(process: asyncio.subprocess.Process) -> AsyncIterator[None]:
    try:
        yield
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())


def passed_environ(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.upper() in _PASSED_ON}
