"""Assets as they come: fetched for one job, gone after it."""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from comfyfleet.agent.ports import Renew
from comfyfleet.comfy.surroundings import Surroundings
from comfyfleet.comfy.transfers import save
from comfyfleet.kernel.errors import InvalidInput, Unavailable
from comfyfleet.wire.files import Asset

ATTEMPTS_MAX = 6
GONE = frozenset({404, 410})


class Downloads:
    """See Assets."""

    def __init__(
        self, store: httpx.AsyncClient, folder: Path, surroundings: Surroundings | None = None
    ) -> None:
        self._store = store
        self._folder = folder
        self._around = surroundings or Surroundings()

    @contextlib.asynccontextmanager
    async def hold(self, asset: Asset, renew: Renew) -> AsyncIterator[Path]:
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=self._folder))
        try:
            yield await self._fetched(asset, renew, folder / "asset")
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _fetched(self, asset: Asset, renew: Renew, to: Path) -> Path:
        for attempt in range(1, ATTEMPTS_MAX + 1):
            trouble = await self._attempt(asset, to)
            if trouble is None:
                return to
            if attempt > 1:
                await self._around.back_off(attempt - 1)
            asset = await renew(asset)
        raise Unavailable(f"the input {asset.name!r} can't be fetched: {trouble}")

    async def _attempt(self, asset: Asset, to: Path) -> str | None:
        try:
            async with self._store.stream("GET", asset.url) as response:
                if response.status_code in GONE:
                    raise InvalidInput(f"the input {asset.name!r} is gone from the store")
                if not response.is_success:
                    return f"answered {response.status_code}"
                size = await save(response, to)
        except httpx.TransportError as error:
            return type(error).__name__
        if asset.size is not None and size != asset.size:
            return f"{size} bytes instead of {asset.size}"
        return None
