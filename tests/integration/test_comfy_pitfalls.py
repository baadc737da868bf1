"""What bites clients of ComfyUI, one test for each bite."""

import asyncio
import dataclasses
import struct
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from tests.support.backends.prompts import kinds, new_color, new_id, node, picture, run
from tests.support.backends.stub_server import LIMITS, StubServer, client_of, until

from comfyfleet.comfy import Cancellation, ComfyServer, OutputFile, ServerSettings
from comfyfleet.comfy.events import (
    Blocked,
    Cancelled,
    Event,
    Failed,
    NodeText,
    Preview,
    Progress,
    Succeeded,
)
from comfyfleet.engine import serve_in_thread
from comfyfleet.errors import (
    AccessDenied,
    CancelUnconfirmed,
    FileGone,
    InvalidValue,
    OutcomeUnknown,
    RunLost,
    RunStalled,
    RunTimedOut,
    ServerUnavailable,
    UnexpectedAnswer,
)
from comfyfleet.transport.retry import RetryPolicy

PROMPT = {"1": node("Anything")}
BLOCKED = {
    "node_id": "3",
    "node_type": "Gate",
    "exception_type": "ExecutionBlocked",
    "exception_message": "closed",
    "traceback": [],
}
FAILED = {
    "node_id": "9",
    "node_type": "PreviewImage",
    "exception_type": "graph.DependencyCycleError",
    "exception_message": "Dependency cycle detected",
    "traceback": [],
}


async def succeed(stub_server: StubServer, run_id: str) -> None:
    await stub_server.send("execution_start", prompt_id=run_id)
    await stub_server.send("execution_success", prompt_id=run_id)
    stub_server.finish(run_id, ["execution_success", {"prompt_id": run_id}])
    await stub_server.send("executing", node=None, prompt_id=run_id)


async def submitted(server: ComfyServer) -> str:
    return (await server.submit(PROMPT, prompt_id=new_id())).run_id


async def events_of(server: ComfyServer, run_id: str) -> list[Event]:
    return [event async for event in server.follow(run_id)]


# Executor and queue


async def test_every_prompt_carries_a_client_id_so_that_cached_outputs_are_told() -> None:
    stub_server = StubServer(succeed)
    async with client_of(stub_server) as (server, _):
        await run(server, PROMPT)
    assert stub_server.bodies("POST /prompt")[0]["client_id"] == stub_server.sockets[0][0]


async def test_success_with_no_outputs_names_the_nodes_that_were_cached() -> None:
    stub_server = StubServer()
    async with client_of(stub_server) as (server, _):
        stub_server.finish("a", ["execution_cached", {"prompt_id": "a", "nodes": ["1", "9"]}])
        outputs = await server.outputs("a")
    assert (outputs.files, outputs.reused) == ((), ("1", "9"))


async def test_a_cached_output_whose_file_was_deleted_is_told_as_gone(tmp_path: Path) -> None:
    with serve_in_thread() as served:
        async with ComfyServer(ServerSettings(served.url)) as server:
            prompt = picture(new_color())
            await run(server, prompt)
            for path in served.engine.folders.output.glob("*"):
                path.unlink()
            run_id, _ = await run(server, prompt)
            (file,) = (await server.outputs(run_id)).files
            with pytest.raises(FileGone, match="an earlier run created it"):
                await server.fetch(file, tmp_path / "x.png")


async def test_an_empty_list_of_cached_nodes_is_no_reuse() -> None:
    async def on_prompt(stub_server: StubServer, run_id: str) -> None:
        await stub_server.send("execution_cached", prompt_id=run_id, nodes=[])
        await succeed(stub_server, run_id)

    async with client_of(StubServer(on_prompt)) as (server, _):
        _, events = await run(server, PROMPT)
    assert isinstance(events[-1], Succeeded)
    assert events[-1].reused == ()


async def test_neither_number_nor_front_is_sent_for_equal_ones_kill_the_server() -> None:
    stub_server = StubServer(succeed)
    async with client_of(stub_server) as (server, _):
        run_id, _ = await run(server, PROMPT)
    (body,) = stub_server.bodies("POST /prompt")
    assert body == {"prompt": PROMPT, "prompt_id": run_id, "client_id": stub_server.sockets[0][0]}


async def test_a_prompt_answered_500_that_runs_all_the_same_is_followed() -> None:
    stub_server = StubServer(succeed)
    stub_server.answers["POST /prompt"] = [PlainTextResponse("500", 500)]
    async with client_of(stub_server) as (server, _):
        run_id, events = await run(server, PROMPT)
    assert events[-1] == Succeeded(run_id)
    assert len(stub_server.bodies("POST /prompt")) == 1


