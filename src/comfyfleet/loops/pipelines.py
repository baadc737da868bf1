"""The sweeps that carry pipeline runs on: ended jobs become candidates, what is next is submitted.

Both are woken by what happens; their intervals are upper bounds.
"""

import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TypeAlias

from comfyfleet.db import Database
from comfyfleet.db.outages import level_of
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import FleetError
from comfyfleet.loops.sweeping import Sweep
from comfyfleet.pipelines.acting import RUN_KIND
from comfyfleet.pipelines.collecting import collect_ended
from comfyfleet.pipelines.journal import tell_audit
from comfyfleet.pipelines.making import submit_due
from comfyfleet.pipelines.upkeep import fail_overdue, remove_old_files
from comfyfleet.plane import Plane

log = logging.getLogger(__name__)
RESULTS, SUBMITS, UPKEEP, RETENTION = (
    "pipeline_results",
    "pipeline_submits",
    "pipeline_upkeep",
    "pipeline_retention",
)
RETENTION_SECONDS = 3600.0
Pass: TypeAlias = Callable[[Sides, Database], Awaitable[object]]


def pipeline_sweeps(plane: Plane) -> Iterator[Sweep]:
    settings = plane.settings
    submit, poll = settings.comfyui_submit_interval, settings.comfyui_poll_interval
    yield Sweep(
        RESULTS,
        partial(_in_all_pools, plane, carry_on),
        poll,
        woken_by=partial(plane.sides.news.hear_runs, RUN_KIND),
    )
    yield Sweep(SUBMITS, partial(_in_all_pools, plane, submit_due), submit)
    yield Sweep(UPKEEP, partial(_in_all_pools, plane, keep_up), poll)
    yield Sweep(RETENTION, partial(_in_all_pools, plane, remove_old_files), RETENTION_SECONDS)


async def carry_on(sides: Sides, pool: Database) -> bool:
    """What has ended makes room for what is next."""
    has_more = await collect_ended(sides, pool)
    return await submit_due(sides, pool) or has_more


async def keep_up(sides: Sides, pool: Database) -> bool:
    await fail_overdue(sides, pool)
    return await tell_audit(sides, pool)


async def _in_all_pools(plane: Plane, act: Pass) -> bool:
    """True: there is more. A pool that is down holds up no other."""
    has_more = False
    for name, pool in plane.pools.items():
        try:
            has_more |= await act(plane.sides, pool) is True
        except FleetError as error:
            log.log(level_of(error), "pipelines of pool %s were left out: %s", name, error.message)
        except Exception:
            log.exception("pipelines of pool %s were left out", name)
    return has_more
