"""Ids bound to the current task; every line logged meanwhile carries them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_ids: ContextVar[Mapping[str, Any]] = ContextVar("comfyfleet_ids", default={})  # noqa: B039  never changed


@contextmanager
def bind_ids(**ids: Any) -> Iterator[None]:
    """`with bound(dispatch_id=12): …`"""
    before = _ids.set({**_ids.get(), **ids})
    try:
        yield
    finally:
        _ids.reset(before)


def current_ids() -> Mapping[str, Any]:
    return _ids.get()
