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
# All nodes, inputs and items of lists. Each is validated, stored, sent to a worker and shown again.
VALUES_MAX = 50_000
# Stored and shown with each prompt. Mostly the editor's document.
EXTRA_BYTES_MAX = 512 * 1024
EXTRA_VALUES_MAX = 100_000
IDS_PER_TURN = 1_000  # of jobs, in one turn of the event loop
NOT_IN_LIST = "value_not_in_list"


@dataclass(frozen=True, slots=True)
class PromptReceipt:
    """`is_new`: no prompt with this id, or with its idempotency key, was there before."""

    prompt_id: str
    job_id: UUID
    number: float
    node_errors: Mapping[str, Any]
    is_new: bool = True


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """What other protocols than ComfyUI's can say of a prompt; `kept` is stored with it."""

    idempotency_key: str | None = None
    priority: int = 0
    kept: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    # Whether a refusal by the backend is to be raised, which may take a moment.
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
    """Raises RefusedPrompt, with ComfyUI's own words, before anything is queued or charged.

    `at_id` is told the job's id before anybody can see the job.
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
    told = fitting_errors(verdict.node_errors or {})
    return PromptReceipt(prompt_id, job_id, number, told, bool(added))


def _extra_data(
    plane: ControlPlane, submission: PromptSubmission, usage_source: str | None
) -> dict[str, Any]:
    """Returns what the client sent, with the values that ComfyUI adds."""
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
    """Submits the prompt. Its keys are there before a worker can get it."""
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
    """Submits the prompt. If the balance covers less than its usual reservation but enough for a run
    like the last ones, all of the balance is reserved."""

    async def submit(asked: JobSpec) -> Sequence[Job]:
        return await job_submit.submit_many(
            plane.context,
            caller.tenant.id,
            {job_id: asked},
            tenant=caller.tenant,
            # As many may wait as the tenant may have jobs in the queue.
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
    """A repeated id is a retry, and its job runs once; with another prompt, that one would never run."""
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
    """The backends that can run it, and the user's files that it names. Nothing is refused because of
    what a worker had a second ago, or because of a model that its backend has got since."""
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
    """Whether a prompt names a value, such as a model, that no backend was known to list."""
    entries = refused.body["node_errors"].values()
    errors = (error for entry in entries for error in entry["errors"])
    return any(error["type"] == NOT_IN_LIST for error in errors)


async def _match_offer(
    plane: ControlPlane, caller: Caller, submission: PromptSubmission, offer: Offer
) -> tuple[PromptMatch, Mapping[str, UUID]]:
    infos = list({each.hash: each.object_info for each in offer.backends}.values())
    prompt = submission.prompt
    # Other calls would have to wait for a large one, so it is matched in a thread.
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
    found = []
    for node_id, node in prompt.items():
        for name, kind in nodes[node["class_type"]].uploads.items():
            value = node.get("inputs", {}).get(name)
            if isinstance(value, str) and value in file_ids:
                _require_clear_id(node_id, prompt)
                binding = f"{node_id}.{name}"
                media = "video" if kind == "video" else "audio" if kind == "audio" else "image"
                found.append(
                    AssetRef(binding, file_ids[value], media, binding=binding)  # type: ignore[arg-type]
                )
    return found


def _require_clear_id(node_id: str, prompt: Prompt) -> None:
    """A file is put where `id.input` leads, which must be no input of another node."""
    parts = node_id.split(".")
    if any(".".join(parts[:count]) in prompt for count in range(1, len(parts))):
        says = "A node that takes a file has an id that begins as another's, with a dot after it"
        raise RefusedPrompt(fault("invalid_node_id", says, f"Node ID '#{node_id}'"), {})


def sent_part(prompt: Prompt, outputs: Collection[str], nodes: Mapping[str, OfferedNode]) -> Prompt:
    """What of a prompt is sent to a backend: the rest would be refused again, or is nothing to it."""
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
            # As ComfyUI's clients write it: a node that fails may show its prompt as text.
            sent[key] = {"title": title[:TITLE_CHARACTERS_MAX]}
    return {"inputs": {}, **sent} if "inputs" not in sent else sent


def _counted_from_zero(
    link: Sequence[Any], prompt: Prompt, nodes: Mapping[str, OfferedNode]
) -> Sequence[Any]:
    """Replaces a slot that ComfyUI counts from the last output: it is the same link, so it has the same price."""
    source, slot = link
    if slot >= 0:
        return link
    return [source, slot + len(nodes[prompt[source]["class_type"]].info.get("output") or ())]


async def cancel_prompt(
    plane: ControlPlane, caller: Caller, prompt_id: str, *, leaves_trace: bool = False
) -> bool:
    """Stops it or takes it back, whatever it needs; False: there was nothing to stop."""
    job = await find_job(plane, caller, prompt_id)
    if job is None or not job.status.is_active:
        return False
    return await _cancel(plane, caller, job, leaves_trace=leaves_trace)


async def delete_waiting(plane: ControlPlane, caller: Caller, prompt_ids: Collection[str]) -> None:
    """One after the other, as ComfyUI tells of each. Prompts that run unseen are stopped: their client sees them
    waiting."""
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
    """Those of them that wait or run, by one look, however many there are."""
    if not prompt_ids:
        return []
    tenant_id, user_id = caller.tenant.id, caller.user_id
    async with plane.context.tenant(tenant_id) as tx:
        active = dict(await jobs.active_prompt_ids(tx, tenant_id, user_id))
    wanted = await job_ids_of(caller, prompt_ids if active else ())
    return [prompt_id for prompt_id, job_id in wanted.items() if job_id in active]


async def job_ids_of(caller: Caller, prompt_ids: Collection[str]) -> dict[str, UUID]:
    """Returns the job of each prompt, in the same order. The event loop turns now and then, because each id is a hash."""
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
    """The caller's prompts that run now, or one of them."""
    for job in await started_jobs(plane, caller):
        is_meant = prompt_id is None or prompt_id_of(job) == prompt_id
        if is_meant and is_running(job):
            await _cancel(plane, caller, job)


