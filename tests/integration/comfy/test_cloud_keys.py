"""The key goes to the cloud and nowhere else: not to a storage, not into a log."""

import logging
import os
from pathlib import Path

import pytest
from tests.integration.comfy.clouds import JOB, KEY, RUN, V1, V2, cloud_of, job
from tests.support.backends.comfy_cloud import CloudAccount, serving_cloud
from tests.support.backends.prompts import new_color, picture, run
from tests.support.backends.scripted_server import (
    Reaction,
    Reply,
    ScriptedRequest,
    json_reply,
    serving_script,
)

from comfyfleet.comfy import Backend, CloudSettings, ComfyCloud, OutputFile, cloud_settings
from comfyfleet.errors import AccessDenied, FileGone, ServerUnavailable, UnexpectedAnswer

FILE = OutputFile("9", "images", "a.png", reference="asset-1")
WITH_COOKIE = {"set-cookie": "session=secret; Path=/"}


def redirect(to: str) -> Reply:
    return Reply(302, b"", {"location": to, **WITH_COOKIE})


def stored(asked: ScriptedRequest) -> Reaction:
    return Reply(200, b"picture", {"content-type": "image/png"})


@pytest.mark.parametrize("api", ["v1", "v2"])
async def test_a_redirect_is_followed_without_key_or_cookie(api: str, tmp_path: Path) -> None:
    async with serving_script(stored) as storage:
        to = redirect(f"{storage.url}/signed?signature=1")
        views = {"GET /api/view": to, "GET /api/v2/assets/asset-1/content": to}
        async with cloud_of({**(V1 if api == "v1" else V2), **views}) as stage:
            fetched = await stage.cloud.fetch(FILE, tmp_path / "a.png")
        asked = stage.server.asked[-1]
        assert KEY in (asked.headers.get("x-api-key", "") + asked.headers.get("authorization", ""))
    (request,) = storage.asked
    assert request.target == "/signed?signature=1"
    assert set(request.headers) == {"host"}
    assert (fetched.path.read_bytes(), fetched.content_type) == (b"picture", "image/png")


async def test_a_chain_of_redirects_has_an_end(tmp_path: Path) -> None:
    async with serving_script(lambda asked: redirect(asked.target)) as storage:
        async with cloud_of({**V1, "GET /api/view": redirect(storage.url)}) as stage:
            with pytest.raises(UnexpectedAnswer):
                await stage.cloud.fetch(FILE, tmp_path / "a.png")
        assert len(storage.asked) == 3
    assert os.listdir(tmp_path) == []


async def test_a_redirect_to_the_cloud_itself_has_no_key_either(tmp_path: Path) -> None:
    replies = {**V1, "GET /api/view": redirect("/signed"), "GET /signed": Reply(200, b"x")}
    async with cloud_of(replies) as stage:
        await stage.cloud.fetch(FILE, tmp_path / "a.png")
    assert set(stage.server.asked[-1].headers) == {"host"}


async def test_a_download_that_is_cut_is_begun_again_and_appears_whole(tmp_path: Path) -> None:
    half = Reply(200, b"whole picture", sent_bytes_max=5)
    replies = {**V1, "GET /api/view": [half, Reply(503), Reply(200, b"whole picture")]}
    async with cloud_of(replies) as stage:
        fetched = await stage.cloud.fetch(FILE, tmp_path / "a.png")
    assert fetched.path.read_bytes() == b"whole picture"
    async with cloud_of({**V1, "GET /api/view": half}) as stage:
        with pytest.raises(ServerUnavailable):
            await stage.cloud.fetch(FILE, tmp_path / "b.png")
    assert os.listdir(tmp_path) == ["a.png"]


async def test_a_file_that_the_storage_no_longer_has_is_gone(tmp_path: Path) -> None:
    async with cloud_of({**V1, "GET /api/view": redirect("/gone")}) as stage:
        with pytest.raises(FileGone):
            await stage.cloud.fetch(FILE, tmp_path / "a.png")


async def test_v2_a_link_to_another_host_does_not_get_the_key() -> None:
    foreign = job("running", urls={"events": "http://127.0.0.1:9/events"})
    async with cloud_of({**V2, f"GET /api/v2/jobs/{JOB}": json_reply(foreign)}) as stage:
        with pytest.raises(UnexpectedAnswer, match="must not receive the key"):
            await anext(aiter(stage.cloud.follow(JOB)))


async def test_no_log_and_no_error_has_the_key(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG)
    with serving_cloud({KEY: CloudAccount("alice")}) as served:
        async with ComfyCloud(CloudSettings(KEY, served.url)) as cloud:
            backend: Backend = cloud
            run_id, events = await run(backend, picture(new_color()))
            (file,) = (await backend.outputs(run_id)).files
            await backend.fetch(file, tmp_path / "a.png")
        assert len(events) > 3
    # The engine is in this process, too, and its server logs what it is asked.
    own = [record for record in caplog.records if not record.name.startswith("uvicorn")]
    logged = [f"{record.getMessage()} {record.__dict__}" for record in own]
    assert len(logged) > 5
    assert not [text for text in logged if KEY in text]
    # Who has the signed address has the file.
    assert not [text for text in logged if "/storage/" in text and "httpcore" not in text]


async def test_a_wrong_key_is_told_without_it() -> None:
    with serving_cloud({KEY: CloudAccount("alice")}) as served:
        async with ComfyCloud(CloudSettings("wrong-key", served.url)) as cloud:
            with pytest.raises(AccessDenied) as caught:
                await cloud.queue_length()
    assert "wrong-key" not in str(caught.value)


def test_settings_come_from_the_environment_and_hide_the_key() -> None:
    environ = {"COMFY_CLOUD_API_KEY": KEY, "COMFYUI_POLL_INTERVAL": "2"}
    settings = cloud_settings(environ)
    assert (settings.key, settings.base_url) == (KEY, "https://cloud.comfy.org")
    assert settings.limits.poll_seconds == 2
    assert KEY not in repr(settings)
    other = cloud_settings({"COMFY_CLOUD_BASE_URL": "https://x.run.comfy.app"})
    assert other.base_url == "https://x.run.comfy.app"


async def test_which_api_is_asked_once_and_a_failure_settles_nothing() -> None:
    (probe,) = V2
    found = V2[probe]
    assert isinstance(found, Reaction)
    lost = [Reply(500)] * 3
    jobs = json_reply({"jobs": [], "truncated": False})
    async with cloud_of({probe: [*lost, found], "GET /api/v2/jobs": jobs}) as stage:
        with pytest.raises(ServerUnavailable):
            await stage.cloud.queue_length()
        assert [await stage.cloud.queue_length() for _ in range(3)] == [0, 0, 0]
        assert await stage.cloud.api() == "v2"
    assert [asked.path for asked in stage.server.asked].count(probe.split()[1]) == 4


async def test_a_server_that_is_no_cloud_is_told_as_such() -> None:
    async with cloud_of({}) as stage:
        with pytest.raises(UnexpectedAnswer, match=r"isn.t Comfy Cloud"):
            await stage.cloud.submit({}, prompt_id=RUN)
