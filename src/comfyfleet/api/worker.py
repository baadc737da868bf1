"""Messages of the worker protocol under /api/worker: register, poll, heartbeat, complete, fail,
requeue and deregister."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from itertools import islice
from typing import Annotated, Any, Literal, TypeAlias, get_args
from uuid import UUID, uuid5

from blake3 import blake3
from pydantic import (
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from comfyfleet.api.sizes import count_values
from comfyfleet.api.values import (
    VALUES_BYTES_MAX,
    VALUES_MAX,
    WANTED_MAX,
    Asset,
    DeliveredOutput,
    Message,
    Name,
    OutputSlot,
    RowId,
    ShownValue,
    WantedOutput,
    at_most,
    size_of,
)

PROTOCOL_VERSION = 1
WAIT_SECONDS_MAX = 60
CONCURRENCY_MAX = 64
HELD_MAX = 2 * CONCURRENCY_MAX
LOAD_MAX = 1000
LACKING_MAX = 100
UNKNOWN_FIELDS_MAX = 1_000
SLUGS_MAX = 1_000
NODE_TYPES_MAX = 20_000
MODEL_INPUTS_MAX = 20_000
MODELS_LOADED_MAX = 1_000
OBJECT_INFO_BYTES_MAX = 64 * 1024**2
WorkerId: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,199}$")]
FILLED_IN_MAX = 500
PROVIDERS_MAX, CAPABILITIES_MAX = 10, 1_000
RUN_EVENTS_MAX = 5_000
# A message of ComfyUI's protocol: its type and its data.
RunEvent: TypeAlias = tuple[str, dict[str, Any]]
RunEvents: TypeAlias = Annotated[
    tuple[RunEvent, ...], Field(fail_fast=True), Field(max_length=RUN_EVENTS_MAX)
]
# Identifies a report of a lease. A repeated report has the same number.
ReportNumber: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
FilledIn: TypeAlias = Annotated[
    dict[str, dict[str, Any]],
    BeforeValidator(at_most(FILLED_IN_MAX)),
    Field(max_length=FILLED_IN_MAX),
]
Provider: TypeAlias = Literal["self_hosted", "cloud"]
Providers: TypeAlias = Annotated[
    tuple[Provider, ...], Field(fail_fast=True), Field(min_length=1, max_length=PROVIDERS_MAX)
]
# Why a worker's backend can't take jobs: it doesn't respond, its prompt thread is stuck, its GPU is
# in an error state, it refuses our account, or the worker's disk is full.
BackendProblem: TypeAlias = Literal["down", "hung", "poisoned", "closed", "disk_full"]
# Which run last used the same heavy model: the previous run, an earlier run, or no run since the
# backend started.
ModelChange: TypeAlias = Literal["same", "switched", "first"]
RequeueReason: TypeAlias = Literal[
    "spot",
    "rebalance",
    "shutdown",
    "drain",
    "recall",
    "backend_down",
    "backend_fault",
    "out_of_memory",
    "backend_lacks",
    "disk_full",
]


REASONS = frozenset(get_args(RequeueReason))
# Represents all unknown reasons.
OTHER_REASON = "other"
REASON_CHARACTERS_MAX = 500
# Longer details are truncated, so that the lease is returned anyway.
DETAIL_CHARACTERS_MAX = 50_000


def _names(value: Any) -> Any:
    """Accepts a list of names, or an object whose fields with a true value are the names."""
    if isinstance(value, Mapping):
        return tuple(name for name, is_there in value.items() if is_there)
    return value


Capabilities: TypeAlias = Annotated[
    tuple[str, ...],
    Field(fail_fast=True),
    Field(max_length=CAPABILITIES_MAX),
    BeforeValidator(_names),
]


class Reading(Message):
    """The state of a machine at a point in time. Unreadable values are omitted."""

    gpu_name: Name | None = None
    gpu_load_percent: float | None = None
    gpu_memory_used_bytes: RowId | None = None
    gpu_memory_total_bytes: RowId | None = None
    gpu_temperature_celsius: float | None = None
    cpu_percent: float | None = None
    memory_used_bytes: RowId | None = None
    memory_total_bytes: RowId | None = None
    disk_free_bytes: RowId | None = None
    # How often the worker has restarted its ComfyUI because it didn't release memory.
    comfyui_restarts: RowId | None = None


class PackageVersion(Message):
    name: Name
    installed: Name | None = None
    required: Name | None = None


class BackendSystem(Message):
    """The `system` object of a ComfyUI's `/system_stats`, without values that change while it runs.

    The names are ComfyUI's.
    """

    os: Name = ""
    ram_total: RowId | None = None
    required_frontend_version: Name | None = None
    installed_templates_version: Name | None = None
    required_templates_version: Name | None = None
    comfy_package_versions: Annotated[tuple[PackageVersion, ...], Field(max_length=100)] = ()
    python_version: Name = ""
    pytorch_version: Name = ""
    embedded_python: bool = False
    deploy_environment: Name = ""


class BackendFacts(Message):
    """A backend's version, GPU, node types and models."""

    kind: Name = ""  # ComfyUI, Comfy Cloud, comfyfleet engine
    version: Name = ""
    system: BackendSystem | None = None  # None if the backend doesn't report it
    gpu: Name | None = None
    gpu_memory_bytes: RowId | None = None
    node_types: Annotated[tuple[Name, ...], Field(fail_fast=True)] = Field(
        default=(), max_length=NODE_TYPES_MAX
    )
    # The files that an input such as "CheckpointLoaderSimple.ckpt_name" offers. Only the size limit
    # of the request body limits their number.
    model_files: Annotated[
        dict[Name, Annotated[tuple[Name, ...], Field(fail_fast=True)]],
        BeforeValidator(at_most(MODEL_INPUTS_MAX)),
    ] = Field(default_factory=dict, max_length=MODEL_INPUTS_MAX)
    object_info_hash: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    object_info_size: int | None = Field(default=None, ge=1, le=OBJECT_INFO_BYTES_MAX)


