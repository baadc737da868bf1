"""Registered workflows and effects: documents, versions, assignment to fleets, prices. No version is ever changed."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import UUID

from comfyfleet.api.values import is_storable
from comfyfleet.api.worker import BackendFacts
from comfyfleet.errors import Conflict, InvalidInput, NotFound, Refused, install_line
from comfyfleet.server.catalog import store
from comfyfleet.server.catalog.model import (
    OPEN_PREFIX,
    EffectDefinition,
    EffectSettings,
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
)
from comfyfleet.server.db import Tx
from comfyfleet.server.fleets import object_info as of_fleets
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import Fleet, FleetAssignment, FleetWorker, MissingRequirements
from comfyfleet.server.fleets.object_info import JSON_TYPE, DocumentStore
from comfyfleet.workflow.edit.addresses import hint


async def store_document(objects: DocumentStore, draft: WorkflowDraft) -> None:
    """Before its row is written: a document without a row harms nobody, a row without one would."""
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
    """As it was written down: a control plane does not import the engine, which takes half a second
    and 36 MB. Only where the engine is installed, since nothing else could run what it describes."""
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


async def register_workflow(
    tx: Tx,
    draft: WorkflowDraft,
    terms: WorkflowTerms,
    *,
    now: datetime,
    run_limit_seconds: int = RUN_LIMIT_SECONDS,
) -> tuple[RegisteredWorkflow, WorkflowVersion]:
    """A new workflow, or the next version of one, which new jobs get from now on.

    Its document must be in the object store already: `documents.keep`. `run_limit_seconds` is for a
    new one whose terms name none.
    """
    check_terms(terms)
    if draft.slug.startswith(OPEN_PREFIX):
        raise InvalidInput(
            f"slugs that begin with {OPEN_PREFIX} are those of open workflows", field="slug"
        )
    usual = {"run_limit_seconds": run_limit_seconds}
    workflow = await store.add_workflow(tx, {**_new_row(draft.slug, now), **usual, **_said(terms)})
    if workflow is None:
        workflow = await store.raise_version(tx, draft.slug, _said(terms))
    if workflow is None:
        raise Conflict(f"the workflow {draft.slug} is just being changed; try again")
    version = WorkflowVersion(
        workflow_id=workflow.id,
        version=workflow.version,
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


async def get_workflow(tx: Tx, workflow_id: int) -> RegisteredWorkflow:
    return _require_workflow(await store.get_workflow(tx, workflow_id), str(workflow_id))


async def workflow_by_slug(tx: Tx, slug: str) -> RegisteredWorkflow:
    return _require_workflow(
        await store.workflow_by_slug(tx, slug) if is_storable(slug) else None, repr(slug)
    )


async def find_workflow(tx: Tx, slug: str) -> RegisteredWorkflow:
    """For operators: one that isn't there is refused with the names that were probably meant."""
    found = await store.workflow_by_slug(tx, slug) if is_storable(slug) else None
    if found is not None:
        return found
    known = [each.slug for each in await store.all_workflows(tx, with_open=False)]
    raise NotFound(f"there is no workflow {slug!r}{hint(slug, known, 'there are')}")


async def list_workflows(tx: Tx, *, with_open: bool = False) -> list[RegisteredWorkflow]:
    return await store.all_workflows(tx, with_open=with_open)


async def offered_slugs(tx: Tx) -> list[str]:
    """Of workflows that customers may name in graphs and pipelines."""
    return [each.slug for each in await store.all_workflows(tx, with_open=False) if each.is_offered]


async def get_version(
    tx: Tx, workflow: RegisteredWorkflow, version: int | None = None
) -> WorkflowVersion:
    """The one that new jobs get, unless another is asked for."""
    number = workflow.version if version is None else version
    found = await store.get_version(tx, workflow.id, number)
    if found is None:
        raise NotFound(f"the workflow {workflow.slug} has no version {number}")
    return found


async def properties_in_use(tx: Tx, slug: str) -> tuple[Property, ...]:
    """Of the version that new jobs get; none if there is no such workflow, or it is not active."""
    workflow = await store.workflow_by_slug(tx, slug) if is_storable(slug) else None
    if workflow is None or workflow.is_open or not workflow.is_active:
        return ()
    return (await get_version(tx, workflow)).properties


