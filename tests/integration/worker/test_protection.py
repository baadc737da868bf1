"""Scale-in protection, against a simulated AWS."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.workers.aws import Aws
from tests.support.workers.metadata_server import MetadataServer, serving_metadata

from comfyfleet.worker.aws import InstanceMetadata, ScaleInProtection

WAIT_SECONDS_MAX = 10


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    with serving_metadata(placement__region="eu-central-1") as found:
        yield found


@asynccontextmanager
async def protecting(
    server: MetadataServer, folder: Path, *, idle_seconds: float = 0.2
) -> AsyncIterator[tuple[ScaleInProtection, "asyncio.Task[None]"]]:
    metadata = InstanceMetadata(server.url)
    protection = ScaleInProtection(
        metadata, os.environ, idle_seconds=idle_seconds, retry_seconds=0.05, shared=folder
    )
    running = asyncio.create_task(protection.run())
    try:
        yield protection, running
    finally:
        running.cancel()
        await asyncio.wait([running])
        await protection.close()
        await metadata.aclose()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(50 * WAIT_SECONDS_MAX):
        if await asyncio.to_thread(condition):
            return
        await asyncio.sleep(0.02)
    raise TimeoutError


async def test_it_is_on_while_busy_and_off_when_idle(
    aws: Aws, server: MetadataServer, tmp_path: Path
) -> None:
    instance, other = aws.scale_out(instances=2)
    server.values["instance-id"] = instance
    async with protecting(server, tmp_path) as (protection, _):
        protection.busy()
        await until(lambda: aws.is_protected(instance))
        assert not aws.is_protected(other)
        protection.idle()
        await until(lambda: not aws.is_protected(instance))


async def test_a_short_pause_between_jobs_is_not_told(
    aws: Aws, server: MetadataServer, tmp_path: Path
) -> None:
    (instance,) = aws.scale_out()
    server.values["instance-id"] = instance
    async with protecting(server, tmp_path, idle_seconds=30) as (protection, _):
        protection.busy()
        await until(lambda: aws.is_protected(instance))
        for _ in range(20):
            protection.idle()
            await asyncio.sleep(0.01)
            protection.busy()
        protection.idle()
        await asyncio.sleep(0.1)
        assert aws.is_protected(instance)


async def test_a_worker_that_leaves_lets_its_machine_go(
    aws: Aws, server: MetadataServer, tmp_path: Path
) -> None:
    (instance,) = aws.scale_out()
    server.values["instance-id"] = instance
    async with protecting(server, tmp_path, idle_seconds=30) as (protection, _):
        protection.busy()
        await until(lambda: aws.is_protected(instance))
    assert not aws.is_protected(instance)


async def test_an_instance_in_no_group_is_left_alone(
    aws: Aws, server: MetadataServer, tmp_path: Path
) -> None:
    server.values["instance-id"] = "i-0123456789abcdef0"
    async with protecting(server, tmp_path) as (protection, running):
        protection.busy()
        await asyncio.wait_for(running, WAIT_SECONDS_MAX)


async def test_off_ec2_nothing_is_asked(tmp_path: Path) -> None:
    with serving_metadata() as gone:
        pass
    async with protecting(gone, tmp_path) as (protection, running):
        protection.busy()
        await asyncio.wait_for(running, WAIT_SECONDS_MAX)


async def test_what_aws_refused_is_tried_again_until_it_holds(
    aws: Aws,
    server: MetadataServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (instance,) = aws.scale_out()
    server.values["instance-id"] = instance
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING):
        async with protecting(server, tmp_path) as (protection, running):
            protection.busy()
            await until(lambda: len(caplog.records) >= 2)
            assert not running.done()
            monkeypatch.setenv("AWS_ENDPOINT_URL", aws.url)
            await until(lambda: aws.is_protected(instance))


async def test_a_machine_is_let_go_by_the_last_of_its_workers(
    aws: Aws, server: MetadataServer, tmp_path: Path
) -> None:
    (instance,) = aws.scale_out()
    server.values["instance-id"] = instance
    async with protecting(server, tmp_path) as (first, _):
        async with protecting(server, tmp_path) as (second, _):
            first.busy()
            second.busy()
            await until(lambda: aws.is_protected(instance))
            first.idle()
            await asyncio.sleep(0.6)
            assert aws.is_protected(instance), "the second is at work"
        await until(lambda: not aws.is_protected(instance))
        first.busy()
        await until(lambda: aws.is_protected(instance))


async def test_a_neighbour_that_was_killed_holds_nothing(
    aws: Aws, server: MetadataServer, tmp_path: Path
) -> None:
    (instance,) = aws.scale_out()
    server.values["instance-id"] = instance
    left = tmp_path / f"comfyfleet-{instance}" / "1-1.busy"
    left.parent.mkdir()
    left.touch()
    async with protecting(server, tmp_path) as (protection, _):
        protection.busy()
        await until(lambda: aws.is_protected(instance))
        protection.idle()
        await until(lambda: not aws.is_protected(instance))
    assert not left.exists()
