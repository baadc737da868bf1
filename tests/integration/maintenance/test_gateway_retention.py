"""What the gateway stores of a user goes with its files, jobs and tenant, and no sooner."""

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from sqlalchemy import Table, func, select
from tests.support.jobs.fuse import Fuse, ProcessDied, fused
from tests.support.server.control_plane import client_of
from tests.support.server.tenants import PNG, AdjustableClock, TenantData

from comfyfleet.api.values import DeliveredOutput
from comfyfleet.server.db import tenant_tables
from comfyfleet.server.gateway import files as user_files
from comfyfleet.server.jobs import store_prompts, submit
from comfyfleet.server.jobs.model import Job
from comfyfleet.server.maintenance.retention import begin_erasure, erase_pending_tenants
from comfyfleet.server.maintenance.sweeps import expire_all, prune_expired_rows, remove_all_orphans
from comfyfleet.server.media.model import kept_output_key
from comfyfleet.server.run_log import service as run_log
from comfyfleet.server.run_log.model import LoggedRun, RunEnd, RunFiles, UserFile
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants.model import Caller

STEPS_MAX = 100
PROMPT_ID = "a0a0a0a0-0000-4000-8000-000000000001"
TABLES = ("run_events", "gateway_files", "gateway_counters", "gateway_userdata", "job_previews")


@pytest.fixture
async def client(ada: TenantData) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(ada.plane, ada.key) as client:
        yield client


async def upload(client: httpx.AsyncClient, data: bytes, **fields: str) -> str:
    answer = await client.post("/upload/image", files={"image": ("a.png", data)}, data=fields)
    assert answer.status_code == 200, answer.text
    name: str = answer.json()["name"]
    return name


async def view(client: httpx.AsyncClient, name: str, **query: str) -> httpx.Response:
    return await client.get("/view", params={"filename": name, "type": "input", **query})


async def count(ada: TenantData, name: str) -> int:
    table: Table = tenant_tables.tenant_metadata.tables[name]
    async with ada.pool.read() as tx:
        query = select(func.count()).select_from(table).where(table.c.tenant_id == ada.tenant_id)
        return int((await tx.execute(query)).scalar_one())


async def objects_of(ada: TenantData) -> list[str]:
    return sorted([key async for key in ada.plane.store.keys(f"tenants/{ada.tenant_id}/")])


async def prompt_of(ada: TenantData, **gateway: Any) -> Job:
    data = {"prompt_id": PROMPT_ID, "number": 1, "client_id": "c", "extra_data": {}, **gateway}
    return await ada.job(await ada.file(), gateway={**data, "outputs": []})


def run_of(job: Job) -> LoggedRun:
    assert job.spec.user_id is not None
    return LoggedRun(job.tenant_id, job.spec.user_id, job.id, 1, "c", PROMPT_ID)


async def log(ada: TenantData, job: Job, *, is_end: bool) -> None:
    now, events = ada.plane.clock(), [("execution_start", {"prompt_id": "x"})]
    run = run_of(job)
    async with ada.pool.transaction() as tx:
        state = await run_log.lock_run(tx, run.tenant_id, run.user_id, run.job_id)
        assert state is not None
        if is_end:
            made = [DeliveredOutput(name="9", size=3, filename="x_00001_.png", folder="output")]
            end = RunEnd("completed")
            files = RunFiles(made)
            await run_log.log_end(tx, run, end, events, state=state, files=files, now=now)
        else:
            await run_log.log_live(tx, run, events, state=state, now=now)


async def test_an_upload_goes_with_the_tenants_retention_and_its_name_is_free(
    ada: TenantData, client: httpx.AsyncClient, ahead: AdjustableClock
) -> None:
    await ada.admin.put(f"{ada.path}/retention", json={"retention_days": 30})
    assert await upload(client, PNG) == "a.png"
    ahead.by = timedelta(days=29)
    await expire_all(ada.plane)
    assert (await view(client, "a.png")).content == PNG
    ahead.by = timedelta(days=31)
    await expire_all(ada.plane)
    assert (await view(client, "a.png")).status_code == 404
    assert await count(ada, "gateway_files") == 0
    assert await objects_of(ada) == []
    assert await upload(client, b"other") == "a.png"


async def test_the_name_of_an_output_goes_with_its_file(
    ada: TenantData, ahead: AdjustableClock
) -> None:
    await ada.admin.put(f"{ada.path}/retention", json={"retention_days": 30})
    job = await prompt_of(ada)
    file = await ada.file(b"made", path=kept_output_key(ada.tenant_id, job.id, job.id, ".png"))
    async with ada.pool.transaction() as tx:
        named = UserFile("output", "x_00001_.png", job_id=job.id, output="9.images.0")
        await run_log.add_file(tx, ada.tenant_id, ada.user_id, named, now=ada.plane.clock())
    await submit.cancel_job(ada.plane.context, ada.tenant_id, job.id)
    ahead.by = timedelta(days=31)
    await expire_all(ada.plane)
    assert await ada.has(file) == (False, False)
    assert await count(ada, "gateway_files") == 0


async def test_an_overwritten_upload_goes_after_a_day_unless_a_job_has_it(
    ada: TenantData, client: httpx.AsyncClient, ahead: AdjustableClock
) -> None:
    await upload(client, b"1")
    await upload(client, b"2", overwrite="true")
    async with ada.plane.central.read() as tx:
        caller = await tenants.authenticate_key(tx, ada.key, now=ada.plane.clock())
    used = await user_files.find_file(ada.plane, caller, "input", "a.png")
    job = await ada.job(used)
    await upload(client, b"3", overwrite="true")
    assert len(await objects_of(ada)) == 3
    ahead.by = timedelta(hours=23)
    await prune_expired_rows(ada.plane)
    assert len(await objects_of(ada)) == 3
    ahead.by = timedelta(hours=25)
    await prune_expired_rows(ada.plane)
    assert len(await objects_of(ada)) == 2
    await submit.cancel_job(ada.plane.context, ada.tenant_id, job.id)
    await prune_expired_rows(ada.plane)
    assert len(await objects_of(ada)) == 1
    assert await count(ada, "gateway_files") == await count(ada, "files") == 1
    assert (await view(client, "a.png")).content == b"3"


