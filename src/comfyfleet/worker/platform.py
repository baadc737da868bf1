"""The protocols of what surrounds a worker (machine, notices, protection, assets), and what stands in where one is missing."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from comfyfleet.api.values import Asset
from comfyfleet.api.worker import Reading

# A held lease can always get a new URL for an asset of its job.
RenewAsset: TypeAlias = Callable[[Asset], Awaitable[Asset]]


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


class MachineReader(Protocol):
    async def read(self) -> Reading:
        """Cheap enough for every poll and heartbeat; never raises."""
        ...


class ProtectionSwitch(Protocol):
    """Keeps an auto-scaling group from taking a machine that is at work."""

    def busy(self) -> None: ...

    def idle(self) -> None: ...


class AssetProvider(Protocol):
    def hold(self, asset: Asset, renew: RenewAsset) -> AbstractAsyncContextManager[Path]:
        """The asset as a file that stays for the length of the `with`.

        Raises InvalidInput when it can't be had for good, Unavailable when it can't for now.
        """
        ...


@dataclass(frozen=True, slots=True)
class Platform:
    """What a worker hears and tells of its machine."""

    machine: MachineReader
    notices: Notices
    protection: ProtectionSwitch


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


NO_PLATFORM = Platform(NoMachine(), NoNotices(), NoProtection())
