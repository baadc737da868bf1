"""A poll that finds the end of a run loses neither the messages that arrived nor the server's error."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from comfyfleet.comfy import BackendLimits, CallTally
from comfyfleet.comfy.calls import BackendCalls
from comfyfleet.comfy.events import Cached, Event, Failed, NodeStarted, Queued, Started, Succeeded
from comfyfleet.comfy.follow import Follower
from comfyfleet.comfy.messages import Inbox, parse_message
from comfyfleet.transport.retry import RetryPolicy

RUN = "p"
Logged = tuple[str, dict[str, Any]]
START: Logged = ("execution_start", {"prompt_id": RUN, "timestamp": 1})
CACHED: Logged = ("execution_cached", {"prompt_id": RUN, "nodes": ["1"], "timestamp": 2})
# An expanded node, of which the client's prompt knows nothing.
EXECUTING: Logged = ("executing", {"prompt_id": RUN, "node": "3.0.0.2", "display_node": "3"})
ERROR: Logged = (
    "execution_error",
    {
        "prompt_id": RUN,
        "node_id": "3",
        "node_type": "TestDynamicDependencyCycle",
        "executed": [],
        "exception_message": "Dependency cycle detected",
        "exception_type": "graph.DependencyCycleError",
        "traceback": ["line 1"],
        "current_inputs": [],
        "current_outputs": ["1"],
        "timestamp": 3,
    },
)
SUCCESS: Logged = ("execution_success", {"prompt_id": RUN, "timestamp": 3})
INTERRUPTED: Logged = ("execution_interrupted", {"prompt_id": RUN, "node_id": "3", "timestamp": 3})
OVER: Logged = ("executing", {"prompt_id": RUN, "node": None})


def put(inbox: Inbox, *messages: Logged) -> None:
    for kind, data in messages:
        raw = json.dumps({"type": kind, "data": data})
        inbox.put(parse_message(raw), raw)


async def follow(
    *, before: list[Logged], during: list[Logged], history: list[Logged] | None
) -> tuple[list[Event], list[Logged]]:
    """Follows a run whose messages arrive before and during the first poll. Returns its events and
    the tapped messages."""
    inbox, tapped = Inbox(), list[Logged]()

    def tap(raw: str) -> None:
        message = json.loads(raw)
        tapped.append((message["type"], message["data"]))

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/queue":
            return httpx.Response(200, json={"queue_running": [], "queue_pending": []})
        put(inbox, *during)
        entry = {"outputs": {}, "status": {"status_str": "success", "messages": history}}
        return httpx.Response(200, json={} if history is None else {RUN: entry})

    inbox.tap = tap
    put(inbox, *before)
    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(transport=transport, base_url="http://backend") as client:
        limits = BackendLimits(poll_seconds=0.0, max_retries=0)  # polls when the inbox is empty
        retry = RetryPolicy(clock=lambda: 0.0)
        calls = BackendCalls(client, limits=limits, meter=CallTally(), retry=retry)
        follower = Follower(calls, RUN, inbox, None)
        async with asyncio.timeout(10):
            events = [event async for event in follower.events(poll_first=False)]
    return events, tapped


async def test_messages_that_arrive_during_the_last_poll_are_read_before_the_end() -> None:
    events, tapped = await follow(
        before=[START],
        during=[CACHED, EXECUTING, ERROR, OVER],
        history=[START, CACHED, ERROR],
    )
    assert tapped == [START, CACHED, EXECUTING, ERROR, OVER]
    *others, end = events
    assert others == [
        Queued(RUN),
        Started(RUN),
        Cached(RUN, ("1",)),
        NodeStarted(RUN, "3.0.0.2", "3"),
    ]
    assert isinstance(end, Failed)


@pytest.mark.parametrize("last", [ERROR, INTERRUPTED])
@pytest.mark.parametrize("before", [[], [START, EXECUTING], [START, EXECUTING, OVER]])
async def test_an_end_that_no_message_told_is_tapped_from_the_history(
    before: list[Logged], last: Logged
) -> None:
    _, tapped = await follow(before=before, during=[], history=[START, CACHED, last])
    assert tapped == [*before, last]


async def test_an_end_that_a_message_told_is_tapped_once() -> None:
    _, tapped = await follow(before=[START, ERROR], during=[], history=[START, CACHED, ERROR])
    assert tapped == [START, ERROR]


async def test_a_success_that_no_message_told_is_left_to_the_record_of_the_run() -> None:
    events, tapped = await follow(before=[START], during=[], history=[START, CACHED, SUCCESS])
    assert events[-1] == Succeeded(RUN, ("1",))
    assert tapped == [START]


async def test_an_end_that_arrives_while_the_run_leaves_the_history_counts() -> None:
    events, tapped = await follow(before=[START], during=[ERROR, OVER], history=None)
    assert isinstance(events[-1], Failed)
    assert tapped == [START, ERROR, OVER]
