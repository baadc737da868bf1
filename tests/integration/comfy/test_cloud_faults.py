"""Faults at every step of a run on a cloud: it is neither lost nor submitted twice."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet
from tests.support.backends.comfy_cloud import CloudAccount, serving_cloud
from tests.support.backends.prompts import new_id, node
from tests.support.backends.proxy import FRAME_FAULTS, UNSEEN, Fault, faulty_proxy
from tests.support.backends.v2_server import comfy_api_proxy

from comfyfleet.comfy import BackendLimits, CloudSettings, ComfyCloud
from comfyfleet.comfy.events import Succeeded
from comfyfleet.engine import Served, serve_in_thread
from comfyfleet.errors import FleetError, OutcomeUnknown, UnexpectedAnswer
from comfyfleet.protocol.payloads import QueuedPrompt
from comfyfleet.transport.retry import RetryPolicy

T = TypeVar("T")
KEY = "key-of-alice"
DELAY_SECONDS = 0.4
LIMITS = BackendLimits(
    job_seconds=20, poll_seconds=0.15, answer_seconds=0.2, connect_seconds=1, stall_seconds=10
)
SUBMIT = "POST /api"
# Which API, the socket, the submit; then states, details, outputs and the file.
STEPS = {
    "v1": (
        *("GET /api", "GET /api 2", "GET /ws", SUBMIT),
        *(f"GET /api {number}" for number in range(3, 8)),
        "GET /storage",
    ),
    "v2": (*("GET /api", SUBMIT), *(f"GET /api {number}" for number in range(2, 6))),
}
BEFORE_SUBMIT = ("GET /api", "GET /api 2", "GET /ws")
QUICK_FAULTS = (Fault.CUT, Fault.GARBAGE)
FRAMES = ("frame", "frame 2", "frame 3", "frame 8", "frame 15", "frame 20")


def case(api: str, step: str, fault: Fault) -> ParameterSet:
    """The submit is where runs are lost or doubled; the rest of the steps takes its time."""
    marks = [] if step == SUBMIT or fault in QUICK_FAULTS else [pytest.mark.slow]
    return pytest.param(api, step, fault, id=f"{api}: {fault.name} at {step}", marks=marks)


def cases() -> Iterator[ParameterSet]:
    for api, steps in STEPS.items():
        for step in steps:
            yield from (case(api, step, fault) for fault in Fault)
    for step in FRAMES:
        yield from (case("v1", step, fault) for fault in FRAME_FAULTS)


@dataclass(frozen=True, slots=True)
class Bench:
    """`submissions`: what the engine was given to run, by its file prefix."""

    url: str
    served: Served
    submissions: Counter[str]


@contextlib.asynccontextmanager
async def bench_of(api: str) -> AsyncIterator[Bench]:
    async with contextlib.AsyncExitStack() as stack:
        if api == "v1":
            served = stack.enter_context(serving_cloud({KEY: CloudAccount("alice")}))
            yield Bench(served.url, served, counted(stack, served))
        else:
            served = stack.enter_context(serve_in_thread())
            url, _ = await stack.enter_async_context(comfy_api_proxy(served.url, KEY))
            yield Bench(url, served, counted(stack, served))


def counted(stack: contextlib.AsyncExitStack, served: Served) -> Counter[str]:
    submissions: Counter[str] = Counter()
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    put = served.engine.queue.put

    def counting(item: QueuedPrompt) -> None:
        submissions[item.prompt["9"]["inputs"]["filename_prefix"]] += 1
        put(item)

    patch.setattr(served.engine.queue, "put", counting)
    return submissions


def short_sleep(seconds: float) -> "asyncio.Future[None] | asyncio.Task[None]":
    return asyncio.ensure_future(asyncio.sleep(seconds * 0.1))


def caller(url: str) -> ComfyCloud:
    return ComfyCloud(CloudSettings(KEY, url, LIMITS), retry=RetryPolicy(sleep=short_sleep))


@pytest.mark.parametrize(("api", "step", "fault"), [*cases()])
async def test_faults_neither_lose_nor_repeat_a_run(
    api: str, step: str, fault: Fault, tmp_path: Path
) -> None:
    prompt_id, to = new_id(), tmp_path / "x.png"
    async with bench_of(api) as bench:
        async with faulty_proxy(bench.url, {step: fault}, delay_seconds=DELAY_SECONDS) as proxy:
            async with caller(proxy.url) as cloud:
                told = await whole_run(cloud, prompt_id, to)
            if fault is Fault.DELAY_UNSEEN:
                await asyncio.sleep(DELAY_SECONDS)
        assert not proxy.faults, "the fault has not happened"
        if told is None:
            assert bench.submissions[prompt_id] == 1
            judge_file(bench, prompt_id, to)
        else:
            await judge(bench, prompt_id, step, fault, told)


async def judge(bench: Bench, prompt_id: str, step: str, fault: Fault, told: FleetError) -> None:
    """An error is true: nothing was sent, or nobody could know; and later it can be known."""
    if step in BEFORE_SUBMIT:
        assert isinstance(told, UnexpectedAnswer)
        assert bench.submissions[prompt_id] == 0
        return
    assert step == SUBMIT, told
    assert fault in UNSEEN
    assert isinstance(told, OutcomeUnknown)
    async with caller(bench.url) as cloud:
        adopted = await cloud.adopt(prompt_id)
        assert (adopted is not None) == (bench.submissions[prompt_id] == 1)
        if adopted is not None:
            events = [event async for event in cloud.follow(adopted.run_id)]
            assert events[-1] == Succeeded(adopted.run_id)
    assert bench.submissions[prompt_id] <= 1


def judge_file(bench: Bench, prompt_id: str, got: Path) -> None:
    (made,) = bench.served.engine.folders.output.glob(f"{prompt_id}*")
    assert got.read_bytes() == made.read_bytes()


async def whole_run(cloud: ComfyCloud, prompt_id: str, to: Path) -> FleetError | None:
    """The error that the caller got, or None for success with its file."""
    prompt = {
        "1": node("EmptyImage", width=8, height=8, batch_size=1, color=int(prompt_id[:6], 16)),
        "2": node("ComfyfleetSteps", steps=2, step_ms=10, previews=False, image=["1", 0]),
        "9": node("SaveImage", images=["2", 0], filename_prefix=prompt_id),
    }
    try:
        submitted = await cloud.submit(prompt, prompt_id=prompt_id)
        events = [event async for event in cloud.follow(submitted.run_id)]
    except FleetError as error:
        return error
    assert events[-1] == Succeeded(submitted.run_id)
    await fetch(cloud, submitted.run_id, to)
    return None


async def fetch(cloud: ComfyCloud, run_id: str, to: Path) -> None:
    (file,) = (await again_if_garbled(lambda: cloud.outputs(run_id))).files
    await again_if_garbled(lambda: cloud.fetch(file, to))


async def again_if_garbled(ask: Callable[[], Awaitable[T]]) -> T:
    """Garbage is told as such, once, and asking again does no harm."""
    try:
        return await ask()
    except UnexpectedAnswer:
        return await ask()
