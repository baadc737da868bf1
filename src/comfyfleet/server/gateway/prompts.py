"""Submits, orders, cancels and interrupts the prompts of ComfyUI's clients."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from uuid import UUID, uuid4

from comfyfleet.api.admin import FleetPrompts
from comfyfleet.api.sizes import count_values, is_larger, is_small
from comfyfleet.errors import FleetError, InsufficientTokens
from comfyfleet.protocol.http import json_text
from comfyfleet.protocol.payloads import SECRETS, PromptSubmission, RefusedPrompt
from comfyfleet.protocol.validation import Prompt, fault, is_link
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.catalog.model import AssetRef, model_key, needs_hash, prompt_needs
from comfyfleet.server.counters import ProcessMetrics
from comfyfleet.server.gateway import failures, refusals
from comfyfleet.server.gateway import files as user_files
from comfyfleet.server.gateway.freshness import freshness_of
from comfyfleet.server.gateway.history import find_job, held_back_ids, started_jobs
from comfyfleet.server.gateway.model import (
    CLIENT_ID_CHARACTERS_MAX,
    PricedPrompt,
    gateway_data,
    is_running,
    job_id_of,
    prompt_id_of,
    with_price,
)
from comfyfleet.server.gateway.offers import Offer, OfferedNode, offer_cache, offer_to
from comfyfleet.server.gateway.placement import (
    PromptMatch,
    fitting_errors,
    match_prompt,
    needed_part,
    place_prompt,
)
from comfyfleet.server.gateway.policy import calls_paid_service
from comfyfleet.server.gateway.previous_backends import find_preferred_worker
from comfyfleet.server.gateway.visible_backends import sees_backends
from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.jobs import submit as job_submit
from comfyfleet.server.jobs.caches import UNLIMITED
from comfyfleet.server.jobs.model import (
    AWAITS_BACKEND,
    IN_ORDER,
    NEEDS_KEY,
    PREFERRED_WORKER,
    Job,
    JobSpec,
    JobStatus,
)
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.run_log import service as run_log
from comfyfleet.server.tenants.model import Caller

TITLE_CHARACTERS_MAX = 200
NODES_MAX = 10_000
# Limit for all nodes, inputs and list items of a prompt. Each is validated, stored, sent to a
# worker and displayed.
VALUES_MAX = 50_000
# Limits of `extra_data`, which is stored and displayed with each prompt. Most of it is the editor's
# document.
EXTRA_BYTES_MAX = 512 * 1024
EXTRA_VALUES_MAX = 100_000
IDS_PER_TURN = 1_000  # jobs per turn of the event loop
NOT_IN_LIST = "value_not_in_list"


@dataclass(frozen=True, slots=True)
class PromptReceipt:
    """The result of a submission. `is_new` means that no prompt with this id or idempotency key
    existed.
    """

    prompt_id: str
    job_id: UUID
    number: float
    node_errors: Mapping[str, Any]
    is_new: bool = True


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Options that ComfyUI's protocol lacks but other protocols have. `kept` is stored with the
    prompt.
    """

    idempotency_key: str | None = None
    priority: int = 0
    kept: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    # Whether to wait for the backend and raise its refusal, which may take a moment.
    awaits_backend: bool = False


PLAIN = PromptOptions()


async def submit_prompt(
    plane: ControlPlane,
    caller: Caller,
    submission: PromptSubmission,
    number: float,
    usage_source: str | None = None,
    *,
    options: PromptOptions = PLAIN,
    at_id: Callable[[UUID], None] = lambda job_id: None,
) -> PromptReceipt:
    """Submits a prompt. Raises RefusedPrompt with ComfyUI's own messages before anything is queued
    or charged.

    `at_id` is called with the job's id before the job is visible to anybody.
    """
    hides = not sees_backends(plane, caller.tenant)
    with counted(plane.meters), without_tracebacks() if hides else contextlib.nullcontext():
        receipt = await _submit(plane, caller, submission, number, usage_source, options, at_id)
    if hides:
        shown = failures.without_traceback(receipt.node_errors)
        receipt = replace(receipt, node_errors=shown)
    plane.meters.prompts.labels("accepted" if receipt.is_new else "repeated").inc()
    return receipt