def object_info_hash(object_info: Mapping[str, Any]) -> str:
    """Returns the hash that identifies an object_info in workers' reports and in the control
    plane's storage.

    Node types are hashed in alphabetical order, because equal machines may load their node packs in
    different orders. The order of inputs is part of the hash, because clients assign values by it.
    """
    hasher = blake3()
    for name in sorted(object_info):
        entry = json.dumps([name, object_info[name]], separators=(",", ":"))
        hasher.update(entry.encode())
    return hasher.hexdigest()


class Register(Message):
    worker_id: WorkerId
    fleet_slug: Name | None = None  # optional if the secret belongs to a single fleet
    stage: Name = "production"
    max_concurrency: int = Field(default=1, ge=1, le=CONCURRENCY_MAX)
    capabilities: Capabilities = ()
    workflow_slugs: Annotated[tuple[Name, ...], Field(fail_fast=True)] | None = Field(
        default=None, min_length=1, max_length=SLUGS_MAX
    )
    providers: Providers = ("self_hosted",)
    protocol_version: int = Field(default=PROTOCOL_VERSION, ge=1, le=2**31 - 1)
    backend: BackendFacts | None = None


class Registered(Message):
    worker_id: str
    token: str
    workflows_assigned: tuple[str, ...]
    lease_seconds: int = 900
    heartbeat_seconds: int = 30
    # The URL to which the worker may upload its backend's object_info, if the fleet's object_info
    # is different.
    object_info_upload: OutputSlot | None = None


class HeldLease(Message):
    dispatch_id: RowId
    lease_token: UUID


class Poll(Message):
    worker_id: WorkerId
    capabilities: Capabilities | None = None
    current_load: int = Field(default=0, ge=0, le=LOAD_MAX)
    max_concurrency: int = Field(default=1, ge=1, le=CONCURRENCY_MAX)
    providers: Providers = ("self_hosted",)
    wait_seconds: float = Field(default=0, ge=0, le=WAIT_SECONDS_MAX)
    held: Annotated[tuple[HeldLease, ...], Field(fail_fast=True)] | None = Field(
        default=None, max_length=HELD_MAX
    )
    # Heavy models, most recently used first.
    models_loaded: Annotated[tuple[Name, ...], Field(fail_fast=True)] | None = Field(
        default=None, max_length=MODELS_LOADED_MAX
    )
    model_set: Name | None = None
    reading: Reading | None = None
    backend: BackendFacts | None = None  # sent if it has changed since the worker registered
    is_brief: bool = False  # fields of the job that repeat other fields may be omitted
    # The worker gets no job, and doesn't count as online, until it polls without a problem.
    backend_problem: BackendProblem | None = None


