"""On PostgreSQL a job is completed by one statement, which writes what is else written step by step."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import select
from tests.support.databases.factory import Databases
from tests.support.jobs.context import ManualClock, asked, give_tokens, job_context_on, waiter

from comfyfleet.api.worker import Job as Handed
from comfyfleet.server.db import Tx
from comfyfleet.server.db.tenant_tables import tenant_metadata as tenant_tables
from comfyfleet.server.jobs import service, submit
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.lease import lease_next
from comfyfleet.server.jobs.service import FinishedJob
from comfyfleet.server.jobs.store_statements import FILES_MAX
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import File
from comfyfleet.server.notifications import webhooks
from comfyfleet.server.notifications.model import WebhookEvent

NUMBERED = ("job_events", "outbox", "token_transactions")
Complete = Callable[[Tx], Awaitable[FinishedJob | None]]


class Undone(Exception):
    """Ends a transaction with nothing written."""


class Desk:
    """One job that is held by a worker, and what is written when it completes."""

    def __init__(self, context: JobContext, tenant_id: UUID, user_id: UUID) -> None:
        self.context, self.tenant_id, self.user_id = context, tenant_id, user_id
        self.pool = context.pools["main"]

    async def held(self, **changes: Any) -> Handed:
        await submit.submit(self.context, self.tenant_id, asked(**changes))
        handed = await lease_next(self.context, waiter(), wait_seconds=0)
        assert handed
        await self.context.deferred.flush()  # so that nobody else writes meanwhile
        return handed

    async def media_id(self) -> UUID:
        made = uuid4()
        async with self.pool.transaction() as tx:
            await media.create_media(
                tx,
                media_id=made,
                tenant_id=self.tenant_id,
                user_id=self.user_id,
                kind="image",
                original_file_id=uuid4(),
                now=self.context.clock(),
            )
        return made

    def files(self, count: int) -> list[File]:
        return [
            File(
                id=uuid4(),
                tenant_id=self.tenant_id,
                disk="local",
                path=f"made/{number}.png",
                filename=f"{number}.png",
                mime_type="image/png",
                created_at=self.context.clock(),
                size=number,
                content_hash="0" * 64,
            )
            for number in range(count)
        ]

    def at_once(self, handed: Handed, files: list[File], **other: Any) -> Complete:
        given = self._given(handed, files, **other)
        return lambda tx: service.complete_at_once(tx, **given)

    def step_by_step(self, handed: Handed, files: list[File]) -> Complete:
        given = self._given(handed, files)
        return lambda tx: service.complete(tx, **given, new_id=uuid4)

    def _given(self, handed: Handed, files: list[File], **other: Any) -> dict[str, Any]:
        outputs = [{"name": each.filename, "file_id": str(each.id)} for each in files]
        return {
            "tenant_id": self.tenant_id,
            "job_id": handed.job_id,
            "token": handed.lease_token,
            "values": {
                "provider_job_id": "p",
                "output_file_id": files[0].id if files else None,
                "result_metadata": {"outputs": outputs, "execution_seconds": 1.5, "values": []},
            },
            "files": files,
            "now": self.context.clock(),
            **other,
        }

    async def written_by(self, complete: Complete) -> tuple[FinishedJob | None, dict[str, Any]]:
        """What all tables hold then; it is undone."""
        with suppress(Undone):
            async with self.pool.transaction() as tx:
                ended = await complete(tx)
                rows = await _rows(tx)
                raise Undone
        return ended, rows


async def _rows(tx: Tx) -> dict[str, Any]:
    """In the order of their ids; numbers that the database gives go on after what was undone."""
    return {
        name: [
            {key: value for key, value in row.items() if name not in NUMBERED or key != "id"}
            for row in (
                await tx.execute(select(table).order_by(*table.primary_key.columns))
            ).mappings()
        ]
        for name, table in tenant_tables.tables.items()
    }


@pytest.fixture
async def desk(postgres_databases: Databases, tmp_path: Path) -> AsyncIterator[Desk]:
    async with job_context_on(postgres_databases, tmp_path, ManualClock()) as (context, tenant_id):
        yield Desk(context, tenant_id, await give_tokens(context, tenant_id, 100))


KINDS: Mapping[str, Mapping[str, Any]] = {
    "an operator's": {},
    "a user's": {"user_id": True, "effect_id": UUID(int=7)},
    "one with a price": {"user_id": True, "price_tokens": 10},
    "one of media": {"user_id": True, "price_tokens": 10, "video_id": True},
    "one of a run": {"user_id": True, "run_kind": "graph", "run_id": UUID(int=8)},
}


@pytest.mark.parametrize("file_count", [0, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
async def test_one_statement_writes_the_same_as_several(
    desk: Desk, kind: str, file_count: int
) -> None:
    changes = dict(KINDS[kind])
    if "user_id" in changes:
        changes["user_id"] = desk.user_id
    if "video_id" in changes:
        changes["video_id"] = await desk.media_id()
    handed, files = await desk.held(**changes), desk.files(file_count)
    ended, rows = await desk.written_by(desk.at_once(handed, files))
    as_before, rows_before = await desk.written_by(desk.step_by_step(handed, files))
    assert rows == rows_before
    assert ended
    assert as_before
    assert (ended.job, ended.has_held) == (as_before.job, as_before.has_held)
    assert len(ended.outbox_ids) == len(as_before.outbox_ids) == 1


async def test_it_tells_that_others_of_its_user_are_held(desk: Desk) -> None:
    run: dict[str, Any] = {"user_id": desk.user_id, "run_kind": "graph", "run_id": uuid4()}
    handed = await desk.held(**run)
    await submit.submit(desk.context, desk.tenant_id, asked(**run, is_held=True))
    ended, _ = await desk.written_by(desk.at_once(handed, []))
    assert ended
    assert ended.has_held


async def _add_webhook(desk: Desk) -> None:
    async with desk.pool.transaction() as tx:
        await webhooks.create_webhook(
            tx,
            tenant_id=desk.tenant_id,
            user_id=desk.user_id,
            url="https://example.com",
            events=[WebhookEvent.COMPLETED],
            webhook_id=uuid4(),
            now=desk.context.clock(),
        )


@pytest.mark.parametrize("what", ["another token", "webhooks", "many files"])
async def test_it_writes_nothing_of_what_goes_step_by_step(desk: Desk, what: str) -> None:
    handed = await desk.held(user_id=desk.user_id)
    if what == "webhooks":
        await _add_webhook(desk)
    files = desk.files(FILES_MAX + 1 if what == "many files" else 1)
    other = {"token": uuid4()} if what == "another token" else {}
    async with desk.pool.read() as tx:
        before = await _rows(tx)
    ended, after = await desk.written_by(desk.at_once(handed, files, **other))
    assert ended is None
    assert after == before