@contextlib.contextmanager
def without_tracebacks() -> Iterator[None]:
    """Removes lines of the control plane's code from refusals."""
    try:
        yield
    except RefusedPrompt as error:
        error.body = failures.without_traceback(error.body)
        raise


@contextlib.contextmanager
def counted(meters: ProcessMetrics) -> Iterator[None]:
    """Counts a prompt that is refused, by the reason."""
    try:
        yield
    except FleetError as error:
        reason = error.body["error"]["type"] if isinstance(error, RefusedPrompt) else error.code
        meters.prompts.labels(reason).inc()
        raise


async def _submit(
    plane: ControlPlane,
    caller: Caller,
    submission: PromptSubmission,
    number: float,
    usage_source: str | None,
    options: PromptOptions,
    at_id: Callable[[UUID], None],
) -> PromptReceipt:
    _require_small(submission)
    match, file_ids = await _match(plane, caller, submission)
    verdict = match.verdict
    keys = needed_keys(match, submission)
    prompt_id = submission.prompt_id or str(uuid4())
    job_id = job_id_of(caller.tenant.id, caller.user_id, prompt_id)
    extra_data = _extra_data(plane, submission, usage_source)
    client_id = _client_id(extra_data)
    priced = await _spec(plane, caller, match, file_ids, client_id, options.max_tokens)
    spec = priced.asked
    sent = dict(spec.prompt)
    awaits = options.awaits_backend and await refusals.is_left_to_idle_worker(plane, match, sent)
    gateway = {
        "prompt_id": prompt_id,
        "number": number,
        "client_id": client_id,
        "extra_data": extra_data,
        "outputs": list(verdict.outputs),
        "prompt": None if sent == verdict.prompt else verdict.prompt,
        **options.kept,
        **({NEEDS_KEY: True} if keys else {}),
        **(spec.gateway or {}),
        **({AWAITS_BACKEND: True} if awaits else {}),
    }
    asked = replace(
        spec,
        gateway=gateway,
        idempotency_key=options.idempotency_key,
        priority=options.priority,
    )
    at_id(job_id)
    added = await _add_with_keys(plane, caller, job_id, priced._replace(asked=asked), keys)
    if not added:
        await refusals.repeat_refusal(plane, caller, job_id, match.nodes)
        await _require_same(plane, caller, prompt_id, verdict.prompt)
    elif awaits:
        await refusals.require_accepted(plane, caller, job_id, match.nodes)
    node_errors = fitting_errors(verdict.node_errors or {})
    return PromptReceipt(prompt_id, job_id, number, node_errors, bool(added))


def _extra_data(
    plane: ControlPlane, submission: PromptSubmission, usage_source: str | None
) -> dict[str, Any]:
    """Returns the client's extra data with the values that ComfyUI adds."""
    extra_data = dict(submission.extra_data)
    if usage_source:
        extra_data.setdefault("comfy_usage_source", usage_source)
    extra_data["create_time"] = int(plane.clock().timestamp() * 1000)
    return extra_data


def needed_keys(match: PromptMatch, submission: PromptSubmission) -> Mapping[str, str]:
    """Returns the caller's keys if a node of the prompt calls a paid service. Raises RefusedPrompt if
    there is none."""
    for node_id, node in needed_part(match.verdict.prompt, match.verdict.outputs).items():
        class_type = node["class_type"]
        if not calls_paid_service(match.nodes[class_type].info):
            continue
        if submission.secrets:
            return submission.secrets
        says = f"Node '{class_type}' calls a paid service: set extra_data.{SECRETS[1]} to your key"
        raise RefusedPrompt(
            fault(
                "api_key_missing",
                says,
                f"Node ID '#{node_id}'; extra_data.{SECRETS[0]} is accepted, too",
                node_id=node_id,
                class_type=class_type,
            )
        )
    return {}


async def _add_with_keys(
    plane: ControlPlane,
    caller: Caller,
    job_id: UUID,
    priced: PricedPrompt,
    keys: Mapping[str, str],
) -> Sequence[Job]:
    """Submits the prompt. Its keys are stored before a worker can lease it."""
    if not keys:
        return await _add(plane, caller, job_id, priced)
    kept, added = plane.context.partner_keys, list[Job]()
    is_new = kept.keep(caller.tenant.id, job_id, keys)
    try:
        added += await _add(plane, caller, job_id, priced)
    finally:
        if is_new and not added:
            kept.forget(job_id)
    return added