async def versions_of(tx: Tx, workflow: RegisteredWorkflow) -> list[WorkflowVersion]:
    """The newest first."""
    return await store.versions_of(tx, workflow.id)


async def activate_version(
    tx: Tx, workflow: RegisteredWorkflow, *, version: int | None = None
) -> RegisteredWorkflow:
    """Also with another of its versions for new jobs: the way back from a bad one."""
    values: dict[str, Any] = {"is_active": True}
    if version is not None:
        values["version"] = (await get_version(tx, workflow, version)).version
    return await _changed(tx, workflow, values)


async def deactivate_version(tx: Tx, workflow: RegisteredWorkflow) -> RegisteredWorkflow:
    """No new jobs, and those that wait are not run until it is active again."""
    return await _changed(tx, workflow, {"is_active": False})


async def pause_workflow(tx: Tx, workflow: RegisteredWorkflow) -> RegisteredWorkflow:
    """Jobs are taken and wait."""
    return await _changed(tx, workflow, {"is_paused": True})


async def resume_workflow(tx: Tx, workflow: RegisteredWorkflow) -> RegisteredWorkflow:
    return await _changed(tx, workflow, {"is_paused": False})


async def change_terms(
    tx: Tx, workflow: RegisteredWorkflow, terms: WorkflowTerms
) -> RegisteredWorkflow:
    check_terms(terms)
    values = _said(terms)
    return await _changed(tx, workflow, values) if values else workflow


async def open_workflow_of(tx: Tx, fleet: Fleet, *, now: datetime) -> RegisteredWorkflow:
    """The fleet's own, for prompts that match no registered workflow; made at the first call."""
    if fleet.open_workflow_id is not None:
        return await get_workflow(tx, fleet.open_workflow_id)
    # A dot, which neither slugs nor stages of fleets hold: a-b/c and a/b-c are two fleets.
    slug = f"{OPEN_PREFIX}{fleet.slug}.{fleet.stage}"
    row = {**_new_row(slug, now), "version": 0, "is_open": True}
    workflow = await store.add_workflow(tx, row) or await workflow_by_slug(tx, slug)
    fleet = await fleets.set_open_workflow(tx, fleet, workflow_id=workflow.id)
    assigned = {each.workflow_id for each in await fleets.assigned_to(tx, fleet)}
    await fleets.assign(tx, fleet, assigned | {workflow.id}, now=now)
    return workflow


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
    }


def _said(terms: WorkflowTerms) -> dict[str, Any]:
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


async def _changed(
    tx: Tx, workflow: RegisteredWorkflow, values: Mapping[str, Any]
) -> RegisteredWorkflow:
    return _require_workflow(await store.update_workflow(tx, workflow.id, values), workflow.slug)


def _require_workflow(workflow: RegisteredWorkflow | None, name: str) -> RegisteredWorkflow:
    if workflow is None:
        raise NotFound(f"there is no workflow {name}")
    return workflow


UNABLE_NAMED_MAX = 5
NOTHING_TOLD = BackendFacts()


@dataclass(frozen=True, slots=True)
class WorkerLack:
    """What keeps one worker from running a workflow; nothing: it can."""

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
    """These workflows and no others; also says what could not be checked, and who can't run what.

    Refused if none of the workers that have told what they have can run a workflow that is new here.
    """
    wanted = await fleets.workflow_ids(tx, slugs)
    before = {each.slug for each in await fleets.assigned_to(tx, fleet)}
    warnings = []
    for slug in sorted(wanted.keys() - before):
        lacks = await lacks_of(tx, fleet, await workflow_by_slug(tx, slug))
        if not lacks:
            warnings.append(
                f"No worker of {fleet.name} has told what its backend has: nobody knows whether "
                f"{slug} can be run there."
            )
        elif all(lacks.values()):
            raise _nobody_can(slug, fleet, lacks)
        elif any(lacks.values()):
            warnings.append(_some_can(slug, fleet, lacks))
    return await fleets.assign(tx, fleet, set(wanted.values()), now=now), warnings


async def lacks_of(
    tx: Tx, fleet: Fleet, workflow: RegisteredWorkflow, version: WorkflowVersion | None = None
) -> dict[str, WorkerLack]:
    """By worker, of those of the fleet that serve the workflow and of which something is known."""
    workers = [
        worker
        for worker in await fleets.workers_of(tx, fleet)
        if worker.workflow_ids is None or workflow.id in worker.workflow_ids
    ]
    if workflow.is_open or not workers:
        return {}
    if version is None:
        version = await get_version(tx, workflow)
    return lacks(workflow, version, workers, await fleets.facts_of(tx, workers))