class Job(Message):
    """A lease, with all data that is needed to run the job."""

    dispatch_id: RowId
    job_id: UUID
    lease_token: UUID
    lease_number: int
    attempt: int
    lease_expires_at: datetime
    lease_seconds: int
    provider: Provider
    workflow_slug: str
    # a tenant's inputs may stay on the backend for the tenant's next job
    tenant_id: UUID | None = None
    prompt: dict[str, Any]
    output_node_id: str | None = None
    assets: tuple[Asset, ...] = ()
    outputs: tuple[OutputSlot, ...] = ()
    run_limit_seconds: int = 3600
    max_output_bytes: int = 4 * 1024**3
    extra_data: dict[str, Any] = Field(default_factory=dict)
    # The caller's keys for paid services, which are sent to the backend in extra_data. Workers
    # never write them to a disk or a log.
    secrets: dict[str, str] = Field(default_factory=dict, repr=False)
    has_secrets: bool = False
    model_key: str | None = None
    model_set: str | None = None
    strip_metadata: bool = False  # outputs are delivered without the embedded prompt and workflow
    ai_mark: str | None = None  # the IPTC DigitalSourceType that is added to outputs without one
    # The worker must report the backend's own messages in heartbeats, and the remaining ones with
    # the final report.
    records_run: bool = False
    # The job has a price: previews that are results are not sent before the run has succeeded.
    holds_results: bool = False
    # The files of a node are delivered when the node ends, and reported with its messages. If
    # false, all files are reported at the end of the run.
    live_outputs: bool = False
    # Small outputs may be sent in the final report. This is the limit for all of them together.
    inline_bytes_max: int = 0
    # The control plane recognizes repeated reports by their `report` number, and accepts `unheard`
    # ones.
    numbers_reports: bool = False
    # Repeats other fields, unless the poll `is_brief`: the user's media, the URL for the first
    # output, and an object with `workflow` (the prompt), `assets` and `output_node_id`.
    input_url: str | None = None
    output_url: str | None = None
    output_headers: dict[str, str] | None = None
    input_payload: dict[str, Any] | None = None


# A placeholder in a workflow, such as {{INPUT_VIDEO}}.
PLACEHOLDER = re.compile(r"\{\{[^{}]+\}\}")


def with_placeholders(job: Job) -> Job:
    """Gives each asset a placeholder that occurs only in the input that its binding names.

    A worker can then either set this input, or replace the placeholder with the name of the file.
    The workflow's own placeholder is preserved if it occurs nowhere else in the prompt.
    """
    if all(asset.placeholder for asset in job.assets):
        return job
    prompt, assets = dict(job.prompt), []
    counts = Counter(PLACEHOLDER.findall(json.dumps(job.prompt, ensure_ascii=False)))
    for asset in job.assets:
        place = None if asset.placeholder else find_input(prompt, asset.binding or "")
        if place is None:
            assets.append(asset)
            continue
        node_id, name = place
        node = prompt[node_id]
        mark = node["inputs"].get(name)
        if not _is_own_placeholder(mark, counts):
            mark = _new_placeholder(job, asset.name, counts)
        prompt[node_id] = {**node, "inputs": {**node["inputs"], name: mark}}
        assets.append(asset.model_copy(update={"placeholder": mark}))
    return job.model_copy(update={"prompt": prompt, "assets": tuple(assets)})


def _new_placeholder(job: Job, name: str, counts: Mapping[str, int]) -> str:
    plain = f"{{{{{name}}}}}"
    if PLACEHOLDER.fullmatch(plain) and _as_json(plain) not in counts:
        return plain
    return f"{{{{{uuid5(job.lease_token, name).hex}}}}}"


