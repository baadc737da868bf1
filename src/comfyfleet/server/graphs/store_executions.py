"""SQL for writing and reading a run with its executions. Large runs are processed in parts, so that
they don't block the event loop."""

import asyncio
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import islice
from typing import Any

from sqlalchemy import bindparam, select, tuple_, update

from comfyfleet.server.db import Tx
from comfyfleet.server.db.dialect import is_sqlite, upsert_each
from comfyfleet.server.db.driver import ONE_BY_ONE_MAX, PreparedStatement
from comfyfleet.server.db.tenant_tables import graph_executions, graph_runs
from comfyfleet.server.graphs.run import ExecutionKey, ExecutionRecord, GraphRunState, RunRow
from comfyfleet.server.graphs.snapshot import dump_cut, dump_record, load_record

ROWS_PER_STATEMENT_MAX = 250
ROWS_PER_PAGE = 500

_WRITTEN = (
    "status", "revision", "tokens", "max_tokens", "error", "outputs", "changed_at", "ended_at",
    "deadline_at", "paused_at", "cut",
)  # fmt: skip
_WRITE_HEAD = PreparedStatement(
    lambda tx: (
        update(graph_runs)
        .where(graph_runs.c.id == bindparam("of_run"))
        .values({name: bindparam(f"new_{name}") for name in _WRITTEN})
    )
)


def _upsert(tx: Tx) -> Any:
    return upsert_each(tx, graph_executions, key=("run_id", "node", "at"))


_WRITE_RECORD = PreparedStatement(_upsert, columns=graph_executions.c.keys())


async def write_run(
    tx: Tx,
    head: RunRow,
    run: GraphRunState,
    changed: Iterable[ExecutionKey],
    *,
    revision: int,
    now: datetime,
) -> None:
    """Writes the run's row and its new or changed records."""
    values = {
        "status": run.status,
        "revision": revision,
        "tokens": run.tokens,
        "max_tokens": run.max_tokens,
        "error": run.error._asdict() if run.error else None,
        "outputs": None if run.outputs is None else dict(run.outputs),
        "changed_at": now,
        "ended_at": now if run.status.is_over else None,
        "deadline_at": run.deadline_at,
        "paused_at": run.paused_at,
        "cut": dump_cut(run),
    }
    new = {f"new_{name}": value for name, value in values.items()}
    await _WRITE_HEAD.tuples(tx, {**new, "of_run": head.id})
    for part in _parts(_row(head, key, run.record(key)) for key in changed):
        if len(part) == 1 or (is_sqlite(tx) and len(part) <= ONE_BY_ONE_MAX):
            for row in part:
                await _WRITE_RECORD.tuples(tx, row)
        else:
            await tx.execute(_upsert(tx), part)
        # Lets other tasks run between the statements, each of which may take some milliseconds.
        await asyncio.sleep(0)


def _row(head: RunRow, key: ExecutionKey, record: ExecutionRecord) -> dict[str, Any]:
    return {
        "run_id": head.id,
        "node": key.node,
        "at": ",".join(map(str, key.at)),
        "tenant_id": head.tenant_id,
        "record": dump_record(record),
    }


def _parts(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    remaining = iter(rows)
    while part := list(islice(remaining, ROWS_PER_STATEMENT_MAX)):
        yield part


async def read_records(tx: Tx, head: RunRow) -> dict[ExecutionKey, ExecutionRecord]:
    """Reads all records of a run, page by page. The run may change between two pages, so the caller
    must check its revision afterwards."""
    columns = (graph_executions.c.node, graph_executions.c.at, graph_executions.c.record)
    key = tuple_(graph_executions.c.node, graph_executions.c.at)
    query = (
        select(*columns)
        .where(graph_executions.c.run_id == head.id, graph_executions.c.tenant_id == head.tenant_id)
        .order_by(graph_executions.c.node, graph_executions.c.at)
        .limit(ROWS_PER_PAGE)
    )
    records: dict[ExecutionKey, ExecutionRecord] = {}
    page = (await tx.execute(query)).all()
    while page:
        records |= {ExecutionKey(row.node, _index(row.at)): load_record(row.record) for row in page}
        if len(page) < ROWS_PER_PAGE:
            break
        await asyncio.sleep(0)
        last = page[-1]
        page = (await tx.execute(query.where(key > (last.node, last.at)))).all()
    return records


def _index(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()
