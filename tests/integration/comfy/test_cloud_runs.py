"""Runs on a cloud are followed to their true end, and stopped without hitting others."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tests.integration.comfy.clouds import JOB, LIMITS, V1, V2, Replies, cloud_of, job
from tests.support.backends.scripted_server import Cut, Reaction, Reply, json_reply

from comfyfleet.comfy import BackendLimits, Cancellation, ComfyCloud, OutputFile
from comfyfleet.comfy.events import Cancelled, Event, Failed, Preview, Progress, Succeeded
from comfyfleet.errors import (
    CancelUnconfirmed,
    FleetError,
    NotOffered,
    RunLost,
    RunStalled,
    RunTimedOut,
    UnexpectedAnswer,
)

STATUS = f"GET /api/job/{JOB}/status"
DETAIL = f"GET /api/jobs/{JOB}"
V2_JOB = f"GET /api/v2/jobs/{JOB}"
V2_EVENTS = f"GET /api/v2/jobs/{JOB}/events"
OUTPUT = {"node_id": "9", "name": "a.png", "type": "image", "id": "asset-1", "url": "/x"}


def state(word: str, **more: Any) -> Reply:
    return json_reply({"id": JOB, "status": word, **more})


def stream(*events: tuple[str, object], sent_bytes_max: int | None = None) -> Reply:
    text = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)
    return Reply(200, text.encode(), {"content-type": "text/event-stream"}, sent_bytes_max)


async def events_of(cloud: ComfyCloud) -> list[Event]:
    return [event async for event in cloud.follow(JOB)]


def rows(*run_ids: str) -> list[list[Any]]:
    return [[number, run_id, {}, [], {}] for number, run_id in enumerate(run_ids)]


def queue(running: list[Any], pending: list[Any]) -> Reply:
    return json_reply({"queue_running": running, "queue_pending": pending})


@pytest.mark.parametrize(
    ("word", "end"),
    [
        ("success", Succeeded(JOB)),
        ("cancelled", Cancelled(JOB)),
        ("error", Failed(JOB, "so it is", retryable=True)),
        ("lost", Failed(JOB, "so it is", retryable=True)),
        ("non_retryable_error", Failed(JOB, "so it is", retryable=False)),
    ],
)
async def test_v1_a_run_ends_with_a_state_that_ends_it(word: str, end: Event) -> None:
    words = ["submitted", "queued_waiting", "executing", "cancel_requested", "new word"]
    states = [*map(state, words), state(word, error_message="so it is")]
    replies = {**V1, STATUS: states, DETAIL: json_reply({"id": JOB, "outputs": {}})}
    async with cloud_of(replies) as stage:
        assert (await events_of(stage.cloud))[-1] == end


async def test_v1_a_failure_is_told_with_its_node() -> None:
    error = {
        "node_id": "3",
        "node_type": "KSampler",
        "exception_type": "OOMError",
        "exception_message": "no memory",
        "traceback": ["a", "b"],
    }
    replies = {
        **V1,
        STATUS: state("error"),
        DETAIL: json_reply({"id": JOB, "execution_error": error}),
    }
    async with cloud_of(replies) as stage:
        end = (await events_of(stage.cloud))[-1]
    assert end == Failed(JOB, "no memory", "3", "KSampler", "OOMError", ("a", "b"), True)


async def test_v1_an_end_without_its_details_is_waited_for() -> None:
    details = [Reply(404), json_reply({"id": JOB, "outputs": {}})]
    async with cloud_of({**V1, STATUS: state("success"), DETAIL: details}) as stage:
        assert (await events_of(stage.cloud))[-1] == Succeeded(JOB)


@pytest.mark.parametrize("base", [V1, V2])
async def test_a_run_that_the_cloud_does_not_know_is_lost(base: Replies) -> None:
    async with cloud_of(base) as stage:
        with pytest.raises(RunLost):
            await events_of(stage.cloud)
        with pytest.raises(RunLost):
            await stage.cloud.outputs(JOB)
        assert await stage.cloud.cancel(JOB) is Cancellation.NOT_FOUND


async def test_a_run_that_takes_too_long_is_given_up() -> None:
    limits = BackendLimits(poll_seconds=0.01, job_seconds=0.1, max_retries=0)
    async with cloud_of({**V1, STATUS: state("executing")}, limits) as stage:
        with pytest.raises(RunTimedOut):
            await events_of(stage.cloud)


async def test_a_run_that_falls_silent_has_stalled() -> None:
    limits = BackendLimits(poll_seconds=0.01, stall_seconds=0.1, max_retries=0)
    told_once = stream(("status", {"status": "running"}))
    replies = {**V2, V2_JOB: json_reply(job("running")), V2_EVENTS: [told_once, Reply(501)]}
    async with cloud_of(replies, limits) as stage:
        with pytest.raises(RunStalled):
            await events_of(stage.cloud)


async def test_v2_a_stream_that_is_cut_is_opened_again_and_the_end_is_asked_for() -> None:
    picture = {"node_id": "3", "content_type": "image/jpeg"}
    half = stream(
        ("status", {"status": "running"}),
        ("progress", {"value": 0.5, "current_node": "3", "step": 1, "steps": 2}),
        ("preview", {**picture, "data_base64": base64.b64encode(b"jpeg").decode()}),
        ("status", {"status": "succeeded"}),
        sent_bytes_max=250,
    )
    rest = stream(("status", {"status": "succeeded"}))
    running = [json_reply(job("running"))] * 3
    jobs = [*running, json_reply(job("succeeded", outputs=[OUTPUT]))]
    # Long enough for both streams to be heard before the next look.
    limits = BackendLimits(max_retries=2, poll_seconds=0.2)
    async with cloud_of({**V2, V2_JOB: jobs, V2_EVENTS: [half, rest]}, limits) as stage:
        events = await events_of(stage.cloud)
        (file,) = (await stage.cloud.outputs(JOB)).files
    assert Progress(JOB, "3", 1, 2) in events
    assert Preview(JOB, "3", "image/jpeg", b"jpeg") in events
    names = [type(event).__name__ for event in events]
    assert (names.count("Started"), names.count("Reconnected")) == (1, 1)
    assert names[-1] == "Succeeded"
    assert file == OutputFile("9", "images", "a.png", reference="asset-1")


async def test_v2_a_stream_that_ends_in_order_is_no_lost_connection() -> None:
    early = stream(("status", {"status": "running"}))
    jobs = [*[json_reply(job("running"))] * 2, json_reply(job("succeeded"))]
    limits = BackendLimits(max_retries=2, poll_seconds=5)
    async with cloud_of({**V2, V2_JOB: jobs, V2_EVENTS: early}, limits) as stage:
        names = [type(event).__name__ for event in await events_of(stage.cloud)]
    assert names == ["Started", "Cached", "Succeeded"]


@pytest.mark.parametrize("events", [Reply(501), Reply(404), Reply(429), Cut(), stream(("odd", 1))])
async def test_v2_without_a_stream_the_job_is_polled(events: Reaction) -> None:
    jobs = [
        json_reply(job("queued", queue_position=1)),
        json_reply(job("running")),
        json_reply(job("succeeded")),
    ]
    async with cloud_of({**V2, V2_JOB: jobs, V2_EVENTS: events}) as stage:
        assert (await events_of(stage.cloud))[-1] == Succeeded(JOB)


async def test_v2_odd_events_are_counted_and_do_not_end_the_run() -> None:
    odd = stream(("status", []), ("progress", "x"), ("preview", {}), ("output", {}), ("log", {}))
    jobs = [*[json_reply(job("running"))] * 20, json_reply(job("succeeded"))]
    async with cloud_of({**V2, V2_JOB: jobs, V2_EVENTS: odd}) as stage:
        assert (await events_of(stage.cloud))[-1] == Succeeded(JOB)
    for name in ("status", "progress", "preview", "output"):
        assert stage.tally.unexpected_answers[f"events: {name}"] > 0


@pytest.mark.parametrize(
    ("told_job", "end"),
    [
        (job("canceled"), Cancelled(JOB)),
        (job("expired"), Failed(JOB, "the job expired on the server", retryable=True)),
        (
            job("failed", error={"code": "c", "message": "m", "node_id": "3", "class_type": "K"}),
            Failed(JOB, "m", "3", "K", "c"),
        ),
        (job("failed"), Failed(JOB, "the server reported that the job failed, without a reason")),
    ],
)
async def test_v2_every_end_is_told_as_what_it_is(told_job: object, end: Event) -> None:
    async with cloud_of({**V2, V2_JOB: json_reply(told_job), V2_EVENTS: Reply(501)}) as stage:
        assert (await events_of(stage.cloud))[-1] == end


async def test_v2_a_job_that_only_seems_expired_is_asked_for_again() -> None:
    jobs = [json_reply(job("running")), json_reply(job("expired")), json_reply(job("succeeded"))]
    async with cloud_of({**V2, V2_JOB: jobs, V2_EVENTS: Reply(501)}) as stage:
        assert (await events_of(stage.cloud))[-1] == Succeeded(JOB)


async def test_v2_relative_links_belong_to_the_origin() -> None:
    link = f"/elsewhere/{JOB}/events"
    jobs = json_reply(job("succeeded", urls={"events": link}))
    async with cloud_of({**V2, V2_JOB: jobs}) as stage:
        await events_of(stage.cloud)
    asked = [asked for asked in stage.server.asked if asked.path == link]
    assert [one.headers["authorization"] for one in asked] == ["Bearer key-of-alice"] * len(asked)


async def test_v1_a_waiting_run_is_taken_out_of_the_queue_where_no_cancel_is_offered() -> None:
    replies = {
        **V1,
        STATUS: [state("queued_waiting"), state("cancelled")],
        DETAIL: json_reply({"id": JOB}),
        "POST /api/queue": json_reply({"deleted": [JOB], "cleared": False}),
    }
    async with cloud_of(replies) as stage:
        assert await stage.cloud.cancel(JOB) is Cancellation.CANCELLED
    assert "/api/interrupt" not in stage.server.paths()


async def test_v1_the_only_running_run_may_be_interrupted() -> None:
    replies = {
        **V1,
        STATUS: [state("executing"), state("cancelled")],
        DETAIL: json_reply({"id": JOB}),
        "GET /api/queue": queue(rows(JOB), rows("waiting")),
        "POST /api/queue": json_reply({"deleted": [], "cleared": False}),
        "POST /api/interrupt": Reply(200),
    }
    async with cloud_of(replies) as stage:
        assert await stage.cloud.cancel(JOB) is Cancellation.CANCELLED
    assert stage.server.paths()[-1] == "/api/interrupt"


async def test_v1_an_interrupt_that_would_hit_others_is_not_sent() -> None:
    replies = {
        **V1,
        STATUS: state("executing"),
        "GET /api/queue": queue(rows(JOB, "other"), []),
        "POST /api/queue": json_reply({"deleted": [], "cleared": False}),
    }
    async with cloud_of(replies) as stage:
        with pytest.raises(CancelUnconfirmed, match="1 other"):
            await stage.cloud.cancel(JOB)
    assert "/api/interrupt" not in stage.server.paths()


async def test_a_cancel_that_has_no_effect_is_not_confirmed() -> None:
    replies = {
        **V2,
        V2_JOB: json_reply(job("canceling")),
        f"POST /api/v2/jobs/{JOB}/cancel": json_reply(job("canceling")),
    }
    limits = BackendLimits(cancel_seconds=0.05)
    async with cloud_of(replies, limits) as stage:
        with pytest.raises(CancelUnconfirmed):
            await stage.cloud.cancel(JOB)


@pytest.mark.parametrize(
    ("answer", "shown"),
    [(b"", ""), (b"null", "None"), (b"[]", "[]"), (b'{"status": 7}', "7"), (b"<html>", "<html>")],
)
@pytest.mark.parametrize(("base", "route"), [(V1, STATUS), (V2, V2_JOB)])
async def test_an_odd_answer_fails_with_what_was_received(
    base: Replies, route: str, answer: bytes, shown: str
) -> None:
    async with cloud_of({**base, route: Reply(200, answer)}) as stage:
        with pytest.raises(UnexpectedAnswer) as caught:
            await stage.cloud.outputs(JOB)
    assert shown in caught.value.details["received"]
    assert stage.tally.unexpected_answers.total() == 1


@pytest.mark.parametrize(("base", "route"), [(V1, STATUS), (V2, V2_JOB)])
async def test_a_garbled_answer_does_not_lose_a_run(base: Replies, route: str) -> None:
    good = (
        [state("executing"), state("success")] if base is V1 else [json_reply(job("succeeded"))] * 2
    )
    ends = {DETAIL: json_reply({"id": JOB, "outputs": {}}), V2_EVENTS: Reply(501)}
    first = good[0]
    replies = {**base, **ends, route: [first, Reply(200, b"<html>"), Reply(200, b"[]"), good[1]]}
    async with cloud_of(replies) as stage:
        assert (await events_of(stage.cloud))[-1] == Succeeded(JOB)


async def test_v2_a_file_that_is_known_is_not_sent(tmp_path: Path) -> None:
    path = tmp_path / "cat.png"
    path.write_bytes(b"cat")
    asset = json_reply({"id": "asset-1", "file_path": "cat.png"})
    async with cloud_of({**V2, "POST /api/v2/assets/from-hash": asset}) as stage:
        uploaded = await stage.cloud.upload(path)
    assert uploaded.value == "comfy-asset://asset-1/cat.png"
    assert stage.server.paths() == ["/api/v2/assets/from-hash"]
    sent = json.loads(stage.server.asked[-1].body)
    assert sent["hash"].startswith("blake3:")


async def test_v2_an_uploaded_file_is_referred_to_in_the_prompt(tmp_path: Path) -> None:
    path = tmp_path / "my cat.png"
    path.write_bytes(b"cat")
    replies = {
        **V2,
        "POST /api/v2/assets": json_reply({"id": "asset/1", "file_path": "my cat.png"}, 201),
        "POST /api/v2/jobs": json_reply(job("queued"), 201),
    }
    async with cloud_of(replies) as stage:
        uploaded = await stage.cloud.upload(path)
        prompt = {"1": {"class_type": "LoadImage", "inputs": {"image": uploaded.value, "n": 1}}}
        await stage.cloud.submit(prompt, prompt_id=JOB)
    inputs = json.loads(stage.server.asked[-1].body)["workflow"]["1"]["inputs"]
    info = {"id": "asset/1", "file_path": "my cat.png"}
    assert inputs == {"image": {"__type": "core/ASSET", "info": info}, "n": 1}


@pytest.mark.parametrize(
    "refused", [Reply(413), json_reply({"error": {"code": "hash_mismatch", "message": "m"}}, 409)]
)
async def test_v2_a_file_that_is_not_taken_is_told(refused: Reply, tmp_path: Path) -> None:
    path = tmp_path / "cat.png"
    path.write_bytes(b"cat")
    async with cloud_of({**V2, "POST /api/v2/assets": refused}) as stage:
        with pytest.raises(FleetError, match=r"cat\.png"):
            await stage.cloud.upload(path)


async def test_v2_does_not_describe_nodes_unless_v1_is_beside_it() -> None:
    async with cloud_of(V2) as stage:
        assert not (await stage.cloud.abilities()).describes
        with pytest.raises(NotOffered):
            await stage.cloud.describe()
    stats = json_reply({"system": {}, "devices": []})
    both = {**V2, "GET /api/object_info": json_reply({"A": {}}), "GET /api/system_stats": stats}
    async with cloud_of(both, LIMITS) as stage:
        assert (await stage.cloud.abilities()).describes
        assert (await stage.cloud.describe()).object_info == {"A": {}}
