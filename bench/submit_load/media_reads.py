"""Measures how long `GET /api/videos/{id}` takes, with few and with many jobs in the tenant."""

import time
from dataclasses import dataclass
from uuid import UUID, uuid4

import httpx
from sqlalchemy import Table, text

from comfyfleet.clock import utc_now
from comfyfleet.server.db.tenant_tables import ai_jobs, files, job_events, videos
from comfyfleet.server.jobs.submit import JobRequest, submit_effect
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import File
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants.model import NewApiKey, new_api_key
from submit_load.submit_setup import TENANT, SubmitSetup

SHOWN = 100
COPIED: tuple[tuple[Table, dict[str, str]], ...] = (
    (ai_jobs, {"id": "gen_random_uuid()", "idempotency_key": "NULL", "status": "'completed'"}),
    (videos, {"id": "gen_random_uuid()", "active_job_id": "NULL"}),
    (files, {"id": "gen_random_uuid()", "path": "md5(random()::text)", "content_hash": "NULL"}),
)


@dataclass(frozen=True)
class Reader:
    submit_setup: SubmitSetup
    key: str
    media_ids: tuple[UUID, ...]

    async def times(self, client: httpx.AsyncClient, rounds: int) -> list[float]:
        """Returns the milliseconds of each answer. There is one request at a time."""
        times = []
        for media_id in self.media_ids * rounds:
            start = time.perf_counter()
            answer = await client.get(f"/api/videos/{media_id}")
            times.append(1_000 * (time.perf_counter() - start))
            assert answer.status_code == 200, answer.text
        return times


async def reader_of(submit_setup: SubmitSetup, jobs: int) -> Reader:
    """Creates a user with media in processing, among this many jobs of the tenant."""
    user_id = (await submit_setup.users(1))[0]
    key = new_api_key()
    async with submit_setup.plane.central.transaction() as tx:
        new = NewApiKey(id=uuid4(), key=key, tenant_id=TENANT, user_id=user_id, name="bench")
        await tenants.create_key(tx, new, now=utc_now())
    shown = [await _applied(submit_setup, user_id) for _ in range(min(SHOWN, jobs))]
    await _fill(submit_setup, jobs - len(shown))
    return Reader(submit_setup, key, tuple(shown))


async def _applied(submit_setup: SubmitSetup, user_id: UUID) -> UUID:
    file = File(
        id=uuid4(),
        tenant_id=TENANT,
        user_id=user_id,
        disk=submit_setup.plane.store.disk,
        path=f"tenants/{TENANT}/uploads/{uuid4()}/photo.png",
        filename="photo.png",
        mime_type="image/png",
        size=1,
        created_at=utc_now(),
    )
    async with submit_setup.plane.pools["main"].transaction() as tx:
        await media.add_file(tx, file)
        new_media = await media.create_media(
            tx,
            media_id=uuid4(),
            tenant_id=TENANT,
            user_id=user_id,
            kind="image",
            original_file_id=file.id,
            now=utc_now(),
        )
    request = JobRequest(effect_id=submit_setup.soften_id, user_id=user_id, video_id=new_media.id)
    await submit_effect(submit_setup.plane.context, await submit_setup.tenant(), request)
    return new_media.id


async def _fill(submit_setup: SubmitSetup, rows: int) -> None:
    """Copies the existing rows as completed ones, with the events of completed jobs."""
    if rows <= 0:
        return
    async with submit_setup.plane.pools["main"].transaction() as tx:
        for table, changed in COPIED:
            names = [column.name for column in table.columns]
            values = ", ".join(changed.get(name, f"one.{name}") for name in names)
            await tx.execute(
                text(
                    f"INSERT INTO {table.name} ({', '.join(names)}) SELECT {values} FROM "
                    f"(SELECT * FROM {table.name} LIMIT 1) AS one, generate_series(1, :rows)"
                ),
                {"rows": rows},
            )
        await tx.execute(
            text(
                f"INSERT INTO {job_events.name} (tenant_id, job_id, kind, data, created_at) "
                "SELECT tenant_id, id, 'status', '{\"status\": \"completed\"}', submitted_at "
                "FROM ai_jobs CROSS JOIN generate_series(1, 3)"
            )
        )
    engine = submit_setup.plane.pools["main"].engine
    async with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        await connection.execute(text("VACUUM ANALYZE"))
