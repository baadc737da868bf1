"""Registered workflows and effects: documents, versions, assignment to fleets, prices. No version is ever changed."""

import asyncio
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any
from uuid import UUID

from comfyfleet.api.admin import FleetPrompts
from comfyfleet.api.values import is_storable
from comfyfleet.api.worker import BackendFacts
from comfyfleet.errors import Conflict, InvalidInput, NotFound, Refused, install_line
from comfyfleet.server.catalog import store
from comfyfleet.server.catalog.model import (
    EXAMPLES_MAX,
    OPEN_PREFIX,
    TAG,
    EffectDefinition,
    EffectExample,
    EffectSettings,
    ExampleFile,
    ExampleSide,
    Property,
    RegisteredWorkflow,
    ResolvedEffect,
    RunTerms,
    WorkflowDraft,
    WorkflowTerms,
    WorkflowVersion,
    check_effect_settings,
    check_new_effect,
    check_terms,
    missing_on_backend,
    problems_of,
    underpriced,
)
from comfyfleet.server.db import Database, Tx
from comfyfleet.server.fleets import object_info as of_fleets
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import Fleet, FleetAssignment, FleetWorker, MissingRequirements
from comfyfleet.server.fleets.object_info import JSON_TYPE, DocumentStore
from comfyfleet.workflow.edit.input_lookup import hint


async def store_document(objects: DocumentStore, draft: WorkflowDraft) -> None:
    """Stores the document. Call it before the row is written: a document without a row is harmless,
    a row without a document is not."""
    await objects.put(draft.document_key, draft.document, JSON_TYPE)


async def read_document(objects: DocumentStore, version: WorkflowVersion) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(await objects.get(version.document_key))
    return document


# Made by `make docs` from the engine's nodes.
ENGINE_FILE = Path(__file__).with_name("engine_object_info.json")
ENGINE_PACKAGES = ("av", "numpy", "PIL")


async def object_info_for(objects: DocumentStore, fleet: Fleet | None) -> Mapping[str, Any]:
    reported = None if fleet is None else await of_fleets.read_object_info(objects, fleet)
    return engine_object_info() if reported is None else reported


@cache
def engine_object_info() -> Mapping[str, Any]:
    """Reads the engine's object_info from a file, as importing the engine takes half a second and
    36 MB.

    Raises Refused if the engine is not installed, because nothing could then run those nodes.
    """
    missing = next((each for each in ENGINE_PACKAGES if find_spec(each) is None), None)
    if missing is not None:
        raise Refused(
            "no worker has reported what its backend can do, and the built-in engine is not "
            f"installed ({missing} is missing)",
            hint=install_line("engine"),
        )
    found: dict[str, Any] = json.loads(ENGINE_FILE.read_bytes())
    return found


RUN_LIMIT_SECONDS = 3600
# How long the names of example files are kept in memory; and how long at least, if one is unknown.
EXAMPLES_SECONDS = 60.0
EXAMPLES_SECONDS_MIN = 1.0


async def register_workflow(
    tx: Tx,
    draft: WorkflowDraft,
    terms: WorkflowTerms,
    *,
    now: datetime,
    run_limit_seconds: int = RUN_LIMIT_SECONDS,
    is_draft: bool = False,
) -> tuple[RegisteredWorkflow, WorkflowVersion]:
    """Registers a workflow or its next version, which new jobs use from now on; those of a draft are tried first.

    Its document must be stored already (`store_document`). `run_limit_seconds` is the default for a
    new workflow, whose first version is no draft: nobody can use it before an effect or a price makes that possible.
    """
    check_terms(terms)
    if draft.slug.startswith(OPEN_PREFIX):
        raise InvalidInput(
            f"slugs that begin with {OPEN_PREFIX} are those of open workflows", field="slug"
        )
    output = "optional" if draft.shows_text_only else "required"
    usual = {"run_limit_seconds": run_limit_seconds, "output": output}
    workflow = await store.add_workflow(
        tx, {**_new_row(draft.slug, now), **usual, **_given_values(terms)}
    )
    number = 1
    if workflow is None:
        workflow, number = await _next_version(tx, draft.slug, terms, is_draft=is_draft)
    version = WorkflowVersion(
        workflow_id=workflow.id,
        version=number,
        kind=draft.kind,
        document_key=draft.document_key,
        document_hash=draft.document_hash,
        properties=draft.properties,
        output_node_id=draft.output_node_id,
        node_types=draft.node_types,
        models=draft.models,
        created_at=now,
    )
    await store.add_version(tx, version)
    return workflow, version