async def test_a_prompt_id_that_newer_servers_refuse_is_not_sent() -> None:
    stub_server = StubServer(succeed)
    async with client_of(stub_server) as (server, _):
        for wrong in ("x", new_id().upper(), new_id().replace("-", "")):
            with pytest.raises(InvalidValue):
                await server.submit(PROMPT, prompt_id=wrong)
    assert not stub_server.requests


async def test_an_empty_history_of_a_run_in_the_queue_is_no_end() -> None:
    async def on_prompt(stub_server: StubServer, run_id: str) -> None:
        await until(lambda: len(stub_server.bodies("GET /queue")) > 1)
        await succeed(stub_server, run_id)

    stub_server = StubServer(on_prompt)
    async with client_of(stub_server) as (server, _):
        run_id, events = await run(server, PROMPT)
    assert events[-1] == Succeeded(run_id)


async def test_a_run_that_a_restart_has_forgotten_is_lost_not_done() -> None:
    async def on_prompt(stub_server: StubServer, run_id: str) -> None:
        stub_server.running.clear()

    async with client_of(StubServer(on_prompt)) as (server, _):
        with pytest.raises(RunLost, match="restarted"):
            await run(server, PROMPT)


async def test_an_interrupt_that_gets_lost_is_sent_again_and_always_names_its_run() -> None:
    stub_server = StubServer()
    stub_server.deaf_to_interrupts = 2
    async with client_of(stub_server) as (server, _):
        run_id = await submitted(server)
        assert await server.cancel(run_id) is Cancellation.CANCELLED
        assert isinstance((await events_of(server, run_id))[-1], Cancelled)
    assert stub_server.bodies("POST /interrupt") == [{"prompt_id": run_id}] * 3


async def test_a_cancel_is_confirmed_not_assumed() -> None:
    stub_server = StubServer()
    stub_server.deaf_to_interrupts = 10_000
    async with client_of(stub_server) as (server, _):
        run_id = await submitted(server)
        with pytest.raises(CancelUnconfirmed):
            await server.cancel(run_id)


async def test_a_run_that_ended_while_it_was_cancelled_is_told_as_ended() -> None:
    stub_server = StubServer()
    async with client_of(stub_server) as (server, _):
        run_id = await submitted(server)
        stub_server.deaf_to_interrupts = 10_000
        asyncio.get_running_loop().call_later(0.1, stub_server.finish, run_id)
        assert await server.cancel(run_id) is Cancellation.ENDED_BEFORE


async def test_a_dead_prompt_thread_is_noticed_by_a_run_that_shows_no_progress() -> None:
    deadly: dict[str, Any] = picture(new_color())
    deadly["1"]["inputs"]["more"] = ["404", 0]
    limits = dataclasses.replace(LIMITS, stall_seconds=0.4)
    with serve_in_thread(dies_like_comfyui=True) as served:
        async with ComfyServer(ServerSettings(served.url, limits)) as server:
            with pytest.raises(RunStalled, match="prompt thread is dead"):
                await run(server, deadly)


async def test_a_dead_prompt_thread_is_noticed_by_a_run_that_waits_for_nothing() -> None:
    async def on_prompt(stub_server: StubServer, run_id: str) -> None:
        stub_server.pending, stub_server.running = stub_server.running, []

    limits = dataclasses.replace(LIMITS, stall_seconds=0.3)
    async with client_of(StubServer(on_prompt), limits) as (server, _):
        with pytest.raises(RunStalled, match="no run is executing"):
            await run(server, PROMPT)


async def test_a_run_that_waits_behind_a_dead_one_times_out_at_last() -> None:
    async def on_prompt(stub_server: StubServer, run_id: str) -> None:
        stub_server.pending, stub_server.running = stub_server.running, [[0, "dead", {}, {}, []]]

    limits = dataclasses.replace(LIMITS, stall_seconds=0.1, job_seconds=0.4)
    async with client_of(StubServer(on_prompt), limits) as (server, _):
        with pytest.raises(RunTimedOut):
            await run(server, PROMPT)


async def test_waiting_behind_another_run_is_no_stall() -> None:
    async def on_prompt(stub_server: StubServer, run_id: str) -> None:
        (row,) = stub_server.running
        stub_server.running, stub_server.pending = [[0, "other", {}, {}, []]], [row]
        await asyncio.sleep(0.5)
        stub_server.running, stub_server.pending = [row], []
        await succeed(stub_server, run_id)

    limits = dataclasses.replace(LIMITS, stall_seconds=0.2)
    async with client_of(StubServer(on_prompt), limits) as (server, _):
        run_id, events = await run(server, PROMPT)
    assert events[-1] == Succeeded(run_id)