async def _cancel(
    plane: ControlPlane, caller: Caller, job: Job, *, leaves_trace: bool = False
) -> bool:
    """A run ends when its backend has stopped it, which that tells; a prompt that waits goes at once, and
    leaves no trace unless it shall."""
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


# A process takes so many of a user's numbers at a time: they go on after a restart, and are written rarely.
NUMBERS_TAKEN = 100
# In these numbers a prompt stands where it came; other numbers are the client's own, or of `front`.
USERS_KEPT_MAX = 10_000


@dataclass
class _UserNumbers:
    next: int = 0
    end: int = 0
    highest: float = 0.0
    is_known: bool = False


@dataclass
class PromptNumbers:
    """By user, of this process."""

    plane: ControlPlane
    _of_users: dict[UUID, _UserNumbers] = field(default_factory=dict)

    async def next(self, caller: Caller) -> int:
        numbers = self._of(caller)
        if numbers.next >= numbers.end:
            async with self.plane.context.tenant_transaction(caller.tenant.id) as tx:
                first = await run_log.take_prompt_numbers(
                    tx, caller.tenant.id, caller.user_id, NUMBERS_TAKEN
                )
            if numbers.next >= numbers.end:  # another request may have been quicker
                numbers.next, numbers.end = first, first + NUMBERS_TAKEN
        numbers.next += 1
        return numbers.next - 1

    def is_out_of_line(self, caller: Caller, number: float) -> bool:
        """Whether a prompt with a higher number may wait: it came first, and has to let this one pass."""
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
    """Lets a user's prompts change places among themselves; what others wait for stays as it is."""
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
    """Those that have to change places, in the order of their numbers; `waiting`: as they came."""
    ordered = sorted(waiting, key=lambda each: each[1])
    pairs = enumerate(zip(waiting, ordered, strict=True))
    places = [place for place, (came, goes) in pairs if came != goes]
    return [job_id for job_id, _ in ordered[places[0] : places[-1] + 1]] if places else []