async def _next_version(
    tx: Tx, slug: str, terms: WorkflowTerms, *, is_draft: bool
) -> tuple[RegisteredWorkflow, int]:
    locked, values = await store.lock_next_version(tx, slug), _given_values(terms)
    if locked is None:
        raise Conflict(f"the workflow {slug} is just being changed; try again")
    if not is_draft:
        return await _update_workflow(tx, locked[0], {**values, "version": locked[1]}), locked[1]
    if values:
        raise InvalidInput(
            "terms hold for all versions, so a draft has none of its own", field="is_draft"
        )
    return locked


async def get_workflow(tx: Tx, workflow_id: int) -> RegisteredWorkflow:
    return _require_workflow(await store.get_workflow(tx, workflow_id), str(workflow_id))


async def workflow_by_slug(tx: Tx, slug: str) -> RegisteredWorkflow:
    return _require_workflow(
        await store.workflow_by_slug(tx, slug) if is_storable(slug) else None, repr(slug)
    )


async def find_workflow(tx: Tx, slug: str) -> RegisteredWorkflow:
    """Finds a workflow for operators; the error for an unknown one suggests similar names."""
    found = await store.workflow_by_slug(tx, slug) if is_storable(slug) else None
    if found is not None:
        return found
    known = [each.slug for each in await store.all_workflows(tx, with_open=False)]
    raise NotFound(f"there is no workflow {slug!r}{hint(slug, known, 'there are')}")


async def list_workflows(tx: Tx, *, with_open: bool = False) -> list[RegisteredWorkflow]:
    return await store.all_workflows(tx, with_open=with_open)


async def offered_slugs(tx: Tx) -> list[str]:
    """Returns the workflows that customers may name in graphs and pipelines."""
    return [each.slug for each in await store.all_workflows(tx, with_open=False) if each.is_offered]


async def offered_workflows(tx: Tx) -> list[tuple[RegisteredWorkflow, WorkflowVersion]]:
    """Returns the workflows that have a price for customers, each with the version that new jobs get."""
    ids = {each.id for each in await store.all_workflows(tx, with_open=False) if each.is_offered}
    found = await store.current_versions(tx, ids) if ids else {}
    return sorted(found.values(), key=lambda each: each[0].slug)


async def get_version(
    tx: Tx, workflow: RegisteredWorkflow, version: int | None = None
) -> WorkflowVersion:
    """Returns a version; by default the one that new jobs get."""
    number = workflow.version if version is None else version
    found = await store.get_version(tx, workflow.id, number)
    if found is None:
        raise NotFound(f"the workflow {workflow.slug} has no version {number}")
    return found


async def properties_in_use(tx: Tx, slug: str) -> tuple[Property, ...]:
    """Returns the properties of the version that new jobs get; none if the workflow is missing or
    inactive."""
    workflow = await store.workflow_by_slug(tx, slug) if is_storable(slug) else None
    if workflow is None or workflow.is_open or not workflow.is_active:
        return ()
    return (await get_version(tx, workflow)).properties


async def versions_of(tx: Tx, workflow: RegisteredWorkflow) -> list[WorkflowVersion]:
    """Returns all versions, the newest first."""
    return await store.versions_of(tx, workflow.id)


async def activate_version(
    tx: Tx, workflow: RegisteredWorkflow, *, version: int | None = None
) -> RegisteredWorkflow:
    """Activates a workflow; `version` sets the version that new jobs get, for example to go back to
    an older one."""
    values: dict[str, Any] = {"is_active": True}
    if version is not None:
        values["version"] = (await get_version(tx, workflow, version)).version
    return await _update_workflow(tx, workflow, values)


async def deactivate_version(tx: Tx, workflow: RegisteredWorkflow) -> RegisteredWorkflow:
    """Deactivates a workflow: no new jobs are accepted, and queued jobs wait until it is active
    again."""
    return await _update_workflow(tx, workflow, {"is_active": False})


