"""The Python client against everything: control plane, worker and engine, over HTTP."""

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path

import PIL.Image
import pytest
from tests.support.server.local_server import CLIP, PHOTO, LocalServer, local_server_in

from comfyfleet.client import Client, JobEvent
from comfyfleet.errors import (
    Conflict,
    FleetError,
    InsufficientTokens,
    InvalidInput,
    NotFound,
    RunFailed,
    RunTimedOut,
    Unauthenticated,
)


@pytest.fixture(scope="module")
def local_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with local_server_in(tmp_path_factory.mktemp("shop")) as local_server:
        yield local_server


async def test_upload_apply_wait_download(local_server: LocalServer, tmp_path: Path) -> None:
    sent: list[tuple[int, int | None]] = []
    told: list[JobEvent] = []
    async with local_server.client() as client:
        media = await client.upload(
            PHOTO, effect="soften", progress=lambda *each: sent.append(each)
        )
        assert media.status == "uploaded"
        handle = await client.apply("soften", media)
        job = await handle.wait(timeout_seconds=60, on_event=told.append)
        files = await handle.download(tmp_path)
        again = await handle.download(tmp_path)
        wallet = await client.wallet()
        lines = [each async for each in client.transactions(page_size=2)]
        seen = await client.media(media.id)
    assert sent[-1] == (PHOTO.stat().st_size, PHOTO.stat().st_size)
    assert job.status == "completed"
    assert [each.data["status"] for each in told if each.kind == "status"][-1] == "completed"
    assert len(files) == len(job.outputs) == 2
    assert not set(files) & set(again)
    with PIL.Image.open(files[0]) as picture:
        assert picture.format == "PNG"
    assert wallet.balance == 1_000 - 3
    assert sum(each.amount for each in lines) == wallet.balance
    assert [each.type for each in lines] == ["JOB_CONSUME", "JOB_RESERVE", "PAYMENT_CREDIT"]
    assert seen.status == "completed"
    assert seen.processed_file_url


async def test_a_workflow_that_only_makes_text_is_a_success(local_server: LocalServer) -> None:
    async with local_server.client() as client:
        handle = await client.apply("words", properties={"word": "cat"})
        job = await handle.wait(timeout_seconds=60)
    assert (job.status, job.outputs) == ("completed", ())
    assert [(each.node_id, each.value) for each in job.values] == [("2", "a cat")]
    assert job.text == "a cat"


async def test_bytes_and_videos_are_taken_as_well(
    local_server: LocalServer, tmp_path: Path
) -> None:
    async with local_server.client() as client:
        picture = await client.upload(PHOTO.read_bytes(), filename="photo.png")
        clip = await client.upload(str(CLIP))
        handles = [await client.apply("soften", picture), await client.apply("video", clip.id)]
        for handle in handles:
            await handle.wait(timeout_seconds=60)
        (made,) = await handles[1].download(tmp_path)
        items = [each.id async for each in client.all_media(page_size=1)]
    assert made.suffix == ".mp4"
    assert items == [clip.id, picture.id]


def files_in(engine: Path, folder: str) -> list[Path]:
    inside = (engine / folder / "comfyfleet").rglob("*")
    return [path.relative_to(engine) for path in inside if path.is_file()]


