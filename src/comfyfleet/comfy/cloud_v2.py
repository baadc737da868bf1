"""Comfy API v2 (Comfy Cloud, Serverless, comfy-api-proxy): assets, jobs, submit and live events.
Checked against comfy-api-proxy 0.1.6."""

import asyncio
import base64
import binascii
import contextlib
import mimetypes
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args
from urllib.parse import quote, unquote

import blake3
import httpx

from comfyfleet.comfy.answers import (
    list_in,
    mapping_in,
    parse_json,
    refusal_from,
    shorten,
    text_at,
    unexpected_answer,
)
from comfyfleet.comfy.backend import (
    Cancellation,
    Description,
    Fetched,
    MessageTap,
    OutputFile,
    Outputs,
    Prompt,
    Submitted,
    Uploaded,
)
from comfyfleet.comfy.calls import NETWORK_ERRORS, BackendCalls, parse_answer
from comfyfleet.comfy.cloud_calls import (
    CloudErrorBody,
    call_by_id,
    call_once,
    call_repeatable,
    download,
    is_marked,
    parse_error_body,
    require_own_link,
    with_marker,
)
from comfyfleet.comfy.events import (
    Cancelled,
    End,
    Event,
    Failed,
    NodeDone,
    NodeStarted,
    Preview,
    Progress,
    Reconnected,
    Started,
    Succeeded,
)
from comfyfleet.comfy.follow import (
    cancellation_from,
    confirm_cancelled,
    follow_cloud_run,
    retry_unexpected,
)
from comfyfleet.comfy.messages import Inbox, Message, RunOver
from comfyfleet.comfy.run_location import Absent, Executing, InHistory, InQueue, RunLocation
from comfyfleet.errors import (
    CreditsExhausted,
    FileGone,
    InvalidInput,
    LimitExceeded,
    NotOffered,
    OutcomeUnknown,
    PromptRefused,
    RunLost,
    ServerUnavailable,
    UnexpectedAnswer,
)
from comfyfleet.transport.files import open_file
from comfyfleet.transport.http import Call
from comfyfleet.transport.retry import RETRY_AFTER_SECONDS_MAX, retry_after_seconds
from comfyfleet.transport.sse import EventParser, ServerEvent

V2JobStatus = Literal[
    "queued", "running", "succeeded", "failed", "expired", "canceling", "canceled"
]
T = TypeVar("T")

STATUSES = frozenset(get_args(V2JobStatus))
ENDED = frozenset({"succeeded", "failed", "expired", "canceled"})


@dataclass(frozen=True, slots=True)
class V2JobOutput:
    """A file that a job created. `url` is valid until it expires, and `asset_id` as long as the job
    exists."""

    node_id: str
    name: str
    kind: str
    asset_id: str
    url: str
    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class V2JobFault:
    code: str
    message: str
    node_id: str | None
    class_type: str | None
    traceback: str | None


@dataclass(frozen=True, slots=True)
class V2JobProgress:
    """A complete snapshot of the progress. v2 never reports only the changes."""

    value: float
    node_id: str | None
    step: int | None
    steps: int | None


@dataclass(frozen=True, slots=True)
class V2Job:
    job_id: str
    status: V2JobStatus
    outputs: tuple[V2JobOutput, ...]
    fault: V2JobFault | None
    events_url: str | None
    cancel_url: str | None
    queue_position: int | None
    is_reused: bool

    @property
    def is_over(self) -> bool:
        return self.status in ENDED


def parse_job(answer: object) -> V2Job:
    job = mapping_in(answer, "a job")
    urls = job.get("urls")
    links: Mapping[str, Any] = urls if isinstance(urls, Mapping) else {}
    fault = job.get("error")
    return V2Job(
        job_id=text_at(job, "id", "a job"),
        status=parse_status(job),
        outputs=_parse_outputs(job.get("outputs")),
        fault=None if fault is None else _parse_fault(fault),
        events_url=_optional(links.get("events"), str),
        cancel_url=_optional(links.get("cancel"), str),
        queue_position=_optional(job.get("queue_position"), int),
        is_reused=job.get("outputs_reused") is True,
    )


def parse_status(holder: Mapping[str, Any]) -> V2JobStatus:
    """Returns the status of a job. An unknown status counts as running, because only the four end
    states end a job."""
    status = text_at(holder, "status", "a job")
    return cast(V2JobStatus, status) if status in STATUSES else "running"


