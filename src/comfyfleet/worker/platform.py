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

# Requests a new URL for an asset. A worker can do so as long as it holds the job's lease.
RenewAsset: TypeAlias = Callable[[Asset], Awaitable[Asset]]


class Notice(Protocol):
    """A notice that this machine will stop, or should be left. `at` is the time, if known."""

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
        """Returns the machine's figures. It is fast enough for every poll and heartbeat, and never
        raises."""
        ...


class ProtectionSwitch(Protocol):
    """Keeps an auto-scaling group from removing a machine that runs jobs."""

    def busy(self) -> None: ...

    def idle(self) -> None: ...


class AssetProvider(Protocol):
    def hold(self, asset: Asset, renew: RenewAsset) -> AbstractAsyncContextManager[Path]:
        """Yields the asset as a file that exists inside the `with` block.

        Raises InvalidInput if the asset is permanently unavailable, and Unavailable if that is
        temporary.
        """
        ...


@dataclass(frozen=True, slots=True)
class Platform:
    """A worker's access to its machine."""

    machine: MachineReader
    notices: Notices
    protection: ProtectionSwitch


class NoNotices:
    """The notices of a machine that never sends any."""

    async def notices(self) -> AsyncIterator[Notice]:
        return
        yield


class NoMachine:
    """A machine reader without figures, for machines that can't be read."""

    async def read(self) -> Reading:
        return Reading()


class NoProtection:
    """A protection switch without effect, for machines outside auto-scaling groups."""

    def busy(self) -> None:
        pass

    def idle(self) -> None:
        pass


NO_PLATFORM = Platform(NoMachine(), NoNotices(), NoProtection())