async def test_live_messages_go_after_an_hour_and_records_stay(
    ada: TenantData, ahead: AdjustableClock
) -> None:
    job = await prompt_of(ada)
    await log(ada, job, is_end=False)
    await log(ada, job, is_end=True)
    ahead.by = timedelta(minutes=61)
    await prune_expired_rows(ada.plane)
    assert await count(ada, "run_events") == 2  # the job goes on
    await submit.cancel_job(ada.plane.context, ada.tenant_id, job.id)
    await prune_expired_rows(ada.plane)
    async with ada.pool.read() as tx:
        left, _ = await run_log.events_of_job(tx, ada.tenant_id, job.id)
    assert [each.is_last for each in left] == [True]


async def test_history_goes_with_the_prompts_of_jobs(
    ada: TenantData, client: httpx.AsyncClient, ahead: AdjustableClock
) -> None:
    job = await prompt_of(ada, extra_data={"extra_pnginfo": {"workflow": "a private wish"}})
    await log(ada, job, is_end=True)
    await submit.cancel_job(ada.plane.context, ada.tenant_id, job.id)
    assert PROMPT_ID in (await client.get("/history")).json()
    ahead.by = timedelta(days=91)
    await prune_expired_rows(ada.plane)
    assert await count(ada, "run_events") == 0
    async with client_of(ada.plane, ada.key) as later:
        assert (await later.get("/history")).json() == {}


async def test_a_preview_that_a_lost_control_plane_left_is_removed(
    ada: TenantData, ahead: AdjustableClock
) -> None:
    job = await prompt_of(ada)
    async with ada.pool.transaction() as tx:
        shown = {"base64": "AAAA"}
        await store_prompts.put_preview(tx, ada.tenant_id, job.id, shown, now=ada.plane.clock())
        assert await store_prompts.get_preview(tx, uuid4(), job.id) is None, "of another tenant"
    await prune_expired_rows(ada.plane)
    assert await count(ada, "job_previews") == 1
    ahead.by = timedelta(hours=2)
    await prune_expired_rows(ada.plane)
    assert await count(ada, "job_previews") == 0


async def test_an_erased_tenant_leaves_nothing_of_the_gateway(
    ada: TenantData, client: httpx.AsyncClient
) -> None:
    await upload(client, PNG)
    await client.post("/userdata/workflows%2Fa.json", content=b"{}")
    await client.post("/settings", json={"a": "a private wish"})
    job = await prompt_of(ada, extra_data={"extra_pnginfo": {"workflow": "a private wish"}})
    await log(ada, job, is_end=True)
    async with ada.pool.transaction() as tx:
        shown = {"base64": "AAAA"}
        await store_prompts.put_preview(tx, ada.tenant_id, job.id, shown, now=ada.plane.clock())
    assert [await count(ada, name) > 0 for name in TABLES] == [True] * 5
    await begin_erasure(ada.plane.context, ada.tenant_id, actor="test", now=ada.plane.clock())
    await erase_pending_tenants(ada.plane.context)
    assert [await count(ada, name) for name in TABLES] == [0] * 5
    async with ada.pool.read() as tx:
        jobs = (await tx.execute(select(tenant_tables.ai_jobs))).mappings().all()
    assert "a private wish" not in str(jobs)


async def test_a_view_reads_a_part_or_sends_the_client_to_the_store(
    ada: TenantData, client: httpx.AsyncClient
) -> None:
    data = bytes(range(256)) * 5_000
    await upload(client, data)
    whole = await view(client, "a.png")
    assert whole.content == data
    headers = {"Range": "bytes=1000000-1000009"}
    params = {"filename": "a.png", "type": "input"}
    part = await client.get("/view", params=params, headers=headers)
    assert (part.status_code, part.content) == (206, data[1_000_000:1_000_010])
    sent = await view(client, "a.png", redirect="1")
    assert sent.status_code == 302
    if ada.plane.store.disk == "s3":
        async with httpx.AsyncClient() as anybody:
            found = await anybody.get(sent.headers["location"])
    else:
        found = await ada.admin.get(sent.headers["location"])
    assert found.content == data


async def test_an_upload_that_is_cut_leaves_neither_a_row_nor_for_long_an_object(
    ada: TenantData, ahead: AdjustableClock, tmp_path: Path
) -> None:
    source = tmp_path / "upload"
    source.write_bytes(PNG)
    async with ada.plane.central.read() as tx:
        caller: Caller = await tenants.authenticate_key(tx, ada.key, now=ada.plane.clock())
    fuse = Fuse()
    context = fused(ada.plane.context, fuse)
    plane = replace(ada.plane, context=context, pools=context.pools)
    named = UserFile("input", "a.png")
    for step in range(STEPS_MAX):
        fuse.left = step
        try:
            await user_files.store_upload(plane, caller, source, named, overwrites=False)
        except ProcessDied:
            fuse.left = None
            assert await count(ada, "gateway_files") == await count(ada, "files")
            continue
        break
    fuse.left = None
    assert step > 3
    ahead.by = timedelta(hours=25)
    await remove_all_orphans(ada.plane)
    assert await count(ada, "gateway_files") == await count(ada, "files") == 1
    assert len(await objects_of(ada)) == 1