async def _add(
    plane: ControlPlane, caller: Caller, job_id: UUID, priced: PricedPrompt
) -> Sequence[Job]:
    """Submits the prompt. If the balance covers less than the usual reservation, but enough for a
    run like the last ones, the whole balance is reserved.
    """

    async def submit(asked: JobSpec) -> Sequence[Job]:
        return await job_submit.submit_many(
            plane.context,
            caller.tenant.id,
            {job_id: asked},
            tenant=caller.tenant,
            # The number of waiting prompts is only limited by the tenant's queue limit.
            active_max=UNLIMITED,
        )

    try:
        return await submit(priced.asked)
    except InsufficientTokens as error:
        smaller = priced.with_balance(error.details["balance"])
        if smaller is None:
            raise
    return await submit(smaller)


async def _require_same(
    plane: ControlPlane, caller: Caller, prompt_id: str, prompt: Mapping[str, Any]
) -> None:
    """Accepts a repeated id as a retry, whose job runs only once. Refuses the id with another
    prompt, because that prompt would never run.
    """
    job = await find_job(plane, caller, prompt_id)
    if job is None:
        return
    known = gateway_data(job).get("prompt") or job.asked.prompt
    if known and dict(known) != dict(prompt):
        text = "The prompt_id names another prompt of yours; leave it out, or choose a new one"
        raise RefusedPrompt(fault("prompt_id_in_use", text, prompt_id))


def _require_small(submission: PromptSubmission) -> None:
    if len(submission.prompt) > NODES_MAX:
        text = f"The prompt has more than {NODES_MAX} nodes"
        raise RefusedPrompt(fault("prompt_too_large", text, str(len(submission.prompt))))
    if count_values(submission.prompt, most=VALUES_MAX) > VALUES_MAX:
        text = f"The prompt has more than {VALUES_MAX:,} values"
        raise RefusedPrompt(fault("prompt_too_large", text))
    extra_data = submission.extra_data
    if count_values(extra_data, most=EXTRA_VALUES_MAX) > EXTRA_VALUES_MAX:
        limit = f"the limit is {EXTRA_VALUES_MAX:,} values"
        raise RefusedPrompt(fault("prompt_too_large", "extra_data is too large", limit))
    if is_larger(extra_data, bytes_max=EXTRA_BYTES_MAX) or (
        len(json_text(extra_data)) > EXTRA_BYTES_MAX
    ):
        limit = f"the limit is {EXTRA_BYTES_MAX:,} bytes"
        raise RefusedPrompt(fault("prompt_too_large", "extra_data is too large", limit))


def _client_id(extra_data: Mapping[str, Any]) -> str | None:
    client_id = extra_data.get("client_id")
    if not isinstance(client_id, str):
        return None
    return client_id[:CLIENT_ID_CHARACTERS_MAX]


async def _match(
    plane: ControlPlane, caller: Caller, submission: PromptSubmission
) -> tuple[PromptMatch, Mapping[str, UUID]]:
    """Returns the backends that can run the prompt, and the user's files that it names. Before a
    prompt is refused, newer facts of the workers are read, because a backend may have received a
    model in the meantime.
    """
    offer = await offer_to(plane, caller)
    try:
        return await _match_offer(plane, caller, submission, offer)
    except RefusedPrompt as error:
        lacks_value = _lacks_value(error)
        if offer.is_fresh and not lacks_value:
            raise
    if lacks_value:
        await freshness_of(plane).query(offer.fleets)
    offer = await offer_to(plane, caller, fresh=True)
    return await _match_offer(plane, caller, submission, offer)


def _lacks_value(refused: RefusedPrompt) -> bool:
    """Whether the prompt was refused because of a value, such as a model, that no known backend
    lists.
    """
    entries = refused.body["node_errors"].values()
    errors = (error for entry in entries for error in entry["errors"])
    return any(error["type"] == NOT_IN_LIST for error in errors)


