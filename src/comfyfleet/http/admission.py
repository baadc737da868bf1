"""Only so many polls are let in at once. Those that wait to be let in are not read: when ten thousand
workers come back at the same moment, not all of them hold a request in memory.

A place is taken by a poll that has come in full, until it is parked or answered, or its key turns out to
be wrong: whoever sends half a request, or a wrong key, keeps nobody out.
"""

import asyncio
from collections import deque
from collections.abc import Callable

POLLS_AT_ONCE = 32


class Admission:
    def __init__(self) -> None:
        self._inside = 0
        self._begun = 0  # in this turn of the loop: what they have sent is not read to its end yet
        self._held: deque[Callable[[], None]] = deque()
        self._is_due = False

    def ask(self, begin: Callable[[], None]) -> bool:
        """Whether it may begin now; else it is called when it may."""
        if self._held or not self._has_room:
            self._held.append(begin)
            return False
        self._count_one()
        return True

    def enter(self) -> None:
        self._inside += 1

    def leave(self) -> None:
        self._inside -= 1
        if self._held:
            self._soon()

    @property
    def _has_room(self) -> bool:
        return self._inside + self._begun < POLLS_AT_ONCE

    def _count_one(self) -> None:
        self._begun += 1
        self._soon()

    def _soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_due, self._begun = False, 0
        while self._held and self._has_room:
            begin = self._held.popleft()
            self._count_one()
            begin()