def _is_own_placeholder(value: Any, counts: Mapping[str, int]) -> bool:
    if not isinstance(value, str) or not PLACEHOLDER.fullmatch(value):
        return False
    return counts.get(_as_json(value)) == 1


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def find_input(prompt: Mapping[str, Any], binding: str) -> tuple[str, str] | None:
    """Returns the node and the input that a binding refers to. Both may contain dots."""
    parts = binding.split(".")
    for length in range(1, len(parts)):
        node_id, name = ".".join(parts[:length]), ".".join(parts[length:])
        node = prompt.get(node_id)
        if isinstance(node, dict) and isinstance(node.get("inputs"), dict):
            return node_id, name
    return None


def with_plain_fields(job: Job) -> Job:
    """Adds fields that repeat others in a simpler form, for very simple workers."""
    job = with_placeholders(job)
    primary = next((asset for asset in job.assets if asset.is_primary_input), None)
    slot = job.outputs[0] if job.outputs else None
    payload = {
        "workflow": job.prompt,
        "assets": [asset.model_dump(mode="json") for asset in job.assets],
        "output_node_id": job.output_node_id,
    }
    plain = {
        "input_url": primary.url if primary else None,
        "output_url": slot.url if slot else None,
        "output_headers": slot.headers if slot else None,
        "input_payload": payload,
    }
    return job.model_copy(update=plain)


FACTS_TOKENS_MAX = 32
FactsToken: TypeAlias = Annotated[str, Field(max_length=64)]


class FactsWanted(Message):
    """A request to read the backend's node types and models, and to report them via /facts.

    The report contains the tokens of all requests that arrived before the reading started. An
    urgent request follows a call that may have changed the backend.
    """

    tokens: Annotated[tuple[FactsToken, ...], Field(max_length=FACTS_TOKENS_MAX)]
    is_urgent: bool = False


class FactsReport(Message):
    """The backend's contents, if they have changed."""

    worker_id: WorkerId
    tokens: Annotated[tuple[FactsToken, ...], Field(max_length=FACTS_TOKENS_MAX)]
    backend: BackendFacts | None = None


class FactsReported(Message):
    # The URL to which the worker may upload its backend's object_info. The worker reports its facts
    # again after the upload.
    object_info_upload: OutputSlot | None = None


class Polled(Message):
    job: Job | None = None
    reason: str | None = None
    drain: bool = False
    # The URL to which the worker may upload its backend's object_info, if it differs from the
    # fleet's.
    object_info_upload: OutputSlot | None = None
    new_token: str | None = None  # the worker's new key, which it must use from now on
    facts_wanted: FactsWanted | None = None


PREVIEW_CHARACTERS_MAX = 700_000


NODE_CHARACTERS_MAX, STEPS_MAX = 200, 2**31 - 1


def _short_node(node: Any) -> Any:
    return node[:NODE_CHARACTERS_MAX] if isinstance(node, str) else node


def _plausible_step(step: Any) -> Any:
    return step if not isinstance(step, int) or 0 <= step <= STEPS_MAX else None


class Progress(Message):
    percent: float | None = Field(default=None, ge=0, le=100)
    # Displayed in customers' streams. Implausible values are dropped, so that the heartbeat still
    # counts.
    node: Annotated[str | None, BeforeValidator(_short_node)] = None
    step: Annotated[int | None, BeforeValidator(_plausible_step)] = None
    steps: Annotated[int | None, BeforeValidator(_plausible_step)] = None
    # A data: URL of a small image, from simple workers. A heartbeat's `preview` contains more
    # information.
    preview: str | None = Field(default=None, max_length=PREVIEW_CHARACTERS_MAX)


PreviewType: TypeAlias = Literal["image/jpeg", "image/png", "image/webp", "image/gif"]
PREVIEW_TYPES = frozenset(get_args(PreviewType))


class RunPreview(Message):
    """A small image of a run's intermediate result. Each preview replaces the previous one."""

    node_id: str | None = Field(default=None, max_length=200)
    content_type: PreviewType = "image/jpeg"
    base64: str = Field(max_length=PREVIEW_CHARACTERS_MAX, pattern=r"^[A-Za-z0-9+/]*={0,2}$")
    # The nodes that the preview belongs to, according to ComfyUI.
    metadata: dict[str, Annotated[str, Field(max_length=200)] | None] = Field(
        default_factory=dict, max_length=8
    )

    @property
    def data_url(self) -> str:
        return f"data:{self.content_type};base64,{self.base64}"


