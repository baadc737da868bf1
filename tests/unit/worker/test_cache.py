"""Assets are fetched once, kept within bounds, and never given out damaged."""

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from blake3 import blake3

from comfyfleet.api.values import Asset
from comfyfleet.errors import InvalidInput, Unavailable
from comfyfleet.worker.files import AssetCache, RenewUrl


def an_asset(content: bytes, **changes: object) -> Asset:
    fields = {"name": "input", "filename": "cat.png", "url": content.decode()}
    return Asset.model_validate({**fields, "content_hash": blake3(content).hexdigest(), **changes})


async def renew(asset: Asset) -> Asset:
    return asset


@dataclass
class Web:
    """Answers a URL with its own text; troubles, if any, come first, one per request."""

    folder: Path
    asked: list[str] = field(default_factory=list)
    troubles: list[Exception | bytes] = field(default_factory=list)
    gate: asyncio.Event | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def hold(self, asset: Asset, renew: RenewUrl) -> AsyncIterator[Path]:
        self.asked.append(asset.url)
        self.begun.set()
        if self.gate:
            await self.gate.wait()
        trouble = self.troubles.pop(0) if self.troubles else asset.url.encode()
        if isinstance(trouble, Exception):
            raise trouble
        path = self.folder / f"download-{len(self.asked)}"
        path.write_bytes(trouble)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


@pytest.fixture
def web(tmp_path: Path) -> Web:
    folder = tmp_path / "downloads"
    folder.mkdir()
    return Web(folder)


def a_cache(
    tmp_path: Path, web: Web, max_bytes: int = 1000, endpoint: str = "http://a"
) -> AssetCache:
    return AssetCache(tmp_path / "cache", max_bytes, source=web, endpoint=endpoint)


async def got(cache: AssetCache, content: bytes) -> bytes:
    async with cache.hold(an_asset(content), renew) as path:
        return path.read_bytes()


def kept_in(tmp_path: Path) -> set[bytes]:
    return {path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file()}


async def test_an_asset_is_fetched_once(tmp_path: Path, web: Web) -> None:
    cache = a_cache(tmp_path, web)
    assert [await got(cache, b"cat") for _ in range(3)] == [b"cat"] * 3
    assert web.asked == ["cat"]


async def test_an_empty_asset_is_one_too(tmp_path: Path, web: Web) -> None:
    cache = a_cache(tmp_path, web)
    assert [await got(cache, b"") for _ in range(2)] == [b"", b""]
    assert web.asked == [""]


async def test_another_backend_has_its_own(tmp_path: Path, web: Web) -> None:
    await got(a_cache(tmp_path, web, endpoint="http://a"), b"cat")
    await got(a_cache(tmp_path, web, endpoint="http://b"), b"cat")
    assert web.asked == ["cat", "cat"]


async def test_all_who_want_it_at_once_share_one_fetch(tmp_path: Path, web: Web) -> None:
    cache = a_cache(tmp_path, web)
    web.gate = asyncio.Event()
    wanting = [asyncio.create_task(got(cache, b"cat")) for _ in range(10)]
    await asyncio.sleep(0)
    web.gate.set()
    assert await asyncio.gather(*wanting) == [b"cat"] * 10
    assert web.asked == ["cat"]


async def test_others_go_on_when_the_one_who_fetches_is_cancelled(tmp_path: Path, web: Web) -> None:
    cache = a_cache(tmp_path, web)
    web.gate = asyncio.Event()
    first, second = (asyncio.create_task(got(cache, b"cat")) for _ in range(2))
    await web.begun.wait()
    first.cancel()
    web.gate.set()
    assert await second == b"cat"
    assert first.cancelled()


async def test_a_failure_is_of_the_one_who_had_it(tmp_path: Path, web: Web) -> None:
    """Its lease may be lost while that of the next in line is not."""
    cache = a_cache(tmp_path, web)
    web.troubles = [Unavailable("lost")]
    answers = await asyncio.gather(*(got(cache, b"cat") for _ in range(3)), return_exceptions=True)
    assert sorted(map(str, answers)) == ["b'cat'", "b'cat'", "lost"]


async def test_the_least_recently_used_goes_first(tmp_path: Path, web: Web) -> None:
    cache = a_cache(tmp_path, web, max_bytes=9)
    for content in (b"one", b"two", b"six"):
        await got(cache, content)
    await got(cache, b"one")
    await got(cache, b"ten")
    assert kept_in(tmp_path) == {b"six", b"one", b"ten"}