async def test_a_verdict_that_history_kept_from_the_run_before_is_not_believed() -> None:
    stub_server = StubServer()
    async with client_of(stub_server) as (server, _):
        stub_server.finish("a", ["execution_error", {"prompt_id": "a", **FAILED}], status="success")
        events = await events_of(server, "a")
    assert isinstance(events[-1], Failed)
    assert events[-1].message == "Dependency cycle detected"


async def test_free_asks_for_both_models_and_cache() -> None:
    stub_server = StubServer()
    async with client_of(stub_server) as (server, _):
        await server.free()
    assert stub_server.bodies("POST /free") == [{"unload_models": True, "free_memory": True}]


async def test_a_run_that_takes_too_long_times_out_though_it_shows_progress() -> None:
    async def on_prompt(stub_server: StubServer, run_id: str) -> None:
        for step in range(100):
            await stub_server.send("progress", value=step, max=100, prompt_id=run_id, node="1")
            await asyncio.sleep(0.02)

    limits = dataclasses.replace(LIMITS, job_seconds=0.3)
    async with client_of(StubServer(on_prompt), limits) as (server, _):
        with pytest.raises(RunTimedOut):
            await run(server, PROMPT)


# Websocket


async def test_no_two_callers_share_a_client_id() -> None:
    stub_server = StubServer(succeed)
    async with (
        client_of(stub_server) as (server, _),
        ComfyServer(ServerSettings(stub_server.url)) as other,
    ):
        await run(server, PROMPT)
        await run(other, PROMPT)
    assert len({client_id for client_id, _ in stub_server.sockets}) == len(stub_server.sockets) == 2


async def test_a_socket_that_came_back_serves_no_new_run() -> None:
    """The server may forget it together with the one before, which had the same client id."""

    async def on_prompt(stub_server: StubServer, run_id: str) -> None:
        if len(stub_server.sockets) == 1:
            await stub_server.drop_socket()
        await asyncio.sleep(0.1)
        await succeed(stub_server, run_id)

    stub_server = StubServer(on_prompt)
    async with client_of(stub_server) as (server, _):
        await run(server, PROMPT)
        await run(server, PROMPT)
    first, again, fresh = (client_id for client_id, _ in stub_server.sockets)
    assert first == again != fresh


async def test_a_socket_that_came_back_and_hears_nothing_is_opened_once_more() -> None:
    async def on_prompt(stub_server: StubServer, run_id: str) -> None:
        await stub_server.drop_socket()
        await until(lambda: len(stub_server.sockets) == 3)
        await asyncio.sleep(0.05)
        await stub_server.send("progress", value=1, max=2, prompt_id=run_id, node="1")
        # Else the look after the return finds the end first, and nothing else is told.
        await asyncio.sleep(0.5)
        await succeed(stub_server, run_id)

    stub_server = StubServer(on_prompt)
    limits = dataclasses.replace(LIMITS, stall_seconds=4)
    async with client_of(stub_server, limits) as (server, _):
        run_id, events = await run(server, PROMPT)
    assert len({client_id for client_id, _ in stub_server.sockets}) == 1
    assert Progress(run_id, "1", 1, 2) in events


async def test_a_socket_that_missed_a_whole_run_serves_no_other() -> None:
    async def on_prompt(stub_server: StubServer, run_id: str) -> None:
        if len(stub_server.sockets) == 1:
            stub_server.finish(run_id, ["execution_success", {"prompt_id": run_id}])
        else:
            await succeed(stub_server, run_id)

    stub_server = StubServer(on_prompt)
    async with client_of(stub_server) as (server, _):
        await run(server, PROMPT)
        await run(server, PROMPT)
    assert len({client_id for client_id, _ in stub_server.sockets}) == 2


async def test_two_adopted_runs_of_one_client_share_its_socket() -> None:
    stub_server = StubServer()
    async with client_of(stub_server) as (server, _):
        stub_server.running = [[0, "a", {}, {"client_id": "gone"}, []]]
        stub_server.pending = [[1, "b", {}, {"client_id": "gone"}, []]]
        assert await server.adopt("a")
        assert await server.adopt("b")
    assert [client_id for client_id, _ in stub_server.sockets] == ["gone"]