async def _match_offer(
    plane: ControlPlane, caller: Caller, submission: PromptSubmission, offer: Offer
) -> tuple[PromptMatch, Mapping[str, UUID]]:
    infos = list({backend.hash: backend.object_info for backend in offer.backends}.values())
    prompt = submission.prompt
    # A large prompt would block other requests, so it is matched in a thread.
    if is_small(prompt):
        files = await user_files.find_named(plane, caller, user_files.names_in(prompt, infos))
        return match_prompt(offer, prompt, submission.targets, files.by_kind), files.file_ids
    async with offer_cache(plane).large:
        names = await asyncio.to_thread(user_files.names_in, prompt, infos)
        files = await user_files.find_named(plane, caller, names)
        work = partial(match_prompt, offer, prompt, submission.targets, files.by_kind)
        return await asyncio.to_thread(work), files.file_ids


async def _spec(
    plane: ControlPlane,
    caller: Caller,
    match: PromptMatch,
    file_ids: Mapping[str, UUID],
    client_id: str | None,
    max_tokens: int | None,
) -> PricedPrompt:
    prompt = sent_part(match.verdict.prompt, match.verdict.outputs, match.nodes)
    needs = prompt_needs(prompt)
    heavy = model_key(needs.models)
    preferred = await find_preferred_worker(
        plane, caller, match, client_id=client_id, model_key=heavy
    )
    place = await place_prompt(plane, match, prompt, preferred.fleet_id if preferred else None)
    gateway: dict[str, Any] = {IN_ORDER: True} if place.fleet.is_in_order else {}
    if preferred is not None and preferred.fleet_id == place.fleet.id:
        gateway[PREFERRED_WORKER] = preferred.worker_id
    asked = JobSpec(
        workflow_id=place.workflow_id,
        workflow_slug=place.workflow_slug,
        workflow_version=place.workflow_version,
        prompt=prompt,
        assets=tuple(_assets(prompt, match.nodes, file_ids)),
        stage=place.fleet.stage,
        model_key=heavy,
        model_set=needs_hash(needs),
        user_id=caller.user_id,
        backend_affinity=place.affinity,
        gateway=gateway or None,
    )
    terms = place.fleet.prompts or FleetPrompts()
    longest = plane.context.caches.run_seconds.longest(caller.tenant.id, asked)
    return with_price(asked, terms, longest, max_tokens, least_price=place.least_price)


def _assets(
    prompt: Prompt, nodes: Mapping[str, OfferedNode], file_ids: Mapping[str, UUID]
) -> list[AssetRef]:
    assets = []
    for node_id, node in prompt.items():
        for name, kind in nodes[node["class_type"]].uploads.items():
            value = node.get("inputs", {}).get(name)
            if isinstance(value, str) and value in file_ids:
                _require_clear_id(node_id, prompt)
                binding = f"{node_id}.{name}"
                media = "video" if kind == "video" else "audio" if kind == "audio" else "image"
                assets.append(
                    AssetRef(binding, file_ids[value], media, binding=binding)  # type: ignore[arg-type]
                )
    return assets


def _require_clear_id(node_id: str, prompt: Prompt) -> None:
    """Refuses an id that would be ambiguous in `id.input`, which determines where a file is
    inserted. It must not match an input of another node.
    """
    parts = node_id.split(".")
    if any(".".join(parts[:count]) in prompt for count in range(1, len(parts))):
        says = "A node that takes a file has an id that begins as another's, with a dot after it"
        raise RefusedPrompt(fault("invalid_node_id", says, f"Node ID '#{node_id}'"), {})


def sent_part(prompt: Prompt, outputs: Collection[str], nodes: Mapping[str, OfferedNode]) -> Prompt:
    """Returns the part of a prompt that is sent to a backend. It leaves out nodes that would be
    refused again, and fields that backends don't use.
    """
    part = needed_part(prompt, outputs)
    return {node_id: _sent_node(node, prompt, nodes) for node_id, node in part.items()}