def _parse_outputs(answer: object) -> tuple[V2JobOutput, ...]:
    rows = [] if answer is None else list_in(answer, "a list of outputs")
    return tuple(parse_output(row) for row in rows)


def parse_output(answer: object) -> V2JobOutput:
    output = mapping_in(answer, "an output")
    return V2JobOutput(
        node_id=text_at(output, "node_id", "an output"),
        name=text_at(output, "name", "an output"),
        kind=_optional(output.get("type"), str) or "file",
        asset_id=text_at(output, "id", "an output"),
        url=text_at(output, "url", "an output"),
        # Some servers send 0 for unknown sizes.
        size_bytes=_optional(output.get("size_bytes"), int) or None,
    )


def parse_progress(answer: object) -> V2JobProgress:
    progress = mapping_in(answer, "progress")
    value = progress.get("value")
    return V2JobProgress(
        value=float(value) if isinstance(value, int | float) else 0.0,
        node_id=_optional(progress.get("current_node"), str),
        step=_optional(progress.get("step"), int),
        steps=_optional(progress.get("steps"), int),
    )


def _parse_fault(answer: object) -> V2JobFault:
    fault = mapping_in(answer, "an error of a job")
    return V2JobFault(
        code=_optional(fault.get("code"), str) or "failed",
        message=_optional(fault.get("message"), str) or "",
        node_id=_optional(fault.get("node_id"), str),
        class_type=_optional(fault.get("class_type"), str),
        traceback=_optional(fault.get("traceback"), str),
    )


def _optional(value: object, kind: type[T]) -> T | None:
    """Returns None for a value of the wrong type, because fields that are only displayed must not
    end a run."""
    return value if isinstance(value, kind) else None


# Callers treat a loader's input as a string. `with_references` converts it to a reference when the
# prompt is submitted.
SCHEME = "comfy-asset://"


@dataclass(frozen=True, slots=True)
class CloudAsset:
    asset_id: str
    file_path: str

    @property
    def value(self) -> str:
        return f"{SCHEME}{quote(self.asset_id, safe='')}/{quote(self.file_path)}"

    @property
    def reference(self) -> dict[str, Any]:
        info = {"id": self.asset_id, "file_path": self.file_path}
        return {"__type": "core/ASSET", "info": info}


def content_hash(path: Path) -> str:
    """Hashes the file. Reads the whole file, so run this in a thread."""
    digest = blake3.blake3(max_threads=blake3.blake3.AUTO)
    digest.update_mmap(path)
    return f"blake3:{digest.hexdigest()}"


def parse_asset(answer: object, file_path: str) -> CloudAsset:
    asset = mapping_in(answer, "an asset")
    stored_path = asset.get("file_path")
    return CloudAsset(
        text_at(asset, "id", "an asset"), stored_path if isinstance(stored_path, str) else file_path
    )


def parse_asset_value(value: object) -> CloudAsset | None:
    if not isinstance(value, str) or not value.startswith(SCHEME):
        return None
    asset_id, _, file_path = value.removeprefix(SCHEME).partition("/")
    return CloudAsset(unquote(asset_id), unquote(file_path))


