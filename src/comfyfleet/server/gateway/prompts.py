"""Submits, reorders, cancels and interrupts the prompts of ComfyUI's clients."""

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
# Maximum number of nodes, inputs and list items in a prompt. Each one is validated, stored, sent to
# a worker and displayed.
VALUES_MAX = 50_000
# Limits for `extra_data`, which is stored and displayed with each prompt. It mainly contains the
# editor's workflow.
EXTRA_BYTES_MAX = 512 * 1024
EXTRA_VALUES_MAX = 100_000
IDS_PER_TURN = 1_000  # Number of ids that are hashed before other tasks can run.
NOT_IN_LIST = "value_not_in_list"


@dataclass(frozen=True, slots=True)
class PromptReceipt:
    """The result of a submission. `is_new` is False if a prompt with this id or idempotency key
    already existed.
    """

    prompt_id: str
    job_id: UUID
    number: float
    node_errors: Mapping[str, Any]
    is_new: bool = True


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Options of a submission that aren't part of ComfyUI's own API. `stored_data` is stored with
    the prompt.
    """

    idempotency_key: str | None = None
    priority: int = 0
    stored_data: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    # If set, the submission waits for the backend's validation and raises RefusedPrompt if that
    # fails.
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
    """Submits a prompt. If the prompt is invalid, raises RefusedPrompt with ComfyUI's own messages,
    and nothing is queued or charged.

    `at_id` is called with the job's id before the job becomes visible.
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
    """Removes tracebacks, which show the control plane's code, from RefusedPrompt errors."""
    try:
        yield
    except RefusedPrompt as error:
        error.body = failures.without_traceback(error.body)
        raise


@contextlib.contextmanager
def counted(meters: ProcessMetrics) -> Iterator[None]:
    """Counts refused prompts by reason."""
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
    spec = priced.spec
    sent = dict(spec.prompt)
    awaits = options.awaits_backend and await refusals.is_left_to_idle_worker(plane, match, sent)
    gateway = {
        "prompt_id": prompt_id,
        "number": number,
        "client_id": client_id,
        "extra_data": extra_data,
        "outputs": list(verdict.outputs),
        "prompt": None if sent == verdict.prompt else verdict.prompt,
        **options.stored_data,
        **({NEEDS_KEY: True} if keys else {}),
        **(spec.gateway or {}),
        **({AWAITS_BACKEND: True} if awaits else {}),
    }
    final_spec = replace(
        spec,
        gateway=gateway,
        idempotency_key=options.idempotency_key,
        priority=options.priority,
    )
    at_id(job_id)
    added = await _add_with_keys(plane, caller, job_id, priced._replace(spec=final_spec), keys)
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
    """Returns the client's extra data with the values that ComfyUI adds to it."""
    extra_data = dict(submission.extra_data)
    if usage_source:
        extra_data.setdefault("comfy_usage_source", usage_source)
    extra_data["create_time"] = int(plane.clock().timestamp() * 1000)
    return extra_data


