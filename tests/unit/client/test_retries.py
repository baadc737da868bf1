"""When the client asks again, and when it must not."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest

from comfyfleet.client import Client, Patience
from comfyfleet.client.files import download_file
from comfyfleet.errors import (
    Conflict,
    InsufficientTokens,
    InvalidInput,
    NotFound,
    OutcomeUnknown,
    QueueFull,
    ServerUnavailable,
    Unavailable,
    UnexpectedAnswer,
)

EFFECT = "7f1c6a52-0000-4000-8000-000000000001"
JOB = "7f1c6a52-0000-4000-8000-000000000002"
AT = "2026-05-01T06:00:00Z"
Step = Callable[[httpx.Request], httpx.Response] | httpx.Response | type[httpx.TransportError]


class Script:
    """Answers one by one; the last one again and again."""

    def __init__(self, *steps: Step) -> None:
        self.steps = list(steps)
        self.heard: list[httpx.Request] = []
        self.slept: list[float] = []

    async def answer(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        self.heard.append(request)
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        if isinstance(step, type):
            raise step("cut", request=request)
        return step if isinstance(step, httpx.Response) else step(request)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    @property
    def client(self) -> Client:
        patience = Patience(attempts_max=4, sleep=self.sleep, chance=lambda: 1.0)
        return Client(
            "http://fleet.test/", "cf_1", patience=patience, transport=httpx.MockTransport(self.answer)
        )  # fmt: skip


def job(status: str = "queued") -> httpx.Response:
    return httpx.Response(201, json={"id": JOB, "status": status, "submitted_at": AT})


def refused(status: int, code: str, headers: dict[str, str] | None = None, **details: Any) -> Step:
    body = {"error": {"code": code, "message": "no", "details": details}}
    return lambda _request: httpx.Response(status, json=body, headers=headers)


def bodies(script: Script) -> list[dict[str, Any]]:
    return [json.loads(each.content) for each in script.heard]


@pytest.mark.parametrize("trouble", [httpx.ConnectError, httpx.ReadError, httpx.ReadTimeout])
async def test_a_submit_is_repeated_with_the_same_idempotency_key(
    trouble: type[httpx.TransportError],
) -> None:
    script = Script(trouble, trouble, job())
    async with script.client as client:
        handle = await client.apply(UUID(EFFECT), properties={"width": 8})
    keys = {each["idempotency_key"] for each in bodies(script)}
    assert len(script.heard) == 3
    assert keys == {handle.idempotency_key}
    assert script.slept == [0.25, 0.5]


async def test_each_submit_has_a_key_of_its_own() -> None:
    script = Script(job())
    async with script.client as client:
        await client.apply(EFFECT)
        await client.apply(EFFECT)
        await client.apply(EFFECT, idempotency_key="mine")
    first, second, third = (each["idempotency_key"] for each in bodies(script))
    assert first != second
    assert third == "mine"


async def test_a_full_queue_is_waited_for_as_long_as_it_says() -> None:
    script = Script(refused(429, "queue_full", {"Retry-After": "7"}), job())
    async with script.client as client:
        await client.apply(EFFECT)
    assert script.slept == [7.0]


async def test_a_date_to_come_again_is_waited_for_by_the_servers_clock() -> None:
    date = "Wed, 21 Oct 2026 07:28:0{} GMT"
    headers = {"Retry-After": date.format(5), "Date": date.format(1)}
    script = Script(refused(429, "queue_full", headers), job())
    async with script.client as client:
        await client.apply(EFFECT)
    assert script.slept == [4.0]


async def test_who_says_come_back_in_an_hour_is_not_waited_for() -> None:
    script = Script(refused(429, "queue_full", {"Retry-After": "3600"}))
    async with script.client as client:
        with pytest.raises(QueueFull):
            await client.apply(EFFECT)
    assert len(script.heard) == 1


async def test_attempts_end() -> None:
    script = Script(refused(503, "unavailable", {"Retry-After": "1"}))
    async with script.client as client:
        with pytest.raises(Unavailable):
            await client.wallet()
    assert len(script.heard) == 4


async def test_nobody_there_is_said_as_such() -> None:
    async with Script(httpx.ConnectError).client as client:
        with pytest.raises(ServerUnavailable):
            await client.wallet()


async def test_what_may_have_been_heard_and_would_count_twice_is_not_said_again() -> None:
    script = Script(httpx.ReadError)
    async with script.client as client:
        with pytest.raises(OutcomeUnknown):
            await client.create_key("laptop")
    assert len(script.heard) == 1


async def test_what_was_not_sent_at_all_is_said_again() -> None:
    made = {
        "id": JOB,
        "name": "a",
        "prefix": "cf_",
        "scopes": [],
        "created_at": "2026-01-01T00:00Z",
    }
    script = Script(httpx.ConnectError, httpx.Response(201, json=made))
    async with script.client as client:
        assert (await client.create_key("laptop")).id == UUID(JOB)


async def test_a_503_is_not_taken_for_unheard_where_that_would_count_twice() -> None:
    script = Script(refused(503, "unavailable", {"Retry-After": "1"}))
    async with script.client as client:
        with pytest.raises(Unavailable):
            await client.create_key("laptop")
    assert len(script.heard) == 1


async def test_errors_of_the_api_are_ours_with_code_and_details() -> None:
    poor = refused(422, "insufficient_tokens", required_tokens=5, balance=2)
    async with Script(poor).client as client:
        with pytest.raises(InsufficientTokens) as caught:
            await client.apply(EFFECT)
    assert caught.value.details == {"required_tokens": 5, "balance": 2}
    async with Script(refused(409, "conflict", field="idempotency_key")).client as client:
        with pytest.raises(Conflict) as conflict:
            await client.apply(EFFECT)
    assert conflict.value.details["field"] == "idempotency_key"
    assert conflict.value.details["status"] == 409


async def test_the_cause_of_a_refusal_has_the_response_and_tells_no_right_to_a_file(
    tmp_path: Path,
) -> None:
    script = Script(refused(404, "not_found", {"Retry-After": "7"}))
    async with script.client as client:
        with pytest.raises(NotFound) as caught:
            await download_file(client.calls, "http://store.test/a.png?sig=right", tmp_path / "a")
    cause = caught.value.__cause__
    assert isinstance(cause, httpx.HTTPStatusError)
    assert cause.response.headers["retry-after"] == "7"
    assert str(cause) == "GET /a.png was answered 404"


async def test_a_code_of_a_newer_control_plane_is_kept() -> None:
    async with Script(refused(418, "teapot", message="x")).client as client:
        with pytest.raises(Exception, match="no") as caught:
            await client.wallet()
    assert caught.value.details["code"] == "teapot"  # type: ignore[attr-defined]


async def test_a_page_of_a_proxy_is_no_answer_of_ours() -> None:
    async with Script(httpx.Response(200, text="<html>")).client as client:
        with pytest.raises(UnexpectedAnswer):
            await client.wallet()
    with pytest.raises(InvalidInput):
        Client("fleet.test", "cf_1")


def stream(text: str) -> httpx.Response:
    return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})


async def test_a_cut_stream_is_resumed_after_the_last_event_that_was_told() -> None:
    script = Script(
        job(),
        stream('id: 1\nevent: status\ndata: {"status": "queued"}\n\nid: 2\nevent: progress\n'),
        stream('id: 2\nevent: status\ndata: {"status": "completed"}\n\n'),
    )
    async with script.client as client:
        handle = await client.apply(EFFECT)
        told = [event.id async for event in handle.events()]
    assert told == [1, 2]
    assert script.heard[1].headers.get("Last-Event-ID") is None
    assert script.heard[2].headers["Last-Event-ID"] == "1"


async def test_progress_without_a_number_is_told_and_resumed_from_what_had_one() -> None:
    script = Script(
        job(),
        stream('event: progress\ndata: {"percent": 1}\n\nid: 7\nevent: status\ndata: {}\n\n'),
        stream('event: progress\ndata: {"percent": 40.5}\n\n'),
        httpx.Response(204),
    )
    async with script.client as client:
        handle = await client.apply(EFFECT)
        told = [(event.id, event.percent) async for event in handle.events()]
    assert told == [(0, 1.0), (7, None), (7, 40.5)]
    assert script.heard[3].headers["Last-Event-ID"] == "7"


async def test_without_a_stream_the_job_is_polled() -> None:
    script = Script(
        job(), refused(404, "not_found"), job("processing"), job("processing"), job("completed")
    )
    async with script.client as client:
        handle = await client.apply(EFFECT)
        assert (await handle.wait()).status == "completed"
    assert [each.url.path.rpartition("/")[2] for each in script.heard][1:3] == ["events", JOB]
    assert len(script.slept) == 2


async def test_streams_that_tell_nothing_are_given_up_for_polling() -> None:
    script = Script(job(), stream(": hello\n\n"), stream(""), httpx.ReadError, job("completed"))
    async with script.client as client:
        handle = await client.apply(EFFECT)
        assert (await handle.wait()).status == "completed"


async def test_a_url_with_a_right_of_its_own_never_gets_the_key() -> None:
    slot = {"method": "PUT", "url": "http://store.test/x", "headers": {"Content-Type": "image/png"}}
    script = Script(
        httpx.Response(201, json={"file_id": JOB, "upload": slot, "expires_at": AT}),
        httpx.ReadError,
        httpx.Response(200),
        httpx.Response(
            201, json={"id": JOB, "kind": "image", "status": "uploaded", "created_at": AT}
        ),
    )
    told: list[tuple[int, int | None]] = []
    async with script.client as client:
        await client.upload(
            b"x" * 600_000, filename="a.png", progress=lambda *each: told.append(each)
        )
    puts = [each for each in script.heard if each.method == "PUT"]
    assert len(puts) == 2
    assert all("authorization" not in each.headers for each in puts)
    assert puts[1].headers["content-length"] == "600000"
    assert "transfer-encoding" not in puts[1].headers
    assert told[-1] == (600_000, 600_000)


async def test_a_name_with_a_slash_stays_one_part_of_the_path() -> None:
    script = Script(httpx.Response(204))
    async with script.client as client:
        await client.pipelines.delete("cats/spring?")
        await client.graphs.delete("cats/spring?")
    paths = [each.url.raw_path for each in script.heard]
    assert paths == [b"/api/pipelines/cats%2Fspring%3F", b"/api/graphs/cats%2Fspring%3F"]


async def test_a_download_that_was_cut_is_made_again_and_leaves_one_whole_file(
    tmp_path: Path,
) -> None:
    made = {"name": "out", "filename": "a.png", "url": "http://store.test/a"}
    done = {"id": JOB, "status": "completed", "submitted_at": AT, "outputs": [made]}

    async def cut() -> AsyncIterator[bytes]:
        yield b"x" * 100
        raise httpx.ReadError("cut")

    script = Script(
        httpx.Response(200, json=done),
        httpx.Response(200, json=done),
        httpx.Response(200, content=cut()),
        httpx.Response(200, content=b"x" * 300),
    )
    told: list[tuple[int, int | None]] = []
    async with script.client as client:
        handle = await client.job(JOB)
        (path,) = await handle.download(tmp_path / "new", progress=lambda *each: told.append(each))
    assert path.read_bytes() == b"x" * 300
    assert list(path.parent.iterdir()) == [path]
    assert told == [(100, None), (300, 300)]
    assert all("authorization" not in each.headers for each in script.heard[2:])
