"""Clients poll queue, history and jobs ten times a second: that is cheap, and never old."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import UUID, uuid4

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.gateway import (
    PROMPT,
    GatewayInProcess,
    gateway_on,
    history_entry,
    until,
)

from comfyfleet.server.db import Database
from comfyfleet.server.gateway import history
from comfyfleet.server.gateway.feed import UserFeed
from comfyfleet.server.gateway.history import BoundedCache, PollAnswer, PollCache
from comfyfleet.server.jobs import service as jobs

POLLS = ("/history", "/queue", "/api/jobs", "/prompt", "/api/history", "/history?max_items=1")


async def test_an_answer_is_made_once_until_something_changes() -> None:
    cache, made = PollCache(), []

    async def make() -> bytes:
        made.append(1)
        return b"%d" % len(made)

    user, other = uuid4(), uuid4()
    assert [(await cache.get(user, "history", make)).body for _ in range(3)] == [b"1"] * 3
    assert (await cache.get(other, "history", make)).body == b"2"
    cache.forget(user)
    assert (await cache.get(user, "history", make)).body == b"3"
    assert (await cache.get(other, "history", make)).body == b"2"
    cache.forget_all()
    assert (await cache.get(other, "history", make)).body == b"4"


async def test_an_answer_that_was_old_when_it_was_made_is_not_kept() -> None:
    cache, user = PollCache(), uuid4()

    async def make() -> bytes:
        cache.forget(user)
        return b"old"

    async def make_new() -> bytes:
        return b"new"

    assert (await cache.get(user, "queue", make)).body == b"old"
    assert (await cache.get(user, "queue", make_new)).body == b"new"


async def test_changes_of_many_users_are_remembered_in_little_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history, "USERS_KEPT_MAX", 2)
    cache, users = PollCache(), [uuid4() for _ in range(5)]

    async def make_old() -> bytes:
        return b"old"

    async def make_new() -> bytes:
        return b"new"

    for user in users:
        await cache.get(user, "queue", make_old)
    for user in users:
        cache.forget(user)
    found = [(await cache.get(user, "queue", make_new)).body for user in users]
    assert found == [b"new"] * 5
    assert len(cache._changed) == 2


def test_what_is_kept_is_bounded_by_its_bytes() -> None:
    cache = BoundedCache(1_000)
    for number in range(100):
        cache.keep(number, number, 300)
    assert cache.size <= 1_000
    assert [each for each in range(100) if cache.get(each) is not None] == [97, 98, 99]
    cache.get(97)
    cache.keep("large", "large", 600)
    assert cache.get(97) == 97
    cache.keep("too large", "too large", 2_000)
    assert (cache.get("too large"), cache.size) == (None, 0)


async def test_a_history_as_large_as_allowed_is_made_once() -> None:
    cache, made = PollCache(), list[str]()

    async def make() -> bytes:
        made.append("made")
        return bytes(2 * history.BODY_BYTES_MAX)  # with a last prompt that is as large by itself

    user_id = uuid4()
    for _ in range(3):
        await cache.get(user_id, "history", make)
    assert made == ["made"]


async def test_an_answer_that_is_too_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "CACHED_ANSWER_BYTES_MAX", 10)
    cache = PollCache()

    async def make() -> bytes:
        return b"x" * 11

    assert isinstance(await cache.get(uuid4(), "history", make), PollAnswer)
    assert cache.entries.size == 0


@contextlib.contextmanager
def counted_reads(pool: Database) -> Iterator[list[str]]:
    """How often the database is read inside of the block."""
    read, counted = pool.read, list[str]()

    def counting() -> Any:
        counted.append("read")
        return read()

    with mock.patch.object(pool, "read", counting):
        yield counted


@contextlib.asynccontextmanager
async def polling(
    databases: Databases, folder: Path
) -> AsyncIterator[tuple[GatewayInProcess, httpx.AsyncClient]]:
    async with gateway_on(databases, folder) as server:
        user = await server.new_user()
        async with user.http_async() as http:
            yield server, http


async def run(http: httpx.AsyncClient, color: int = 0) -> str:
    prompt = {**PROMPT, "1": {**PROMPT["1"], "inputs": {**PROMPT["1"]["inputs"], "color": color}}}
    prompt_id = str((await http.post("/prompt", json={"prompt": prompt})).json()["prompt_id"])
    await until(lambda: history_entry(http, prompt_id))
    return prompt_id


async def polls_that_read_nothing(
    server: GatewayInProcess, http: httpx.AsyncClient, paths: Sequence[str]
) -> tuple[dict[str, httpx.Response], list[str]]:
    """The end of a run may still be told for a moment: of ten rounds, one must read nothing."""
    for _ in range(10):
        first = {path: await http.get(path) for path in paths}
        with counted_reads(server.plane.pools["main"]) as reads:
            for path, before in first.items():
                again = await http.get(path)
                assert (again.status_code, again.content) == (200, before.content), path
                etag = {"If-None-Match": before.headers["etag"]}
                unchanged = await http.get(path, headers=etag)
                assert (unchanged.status_code, unchanged.content) == (304, b""), path
        if not reads:
            break
    return first, reads


async def test_polls_of_what_has_not_changed_read_nothing(
    databases: Databases, tmp_path: Path
) -> None:
    async with polling(databases, tmp_path) as (server, http):
        prompt_id = await run(http)
        paths = (*POLLS, f"/history/{prompt_id}", f"/history/{uuid4()}")
        first, reads = await polls_that_read_nothing(server, http, paths)
        assert reads == []
        another = await run(http, 1)
        assert (await http.get("/history")).json().keys() == {prompt_id, another}
        changed = await http.get(
            "/history", headers={"If-None-Match": first["/history"].headers["etag"]}
        )
        assert changed.status_code == 200


async def test_after_a_change_only_what_has_changed_is_read(
    databases: Databases, tmp_path: Path
) -> None:
    async with polling(databases, tmp_path) as (_, http):
        known = [await run(http, number) for number in range(3)]
        for path in POLLS:
            await http.get(path)
        new = await run(http, 3)
        read = jobs.get_many
        asked: list[UUID] = []

        async def reading(tx: Any, tenant_id: UUID, job_ids: Sequence[UUID]) -> Any:
            asked.extend(job_ids)
            return await read(tx, tenant_id, job_ids)

        with mock.patch.object(jobs, "get_many", reading):
            listed = (await http.get("/history")).json()
            among = (await http.get("/api/jobs")).json()["jobs"]
        assert list(listed) == [*known, new]
        assert [each["id"] for each in among] == [*known, new][::-1]
        assert len(set(asked)) <= 1
        await http.post("/history", json={"delete": [known[0]]})
        with mock.patch.object(jobs, "get_many", reading):
            asked.clear()
            assert list((await http.get("/history")).json()) == [*known[1:], new]
        assert asked == []


async def test_a_prompt_that_waits_runs_and_ends_is_in_the_next_poll(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is made anew because it is old.
    monkeypatch.setattr(history, "NOTIFIED_SECONDS", 3600.0)
    monkeypatch.setattr(history, "UNNOTIFIED_SECONDS", 3600.0)
    async with polling(databases, tmp_path) as (_, http):
        for path in POLLS:
            await http.get(path)
        steps = {"steps": 1, "step_ms": 400, "previews": False, "image": ["1", 0]}
        slow = {**PROMPT, "2": {"class_type": "ComfyfleetSteps", "inputs": steps}}
        ids = [
            (await http.post("/prompt", json={"prompt": slow})).json()["prompt_id"]
            for _ in range(2)
        ]
        assert (await http.get("/prompt")).json()["exec_info"]["queue_remaining"] == 2
        await until(lambda: is_running(http, ids[0]))
        assert [row[1] for row in (await http.get("/queue")).json()["queue_pending"]] == ids[1:]
        states = {
            each["id"]: each["status"] for each in (await http.get("/api/jobs")).json()["jobs"]
        }
        assert states == {ids[0]: "in_progress", ids[1]: "pending"}
        await http.post("/queue", json={"delete": ids[1:]})
        assert (await http.get("/queue")).json()["queue_pending"] == []
        await until(lambda: history_entry(http, ids[0]))
        assert list((await http.get("/history")).json()) == ids[:1]
        assert (await http.get("/prompt")).json()["exec_info"]["queue_remaining"] == 0
        await http.post("/history", json={"clear": True})
        assert (await http.get("/history")).json() == {}
        assert (await http.get("/api/jobs")).json()["jobs"] == []


async def is_running(http: httpx.AsyncClient, prompt_id: str) -> bool:
    running = (await http.get("/queue")).json()["queue_running"]
    return [row[1] for row in running] == [prompt_id]


async def test_what_a_client_hears_of_is_in_its_next_poll(
    sqlite_databases: Databases, tmp_path: Path
) -> None:
    async with gateway_on(sqlite_databases, tmp_path) as server:
        user = await server.new_user()

        def hear() -> None:
            with user.open_engine_client() as talk:
                for path in POLLS:
                    talk.http.get(path)
                ear = talk.listen("me")
                prompt_id = talk.submit(PROMPT, client_id="me")
                ear.wait("executing", {"node": None})
                assert list(talk.http.get("/history").json()) == [prompt_id]
                assert talk.http.get("/queue").json()["queue_running"] == []
                assert talk.http.get("/api/jobs").json()["jobs"][0]["status"] == "completed"

        await asyncio.to_thread(hear)


async def test_an_answer_has_a_limit_and_the_last_prompts_are_in_it(
    sqlite_databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "BODY_BYTES_MAX", 1)
    async with gateway_on(sqlite_databases, tmp_path) as server:
        user = await server.new_user()

        def run() -> None:
            with user.open_engine_client() as talk:
                ids = []
                for _ in range(3):
                    ids.append(talk.submit(PROMPT))
                    talk.wait_idle()
                for _ in range(2):
                    assert list(talk.http.get("/history").json()) == ids[-1:]
                assert list(talk.http.get(f"/history/{ids[0]}").json()) == ids[:1]
                assert len(talk.http.get("/api/v2/jobs").json()["jobs"]) == 3

        await asyncio.to_thread(run)


async def test_a_page_of_large_jobs_is_shorter_and_says_where_to_go_on(
    sqlite_databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "READ_FIRST", 2)
    async with polling(sqlite_databases, tmp_path) as (_, http):
        made = [await run(http, number) for number in range(5)]
        monkeypatch.setattr(history, "READ_BYTES_MAX", 1)
        pages: list[list[str]] = []
        cursor: dict[str, str] | None = {}
        while cursor is not None:
            page = (await http.get("/api/v2/jobs", params=cursor)).json()
            pages.append([each["id"] for each in page["jobs"]])
            cursor = {"cursor": page["next_cursor"]} if page["truncated"] else None
    assert [len(each) for each in pages] == [2, 2, 1]
    assert [each for page in pages for each in page] == made[::-1]


async def test_an_operator_finds_a_prompt_by_the_id_that_its_client_knows(
    databases: Databases, tmp_path: Path
) -> None:
    async with polling(databases, tmp_path) as (server, http):
        prompt_id = await run(http)
        headers = {"Authorization": f"Bearer {server.admin_key}"}
        async with httpx.AsyncClient(base_url=f"{server.url}/api/admin", headers=headers) as admin:
            found = (await admin.get("/search", params={"q": prompt_id})).json()["found"]
            assert [each["kind"] for each in found] == ["job"]
            job = (await admin.get(f"/jobs/{found[0]['id']}")).json()
            other = (await admin.get("/search", params={"q": str(uuid4())})).json()["found"]
    assert job["prompt_id"] == prompt_id != job["id"]
    assert other == []


async def test_a_poll_is_answered_after_sockets_are_told_what_it_shows(
    sqlite_databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that finds its prompt gone from the queue stops listening: it must have heard of the run."""
    order: list[str] = []
    look, read = UserFeed._send_changes, history.queue_body

    async def looking(feed: UserFeed) -> None:
        order.append("look")
        await look(feed)
        order.append("told")

    async def reading(*given: Any) -> bytes:
        body = await read(*given)
        order.append("read")
        return body

    monkeypatch.setattr(UserFeed, "_send_changes", looking)
    monkeypatch.setattr(history, "queue_body", reading)
    async with gateway_on(sqlite_databases, tmp_path) as server:
        user = await server.new_user()

        def run() -> list[str]:
            with user.open_engine_client() as talk:
                talk.listen("me")
                talk.submit(PROMPT, client_id="me")
                talk.wait_idle()
                order.clear()
                talk.http.get("/queue?anew")
                return [*order]

        seen = await asyncio.to_thread(run)
    after = seen[seen.index("read") :]
    assert "told" in after[after.index("look") :]
