"""Looks up host names for customers in separate threads, within a deadline and one at a time per
tenant.

The system's resolver can't be interrupted, and a customer's name server may respond arbitrarily
slowly. The event loop's default threads also read and write files, so they must not wait for it.
"""

import asyncio
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import TypeAlias

from comfyfleet.errors import InputUnavailable

Resolver: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]

THREADS_MAX = 8
# Maximum number of concurrent lookups per tenant. Others wait, and their deadlines include the
# waiting time.
LOOKUPS_PER_TENANT_MAX = 1
LOOKUP_SECONDS_MAX = 3.0


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="names")


async def resolve_host(host: str, port: int) -> Sequence[str]:
    """Resolves a name with the system's resolver, which also accepts other notations of an address,
    such as 0x7f.1."""
    work = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        infos = await asyncio.get_running_loop().run_in_executor(_threads(), work)
    except (OSError, UnicodeError):
        return ()
    return [str(address[0]) for *_, address in infos]


class NameLookups:
    """Limits the duration of lookups and their number per tenant. A lookup that times out still
    counts until it actually ends."""

    def __init__(self, resolver: Resolver, *, seconds_max: float = LOOKUP_SECONDS_MAX) -> None:
        self._resolver = resolver
        self._seconds_max = seconds_max
        self._running: Counter[Hashable] = Counter()
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[Sequence[str]]] = set()

    async def addresses(self, host: str, port: int, who: Hashable) -> Sequence[str]:
        """Returns the addresses of a host, or an empty sequence if its name can't be resolved.
        Raises InputUnavailable if the lookup takes too long."""
        try:
            async with asyncio.timeout(self._seconds_max):
                async with self._changed:
                    await self._changed.wait_for(partial(self._has_room, who))
                    task = self._start(host, port, who)
                return await asyncio.shield(task)
        except TimeoutError:
            raise InputUnavailable(
                f"the host {host} could not be looked up within {self._seconds_max:g} seconds; "
                f"only {LOOKUPS_PER_TENANT_MAX} host per tenant is looked up at a time",
                field="url",
            ) from None

    def _has_room(self, who: Hashable) -> bool:
        return self._running[who] < LOOKUPS_PER_TENANT_MAX

    def _start(self, host: str, port: int, who: Hashable) -> "asyncio.Task[Sequence[str]]":
        self._running[who] += 1
        task = asyncio.create_task(self._look_up(host, port, who))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _look_up(self, host: str, port: int, who: Hashable) -> Sequence[str]:
        try:
            return await self._resolver(host, port)
        finally:
            async with self._changed:
                self._running[who] -= 1
                self._running += Counter()  # drops zero counts
                self._changed.notify_all()