def _sent_node(
    node: Mapping[str, Any], prompt: Prompt, nodes: Mapping[str, OfferedNode]
) -> Mapping[str, Any]:
    """Returns the class, the inputs and the title of a node, in the order of its keys.

    A link to a node that is missing can only be in an input that the class does not declare.
    No node reads it, but ComfyUI's worker thread ends when it follows it.
    """
    sent: dict[str, Any] = {}
    for key, value in node.items():
        if key == "class_type":
            sent[key] = value
        elif key == "inputs":
            sent[key] = {
                name: _counted_from_zero(given, prompt, nodes) if is_link(given) else given
                for name, given in value.items()
                if not is_link(given) or given[0] in prompt
            }
        elif key == "_meta" and isinstance(title := value.get("title"), str):
            # ComfyUI's clients write the title the same way. A node that fails may show its prompt
            # as text.
            sent[key] = {"title": title[:TITLE_CHARACTERS_MAX]}
    return {"inputs": {}, **sent} if "inputs" not in sent else sent


def _counted_from_zero(
    link: Sequence[Any], prompt: Prompt, nodes: Mapping[str, OfferedNode]
) -> Sequence[Any]:
    """Replaces a negative slot, which ComfyUI counts from the last output. It is the same link, so
    the prompt gets the same price.
    """
    source, slot = link
    if slot >= 0:
        return link
    return [source, slot + len(nodes[prompt[source]["class_type"]].info.get("output") or ())]


async def cancel_prompt(
    plane: ControlPlane, caller: Caller, prompt_id: str, *, leaves_trace: bool = False
) -> bool:
    """Cancels a queued or running prompt. Returns False if there was nothing to cancel."""
    job = await find_job(plane, caller, prompt_id)
    if job is None or not job.status.is_active:
        return False
    return await _cancel(plane, caller, job, leaves_trace=leaves_trace)


async def delete_waiting(plane: ControlPlane, caller: Caller, prompt_ids: Collection[str]) -> None:
    """Deletes queued prompts one after the other, because ComfyUI reports each one. Running prompts
    that their client sees as queued are stopped.
    """
    if not prompt_ids:
        return
    waiting = frozenset(await _waiting_ids(plane, caller))
    unseen = await held_back_ids(plane, caller)
    for prompt_id, job_id in (await job_ids_of(caller, prompt_ids)).items():
        if job_id in waiting:
            await _take_back(plane, caller, [job_id])
        elif job_id in unseen:
            await cancel_prompt(plane, caller, prompt_id)


async def still_active(
    plane: ControlPlane, caller: Caller, prompt_ids: Collection[str]
) -> list[str]:
    """Returns those of the prompts that are queued or running. Reads the database once."""
    if not prompt_ids:
        return []
    tenant_id, user_id = caller.tenant.id, caller.user_id
    async with plane.context.tenant(tenant_id) as tx:
        active = dict(await jobs.active_prompt_ids(tx, tenant_id, user_id))
    job_ids = await job_ids_of(caller, prompt_ids if active else ())
    return [prompt_id for prompt_id, job_id in job_ids.items() if job_id in active]


async def job_ids_of(caller: Caller, prompt_ids: Collection[str]) -> dict[str, UUID]:
    """Returns the job id of each prompt, in the same order. Other tasks run in between, because
    each id must be hashed.
    """
    job_ids: dict[str, UUID] = {}
    for number, prompt_id in enumerate(prompt_ids, start=1):
        job_ids[prompt_id] = job_id_of(caller.tenant.id, caller.user_id, prompt_id)
        if number % IDS_PER_TURN == 0:
            await asyncio.sleep(0)
    return job_ids


async def clear_waiting(plane: ControlPlane, caller: Caller) -> None:
    unseen = await held_back_ids(plane, caller)
    await _take_back(plane, caller, await _waiting_ids(plane, caller), is_clear=True)
    for job in await started_jobs(plane, caller) if unseen else ():
        if job.id in unseen and is_running(job):
            await _cancel(plane, caller, job)


async def _waiting_ids(plane: ControlPlane, caller: Caller) -> list[UUID]:
    async with plane.context.tenant(caller.tenant.id) as tx:
        active = await jobs.active_prompt_ids(tx, caller.tenant.id, caller.user_id)
    return [job_id for job_id, is_begun in active if not is_begun]