async def pause_workflow(tx: Tx, workflow: RegisteredWorkflow) -> RegisteredWorkflow:
    """Pauses a workflow: jobs are accepted and wait."""
    return await _update_workflow(tx, workflow, {"is_paused": True})


async def resume_workflow(tx: Tx, workflow: RegisteredWorkflow) -> RegisteredWorkflow:
    return await _update_workflow(tx, workflow, {"is_paused": False})


async def change_terms(
    tx: Tx, workflow: RegisteredWorkflow, terms: WorkflowTerms
) -> RegisteredWorkflow:
    check_terms(terms)
    values = _given_values(terms)
    return await _update_workflow(tx, workflow, values) if values else workflow


def open_slug(fleet: Fleet) -> str:
    # A dot, which neither slugs nor stages of fleets hold: a-b/c and a/b-c are two fleets.
    return f"{OPEN_PREFIX}{fleet.slug}.{fleet.stage}"


async def open_workflow_of(tx: Tx, fleet: Fleet, *, now: datetime) -> RegisteredWorkflow:
    """Returns the fleet's open workflow, which runs prompts of no registered workflow; creates it
    at the first call."""
    if fleet.open_workflow_id is not None:
        return await get_workflow(tx, fleet.open_workflow_id)
    slug = open_slug(fleet)
    row = {**_new_row(slug, now), "version": 0, "is_open": True, "output": "optional"}
    workflow = await store.add_workflow(tx, row) or await workflow_by_slug(tx, slug)
    fleet = await fleets.set_open_workflow(tx, fleet, workflow_id=workflow.id)
    assigned = {each.workflow_id for each in await fleets.assigned_to(tx, fleet)}
    await fleets.assign(tx, fleet, assigned | {workflow.id}, now=now)
    return workflow


async def set_prompt_terms(tx: Tx, fleet: Fleet, terms: FleetPrompts, *, now: datetime) -> Fleet:
    """Sets the terms on which the fleet runs prompts of ComfyUI's clients; prompts that were accepted
    keep their price."""
    fleet = await fleets.set_prompts(tx, fleet, terms)
    if fleet.prompts is not None or fleet.open_workflow_id is not None:
        workflow = await open_workflow_of(tx, fleet, now=now)
        await change_terms(tx, workflow, WorkflowTerms(run_limit_seconds=terms.run_limit_seconds))
    return await fleets.fleet_by_id(tx, fleet.id)


async def price_warning(tx: Tx, fleet: Fleet) -> str | None:
    """Warns if the fleet's prompts cost less than the most expensive workflow that it runs."""
    if fleet.prompts is None:
        return None
    ids = {each.workflow_id for each in await fleets.assigned_to(tx, fleet)}
    offered = [each for each in await store.all_workflows(tx, with_open=False) if each.is_offered]
    priced = [each for each in offered if each.id in ids and each.price_tokens]
    if not priced:
        return None
    dearest = max(priced, key=lambda each: each.price_tokens or 0)
    return underpriced(fleet.prompts, dearest.slug, dearest.price_tokens or 0)


def _new_row(slug: str, now: datetime) -> dict[str, Any]:
    return {
        "slug": slug,
        "version": 1,
        "required_capabilities": [],
        "run_limit_seconds": RUN_LIMIT_SECONDS,
        "price_tokens": 0,
        "is_offered": False,
        "is_active": True,
        "is_paused": False,
        "is_open": False,
        "created_at": now,
        "output": "required",
        "ai_mark": "auto",
    }


def _given_values(terms: WorkflowTerms) -> dict[str, Any]:
    said: Mapping[str, Any] = {
        name: value for name, value in asdict(terms).items() if value is not None
    }
    values = dict(said)
    is_withdrawn = values.pop("is_withdrawn", False)
    if is_withdrawn or "price_tokens" in values:
        values["is_offered"] = not is_withdrawn
    if "required_capabilities" in values:
        values["required_capabilities"] = sorted(values["required_capabilities"])
    return values


async def _update_workflow(
    tx: Tx, workflow: RegisteredWorkflow, values: Mapping[str, Any]
) -> RegisteredWorkflow:
    return _require_workflow(await store.update_workflow(tx, workflow.id, values), workflow.slug)


