"""Links that show a result to people without a key, until they expire or are revoked."""

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import select
from tests.support.databases.factory import Databases
from tests.support.jobs.context import ManualClock
from tests.support.server.control_plane import client_of, plane_on
from tests.support.server.customers import Customer, EffectSetup, effect_setup_on, png

from comfyfleet.client import Client
from comfyfleet.server.db.tenant_tables import shares
from comfyfleet.server.http.public.auth import STRANGERS_AT_ONCE
from comfyfleet.server.maintenance.retention import (
    SHARES_KEPT,
    begin_erasure,
    delete_expired_rows,
    erase_pending_tenants,
    expire_old,
)
from comfyfleet.server.media.model import new_share_secret


async def result(effect_setup: EffectSetup, ada: Customer) -> tuple[str, str]:
    """A media, and its completed job."""
    video_id = await ada.video()
    job_id = await ada.job(effect_setup.invert, video_id=video_id)
    await effect_setup.work(png(colour=5))
    return video_id, job_id


async def share(ada: Customer, path: str, status: int = 201, **body: Any) -> dict[str, Any]:
    answer = await ada.client.post(f"/api/{path}/shares", json=body)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def shown(effect_setup: EffectSetup, secret: str, status: int = 200) -> dict[str, Any]:
    async with client_of(effect_setup.plane, None) as stranger:
        answer = await stranger.get(f"/api/shared/{secret}")
        assert answer.status_code == status, answer.text
        if status == 200:
            assert answer.headers["cache-control"] == "no-store"
            assert answer.headers["referrer-policy"] == "no-referrer"
        found: dict[str, Any] = answer.json()
    return found


