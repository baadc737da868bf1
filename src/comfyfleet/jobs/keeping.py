"""Documents that are asked for again and again, kept at hand."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

DOCUMENTS_KEPT_MAX = 64


class Documents:
    """The few documents that are asked for again and again; they never change under their key."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Mapping[str, Any]] = OrderedDict()

    async def get(
        self, key: str, read: Callable[[], Awaitable[Mapping[str, Any]]]
    ) -> Mapping[str, Any]:
        if key not in self._kept:
            self._kept[key] = await read()
            if len(self._kept) > DOCUMENTS_KEPT_MAX:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]