def _require_workflow(workflow: RegisteredWorkflow | None, name: str) -> RegisteredWorkflow:
    if workflow is None:
        raise NotFound(f"there is no workflow {name}")
    return workflow


UNABLE_NAMED_MAX = 5
UNKNOWN_FACTS = BackendFacts()


@dataclass(frozen=True, slots=True)
class MissingForWorker:
    """What one worker lacks to run a workflow; false if it lacks nothing."""

    missing: MissingRequirements = field(default_factory=MissingRequirements)
    capabilities: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.capabilities)

    @property
    def size(self) -> int:
        return len(self.missing.node_types) + len(self.missing.models) + len(self.capabilities)

    def in_words(self) -> str:
        named = [f"capability {name}" for name in self.capabilities]
        return ", ".join(filter(None, [self.missing.in_words(), *named]))

    def as_json(self) -> dict[str, list[str]]:
        return {
            "node_types": list(self.missing.node_types),
            "models": [each.file for each in self.missing.models],
            "capabilities": list(self.capabilities),
        }


async def assign_workflows(
    tx: Tx, fleet: Fleet, slugs: Collection[str], *, now: datetime
) -> tuple[FleetAssignment, list[str]]:
    """Sets the workflows of a fleet; returns the change, and warnings about workers that can't run
    one of them.

    Refused if workers have reported what they have and none of them can run a newly assigned
    workflow.
    """
    wanted = await fleets.workflow_ids(tx, slugs)
    before = {each.slug for each in await fleets.assigned_to(tx, fleet)}
    warnings = []
    for slug in sorted(wanted.keys() - before):
        lacks = await missing_in_fleet(tx, fleet, await workflow_by_slug(tx, slug))
        if not lacks:
            warnings.append(
                f"No worker of {fleet.name} has told what its backend has: nobody knows whether "
                f"{slug} can be run there."
            )
        elif all(lacks.values()):
            raise _none_can_error(slug, fleet, lacks)
        elif any(lacks.values()):
            warnings.append(_partial_warning(slug, fleet, lacks))
    return await fleets.assign(tx, fleet, set(wanted.values()), now=now), warnings


async def missing_in_fleet(
    tx: Tx, fleet: Fleet, workflow: RegisteredWorkflow, version: WorkflowVersion | None = None
) -> dict[str, MissingForWorker]:
    """Returns what each worker of the fleet lacks to run a workflow; workers without any known
    facts are left out."""
    workers = [
        worker
        for worker in await fleets.workers_of(tx, fleet)
        if worker.workflow_ids is None or workflow.id in worker.workflow_ids
    ]
    if workflow.is_open or not workers:
        return {}
    if version is None:
        version = await get_version(tx, workflow)
    return missing_by_worker(workflow, version, workers, await fleets.facts_of(tx, workers))


def missing_by_worker(
    workflow: RegisteredWorkflow,
    version: WorkflowVersion,
    workers: Iterable[FleetWorker],
    facts: Mapping[str, BackendFacts],
) -> dict[str, MissingForWorker]:
    """Returns what each worker lacks; capabilities are known of all workers, backend facts only of
    those that reported."""
    found = {
        worker.worker_id: MissingForWorker(
            missing_on_backend(version, facts.get(worker.worker_id, UNKNOWN_FACTS)),
            tuple(sorted(workflow.required_capabilities - worker.capabilities)),
        )
        for worker in workers
    }
    return {name: lack for name, lack in found.items() if lack or name in facts}


async def capability_warnings(
    tx: Tx, workflow: RegisteredWorkflow, version: WorkflowVersion
) -> list[str]:
    """Returns warnings about fleets in which some or all workers can't run this version."""
    found = []
    for fleet in await fleets.fleets_with(tx, workflow.id):
        known = await missing_in_fleet(tx, fleet, workflow, version)
        if known and all(known.values()):
            found.append(
                f"No worker of {fleet.name} can run version {version.version}: it lacks "
                f"{fewest_missing(known.values()).in_words()}."
            )
        elif any(known.values()):
            found.append(_partial_warning(workflow.slug, fleet, known))
    return found


