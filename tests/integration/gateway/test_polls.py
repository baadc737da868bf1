"""Clients poll queue, history and jobs ten times a second: that is cheap, and never old."""

import asyncio
from pathlib import Path
from uuid import uuid4

from tests.support.databases.factory import Databases
from tests.support.server.gateway import PROMPT, gateway_on

from comfyfleet.server.gateway.history import PollCache

POLLS = ("/history", "/queue", "/api/jobs")


async def test_an_answer_is_made_once_until_something_changes() -> None:
    cache, made = PollCache(), []

    async def make() -> bytes:
        made.append(1)
        return b"%d" % len(made)

    user, other = uuid4(), uuid4()
    assert [await cache.get(user, "history", make) for _ in range(3)] == [b"1"] * 3
    assert await cache.get(other, "history", make) == b"2"
    cache.forget(user)
    assert await cache.get(user, "history", make) == b"3"
    assert await cache.get(other, "history", make) == b"2"


async def test_an_answer_that_was_old_when_it_was_made_is_not_kept() -> None:
    cache, user = PollCache(), uuid4()

    async def make() -> bytes:
        cache.forget(user)
        return b"old"

    async def make_new() -> bytes:
        return b"new"

    assert await cache.get(user, "queue", make) == b"old"
    assert await cache.get(user, "queue", make_new) == b"new"


async def test_what_a_client_has_changed_is_in_its_next_poll(
    sqlite_databases: Databases, tmp_path: Path
) -> None:
    async with gateway_on(sqlite_databases, tmp_path) as server:
        user = await server.new_user()

        def run() -> None:
            with user.open_engine_client() as talk:
                for path in POLLS:
                    talk.http.get(path)
                ear = talk.listen("me")
                prompt_id = talk.submit(PROMPT, client_id="me")
                ear.wait("executing", {"node": None})
                assert list(talk.http.get("/history").json()) == [prompt_id]
                assert talk.http.get("/queue").json()["queue_running"] == []
                assert talk.http.get("/api/jobs").json()["jobs"][0]["status"] == "completed"
                talk.http.post("/history", json={"clear": True})
                assert talk.http.get("/history").json() == {}

        await asyncio.to_thread(run)
