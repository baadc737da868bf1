"""A web application with the routes of Comfy Cloud's API v1, and a context manager to serve it."""

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket
from tests.support.backends.comfy_cloud import cloud as comfy_cloud_cloud
from tests.support.backends.comfy_cloud import files
from tests.support.backends.comfy_cloud.cloud import (
    AccountQueueFull,
    CloudAccount,
    NoCredits,
    NoSuchJob,
    NotYours,
    StandInCloud,
    positions,
)
from tests.support.backends.comfy_cloud.files import refusal

from comfyfleet.engine import info_routes
from comfyfleet.engine.engine import Engine
from comfyfleet.engine.prompt_routes import pump_socket, send_greeting
from comfyfleet.engine.serve import Served, serve_in_thread
from comfyfleet.errors import FleetError
from comfyfleet.protocol.http import Handler, Route, Router, empty_reply, json_reply, read_json
from comfyfleet.protocol.payloads import (
    InvalidQuery,
    Job,
    MalformedBody,
    RefusedPrompt,
    UnforeseenInput,
    read_statuses,
)
from comfyfleet.protocol.server_info import FEATURES, constant_reply

LIMIT_DEFAULT, LIMIT_MAX = 100, 1000
STATUSES: dict[type[FleetError], int] = {
    NoCredits: 402,
    NotYours: 403,
    NoSuchJob: 404,
    AccountQueueFull: 429,
    InvalidQuery: 400,
    UnforeseenInput: 400,
    MalformedBody: 400,
}

UserHandler = Callable[[StandInCloud, CloudAccount, Request], Awaitable[Response]]


def signed_in(handler: UserHandler) -> Handler[StandInCloud]:
    """Requires a key; our errors become the cloud's."""

    async def answer(cloud: StandInCloud, request: Request) -> Response:
        account = cloud.account_of(request.headers.get("x-api-key"))
        if account is None:
            return refusal(401, "UNAUTHORIZED", "a valid key is needed in X-API-Key")
        try:
            return await handler(cloud, account, request)
        except RefusedPrompt as refused:
            return json_reply(refused.body, 400)
        except tuple(STATUSES) as error:
            return refusal(STATUSES[type(error)], error.code.upper(), error.message)

    return answer


def of_engine(handler: Handler[Engine]) -> UserHandler:
    """A route that the cloud answers like the engine."""

    async def answer(cloud: StandInCloud, account: CloudAccount, request: Request) -> Response:
        return await handler(cloud.engine, request)

    return answer


async def post_prompt(cloud: StandInCloud, account: CloudAccount, request: Request) -> Response:
    return json_reply(asdict(cloud.submit(account, await read_json(request))))


async def get_prompt(cloud: StandInCloud, account: CloudAccount, request: Request) -> Response:
    remaining = len(cloud.running(account.user)) + len(cloud.waiting(account.user))
    return json_reply({"exec_info": {"queue_remaining": remaining}})


async def get_status(cloud: StandInCloud, account: CloudAccount, request: Request) -> Response:
    job_id = request.path_params["job_id"]
    job, _ = cloud.job(account.user, job_id)
    waiting = [item.prompt_id for item in cloud.waiting(account.user)]
    return json_reply(comfy_cloud_cloud.raw_status(job_id, job, waiting))


async def get_job(cloud: StandInCloud, account: CloudAccount, request: Request) -> Response:
    job_id = request.path_params["job_id"]
    job, known = cloud.job(account.user, job_id)
    record = cloud.engine.history.get(job_id).get(job_id)
    if record is None:
        return json_reply(comfy_cloud_cloud.cloud_detail(job, None, known.prompt))
    results = {"outputs": record["outputs"], "execution_status": record["status"]}
    return json_reply(
        comfy_cloud_cloud.cloud_detail({**job, **results}, record["meta"], known.prompt)
    )


async def get_jobs(cloud: StandInCloud, account: CloudAccount, request: Request) -> Response:
    query = request.query_params
    wanted = read_statuses(query.get("status"))
    limit, offset = _number(query, "limit", LIMIT_DEFAULT), _number(query, "offset", 0)
    if not 1 <= limit <= LIMIT_MAX or offset < 0:
        raise InvalidQuery(f"limit must be 1 to {LIMIT_MAX}, offset not negative")
    jobs = [job for job in cloud.jobs(account.user).values() if job["status"] in wanted]
    jobs.sort(key=_sort_key(query.get("sort_by")), reverse=query.get("sort_order") != "asc")
    page = jobs[offset : offset + limit]
    pagination = {"offset": offset, "limit": limit, "total": len(jobs)}
    pagination["has_more"] = offset + len(page) < len(jobs)
    return json_reply(
        {"jobs": [comfy_cloud_cloud.cloud_job(job) for job in page], "pagination": pagination}
    )


def _sort_key(name: str | None) -> Callable[[Job], int]:
    if name == "execution_time":
        return lambda job: job.get("execution_end_time", 0) - job.get("execution_start_time", 0)
    return lambda job: int(job["create_time"])


def _number(query: Any, name: str, default: int) -> int:
    try:
        return int(query.get(name, default))
    except ValueError as error:
        raise InvalidQuery(f"{name} must be a number") from error


async def cancel_job(cloud: StandInCloud, account: CloudAccount, request: Request) -> Response:
    job_id = request.path_params["job_id"]
    cloud.job(account.user, job_id)
    return json_reply({"cancelled": cloud.cancel(account.user, job_id)})


