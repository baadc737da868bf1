"""Thumbnails for lists and galleries. They are generated from the stored image at the first
request, and stored next to it.

They aren't separate files: no row refers to them, no quota counts them, and each is deleted with
its image. A user who may see the image also gets a signed URL of the thumbnail. If there is no
thumbnail, that URL returns the whole image."""

import asyncio
import logging
from collections import OrderedDict
from importlib.util import find_spec

from comfyfleet.clock import Clock
from comfyfleet.errors import NotFound, TooManyCalls, Unavailable, is_logged
from comfyfleet.server.media.model import File, small_key
from comfyfleet.server.media.picture_processes import PictureProcesses
from comfyfleet.server.storage import ObjectStore
from comfyfleet.server.storage.local import UrlGrant, UrlSigner
from comfyfleet.server.storage.outage import system_scratch
from comfyfleet.transport.files import open_file

logger = logging.getLogger(__name__)
SMALL_PATH = "/api/small"
SMALL_TYPE = "image/webp"
# part of the signed text, so that a thumbnail's URL isn't valid for the whole image
METHOD = "SMALL"
MODULE = "comfyfleet.protocol.small_picture"
PICTURE_TYPES = ("image/png", "image/jpeg", "image/webp")
# Images below the minimum need no thumbnail. Reading images above the maximum costs more than a
# thumbnail saves.
PICTURE_BYTES_MIN = 64 * 1024
PICTURE_BYTES_MAX = 64 * 1024**2
WAITING_MAX = 200
# After this time, the whole image is shown. The next request gets the thumbnail.
WAIT_SECONDS_MAX = 10.0
REFUSED_KEPT_MAX = 10_000
# A list returns the same URL during this time, so that browsers don't load the image again.
SAME_URL_SECONDS = 600


class SmallPictures:
    def __init__(
        self,
        store: ObjectStore,
        *,
        public_url: str,
        secret: bytes,
        pixels_max: int,
        processes: PictureProcesses,
        clock: Clock,
    ) -> None:
        self._store = store
        self._public_url = public_url
        self._signer = UrlSigner(secret)
        self._pixels_max = pixels_max
        self._clock = clock
        self._has_pillow = find_spec("PIL") is not None
        self._processes = processes
        self._making: dict[str, asyncio.Task[bytes | None]] = {}
        # keys of images that can't have a thumbnail
        self._refused: OrderedDict[str, None] = OrderedDict()

    def url_of(self, file: File, *, seconds: int) -> str | None:
        """Returns a URL of the thumbnail. Returns None if the file isn't an image, or needs no
        thumbnail."""
        if not self._has_pillow or file.mime_type not in PICTURE_TYPES:
            return None
        if not PICTURE_BYTES_MIN < (file.size or 0) <= PICTURE_BYTES_MAX:
            return None
        until = int(self._clock().timestamp()) + seconds
        expires = until - until % -SAME_URL_SECONDS
        grant = UrlGrant(METHOD, file.path, expires)
        return self._signer.url(self._public_url, grant, path=SMALL_PATH)

    def require_granted(self, key: str, expires: str, signature: str) -> None:
        """Raises Forbidden unless the URL's signature is correct and still valid."""
        query = {"expires": expires, "signature": signature}
        self._signer.granted(METHOD, key, query, now=self._clock().timestamp())

    async def read(self, key: str) -> bytes | None:
        """Returns the thumbnail of an object. Returns None if only the whole image can be shown
        now."""
        try:
            return await self._store.get(small_key(key))
        except NotFound:
            pass
        if key in self._refused or not self._has_pillow:
            return None
        making = self._making.get(key)
        if making is None:
            if len(self._making) >= WAITING_MAX:
                return None
            making = asyncio.create_task(self._make(key), name=f"small picture of {key}")
            self._making[key] = making
            making.add_done_callback(lambda _: self._making.pop(key, None))
        done, _ = await asyncio.wait({making}, timeout=WAIT_SECONDS_MAX)
        return making.result() if done and not making.cancelled() else None

    async def aclose(self) -> None:
        waiting = list(self._making.values())
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    async def _make(self, key: str) -> bytes | None:
        try:
            async with self._processes.turn(tenant_of(key)):
                return await self._make_and_store(key)
        except (NotFound, TooManyCalls, Unavailable, OSError) as error:
            level = logging.DEBUG if is_logged(error) else logging.INFO
            logger.log(level, "no thumbnail was created for %s: %s", key, error)
            return None

    async def _make_and_store(self, key: str) -> bytes | None:
        facts = await self._store.head(key)
        if facts is None or facts.size > PICTURE_BYTES_MAX:
            return None
        with system_scratch().opened() as folder:
            source, target = folder / "picture", folder / "small"
            with await open_file(source, "wb") as file:
                async for chunk in self._store.chunks(key):
                    await asyncio.to_thread(file.write, chunk)
            words = str(source), str(target), str(self._pixels_max)
            is_made = await self._processes.run(MODULE, *words) is not None and target.is_file()
            content = await asyncio.to_thread(target.read_bytes) if is_made else None
        if content is None or len(content) >= facts.size:
            self._refuse(key)
            return None
        await self._store.put(small_key(key), content, SMALL_TYPE)
        if await self._store.head(key) is None:  # it was deleted in the meantime
            await self._store.delete(small_key(key))
        return content

    def _refuse(self, key: str) -> None:
        self._refused[key] = None
        if len(self._refused) > REFUSED_KEPT_MAX:
            self._refused.popitem(last=False)


def tenant_of(key: str) -> str:
    """Returns the tenant's id from a key that begins with `tenants/ID/`, otherwise the key
    itself."""
    parts = key.split("/", 2)
    return parts[1] if len(parts) > 1 else key