class UnheardReport(Message):
    """A numbered heartbeat whose response was lost, so that the worker doesn't know whether it
    arrived."""

    number: ReportNumber
    events: RunEvents = ()


class Heartbeat(Message):
    dispatch_id: RowId
    lease_token: UUID
    started: bool = False
    progress: Progress | None = None
    want_outputs: Annotated[tuple[WantedOutput, ...], Field(fail_fast=True)] = Field(
        default=(), max_length=WANTED_MAX
    )
    want_assets: Annotated[tuple[Name, ...], Field(fail_fast=True)] = Field(
        default=(), max_length=WANTED_MAX
    )
    reading: Reading | None = None
    # How long the response may be delayed if there is no order, so that a prefetched job can be
    # recalled immediately.
    wait_seconds: float = Field(default=0, ge=0, le=WAIT_SECONDS_MAX)
    # Values that the worker inserted into the prompt before it was sent, by node and input. They
    # are sent only once.
    filled_in: FilledIn | None = None
    # For a job that `records_run`: the messages since the last heartbeat. With `live_outputs`, they
    # include messages that refer to files, which are in `outputs`. Otherwise, such messages come
    # with the final report.
    events: RunEvents = ()
    outputs: Annotated[tuple[DeliveredOutput, ...], Field(fail_fast=True)] = Field(
        default=(), max_length=WANTED_MAX
    )
    # Repeated with the same events and outputs until the server responds.
    report: ReportNumber | None = None
    preview: RunPreview | None = None  # sent if the last response had `previews` set


class HeartbeatAnswer(Message):
    lease_expires_at: datetime | None = None
    cancelled: bool = False
    drain: bool = False
    recall: bool = False
    interrupt: bool = False  # stop the run; its end is reported as usual
    previews: bool = False  # someone is watching the job, so send previews with heartbeats
    outputs: tuple[OutputSlot, ...] = ()
    assets: tuple[Asset, ...] = ()
    new_token: str | None = None  # the worker's new key, which it must use from now on
    facts_wanted: FactsWanted | None = None

    @property
    def is_without_orders(self) -> bool:
        is_stopped = self.cancelled or self.interrupt or self.recall
        is_ordered = is_stopped or self.drain or self.new_token is not None
        is_ordered = is_ordered or self.facts_wanted is not None
        return not (is_ordered or self.outputs or self.assets)


def _poll_or_none(value: Any, parsed: ValidatorFunctionWrapHandler) -> Poll | None:
    """Ignores an invalid `poll`, so that the result is accepted anyway."""
    try:
        poll: Poll | None = parsed(value)
    except ValidationError:
        return None
    return poll


def _too_many_values() -> ValueError:
    return ValueError(f"the values have more than {VALUES_BYTES_MAX:,} bytes as JSON")


class Complete(Message):
    dispatch_id: RowId
    lease_token: UUID
    provider_job_id: Name | None = None
    outputs: Annotated[tuple[DeliveredOutput, ...], Field(fail_fast=True)] = Field(
        default=(), max_length=WANTED_MAX
    )
    execution_seconds: float | None = Field(default=None, ge=0)
    # Whether the backend had to switch to the job's heavy model. None means unknown.
    model_change: ModelChange | None = None
    filled_in: FilledIn | None = None  # if it was not sent in a heartbeat
    # The text, number, boolean and JSON values that nodes showed. The values of the output node
    # come first.
    values: Annotated[tuple[ShownValue, ...], Field(fail_fast=True)] = Field(
        default=(), max_length=VALUES_MAX
    )
    # For a job that `records_run`: the messages that were not sent in heartbeats, in order, and the
    # run's entry in the backend's history, without its prompt.
    events: RunEvents = ()
    report: ReportNumber | None = None
    unheard: UnheardReport | None = None  # added to the run log first, unless already received
    history: dict[str, Any] | None = None
    told_outputs: bool = False  # some of the outputs were reported in heartbeats, or may have been
    # The worker's next poll. Its `held` lists the leases that remain after this one.
    poll: Annotated[Poll | None, WrapValidator(_poll_or_none)] = None

    @field_validator("values", mode="before")
    @classmethod
    def _countable(cls, values: Any) -> Any:
        # Each value has at least two bytes, so more values certainly exceed the limit.
        if count_values(values, most=VALUES_BYTES_MAX) > VALUES_BYTES_MAX // 2 + VALUES_MAX:
            raise _too_many_values()
        return values

    @field_validator("values")
    @classmethod
    def _bounded(cls, values: tuple[ShownValue, ...]) -> tuple[ShownValue, ...]:
        if size_of([value.model_dump() for value in values]) > VALUES_BYTES_MAX + 2 * VALUES_MAX:
            raise _too_many_values()
        return values


