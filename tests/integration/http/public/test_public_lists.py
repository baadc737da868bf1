"""Lists of pages: media by filter, wallet, account, search, deliveries again, settings to run again."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import client_of, plane_on
from tests.support.server.customers import (
    DRAWN,
    PRICE,
    TOKENS,
    Customer,
    EffectSetup,
    effect_setup_on,
    png,
)

from comfyfleet.client import Client
from comfyfleet.server.notifications import webhooks
from comfyfleet.server.notifications.model import WebhookResponse


async def ids(ada: Customer, **query: Any) -> list[str]:
    return [each["id"] for each in (await ada.get("videos", **query))["videos"]]


async def test_media_are_filtered(effect_setup: EffectSetup, ada: Customer) -> None:
    fresh = await ada.video(png(colour=1), filename="Holiday_1.png")
    waiting = await ada.video(png(colour=2), filename="party.png")
    await ada.job(effect_setup.invert, video_id=waiting)
    done = await ada.video(png(colour=3), filename="100%.png")
    await effect_setup.work()
    job_id = await ada.job(effect_setup.invert, video_id=done)
    await effect_setup.work(png(colour=9))
    failed = await ada.video(png(colour=4), filename="bad.png")
    await ada.job(effect_setup.invert, video_id=failed)
    await effect_setup.fail()
    assert await ids(ada) == [failed, done, waiting, fresh]
    assert await ids(ada, status="uploaded") == [fresh]
    assert await ids(ada, status="completed") == [done, waiting]
    assert await ids(ada, status="failed") == [failed]
    assert await ids(ada, status="expired") == []
    assert await ids(ada, kind="video") == []
    assert await ids(ada, kind="image", effect_id=str(effect_setup.invert.id)) == [
        failed, done, waiting,
    ]  # fmt: skip
    assert await ids(ada, effect_id=str(effect_setup.draw.id)) == []
    assert await ids(ada, q="holiday_") == [fresh]
    assert await ids(ada, q="%") == [done]
    first = await ada.get("videos", status="completed", limit=1)
    assert first["next"] == done
    assert await ids(ada, status="completed", limit=1, before=done) == [waiting]
    (shown,) = (await ada.get("videos", q="100"))["videos"]
    assert (shown["filename"], shown["original_file_url"]) == ("100%.png", None)
    assert (shown["job_id"], shown["effect_id"]) == (job_id, str(effect_setup.invert.id))
    (shown,) = (await ada.get("videos", q="100", urls=True))["videos"]
    assert (await ada.client.get(shown["processed_file_url"])).content == png(colour=9)
    assert (await ada.client.get(shown["original_file_url"])).content == png(colour=3)


async def test_media_of_a_job_that_a_worker_has_not_begun_are_queued(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    video_id = await ada.video()
    await ada.job(effect_setup.invert, video_id=video_id)
    async with effect_setup.fleet_setup.worker() as worker:
        assert await ids(ada, status="queued") == [video_id]
        job = await worker.job()
        await worker.call_for(job, "heartbeat", started=True)
        assert await ids(ada, status="processing") == [video_id]
        assert await ids(ada, status="queued") == []


async def test_the_wallet_is_summed_up(databases: Databases, tmp_path: Path) -> None:
    url = "https://pay.example/{tenant_id}?user={user_id}"
    async with (
        plane_on(databases, tmp_path, top_up_url=url) as plane,
        effect_setup_on(plane) as effect_setup,
    ):
        ada = await effect_setup.customer()
        done = await ada.job(effect_setup.draw)
        await effect_setup.work()
        await ada.job(effect_setup.draw)
        await effect_setup.fail()
        await ada.job(effect_setup.draw)
        found = await ada.get("wallet/summary")
        assert found == {
            "balance": TOKENS - 2 * PRICE,
            "reserved_tokens": PRICE,
            "days": 30,
            "added_tokens": TOKENS,
            "spent_tokens": PRICE,
            "refunded_tokens": PRICE,
            "top_up_url": f"https://pay.example/{ada.tenant_id}?user={ada.user_id}",
        }
        wanted = {"type": ["JOB_CONSUME", "PAYMENT_CREDIT"]}
        page = await ada.get("wallet/transactions", **wanted, limit=1)
        (consumed,) = page["transactions"]
        assert (consumed["type"], consumed["job_id"]) == ("JOB_CONSUME", done)
        assert consumed["effect_id"] == str(effect_setup.draw.id)
        rest = await ada.get("wallet/transactions", **wanted, before=page["next"])
        assert [each["type"] for each in rest["transactions"]] == ["PAYMENT_CREDIT"]


async def test_the_account_tells_whose_key_it_is(effect_setup: EffectSetup, ada: Customer) -> None:
    await ada.job(effect_setup.draw)
    await ada.video()
    found = await ada.get("account")
    assert (found["user"]["id"], found["tenant"]["name"]) == (str(ada.user_id), "Ada & Co")
    assert found["balance"] == TOKENS - PRICE
    assert found["key"]["scopes"] == ["keys", "read", "write"]
    assert "key" not in found["key"]
    limits = found["limits"]
    assert (limits["max_active_jobs"], limits["active_jobs"]) == (5, 1)
    assert limits["used_storage_bytes"] == len(png())
    assert found["top_up_url"] is None


async def test_all_is_found_from_one_place(effect_setup: EffectSetup, ada: Customer) -> None:
    video_id = await ada.video(filename="Inverted cat.png")
    job_id = await ada.job(effect_setup.invert, video_id=video_id)
    await ada.job(effect_setup.draw)
    found = await ada.get("search", q="INVERT")
    assert [each["id"] for each in found["media"]] == [video_id]
    assert [each["slug"] for each in found["effects"]] == ["invert"]
    assert [each["id"] for each in found["jobs"]] == [job_id]
    assert [each["id"] for each in (await ada.get("search", q=job_id[:8]))["jobs"]] == [job_id]
    assert [each["id"] for each in (await ada.get("search", q=video_id))["media"]] == [video_id]
    empty: dict[str, list[Any]] = {"media": [], "effects": [], "jobs": []}
    for nothing in ("", "  ", "%", "zz zz"):
        assert await ada.get("search", q=nothing) == empty
    for other in (await effect_setup.customer(ada.tenant_id), await effect_setup.customer()):
        assert await other.get("search", q="cat") == empty
        assert await other.get("search", q=job_id) == empty


async def test_a_delivery_is_sent_again(effect_setup: EffectSetup, ada: Customer) -> None:
    hook = await ada.client.post("/api/webhooks", json={"url": "https://shop.example/hook"})
    await ada.client.delete(f"/api/ai-jobs/{await ada.job(effect_setup.draw)}")
    path = f"webhooks/{hook.json()['id']}/deliveries"
    (delivery,) = (await ada.get(path))["deliveries"]
    pool = await effect_setup.plane.context.pool_of(ada.tenant_id)
    now = effect_setup.plane.clock()
    async with pool.transaction() as tx:
        ((taken, _),) = await webhooks.take_due_deliveries(tx, now=now, limit=9)
        await webhooks.record_attempt(tx, taken, WebhookResponse(status=200), now=now, chance=0.5)
    (ended,) = (await ada.get(path))["deliveries"]
    assert ended["status"] == "delivered"
    again = await ada.client.post(f"/api/{path}/{delivery['id']}/redeliver")
    assert (again.status_code, again.json()["status"], again.json()["tries"]) == (200, "pending", 0)
    async with pool.transaction() as tx:
        due = await webhooks.take_due_deliveries(tx, now=effect_setup.plane.clock(), limit=9)
        assert [str(each.id) for each, _ in due] == [delivery["id"]]
    missing = await ada.client.post(f"/api/{path}/{ada.user_id}/redeliver")
    assert missing.status_code == 404


FORM: list[dict[str, Any]] = [
    {"name": "prefix", "type": "text", "placeholder": "PREFIX", "default": "a"},
    {"name": "width", "type": "integer", "binding": "1.width", "minimum": 16, "maximum": 512},
    {"name": "height", "type": "integer", "binding": "1.height", "default": 64},
]


async def test_a_job_is_run_again_with_its_settings(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    await effect_setup.fleet_setup.register_workflow("form", document=DRAWN, properties=FORM)
    await effect_setup.fleet_setup.assign("invert", "draw", "form")
    effect = await effect_setup.publish("form")
    job_id = await ada.job(effect, properties={"width": 400, "prefix": "b"})
    found = await ada.get(f"ai-jobs/{job_id}/again")
    assert found["properties"] == {"width": 400, "prefix": "b", "height": 64}
    assert (found["effect_slug"], found["price_tokens"], found["problems"]) == ("form", PRICE, [])
    await effect_setup.change(effect, locked=("height",), price_tokens=7)
    narrower = [{**FORM[1], "maximum": 100}, FORM[0], FORM[2]]
    await effect_setup.fleet_setup.register_workflow("form", document=DRAWN, properties=narrower)
    found = await ada.get(f"ai-jobs/{job_id}/again")
    assert (found["properties"], found["price_tokens"]) == ({"prefix": "b"}, 7)
    assert found["problems"] == ["width can't be reused. Choose a new value."]
    body = {"effect_id": found["effect_id"], "properties": found["properties"]}
    assert (await ada.client.post("/api/ai-jobs", json=body)).status_code == 201
    await effect_setup.change(effect, is_published=False)
    found = await ada.get(f"ai-jobs/{job_id}/again")
    assert (found["effect_id"], found["problems"]) == (None, ["The effect is no longer offered."])


async def test_files_of_a_job_are_taken_over_as_media(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    document = {
        "1": {"class_type": "LoadImage", "inputs": {"image": "a.png"}},
        "2": {"class_type": "LoadImage", "inputs": {"image": "b.png"}},
        "3": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}},
    }
    properties = [
        {"name": "input", "type": "image", "binding": "1.image"},
        {"name": "mask", "type": "image", "binding": "2.image", "format": "mask"},
    ]
    await effect_setup.fleet_setup.register_workflow(
        "masked", document=document, properties=properties
    )
    effect = await effect_setup.publish("masked")
    shown = await ada.get("effects/masked")
    assert shown["properties"]["properties"]["mask"]["x-kind"] == "mask"
    photo, mask = await ada.video(png(colour=1)), await ada.video(png(colour=2))
    job_id = await ada.job(effect, video_id=photo, properties={"mask": mask})
    found = await ada.get(f"ai-jobs/{job_id}/again")
    assert (found["video_id"], found["properties"]) == (photo, {"mask": mask})


async def test_a_result_is_saved_under_the_name_of_what_went_in(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    video_id = await ada.video(filename="my cat.png")
    job_id = await ada.job(effect_setup.invert, video_id=video_id)
    assert (await ada.get(f"ai-jobs/{job_id}"))["original"] is None
    await effect_setup.work(png(colour=5))
    job = await ada.get(f"ai-jobs/{job_id}")
    assert (job["original"]["filename"], job["original"]["content_type"]) == (
        "my cat.png", "image/png",
    )  # fmt: skip
    assert (await ada.client.get(job["original"]["url"])).content == png()
    saved = await ada.client.get(job["outputs"][0]["url"])
    assert saved.headers["content-disposition"].startswith('attachment; filename="my cat-invert')


@pytest.mark.parametrize("what", ["wallet", "account", "search"])
async def test_the_client_has_the_same_calls(
    effect_setup: EffectSetup, ada: Customer, what: str
) -> None:
    async with Client("http://test", ada.key, transport=ada.client._transport) as client:
        if what == "wallet":
            assert (await client.wallet_summary(days=7)).added_tokens == TOKENS
            lines = [each async for each in client.transactions(types=["JOB_REFUND"])]
            assert lines == []
        elif what == "account":
            assert (await client.account()).user.id == ada.user_id
        else:
            await ada.video(filename="cat.png")
            assert len((await client.search("cat")).media) == 1
            found = [each async for each in client.all_media(q="dog", status="uploaded")]
            assert found == []


async def test_visitors_see_the_catalogue_where_the_operator_allows_it(
    databases: Databases, tmp_path: Path
) -> None:
    async with (
        plane_on(databases, tmp_path, public_catalogue=True) as plane,
        effect_setup_on(plane) as setup,
        client_of(plane, None) as stranger,
    ):
        assert (await stranger.get("/api/session")).json()["public_catalogue"] is True
        ada = await setup.customer(tokens=TOKENS)
        shown, theirs = (await stranger.get("/api/catalogue")).json(), await ada.get("effects")
        assert [each["slug"] for each in shown["effects"]] == [
            each["slug"] for each in theirs["effects"]
        ]
        assert not any(each["can_pay"] for each in shown["effects"] if each["price_tokens"])
        one = await stranger.get("/api/catalogue/draw")
        assert {**one.json(), "can_pay": True} == await ada.get("effects/draw")
        assert (await stranger.get("/api/catalogue/nothing")).status_code == 404
        assert (await stranger.get("/api/effects")).status_code == 401


async def test_visitors_do_not_see_the_catalogue_of_others(effect_setup: EffectSetup) -> None:
    async with client_of(effect_setup.plane, None) as stranger:
        assert (await stranger.get("/api/session")).json()["public_catalogue"] is False
        for path in ("/api/catalogue", "/api/catalogue/draw"):
            assert (await stranger.get(path)).status_code == 401
