"""Two control planes: a client listens at one, its prompt is submitted and run at the other."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from tests.support.backends.engine_client import SocketClient
from tests.support.databases.factory import Databases
from tests.support.server.gateway import PROMPT, GatewayInProcess, gateway_on, until

from comfyfleet.server.gateway import feed, history
from comfyfleet.server.gateway.client_socket import GatewaySocket
from comfyfleet.server.http import listener
from comfyfleet.server.run_log import cursors
from comfyfleet.server.run_log.cursors import ClientCursors
from comfyfleet.server.run_log.model import Cursor

WAIT_SECONDS_MAX = 30.0


async def test_a_socket_hears_at_once_what_the_other_control_plane_was_told(
    postgres_databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody looks by itself: only a hint of the other control plane can tell.
    monkeypatch.setattr(feed, "BUSY_SECONDS", 3600.0)
    monkeypatch.setattr(feed, "IDLE_SECONDS", 3600.0)
    both: dict[str, Any] = {
        "central_database_url": await postgres_databases.url("central"),
        "tenant_database_urls": f"main={await postgres_databases.url('tenant')}",
    }
    async with (
        gateway_on(postgres_databases, tmp_path, **both) as with_worker,
        gateway_on(postgres_databases, tmp_path, engines=0, **both) as other,
    ):
        user = await with_worker.new_user()
        elsewhere = replace(user, url=other.url)

        def run() -> None:
            with user.open_engine_client() as here, elsewhere.open_engine_client() as there:
                ear = there.listen("me")
                prompt_id = here.submit(PROMPT, client_id="me")
                ear.wait("execution_success", {"prompt_id": prompt_id})
                ear.wait("executing", {"node": None, "prompt_id": prompt_id})
                assert list(there.http.get("/history").json()) == [prompt_id]

        await asyncio.to_thread(run)


async def test_polls_at_one_show_at_once_what_has_changed_at_the_other(
    postgres_databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is made anew because it is old.
    monkeypatch.setattr(history, "NOTIFIED_SECONDS", 3600.0)
    monkeypatch.setattr(history, "UNNOTIFIED_SECONDS", 3600.0)
    both: dict[str, Any] = {
        "central_database_url": await postgres_databases.url("central"),
        "tenant_database_urls": f"main={await postgres_databases.url('tenant')}",
    }
    async with (
        gateway_on(postgres_databases, tmp_path, **both) as with_worker,
        gateway_on(postgres_databases, tmp_path, engines=0, **both) as other,
    ):
        await until(lambda: hears(other))
        user = await with_worker.new_user()
        async with user.http_async() as here, replace(user, url=other.url).http_async() as there:

            async def shows(path: str, prompt_id: str) -> bool:
                return prompt_id in (await there.get(path)).text

            async def shows_nothing() -> bool:
                return (await there.get("/history")).text == "{}"

            for path in ("/queue", "/history", "/api/jobs"):
                await there.get(path)
            steps = {"steps": 1, "step_ms": 1000, "previews": False, "image": ["1", 0]}
            slow = {**PROMPT, "2": {"class_type": "ComfyfleetSteps", "inputs": steps}}
            prompt_id = (await here.post("/prompt", json={"prompt": slow})).json()["prompt_id"]
            await until(lambda: shows("/queue", prompt_id))
            await until(lambda: shows("/api/jobs", "in_progress"))
            await until(lambda: shows("/history", prompt_id))
            assert not await shows("/queue", prompt_id)
            await here.post("/history", json={"clear": True})
            await until(shows_nothing)


async def hears(server: GatewayInProcess) -> bool:
    return server.plane.context.notifier.hears_others()


async def test_a_client_that_comes_back_elsewhere_misses_nothing_and_hears_nothing_twice(
    postgres_databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only what the first control plane has told can be known at the second.
    monkeypatch.setattr(feed, "MISSED_MAX", timedelta(0))
    both: dict[str, Any] = {
        "central_database_url": await postgres_databases.url("central"),
        "tenant_database_urls": f"main={await postgres_databases.url('tenant')}",
    }
    async with (
        gateway_on(postgres_databases, tmp_path, **both) as with_worker,
        gateway_on(postgres_databases, tmp_path, engines=0, **both) as other,
    ):
        user = await with_worker.new_user()
        elsewhere = replace(user, url=other.url)

        def seen_at(server: GatewayInProcess) -> Cursor | None:
            return server.plane.cursors.of(user.user_id, "me")

        def run() -> None:
            with user.open_engine_client() as here, elsewhere.open_engine_client() as there:
                ear = here.listen("me")
                heard = here.submit(PROMPT, client_id="me")
                ear.wait("executing", {"node": None, "prompt_id": heard})
                ear.close()
                wait_until(lambda: seen_at(with_worker) is not None)
                wait_until(lambda: seen_at(other) == seen_at(with_worker))
                missed = here.submit(PROMPT, client_id="me")
                wait_until(lambda: missed in here.http.get("/history").json())
                again = there.listen("me")
                again.wait("executing", {"node": None, "prompt_id": missed})
                assert heard not in str(again.events)

        await asyncio.to_thread(run)


async def test_the_position_of_a_client_is_sent_when_it_leaves_and_when_its_control_plane_stops(
    postgres_databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No round ends during the test: a client that reconnects elsewhere at once depends on what is sent immediately.
    monkeypatch.setattr(cursors, "SEND_SECONDS", 3600.0)
    user_id, seen = uuid4(), Cursor(seen=7, start_id=2, row=6, floor=3)
    central = await postgres_databases.open("central")
    here, there = ClientCursors(central, "here"), ClientCursors(central, "there")
    speaks, listens = asyncio.create_task(here.run()), asyncio.create_task(there.run())

    async def is_known(client_id: str) -> bool:
        return there.of(user_id, client_id) == seen

    async def is_listening() -> bool:
        return there._hints.is_listening

    try:
        await until(is_listening)
        here.keep(user_id, "left", seen)
        await until(partial(is_known, "left"))
        here.note(user_id, "listens", GatewaySocket("listens", seen))
        speaks.cancel()
        await here.close()
        await until(partial(is_known, "listens"))
    finally:
        speaks.cancel()
        listens.cancel()
        await asyncio.wait({speaks, listens})
        await here.close()
        await there.close()
        await central.close()


async def test_a_stopping_control_plane_sends_a_clients_position_before_it_closes_the_socket(
    postgres_databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No round ends during the test: only what a control plane sends as it stops can be known at the other one.
    monkeypatch.setattr(cursors, "SEND_SECONDS", 3600.0)
    monkeypatch.setattr(cursors, "LAST_SEND_SECONDS_MAX", 3600.0)
    monkeypatch.setattr(listener, "WEBSOCKET_SECONDS", 3600.0)
    monkeypatch.setattr(listener, "GRACE_SECONDS", 3600.0)
    both: dict[str, Any] = {
        "central_database_url": await postgres_databases.url("central"),
        "tenant_database_urls": f"main={await postgres_databases.url('tenant')}",
    }
    async with (
        gateway_on(postgres_databases, tmp_path, **both) as with_worker,
        gateway_on(postgres_databases, tmp_path, engines=0, **both) as stopping,
    ):
        user = await with_worker.new_user()
        hints, sends, may_send = stopping.plane.cursors._hints, asyncio.Event(), asyncio.Event()
        send = hints.send

        async def send_later(payload: str) -> None:
            sends.set()
            await may_send.wait()
            await send(payload)

        monkeypatch.setattr(hints, "send", send_later)
        with contextlib.ExitStack() as stack:
            here = stack.enter_context(replace(user, url=stopping.url).open_engine_client())
            there = stack.enter_context(user.open_engine_client())

            def run() -> tuple[SocketClient, str]:
                ear = here.listen("me")
                heard = there.submit(PROMPT, client_id="me")
                ear.wait("executing", {"node": None, "prompt_id": heard})
                return ear, heard

            ear, heard = await asyncio.to_thread(run)
            stopping.stop.set()
            await sends.wait()
            try:
                await asyncio.to_thread(ear.ping)
            finally:
                may_send.set()

            def return_elsewhere() -> None:
                ear.wait_until_closed()
                again = there.listen("me")
                new = there.submit(PROMPT, client_id="me")
                again.wait("executing", {"node": None, "prompt_id": new})
                assert heard not in str(again.events)

            await asyncio.to_thread(return_elsewhere)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
