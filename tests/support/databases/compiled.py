"""Shares SQLAlchemy's compiled statements between all databases of a kind.

Each test opens its own databases, and each would compile every statement again: a fifth of the time
of a test over HTTP.
"""

from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.util import LRUCache

from comfyfleet.server.db import database as product

COMPILED_MAX = 4000
# By the name of the driver: what a first connection has made ready.
_dialects: dict[str, Dialect] = {}
# A statement is found by its dialect too, so those of both kinds may lie here.
_compiled: LRUCache[Any, Any] = LRUCache(COMPILED_MAX)


def share_compiled() -> None:
    """Applies to all databases that this process opens from now on."""
    product.create_async_engine = _create_engine  # type: ignore[attr-defined]


def _create_engine(url: Any, **options: Any) -> AsyncEngine:
    created = create_async_engine(url, execution_options={"compiled_cache": _compiled}, **options)
    engine = created.sync_engine
    kind = f"{engine.dialect.name}+{engine.dialect.driver}"
    if kind in _dialects:
        engine.dialect = _dialects[kind]
    else:
        event.listen(engine, "connect", lambda *_: _dialects.setdefault(kind, engine.dialect))
    return created