async def test_an_end_that_came_while_the_socket_was_lost_is_found_in_history() -> None:
    async def on_prompt(stub_server: StubServer, run_id: str) -> None:
        await stub_server.drop_socket()
        stub_server.finish(run_id, ["execution_success", {"prompt_id": run_id}])

    async with client_of(StubServer(on_prompt)) as (server, _):
        run_id, events = await run(server, PROMPT)
    assert events[-1] == Succeeded(run_id)


async def test_a_socket_that_stays_silent_does_not_hide_the_end() -> None:
    async def on_prompt(stub_server: StubServer, run_id: str) -> None:
        stub_server.finish(run_id, ["execution_success", {"prompt_id": run_id}])

    async with client_of(StubServer(on_prompt)) as (server, _):
        run_id, events = await run(server, PROMPT)
    assert events[-1] == Succeeded(run_id)


async def test_a_run_that_is_over_without_a_word_on_how_is_looked_up() -> None:
    async def on_prompt(stub_server: StubServer, run_id: str) -> None:
        stub_server.finish(
            run_id, ["execution_error", {"prompt_id": run_id, **FAILED}], status="error"
        )
        await stub_server.send("executing", node=None, prompt_id=run_id)

    async with client_of(StubServer(on_prompt)) as (server, _):
        _, events = await run(server, PROMPT)
    assert isinstance(events[-1], Failed)


async def test_an_interrupted_run_ends() -> None:
    async def on_prompt(stub_server: StubServer, run_id: str) -> None:
        await stub_server.send(
            "execution_interrupted", prompt_id=run_id, node_id="1", node_type="A"
        )
        await stub_server.send("executing", node=None, prompt_id=run_id)

    async with client_of(StubServer(on_prompt)) as (server, _):
        run_id, events = await run(server, PROMPT)
    assert events[-1] == Cancelled(run_id, "1")


async def test_a_blocked_node_is_not_the_end() -> None:
    async def on_prompt(stub_server: StubServer, run_id: str) -> None:
        await stub_server.send("execution_error", prompt_id=run_id, **BLOCKED)
        await succeed(stub_server, run_id)

    async with client_of(StubServer(on_prompt)) as (server, _):
        run_id, events = await run(server, PROMPT)
    assert Blocked(run_id, "3", "Gate", "closed") in events
    assert events[-1] == Succeeded(run_id)


async def test_a_blocked_node_in_history_is_not_the_end_either() -> None:
    stub_server = StubServer()
    async with client_of(stub_server) as (server, _):
        blocked = ["execution_error", {"prompt_id": "a", **BLOCKED}]
        stub_server.finish("a", blocked, ["execution_success", {"prompt_id": "a"}])
        assert (await events_of(server, "a"))[-1] == Succeeded("a")


async def test_what_leaks_from_other_clients_runs_is_not_told_as_ours() -> None:
    async def on_prompt(stub_server: StubServer, run_id: str) -> None:
        await stub_server.send("progress", value=1, max=2, prompt_id="theirs", node="1")
        await stub_server.send("execution_interrupted", prompt_id="theirs", node_id="1")
        await stub_server.send_raw(struct.pack(">II", 1, 1) + b"their picture")
        await stub_server.send_raw(struct.pack(">II", 3, 1) + b"1their text")
        await succeed(stub_server, run_id)

    async with client_of(StubServer(on_prompt)) as (server, _):
        _, events = await run(server, PROMPT)
    assert kinds(events) == ["Queued", "Started", "Succeeded"]


async def test_pictures_and_texts_that_name_no_run_belong_to_the_one_at_work() -> None:
    async def on_prompt(stub_server: StubServer, run_id: str) -> None:
        await stub_server.send("execution_start", prompt_id=run_id)
        await stub_server.send_raw(struct.pack(">II", 1, 2) + b"picture")
        await stub_server.send_raw(struct.pack(">II", 3, 1) + b"1text")
        await stub_server.send("progress", value=1, max=2)
        await succeed(stub_server, run_id)

    async with client_of(StubServer(on_prompt)) as (server, _):
        run_id, events = await run(server, PROMPT)
    assert events[2:5] == [
        Preview(run_id, None, "image/png", b"picture"),
        NodeText(run_id, "1", "text"),
        Progress(run_id, "", 1, 2),
    ]


async def test_garbage_on_the_socket_is_counted_and_does_not_end_the_run() -> None:
    async def on_prompt(stub_server: StubServer, run_id: str) -> None:
        await stub_server.send_raw("garbage")
        await stub_server.send_raw(b"\x00")
        await stub_server.send("progress", prompt_id=run_id)
        await stub_server.send("crystools.monitor", cpu=1)
        await succeed(stub_server, run_id)

    async with client_of(StubServer(on_prompt)) as (server, tally):
        run_id, events = await run(server, PROMPT)
    assert events[-1] == Succeeded(run_id)
    assert tally.unexpected_answers == {"websocket": 3}