def _text_or_empty(value: Any) -> Any:
    return "" if value is None else value


class Fail(Message):
    """Reports a failed run. Without an error, the customer sees a general message."""

    # Unknown fields are allowed, so that the response can list them.
    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _without_most_unknown_fields(cls, said: Any) -> Any:
        """Keeps 1,000 unknown fields: more of them take long to validate, and the response names only a few."""
        if not isinstance(said, dict) or len(said) <= UNKNOWN_FIELDS_MAX:
            return said
        known = {name: said[name] for name in _FAIL_FIELDS if name in said}
        unknown = ((name, value) for name, value in said.items() if name not in _FAIL_FIELDS)
        return known | dict(islice(unknown, UNKNOWN_FIELDS_MAX))

    dispatch_id: RowId
    lease_token: UUID
    error: Annotated[str | dict[str, Any], BeforeValidator(_text_or_empty)] = Field(
        default="",
        validation_alias=AliasChoices("error", "error_message", "exception_message", "message"),
    )
    provider_job_id: Name | None = None
    interrupted: bool = False  # stopped on the control plane's orders
    # as in Complete, if the run started
    execution_seconds: float | None = Field(default=None, ge=0)
    filled_in: FilledIn | None = None  # if it was not sent in a heartbeat
    events: RunEvents = ()  # as in Complete, including the files that they refer to
    report: ReportNumber | None = None
    unheard: UnheardReport | None = None
    outputs: Annotated[tuple[DeliveredOutput, ...], Field(fail_fast=True)] = Field(
        default=(), max_length=WANTED_MAX
    )
    told_outputs: bool = False


_FAIL_FIELDS = frozenset({*Fail.model_fields, "error_message", "exception_message", "message"})


class Lacking(Message):
    """The items that a backend reported as missing when it refused a prompt."""

    node_types: Annotated[tuple[Name, ...], Field(fail_fast=True)] = Field(
        default=(), max_length=LACKING_MAX
    )
    # `Class.input` and the file that it doesn't offer
    models: Annotated[tuple[tuple[Name, Name], ...], Field(fail_fast=True)] = Field(
        default=(), max_length=LACKING_MAX
    )


def _short_detail(detail: Any) -> Any:
    return detail[:DETAIL_CHARACTERS_MAX] if isinstance(detail, str) else detail


class Requeue(Message):
    dispatch_id: RowId
    lease_token: UUID
    # a known reason, or any text
    reason: str = Field(min_length=1, max_length=REASON_CHARACTERS_MAX)
    detail: Annotated[str | None, BeforeValidator(_short_detail)] = None
    # the code of the underlying error, if any
    code: str | None = Field(default=None, max_length=100)
    lacking: Lacking | None = None  # only with `backend_lacks`


class Deregister(Message):
    worker_id: WorkerId | None = None  # optional, because the key identifies the worker


class Done(Message):
    """The response to complete, fail, requeue and deregister. A repeated call gets the same
    response."""

    ok: bool = True


NAMED_MAX = 20


class FailAnswer(Done):
    """The response to fail."""

    ignored_fields: tuple[str, ...] = ()  # unknown fields of the request, such as misspelled ones


class Completed(Done):
    """The response to complete. `next` is the response to its `poll`. Without it, the worker has to
    poll.

    `polls_on` means that a poll of this worker is already waiting, and no longer counts the lease
    that has ended. If false, a poll that waits to prefetch continues until the worker polls again.
    """

    next: Polled | None = None
    polls_on: bool = False


def reason_of(request: Requeue) -> tuple[str, str | None]:
    """Returns a known reason and its detail. An unknown reason becomes `other`, and is added to the
    detail."""
    if request.reason in REASONS:
        return request.reason, request.detail
    return OTHER_REASON, ": ".join(filter(None, (request.reason, request.detail)))
