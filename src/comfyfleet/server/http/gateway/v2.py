"""The jobs of Comfy API v2 and their events."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any
from urllib.parse import urlsplit

from starlette.background import BackgroundTask
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from comfyfleet.api.worker import RunPreview
from comfyfleet.errors import FleetError, InvalidInput, NotFound, TooManyCalls
from comfyfleet.protocol.http import Route, json_reply
from comfyfleet.protocol.payloads import UnforeseenInput
from comfyfleet.server.gateway import v2_jobs
from comfyfleet.server.gateway.model import max_tokens_of
from comfyfleet.server.gateway.v2_jobs import WorkflowJob, WorkflowJobQuery
from comfyfleet.server.gateway.v2_model import (
    END,
    ENDED,
    JOBS_PATH,
    OWN_STATUSES,
    EventPlace,
    JobFacts,
    LoggedProgress,
    Reader,
    decode_cursor,
    encode_cursor,
    job_body,
    list_item,
    outputs_of,
    parse_place,
    preview_body,
    preview_of,
    status_of,
)
from comfyfleet.server.http.gateway.app import BodyTimeout, GatewayCall, read_json
from comfyfleet.server.http.gateway.auth import KEY_PREFIX_SCOPE
from comfyfleet.server.http.gateway.prompts import released_if_refused
from comfyfleet.server.http.gateway.v2_errors import InvalidRequest, TooManyStreams, error_reply
from comfyfleet.server.http.streams import EventStream, StreamKeyCheck, run_shielded
from comfyfleet.server.jobs.model import Job
from comfyfleet.server.jobs.progress import PreviewWatch
from comfyfleet.server.notifications.webhooks import webhook_for_jobs
from comfyfleet.server.run_log.model import LoggedEvents, names_files, record_from
from comfyfleet.transport.ssrf import URL_CHARACTERS_MAX

Handler = Callable[[GatewayCall, Request], Awaitable[Response]]

LABELS_MAX, LABEL_CHARACTERS_MAX = 16, 500
METADATA_BYTES_MAX = 1024
PRIORITY_MAX = 1_000_000
JOBS_PER_PAGE_MAX, JOBS_PER_PAGE = 100, 50
EXTRA_DATA_KEYS = frozenset({"api_key_comfy_org"})
_LABEL = re.compile(r"metadata\[(.+)\]", re.DOTALL)


def in_v2(handler: Handler) -> Handler:
    """Wraps a handler so that errors have the format of Comfy API v2."""

    @wraps(handler)
    async def answer(call: GatewayCall, request: Request) -> Response:
        try:
            return await handler(call, request)
        except BodyTimeout:
            raise
        except RecursionError:
            return error_reply(InvalidRequest("the body is nested too deeply"))
        except FleetError as error:
            return error_reply(error)

    return answer


def reader_of(call: GatewayCall, request: Request) -> Reader:
    """Returns the client for which a response is built. Links in the response use the same host and
    path key as the request."""
    settings = call.plane.settings
    host = request.headers.get("host") or urlsplit(settings.public_url).netloc
    public = urlsplit(settings.public_url)
    scheme = public.scheme if public.netloc == host else request.url.scheme
    prefix = request.scope.get(KEY_PREFIX_SCOPE, "")
    days = call.caller.tenant.retention_days or settings.retention_days
    return Reader(f"{scheme}://{host}{prefix}", call.plane.clock(), days)


async def read_object(request: Request) -> dict[str, Any]:
    body = await read_json(request)
    if not isinstance(body, dict):
        raise UnforeseenInput("the body must be a JSON object")
    return body


@in_v2
async def post_job(call: GatewayCall, request: Request) -> Response:
    content = await read_object(request)
    order = replace(
        _parse_job(content, request.headers.get("idempotency-key")),
        max_tokens=max_tokens_of(request.headers, request.query_params, content),
    )
    number = await call.gateway.numbers.next(call.caller)
    async with released_if_refused(call) as hold:
        job = await v2_jobs.submit_job(call.plane, call.caller, order, number, at_id=hold)
        body = await _body(call, request, job)
    if order.webhook_url is not None:
        body["webhook"] = _signing(call)
    reply = json_reply(body, 201)
    reply.background = BackgroundTask(call.gateway.feeds.release, call.caller, job.id)
    return reply


def _signing(call: GatewayCall) -> dict[str, str]:
    """Returns the id and secret with which deliveries to `webhook_url` are signed. All jobs of a
    user share them."""
    caller = call.caller
    webhook = webhook_for_jobs(caller.tenant.id, caller.user_id, now=call.plane.clock())
    return {"id": str(webhook.id), "secret": webhook.secret_with(call.plane.webhook_key)}


def _parse_job(body: Mapping[str, Any], key: str | None) -> WorkflowJob:
    workflow = body.get("workflow")
    if body.get("inputs") is not None:
        raise v2_jobs.WorkflowRefused("'inputs' is reserved; set the inputs inside the workflow")
    if not isinstance(workflow, dict) or not workflow:
        raise v2_jobs.WorkflowRefused("'workflow' must be an object with a workflow or a prompt")
    if key is not None and not 0 < len(key) <= v2_jobs.KEY_CHARACTERS_MAX:
        raise UnforeseenInput(
            f"Idempotency-Key must have 1 to {v2_jobs.KEY_CHARACTERS_MAX} characters"
        )
    _check_extra_data(body.get("extra_data"))
    return WorkflowJob(
        workflow=workflow,
        idempotency_key=key,
        metadata=_parse_metadata(body.get("metadata")),
        priority=_parse_priority(body.get("priority")),
        webhook_url=_parse_url(body.get("webhook_url")),
        extra_data=body.get("extra_data") or {},
    )


def _check_extra_data(value: object) -> None:
    """Validates `extra_data`, which may only contain the caller's key for partner nodes."""
    if value is None:
        return
    is_known = isinstance(value, dict) and not value.keys() - EXTRA_DATA_KEYS
    if not is_known or not all(isinstance(item, str) for item in dict(value).values()):  # type: ignore[call-overload]
        raise UnforeseenInput("'extra_data' can only contain the string 'api_key_comfy_org'")