async def test_only_the_input_of_a_job_stays_on_the_built_in_engine(
    local_server: LocalServer, tmp_path: Path
) -> None:
    async with local_server.client() as client:
        handle = await client.apply("soften", await client.upload(PHOTO))
        await handle.wait(timeout_seconds=60)
        assert len(await handle.download(tmp_path)) == 2
    engine = local_server.folder / "comfyfleet-data" / "engine"
    async with asyncio.timeout(20):
        # They go a moment after the job was told to be done.
        while files_in(engine, "output") + files_in(engine, "temp"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    # It stays for the next job with the same file, under a name without the customer's.
    assert not any("photo" in str(file) for file in files_in(engine, "input"))
    assert (engine / "output").is_dir()


async def test_a_url_of_this_machine_is_not_fetched(local_server: LocalServer) -> None:
    async with local_server.client() as client:
        with pytest.raises(FleetError) as caught:
            await client.upload(f"{local_server.url}/healthz")
    assert caught.value.details["status"] == 422


async def test_the_catalogue_tells_what_a_form_needs(local_server: LocalServer) -> None:
    async with local_server.client() as client:
        effects = {each.slug: each for each in await client.effects()}
        with pytest.raises(NotFound):
            await client.apply("nothing")
    assert effects["negative"].price_tokens == 2
    assert effects["negative"].takes is None
    assert effects["negative"].properties["properties"]["width"]["maximum"] == 1024
    assert effects["soften"].takes
    assert effects["soften"].takes.kind == "image"


async def test_the_same_key_is_the_same_job_and_paid_once(local_server: LocalServer) -> None:
    async with local_server.client() as client:
        width = {"width": 64}
        first, second = await asyncio.gather(
            *(client.apply("negative", properties=width, idempotency_key="one") for _ in range(2))
        )
        assert first.id == second.id
        with pytest.raises(Conflict):
            await client.apply("negative", properties={"width": 65}, idempotency_key="one")
        await first.wait(timeout_seconds=60)
        assert (await client.wallet()).balance == 1_000 - 2


async def test_what_is_refused_is_told_with_its_code_and_details(local_server: LocalServer) -> None:
    async with local_server.client(tokens=0) as client:
        with pytest.raises(InsufficientTokens) as poor:
            await client.apply("negative")
        with pytest.raises(InvalidInput):
            await client.apply("negative", properties={"width": 1_000_000})
        with pytest.raises(InvalidInput):
            await client.upload(PHOTO, effect="video")
    assert poor.value.message == "Insufficient token balance."
    assert poor.value.details == {"required_tokens": 2, "balance": 0}
    async with Client(local_server.url, "cf_nobody") as nobody:
        with pytest.raises(Unauthenticated):
            await nobody.wallet()


async def test_a_job_is_cancelled_and_refunded(local_server: LocalServer) -> None:
    async with local_server.client() as client:
        handle = await client.apply("slow")
        with pytest.raises(RunTimedOut):
            await handle.wait(timeout_seconds=1)
        assert (await client.wallet()).balance == 999
        assert (await handle.cancel()).status == "cancelled"
        with pytest.raises(RunFailed):
            await handle.wait()
        assert (await handle.wait(check=False)).status == "cancelled"
        assert (await client.wallet()).balance == 1_000
        assert [each.id async for each in client.jobs(status="cancelled")] == [handle.id]


async def test_a_failed_job_says_why_is_refunded_and_can_be_retried(
    local_server: LocalServer,
) -> None:
    async with local_server.client() as client:
        handle = await client.apply("failing")
        with pytest.raises(RunFailed) as failed:
            await handle.wait(timeout_seconds=60)
        assert handle.job.error
        assert handle.job.error in failed.value.message
        again = await handle.retry()
        assert again.job.retry_of == handle.id
        assert (await handle.retry()).id == again.id
        assert (await again.wait(timeout_seconds=60, check=False)).status == "failed"
        assert await again.why()
        assert (await client.wallet()).balance == 1_000


async def test_events_are_resumed_where_a_reader_stopped(local_server: LocalServer) -> None:
    async with local_server.client() as client:
        handle = await client.apply("slow", properties={"steps": 5})
        first = await anext(handle.events())
        rest = [each async for each in handle.events(last_id=first.id)]
        numbered = [each.id for each in rest if each.kind != "progress"]
        assert all(each > first.id for each in numbered)
        assert numbered == sorted(set(numbered))
        assert rest[-1].id == numbered[-1]
        assert (await handle.refresh()).status == "completed"
        assert [each async for each in handle.events(last_id=rest[-1].id)] == []


async def test_a_batch_is_waited_for_as_one(local_server: LocalServer) -> None:
    async with local_server.client() as client:
        sets = [{"width": 16 * number} for number in range(1, 9)]
        handle = await client.apply_many("negative", sets, idempotency_key="many")
        same = await client.apply_many("negative", sets, idempotency_key="many")
        assert same.id == handle.id
        batch = await handle.wait(timeout_seconds=90)
        jobs = [each.job async for each in handle.jobs()]
        balance = (await client.wallet()).balance
        assert (await client.batch(handle.id)).batch.is_ended
    assert batch.counts == {"completed": 8}
    assert batch.consumed_tokens == 16
    assert len(jobs) == 8
    assert balance == 1_000 - 16


async def test_a_batch_is_cancelled_as_one(local_server: LocalServer) -> None:
    async with local_server.client() as client:
        handle = await client.apply_many("slow", [{}] * 7)
        batch = await handle.cancel()
        assert batch.is_ended
        assert (await client.wallet()).balance == 1_000


async def test_keys_are_made_used_and_revoked(local_server: LocalServer) -> None:
    async with local_server.client() as client:
        made = await client.create_key("reader", scopes={"read"})
        assert made.key
        async with Client(local_server.url, made.key) as reader:
            assert (await reader.wallet()).balance == 1_000
            with pytest.raises(FleetError, match="scope"):
                await reader.apply("negative")
            await client.revoke_key(made)
            with pytest.raises(Unauthenticated):
                await reader.wallet()
        names = {each.name: each.revoked_at for each in await client.keys()}
    assert names["reader"] is not None


async def test_webhooks_are_set_up_and_removed(local_server: LocalServer) -> None:
    async with local_server.client() as client:
        made = await client.webhooks.create("https://shop.example/hook", events={"job.failed"})
        assert made.secret
        (listed,) = await client.webhooks.all()
        assert listed.secret is None
        assert listed.events == ("job.failed",)
        assert await client.webhooks.deliveries(made) == []
        assert (await client.webhooks.activate(made)).is_active, "it was on, and stays so"
        await client.webhooks.remove(made)
        assert await client.webhooks.all() == []


async def test_another_customers_things_are_not_there(local_server: LocalServer) -> None:
    async with local_server.client() as mine, local_server.client() as other:
        media = await mine.upload(io.BytesIO(PHOTO.read_bytes()).getvalue(), filename="a.png")
        with pytest.raises(NotFound):
            await other.media(media.id)
        with pytest.raises(NotFound):
            await other.apply("soften", media)


async def test_an_operator_registers_offers_credits_and_looks_on(local_server: LocalServer) -> None:
    async with Client(local_server.url, local_server.admin_key) as client:
        admin = client.admin
        slugs = [each.slug for each in await admin.workflows()]
        detail = await admin.workflow(slugs[0])
        fleet = await admin.create_fleet("spare", max_workers=2)
        assigned = await admin.assign_workflows("spare", [slugs[0]])
        made = await admin.create_tenant("Grace & Co")
        paid = [
            await admin.credit(made.id, made.user_id, 7, provider_transaction_id="paid/7")
            for _ in range(2)
        ]
        person = await admin.add_operator("grace", role="viewer")
        entries = [each async for each in admin.audit(action="add_operator", page_size=1)]
        books = await admin.verify_ledger(tenant_id=made.id)
        workers = [each async for each in admin.workers()]
    assert detail.versions[-1] == detail.version
    assert (fleet.slug, assigned.added) == ("spare", [slugs[0]])
    assert paid == [7, 7]
    assert entries[0].subject == "operator:grace"
    assert books.is_sound
    assert [each.is_approved for each in workers] == [True] * len(workers)
    async with Client(local_server.url, person.key) as viewer:
        assert "grace" in [each.name for each in await viewer.admin.operators()]
        with pytest.raises(FleetError, match="role"):
            await viewer.admin.create_fleet("another")


async def test_an_operator_follows_a_job_through_the_queue(local_server: LocalServer) -> None:
    async with (
        Client(local_server.url, local_server.admin_key) as client,
        local_server.client() as customer,
    ):
        handle = await customer.apply("soften", await customer.upload(PHOTO))
        await handle.wait(timeout_seconds=60)
        seen = await client.admin.job(handle.id)
        assert seen.dispatch is not None
        whole = await client.admin.dispatch(seen.dispatch.id)
        listed = [each.id async for each in client.admin.jobs(status="completed", page_size=1)]
        queue = [each.id async for each in client.admin.dispatches(page_size=1)]
    assert (seen.status, whole.dispatch.status) == ("completed", "completed")
    assert handle.id in listed
    assert seen.dispatch.id in queue


async def test_an_operator_manages_a_tenants_users_keys_limits_and_wallet(
    local_server: LocalServer,
) -> None:
    async with Client(local_server.url, local_server.admin_key) as client:
        admin = client.admin
        made = await admin.create_tenant("Hedy & Co", email="hedy@example.com")
        bob = await admin.create_user(made.id, name="Bob")
        key = await admin.create_key(made.id, bob.id, name="website", scopes=["read"])
        async with Client(local_server.url, key.key) as customer:
            assert (await customer.wallet()).balance == 0
            assert (await admin.revoke_key(made.id, bob.id, key.id)).revoked_at
            with pytest.raises(Unauthenticated):
                await customer.wallet()
        assert [each.name for each in await admin.keys(made.id, bob.id)] == ["website"]
        assert not (await admin.act_on_user(made.id, bob.id, "deactivate")).is_active
        users = [each.id async for each in admin.users(made.id, page_size=1)]
        await admin.credit(made.id, made.user_id, 9, provider_transaction_id="paid/9")
        paid = [each.amount async for each in admin.transactions(made.id, made.user_id)]
        assert await admin.balance(made.id, made.user_id) == 9
        await admin.set_limits(made.id, max_queued=3)
        await admin.set_retention(made.id, 30)
        await admin.set_quota(made.id, 1_000)
        tenant, storage = await admin.tenant(made.id), await admin.storage(made.id)
        await admin.erase(made.id)
    assert (users, paid) == ([made.user_id, bob.id], [9])
    assert (tenant.max_queued, tenant.retention_days) == (3, 30)
    assert (storage.used_bytes, storage.max_storage_bytes) == (0, 1_000)


async def test_an_operator_manages_fleets_workers_and_the_catalogue(
    local_server: LocalServer,
) -> None:
    async with Client(local_server.url, local_server.admin_key) as client:
        admin = client.admin
        made = await admin.create_fleet("managed")
        assert (await admin.rotate_fleet_secret("managed")).secret != made.secret
        assert (await admin.set_cap("managed", 3)).max_workers == 3
        assert (await admin.set_approval("managed", "manual")).approval == "manual"
        worker, *_ = [each.worker_id async for each in admin.workers()]
        assert worker in [each.worker_id for each in await admin.able_workers("soften")]
        assert all(each.at for each in await admin.readings(worker, hours=24))
        with pytest.raises(NotFound):
            await admin.rotate_worker_key("nobody", now=True)
        assert (await admin.act_on_workflow("soften", "pause")).is_paused
        assert not (await admin.act_on_workflow("soften", "resume")).is_paused
        price = (await admin.workflow("soften")).price_tokens
        assert (await admin.change_workflow("soften", price_tokens=5)).price_tokens == 5
        await admin.change_workflow("soften", **_terms(price))
        assert not (await admin.act_on_effect("soften", "withdraw")).published
        assert (await admin.act_on_effect("soften", "publish")).published
        assert (await admin.effect("soften")).workflow_slug == "soften"


def _terms(price: int | None) -> dict[str, object]:
    return {"is_withdrawn": True} if price is None else {"price_tokens": price}


async def test_an_operator_submits_with_a_file_and_exports_the_audit(
    local_server: LocalServer,
) -> None:
    async with Client(local_server.url, local_server.admin_key) as client:
        admin = client.admin
        assert await admin.set_maintenance(on=True) is await admin.in_maintenance() is True
        file = await admin.upload(PHOTO)
        (job_id,) = (await admin.submit("soften", files={"input": str(file)})).ids
        assert not await admin.set_maintenance(on=False)
        job = await admin.job(job_id)
        attempts = await admin.attempts(job_id)
        exported = [each async for each in admin.export_audit(action="maintenance")]
    assert (job.workflow, attempts.prompt is not None) == ("soften", True)
    assert [each["details"] for each in exported][:2] == [{"on": False}, {"on": True}]