async def test_what_is_in_use_stays(tmp_path: Path, web: Web) -> None:
    cache = a_cache(tmp_path, web, max_bytes=3)
    async with cache.hold(an_asset(b"one"), renew) as one, cache.hold(an_asset(b"two"), renew):
        assert one.read_bytes() == b"one"
    assert len(kept_in(tmp_path)) == 1


async def test_one_larger_than_the_cache_is_given_out_and_drives_no_other_away(
    tmp_path: Path, web: Web
) -> None:
    cache = a_cache(tmp_path, web, max_bytes=5)
    await got(cache, b"one")
    assert await got(cache, b"much too large") == b"much too large"
    assert kept_in(tmp_path) == {b"one"}


async def test_it_survives_a_restart_in_the_order_of_use(tmp_path: Path, web: Web) -> None:
    cache = a_cache(tmp_path, web)
    for content in (b"one", b"two", b"one"):
        await got(cache, content)
        await asyncio.sleep(0.01)
    restarted = a_cache(tmp_path, web, max_bytes=5)
    assert kept_in(tmp_path) == {b"one"}
    assert await got(restarted, b"one") == b"one"
    assert web.asked == ["one", "two"]


async def test_what_was_damaged_meanwhile_is_fetched_again(tmp_path: Path, web: Web) -> None:
    await got(a_cache(tmp_path, web), b"cat")
    [path] = (path for path in (tmp_path / "cache").rglob("*") if path.is_file())
    path.write_bytes(b"ca")
    assert await got(a_cache(tmp_path, web), b"cat") == b"cat"
    assert web.asked == ["cat", "cat"]


async def test_what_somebody_removed_is_fetched_again(tmp_path: Path, web: Web) -> None:
    cache = a_cache(tmp_path, web)
    await got(cache, b"cat")
    for path in (tmp_path / "cache").rglob("*"):
        if path.is_file():
            path.unlink()
    assert await got(cache, b"cat") == b"cat"


async def test_a_damaged_transfer_is_repeated_once(tmp_path: Path, web: Web) -> None:
    cache = a_cache(tmp_path, web)
    web.troubles = [b"c?t"]
    assert await got(cache, b"cat") == b"cat"
    web.troubles = [b"d?g", b"d?g"]
    with pytest.raises(InvalidInput, match="'input' differs from the stored file"):
        await got(cache, b"dog")
    assert kept_in(tmp_path) == {b"cat"}


async def test_on_a_full_disk_room_is_made(tmp_path: Path, web: Web) -> None:
    cache = a_cache(tmp_path, web)
    await got(cache, b"cat")
    web.troubles = [OSError(errno.ENOSPC, "No space left on device")]
    assert await got(cache, b"dog") == b"dog"
    assert kept_in(tmp_path) == {b"dog"}


async def test_a_disk_that_stays_full_is_told(tmp_path: Path, web: Web) -> None:
    cache = a_cache(tmp_path, web)
    async with cache.hold(an_asset(b"cat"), renew):
        web.troubles = [OSError(errno.ENOSPC, "No space left on device")] * 2
        with pytest.raises(OSError, match="No space left"):
            await got(cache, b"dog")
    assert web.asked == ["cat", "dog"]
    assert kept_in(tmp_path) == {b"cat"}


async def test_without_a_hash_nothing_is_kept(tmp_path: Path, web: Web) -> None:
    cache = a_cache(tmp_path, web)
    for _ in range(2):
        async with cache.hold(an_asset(b"cat", content_hash=None), renew) as path:
            assert path.read_bytes() == b"cat"
    assert web.asked == ["cat", "cat"]
    assert kept_in(tmp_path) == set()


@pytest.mark.parametrize("content_hash", ["", "../../x", "blake3:" + "0" * 64, "A" * 64])
async def test_what_is_no_hash_is_refused(tmp_path: Path, web: Web, content_hash: str) -> None:
    cache = a_cache(tmp_path, web)
    with pytest.raises(InvalidInput, match="64 hexadecimal digits"):
        async with cache.hold(an_asset(b"cat", content_hash=content_hash), renew):
            pass


async def test_drafts_of_a_killed_process_are_cleared(tmp_path: Path, web: Web) -> None:
    a_cache(tmp_path, web)
    (tmp_path / "cache" / "incoming" / "draft").write_bytes(b"half")
    a_cache(tmp_path, web)
    assert kept_in(tmp_path) == set()


async def test_downloads_may_lie_on_another_file_system(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def across(source: Path, target: Path) -> None:
        if "downloads" in source.parts:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        replace(source, target)

    monkeypatch.setattr(os, "replace", across)
    assert await got(a_cache(tmp_path, web), b"cat") == b"cat"
    assert kept_in(tmp_path) == {b"cat"}
