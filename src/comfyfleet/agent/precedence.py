"""Who goes first when a worker's machine is short of time."""

import asyncio
import contextlib
from collections.abc import Iterator

YIELD_SECONDS_MAX = 0.25


class Precedence:
    """Bringing the next prompt to the backend goes before taking results away.

    Only the former can leave a GPU idle. Results wait for a moment only: a large input may take
    minutes to come, and nobody's result is to wait for that.
    """

    def __init__(self) -> None:
        self._preparing = 0
        self._clear = asyncio.Event()
        self._clear.set()

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        self._preparing += 1
        self._clear.clear()
        try:
            yield
        finally:
            self._preparing -= 1
            if not self._preparing:
                self._clear.set()

    async def give_way(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(YIELD_SECONDS_MAX):
                await self._clear.wait()
