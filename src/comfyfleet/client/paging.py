"""Lists of any length, page by page."""

from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeVar

from comfyfleet.client.answers import parsed
from comfyfleet.client.calls import Call, Calls
from comfyfleet.client.model import Page

PAGE = 100
SomePage = TypeVar("SomePage", bound=Page)


async def pages(
    calls: Calls, path: str, kind: type[SomePage], query: Mapping[str, Any], *, by: str = "before"
) -> AsyncIterator[SomePage]:
    """Each names where the next one begins; the last names nothing."""
    begin = None
    while True:
        page = parsed(kind, await calls.ask(Call("GET", path, query={**query, by: begin})))
        yield page
        begin = page.next
        if begin is None:
            return