async def get_queue(cloud: StandInCloud, account: CloudAccount, request: Request) -> Response:
    running, waiting = cloud.running(account.user), cloud.waiting(account.user)
    return json_reply(
        {
            "queue_running": [comfy_cloud_cloud.queue_row(*place) for place in positions(running)],
            "queue_pending": [comfy_cloud_cloud.queue_row(*place) for place in positions(waiting)],
        }
    )


async def post_queue(cloud: StandInCloud, account: CloudAccount, request: Request) -> Response:
    wanted, clear = _orders(await read_json(request))
    if clear:
        wanted = [item.prompt_id for item in cloud.waiting(account.user)]
    deleted = [job_id for job_id in wanted if cloud.cancel_waiting(account.user, job_id)]
    return json_reply({"deleted": deleted, "cleared": clear})


def _orders(body: object) -> tuple[list[str], bool]:
    """`delete` or `clear`, and nothing else."""
    if not isinstance(body, dict) or not body or body.keys() - {"delete", "clear"}:
        raise MalformedBody("delete or clear are expected, and nothing else")
    ids = body.get("delete", [])
    if not isinstance(ids, list):
        raise MalformedBody("delete must be a list of ids")
    return ids, body.get("clear") is True


async def post_interrupt(cloud: StandInCloud, account: CloudAccount, request: Request) -> Response:
    cloud.interrupt_all(account.user)
    return empty_reply()


async def get_history(cloud: StandInCloud, account: CloudAccount, request: Request) -> Response:
    own = cloud.jobs(account.user)
    records = cloud.engine.history.page()
    entries = [comfy_cloud_cloud.history_entry(key, records[key]) for key in records if key in own]
    offset = _number(request.query_params, "offset", 0)
    end = offset + _number(request.query_params, "max_items", len(entries))
    return json_reply({"history": entries[::-1][offset:end]})


async def get_history_of(cloud: StandInCloud, account: CloudAccount, request: Request) -> Response:
    job_id = request.path_params["prompt_id"]
    cloud.job(account.user, job_id)
    found = cloud.engine.history.get(job_id)
    if not found:
        raise NoSuchJob("the job has not ended")
    return json_reply({job_id: comfy_cloud_cloud.history_detail(job_id, found[job_id])})


async def post_history(cloud: StandInCloud, account: CloudAccount, request: Request) -> Response:
    wanted, clear = _orders(await read_json(request))
    own = cloud.jobs(account.user)
    for job_id in own if clear else wanted:
        if job_id in own:
            cloud.engine.history.delete(job_id)
    return empty_reply()


async def get_user(cloud: StandInCloud, account: CloudAccount, request: Request) -> Response:
    return json_reply({"status": "active"})


async def talk(cloud: StandInCloud, websocket: WebSocket) -> None:
    """The key decides which messages are sent; `clientId` is ignored."""
    account = cloud.account_of(websocket.query_params.get("token"))
    if account is None:
        await websocket.close()
        return
    await websocket.accept()
    sockets = cloud.engine.sockets
    socket = sockets.join(account.user)
    send_greeting(cloud.engine, socket, account.user)
    try:
        await pump_socket(websocket, socket)
    finally:
        sockets.leave(account.user, socket)


def route(method: str, path: str, handler: UserHandler) -> Route[StandInCloud]:
    return Route(method, path, signed_in(handler), ("",))


async def get_system_stats(cloud: StandInCloud, request: Request) -> Response:
    return await info_routes.get_system_stats(cloud.engine, request)


ROUTES: tuple[Route[StandInCloud], ...] = (
    route("POST", "/api/prompt", post_prompt),
    route("GET", "/api/prompt", get_prompt),
    route("GET", "/api/job/{job_id}/status", get_status),
    route("GET", "/api/jobs", get_jobs),
    route("GET", "/api/jobs/{job_id}", get_job),
    route("POST", "/api/jobs/{job_id}/cancel", cancel_job),
    route("GET", "/api/queue", get_queue),
    route("POST", "/api/queue", post_queue),
    route("POST", "/api/interrupt", post_interrupt),
    route("GET", "/api/history_v2", get_history),
    route("GET", "/api/history_v2/{prompt_id}", get_history_of),
    route("POST", "/api/history", post_history),
    route("POST", "/api/upload/image", files.post_image),
    route("POST", "/api/upload/mask", files.post_mask),
    route("GET", "/api/view", files.get_view),
    route("GET", "/api/object_info", of_engine(info_routes.get_object_info)),
    route("GET", "/api/object_info/{node_class}", of_engine(info_routes.get_object_info_of)),
    route("GET", "/api/user", get_user),
    Route("GET", "/api/features", constant_reply(FEATURES), ("",)),
    Route("GET", "/api/system_stats", get_system_stats, ("",)),
    Route("GET", "/storage/{kind}/{name:path}", files.get_stored, ("",)),
)


def cloud_app(cloud: StandInCloud) -> Router[StandInCloud]:
    return Router(cloud, cloud.engine, ROUTES, {"/ws": talk})


@contextlib.contextmanager
def serving_cloud(accounts: Mapping[str, CloudAccount], **options: Any) -> Iterator[Served]:
    """Serves a cloud with these accounts, by key."""
    with serve_in_thread(
        app_of=lambda engine: cloud_app(StandInCloud(engine, accounts)), **options
    ) as served:
        yield served
