"""A worker for whom nothing comes is there all the same."""

import asyncio
from datetime import timedelta
from pathlib import Path

from tests.support.databases.factory import Databases
from tests.support.jobs.graphs import GraphSetup, graph_setup_on

from comfyfleet.server.fleets import service as fleets

OFFLINE_AFTER = timedelta(seconds=3)


async def unseen_for(graph_setup: GraphSetup) -> timedelta:
    async with graph_setup.plane.central.read() as tx:
        worker = await fleets.get_worker(tx, "w1")
    return graph_setup.plane.clock() - worker.last_seen_at


async def test_whoever_waits_for_a_job_does_not_pass_for_offline(
    databases: Databases, tmp_path: Path
) -> None:
    seconds = int(OFFLINE_AFTER.total_seconds())
    async with graph_setup_on(databases, tmp_path, offline_after_seconds=seconds) as graph_setup:
        waiting = asyncio.create_task(graph_setup.workers["w1"].poll(wait_seconds=2 * seconds))
        longest = timedelta()
        while not waiting.done():
            longest = max(longest, await unseen_for(graph_setup))
            await asyncio.sleep(0.05)
        assert longest < OFFLINE_AFTER