def with_references(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the prompt with an asset reference in place of each value that `upload_asset`
    returned."""
    return {node_id: _with_references(node) for node_id, node in prompt.items()}


def _with_references(node: Any) -> Any:
    if not isinstance(node, Mapping) or not isinstance(inputs := node.get("inputs"), Mapping):
        return node
    return {**node, "inputs": {name: _value(value) for name, value in inputs.items()}}


def _value(value: Any) -> Any:
    asset = parse_asset_value(value)
    return value if asset is None else asset.reference


KNOWN = Call("POST", "/assets/from-hash")
DEFAULT_TYPE = "application/octet-stream"


async def upload_asset(calls: BackendCalls, path: Path, name: str | None) -> Uploaded:
    """Uploads a file and returns a value for loader nodes, which `with_references` replaces when
    the prompt is submitted."""
    file_path = Path(name or path.name).name
    try:
        hash_text = await asyncio.to_thread(content_hash, path)
    except OSError as error:
        raise InvalidInput(f"{path} can't be read: {error.strerror}") from error
    asset = await _find_by_hash(calls, hash_text, file_path)
    if asset is None:
        asset = await _send_asset(calls, path, hash_text, file_path)
    return Uploaded(asset.value)


async def _find_by_hash(calls: BackendCalls, hash_text: str, file_path: str) -> CloudAsset | None:
    """Checks whether the server already has these bytes.

    Any refusal counts as no, because the bytes can still be sent.
    """
    body = {"hash": hash_text, "file_path": file_path}
    call = Call("POST", "/assets/from-hash", json=body)
    response = await call_repeatable(calls, call)
    if response.status_code not in (200, 201):
        return None
    return _parse_uploaded(calls, call, response, file_path)


async def _send_asset(
    calls: BackendCalls, path: Path, hash_text: str, file_path: str
) -> CloudAsset:
    content_type = mimetypes.guess_type(file_path)[0] or DEFAULT_TYPE
    fields = {"content_type": content_type, "file_path": file_path, "expected_hash": hash_text}
    with await open_file(path) as file:
        call = Call("POST", "/assets", files={"file": (file_path, file)}, data=fields)
        response = await call_repeatable(calls, call)
    error_body = parse_error_body(response.content)
    if response.status_code == 413:
        raise LimitExceeded(f"{file_path} exceeds the server's upload limit: {error_body.message}")
    if response.status_code in (400, 409, 422):
        raise InvalidInput(f"the server refused {file_path}: {error_body.message}")
    return _parse_uploaded(calls, call, response, file_path)


def _parse_uploaded(
    calls: BackendCalls, call: Call, response: httpx.Response, file_path: str
) -> CloudAsset:
    with calls.count_unexpected(call.operation):
        if response.status_code not in (200, 201):
            raise unexpected_answer(
                f"{call.operation} returned {response.status_code}", shorten(response.text)
            )
        return parse_asset(parse_json(response.content, "an asset"), file_path)


JOBS_SEARCHED_MAX = 100
SETTLING_SECONDS = 0.1
JOB_ROUTE = "/jobs/{id}"
WORKFLOW_ROUTE = "/jobs/{id}/workflow"
# Maps v2's kinds of outputs to the output keys that nodes use. Kinds that aren't listed here are
# used as keys unchanged.
KEYS = {"image": "images", "file": "files", "latent": "latents"}


async def fetch_job(calls: BackendCalls, run_id: str) -> V2Job | None:
    call = call_by_id("GET", JOB_ROUTE, run_id)
    response = await call_repeatable(calls, call)
    if response.status_code == 404:
        return None
    with calls.count_unexpected(call.operation):
        return parse_job(parse_answer(call, response))


async def fetch_settled_job(calls: BackendCalls, run_id: str) -> V2Job | None:
    """Fetches a job. If the server reports it as expired, fetches it a second time.

    comfy-api-proxy reads the ended jobs before the others, so a job that ends in between briefly
    seems to have expired.
    """
    job = await fetch_job(calls, run_id)
    if job is None or job.status != "expired":
        return job
    await calls.retry.sleep(SETTLING_SECONDS)
    return await fetch_job(calls, run_id)


async def fetch_jobs(
    calls: BackendCalls, statuses: Sequence[str] = ()
) -> tuple[tuple[V2Job, ...], bool]:
    """Returns the newest jobs, and whether the list is complete."""
    params = {"limit": str(JOBS_SEARCHED_MAX)}
    if statuses:
        params["status"] = ",".join(statuses)
    call = Call("GET", "/jobs", params=params)
    response = await call_repeatable(calls, call)
    if response.status_code in (404, 405, 501):
        raise NotOffered("this server doesn't list its jobs")
    with calls.count_unexpected(call.operation):
        answer = mapping_in(parse_answer(call, response), "a list of jobs")
        jobs = tuple(map(parse_job, list_in(answer.get("jobs"), "'jobs'")))
        return jobs, len(jobs) < JOBS_SEARCHED_MAX and not answer.get("truncated")


async def search_by_marker(calls: BackendCalls, prompt_id: str) -> tuple[V2Job | None, bool]:
    """Returns the job that has our marker, and whether all jobs could be searched."""
    jobs, is_complete = await fetch_jobs(calls)
    for job in jobs:
        workflow = await _workflow_of(calls, job.job_id)
        if workflow is None:
            is_complete = False
        elif is_marked(workflow, prompt_id):
            return job, True
    return None, is_complete


async def _workflow_of(calls: BackendCalls, job_id: str) -> Mapping[str, Any] | None:
    call = call_by_id("GET", WORKFLOW_ROUTE, job_id)
    response = await call_repeatable(calls, call)
    if response.status_code == 404:
        return None
    with calls.count_unexpected(call.operation):
        return mapping_in(parse_answer(call, response), "the workflow of a job")


def location_of(job: V2Job, *, was_cancelled: bool) -> RunLocation:
    match job.status:
        case "queued":
            return InQueue(None, job.queue_position or 0, None)
        case "running" | "canceling":
            return Executing(None)
    reused = reused_nodes(job)
    return InHistory(_end(job, reused, was_cancelled=was_cancelled), reused, {})


def _end(job: V2Job, reused: tuple[str, ...], *, was_cancelled: bool) -> End:
    match job.status:
        case "succeeded":
            return Succeeded(job.job_id, reused)
        case "canceled":
            return Cancelled(job.job_id)
        case "expired" if was_cancelled:
            # A server that forgets jobs after they are deleted from its queue reports them as
            # expired.
            return Cancelled(job.job_id)
        case "expired":
            return Failed(job.job_id, "the job expired on the server", retryable=True)
    return _failure(job)


def _failure(job: V2Job) -> Failed:
    fault = job.fault
    if fault is None:
        return Failed(job.job_id, "the server reported that the job failed, without a reason")
    trace = tuple((fault.traceback or "").splitlines())
    message = fault.message.strip() or fault.code
    return Failed(job.job_id, message, fault.node_id, fault.class_type, fault.code, trace)


def reused_nodes(job: V2Job) -> tuple[str, ...]:
    """Returns the nodes whose outputs may come from an earlier run. v2 reports that something was
    reused, but not which outputs."""
    nodes = (output.node_id for output in job.outputs) if job.is_reused else ()
    return tuple(dict.fromkeys(nodes))


def outputs_of(job: V2Job) -> Outputs:
    files = tuple(_file(output, job.is_reused) for output in job.outputs)
    return Outputs(files, (), reused_nodes(job))


def _file(output: V2JobOutput, reused: bool) -> OutputFile:
    key = KEYS.get(output.kind, output.kind)
    return OutputFile(output.node_id, key, output.name, reused=reused, reference=output.asset_id)


ROUTE = "/jobs/{id}/events"


class EventListener:
    """Puts the events of a run's event stream into an inbox until the run is over.

    Never raises. Without a stream, the run is polled.
    """

    def __init__(self, calls: BackendCalls, run_id: str, inbox: Inbox) -> None:
        self._calls = calls
        self._run_id = run_id
        self._inbox = inbox
        self._node_id: str | None = None
        self._done: set[str] = set()
        self._is_over = False
        self._was_cut = False

    async def listen(self, link: str | None) -> None:
        """Reads the stream and reopens it when the connection is lost. Gives up after too many
        attempts without any event."""
        own = call_by_id("GET", ROUTE, self._run_id)
        call = own if link is None else replace(own, path=link)
        failures = 0
        while not self._is_over and failures <= self._calls.limits.max_retries:
            if failures:
                await self._calls.retry.back_off(failures)
            has_events = await self._read_stream(call)
            failures = 1 if has_events else failures + 1

    async def _read_stream(self, call: Call) -> bool:
        """Reads the stream. Returns whether any event was received before it ended."""
        has_events = False
        try:
            async with self._calls.stream(call) as response:
                if not await self._is_stream(response):
                    return False
                if self._was_cut:
                    self._inbox.put(Reconnected(self._run_id))
                self._was_cut = False
                parser = EventParser()
                async for piece in response.aiter_bytes():
                    for event in parser.feed(piece):
                        has_events = True
                        self._take(event)
        except (*NETWORK_ERRORS, LimitExceeded):
            self._was_cut = True
            return has_events
        # The end of the stream means that the run is over. comfy-api-proxy may close the stream
        # before it can report the result.
        self._inbox.put(RunOver(self._run_id))
        return has_events

    async def _is_stream(self, response: httpx.Response) -> bool:
        """Checks whether the response is an event stream.

        After a 429 with Retry-After, waits for that time. Other refusals end the listening, except
        for server errors that may be temporary.
        """
        if response.status_code == 200:
            return True
        seconds = retry_after_seconds(response.headers)
        if response.status_code == 429 and seconds is not None:
            await self._calls.retry.sleep(min(seconds, RETRY_AFTER_SECONDS_MAX))
        else:
            self._is_over = response.status_code < 500 or response.status_code == 501
        return False

    def _take(self, event: ServerEvent) -> None:
        try:
            with self._calls.count_unexpected(f"events: {event.name}"):
                messages = tuple(self._messages(event))
        except UnexpectedAnswer:
            # The error has been counted and logged. Polling still finds the run's state and
            # outputs.
            return
        for message in messages:
            self._inbox.put(message)

    def _messages(self, event: ServerEvent) -> Iterator[Message]:
        data = parse_json(event.data, "an event")
        match event.name:
            case "status":
                yield from self._status(data)
            case "progress":
                yield from self._progress(data)
            case "preview":
                yield _preview(self._run_id, data)
            case "output":
                yield from self._output(data)

    def _status(self, data: object) -> Iterator[Message]:
        status = parse_status(mapping_in(data, "a status"))
        if status in ENDED:
            self._is_over = True
            yield RunOver(self._run_id)
        elif status == "running":
            yield Started(self._run_id)

    def _progress(self, data: object) -> Iterator[Message]:
        progress = parse_progress(data)
        node_id = progress.node_id
        if node_id is None:
            return
        if node_id != self._node_id:
            self._node_id = node_id
            yield NodeStarted(self._run_id, node_id, node_id)
        if progress.step is not None and progress.steps:
            yield Progress(self._run_id, node_id, progress.step, progress.steps)

    def _output(self, data: object) -> Iterator[Message]:
        node_id = parse_output(data).node_id
        if node_id not in self._done:
            self._done.add(node_id)
            yield NodeDone(self._run_id, node_id)


def _preview(run_id: str, data: object) -> Preview:
    what = "a preview"
    preview = mapping_in(data, what)
    text = text_at(preview, "data_base64", what)
    try:
        picture = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise unexpected_answer("a preview should be base64", text) from error
    node_id = preview.get("node_id")
    content_type = text_at(preview, "content_type", what)
    return Preview(run_id, str(node_id) if node_id else None, content_type, picture)


# Keys of extra_data that v2 allows. It refuses a submit with any other key.
EXTRA_DATA_KEYS = ("api_key_comfy_org",)
REPEATED = "idempotency_key_reuse"


async def submit_prompt(
    calls: BackendCalls, prompt: Prompt, prompt_id: str, extra_data: Mapping[str, Any]
) -> Submitted:
    call = _call(prompt, prompt_id, extra_data)
    failure: OutcomeUnknown | UnexpectedAnswer | None = None
    for attempt in range(calls.limits.max_retries + 1):
        if attempt:
            await calls.retry.back_off(attempt)
        try:
            response = await call_once(calls, call)
        except OutcomeUnknown as error:
            # Retrying is safe, because the server accepts only one submit per idempotency key.
            failure = error
            continue
        if parse_error_body(response.content).code == REPEATED:
            break
        try:
            return Submitted(_parse_submitted(calls, call, response, prompt))
        except UnexpectedAnswer as error:
            failure = error
            break
    return await _find_again(calls, prompt_id, failure)


def _call(prompt: Prompt, prompt_id: str, extra_data: Mapping[str, Any]) -> Call:
    body: dict[str, Any] = {"workflow": with_references(with_marker(prompt, prompt_id))}
    if allowed := {key: extra_data[key] for key in EXTRA_DATA_KEYS if key in extra_data}:
        body["extra_data"] = allowed
    return Call("POST", "/jobs", json=body, headers={"Idempotency-Key": prompt_id})


def _parse_submitted(
    calls: BackendCalls, call: Call, response: httpx.Response, prompt: Prompt
) -> str:
    error_body = parse_error_body(response.content)
    message = error_body.message or error_body.code
    if response.status_code == 402:
        raise CreditsExhausted(f"Comfy Cloud requires payment: {message}")
    if response.status_code in (400, 422) and error_body.has_envelope:
        raise _refused(error_body, prompt)
    with calls.count_unexpected(call.operation):
        if response.status_code not in (200, 201):
            raise UnexpectedAnswer(
                f"{call.operation} returned {response.status_code}: {message}",
                status=response.status_code,
            )
        return parse_job(parse_json(response.content, "a job")).job_id


def _refused(error_body: CloudErrorBody, prompt: Prompt) -> PromptRefused:
    node_errors = error_body.details.get("node_errors") or {}
    error = {"type": error_body.code, "message": error_body.message}
    return refusal_from({"error": error, "node_errors": node_errors}, prompt)


async def _find_again(
    calls: BackendCalls, prompt_id: str, error: OutcomeUnknown | UnexpectedAnswer | None
) -> Submitted:
    """Looks for a job that the server has accepted, or may have accepted, without confirming it."""
    if error is not None and 400 <= int(error.details.get("status") or 0) < 500:
        raise error
    for attempt in range(1, calls.limits.max_retries + 2):
        try:
            job, _ = await search_by_marker(calls, prompt_id)
        except NotOffered:
            break
        except (ServerUnavailable, UnexpectedAnswer):
            job = None
        if job is not None:
            return Submitted(job.job_id, adopted=True)
        await calls.retry.back_off(attempt)
    raise OutcomeUnknown(
        "the prompt was sent but not confirmed, and no job of the account has its marker. "
        "The job may still appear. If it does, adopt it by its id.",
        prompt_id=prompt_id,
    ) from error


CANCELLED_KEPT_MAX = 1000


class CloudV2:
    """Comfy Cloud via API v2. The methods are described in Backend. `calls` send the key, and
    `storage` must not."""

    def __init__(self, calls: BackendCalls, storage: httpx.AsyncBaseTransport) -> None:
        self._calls = calls
        self._storage = storage
        self._cancelled: deque[str] = deque(maxlen=CANCELLED_KEPT_MAX)

    async def aclose(self) -> None:
        await self._calls.client.aclose()

    async def describe(self) -> Description:
        raise NotOffered("Comfy API v2 doesn't list its node types")

    async def queue_length(self) -> int:
        jobs, _ = await fetch_jobs(self._calls, ("queued", "running"))
        return len(jobs)

    async def upload(self, path: Path, *, name: str | None = None) -> Uploaded:
        return await upload_asset(self._calls, path, name)

    async def submit(
        self, prompt: Prompt, *, prompt_id: str, extra_data: Mapping[str, Any] | None = None
    ) -> Submitted:
        return await submit_prompt(self._calls, prompt, prompt_id, extra_data or {})

    async def adopt(self, prompt_id: str) -> Submitted | None:
        job, is_complete = await search_by_marker(self._calls, prompt_id)
        if job is not None:
            return Submitted(job.job_id, adopted=True)
        if not is_complete:
            raise OutcomeUnknown(
                "the run was not found, but not all jobs could be searched", prompt_id=prompt_id
            )
        return None

    async def follow(self, run_id: str, *, tap: MessageTap | None = None) -> AsyncGenerator[Event]:
        inbox = Inbox()
        inbox.tap = tap
        events = follow_cloud_run(run_id, inbox, lambda: self._poll(run_id), self._calls)
        async with self._event_stream(run_id, inbox), contextlib.aclosing(events):
            async for event in events:
                yield event

    async def outputs(self, run_id: str) -> Outputs:
        job = await fetch_settled_job(self._calls, run_id)
        if job is None or not job.is_over:
            raise RunLost(f"the server doesn't have a finished run {run_id}", run_id=run_id)
        return outputs_of(job)

    async def fetch(self, file: OutputFile, to: Path, *, bytes_max: int | None = None) -> Fetched:
        """Downloads by the asset id, because the URLs in a job expire."""
        if file.reference is None:
            raise FileGone(f"{file.filename} isn't an output of this backend", file=file)
        call = call_by_id("GET", "/assets/{id}/content", file.reference)
        return await download(self._calls, self._storage, call, to, bytes_max)

    async def cancel(self, run_id: str) -> Cancellation:
        location = await self._poll(run_id)
        if isinstance(location, Absent):
            return Cancellation.NOT_FOUND
        if (confirmed := cancellation_from(location)) is not None:
            return confirmed
        self._cancelled.append(run_id)
        await call_repeatable(self._calls, call_by_id("POST", "/jobs/{id}/cancel", run_id))
        return await confirm_cancelled(self._calls, run_id, lambda: self._poll(run_id))

    async def free(self) -> None:
        """Does nothing, because v2 has no route for it."""

    async def _poll(self, run_id: str) -> RunLocation:
        job = await fetch_settled_job(self._calls, run_id)
        if job is None:
            return Absent()
        return location_of(job, was_cancelled=run_id in self._cancelled)

    @contextlib.asynccontextmanager
    async def _event_stream(self, run_id: str, inbox: Inbox) -> AsyncIterator[None]:
        job = await retry_unexpected(lambda: fetch_job(self._calls, run_id), self._calls)
        link = None if job is None or job.events_url is None else job.events_url
        address = None if link is None else str(require_own_link(self._calls.client.base_url, link))
        listener = EventListener(self._calls, run_id, inbox)
        listening = asyncio.create_task(listener.listen(address), name="comfy-cloud-events")
        try:
            yield
        finally:
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening
