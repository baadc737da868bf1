"""What a worker is given from outside, as narrow as it needs it, and what stands in where it isn't."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from comfyfleet.wire.files import Asset
from comfyfleet.wire.messages import Reading

# A held lease can always get a new URL for an asset of its job.
Renew: TypeAlias = Callable[[Asset], Awaitable[Asset]]


class Notice(Protocol):
    """This machine will be taken away; `at`: when, where that is told."""

    @property
    def kind(self) -> Literal["spot", "rebalance"]: ...

    @property
    def at(self) -> datetime | None: ...


class Notices(Protocol):
    def notices(self) -> AsyncIterator[Notice]:
        """Each once, for as long as somebody listens."""
        ...


class Machine(Protocol):
    async def read(self) -> Reading:
        """Cheap enough for every poll and heartbeat; never raises."""
        ...


class Protection(Protocol):
    """Keeps an auto-scaling group from taking a machine that is at work."""

    def busy(self) -> None: ...

    def idle(self) -> None: ...


class Assets(Protocol):
    def hold(self, asset: Asset, renew: Renew) -> AbstractAsyncContextManager[Path]:
        """The asset as a file that stays for the length of the `with`.

        Raises InvalidInput when it can't be had for good, Unavailable when it can't for now.
        """
        ...


@dataclass(frozen=True, slots=True)
class Surveys:
    """What a worker hears and tells of its machine."""

    machine: Machine
    notices: Notices
    protection: Protection


class NoNotices:
    """Of a machine that nobody takes away."""

    async def notices(self) -> AsyncIterator[Notice]:
        return
        yield


class NoMachine:
    """Nothing can be read."""

    async def read(self) -> Reading:
        return Reading()


class NoProtection:
    """Nobody scales this machine in."""

    def busy(self) -> None:
        pass

    def idle(self) -> None:
        pass


NOTHING_SURVEYED = Surveys(NoMachine(), NoNotices(), NoProtection())
