"""Small pictures for lists and galleries: made when somebody first looks, from the stored picture, and kept beside it.

They are no files of their own: no row names them, no quota counts them, and each goes with its picture. Whoever may get
the picture gets a signed URL of the small one, too. Where none can be made, that URL leads to the whole picture.
"""

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
METHOD = "SMALL"  # in what is signed: a URL of a small picture is none of the whole one
MODULE = "comfyfleet.protocol.small_picture"
PICTURE_TYPES = ("image/png", "image/jpeg", "image/webp")
# Smaller ones are small as they are; larger ones cost more to read than a gallery saves.
PICTURE_BYTES_MIN = 64 * 1024
PICTURE_BYTES_MAX = 64 * 1024**2
WAITING_MAX = 200
# Then the whole picture is shown, and the small one the next time.
WAIT_SECONDS_MAX = 10.0
REFUSED_KEPT_MAX = 10_000
# A list that is read again names the same URL for so long, and a browser does not load the picture again.
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
        self._refused: OrderedDict[str, None] = OrderedDict()  # keys of which there can be none

    def url_of(self, file: File, *, seconds: int) -> str | None:
        """A URL of the small picture; None if the file is no picture, or small as it is."""
        if not self._has_pillow or file.mime_type not in PICTURE_TYPES:
            return None
        if not PICTURE_BYTES_MIN < (file.size or 0) <= PICTURE_BYTES_MAX:
            return None
        until = int(self._clock().timestamp()) + seconds
        expires = until - until % -SAME_URL_SECONDS
        grant = UrlGrant(METHOD, file.path, expires)
        return self._signer.url(self._public_url, grant, path=SMALL_PATH)

    def require_granted(self, key: str, expires: str, signature: str) -> None:
        """Raises Forbidden unless we signed the URL and it is still valid."""
        query = {"expires": expires, "signature": signature}
        self._signer.granted(METHOD, key, query, now=self._clock().timestamp())

    async def read(self, key: str) -> bytes | None:
        """The small picture of an object; None if only the whole one can be shown now."""
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
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    async def _make(self, key: str) -> bytes | None:
        try:
            async with self._processes.turn(tenant_of(key)):
                return await self._make_and_store(key)
        except (NotFound, TooManyCalls, Unavailable, OSError) as error:
            level = logging.DEBUG if is_logged(error) else logging.INFO
            logger.log(level, "there is no small picture of %s: %s", key, error)
            return None

    async def _make_and_store(self, key: str) -> bytes | None:
        facts = await self._store.head(key)
        if facts is None or facts.size > PICTURE_BYTES_MAX:
            return None
        with system_scratch().opened() as folder:
            source, made = folder / "picture", folder / "small"
            with await open_file(source, "wb") as file:
                async for chunk in self._store.chunks(key):
                    await asyncio.to_thread(file.write, chunk)
            words = str(source), str(made), str(self._pixels_max)
            is_made = await self._processes.run(MODULE, *words) is not None and made.is_file()
            content = await asyncio.to_thread(made.read_bytes) if is_made else None
        if content is None or len(content) >= facts.size:
            self._refuse(key)
            return None
        await self._store.put(small_key(key), content, SMALL_TYPE)
        if await self._store.head(key) is None:  # it was deleted meanwhile
            await self._store.delete(small_key(key))
        return content

    def _refuse(self, key: str) -> None:
        self._refused[key] = None
        if len(self._refused) > REFUSED_KEPT_MAX:
            self._refused.popitem(last=False)


def tenant_of(key: str) -> str:
    """Returns the tenant's id from a key that begins with `tenants/ID/`; else the key itself."""
    parts = key.split("/", 2)
    return parts[1] if len(parts) > 1 else key
