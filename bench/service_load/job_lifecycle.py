"""Sends the calls of a job's lifecycle over the public API, route by route, like customers
and workers.

It uses only features that every version supports.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from service_load.calls import Call, Connections, json_call
from service_load.server import ServerProcess, running
from support import ADMIN_KEY

# Sends the calls of one route, and returns their answers in order.
Measure = Callable[[str, Sequence[Call]], Awaitable[list[Any]]]
JOB_ROUTES = ("submit", "poll", "put", "complete")
ROUTES = (
    *JOB_ROUTES,
    "heartbeat",
    "get job, running",
    "get job, done",
    "get video",
    "idle poll",
    "healthz",
    "complete, next job",
)
CONNECTIONS = 8
TENANTS = 8
VIDEOS = 8
TOKENS = 10_000_000
FLEET, STAGE = "gpus", "production"
DRAW, TURN = "draw", "turn"
PICTURE = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000008000000080800000000e164e1570000000b49444154789c63601805"
    "00000108000151a3c1f00000000049454e44ae426082"
)
PROMPTS = {
    DRAW: {
        "1": {
            "class_type": "EmptyImage",
            "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0},
        },
        "2": {
            "class_type": "SaveImage",
            "inputs": {"images": ["1", 0], "filename_prefix": "drawn"},
        },
    },
    TURN: {
        "1": {"class_type": "LoadImage", "inputs": {"image": "photo.png"}},
        "2": {
            "class_type": "SaveImage",
            "inputs": {"images": ["1", 0], "filename_prefix": "turned"},
        },
    },
}
PROPERTIES = {
    DRAW: [{"name": "width", "type": "integer", "binding": "1.width", "default": 8}],
    TURN: [{"name": "input", "type": "image", "binding": "1.image", "required": True}],
}


@dataclass(frozen=True)
class Worker:
    id: str
    token: str

    def poll(self, *, wait_seconds: float = 0) -> Call:
        body = {"worker_id": self.id, "max_concurrency": 1, "wait_seconds": wait_seconds}
        return self._call("poll", body)

    def heartbeat(self, job: dict[str, Any]) -> Call:
        return self._call(
            "heartbeat", {**lease_of(job), "started": True, "progress": {"percent": 50}}
        )

    def put(self, job: dict[str, Any]) -> Call:
        return put(job["outputs"][0])

    def complete(self, job: dict[str, Any], **more: Any) -> Call:
        output = {"name": job["outputs"][0]["name"], "size": len(PICTURE)}
        # Our own worker strips metadata and reports it. For other workers, the server strips it.
        outputs = [{**output, "content_type": "image/png", "is_stripped": True}]
        return self._call("complete", {**lease_of(job), "outputs": outputs, **more})

    def complete_and_poll(self, job: dict[str, Any]) -> Call:
        poll = {"worker_id": self.id, "max_concurrency": 1, "wait_seconds": 0, "held": []}
        return self.complete(job, poll=poll)

    def _call(self, endpoint: str, body: dict[str, Any]) -> Call:
        return json_call("POST", f"/api/worker/{endpoint}", self.token, body)


def lease_of(job: dict[str, Any]) -> dict[str, Any]:
    return {name: job[name] for name in ("dispatch_id", "lease_token")}


def put(slot: dict[str, Any]) -> Call:
    parts = urlsplit(slot["url"])
    return Call("PUT", f"{parts.path}?{parts.query}", PICTURE, slot["headers"])


@dataclass(frozen=True)
class JobLifecycle:
    """A control plane with customers, effects and workers."""

    connections: Connections
    keys: Sequence[str]
    effects: dict[str, str]
    workers: Sequence[Worker]
    videos: Sequence[tuple[str, str]]  # the owner's key, and the video's id
    secret: str
    has_next: bool  # whether the answer to a complete call contains the next job

    def submit(self, number: int, effect: str = DRAW, **more: Any) -> Call:
        body = {"effect_id": self.effects[effect], "idempotency_key": str(uuid4()), **more}
        return json_call("POST", "/api/ai-jobs", self.keys[number % len(self.keys)], body)

    async def cycle(self, measure: Measure, count: int) -> None:
        """Runs this many jobs. Each route gets the calls of all jobs before the next route."""
        workers = self.workers[:count]
        jobs = await measure("submit", [self.submit(number) for number in range(count)])
        polled = await measure("poll", [worker.poll(wait_seconds=5) for worker in workers])
        held = [(worker, answer["job"]) for worker, answer in zip(workers, polled, strict=True)]
        status = [self._status(number, job["id"]) for number, job in enumerate(jobs)]
        await measure("heartbeat", [worker.heartbeat(job) for worker, job in held])
        await measure("get job, running", status)
        await measure("put", [worker.put(job) for worker, job in held])
        await measure("complete", [worker.complete(job) for worker, job in held])
        await measure("get job, done", status)
        videos = [json_call("GET", f"/api/videos/{video_id}", key) for key, video_id in self.videos]
        await measure("get video", [videos[number % VIDEOS] for number in range(count)])
        await measure("idle poll", [worker.poll() for worker in workers])
        await measure("healthz", [json_call("GET", "/healthz")] * count)
        if self.has_next:
            await self._cycle_with_next(measure, count)

    async def _cycle_with_next(self, measure: Measure, count: int) -> None:
        """Runs jobs for workers that are always busy, so each polls only once."""
        ask, workers = self.connections.ask_all, self.workers[:count]
        await ask([self.submit(number) for number in range(2 * count)])
        held = [
            answer["job"]
            for answer in await ask([worker.poll(wait_seconds=5) for worker in workers])
        ]
        await ask([worker.put(job) for worker, job in zip(workers, held, strict=True)])
        calls = [worker.complete_and_poll(job) for worker, job in zip(workers, held, strict=True)]
        answers = await measure("complete, next job", calls) or await ask(calls)
        after = [
            (worker, answer["next"]["job"])
            for worker, answer in zip(workers, answers, strict=True)
            if answer["next"] and answer["next"]["job"]
        ]
        # Workers poll if their answer has no next job.
        late = [worker for worker in workers if worker not in [busy for busy, _ in after]]
        polled = await ask([worker.poll(wait_seconds=5) for worker in late])
        after += [(worker, answer["job"]) for worker, answer in zip(late, polled, strict=True)]
        await ask([worker.put(job) for worker, job in after])
        await ask([worker.complete(job) for worker, job in after])

    def _status(self, number: int, job_id: str) -> Call:
        return json_call("GET", f"/api/ai-jobs/{job_id}", self.keys[number % len(self.keys)])


@dataclass(frozen=True)
class BareCalls:
    """Sends the same calls to the bare server, which ignores their content."""

    connections: Connections

    async def cycle(self, measure: Measure, count: int) -> None:
        body = {"worker_id": "x" * 20, "more": "x" * 100}
        for route in ROUTES[:-1]:
            path = f"/{route.replace(' ', '_').replace(',', '')}"
            call = json_call("POST", path, "k" * 40, body)
            if route.startswith("get") or route == "healthz":
                call = json_call("GET", path, "k" * 40)
            if route == "put":
                call = Call("PUT", path, PICTURE)
            await measure(route, [call] * count)


async def set_up(connections: Connections, workers: int) -> JobLifecycle:
    ask = connections.ask

    async def admin(method: str, path: str, **body: Any) -> Any:
        return await ask(json_call(method, f"/api/admin/{path}", ADMIN_KEY, body))

    secret = (await admin("POST", "fleets", slug=FLEET, stage=STAGE))["secret"]
    effects = {}
    for slug, prompt in PROMPTS.items():
        await admin(
            "POST",
            "workflows",
            slug=slug,
            document=prompt,
            properties=PROPERTIES[slug],
            output_node_id="2",
        )
        effect = {"slug": slug, "workflow_slug": slug, "price_tokens": 1, "published": True}
        effects[slug] = (await admin("POST", "effects", **effect))["id"]
    await admin("PUT", f"fleets/{FLEET}/{STAGE}/workflows", workflow_slugs=list(PROMPTS))
    keys = []
    for number in range(TENANTS):
        tenant = await admin("POST", "tenants", name=f"tenant {number}")
        path = f"tenants/{tenant['id']}/wallets/{tenant['user_id']}/credits"
        await admin("POST", path, amount=TOKENS, provider_transaction_id=path)
        keys.append(tenant["key"])
    staff = await register_all(connections, secret, workers, "worker")
    videos = [await _video(connections, keys[number % TENANTS]) for number in range(VIDEOS)]
    lifecycle = JobLifecycle(connections, keys, effects, staff, videos, secret, has_next=False)
    for number, (_, video_id) in enumerate(videos):
        answer = await _applied(lifecycle, number, video_id)
    return replace(lifecycle, has_next="next" in answer)


async def register_all(
    connections: Connections, secret: str, count: int, name: str
) -> list[Worker]:
    calls = [_register(secret, f"{name}-{number}") for number in range(count)]
    answers = await connections.ask_all(calls)
    return [Worker(answer["worker_id"], answer["token"]) for answer in answers]


def _register(secret: str, worker_id: str) -> Call:
    body = {"worker_id": worker_id, "fleet_slug": FLEET, "stage": STAGE}
    return json_call("POST", "/api/worker/register", "", body, x_fleet_secret=secret)


async def _video(connections: Connections, key: str) -> tuple[str, str]:
    ask = connections.ask
    new = {"filename": "cat.png", "content_type": "image/png", "size": len(PICTURE)}
    announced = await ask(json_call("POST", "/api/videos/uploads", key, new))
    await ask(put(announced["upload"]))
    file = {"file_id": announced["file_id"]}
    return key, (await ask(json_call("POST", "/api/videos", key, file)))["id"]


async def _applied(lifecycle: JobLifecycle, number: int, video_id: str) -> dict[str, Any]:
    ask, worker = lifecycle.connections.ask, lifecycle.workers[number]
    await ask(lifecycle.submit(number, TURN, video_id=video_id))
    job = (await ask(worker.poll(wait_seconds=5)))["job"]
    await ask(worker.put(job))
    answer: dict[str, Any] = await ask(worker.complete_and_poll(job))
    return answer


@asynccontextmanager
async def running_control_plane(
    command: list[str | Path], environ: dict[str, str], workers: int
) -> AsyncIterator[tuple[ServerProcess, JobLifecycle]]:
    # The server starts in a thread, because our relay must answer it in the meantime.
    process = running(command, environ)
    server = await asyncio.to_thread(process.__enter__)
    connections = Connections(server.url, CONNECTIONS)
    try:
        yield server, await set_up(connections, workers)
    finally:
        connections.close()
        await asyncio.to_thread(process.__exit__, None, None, None)
