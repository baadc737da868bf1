"""Measures ComfyServer's overhead with 200 runs of a 20 ms prompt, compared with a bare loop on the
same server.

The bare loop posts each prompt and waits on its websocket for the run's last message, which is the
least that any client must do. Rounds alternate, and the median of each side counts.

If COMFYUI_URL names a real ComfyUI, the same bare loop also runs a trivial prompt there and on the
built-in engine, to compare the time per prompt of the two.
"""

import asyncio
import json
import os
import statistics
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import httpx
from websockets.asyncio.client import connect

from comfyfleet.comfy import ComfyServer, ServerSettings
from comfyfleet.engine import serve_in_thread
from support import exit_status, is_quick

RUNS = 10 if is_quick() else 200
ROUNDS = 1 if is_quick() else 5
STEP_MS = 20
SLOWER_MAX = 1.10
Round = Callable[[str], Awaitable[float]]


def prompt(step_ms: int = STEP_MS) -> dict[str, Any]:
    """Returns a prompt with one step on an image with a new color, so that nothing is cached."""
    picture = {"width": 1, "height": 1, "batch_size": 1, "color": uuid.uuid4().int % 0xFFFFFF}
    steps = {"steps": 1, "step_ms": step_ms, "previews": False, "image": ["1", 0]}
    return {
        "1": {"class_type": "EmptyImage", "inputs": picture},
        "2": {"class_type": "ComfyfleetSteps", "inputs": steps},
    }


def trivial() -> dict[str, Any]:
    """Returns a prompt that previews one pixel of a new color."""
    picture = {"width": 1, "height": 1, "batch_size": 1, "color": uuid.uuid4().int % 0xFFFFFF}
    return {
        "1": {"class_type": "EmptyImage", "inputs": picture},
        "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
    }


async def bare(url: str, make: Callable[[], dict[str, Any]] = prompt) -> float:
    client_id = str(uuid.uuid4())
    socket_url = f"{url.replace('http', 'ws', 1)}/ws?clientId={client_id}"
    async with (
        httpx.AsyncClient(base_url=url) as http,
        connect(socket_url, compression=None, proxy=None) as socket,
    ):
        await socket.recv()
        started = time.perf_counter()
        for _ in range(RUNS):
            prompt_id = str(uuid.uuid4())
            body = {"prompt": make(), "prompt_id": prompt_id, "client_id": client_id}
            (await http.post("/prompt", json=body)).raise_for_status()
            while not is_last(json.loads(await socket.recv()), prompt_id):
                pass
        return time.perf_counter() - started


def is_last(message: dict[str, Any], prompt_id: str) -> bool:
    data = message["data"]
    return (
        message["type"] == "executing" and data["node"] is None and data["prompt_id"] == prompt_id
    )


async def ours(url: str) -> float:
    async with ComfyServer(ServerSettings(url)) as server:
        await server.queue_length()
        started = time.perf_counter()
        for _ in range(RUNS):
            submitted = await server.submit(prompt(), prompt_id=str(uuid.uuid4()))
            async for _event in server.follow(submitted.run_id):
                pass
        return time.perf_counter() - started


async def measure(url: str, context: dict[str, Round]) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in context}
    for number in range(ROUNDS):
        for name, side in context.items() if number % 2 == 0 else reversed(context.items()):
            seconds[name].append(await side(url))
    return seconds


def table(seconds: dict[str, list[float]]) -> float:
    """Prints the table, and returns the ratio of ComfyServer's time to the bare loop's."""
    print(f"{RUNS} runs of {STEP_MS} ms, {ROUNDS} alternating rounds\n")
    print(f"{'':12}{'median s':>10}{'ms a run':>10}   rounds")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        rounds = " ".join(f"{value:.2f}" for value in values)
        print(f"{name:12}{medians[name]:10.3f}{medians[name] / RUNS * 1000:10.2f}   {rounds}")
    ratio = medians["ComfyServer"] / medians["bare loop"]
    print(f"\nratio {ratio:.3f} (at most {SLOWER_MAX:.2f})")
    return ratio


async def beside_real(engine_url: str, real_url: str) -> None:
    seconds: dict[str, list[float]] = {"engine": [], "ComfyUI": []}
    run = partial(bare, make=trivial)
    for _ in range(ROUNDS):
        seconds["engine"].append(await run(engine_url))
        seconds["ComfyUI"].append(await run(real_url))
    medians = {name: statistics.median(values) / RUNS * 1000 for name, values in seconds.items()}
    print("\na trivial prompt, bare loop:", *(f"{n} {ms:.2f} ms" for n, ms in medians.items()))


def main() -> int:
    real_url = os.environ.get("COMFYUI_URL")
    with serve_in_thread() as engine:
        seconds = asyncio.run(measure(engine.url, {"bare loop": bare, "ComfyServer": ours}))
        ratio = table(seconds)
        if real_url:
            asyncio.run(beside_real(engine.url, real_url.rstrip("/")))
    return exit_status(is_met=ratio <= SLOWER_MAX)


if __name__ == "__main__":
    sys.exit(main())
