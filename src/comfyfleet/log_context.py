"""Ids that are bound to the current task. Every log entry that is written while they are bound
contains them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_ids: ContextVar[Mapping[str, Any]] = ContextVar("comfyfleet_ids", default={})  # noqa: B039  never changed


@contextmanager
def bind_ids(**ids: Any) -> Iterator[None]:
    """Binds ids inside the block: `with bind_ids(dispatch_id=12): …`"""
    before = _ids.set({**_ids.get(), **ids})
    try:
        yield
    finally:
        _ids.reset(before)


def current_ids() -> Mapping[str, Any]:
    return _ids.get()
