"""The sweeps that keep graph runs going: words of ended jobs, and a look at everything now and then."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

from comfyfleet.db import Database
from comfyfleet.db.outages import level_of
from comfyfleet.graphs.advancing import KIND, Graphs
from comfyfleet.graphs.going import hear, judge_all
from comfyfleet.kernel.errors import FleetError
from comfyfleet.loops.sweeping import Sweep
from comfyfleet.plane import Plane

log = logging.getLogger(__name__)
# Another control plane may have been told of the end of a job; here we are woken.
WORDS_SECONDS = 1.0


def graph_sweeps(plane: Plane) -> Iterator[Sweep]:
    yield Sweep(
        "graph_words",
        partial(over_pools, plane, hear),
        min(WORDS_SECONDS, plane.settings.sweep_seconds),
        in_turn=False,
        woken_by=partial(plane.sides.news.hear_runs, KIND),
    )
    yield Sweep("graphs", partial(over_pools, plane, judge_all), plane.settings.sweep_seconds)


async def over_pools(plane: Plane, act: Callable[[Graphs, Database], Awaitable[None]]) -> None:
    """All pools side by side: one that is down, or slow, holds up no other."""
    await asyncio.gather(*(_in_pool(plane, name, pool, act) for name, pool in plane.pools.items()))


async def _in_pool(
    plane: Plane,
    name: str,
    pool: Database,
    act: Callable[[Graphs, Database], Awaitable[None]],
) -> None:
    try:
        await act(plane.graphs, pool)
    except FleetError as error:
        log.log(level_of(error), "graph runs of pool %s wait: %s", name, error.message)
    except Exception:
        log.exception("graph runs of pool %s were left out", name)
