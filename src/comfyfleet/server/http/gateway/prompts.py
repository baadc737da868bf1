"""ComfyUI's routes for submitting and interrupting prompts, and for the queue, history and jobs."""

import contextlib
import hashlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import wraps
from typing import Any, TypeAlias
from uuid import UUID

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response

from comfyfleet.errors import InsufficientTokens, QueueFull
from comfyfleet.protocol.http import JSON, Route, empty_reply, json_reply, json_text, names_etag
from comfyfleet.protocol.payloads import (
    ABSENT,
    MalformedBody,
    RefusedPrompt,
    body_field,
    detailed_job,
    is_canonical_id,
    parse_submission,
    read_number,
    read_query,
    waiting_job,
)
from comfyfleet.protocol.validation import fault
from comfyfleet.server.gateway import history, prompts
from comfyfleet.server.gateway.model import (
    is_running,
    max_tokens_of,
    queued_prompt,
    shortfall,
)
from comfyfleet.server.gateway.visible_backends import sees_backends
from comfyfleet.server.http.gateway.app import GatewayCall, read_json
from comfyfleet.server.jobs import service as jobs


async def post_prompt(call: GatewayCall, request: Request) -> Response:
    body = await read_json(request)
    number = await _number(call, body)
    submission = parse_submission(body)
    usage = request.headers.get("comfy-usage-source")
    most = max_tokens_of(request.headers, request.query_params, submission.extra_data)
    options = prompts.PromptOptions(max_tokens=most, awaits_backend=True)
    try:
        async with released_if_refused(call) as hold:
            accepted = await prompts.submit_prompt(
                call.plane, call.caller, submission, number, usage, options=options, at_id=hold
            )
            if call.gateway.numbers.is_out_of_line(call.caller, number):
                await prompts.order_waiting(call.plane, call.caller)
    except InsufficientTokens as error:
        raise RefusedPrompt(shortfall(error)) from error
    except QueueFull as error:
        return _busy_reply(error)
    answer = {
        "prompt_id": accepted.prompt_id,
        "number": accepted.number,
        "node_errors": accepted.node_errors,
    }
    reply = json_reply(answer)
    reply.background = BackgroundTask(call.gateway.feeds.release, call.caller, accepted.job_id)
    return reply


@contextlib.asynccontextmanager
async def released_if_refused(call: GatewayCall) -> AsyncIterator[Callable[[UUID], None]]:
    """Yields a function that holds back a job's events. If the submission fails, they are
    released."""
    feeds, held = call.gateway.feeds, list[UUID]()

    def hold(job_id: UUID) -> None:
        held.append(job_id)
        feeds.of(call.caller).hold(job_id)

    try:
        yield hold
    except BaseException:
        for job_id in held:
            await feeds.release(call.caller, job_id)
        raise


def _busy_reply(error: QueueFull) -> Response:
    """Returns a 429 response. Nothing was queued, and the client can retry."""
    reply = json_reply({"error": fault(error.code, error.message), "node_errors": {}}, 429)
    reply.headers["retry-after"] = str(error.details.get("retry_after_seconds", 1))
    return reply


async def _number(call: GatewayCall, body: object) -> float:
    """Returns a prompt's number in the queue. Rejected prompts use up a number as well."""
    requested, front = read_number(body)
    if requested is not None:
        if not math.isfinite(requested):
            raise RefusedPrompt(fault("invalid_number", "number must be finite", str(requested)))
        return requested
    number = await call.gateway.numbers.next(call.caller)
    return -number if front else number


ID_CHARACTERS, IDS_MAX = 36, 10_000
INVALID_IDS_SHOWN_MAX = 100
Handler: TypeAlias = Callable[[GatewayCall, Request], Awaitable[Response]]
Polled: TypeAlias = Callable[[GatewayCall, Request], Awaitable[bytes]]
# Clients that cache a response must revalidate it each time.
CACHING = {"cache-control": "private, no-cache"}


def polled(body: Polled) -> Handler:
    """Wraps a route whose JSON is cached and reused until the caller's data changes."""

    @wraps(body)
    async def answer(call: GatewayCall, request: Request) -> Response:
        sees = sees_backends(call.plane, call.caller.tenant)
        what = body.__name__, _hash_of_target(request), sees

        async def render() -> bytes:
            reply = await body(call, request)
            # A client must receive all events of a run before it sees that the prompt has finished.
            await call.gateway.feeds.wait_until_sent(call.caller)
            return reply

        reply = await call.gateway.polls.get(call.caller.user_id, what, render)
        headers = {**CACHING, "etag": reply.etag}
        if names_etag(request.headers.get("if-none-match", ""), reply.etag):
            return Response(b"", 304, headers)
        return Response(reply.body, 200, {**headers, "content-type": JSON})

    return answer


def _hash_of_target(request: Request) -> bytes:
    """Hashes a request's path and query for use in a cache key, because they may be long and may
    contain a secret."""
    path = request.scope["path"].removeprefix("/api").encode("utf-8", "surrogateescape")
    query: bytes = request.scope.get("query_string", b"")
    return hashlib.sha256(b"%d %b%b" % (len(path), path, query)).digest()


@polled
async def get_prompt(call: GatewayCall, request: Request) -> bytes:
    remaining = await history.count_active(call.plane, call.caller)
    return json_text({"exec_info": {"queue_remaining": remaining}}).encode()


