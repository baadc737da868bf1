"""How files come in: announced, sent, checked for what they are, stored once."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.customers import Customer, EffectSetup, effect_setup_on, png

from comfyfleet.transport.fetch import PublicHttpClient

PUBLIC_ADDRESS = "93.184.216.34"


async def stored(effect_setup: EffectSetup, customer: Customer) -> list[str]:
    prefix = f"tenants/{customer.tenant_id}/files/"
    await effect_setup.plane.context.deferred.flush()
    return [key async for key in effect_setup.plane.store.keys(prefix)]


async def link(customer: Customer, file_id: str) -> httpx.Response:
    return await customer.client.post("/api/videos", json={"file_id": file_id})


async def test_what_can_not_be_media_is_refused_before_a_byte_is_sent(ada: Customer) -> None:
    wrong: list[tuple[dict[str, Any], int, str]] = [
        ({"content_type": "application/pdf"}, 422, "invalid_input"),
        ({"content_type": "image/ png"}, 422, "invalid_input"),
        ({"size": 0}, 422, "invalid_input"),
        ({"size": 10**12}, 413, "limit_exceeded"),
        ({"filename": ""}, 422, "invalid_input"),
        ({"filename": "a\0b"}, 422, "invalid_input"),
        ({"effect_id": str(uuid4())}, 404, "not_found"),
    ]
    for changes, status, code in wrong:
        body = {"filename": "cat.png", "content_type": "image/png", "size": 9, **changes}
        refused = await ada.client.post("/api/videos/uploads", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code), changes


async def test_an_effect_says_what_it_takes_before_a_byte_is_sent(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    small = await effect_setup.publish("small", "invert", max_upload_bytes=10)
    body = {"filename": "a.png", "content_type": "image/png", "size": 11}
    for effect, status in ((small, 413), (effect_setup.draw, 422), (effect_setup.invert, 201)):
        answer = await ada.client.post(
            "/api/videos/uploads", json={**body, "effect_id": str(effect.id)}
        )
        assert answer.status_code == status, answer.text


async def test_a_file_must_be_there_and_be_what_it_claims(ada: Customer) -> None:
    announced = await ada.client.post(
        "/api/videos/uploads",
        json={"filename": "cat.png", "content_type": "image/png", "size": 9},
    )
    never_sent = await link(ada, announced.json()["file_id"])
    assert (never_sent.status_code, never_sent.json()["error"]["code"]) == (422, "refused")
    no_picture = await link(ada, await ada.upload(b"<html>no picture</html>"))
    assert (no_picture.status_code, no_picture.json()["error"]["code"]) == (422, "invalid_input")
    other_kind = await link(ada, await ada.upload(png(), content_type="video/mp4"))
    assert other_kind.status_code == 422
    assert (await link(ada, str(uuid4()))).status_code == 404
    for body in ({}, {"file_id": str(uuid4()), "url": "https://x.example/"}):
        assert (await ada.client.post("/api/videos", json=body)).status_code == 422


async def test_linking_again_gives_the_same_media(ada: Customer) -> None:
    file_id = await ada.upload()
    answers = await asyncio.gather(*(link(ada, file_id) for _ in range(4)))
    answers.append(await link(ada, file_id))
    assert sorted(each.status_code for each in answers) == [200, 200, 200, 200, 201]
    assert len({each.json()["id"] for each in answers}) == 1
    assert len((await ada.get("videos"))["videos"]) == 1


async def test_the_same_content_is_stored_once_per_user(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    colleague = await effect_setup.customer(ada.tenant_id)
    stranger = await effect_setup.customer()
    mine, twin_file = await ada.video(), await ada.upload()
    twin = (await link(ada, twin_file)).json()
    theirs = await colleague.video()
    assert len({mine, twin["id"], theirs}) == 3
    assert len(await stored(effect_setup, ada)) == 2  # one of each user
    # The answer may have been lost: the file is gone, and its media is not.
    again = await link(ada, twin_file)
    assert (again.status_code, again.json()["id"]) == (200, twin["id"])
    shown = await colleague.get(f"videos/{theirs}")
    assert (await colleague.client.get(shown["original_file_url"])).content == png()
    await ada.video(png(colour=1))
    await stranger.video()
    assert (len(await stored(effect_setup, ada)), len(await stored(effect_setup, stranger))) == (
        3,
        1,
    )


async def test_a_name_never_becomes_a_path(effect_setup: EffectSetup, ada: Customer) -> None:
    await ada.video(filename="../../../etc/passwd.png")
    (key,) = await stored(effect_setup, ada)
    assert "passwd" not in key
    assert key.endswith(".png")


async def test_media_is_listed_page_by_page(ada: Customer) -> None:
    made = [await ada.video(png(colour=each)) for each in range(3)]
    first = await ada.get("videos", limit=2)
    assert [each["id"] for each in first["videos"]] == made[:0:-1]
    rest = await ada.get("videos", limit=2, before=first["next"])
    assert ([each["id"] for each in rest["videos"]], rest["next"]) == ([made[0]], None)
    assert rest["videos"][0]["status"] == "uploaded"


async def test_a_signed_url_can_not_be_bent(effect_setup: EffectSetup, ada: Customer) -> None:
    video = await ada.get(f"videos/{await ada.video()}")
    stranger = await effect_setup.customer()
    other = await stranger.get(f"videos/{await stranger.video(png(colour=7))}")
    url = httpx.URL(video["original_file_url"])
    bent = [
        url.copy_with(path=httpx.URL(other["original_file_url"]).path),
        url.copy_merge_params({"expires": "9999999999"}),
        url.copy_remove_param("signature"),
    ]
    for each in bent:
        assert (await ada.client.get(each)).status_code in (400, 403), each
    put = await ada.client.put(url, content=b"x", headers={"Content-Type": "image/png"})
    assert put.status_code in (400, 403)
    assert (await ada.client.get(url)).status_code == 200


async def test_an_upload_is_taken_in_its_size_and_type_only(ada: Customer) -> None:
    announced = await ada.client.post(
        "/api/videos/uploads",
        json={"filename": "cat.png", "content_type": "image/png", "size": 5},
    )
    slot = announced.json()["upload"]
    for content, headers in (
        (b"123456", slot["headers"]),
        (b"12345", {"Content-Type": "text/html"}),
    ):
        put = await ada.client.put(slot["url"], content=content, headers=headers)
        assert put.status_code == 403, put.text


def sending(content: bytes) -> Callable[[httpx.Request], httpx.Response]:
    async def pieces() -> AsyncIterator[bytes]:
        yield content

    return lambda _: httpx.Response(200, content=pieces())


class Outside:
    """The internet, as far as a test needs it."""

    def __init__(self) -> None:
        self.answer: Callable[[httpx.Request], httpx.Response] = lambda _: httpx.Response(404)
        self.address = PUBLIC_ADDRESS

    async def resolve(self, host: str, port: int) -> list[str]:
        return [self.address]

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        return self.answer(request)

    def outward(self) -> PublicHttpClient:
        return PublicHttpClient(resolver=self.resolve, transport=httpx.MockTransport(self))


@pytest.fixture
def outside() -> Outside:
    return Outside()


@pytest.fixture
async def open_shop(
    databases: Databases, tmp_path: Path, outside: Outside
) -> AsyncIterator[EffectSetup]:
    async with (
        plane_on(databases, tmp_path, max_upload_bytes=1000) as plane,
        effect_setup_on(replace(plane, outward=outside.outward())) as effect_setup,
    ):
        yield effect_setup


async def fetch(customer: Customer, url: str) -> httpx.Response:
    return await customer.client.post("/api/videos", json={"url": url})


async def test_media_is_fetched_from_a_url_and_stored_once(
    open_shop: EffectSetup, outside: Outside
) -> None:
    customer = await open_shop.customer()
    outside.answer = sending(png())
    first = await fetch(customer, "https://pictures.example/a/cat.png?size=9")
    again = await fetch(customer, "https://pictures.example/b.png")
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json()["kind"] == "image"
    assert (await customer.client.get(again.json()["original_file_url"])).content == png()
    assert first.json()["id"] != again.json()["id"]
    assert len(await stored(open_shop, customer)) == 1
    assert (await link(customer, await customer.upload())).status_code == 201
    assert len(await stored(open_shop, customer)) == 1
    job = await customer.submit(open_shop.invert, video_id=first.json()["id"])
    assert job.status_code == 201, job.text


async def test_what_is_no_media_or_too_large_is_not_fetched(
    open_shop: EffectSetup, outside: Outside
) -> None:
    customer = await open_shop.customer()
    for content, status, code in (
        (b"<html></html>", 422, "input_unavailable"),
        (png() + b"\0" * 2000, 413, "limit_exceeded"),
    ):
        outside.answer = sending(content)
        refused = await fetch(customer, "https://pictures.example/cat.png")
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
    assert await stored(open_shop, customer) == []


async def test_nothing_is_fetched_from_inside(open_shop: EffectSetup, outside: Outside) -> None:
    customer = await open_shop.customer()
    outside.answer = sending(png())
    for url in (
        "http://127.0.0.1/cat.png",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]/",
        "file:///etc/passwd",
        "https://user@pictures.example/",
        "https://pictures.example:22/",
        "nonsense",
    ):
        assert (await fetch(customer, url)).status_code == 422, url


async def test_a_name_that_leads_inside_is_not_followed(
    open_shop: EffectSetup, outside: Outside
) -> None:
    customer = await open_shop.customer()
    outside.answer = sending(png())
    outside.address = "10.0.0.7"
    refused = await fetch(customer, "https://rebound.example/cat.png")
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "input_unavailable")


async def test_a_user_fetches_so_much_at_once(open_shop: EffectSetup, outside: Outside) -> None:
    customer = await open_shop.customer()
    advance = asyncio.Event()

    class Slow(Outside):
        async def __call__(self, request: httpx.Request) -> httpx.Response:
            await advance.wait()
            return sending(png())(request)

    slow = replace(open_shop.plane, outward=Slow().outward())
    customer.client._transport.app.state.plane = slow  # type: ignore[attr-defined]
    fetching = [asyncio.create_task(fetch(customer, "https://slow.example/")) for _ in range(4)]
    done, _ = await asyncio.wait(fetching, return_when=asyncio.FIRST_COMPLETED)
    refused = done.pop().result()
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_calls")
    advance.set()
    answers = await asyncio.gather(*fetching)
    assert sorted(each.status_code for each in answers) == [201, 201, 201, 429]


async def test_a_result_belongs_to_its_job(effect_setup: EffectSetup, ada: Customer) -> None:
    video = await ada.video()
    first = await ada.job(effect_setup.invert, video_id=video)
    await effect_setup.work(png(colour=1))
    done = await ada.get(f"videos/{video}")
    assert (await ada.client.get(done["processed_file_url"])).content == png(colour=1)
    second = await ada.job(effect_setup.invert, video_id=video)
    waiting = await ada.get(f"videos/{video}")
    assert (waiting["status"], waiting["processed_file_url"]) == ("queued", None)
    await effect_setup.fail()
    failed = await ada.get(f"videos/{video}")
    assert (failed["status"], failed["processed_file_url"]) == ("failed", None)
    assert [(each["job_id"], each["status"], bool(each["url"])) for each in failed["results"]] == [
        (second, "failed", False),
        (first, "completed", True),
    ]
    assert {each["effect_id"] for each in failed["results"]} == {str(effect_setup.invert.id)}
    kept = failed["results"][1]["url"]
    assert (await ada.client.get(kept)).content == png(colour=1)


async def test_several_jobs_run_on_one_media_at_once(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    video = await ada.video()
    ids = [await ada.job(effect_setup.invert, video_id=video) for _ in range(2)]
    await effect_setup.work(png(colour=1))
    seen = await ada.get(f"videos/{video}")
    assert (seen["job_id"], seen["status"], seen["processed_file_url"]) == (ids[1], "queued", None)
    await effect_setup.work(png(colour=2))
    seen = await ada.get(f"videos/{video}")
    assert (await ada.client.get(seen["processed_file_url"])).content == png(colour=2)
    items = [{"video_id": video} for _ in range(8)]
    batch = await ada.client.post(
        "/api/ai-jobs/batches", json={"effect_id": str(effect_setup.invert.id), "items": items}
    )
    assert batch.status_code == 201, batch.text
    assert len((await ada.get(f"videos/{video}"))["results"]) == 10