def _partial_warning(slug: str, fleet: Fleet, lacks: Mapping[str, MissingForWorker]) -> str:
    unable = {name: lack for name, lack in sorted(lacks.items()) if lack}
    some = [f"{name} lacks {lack.in_words()}" for name, lack in unable.items()][:UNABLE_NAMED_MAX]
    more = f"; and {len(unable) - len(some)} more" if len(unable) > len(some) else ""
    return (
        f"{len(unable)} of {len(lacks)} workers of {fleet.name} can't run {slug} as it is "
        f"registered: {'; '.join(some)}{more}."
    )


def fewest_missing(lacks: Iterable[MissingForWorker]) -> MissingForWorker:
    return min(lacks, key=lambda lack: lack.size)


def _none_can_error(slug: str, fleet: Fleet, lacks: Mapping[str, MissingForWorker]) -> Refused:
    nearest = fewest_missing(lacks.values())
    workers: Sequence[str] = sorted(lacks)
    return Refused(
        f"none of the {len(workers)} workers of {fleet.name} can run {slug}: missing "
        f"{nearest.in_words()}",
        workflow=slug,
        missing=nearest.as_json(),
        workers={worker_id: lacks[worker_id].as_json() for worker_id in workers},
    )


EFFECTS_PER_PAGE_MAX = 500
# Of so many runs the typical duration is the median.
RECENT_RUNS_MAX = 15


async def create_effect(
    tx: Tx,
    *,
    effect_id: UUID,
    slug: str,
    workflow: RegisteredWorkflow,
    settings: EffectSettings,
    now: datetime,
) -> EffectDefinition:
    if workflow.is_open:
        raise InvalidInput(
            "an open workflow has no properties and can't be an effect", field="workflow_slug"
        )
    version = await get_version(tx, workflow)
    check_new_effect(slug, settings, version.properties)
    titled = replace(settings, title=settings.title.strip() or slug)
    effect = EffectDefinition(effect_id, slug, workflow.id, titled, None, None, now)
    made = await store.add_effect(tx, effect)
    if made is None:
        raise Conflict(f"there is an effect {slug} already", field="slug")
    return made


async def update_effect(
    tx: Tx, effect: EffectDefinition, settings: EffectSettings
) -> EffectDefinition:
    """Changes the settings; submitted jobs keep their price and prompt."""
    workflow = await get_workflow(tx, effect.workflow_id)
    version = await get_version(tx, workflow)
    check_effect_settings(settings, version.properties)
    titled = replace(settings, title=settings.title.strip() or effect.slug)
    return _require_effect(
        await store.update_effect(tx, effect.id, store.settings_row(titled)), effect.slug
    )


async def publish_effect(tx: Tx, effect: EffectDefinition) -> EffectDefinition:
    """Publishes an effect after checking it against the workflow's current version."""
    return await update_effect(tx, effect, replace(effect.settings, is_published=True))


async def withdraw_effect(tx: Tx, effect: EffectDefinition) -> EffectDefinition:
    """Withdraws an effect; submitted jobs continue."""
    return _require_effect(
        await store.update_effect(tx, effect.id, {"is_published": False}), effect.slug
    )


async def get_effect(tx: Tx, effect_id: UUID) -> EffectDefinition:
    return _require_effect(await store.get_effect(tx, effect_id), str(effect_id))


async def get_effects(tx: Tx, effect_ids: Collection[UUID]) -> dict[UUID, EffectDefinition]:
    """Returns those of them that exist, published or not."""
    return {each.id: each for each in await store.get_effects(tx, effect_ids)}


async def lock_effect(tx: Tx, slug: str) -> EffectDefinition:
    """Like `effect_by_slug`; others who would change it wait until the transaction ends."""
    return _require_effect(
        await store.effect_by_slug(tx, slug, is_locked=True) if is_storable(slug) else None,
        repr(slug),
    )


async def effect_by_slug(tx: Tx, slug: str) -> EffectDefinition:
    return _require_effect(
        await store.effect_by_slug(tx, slug) if is_storable(slug) else None, repr(slug)
    )


async def list_effects(
    tx: Tx, *, workflow: RegisteredWorkflow | None = None
) -> list[EffectDefinition]:
    return await store.all_effects(
        tx, workflow_id=workflow.id if workflow else None, limit=EFFECTS_PER_PAGE_MAX
    )


