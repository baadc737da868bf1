"""Seconds of finished runs by fleet, model and workflow: what switches of models cost is read from."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import delete, select, tuple_

from comfyfleet.db import Tx
from comfyfleet.db.central import model_switches as m
from comfyfleet.db.dialect import insert_if_new, locked, upsert_each
from comfyfleet.dispatch.switch_costs import Run, RunKind, Samples

KEY = ("fleet_id", "model_key", "workflow_id")
KINDS_READ_MAX = 10_000
_KEY = tuple(m.c[name] for name in KEY)
_SAMPLES = (*_KEY, m.c.stayed, m.c.switched)


async def add_runs(tx: Tx, runs: Sequence[Run], *, now: datetime) -> None:
    """Locked in one order: control planes that tell at the same moment lose nothing of each other."""
    by_kind: dict[RunKind, list[Run]] = defaultdict(list)
    for run in runs:
        by_kind[run.kind].append(run)
    kinds = sorted(by_kind)
    if not kinds:
        return
    empty = {"stayed": [], "switched": [], "updated_at": now}
    await tx.execute(insert_if_new(tx, m), [{**kind._asdict(), **empty} for kind in kinds])
    query = select(*_SAMPLES).where(tuple_(*_KEY).in_(kinds)).order_by(*_KEY)
    found = _samples(await tx.execute(locked(tx, query)))
    for kind in kinds:
        for run in by_kind[kind]:
            found[kind] = found[kind].with_run(run.change, round(run.seconds, 3))
    rows = [
        {
            **kind._asdict(),
            "stayed": list(found[kind].stayed),
            "switched": list(found[kind].switched),
            "updated_at": now,
        }
        for kind in kinds
    ]
    await tx.execute(upsert_each(tx, m, key=KEY), rows)


async def all_samples(tx: Tx, *, fleet_id: int | None = None) -> dict[RunKind, Samples]:
    """Those that runs were last added to, if there are too many."""
    query = select(*_SAMPLES).order_by(m.c.updated_at.desc()).limit(KINDS_READ_MAX)
    if fleet_id is not None:
        query = query.where(m.c.fleet_id == fleet_id)
    return _samples(await tx.execute(query))


async def newest_change(tx: Tx) -> datetime | None:
    found: datetime | None = await tx.scalar(
        select(m.c.updated_at).order_by(m.c.updated_at.desc()).limit(1)
    )
    return found


async def forget(tx: Tx, *, before: datetime) -> None:
    await tx.execute(delete(m).where(m.c.updated_at < before))


def _samples(rows: Iterable[Any]) -> dict[RunKind, Samples]:
    return {
        RunKind(fleet_id, model_key, workflow_id): Samples(tuple(stayed), tuple(switched))
        for fleet_id, model_key, workflow_id, stayed, switched in rows
    }