def lacks(
    workflow: RegisteredWorkflow,
    version: WorkflowVersion,
    workers: Iterable[FleetWorker],
    facts: Mapping[str, BackendFacts],
) -> dict[str, WorkerLack]:
    """Capabilities are known of every worker; what its backend has, of those that have told it."""
    found = {
        worker.worker_id: WorkerLack(
            missing_on_backend(version, facts.get(worker.worker_id, NOTHING_TOLD)),
            tuple(sorted(workflow.required_capabilities - worker.capabilities)),
        )
        for worker in workers
    }
    return {name: lack for name, lack in found.items() if lack or name in facts}


async def doubts(tx: Tx, workflow: RegisteredWorkflow, version: WorkflowVersion) -> list[str]:
    """Where a workflow is assigned and somebody, or nobody, can't run this version of it."""
    found = []
    for fleet in await fleets.fleets_with(tx, workflow.id):
        known = await lacks_of(tx, fleet, workflow, version)
        if known and all(known.values()):
            found.append(
                f"No worker of {fleet.name} can run version {version.version}: it lacks "
                f"{least_lacking(known.values()).in_words()}."
            )
        elif any(known.values()):
            found.append(_some_can(workflow.slug, fleet, known))
    return found


def _some_can(slug: str, fleet: Fleet, lacks: Mapping[str, WorkerLack]) -> str:
    unable = {name: lack for name, lack in sorted(lacks.items()) if lack}
    some = [f"{name} lacks {lack.in_words()}" for name, lack in unable.items()][:UNABLE_NAMED_MAX]
    more = f"; and {len(unable) - len(some)} more" if len(unable) > len(some) else ""
    return (
        f"{len(unable)} of {len(lacks)} workers of {fleet.name} can't run {slug} as it is "
        f"registered: {'; '.join(some)}{more}."
    )


def least_lacking(lacks: Iterable[WorkerLack]) -> WorkerLack:
    return min(lacks, key=lambda lack: lack.size)


def _nobody_can(slug: str, fleet: Fleet, lacks: Mapping[str, WorkerLack]) -> Refused:
    nearest = least_lacking(lacks.values())
    workers: Sequence[str] = sorted(lacks)
    return Refused(
        f"none of the {len(workers)} workers of {fleet.name} can run {slug}: missing "
        f"{nearest.in_words()}",
        workflow=slug,
        missing=nearest.as_json(),
        workers={worker_id: lacks[worker_id].as_json() for worker_id in workers},
    )


EFFECTS_PER_PAGE_MAX = 500
# Of each new duration in the typical one: the last ten or so count.
NEW_DURATION_WEIGHT = 0.2


async def create_effect(
    tx: Tx,
    *,
    effect_id: UUID,
    slug: str,
    workflow: RegisteredWorkflow,
    face: EffectSettings,
    now: datetime,
) -> EffectDefinition:
    if workflow.is_open:
        raise InvalidInput(
            "an open workflow has no properties and can't be an effect", field="workflow_slug"
        )
    version = await get_version(tx, workflow)
    check_new_effect(slug, face, version.properties)
    titled = replace(face, title=face.title.strip() or slug)
    effect = EffectDefinition(effect_id, slug, workflow.id, titled, None, None, now)
    made = await store.add_effect(tx, effect)
    if made is None:
        raise Conflict(f"there is an effect {slug} already", field="slug")
    return made


async def update_effect(tx: Tx, effect: EffectDefinition, face: EffectSettings) -> EffectDefinition:
    """Jobs keep what they were submitted with: their price, their prompt."""
    workflow = await get_workflow(tx, effect.workflow_id)
    version = await get_version(tx, workflow)
    check_effect_settings(face, version.properties)
    titled = replace(face, title=face.title.strip() or effect.slug)
    return _require_effect(
        await store.update_effect(tx, effect.id, store.settings_row(titled)), effect.slug
    )


async def publish_effect(tx: Tx, effect: EffectDefinition) -> EffectDefinition:
    """Checked again: the workflow may have a new version since."""
    return await update_effect(tx, effect, replace(effect.face, is_published=True))