async def test_a_slow_reader_loses_progress_but_never_the_end() -> None:
    async def on_prompt(stub_server: StubServer, run_id: str) -> None:
        for step in range(3000):
            await stub_server.send("progress", value=step, max=3000, prompt_id=run_id, node="1")
        await succeed(stub_server, run_id)

    stub_server = StubServer(on_prompt)
    async with client_of(stub_server) as (server, _):
        run_id = await submitted(server)
        await until(lambda: run_id in stub_server.history)
        await asyncio.sleep(0.3)
        events = await events_of(server, run_id)
    assert events[-1] == Succeeded(run_id)
    assert 900 < len(events) < 1100


# Submission and answers


async def test_a_submission_that_is_not_found_anywhere_is_of_unknown_outcome() -> None:
    stub_server = StubServer()
    stub_server.answers["POST /prompt"] = [PlainTextResponse("<html>")]
    stub_server.answers["GET /queue"] = [
        JSONResponse({"queue_running": [], "queue_pending": []})
    ] * 9
    async with client_of(stub_server) as (server, tally):
        with pytest.raises(OutcomeUnknown):
            await server.submit(PROMPT, prompt_id=new_id())
    assert len(stub_server.bodies("POST /prompt")) == 1
    assert tally.unexpected_answers == {"POST /prompt": 1}


async def test_a_server_that_is_not_there_is_told_after_the_retries() -> None:
    naps: list[float] = []

    async def nap(seconds: float) -> None:
        naps.append(seconds)

    retry = RetryPolicy(sleep=nap, chance=lambda: 1.0)
    async with ComfyServer(ServerSettings("http://127.0.0.1:9"), retry=retry) as it:
        with pytest.raises(ServerUnavailable):
            await it.queue_length()
        with pytest.raises(ServerUnavailable):
            await it.submit(PROMPT, prompt_id=new_id())
    assert naps == [0.25, 0.5, 1.0] * 2


async def test_a_shape_that_is_not_known_fails_with_what_came_and_is_counted() -> None:
    stub_server = StubServer()
    stub_server.answers["GET /prompt"] = [JSONResponse({"surprise": 1})]
    async with client_of(stub_server) as (server, tally):
        with pytest.raises(UnexpectedAnswer, match="surprise"):
            await server.queue_length()
    assert tally.unexpected_answers == {"GET /prompt": 1}
    assert tally.successes["GET /prompt"] == 1


async def test_a_refused_key_is_told_as_such() -> None:
    stub_server = StubServer()
    stub_server.answers["POST /prompt"] = [Response("who are you", 401)]
    stub_server.answers["GET /queue"] = [Response("who are you", 403)]
    async with client_of(stub_server) as (server, _):
        with pytest.raises(AccessDenied):
            await server.submit(PROMPT, prompt_id=new_id())
        with pytest.raises(AccessDenied):
            await server.adopt(new_id())


async def test_a_server_that_chooses_the_id_itself_is_followed_by_its_id() -> None:
    stub_server = StubServer()
    stub_server.answers["POST /prompt"] = [
        JSONResponse({"prompt_id": "theirs", "number": 1, "node_errors": {}})
    ]
    async with client_of(stub_server) as (server, _):
        assert (await server.submit(PROMPT, prompt_id=new_id())).run_id == "theirs"
        stub_server.finish("theirs", ["execution_success", {"prompt_id": "theirs"}])
        assert (await events_of(server, "theirs"))[-1] == Succeeded("theirs")


# Files


async def test_a_download_does_not_follow_where_it_is_sent(tmp_path: Path) -> None:
    stub_server = StubServer()
    stub_server.answers["GET /view"] = [RedirectResponse("https://elsewhere.invalid/x.png")]
    async with client_of(stub_server) as (server, _):
        with pytest.raises(UnexpectedAnswer, match="307"):
            await server.fetch(OutputFile("9", "images", "x.png"), tmp_path / "x.png")


async def test_a_download_is_tried_again_when_the_server_fails(tmp_path: Path) -> None:
    stub_server = StubServer()
    stub_server.answers["GET /view"] = [
        Response("no", 500),
        Response(b"data", media_type="image/png"),
    ]
    async with client_of(stub_server) as (server, _):
        fetched = await server.fetch(OutputFile("9", "images", "x.png"), tmp_path / "x.png")
    assert (fetched.size_bytes, fetched.content_type) == (4, "image/png")