async def interrupt(plane: ControlPlane, caller: Caller, prompt_id: str | None) -> None:
    """Interrupts the caller's running prompts, or one of them."""
    for job in await started_jobs(plane, caller):
        is_meant = prompt_id is None or prompt_id_of(job) == prompt_id
        if is_meant and is_running(job):
            await _cancel(plane, caller, job)


async def _cancel(
    plane: ControlPlane, caller: Caller, job: Job, *, leaves_trace: bool = False
) -> bool:
    """Cancels a prompt. A run ends when its backend has stopped it and reported that. A queued
    prompt ends at once, and is removed from the history unless `leaves_trace` is set.
    """
    if not is_running(job) and not leaves_trace:
        return await _take_back(plane, caller, [job.id]) > 0
    if is_running(job) and await job_submit.interrupt_job(plane.context, caller.tenant.id, job.id):
        return True
    ended = await job_submit.cancel_job(plane.context, caller.tenant.id, job.id)
    return ended.status == JobStatus.CANCELLED


async def _take_back(
    plane: ControlPlane, caller: Caller, job_ids: Sequence[UUID], *, is_clear: bool = False
) -> int:
    owner = caller.tenant.id, caller.user_id
    return await job_submit.take_back_prompts(plane.context, owner, job_ids, is_clear=is_clear)


# A process reserves this many of a user's prompt numbers at a time. So numbers continue after a
# restart, and are rarely written.
NUMBERS_TAKEN = 100
# Users whose numbers are kept in memory.
USERS_KEPT_MAX = 10_000


@dataclass
class _UserNumbers:
    next: int = 0
    end: int = 0
    highest: float = 0.0
    is_known: bool = False


@dataclass
class PromptNumbers:
    """The prompt numbers of this process by user."""

    plane: ControlPlane
    _of_users: dict[UUID, _UserNumbers] = field(default_factory=dict)

    async def next(self, caller: Caller) -> int:
        numbers = self._of(caller)
        if numbers.next >= numbers.end:
            async with self.plane.context.tenant_transaction(caller.tenant.id) as tx:
                first = await run_log.take_prompt_numbers(
                    tx, caller.tenant.id, caller.user_id, NUMBERS_TAKEN
                )
            if numbers.next >= numbers.end:  # another request may have been faster
                numbers.next, numbers.end = first, first + NUMBERS_TAKEN
        numbers.next += 1
        return numbers.next - 1

    def is_out_of_line(self, caller: Caller, number: float) -> bool:
        """Whether a prompt with a higher number may be queued, which this one must overtake."""
        numbers = self._of(caller)
        is_out = not numbers.is_known or number < numbers.highest
        numbers.is_known = True
        numbers.highest = max(numbers.highest, number)
        return is_out

    def _of(self, caller: Caller) -> _UserNumbers:
        if len(self._of_users) >= USERS_KEPT_MAX and caller.user_id not in self._of_users:
            self._of_users.pop(next(iter(self._of_users)))
        return self._of_users.setdefault(caller.user_id, _UserNumbers())


async def order_waiting(plane: ControlPlane, caller: Caller) -> None:
    """Reorders a user's prompts among their own places in the queue, so that other users' prompts
    are not affected.
    """
    context = plane.context
    async with context.tenant(caller.tenant.id) as tx:
        active = await jobs.active_prompt_ids(tx, caller.tenant.id, caller.user_id)
        waiting = [job_id for job_id, is_begun in active if not is_begun]
        names = await jobs.prompt_names(tx, caller.tenant.id, waiting)
    moved = _out_of_order([(job_id, names[job_id][0]) for job_id in waiting if job_id in names])
    if not moved:
        return
    async with context.central.transaction() as tx:
        recalled = await dispatch.reorder(tx, caller.tenant.id, moved)
    context.queue.push(recalled)


def _out_of_order(waiting: Sequence[tuple[UUID, float]]) -> list[UUID]:
    """Returns the jobs that must change places, in the order of their numbers. `waiting` is in the
    order of submission.
    """
    ordered = sorted(waiting, key=lambda each: each[1])
    pairs = enumerate(zip(waiting, ordered, strict=True))
    places = [place for place, (came, goes) in pairs if came != goes]
    return [job_id for job_id, _ in ordered[places[0] : places[-1] + 1]] if places else []