def needed_keys(match: PromptMatch, submission: PromptSubmission) -> Mapping[str, str]:
    """Returns the caller's keys if a node of the prompt calls a paid service. Raises RefusedPrompt
    if the caller has sent no key.
    """
    for node_id, node in needed_part(match.verdict.prompt, match.verdict.outputs).items():
        class_type = node["class_type"]
        if not calls_paid_service(match.nodes[class_type].info):
            continue
        if submission.secrets:
            return submission.secrets
        message = (
            f"Node '{class_type}' calls a paid service; set extra_data.{SECRETS[1]} to your key"
        )
        raise RefusedPrompt(
            fault(
                "api_key_missing",
                message,
                f"Node ID '#{node_id}'; extra_data.{SECRETS[0]} is accepted as well",
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
    """Submits a prompt with its keys. The keys are stored first, because a worker may lease the
    prompt immediately.
    """
    if not keys:
        return await _add(plane, caller, job_id, priced)
    partner_keys, added = plane.context.partner_keys, list[Job]()
    is_new = partner_keys.keep(caller.tenant.id, job_id, keys)
    try:
        added += await _add(plane, caller, job_id, priced)
    finally:
        if is_new and not added:
            partner_keys.forget(job_id)
    return added


async def _add(
    plane: ControlPlane, caller: Caller, job_id: UUID, priced: PricedPrompt
) -> Sequence[Job]:
    """Submits the prompt. If the balance doesn't cover the usual reservation but is enough for a
    run like the previous ones, the whole balance is reserved.
    """

    async def submit(spec: JobSpec) -> Sequence[Job]:
        return await job_submit.submit_many(
            plane.context,
            caller.tenant.id,
            {job_id: spec},
            tenant=caller.tenant,
            # Only the tenant's queue limit applies to waiting prompts.
            active_max=UNLIMITED,
        )

    try:
        return await submit(priced.spec)
    except InsufficientTokens as error:
        smaller = priced.with_balance(error.details["balance"])
        if smaller is None:
            raise
    return await submit(smaller)


async def _require_same(
    plane: ControlPlane, caller: Caller, prompt_id: str, prompt: Mapping[str, Any]
) -> None:
    """Accepts an existing prompt id as a retry if the prompt is the same. Raises RefusedPrompt if
    the id belongs to a different prompt, because the new one would never run.
    """
    job = await find_job(plane, caller, prompt_id)
    if job is None:
        return
    known = gateway_data(job).get("prompt") or job.spec.prompt
    if known and dict(known) != dict(prompt):
        text = "You have already used this prompt_id for another prompt; omit it or use a new one"
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
    """Returns the backends that can run the prompt, and the ids of the user's files in it. Before a
    prompt is refused, it is checked again with current data from the workers, because a backend may
    have received a model in the meantime.
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
    """Checks whether the prompt was refused because no known backend lists one of its values, for
    example a model.
    """
    entries = refused.body["node_errors"].values()
    errors = (error for entry in entries for error in entry["errors"])
    return any(error["type"] == NOT_IN_LIST for error in errors)


async def _match_offer(
    plane: ControlPlane, caller: Caller, submission: PromptSubmission, offer: Offer
) -> tuple[PromptMatch, Mapping[str, UUID]]:
    infos = list({backend.hash: backend.object_info for backend in offer.backends}.values())
    prompt = submission.prompt
    # A large prompt is matched in a thread, because it would block other requests.
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
    spec = JobSpec(
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
    longest = plane.context.caches.run_seconds.longest(caller.tenant.id, spec)
    return with_price(spec, terms, longest, max_tokens, least_price=place.least_price)


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
    """Refuses a node id that is ambiguous in a binding. A binding such as `3.image` selects the
    input into which a file is inserted, so the node id `3.image` would conflict with node `3`.
    """
    parts = node_id.split(".")
    if any(".".join(parts[:count]) in prompt for count in range(1, len(parts))):
        message = (
            "The id of a node with a file input must not start with another node's id and a dot"
        )
        raise RefusedPrompt(fault("invalid_node_id", message, f"Node ID '#{node_id}'"), {})


def sent_part(prompt: Prompt, outputs: Collection[str], nodes: Mapping[str, OfferedNode]) -> Prompt:
    """Returns the part of a prompt that is sent to a backend. Leaves out nodes that the backend
    would refuse and fields that it doesn't use.
    """
    part = needed_part(prompt, outputs)
    return {node_id: _sent_node(node, prompt, nodes) for node_id, node in part.items()}


def _sent_node(
    node: Mapping[str, Any], prompt: Prompt, nodes: Mapping[str, OfferedNode]
) -> Mapping[str, Any]:
    """Returns a node's class, inputs and title, in the order of its keys.

    Links to missing nodes are removed. Only inputs that the class doesn't declare can have such a
    link, so no node reads them. But they would crash ComfyUI's worker thread.
    """
    sent: dict[str, Any] = {}
    for key, value in node.items():
        if key == "class_type":
            sent[key] = value
        elif key == "inputs":
            sent[key] = {
                name: _with_positive_slot(content, prompt, nodes) if is_link(content) else content
                for name, content in value.items()
                if not is_link(content) or content[0] in prompt
            }
        elif key == "_meta" and isinstance(title := value.get("title"), str):
            # ComfyUI's clients send the title in the same form. The text of a node's error may
            # contain it.
            sent[key] = {"title": title[:TITLE_CHARACTERS_MAX]}
    return {"inputs": {}, **sent} if "inputs" not in sent else sent


def _with_positive_slot(
    link: Sequence[Any], prompt: Prompt, nodes: Mapping[str, OfferedNode]
) -> Sequence[Any]:
    """Replaces a negative slot with the equivalent positive one, so that both forms have the same
    price. ComfyUI counts negative slots from the last output."""
    source, slot = link
    if slot >= 0:
        return link
    return [source, slot + len(nodes[prompt[source]["class_type"]].info.get("output") or ())]


async def cancel_prompt(
    plane: ControlPlane, caller: Caller, prompt_id: str, *, leaves_trace: bool = False
) -> bool:
    """Cancels a queued or running prompt. Returns False if the prompt was not active."""
    job = await find_job(plane, caller, prompt_id)
    if job is None or not job.status.is_active:
        return False
    return await _cancel(plane, caller, job, leaves_trace=leaves_trace)


async def delete_waiting(plane: ControlPlane, caller: Caller, prompt_ids: Collection[str]) -> None:
    """Deletes queued prompts one after another, because ComfyUI sends a message for each of them.
    Running prompts that their client sees as queued are stopped.
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
    """Returns the ids of the prompts that are still queued or running. Reads the database once."""
    if not prompt_ids:
        return []
    tenant_id, user_id = caller.tenant.id, caller.user_id
    async with plane.context.tenant(tenant_id) as tx:
        active = dict(await jobs.active_prompt_ids(tx, tenant_id, user_id))
    job_ids = await job_ids_of(caller, prompt_ids if active else ())
    return [prompt_id for prompt_id, job_id in job_ids.items() if job_id in active]


async def job_ids_of(caller: Caller, prompt_ids: Collection[str]) -> dict[str, UUID]:
    """Returns the job ids by prompt id, in the same order. Hashing many ids takes a while, so other
    tasks can run in between.
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
    """Interrupts a running prompt of the caller, or all of them without a `prompt_id`."""
    for job in await started_jobs(plane, caller):
        is_meant = prompt_id is None or prompt_id_of(job) == prompt_id
        if is_meant and is_running(job):
            await _cancel(plane, caller, job)


async def _cancel(
    plane: ControlPlane, caller: Caller, job: Job, *, leaves_trace: bool = False
) -> bool:
    """Cancels a prompt. A running prompt ends when its backend reports that it has stopped. A
    queued prompt ends immediately, and isn't shown in the history unless `leaves_trace` is set.
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


# How many prompt numbers a process reserves for a user at a time. Numbers therefore keep increasing
# after a restart, although the database is rarely written.
NUMBERS_TAKEN = 100
# Maximum number of users whose prompt numbers are cached.
USERS_KEPT_MAX = 10_000


@dataclass
class _UserNumbers:
    next: int = 0
    end: int = 0
    highest: float = 0.0
    is_known: bool = False


@dataclass
class PromptNumbers:
    """Assigns prompt numbers to users. Each process reserves numbers in blocks."""

    plane: ControlPlane
    _of_users: dict[UUID, _UserNumbers] = field(default_factory=dict)

    async def next(self, caller: Caller) -> int:
        numbers = self._of(caller)
        if numbers.next >= numbers.end:
            async with self.plane.context.tenant_transaction(caller.tenant.id) as tx:
                first = await run_log.take_prompt_numbers(
                    tx, caller.tenant.id, caller.user_id, NUMBERS_TAKEN
                )
            # Another request may have reserved numbers in the meantime.
            if numbers.next >= numbers.end:
                numbers.next, numbers.end = first, first + NUMBERS_TAKEN
        numbers.next += 1
        return numbers.next - 1

    def is_out_of_line(self, caller: Caller, number: float) -> bool:
        """Checks whether this prompt may have to overtake a queued prompt with a higher number."""
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
    """Sorts a user's waiting prompts by their numbers within the queue positions that they already
    hold. Other users' prompts aren't affected.
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
    """Returns the ids of the jobs whose positions must change, sorted by their numbers. `waiting`
    contains job ids and numbers in the order of submission.
    """
    ordered = sorted(waiting, key=lambda job: job[1])
    pairs = enumerate(zip(waiting, ordered, strict=True))
    places = [place for place, (current, expected) in pairs if current != expected]
    return [job_id for job_id, _ in ordered[places[0] : places[-1] + 1]] if places else []