async def test_whoever_has_the_link_sees_the_result(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    video_id, job_id = await result(effect_setup, ada)
    made = await share(ada, f"videos/{video_id}", expires_in=3600)
    assert made["url"].endswith(f"/shared/{made['secret']}")
    assert (made["job_id"], made["video_id"]) == (job_id, video_id)
    seen = await shown(effect_setup, made["secret"])
    assert (seen["state"], seen["effect_title"], seen["original"]) == ("ready", "invert", None)
    (output,) = seen["outputs"]
    async with client_of(effect_setup.plane, None) as stranger:
        assert (await stranger.get(output["url"])).content == png(colour=5)
    told = str(seen)
    for private in (video_id, job_id, str(ada.user_id)):
        assert private not in told.replace(output["url"], "")
    both = await share(ada, f"ai-jobs/{job_id}", has_original=True)
    assert (await shown(effect_setup, both["secret"]))["original"]["content_type"] == "image/png"


async def test_the_secret_is_shown_once_and_stored_hashed(
    effect_setup: EffectSetup, ada: Customer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    video_id, _ = await result(effect_setup, ada)
    made = await share(ada, f"videos/{video_id}")
    secret = made["secret"]
    listed = await ada.get(f"videos/{video_id}/shares")
    assert [each["id"] for each in listed["shares"]] == [made["id"]]
    assert secret not in str(listed)
    pool = await effect_setup.plane.context.pool_of(ada.tenant_id)
    async with pool.read() as tx:
        (row,) = (await tx.execute(select(shares))).mappings()
    assert secret not in str(dict(row))
    await shown(effect_setup, secret)
    async with client_of(effect_setup.plane, None) as stranger:
        for path in (
            f"/api/shared/{secret}/more",
            f"/shared/{secret}",
            f"/api/shared//{secret}",
            f"/api/%73hared/{secret}",
            f"/%53hared/{secret}",
            f"/%2fshared/{secret}",
        ):
            await stranger.get(path)
    ours = [str(vars(each)) for each in caplog.records if not each.name.startswith("http")]
    assert any("/api/shared/hidden" in each for each in ours)
    assert not [each for each in ours if secret in each]


async def test_a_link_is_revoked_at_once(effect_setup: EffectSetup, ada: Customer) -> None:
    _, job_id = await result(effect_setup, ada)
    made = await share(ada, f"ai-jobs/{job_id}")
    for _ in range(2):
        revoked = await ada.client.delete(f"/api/shares/{made['id']}")
        assert revoked.status_code == 200
        assert revoked.json()["revoked_at"]
    await shown(effect_setup, made["secret"], 404)


async def test_the_files_of_a_link_are_gone_when_it_is_revoked(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    _, job_id = await result(effect_setup, ada)
    made, other = [await share(ada, f"ai-jobs/{job_id}") for _ in range(2)]
    urls = [
        (await shown(effect_setup, each["secret"]))["outputs"][0]["url"] for each in (made, other)
    ]
    async with client_of(effect_setup.plane, None) as stranger:
        assert [(await stranger.get(url)).status_code for url in urls] == [200, 200]
        part = await stranger.get(urls[0], headers={"range": "bytes=0-7"})
        assert (part.status_code, part.content) == (206, png(colour=5)[:8])
        assert part.headers["content-security-policy"].startswith("sandbox")
        for missing in ("original", "1", "-1", "x"):
            answer = await stranger.get(urls[0].removesuffix("0") + missing)
            assert answer.status_code == 404
        await ada.client.delete(f"/api/shares/{made['id']}")
        assert [(await stranger.get(url)).status_code for url in urls] == [404, 200]


async def test_the_links_of_a_deactivated_user_are_closed(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    _, job_id = await result(effect_setup, ada)
    secret = (await share(ada, f"ai-jobs/{job_id}"))["secret"]
    admin = effect_setup.fleet_setup.admin
    path = f"/api/admin/tenants/{ada.tenant_id}/users/{ada.user_id}"
    assert (await admin.post(f"{path}/deactivate")).status_code == 200
    await shown(effect_setup, secret, 404)
    assert (await admin.post(f"{path}/activate")).status_code == 200
    await shown(effect_setup, secret)


async def test_a_link_tells_the_name_of_what_went_in_only_where_it_shows_it(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    video_id = await ada.video(filename="divorce-papers.png")
    job_id = await ada.job(effect_setup.invert, video_id=video_id)
    await effect_setup.work(png(colour=5))
    for has_original in (False, True):
        made = await share(ada, f"ai-jobs/{job_id}", has_original=has_original)
        told = str(await shown(effect_setup, made["secret"]))
        assert ("divorce" in told) is has_original


async def test_what_nobody_made_shows_nothing(effect_setup: EffectSetup, ada: Customer) -> None:
    _, job_id = await result(effect_setup, ada)
    secret = (await share(ada, f"ai-jobs/{job_id}"))["secret"]
    other = await effect_setup.customer()
    for wrong in (
        "x", secret[:-1], secret[:-1] + ("A" if secret[-1] != "A" else "B"), secret + "A",
        new_share_secret(ada.tenant_id), new_share_secret(other.tenant_id), new_share_secret(uuid4()),
    ):  # fmt: skip
        await shown(effect_setup, wrong, 404)


async def test_only_a_result_can_be_shared(effect_setup: EffectSetup, ada: Customer) -> None:
    video_id = await ada.video()
    await share(ada, f"videos/{video_id}", 422)
    job_id = await ada.job(effect_setup.invert, video_id=video_id)
    await share(ada, f"videos/{video_id}", 422)
    await share(ada, f"ai-jobs/{job_id}", 422)
    other = await ada.job(effect_setup.draw)
    await share(ada, f"videos/{video_id}", 404, job_id=other)
    for seconds in (0, 59, 366 * 24 * 3600):
        await share(ada, f"ai-jobs/{job_id}", 422, expires_in=seconds)


async def test_an_expired_link_says_so_and_its_row_goes(
    databases: Databases, tmp_path: Path
) -> None:
    clock = ManualClock()
    async with (
        plane_on(databases, tmp_path, clock=clock) as plane,
        effect_setup_on(plane) as effect_setup,
    ):
        ada = await effect_setup.customer()
        _, job_id = await result(effect_setup, ada)
        secret = (await share(ada, f"ai-jobs/{job_id}", expires_in=60))["secret"]
        file = (await shown(effect_setup, secret))["outputs"][0]["url"]
        clock.now += timedelta(seconds=61)
        seen = await shown(effect_setup, secret)
        assert (seen["state"], seen["outputs"]) == ("expired", [])
        async with client_of(plane, None) as stranger:
            assert (await stranger.get(file)).status_code == 404
        assert (await delete_expired_rows(plane.context))["shares"] == 0
        clock.now += SHARES_KEPT
        assert (await delete_expired_rows(plane.context))["shares"] == 1
        await shown(effect_setup, secret, 404)


async def test_a_result_that_is_gone_is_expired(databases: Databases, tmp_path: Path) -> None:
    clock = ManualClock()
    async with (
        plane_on(databases, tmp_path, clock=clock, retention_days=1) as plane,
        effect_setup_on(plane) as effect_setup,
    ):
        ada = await effect_setup.customer()
        _, job_id = await result(effect_setup, ada)
        secret = (await share(ada, f"ai-jobs/{job_id}"))["secret"]
        clock.now += timedelta(days=2)
        await expire_old(plane.context)
        assert (await shown(effect_setup, secret))["state"] == "expired"


async def test_an_erased_tenants_links_show_nothing(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    _, job_id = await result(effect_setup, ada)
    secret = (await share(ada, f"ai-jobs/{job_id}"))["secret"]
    context = effect_setup.plane.context
    await begin_erasure(context, ada.tenant_id, actor="test", now=context.clock())
    await shown(effect_setup, secret, 404)
    await erase_pending_tenants(context)
    async with (await context.pool_of(ada.tenant_id)).read() as tx:
        assert (await tx.execute(select(shares))).first() is None


async def test_what_went_in_is_saved_under_a_name_that_says_what_it_is(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    """Whoever follows a link must not find a program in their downloads that looks like a picture."""
    video_id = await ada.video(filename="cat\u202egnp.bat")
    job_id = await ada.job(effect_setup.invert, video_id=video_id)
    await effect_setup.work(png(colour=5))
    secret = (await share(ada, f"ai-jobs/{job_id}", has_original=True))["secret"]
    original = (await shown(effect_setup, secret))["original"]
    assert original["filename"].endswith(".png")
    async with client_of(effect_setup.plane, None) as stranger:
        told = (await stranger.get(original["url"])).headers["content-disposition"]
    assert told == 'attachment; filename="catgnp.png"'


async def test_strangers_are_not_answered_without_end(
    sqlite_databases: Databases, tmp_path: Path
) -> None:
    async with (
        plane_on(sqlite_databases, tmp_path, clock=ManualClock()) as plane,
        client_of(plane, None) as stranger,
    ):
        for _ in range(STRANGERS_AT_ONCE):
            assert (await stranger.get("/api/shared/nothing")).status_code == 404
        assert (await stranger.get("/api/shared/nothing")).status_code == 429


async def test_the_client_shares(effect_setup: EffectSetup, ada: Customer) -> None:
    video_id, job_id = await result(effect_setup, ada)
    async with Client("http://test", ada.key, transport=ada.client._transport) as client:
        made = await client.share(video_id, expires_in=120)
        assert made.job_id == UUID(job_id)
        again = await (await client.job(job_id)).share(has_original=True)
        assert [each.id async for each in client.shares()] == [again.id, made.id]
        assert [each.id async for each in client.shares(video_id)] == [again.id, made.id]
        assert (await client.shared(again.secret)).original
        await client.revoke_share(again)
    await shown(effect_setup, again.secret, 404)