async def withdraw_effect(tx: Tx, effect: EffectDefinition) -> EffectDefinition:
    """No new jobs; those that were submitted go on."""
    return _require_effect(
        await store.update_effect(tx, effect.id, {"is_published": False}), effect.slug
    )


async def get_effect(tx: Tx, effect_id: UUID) -> EffectDefinition:
    return _require_effect(await store.get_effect(tx, effect_id), str(effect_id))


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


async def list_published(
    tx: Tx, *, after_slug: str | None = None, limit: int
) -> list[ResolvedEffect]:
    """What customers can pick, by slug; go on with `after_slug` = the last one's."""
    found = await store.published_effects(
        tx, after_slug=after_slug, limit=min(limit, EFFECTS_PER_PAGE_MAX)
    )
    behind = await store.in_use(tx, {each.workflow_id for each in found})
    return [ResolvedEffect(each, *behind[each.workflow_id]) for each in found]


async def resolve(tx: Tx, effect_id: UUID) -> ResolvedEffect:
    """What a customer picked; NotFound unless it is published and its workflow active."""
    offer = await store.resolve_effect(tx, effect_id)
    if offer is None or not offer.is_open:
        raise NotFound(f"there is no effect {effect_id}")
    return offer


async def resolve_with_fleet(tx: Tx, effect_id: UUID) -> tuple[ResolvedEffect, Fleet | None]:
    """The same, and the fleet whose node types decide how it becomes a prompt."""
    found = await store.resolve_effect_with_fleet(tx, effect_id)
    if found is None or not found[0].is_open:
        raise NotFound(f"there is no effect {effect_id}")
    return found


async def typical_seconds(tx: Tx, effect_id: UUID) -> float | None:
    """How long it takes, from its history; None also if there is no such effect."""
    return await store.typical_seconds(tx, effect_id)


async def published_slugs(tx: Tx) -> list[str]:
    """Of the effects that a customer may pick."""
    return await store.published_slugs(tx)


async def find_published(tx: Tx, slug: str) -> ResolvedEffect | None:
    """None unless it is published and its workflow active: a customer can't tell those apart."""
    effect = await store.effect_by_slug(tx, slug) if is_storable(slug) else None
    offer = await store.resolve_effect(tx, effect.id) if effect else None
    return offer if offer and offer.is_open else None


async def broken_by(
    tx: Tx,
    workflow: RegisteredWorkflow,
    properties: Sequence[Property],
    before: Sequence[Property] = (),
) -> list[tuple[EffectDefinition, str]]:
    """Published effects that a version with these properties would not fit, and why.

    `before` are those of the version that customers are offered now: what they may set stays.
    """
    found = await list_effects(tx, workflow=workflow)
    return [
        (each, problem)
        for each in found
        if each.face.is_published
        for problem in problems_of(each.face, properties, before)
    ]


async def require_unbroken(
    tx: Tx, workflow: RegisteredWorkflow, properties: Sequence[Property], before: Sequence[Property]
) -> None:
    """A version is what new jobs get at once: it must not close what customers are offered."""
    broken = await broken_by(tx, workflow, properties, before)
    if broken:
        says = "; ".join(f"{effect.slug}: {problem}" for effect, problem in broken)
        raise Conflict(
            f"published effects of {workflow.slug} would break: {says}",
            effects=sorted({effect.slug for effect, _ in broken}),
            hint="Withdraw or change them first, or say `break_effects` (--break-effects).",
        )


async def run_terms(tx: Tx, workflow_id: int, effect_id: UUID | None) -> RunTerms:
    """An effect that is gone, or none, keeps no metadata."""
    found = await store.run_terms(tx, workflow_id, effect_id)
    if found is None:
        raise NotFound(f"there is no workflow {workflow_id}")
    return found


async def note_duration(tx: Tx, effect_id: UUID, seconds: float) -> None:
    """After each success; nothing happens to an effect that is gone."""
    await store.note_duration(tx, effect_id, max(seconds, 0.0), weight=NEW_DURATION_WEIGHT)


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
    "open_workflow_of",
    "pause_workflow",
    "properties_in_use",
    "register_workflow",
    "resume_workflow",
    "versions_of",
    "workflow_by_slug",
]
