"""What decides whether a worker gets a job: read at every poll, so in one statement of one row."""

from typing import Any

from sqlalchemy import ARRAY, BigInteger, bindparam, func, select, text

from comfyfleet.db import Tx
from comfyfleet.db.central import (
    control_state,
    dispatches,
    fleets,
    worker_workflows,
    workers,
    workflow_fleets,
    workflows,
)
from comfyfleet.db.dialect import is_sqlite
from comfyfleet.db.state import MAINTENANCE
from comfyfleet.db.statement import Statement
from comfyfleet.db.types import Json
from comfyfleet.fleets.model import Assigned, Standing, Worker
from comfyfleet.fleets.store.workers import COLUMNS, has_key, worker_of

_ASSIGNED = (
    workflows.c.id,
    workflows.c.slug,
    workflows.c.required_capabilities,
    workflows.c.is_active,
    workflows.c.is_paused,
    workflows.c.version,
    workflows.c.is_open,
)


async def of_worker(tx: Tx, fleet_id: int, worker_id: str) -> Standing:
    found = await _OF_WORKER.tuples(tx, {"of_fleet": fleet_id, "of_worker": worker_id})
    return _standing(*found[0])


async def by_key_hash(tx: Tx, key_hash: str) -> tuple[Worker | None, Standing]:
    """The worker, too: of its key, or of the one that it was told to use."""
    found = await _BY_KEY_HASH.tuples(tx, {"of_key": key_hash})
    if not found:
        return None, _standing([], False, None)
    *cells, workflow_ids, held, maintenance, assigned = found[0]
    names = _BY_KEY_HASH.compiled(tx).columns
    worker = worker_of(dict(zip(names, cells, strict=False)), workflow_ids)
    return worker, _standing(held, maintenance, assigned)


def _columns(tx: Tx, fleet_id: Any, worker_id: Any) -> tuple[Any, ...]:
    """In the order in which `_standing` takes them."""
    held = _ids(
        tx,
        dispatches.c.id,
        dispatches.c.worker_id == worker_id,
        text("status = 'leased'"),  # as the index says it
    )
    state = select(control_state.c.value).where(control_state.c.name == MAINTENANCE)
    maintenance = state.scalar_subquery().label("maintenance")
    return held.label("held"), maintenance, _assigned(tx, fleet_id).label("assigned")


def _ids(tx: Tx, column: Any, *conditions: Any) -> Any:
    """All of a column, as one value."""
    if is_sqlite(tx):
        all_of = select(func.json_group_array(column, type_=Json)).where(*conditions)
        return all_of.scalar_subquery()
    return func.array(select(column).where(*conditions).scalar_subquery(), type_=ARRAY(BigInteger))


def _assigned(tx: Tx, fleet_id: Any) -> Any:
    """A list for each workflow of the fleet: rows would repeat the worker for each."""
    if is_sqlite(tx):
        cells = [func.json(each) if each.type is Json else each for each in _ASSIGNED]
        lists = func.json_group_array(func.json_array(*cells), type_=Json)
    else:
        lists = func.json_agg(func.json_build_array(*_ASSIGNED), type_=Json)
    return (
        select(lists)
        .select_from(workflows)
        .join(workflow_fleets, workflow_fleets.c.workflow_id == workflows.c.id)
        .where(workflow_fleets.c.fleet_id == fleet_id)
        .scalar_subquery()
    )


def _standing(held: list[int], maintenance: Any, assigned: list[list[Any]] | None) -> Standing:
    return Standing(
        assigned=sorted(
            (
                Assigned(
                    workflow_id,
                    slug,
                    frozenset(needed),
                    bool(active),
                    bool(paused),
                    version,
                    bool(own),
                )
                for workflow_id, slug, needed, active, paused, version, own in assigned or ()
            ),
            key=lambda each: each.slug,
        ),
        held=tuple(sorted(held)),
        in_maintenance=bool(maintenance),
    )


_OF_WORKER = Statement(
    lambda tx: select(*_columns(tx, bindparam("of_fleet"), bindparam("of_worker")))
)


def _with_worker(tx: Tx) -> Any:
    only = _ids(
        tx, worker_workflows.c.workflow_id, worker_workflows.c.worker_row_id == workers.c.id
    )
    return (
        select(
            *COLUMNS,
            only.label("workflow_ids"),
            *_columns(tx, workers.c.fleet_id, workers.c.worker_id),
        )
        .select_from(workers)
        .join(fleets, fleets.c.id == workers.c.fleet_id)
        .where(has_key())
    )


_BY_KEY_HASH = Statement(_with_worker)
