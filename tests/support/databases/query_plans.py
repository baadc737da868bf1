"""Records the statements of a transaction and explains their query plans."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event

from comfyfleet.server.db import Tx


@contextmanager
def statements_of(tx: Tx) -> Iterator[list[tuple[str, Any]]]:
    """(text, values) of each statement that this transaction sends meanwhile."""
    sent: list[tuple[str, Any]] = []
    connection = tx.sync_connection

    def note(_connection: Any, _cursor: Any, statement: str, given: Any, *_rest: Any) -> None:
        sent.append((statement, given))

    event.listen(connection, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(connection, "before_cursor_execute", note)
    assert sent
