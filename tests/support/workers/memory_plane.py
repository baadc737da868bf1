"""A control plane that implements the worker protocol in memory and injects faults on demand."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from blake3 import blake3

from comfyfleet.api.values import Asset, OutputSlot
from comfyfleet.api.worker import (
    Complete,
    Fail,
    Heartbeat,
    HeartbeatAnswer,
    Job,
    Poll,
    Polled,
    Register,
    Registered,
    Requeue,
)

SECRET = "fleet-secret"


@dataclass
class JobFile:
    """An input file of a job: its bytes, and the input of the prompt that gets its name on the
    backend."""

    data: bytes
    filename: str = "input.bin"
    binding: str | None = None
    placeholder: str | None = None


@dataclass
class Dispatch:
    """A job in the queue, and all reports about it."""

    id: int
    prompt: dict[str, Any]
    files: dict[str, JobFile] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    job_id: UUID = field(default_factory=uuid4)
    status: str = "queued"
    token: UUID | None = None
    leases: int = 0
    worker_id: str | None = None
    heartbeats: list[Heartbeat] = field(default_factory=list)
    heartbeat_times: list[float] = field(default_factory=list)
    word: Complete | Fail | Requeue | None = None
    words: list[Complete | Fail | Requeue] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)
    cancelled: bool = False
    recalled: bool = False
    watched: bool = False  # somebody looks at it

    @property
    def started(self) -> bool:
        return any(beat.started for beat in self.heartbeats)

    @property
    def result(self) -> Complete:
        assert isinstance(self.word, Complete), self.word
        return self.word

    @property
    def failure(self) -> dict[str, Any]:
        assert isinstance(self.word, Fail), self.word
        assert isinstance(self.word.error, dict)
        return self.word.error

    @property
    def requeue(self) -> Requeue:
        assert isinstance(self.word, Requeue), self.word
        return self.word


class Problem(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class Plane:
    """`errors`: how many of the next calls of an endpoint get a 500; `delays` in seconds.

    `cut`: how many are handled and get an unreadable answer.
    """

    def __init__(self) -> None:
        self.url = ""
        self.url_seconds = 900.0
        self.lease_seconds = 900
        self.drain = False
        self.prefetches = True  # one that runs as many as it may is given another one
        self.draining: set[str] = set()  # worker ids
        self.reason: str | None = None  # why polls get no job
        self.answers_polls_of_words = True  # an older one does not
        self.relieves = False  # a poll that waits to prefetch counts as idle after a last word
        self.requeues_again = True  # a requeued job goes back into the queue
        self.errors: Counter[str] = Counter()
        self.cut: Counter[str] = Counter()
        self.delays: dict[str, float] = {}
        self.calls: list[str] = []
        self.polls: list[Poll] = []
        self.waiting = 0  # polls for a job that have no answer yet
        self.problems: list[str] = []  # of backends, as polls have reported them
        self.registers: list[Register] = []
        self.keys: dict[str, str] = {}
        self.keys_used: list[str] = []
        self.revoked: set[str] = set()  # worker ids
        self.new_token: str | None = None
        self.dispatches: dict[int, Dispatch] = {}
        self.stored: dict[str, bytes] = {}
        self.stored_types: dict[str, str] = {}
        self.object_info: bytes | None = None
        self.puts_refused = 0
        self.gone = False  # the store has lost its inputs
        self._gets: dict[str, bytes] = {}
        self._lock = threading.RLock()

    # What tests do

    def add(self, prompt: dict[str, Any], **more: Any) -> Dispatch:
        """`files`: name → GivenFile; the rest goes into the job."""
        with self._lock:
            dispatch = Dispatch(len(self.dispatches) + 1, prompt, more.pop("files", {}), more)
            self.dispatches[dispatch.id] = dispatch
            return dispatch

    def lose(self, dispatch: Dispatch) -> None:
        """Gives the lease to another worker."""
        with self._lock:
            dispatch.token, dispatch.status = uuid4(), "taken"

    def delivered(self, dispatch: Dispatch, number: int = 0) -> bytes:
        name = dispatch.result.outputs[number].name
        return self.stored[f"{dispatch.token}/{name}"]

    # Endpoints

    def register(self, body: Register, secret: str) -> Registered:
        if secret != SECRET:
            raise Problem(401, "unauthenticated")
        if body.worker_id in self.revoked:
            raise Problem(401, "worker_revoked")
        if body.worker_id in self.keys.values():
            raise Problem(409, "conflict")
        self.registers.append(body)
        key = f"{len(self.registers):064x}"
        self.keys[key] = body.worker_id
        return Registered(
            worker_id=body.worker_id,
            token=key,
            workflows_assigned=("any",),
            lease_seconds=self.lease_seconds,
            object_info_upload=self._slot("object_info", "object_info"),
        )

    def check(self, key: str) -> None:
        if key not in self.keys:
            raise Problem(401, "unauthenticated")
        if self.keys[key] in self.revoked:
            raise Problem(401, "worker_revoked")
        self.keys_used.append(key)

    def rotate(self, key: str) -> None:
        """Makes a new key: the worker gets it with its next answer, and may use both until then."""
        worker_id = next(iter(self.keys.values()))
        self.keys[key], self.new_token = worker_id, key

    async def poll(self, body: Poll, key: str, is_gone: Callable[[], Awaitable[bool]]) -> Polled:
        if body.backend_problem is not None:
            self.problems.append(body.backend_problem)
            return await self._polled(body, key, is_gone)
        self.polls.append(body)
        self.waiting += 1
        try:
            return await self._polled(body, key, is_gone)
        finally:
            self.waiting -= 1

    async def _polled(self, body: Poll, key: str, is_gone: Callable[[], Awaitable[bool]]) -> Polled:
        deadline = time.monotonic() + body.wait_seconds
        while True:
            self.check(key)
            if await is_gone():
                return Polled(reason="the worker hung up")
            with self._lock:
                dispatch = self._next(body)
                if dispatch is not None:
                    return Polled(job=self._job(dispatch))
                if self.reason is not None:
                    return Polled(reason=self.reason)
                if self.drain or body.worker_id in self.draining:
                    return Polled(reason="draining", drain=True)
                if self.new_token is not None and key != self.new_token:
                    return Polled(reason="a new key", new_token=self.new_token)
            if time.monotonic() >= deadline:
                return Polled(reason="nothing is queued")
            await asyncio.sleep(0.01)

    def heartbeat(self, body: Heartbeat) -> HeartbeatAnswer:
        with self._lock:
            dispatch = self._held(body.dispatch_id, body.lease_token)
            dispatch.heartbeats.append(body)
            dispatch.heartbeat_times.append(time.monotonic())
            if body.started:
                dispatch.times.setdefault("started", time.monotonic())
            return HeartbeatAnswer(
                lease_expires_at=datetime.now(UTC) + timedelta(seconds=self.lease_seconds),
                cancelled=dispatch.cancelled,
                drain=self.drain,
                recall=dispatch.recalled,
                previews=dispatch.watched,
                new_token=self.new_token,
                outputs=tuple(
                    self._slot(f"{dispatch.token}/{wanted.name}", wanted.name)
                    for wanted in body.want_outputs
                ),
                assets=tuple(self._asset(dispatch, name) for name in body.want_assets),
            )

    def end(self, body: Complete | Fail | Requeue) -> None:
        with self._lock:
            dispatch = self.dispatches[body.dispatch_id]
            if dispatch.token == body.lease_token and dispatch.word == body:
                dispatch.words.append(body)
                return
            self._held(body.dispatch_id, body.lease_token)
            if isinstance(body, Complete):
                self._check_sizes(dispatch, body)
            dispatch.word = body
            dispatch.words.append(body)
            dispatch.times["ended"] = time.monotonic()
            again = isinstance(body, Requeue) and self.requeues_again
            dispatch.status = "queued" if again else "ended"

    def deregister(self, worker_id: str) -> None:
        with self._lock:
            self.keys = {key: name for key, name in self.keys.items() if name != worker_id}
            for dispatch in self.dispatches.values():
                if dispatch.status == "leased" and dispatch.worker_id == worker_id:
                    dispatch.status = "queued" if self.requeues_again else "ended"

    # The store

    def get(self, key: str, expires: float) -> bytes:
        if time.time() > expires:
            raise Problem(403, "expired")
        if self.gone:
            raise Problem(404, "not_found")
        return self._gets[key]

    def put(self, key: str, expires: float, data: bytes, content_type: str) -> None:
        if time.time() > expires:
            self.puts_refused += 1
            raise Problem(403, "expired")
        if key == "object_info":
            self.object_info = data
            return
        self.stored[key] = data
        self.stored_types[key] = content_type

    # Inside

    def _next(self, body: Poll) -> Dispatch | None:
        held = {lease.lease_token for lease in body.held or ()}
        for dispatch in self.dispatches.values():
            mine = dispatch.status == "leased" and dispatch.worker_id == body.worker_id
            if mine and dispatch.token not in held and not dispatch.heartbeats:
                return dispatch
        if self.drain or body.worker_id in self.draining or body.backend_problem:
            return None
        if body.current_load >= body.max_concurrency + self.prefetches:
            return None
        for dispatch in self.dispatches.values():
            if dispatch.status == "queued":
                dispatch.status, dispatch.token = "leased", uuid4()
                dispatch.worker_id, dispatch.leases = body.worker_id, dispatch.leases + 1
                dispatch.heartbeats, dispatch.recalled = [], False
                dispatch.times["leased"] = time.monotonic()
                return dispatch
        return None

    def _job(self, dispatch: Dispatch) -> Job:
        assert dispatch.token is not None
        return Job(
            **{
                "dispatch_id": dispatch.id,
                "job_id": dispatch.job_id,
                "lease_token": dispatch.token,
                "lease_number": dispatch.leases,
                "attempt": dispatch.leases,
                "lease_expires_at": datetime.now(UTC) + timedelta(seconds=self.lease_seconds),
                "lease_seconds": self.lease_seconds,
                "provider": "self_hosted",
                "workflow_slug": "any",
                "prompt": dispatch.prompt,
                "assets": tuple(self._asset(dispatch, name) for name in dispatch.files),
                "outputs": (self._slot(f"{dispatch.token}/output", "output"),),
                **dispatch.more,
            }
        )

    def _held(self, dispatch_id: int, token: UUID) -> Dispatch:
        dispatch = self.dispatches[dispatch_id]
        if dispatch.token != token or dispatch.status != "leased":
            raise Problem(409, "lease_lost")
        return dispatch

    def _asset(self, dispatch: Dispatch, name: str) -> Asset:
        given = dispatch.files[name]
        key = blake3(given.data).hexdigest()
        self._gets[key] = given.data
        return Asset(
            name=name,
            filename=given.filename,
            url=f"{self.url}/store/{key}?expires={time.time() + self.url_seconds}",
            content_hash=key,
            size=len(given.data),
            binding=given.binding,
            placeholder=given.placeholder,
        )

    def _slot(self, key: str, name: str) -> OutputSlot:
        expires = time.time() + self.url_seconds
        return OutputSlot(name=name, url=f"{self.url}/store/{key}?expires={expires}")

    def _check_sizes(self, dispatch: Dispatch, body: Complete) -> None:
        for output in body.outputs:
            data = self.stored.get(f"{dispatch.token}/{output.name}")
            if data is None or len(data) != output.size:
                raise Problem(422, "invalid_input")


async def eventually(true: Callable[[], object], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.01)
