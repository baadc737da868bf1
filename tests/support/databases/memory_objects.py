"""An object store in memory, for tests that only store documents."""

from comfyfleet.errors import NotFound


class MemoryObjects:
    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    async def put(self, key: str, data: bytes, content_type: str) -> None:
        self.kept[key] = data

    async def get(self, key: str) -> bytes:
        try:
            return self.kept[key]
        except KeyError:
            raise NotFound(f"object {key!r} was not found") from None