def _parse_metadata(value: object) -> Mapping[str, str] | str | None:
    if value is None or (isinstance(value, str) and len(value.encode()) <= METADATA_BYTES_MAX):
        return value
    if not isinstance(value, dict) or len(value) > LABELS_MAX:
        raise InvalidRequest(
            f"'metadata' must be an object with at most {LABELS_MAX} labels,"
            f" or a string of at most {METADATA_BYTES_MAX} bytes",
            field="metadata",
        )
    texts = (*value, *value.values())
    if not all(isinstance(item, str) and 0 < len(item) <= LABEL_CHARACTERS_MAX for item in texts):
        raise InvalidRequest(
            f"labels must be strings of 1 to {LABEL_CHARACTERS_MAX} characters", field="metadata"
        )
    return value


def _parse_priority(value: object) -> int | None:
    if value is None:
        return None
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or abs(int(value)) > PRIORITY_MAX:  # type: ignore[call-overload]
        raise InvalidRequest("'priority' must be a whole number", field="priority")
    return int(value)  # type: ignore[call-overload,no-any-return]


def _parse_url(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > URL_CHARACTERS_MAX:
        raise InvalidRequest("'webhook_url' must be a URL", field="webhook_url")
    return value


async def _body(call: GatewayCall, request: Request, job: Job) -> dict[str, Any]:
    facts = await v2_jobs.facts_of(call.plane, call.caller, job, call.gateway.cache)
    return job_body(job, facts, reader_of(call, request))


@in_v2
async def get_jobs(call: GatewayCall, request: Request) -> Response:
    query = _parse_query(request.query_params)
    page = await v2_jobs.list_jobs(call.plane, call.caller, query, call.gateway.cache)
    reader = reader_of(call, request)
    nothing = JobFacts()
    items = [list_item(job_body(job, page.facts.get(job.id, nothing), reader)) for job in page.jobs]
    answer: dict[str, Any] = {"jobs": items, "truncated": page.last is not None}
    if page.last is not None:
        answer["next_cursor"] = encode_cursor(page.last)
    return json_reply(answer)


def _parse_query(params: QueryParams) -> WorkflowJobQuery:
    statuses = {part.strip() for part in params.get("status", "").split(",") if part.strip()}
    if unknown := statuses - OWN_STATUSES.keys():
        raise UnforeseenInput(f"unknown status: {', '.join(sorted(unknown))}")
    limit = params.get("limit", str(JOBS_PER_PAGE))
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= JOBS_PER_PAGE_MAX:
        raise UnforeseenInput(f"'limit' must be a number from 1 to {JOBS_PER_PAGE_MAX}")
    before = None
    if cursor := params.get("cursor"):
        before = decode_cursor(cursor)
        if before is None:
            raise InvalidCursor("the cursor is invalid; use the next_cursor of a previous response")
    return WorkflowJobQuery(statuses, dict(_labels(params)), before, int(limit))


class InvalidCursor(InvalidInput):
    code = "invalid_cursor"


class InvalidFilter(InvalidInput):
    code = "invalid_metadata_filter"


def _labels(params: QueryParams) -> Iterator[tuple[str, str]]:
    labels = [
        (match[1], value) for name, value in params.multi_items() if (match := _LABEL.match(name))
    ]
    if len(labels) > LABELS_MAX:
        raise InvalidFilter(f"a filter can have at most {LABELS_MAX} labels")
    yield from labels


@in_v2
async def get_job(call: GatewayCall, request: Request) -> Response:
    job = await v2_jobs.find_job(call.plane, call.caller, request.path_params["id"])
    return json_reply(await _body(call, request, job))


@in_v2
async def get_workflow(call: GatewayCall, request: Request) -> Response:
    job = await v2_jobs.find_job(call.plane, call.caller, request.path_params["id"])
    content = v2_jobs.workflow_of(job)
    if not content["workflow"]:
        raise NotFound("the workflow of this job has been deleted")
    return json_reply(content)


@in_v2
async def cancel_job(call: GatewayCall, request: Request) -> Response:
    job = await v2_jobs.cancel_job(call.plane, call.caller, request.path_params["id"])
    return json_reply(await _body(call, request, job))


@in_v2
async def get_events(call: GatewayCall, request: Request) -> Response:
    job = await v2_jobs.find_job(call.plane, call.caller, request.path_params["id"])
    place = parse_place(
        request.headers.get("last-event-id") or request.query_params.get("last_event_id")
    )
    if place.is_over and not job.status.is_active:
        return Response(status_code=204)  # makes browsers stop reconnecting
    stream = WorkflowJobEvents(call, reader_of(call, request), job, place)
    try:
        return EventStream(request, call.caller, stream.lines())
    except TooManyCalls as error:
        raise TooManyStreams(error.message, **error.details) from error


# Seconds between reads. Notifications only reach this process, but another control plane may have
# written messages.
REREAD_SECONDS = 1.0
HEARTBEAT_SECONDS = 10.0
STREAM_SECONDS_MAX = 3600.0
# Minimum seconds between two progress or preview events. Skipping some loses nothing, because each
# one is a complete snapshot.
PAUSE_SECONDS = 0.5


class WorkflowJobEvents:
    """A stream of a job's events from a given position. Each event's id is the position after
    it."""

    def __init__(self, call: GatewayCall, reader: Reader, job: Job, place: EventPlace) -> None:
        self._call = call
        self._reader = reader
        self._job = job
        self._place = place
        self._progress = LoggedProgress(job.spec.prompt)
        self._clock = asyncio.get_running_loop().time
        self._sent_at: dict[str, float] = {}
        self._row, self._has_more = 0, False
        self._status: tuple[str, int | None] | None = None
        self._outputs_sent: set[str] = set()
        self._watch: PreviewWatch | None = None
        self._preview: RunPreview | None = None

    async def lines(self) -> AsyncIterator[str]:
        """Yields events until the job finishes or an hour has passed. In the latter case, the
        client reconnects with its last event id."""
        woken = asyncio.Event()
        notifier = self._call.plane.context.notifier
        unsubscribe = notifier.subscribe_user(self._call.caller.user_id, woken.set)
        previews = self._call.plane.context.previews
        try:
            with previews.watch(self._job.tenant_id, self._job.id, woken.set) as self._watch:
                async for line in self._until_end(woken):
                    yield line
        finally:
            unsubscribe()

    async def _until_end(self, woken: asyncio.Event) -> AsyncIterator[str]:
        key = StreamKeyCheck(self._call.plane, self._call.caller)
        started = sent_at = self._clock()
        while self._clock() - started < STREAM_SECONDS_MAX and await key.is_valid():
            woken.clear()
            lines = await run_shielded(self._read())
            if lines:
                sent_at = self._clock()
                yield "".join(lines)
            elif self._clock() - sent_at >= HEARTBEAT_SECONDS:
                sent_at = self._clock()
                yield ": still there\n\n"
            if self._has_more:
                continue
            if not self._job.status.is_active:
                yield "".join(await run_shielded(self._end()))
                return
            await _wait(woken, PAUSE_SECONDS if self._is_behind() else REREAD_SECONDS)

    async def _read(self) -> list[str]:
        """Reads the job and returns its new events."""
        plane, caller = self._call.plane, self._call.caller
        self._job, page = await v2_jobs.read_run(plane, caller, self._job.id, after_id=self._row)
        rows, self._has_more = page
        lines: list[str] = []
        facts = JobFacts()
        if self._job.status.is_active or any(map(names_files, rows)):
            facts = await v2_jobs.facts_of(plane, caller, self._job, self._call.gateway.cache)
        if self._job.status.is_active:
            lines += self._status_lines(facts)
        for row in rows:
            lines += self._row_lines(row, facts)
            self._row = row.id
        return [*lines, *self._preview_lines()]

    def _preview_lines(self) -> Iterator[str]:
        """Yields the sampler's latest preview. Previews aren't stored, so a client that connects
        late only gets later ones."""
        latest = self._watch.latest if self._watch else None
        if latest is None or latest is self._preview:
            return
        if self._may_send("preview"):
            self._preview = latest
            yield format_event("preview", preview_body(latest))

    def _status_lines(self, facts: JobFacts) -> Iterator[str]:
        status = status_of(self._job, is_cancelling=facts.is_cancelling)
        queue_position = facts.queue_position
        if (status, queue_position) == self._status:
            return
        self._status = (status, queue_position)
        place = {} if queue_position is None else {"queue_position": queue_position}
        yield format_event("status", {"status": status, **place})

    def _row_lines(self, row: LoggedEvents, facts: JobFacts) -> Iterator[str]:
        """Yields the events of a stored report. If the client has already received them, they only
        update the progress."""
        is_new = row.id > self._place.row and not self._place.outputs
        if not row.is_last:  # the outputs of the last report are sent when the job ends
            yield from self._output_lines(row, facts, is_new=is_new)
        has_progress = False
        for event in row.events:
            has_progress |= self._progress.take(event)
            preview = preview_of(event) if is_new else None
            if preview is not None and self._may_send("preview"):
                yield format_event("preview", preview, str(row.id))
        if not has_progress or not is_new:
            return
        if self._may_send("progress") or row.is_last:
            self._sent_at.pop("behind", None)
            yield format_event("progress", self._progress.snapshot(), str(row.id))
        else:
            self._sent_at["behind"] = self._clock()

    def _output_lines(self, row: LoggedEvents, facts: JobFacts, *, is_new: bool) -> Iterator[str]:
        """Yields an event for each file of finished nodes. The events have the id of the previous
        report, so a client that disconnects between two files gets all of them again."""
        shown = facts._replace(record=record_from(row.events, None, is_success=False))
        for output in outputs_of(self._job, shown, self._reader):
            if output["id"] not in self._outputs_sent and is_new:
                yield format_event("output", output, str(self._row) if self._row else None)
            self._outputs_sent.add(output["id"])

    def _may_send(self, kind: str) -> bool:
        now = self._clock()
        if now - self._sent_at.get(kind, now - PAUSE_SECONDS) < PAUSE_SECONDS:
            return False
        self._sent_at[kind] = now
        return True

    def _is_behind(self) -> bool:
        return "behind" in self._sent_at

    async def _end(self) -> list[str]:
        """Returns events for the remaining outputs and then the final status. Clients stop reading
        at the final status."""
        call, job = self._call, self._job
        facts = await v2_jobs.facts_of(call.plane, call.caller, job, call.gateway.cache)
        remaining = [
            output
            for output in outputs_of(job, facts, self._reader)
            if output["id"] not in self._outputs_sent
        ]
        lines = [
            format_event("output", output, f"{END}.{number}")
            for number, output in enumerate(remaining, start=1)
            if number > self._place.outputs
        ]
        status = status_of(job)
        assert status in ENDED  # noqa: S101
        return [*lines, format_event("status", {"status": status}, END)]


async def _wait(woken: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await woken.wait()
    except TimeoutError:
        return


def format_event(kind: str, data: Mapping[str, Any], event_id: str | None = None) -> str:
    """Formats a server-sent event. The data fits on one line, because JSON escapes line breaks."""
    named = f"id: {event_id}\n" if event_id else ""
    return f"{named}event: {kind}\ndata: {json.dumps(data)}\n\n"


_ONE = f"{JOBS_PATH}/{{id}}"
ROUTES = (
    Route("POST", JOBS_PATH, post_job, prefixes=("",)),
    Route("GET", JOBS_PATH, get_jobs, prefixes=("",)),
    Route("GET", _ONE, get_job, prefixes=("",)),
    Route("GET", f"{_ONE}/workflow", get_workflow, prefixes=("",)),
    Route("GET", f"{_ONE}/events", get_events, prefixes=("",)),
    Route("POST", f"{_ONE}/cancel", cancel_job, prefixes=("",)),
)
