"""Protocols of a worker's platform (machine, notices, protection, assets), and null
implementations."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from comfyfleet.api.values import Asset
from comfyfleet.api.worker import Reading

# Requests a new URL for an asset. This works as long as the worker holds the job's lease.
RenewAsset: TypeAlias = Callable[[Asset], Awaitable[Asset]]


class Notice(Protocol):
    """A notice that this machine will stop or that work should move elsewhere. `at` is the time, or
    None if it is unknown."""

    @property
    def kind(self) -> Literal["spot", "rebalance"]: ...

    @property
    def at(self) -> datetime | None: ...


class Notices(Protocol):
    def notices(self) -> AsyncIterator[Notice]:
        """Yields each notice once, until the iterator is closed."""
        ...


class MachineReader(Protocol):
    async def read(self) -> Reading:
        """Returns the current reading of the machine. Never raises, and is fast enough for every
        poll and heartbeat."""
        ...


class ProtectionSwitch(Protocol):
    """Keeps an auto-scaling group from removing a machine that runs jobs."""

    def busy(self) -> None: ...

    def idle(self) -> None: ...


class AssetProvider(Protocol):
    def hold(self, asset: Asset, renew: RenewAsset) -> AbstractAsyncContextManager[Path]:
        """Yields the asset as a file that exists inside the `with` block.

        Raises InvalidInput if the asset is permanently unavailable, and Unavailable if it is
        temporarily unavailable.
        """
        ...


@dataclass(frozen=True, slots=True)
class Platform:
    """Gives a worker access to its machine's readings, notices and scale-in protection."""

    machine: MachineReader
    notices: Notices
    protection: ProtectionSwitch


class NoNotices:
    """A source of notices for machines that never send any."""

    async def notices(self) -> AsyncIterator[Notice]:
        return
        yield


class NoMachine:
    """A machine reader that returns empty readings."""

    async def read(self) -> Reading:
        return Reading()


class NoProtection:
    """A protection switch that does nothing, for machines outside auto-scaling groups."""

    def busy(self) -> None:
        pass

    def idle(self) -> None:
        pass


NO_PLATFORM = Platform(NoMachine(), NoNotices(), NoProtection())
