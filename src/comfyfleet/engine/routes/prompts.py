"""Submitting prompts, looking at them, and taking them back."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from comfyfleet.engine.door import Route
from comfyfleet.engine.engine import Engine
from comfyfleet.engine.jobs import detailed_job, list_jobs, read_query, waiting_job
from comfyfleet.engine.replies import empty, json_reply
from comfyfleet.engine.requests import read_json
from comfyfleet.engine.submission import ABSENT, is_canonical_id, member
from comfyfleet.engine.trouble import MalformedBody, Trouble


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
    if _is_asked(body, "clear"):
        engine.queue.clear()
    for prompt_id in _ids_to_delete(body):
        engine.queue.delete(prompt_id)
    return empty()


async def get_history(engine: Engine, request: Request) -> Response:
    try:
        numbers = {
            name: int(request.query_params[name])
            for name in ("max_items", "offset")
            if name in request.query_params
        }
    except ValueError as error:
        raise Trouble(str(error)) from error
    return json_reply(engine.history.page(numbers.get("max_items"), numbers.get("offset")))


async def get_history_of(engine: Engine, request: Request) -> Response:
    return json_reply(engine.history.get(request.path_params["prompt_id"]))


async def post_history(engine: Engine, request: Request) -> Response:
    body = await read_json(request)
    if _is_asked(body, "clear"):
        engine.history.clear()
    for prompt_id in _ids_to_delete(body):
        engine.history.delete(prompt_id)
    return empty()


async def post_interrupt(engine: Engine, request: Request) -> Response:
    """A body that can't be read means everything that runs."""
    try:
        body = await read_json(request)
    except MalformedBody:
        body = {}
    prompt_id = _object(body).get("prompt_id")
    engine.queue.interrupt(prompt_id or None)
    return empty()


async def post_free(engine: Engine, request: Request) -> Response:
    if _object(await read_json(request)).get("free_memory"):
        engine.free()
    return empty()


async def get_jobs(engine: Engine, request: Request) -> Response:
    query = read_query(request.query_params)
    running, waiting = engine.queue.listed()
    return json_reply(list_jobs(query, running, waiting, engine.history.page()))


async def get_job(engine: Engine, request: Request) -> Response:
    prompt_id = request.path_params["job_id"]
    job = find_job(engine, prompt_id)
    return json_reply({"error": "Job not found"}, 404) if job is None else json_reply(job)


def find_job(engine: Engine, prompt_id: str) -> dict[str, Any] | None:
    # The queue first: a prompt that ends in between is found in history then.
    running, waiting = engine.queue.listed()
    if found := engine.history.get(prompt_id):
        return detailed_job(prompt_id, found[prompt_id])
    for items, status in ((running, "in_progress"), (waiting, "pending")):
        for item in items:
            if item.prompt_id == prompt_id:
                return waiting_job(item, status)
    return None


async def cancel_job(engine: Engine, request: Request) -> Response:
    return json_reply({"cancelled": engine.queue.cancel(request.path_params["job_id"])})


async def cancel_jobs(engine: Engine, request: Request) -> Response:
    """Best effort: ids that are unknown or over are skipped."""
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


def _is_asked(body: object, name: str) -> bool:
    value = member(body, name)
    return value is not ABSENT and bool(value)


def _ids_to_delete(body: object) -> Iterable[str]:
    """Any sequence will do, even a text: its letters are ids of nothing."""
    ids = member(body, "delete")
    if ids is ABSENT:
        return ()
    if not isinstance(ids, list | str | dict):
        raise MalformedBody("delete must be a list of ids")
    return [prompt_id for prompt_id in ids if isinstance(prompt_id, str)]


def _object(body: object) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise MalformedBody("a JSON object is expected")
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
