"""`comfyfleet serve --processes 4`: all processes share the work, whatever happened to one of them."""

import asyncio
import logging
import math
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.server.deployment import Deployment
from tests.support.server.polling_load import (
    PollingLoad,
    children_of,
    connections_of,
    cpu_seconds,
    register_workers,
)

logger = logging.getLogger(__name__)
pytestmark = pytest.mark.slow
PROCESSES, WORKERS, CLIENTS = 4, 96, 24
BUSIEST_MAX = 1.5
MEASURED_CALLS = 1500
SECONDS_MAX = 300
HIGH = {"calls_per_second": "1000000", "calls_at_once": "1000000", "max_fleet_workers": "1000"}


@dataclass(frozen=True)
class Shares:
    """How much of the load each process has: connections, and CPU seconds under load."""

    connections: list[int]
    cpu: list[float]

    @property
    def busiest(self) -> float:
        """The CPU of the busiest process as a multiple of the mean."""
        return max(self.cpu) * len(self.cpu) / sum(self.cpu)


@dataclass(frozen=True)
class Balanced:
    deployment: Deployment
    load: PollingLoad

    @property
    def parent(self) -> int:
        return self.deployment.control.pid

    def children(self) -> list[int]:
        return children_of(self.parent)

    def connections(self) -> list[int]:
        port = int(self.deployment.url.rpartition(":")[2])
        return list(connections_of(self.children(), port).values())

    async def shares(self) -> Shares:
        children = self.children()
        assert len(children) == PROCESSES
        before = [cpu_seconds(pid) for pid in children]
        await self.load.calls_done(MEASURED_CALLS)
        cpu = [cpu_seconds(pid) - was for pid, was in zip(children, before, strict=True)]
        return Shares(self.connections(), cpu)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS_MAX):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def all_have_their_share(self) -> None:
        """Waits until no process has more than 1.25 times its share of the connections, rounded up."""
        most = math.ceil((WORKERS + CLIENTS) / PROCESSES * 1.25) + 1

        def is_balanced() -> bool:
            counts = self.connections()
            is_whole = len(counts) == PROCESSES and sum(counts) >= WORKERS + CLIENTS
            return is_whole and max(counts) <= most and min(counts) > 0

        await self.until(is_balanced)


@pytest.fixture
async def balanced(tmp_path: Path) -> AsyncIterator[Balanced]:
    async with Deployment(tmp_path, None, **HIGH) as deployment:
        await asyncio.to_thread(deployment.start_control, "--processes", str(PROCESSES))
        secret = deployment.admin.create_fleet("gpus")
        tenant = deployment.admin.ask("POST", "/api/admin/tenants", json={"name": "acme"})
        keys = await register_workers(deployment.url, secret, "gpus", WORKERS)
        async with PollingLoad(deployment.url, keys, tenant["key"], CLIENTS) as load:
            yield Balanced(deployment, load)


async def test_all_processes_share_the_load_after_start_reload_and_a_kill(
    balanced: Balanced,
) -> None:
    measured = {}
    measured["start"] = await balanced.shares()
    old = set(balanced.children())
    os.kill(balanced.parent, signal.SIGHUP)
    await balanced.until(lambda: not old & set(balanced.children()))
    await balanced.all_have_their_share()
    measured["reload"] = await balanced.shares()
    assert not balanced.load.failed, "no call fails during a reload"
    killed = balanced.children()[0]
    os.kill(killed, signal.SIGKILL)
    await balanced.until(lambda: killed not in balanced.children())
    await balanced.all_have_their_share()
    measured["kill"] = await balanced.shares()
    for name, shares in measured.items():
        logger.warning("after %s: %s, busiest %.2f", name, shares, shares.busiest)
    assert max(shares.busiest for shares in measured.values()) <= BUSIEST_MAX, measured
