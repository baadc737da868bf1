"""Serves the in-memory control plane on a port, where it can be stopped and started again."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tests.support.workers.memory_plane import Plane, Problem

from comfyfleet.api.values import Message
from comfyfleet.api.worker import (
    Complete,
    Completed,
    Deregister,
    Done,
    Fail,
    Heartbeat,
    Poll,
    Register,
    Requeue,
)
from comfyfleet.engine.serve import listen, url_of

Body = TypeVar("Body", bound=Message)


def app_of(plane: Plane) -> Starlette:
    async def worker(request: Request) -> Response:
        endpoint = request.path_params["endpoint"]
        raw = await request.body()
        plane.calls.append(endpoint)
        await asyncio.sleep(plane.delays.get(endpoint, 0))
        if plane.errors[endpoint] > 0:
            plane.errors[endpoint] -= 1
            return Response("sorry", 500)
        try:
            answer = await _answer(plane, endpoint, raw, request)
        except Problem as problem:
            body = {"error": {"code": problem.code, "message": problem.code, "details": {}}}
            return JSONResponse(body, problem.status)
        if plane.cut[endpoint] > 0:
            plane.cut[endpoint] -= 1
            return Response("<html>a proxy's own page</html>", 502)
        return Response(answer.model_dump_json(), media_type="application/json")

    async def store(request: Request) -> Response:
        key, expires = request.path_params["key"], float(request.query_params["expires"])
        try:
            if request.method == "GET":
                return Response(plane.get(key, expires))
            kind = request.headers.get("content-type", "")
            await asyncio.sleep(plane.delays.get("store PUT", 0))
            plane.put(key, expires, await request.body(), kind)
        except Problem as problem:
            return Response(problem.code, problem.status)
        return Response()

    return Starlette(
        routes=[
            Route("/api/worker/{endpoint}", worker, methods=["POST"]),
            Route("/store/{key:path}", store, methods=["GET", "PUT"]),
        ]
    )


async def _answer(plane: Plane, endpoint: str, raw: bytes, request: Request) -> Message:
    if endpoint == "register":
        secret = request.headers.get("x-fleet-secret", "")
        return plane.register(Register.model_validate_json(raw), secret)
    key = request.headers.get("authorization", "").removeprefix("Bearer ")
    plane.check(key)
    match endpoint:
        case "poll":
            return await plane.poll(Poll.model_validate_json(raw), key, request.is_disconnected)
        case "heartbeat":
            return plane.heartbeat(Heartbeat.model_validate_json(raw))
        case "deregister":
            plane.deregister(Deregister.model_validate_json(raw).worker_id or "")
        case _:
            kinds: dict[str, Any] = {"complete": Complete, "fail": Fail, "requeue": Requeue}
            word = kinds[endpoint].model_validate_json(raw)
            poll = getattr(word, "poll", None)
            plane.end(word.model_copy(update={"poll": None}) if poll else word)
            if poll and plane.answers_polls_of_words:
                return Completed(next=await plane.poll(poll, key, request.is_disconnected))
            return Completed(polls_on=plane.relieves)
    return Done()


class Served:
    """A control plane that can be stopped. Connections are then cut, and new ones are refused."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self._port = 0
        self._stop: contextlib.ExitStack | None = None

    def up(self) -> None:
        stack = contextlib.ExitStack()
        listener = stack.enter_context(listen("127.0.0.1", self._port))
        self._port = listener.getsockname()[1]
        self.plane.url = url_of(listener)
        config = uvicorn.Config(
            app_of(self.plane), log_config=None, access_log=False, timeout_graceful_shutdown=0
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [listener]}, name="plane", daemon=True
        )
        thread.start()

        def down() -> None:
            server.should_exit = server.force_exit = True
            thread.join(10)

        stack.callback(down)
        self._stop = stack

    def down(self) -> None:
        if self._stop is not None:
            self._stop.close()
            self._stop = None


@contextlib.contextmanager
def serving_plane() -> Iterator[Served]:
    served = Served(Plane())
    served.up()
    try:
        yield served
    finally:
        served.down()