async def effect_slugs(tx: Tx, effect_ids: Collection[UUID]) -> dict[UUID, str]:
    """Returns the slugs of those that exist, by id."""
    return await store.effect_slugs(tx, effect_ids) if effect_ids else {}


async def list_published(
    tx: Tx,
    *,
    after_slug: str | None = None,
    limit: int,
    text: str | None = None,
    tag: str | None = None,
) -> list[ResolvedEffect]:
    """Returns a page of effects that customers may use, ordered by slug; `after_slug` is the last
    page's last. `text` is looked for in slug, title, description and tags."""
    if tag is not None and not TAG.fullmatch(tag):
        return []
    found = await store.published_effects(
        tx, after_slug=after_slug, limit=min(limit, EFFECTS_PER_PAGE_MAX), text=text, tag=tag
    )
    behind = await store.current_versions(tx, {each.workflow_id for each in found})
    return [ResolvedEffect(each, *behind[each.workflow_id]) for each in found]


async def published_tags(tx: Tx) -> list[str]:
    """Returns the tags of all effects that customers may use."""
    return sorted(await store.published_tags(tx))


async def resolve(tx: Tx, effect_id: UUID) -> ResolvedEffect:
    """Returns the effect with its workflow; NotFound unless it is published and the workflow
    active."""
    offer = await store.resolve_effect(tx, effect_id)
    if offer is None or not offer.is_open:
        raise NotFound(f"there is no effect {effect_id}")
    return offer


async def resolve_with_fleet(tx: Tx, effect_id: UUID | None) -> tuple[ResolvedEffect, Fleet | None]:
    """Like `resolve`; also returns the fleet whose object_info the workflow is converted with."""
    found = await store.resolve_effect_with_fleet(tx, effect_id)
    if found is None or not found[0].is_open:
        raise NotFound(f"there is no effect {effect_id}")
    return found


async def typical_seconds(tx: Tx, effect_id: UUID) -> float | None:
    """Returns the typical duration; None without history, or if there is no such effect."""
    return await store.typical_seconds(tx, effect_id)


async def published_slugs(tx: Tx) -> list[str]:
    return await store.published_slugs(tx)


async def find_published(tx: Tx, slug: str) -> ResolvedEffect | None:
    """Finds an effect that customers may use; None if it is missing, unpublished or its workflow
    inactive."""
    effect = await store.effect_by_slug(tx, slug) if is_storable(slug) else None
    offer = await store.resolve_effect(tx, effect.id) if effect else None
    return offer if offer and offer.is_open else None


async def broken_effects(
    tx: Tx,
    workflow: RegisteredWorkflow,
    properties: Sequence[Property],
    before: Sequence[Property] = (),
) -> list[tuple[EffectDefinition, str]]:
    """Returns the published effects that a version with these properties would break, and why.

    `before` are the properties of the current version: customers may set those, so they must
    remain.
    """
    found = await list_effects(tx, workflow=workflow)
    return [
        (each, problem)
        for each in found
        if each.settings.is_published
        for problem in problems_of(each.settings, properties, before)
    ]


async def broken_effect_warnings(
    tx: Tx, workflow: RegisteredWorkflow, version: WorkflowVersion, before: Sequence[Property]
) -> list[str]:
    found = await broken_effects(tx, workflow, version.properties, before)
    return [f"the effect {effect.slug} does not fit any more: {why}" for effect, why in found]


async def require_no_broken_effects(
    tx: Tx, workflow: RegisteredWorkflow, properties: Sequence[Property], before: Sequence[Property]
) -> None:
    """Raises Conflict if a version would break published effects, as new jobs use it at once."""
    broken = await broken_effects(tx, workflow, properties, before)
    if broken:
        says = "; ".join(f"{effect.slug}: {problem}" for effect, problem in broken)
        raise Conflict(
            f"published effects of {workflow.slug} would break: {says}",
            effects=sorted({effect.slug for effect, _ in broken}),
            hint="Withdraw or change them first, or say `break_effects` (--break-effects).",
        )


