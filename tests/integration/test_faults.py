"""Faults at every step of a run: it is neither lost nor submitted twice, and its end told truly."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet
from tests.support.backends.prompts import new_id, node
from tests.support.backends.proxy import FRAME_FAULTS, UNSEEN, Fault, faulty_proxy

from comfyfleet.comfy import BackendLimits, ComfyServer, ServerSettings
from comfyfleet.comfy.events import Succeeded
from comfyfleet.engine import Served, serve_in_thread
from comfyfleet.errors import FleetError, OutcomeUnknown, UnexpectedAnswer
from comfyfleet.protocol.payloads import QueuedPrompt
from comfyfleet.transport.retry import RetryPolicy

T = TypeVar("T")
REQUESTS = ("GET /ws", "POST /prompt", "GET /history", "GET /view")
FRAMES_MIN = 20
DELAY_SECONDS = 0.4
LIMITS = BackendLimits(
    job_seconds=20, poll_seconds=0.15, answer_seconds=0.2, connect_seconds=1, stall_seconds=10
)
QUICK_FRAMES = (2, 3, 6, 12, 18, 19, 20)
# What is asked after the socket was lost.
LOOKS = ("GET /queue", "GET /history", "GET /ws 2")


def case(slow: bool, faults: Mapping[str, Fault]) -> ParameterSet:
    name = ", ".join(f"{fault.name.lower()} at {step}" for step, fault in faults.items())
    return pytest.param(faults, id=name, marks=[pytest.mark.slow] if slow else [])


def cases() -> Iterator[ParameterSet]:
    """Each fault at each step, and each fault at what is done about a lost answer or socket."""
    for fault in Fault:
        for step in REQUESTS:
            yield case(False, {step: fault})
        for step in ("GET /queue", "GET /history"):
            yield case(True, {"POST /prompt": Fault.CUT, step: fault})
    for fault in FRAME_FAULTS:
        yield case(False, {"frame": fault})
        for number in range(2, FRAMES_MIN + 1):
            yield case(number not in QUICK_FRAMES, {f"frame {number}": fault})
    for fault in Fault:
        for step in LOOKS:
            yield case(True, {"frame 10": Fault.CUT, step: fault})


@dataclass(frozen=True, slots=True)
class Bench:
    served: Served
    submissions: Counter[str]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """An engine that counts what it was given to run."""
    submissions: Counter[str] = Counter()
    with serve_in_thread() as served, pytest.MonkeyPatch.context() as patch:
        put = served.engine.queue.put

        def counting(item: QueuedPrompt) -> None:
            submissions[item.prompt_id] += 1
            put(item)

        patch.setattr(served.engine.queue, "put", counting)
        yield Bench(served, submissions)


def short_sleep(seconds: float) -> "asyncio.Future[None] | asyncio.Task[None]":
    return asyncio.ensure_future(asyncio.sleep(seconds * 0.1))


def caller(url: str) -> ComfyServer:
    return ComfyServer(ServerSettings(url, LIMITS), retry=RetryPolicy(sleep=short_sleep))


@pytest.mark.parametrize("faults", [*cases()])
async def test_faults_neither_lose_nor_repeat_a_run(
    bench: Bench, tmp_path: Path, faults: Mapping[str, Fault]
) -> None:
    prompt_id, to = new_id(), tmp_path / "x.png"
    async with faulty_proxy(bench.served.url, faults, delay_seconds=DELAY_SECONDS) as proxy:
        async with caller(proxy.url) as server:
            told = await whole_run(server, prompt_id, to)
        if Fault.DELAY_UNSEEN in faults.values():
            await asyncio.sleep(DELAY_SECONDS)
    assert not proxy.faults, "a fault has not happened"
    if told is None:
        assert bench.submissions[prompt_id] == 1
        judge_file(bench, prompt_id, to)
        return
    # Only the submission itself can be in doubt; everything after it is asked for again.
    assert faults["POST /prompt"] in UNSEEN, told
    assert isinstance(told, OutcomeUnknown | UnexpectedAnswer)
    if isinstance(told, UnexpectedAnswer):
        assert bench.submissions[prompt_id] == 0
    await nothing_is_lost(bench, prompt_id)


def judge_file(bench: Bench, prompt_id: str, got: Path) -> None:
    (made,) = bench.served.engine.folders.output.glob(f"{prompt_id}*")
    assert got.read_bytes() == made.read_bytes()


async def whole_run(server: ComfyServer, prompt_id: str, to: Path) -> FleetError | None:
    """The error that the caller got, or None for success with its file."""
    prompt = {
        "1": node("EmptyImage", width=8, height=8, batch_size=1, color=int(prompt_id[:6], 16)),
        "2": node("ComfyfleetSteps", steps=2, step_ms=10, previews=False, image=["1", 0]),
        "9": node("SaveImage", images=["2", 0], filename_prefix=prompt_id),
    }
    try:
        await server.submit(prompt, prompt_id=prompt_id)
        events = [event async for event in server.follow(prompt_id)]
        assert events[-1] == Succeeded(prompt_id)
    except FleetError as error:
        return error
    (file,) = (await again_if_garbled(lambda: server.outputs(prompt_id))).files
    await again_if_garbled(lambda: server.fetch(file, to))
    return None


async def again_if_garbled(ask: Callable[[], Awaitable[T]]) -> T:
    """Garbage is told as such, once, and asking again does no harm."""
    try:
        return await ask()
    except UnexpectedAnswer:
        return await ask()


async def nothing_is_lost(bench: Bench, prompt_id: str) -> None:
    """A caller that was told of an unknown outcome finds out later."""
    async with caller(bench.served.url) as server:
        adopted = await server.adopt(prompt_id)
        assert (adopted is not None) == (bench.submissions[prompt_id] == 1)
        if adopted is not None:
            events = [event async for event in server.follow(prompt_id)]
            assert events[-1] == Succeeded(prompt_id)
    assert bench.submissions[prompt_id] <= 1


async def test_a_run_has_the_steps_that_faults_are_tried_at(bench: Bench, tmp_path: Path) -> None:
    async with faulty_proxy(bench.served.url) as proxy, caller(proxy.url) as server:
        assert await whole_run(server, new_id(), tmp_path / "x.png") is None
    assert [step for step in proxy.steps if step in REQUESTS] == [*REQUESTS]
    assert f"frame {FRAMES_MIN}" in proxy.steps
