"""The answer to a commit is lost: what was written names objects, and they are there."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.server.customers import png
from tests.support.server.fleet import FleetSetup
from tests.support.server.tenants import PNG, TenantData

from comfyfleet.errors import Unavailable
from comfyfleet.server.db import Tx
from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.jobs.files import confirm_upload
from comfyfleet.server.media import service as media


@pytest.fixture
def storage_url(tmp_path: Path) -> str:
    return (tmp_path / "objects").as_uri()


def cut(write: Callable[[], AbstractAsyncContextManager[Tx]]) -> Any:
    """Commits, and is lost before it can say so."""

    @asynccontextmanager
    async def write_and_lose() -> AsyncIterator[Tx]:
        async with write() as tx:
            yield tx
        raise Unavailable("the connection to the database was lost")

    return write_and_lose


async def test_an_upload_is_there_though_the_answer_to_its_commit_was_lost(
    ada: TenantData, monkeypatch: pytest.MonkeyPatch
) -> None:
    photo = await ada.file(None)
    await ada.plane.store.put(photo.path, PNG, "image/png")
    with monkeypatch.context() as lost:
        lost.setattr(ada.pool, "transaction", cut(ada.pool.transaction))
        with pytest.raises(Unavailable):
            await confirm_upload(ada.plane.context, ada.pool, photo)
    async with ada.pool.read() as tx:
        kept = await media.get_file(tx, ada.tenant_id, photo.id)
    assert not kept.is_announced
    assert await ada.plane.store.get(kept.path) == PNG


async def test_outputs_are_there_though_the_answer_to_their_commit_was_lost(
    house: FleetSetup, ada: TenantData, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.register_workflow("invert")
    asked = await ada.job(await ada.file())
    async with house.worker() as worker:
        job, data = await worker.job(), png()
        slot = job["outputs"][0]
        await worker.client.put(slot["url"], content=data, headers=slot["headers"])
        made = {"name": slot["name"], "size": len(data), "content_type": "image/png"}
        with monkeypatch.context() as lost:
            lost.setattr(ada.pool, "transaction", cut(ada.pool.transaction))
            lost.setattr(ada.pool, "execute_one", cut(ada.pool.execute_one))
            said = await worker.call_for(job, "complete", outputs=[made])
        assert said.status_code == 503, said.text
        said = await worker.call_for(job, "complete", outputs=[made])
        assert said.status_code == 200, said.text
    async with ada.pool.read() as tx:
        done = await jobs.get(tx, ada.tenant_id, asked.id)
        assert done.output_file_id
        kept = await media.get_file(tx, ada.tenant_id, done.output_file_id)
    assert await ada.plane.store.head(kept.path) is not None
