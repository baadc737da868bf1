"""Routes to submit, list and cancel prompts, and the websocket that sends messages about them to
clients."""

import asyncio
import contextlib
import json
import uuid
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from comfyfleet.engine.engine import Engine
from comfyfleet.protocol import sockets
from comfyfleet.protocol.http import Route, empty_reply, json_reply, read_json
from comfyfleet.protocol.payloads import (
    ABSENT,
    MalformedBody,
    UnforeseenInput,
    body_field,
    detailed_job,
    is_canonical_id,
    list_jobs,
    read_query,
    waiting_job,
)
from comfyfleet.protocol.server_info import FEATURES
from comfyfleet.protocol.sockets import Socket


async def serve_socket(engine: Engine, websocket: WebSocket) -> None:
    await websocket.accept()
    client_id = websocket.query_params.get("clientId") or uuid.uuid4().hex
    socket = engine.sockets.connect(client_id)
    send_greeting(engine, socket, client_id)
    try:
        await pump_socket(websocket, socket)
    finally:
        engine.sockets.disconnect(client_id)


def send_greeting(engine: Engine, socket: Socket, client_id: str) -> None:
    socket.push(sockets.json_frame("status", {"status": engine.status(), "sid": client_id}))
    executing = engine.executor.executing
    if executing is not None and executing[0] == client_id:
        socket.push(sockets.json_frame("executing", {"node": executing[1]}))


async def pump_socket(websocket: WebSocket, socket: Socket) -> None:
    """Sends and receives until the client disconnects or has too many unread messages."""
    running = [
        asyncio.ensure_future(part)
        for part in (_write(websocket, socket), _listen(websocket, socket), socket.overrun.wait())
    ]
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for part in running:
            part.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):
            await websocket.close()


async def _write(websocket: WebSocket, socket: Socket) -> None:
    while True:
        frame = await socket.next_frame()
        if isinstance(frame, str):
            await websocket.send_text(frame)
        else:
            await websocket.send_bytes(frame)


async def _listen(websocket: WebSocket, socket: Socket) -> None:
    """Reads the client's features. Only the first JSON object counts, and only if it is a
    `feature_flags` message."""
    first = True
    while (message := await websocket.receive())["type"] != "websocket.disconnect":
        text = message.get("text")
        if not first or text is None:
            continue
        try:
            message = json.loads(text)
        except ValueError:
            continue
        first = not isinstance(message, dict)
        if isinstance(message, dict) and message.get("type") == "feature_flags":
            flags = message.get("data", {})
            socket.features = flags if isinstance(flags, dict) else {}
            socket.push(sockets.json_frame("feature_flags", FEATURES))


async def post_prompt(engine: Engine, request: Request) -> Response:
    body = await read_json(request)
    accepted = engine.submit(body, request.headers.get("comfy-usage-source"))
    return json_reply(asdict(accepted))


async def get_prompt(engine: Engine, request: Request) -> Response:
    return json_reply(engine.status())


async def get_queue(engine: Engine, request: Request) -> Response:
    running, waiting = engine.queue.listed()
    return json_reply(
        {
            "queue_running": [item.row() for item in running],
            "queue_pending": [item.row() for item in waiting],
        }
    )


async def post_queue(engine: Engine, request: Request) -> Response:
    body = await read_json(request)
    if _is_flag_set(body, "clear"):
        engine.queue.clear()
    for prompt_id in _ids_to_delete(body):
        engine.queue.delete(prompt_id)
    return empty_reply()


async def get_history(engine: Engine, request: Request) -> Response:
    try:
        numbers = {
            name: int(request.query_params[name])
            for name in ("max_items", "offset")
            if name in request.query_params
        }
    except ValueError as error:
        raise UnforeseenInput(str(error)) from error
    return json_reply(engine.history.page(numbers.get("max_items"), numbers.get("offset")))


async def get_history_of(engine: Engine, request: Request) -> Response:
    return json_reply(engine.history.get(request.path_params["prompt_id"]))