@polled
async def get_queue(call: GatewayCall, request: Request) -> bytes:
    return await history.queue_body(call.plane, call.caller, call.gateway.cache)


async def post_queue(call: GatewayCall, request: Request) -> Response:
    body = await read_json(request)
    if _is_set(body, "clear"):
        await prompts.clear_waiting(call.plane, call.caller)
    await prompts.delete_waiting(call.plane, call.caller, list(_ids_to_delete(body)))
    return empty_reply()


@polled
async def get_history(call: GatewayCall, request: Request) -> bytes:
    query = request.query_params
    most, offset = _integer(query.get("max_items")), _integer(query.get("offset"))
    return await history.history_body(
        call.plane, call.caller, call.gateway.cache, offset=offset, most=most
    )


def _integer(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return int(text)
    except ValueError as error:
        raise MalformedBody(f"{text!r} is not a whole number") from error


@polled
async def get_history_of(call: GatewayCall, request: Request) -> bytes:
    prompt_id = request.path_params["prompt_id"]
    return await history.entry_body(call.plane, call.caller, prompt_id, call.gateway.cache)


async def post_history(call: GatewayCall, request: Request) -> Response:
    body = await read_json(request)
    tenant_id, user_id = call.caller.tenant.id, call.caller.user_id
    ids = list((await prompts.job_ids_of(call.caller, list(_ids_to_delete(body)))).values())
    async with call.plane.context.tenant_transaction(tenant_id) as tx:
        if _is_set(body, "clear"):
            await jobs.hide_prompts(tx, tenant_id, user_id, None, now=call.plane.clock())
        elif ids:
            await jobs.hide_prompts(tx, tenant_id, user_id, ids, now=call.plane.clock())
    call.plane.context.notifier.tell_user(user_id)
    return empty_reply()


async def post_interrupt(call: GatewayCall, request: Request) -> Response:
    """Interrupts a prompt. Without a `prompt_id`, all of the caller's running prompts are
    interrupted."""
    body: object = {}
    with contextlib.suppress(MalformedBody):
        body = await read_json(request)
    prompt_id = body.get("prompt_id") if isinstance(body, dict) else None
    await prompts.interrupt(call.plane, call.caller, prompt_id or None)
    return empty_reply()


async def post_free(call: GatewayCall, request: Request) -> Response:
    """Does nothing, because a client must not free the memory of a shared fleet."""
    return empty_reply()


@polled
async def get_jobs(call: GatewayCall, request: Request) -> bytes:
    query = read_query(request.query_params)
    return await history.jobs_body(call.plane, call.caller, query, call.gateway.cache)


async def get_job(call: GatewayCall, request: Request) -> Response:
    job = await find_job(call, request.path_params["job_id"])
    return json_reply({"error": "Job not found"}, 404) if job is None else json_reply(job)


async def find_job(call: GatewayCall, prompt_id: str) -> dict[str, Any] | None:
    job = await history.find_job(call.plane, call.caller, prompt_id)
    if job is None:
        return None
    if not job.status.is_active:
        entry = await history.entry_of(call.plane, call.caller, job, call.gateway.cache)
        return detailed_job(prompt_id, entry)
    return waiting_job(queued_prompt(job), "in_progress" if is_running(job) else "pending")


async def cancel_job(call: GatewayCall, request: Request) -> Response:
    prompt_id = request.path_params["job_id"]
    return json_reply(
        {"cancelled": await prompts.cancel_prompt(call.plane, call.caller, prompt_id)}
    )


async def cancel_jobs(call: GatewayCall, request: Request) -> Response:
    try:
        body = await read_json(request)
    except MalformedBody:
        return json_reply({"error": "Invalid JSON"}, 400)
    job_ids = body.get("job_ids") if isinstance(body, dict) else None
    if not isinstance(job_ids, list):
        return json_reply({"error": "job_ids must be a list"}, 400)
    if len(job_ids) > IDS_MAX:
        return json_reply({"error": f"job_ids can have at most {IDS_MAX:,} ids"}, 400)
    invalid = [job_id for job_id in job_ids if not is_canonical_id(job_id)]
    if invalid:
        shown = invalid[:INVALID_IDS_SHOWN_MAX]
        return json_reply({"error": "Invalid job ids", "invalid_ids": shown}, 400)
    active = await prompts.still_active(call.plane, call.caller, job_ids)
    cancelled = [await prompts.cancel_prompt(call.plane, call.caller, job_id) for job_id in active]
    return json_reply({"cancelled": any(cancelled)})


def _is_set(body: object, name: str) -> bool:
    value = body_field(body, name)
    return value is not ABSENT and bool(value)


def _ids_to_delete(body: object) -> Iterable[str]:
    """Returns the valid prompt ids to delete, without duplicates.

    Like ComfyUI, accepts any sequence. The characters of a string never match a prompt.
    """
    ids = body_field(body, "delete")
    if ids is ABSENT:
        return ()
    if not isinstance(ids, list | str | dict):
        raise MalformedBody("delete must be a list of ids")
    if isinstance(ids, str):
        return ()
    if len(ids) > IDS_MAX:
        message = f"At most {IDS_MAX:,} ids can be deleted at once"
        raise RefusedPrompt(fault("too_many_ids", message, f"{len(ids):,} ids"))
    named = (item for item in ids if isinstance(item, str) and len(item) == ID_CHARACTERS)
    return list(dict.fromkeys(item for item in named if is_canonical_id(item)))


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
