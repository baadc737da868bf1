"""Registered workflows: versions are added, chosen and held back; none is ever changed."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from comfyfleet.db import Tx
from comfyfleet.effects import store
from comfyfleet.effects.model import (
    OPEN_PREFIX,
    Draft,
    Property,
    Terms,
    Version,
    Workflow,
    check_terms,
)
from comfyfleet.effects.models import missing_on
from comfyfleet.fleets import service as fleets
from comfyfleet.fleets.model import Fleet
from comfyfleet.kernel.errors import Conflict, InvalidInput, NotFound
from comfyfleet.kernel.texts import is_storable
from comfyfleet.workflow.setting.wording import hint

__all__ = [
    "activate",
    "all_of",
    "by_slug",
    "change_terms",
    "deactivate",
    "get",
    "get_version",
    "missing_on",
    "named",
    "offered_slugs",
    "open_workflow_of",
    "pause",
    "properties_in_use",
    "register",
    "resume",
    "versions_of",
]

RUN_LIMIT_SECONDS = 3600


async def register(
    tx: Tx,
    draft: Draft,
    terms: Terms,
    *,
    now: datetime,
    run_limit_seconds: int = RUN_LIMIT_SECONDS,
) -> tuple[Workflow, Version]:
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
    workflow = await store.add(tx, {**_new_row(draft.slug, now), **usual, **_said(terms)})
    if workflow is None:
        workflow = await store.raise_version(tx, draft.slug, _said(terms))
    if workflow is None:
        raise Conflict(f"the workflow {draft.slug} is just being changed; try again")
    version = Version(
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


async def get(tx: Tx, workflow_id: int) -> Workflow:
    return _found(await store.get(tx, workflow_id), str(workflow_id))


async def by_slug(tx: Tx, slug: str) -> Workflow:
    return _found(await store.by_slug(tx, slug) if is_storable(slug) else None, repr(slug))


async def named(tx: Tx, slug: str) -> Workflow:
    """For operators: one that isn't there is refused with the names that were probably meant."""
    found = await store.by_slug(tx, slug) if is_storable(slug) else None
    if found is not None:
        return found
    known = [each.slug for each in await store.all_of(tx, with_open=False)]
    raise NotFound(f"there is no workflow {slug!r}{hint(slug, known, 'there are')}")


async def all_of(tx: Tx, *, with_open: bool = False) -> list[Workflow]:
    return await store.all_of(tx, with_open=with_open)


async def offered_slugs(tx: Tx) -> list[str]:
    """Of workflows that customers may name in graphs and pipelines."""
    return [each.slug for each in await store.all_of(tx, with_open=False) if each.is_offered]


async def get_version(tx: Tx, workflow: Workflow, version: int | None = None) -> Version:
    """The one that new jobs get, unless another is asked for."""
    number = workflow.version if version is None else version
    found = await store.get_version(tx, workflow.id, number)
    if found is None:
        raise NotFound(f"the workflow {workflow.slug} has no version {number}")
    return found


async def properties_in_use(tx: Tx, slug: str) -> tuple[Property, ...]:
    """Of the version that new jobs get; none if there is no such workflow, or it is not active."""
    workflow = await store.by_slug(tx, slug) if is_storable(slug) else None
    if workflow is None or workflow.is_open or not workflow.is_active:
        return ()
    return (await get_version(tx, workflow)).properties


async def versions_of(tx: Tx, workflow: Workflow) -> list[Version]:
    """The newest first."""
    return await store.versions_of(tx, workflow.id)


async def activate(tx: Tx, workflow: Workflow, *, version: int | None = None) -> Workflow:
    """Also with another of its versions for new jobs: the way back from a bad one."""
    values: dict[str, Any] = {"is_active": True}
    if version is not None:
        values["version"] = (await get_version(tx, workflow, version)).version
    return await _changed(tx, workflow, values)


async def deactivate(tx: Tx, workflow: Workflow) -> Workflow:
    """No new jobs, and those that wait are not run until it is active again."""
    return await _changed(tx, workflow, {"is_active": False})


async def pause(tx: Tx, workflow: Workflow) -> Workflow:
    """Jobs are taken and wait."""
    return await _changed(tx, workflow, {"is_paused": True})


async def resume(tx: Tx, workflow: Workflow) -> Workflow:
    return await _changed(tx, workflow, {"is_paused": False})


async def change_terms(tx: Tx, workflow: Workflow, terms: Terms) -> Workflow:
    check_terms(terms)
    values = _said(terms)
    return await _changed(tx, workflow, values) if values else workflow


async def open_workflow_of(tx: Tx, fleet: Fleet, *, now: datetime) -> Workflow:
    """The fleet's own, for prompts that match no registered workflow; made at the first call."""
    if fleet.open_workflow_id is not None:
        return await get(tx, fleet.open_workflow_id)
    # A dot, which neither slugs nor stages of fleets hold: a-b/c and a/b-c are two fleets.
    slug = f"{OPEN_PREFIX}{fleet.slug}.{fleet.stage}"
    row = {**_new_row(slug, now), "version": 0, "is_open": True}
    workflow = await store.add(tx, row) or await by_slug(tx, slug)
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


def _said(terms: Terms) -> dict[str, Any]:
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


async def _changed(tx: Tx, workflow: Workflow, values: Mapping[str, Any]) -> Workflow:
    return _found(await store.change(tx, workflow.id, values), workflow.slug)


def _found(workflow: Workflow | None, name: str) -> Workflow:
    if workflow is None:
        raise NotFound(f"there is no workflow {name}")
    return workflow