async def post_history(engine: Engine, request: Request) -> Response:
    body = await read_json(request)
    if _is_flag_set(body, "clear"):
        engine.history.clear()
    for prompt_id in _ids_to_delete(body):
        engine.history.delete(prompt_id)
    return empty_reply()


async def post_interrupt(engine: Engine, request: Request) -> Response:
    """Interrupts a prompt. If the body can't be parsed, interrupts whichever prompt is running."""
    try:
        body = await read_json(request)
    except MalformedBody:
        body = {}
    prompt_id = _object(body).get("prompt_id")
    engine.queue.interrupt(prompt_id or None)
    return empty_reply()


async def post_free(engine: Engine, request: Request) -> Response:
    if _object(await read_json(request)).get("free_memory"):
        engine.free()
    return empty_reply()


async def get_jobs(engine: Engine, request: Request) -> Response:
    query = read_query(request.query_params)
    running, waiting = engine.queue.listed()
    return json_reply(list_jobs(query, running, waiting, engine.history.page()))


async def get_job(engine: Engine, request: Request) -> Response:
    prompt_id = request.path_params["job_id"]
    job = find_job(engine, prompt_id)
    return json_reply({"error": "Job not found"}, 404) if job is None else json_reply(job)


def find_job(engine: Engine, prompt_id: str) -> dict[str, Any] | None:
    # Read the queue before the history, so that a prompt that ends in between is found in the
    # history.
    running, waiting = engine.queue.listed()
    if record := engine.history.get(prompt_id):
        return detailed_job(prompt_id, record[prompt_id])
    for items, status in ((running, "in_progress"), (waiting, "pending")):
        for item in items:
            if item.prompt_id == prompt_id:
                return waiting_job(item, status)
    return None


async def cancel_job(engine: Engine, request: Request) -> Response:
    return json_reply({"cancelled": engine.queue.cancel(request.path_params["job_id"])})


async def cancel_jobs(engine: Engine, request: Request) -> Response:
    """Cancels several jobs. Unknown and finished ids are skipped."""
    try:
        body = await read_json(request)
    except MalformedBody:
        return json_reply({"error": "Request body must be valid JSON"}, 400)
    job_ids = body.get("job_ids") if isinstance(body, dict) else None
    if not isinstance(job_ids, list):
        return json_reply({"error": "job_ids must be a list"}, 400)
    invalid = [_text(job_id) for job_id in job_ids if not is_canonical_id(job_id)]
    if invalid:
        error = "job_ids contains invalid id(s)"
        return json_reply({"error": error, "invalid_ids": invalid}, 400)
    cancelled = [engine.queue.cancel(job_id) for job_id in job_ids]
    return json_reply({"cancelled": any(cancelled)})


def _text(value: object) -> str:
    return value if isinstance(value, str) else repr(value)


def _is_flag_set(body: object, name: str) -> bool:
    value = body_field(body, name)
    return value is not ABSENT and bool(value)


def _ids_to_delete(body: object) -> Iterable[str]:
    """Returns the ids to delete. Like ComfyUI, accepts any sequence, even a string, whose
    characters match no id."""
    ids = body_field(body, "delete")
    if ids is ABSENT:
        return ()
    if not isinstance(ids, list | str | dict):
        raise MalformedBody("delete must be a list of ids")
    return [prompt_id for prompt_id in ids if isinstance(prompt_id, str)]


def _object(body: object) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise MalformedBody("the body must be a JSON object")
    return body


ROUTES = (
    Route("GET", "/prompt", get_prompt),
    Route("POST", "/prompt", post_prompt),
    Route("GET", "/queue", get_queue),
    Route("POST", "/queue", post_queue),
    Route("GET", "/history", get_history),
    Route("POST", "/history", post_history),
    Route("GET", "/history/{prompt_id}", get_history_of),
    Route("POST", "/interrupt", post_interrupt),
    Route("POST", "/free", post_free),
    Route("GET", "/api/jobs", get_jobs),
    Route("POST", "/api/jobs/cancel", cancel_jobs),
    Route("GET", "/api/jobs/{job_id}", get_job),
    Route("POST", "/api/jobs/{job_id}/cancel", cancel_job),
)