async def run_terms(tx: Tx, workflow_id: int, effect_id: UUID | None) -> RunTerms:
    """Returns the terms of a run; without an effect, no metadata is kept."""
    found = await store.run_terms(tx, workflow_id, effect_id)
    if found is None:
        raise NotFound(f"there is no workflow {workflow_id}")
    return found


async def note_durations(tx: Tx, effect_id: UUID, seconds: Sequence[float]) -> None:
    """Updates the effect's typical duration after successes; does nothing if the effect was
    deleted."""
    new = [round(max(each, 0.0), 3) for each in seconds]
    recent = [*await store.recent_seconds(tx, effect_id), *new][-RECENT_RUNS_MAX:]
    values = {
        "last_processing_time_seconds": recent[-1],
        "recent_seconds": recent,
        "typical_seconds": median(recent),
    }
    await store.update_effect(tx, effect_id, values)


async def set_example(
    tx: Tx, effect: EffectDefinition, position: int, side: ExampleSide, file: ExampleFile
) -> tuple[EffectDefinition, tuple[ExampleFile, ...]]:
    """Sets one side of an example, or adds the next one; returns also the files that it replaces."""
    examples = list(effect.examples)
    if not 0 <= position <= min(len(examples), EXAMPLES_MAX - 1):
        raise InvalidInput(
            f"examples have the positions 0 to {EXAMPLES_MAX - 1}, without a gap", field="position"
        )
    before = examples[position] if position < len(examples) else EffectExample()
    examples[position : position + 1] = [before.with_side(side, file)]
    return await _set_examples(tx, effect, examples)


async def remove_example(
    tx: Tx, effect: EffectDefinition, position: int
) -> tuple[EffectDefinition, tuple[ExampleFile, ...]]:
    examples = list(effect.examples)
    if not 0 <= position < len(examples):
        raise NotFound(f"the effect {effect.slug} has no example {position}")
    del examples[position]
    return await _set_examples(tx, effect, examples)


async def _set_examples(
    tx: Tx, effect: EffectDefinition, examples: Sequence[EffectExample]
) -> tuple[EffectDefinition, tuple[ExampleFile, ...]]:
    rows = [store.example_row(each) for each in examples]
    changed = _require_effect(
        await store.update_effect(tx, effect.id, {"examples": rows}), effect.slug
    )
    kept = {file for each in examples for file in each.files}
    return changed, tuple(
        file for each in effect.examples for file in each.files if file not in kept
    )


class ExampleIndex:
    """The example files of all effects by name, read again after a while.

    They are served to anybody: a name that nobody gave must not cost a look into the store."""

    def __init__(self) -> None:
        self._files: Mapping[str, ExampleFile] = {}
        self._read_at: datetime | None = None
        self._changes = 0
        self._reading = asyncio.Lock()

    def forget(self) -> None:
        """Some have changed: they are read again when the next one is asked for."""
        self._changes += 1
        self._read_at = None

    async def find(self, central: Database, name: str, *, now: datetime) -> ExampleFile | None:
        if self._is_due(name, now):
            async with self._reading:
                if self._is_due(name, now):
                    await self._read(central, now)
        return self._files.get(name)

    def _is_due(self, name: str, now: datetime) -> bool:
        if self._read_at is None:
            return True
        age = (now - self._read_at).total_seconds()
        return age > (EXAMPLES_SECONDS if name in self._files else EXAMPLES_SECONDS_MIN)

    async def _read(self, central: Database, now: datetime) -> None:
        changes = self._changes
        async with central.read() as tx:
            found = await store.all_examples(tx)
        self._files = {file.name: file for each in found for file in each.files}
        self._read_at = now if changes == self._changes else None


def _require_effect(effect: EffectDefinition | None, name: str) -> EffectDefinition:
    if effect is None:
        raise NotFound(f"there is no effect {name}")
    return effect


__all__ = [
    "activate_version",
    "change_terms",
    "deactivate_version",
    "find_workflow",
    "get_version",
    "get_workflow",
    "list_workflows",
    "missing_on_backend",
    "offered_slugs",
    "offered_workflows",
    "open_slug",
    "open_workflow_of",
    "pause_workflow",
    "price_warning",
    "properties_in_use",
    "register_workflow",
    "resume_workflow",
    "set_prompt_terms",
    "versions_of",
    "workflow_by_slug",
]
