"""Registering a workflow, or the next version of one."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from comfyfleet.audit import service as audit
from comfyfleet.db import Tx
from comfyfleet.effects import assigning, documents
from comfyfleet.effects import service as effects
from comfyfleet.effects.catalogue import service as catalogue
from comfyfleet.effects.drafting import best_object_info, draft
from comfyfleet.effects.model import Draft, Property, Terms, Version, Workflow
from comfyfleet.effects.objectinfo import engine_object_info
from comfyfleet.fleets import objectinfo
from comfyfleet.fleets import service as fleets
from comfyfleet.fleets.model import Fleet
from comfyfleet.http.admin.properties import PropertyBody
from comfyfleet.http.admin.routing import Answer, Body
from comfyfleet.http.values import Tokens
from comfyfleet.kernel.errors import InvalidInput, NotFound, Refused
from comfyfleet.plane import Plane

# Each is some megabytes: a document is compared with the newest fleets' only.
OBJECT_INFOS_MAX = 10


class TermsBody(Body):
    """What is said of a workflow as a whole; what is left out stays as it is."""

    required_capabilities: list[str] | None = Field(
        default=None, description="A worker must have all of them to get a job.", max_length=200
    )
    run_limit_seconds: int | None = Field(
        default=None, description="How long a job may run; else COMFYFLEET_RUN_LIMIT_SECONDS."
    )
    price_tokens: Tokens | None = Field(
        default=None,
        description="Offers it in customers' graphs and pipelines, at this price; 0: for nothing.",
    )
    is_withdrawn: bool = Field(
        default=False, description="True: it is no longer offered; runs that go on may use it."
    )

    def terms(self) -> Terms:
        named = self.required_capabilities
        return Terms(
            required_capabilities=None if named is None else frozenset(named),
            run_limit_seconds=self.run_limit_seconds,
            price_tokens=self.price_tokens,
            is_withdrawn=self.is_withdrawn or None,
        )


class NewWorkflow(TermsBody):
    slug: str = Field(
        description="Lower-case letters, digits, ., - and _; a known one: its next version."
    )
    document: dict[str, Any] = Field(
        description="A workflow as ComfyUI's editor saves it, a prompt, or a JSON that holds one."
    )
    properties: list[PropertyBody] = Field(default_factory=list, description="Its named inputs.")
    output_node_id: str | int | None = Field(
        default=None,
        description="The node whose files are the result; else those of all output nodes.",
    )
    fleet: str | None = Field(
        default=None,
        description="SLUG/STAGE whose nodes it is checked against; else the fleet that knows most.",
    )
    break_effects: bool = Field(
        default=False,
        description="Register it though published effects don't fit it; they refuse jobs until changed.",
    )


class RegisteredVersion(Answer):
    slug: str
    version: int
    warnings: list[str] = Field(description="What could not be checked, and what nobody can run.")
    notes: list[str] = Field(default_factory=list, description="What will be known later.")


async def register(body: NewWorkflow, plane: Plane, operator: str) -> RegisteredVersion:
    """Checked as a whole, then the document is kept, then the rows are written."""
    reported, usual = await _object_infos(body, plane)
    made = await asyncio.to_thread(_draft, body, [*reported, *usual], bool(reported))
    await documents.keep(plane.store, made)
    now = plane.clock()
    async with plane.central.begin() as tx:
        before = await effects.properties_in_use(tx, body.slug)
        workflow, version = await effects.register(
            tx,
            made,
            body.terms(),
            now=now,
            run_limit_seconds=plane.settings.run_limit_seconds,
        )
        if not body.break_effects:
            await catalogue.require_unbroken(tx, workflow, version.properties, before)
        doubts = [
            *await assigning.doubts(tx, workflow, version),
            *await _broken(tx, workflow, version, before),
        ]
        await audit.record(
            tx,
            actor=operator,
            action="register_workflow",
            subject=workflow.subject,
            now=now,
            details={"version": version.version, "document_hash": version.document_hash},
        )
    told = [warning for each in body.properties for warning in each.warnings()]
    return RegisteredVersion(
        slug=workflow.slug,
        version=version.version,
        warnings=[*told, *made.warnings, *doubts],
        notes=list(made.notes),
    )


async def _broken(
    tx: Tx, workflow: Workflow, version: Version, before: Sequence[Property]
) -> list[str]:
    found = await catalogue.broken_by(tx, workflow, version.properties, before)
    return [f"the effect {effect.slug} does not fit any more: {why}" for effect, why in found]


def _draft(body: NewWorkflow, object_infos: list[Mapping[str, Any]], is_reported: bool) -> Draft:
    """Takes a while for a large workflow: not for the loop that serves everybody."""
    known = best_object_info(body.document, object_infos)
    output = None if body.output_node_id is None else str(body.output_node_id)
    return draft(
        slug=body.slug,
        document=body.document,
        properties=[each.parsed() for each in body.properties],
        output_node_id=output,
        object_info=known if known is not None else {},
        is_reported=is_reported,
    )


async def _object_infos(
    body: NewWorkflow, plane: Plane
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """What the fleets last reported, and the built-in engine's if it is installed and of use."""
    async with plane.central.look() as tx:
        found = [await _named(tx, body.fleet)] if body.fleet else await fleets.all_of(tx)
    keys = {each.object_info_key: each for each in found if each.object_info_key}
    newest = list(keys.values())[-OBJECT_INFOS_MAX:]
    reported: list[Mapping[str, Any]] = []
    for fleet in newest:
        try:
            found_there = await objectinfo.read(plane.store, fleet)
        except NotFound:
            continue
        if found_there is not None:
            reported.append(found_there)
    if body.fleet and reported:
        return reported, []
    try:
        return reported, [engine_object_info()]
    except Refused:
        if reported or "nodes" not in body.document:
            return reported, []
        raise


async def _named(tx: Tx, name: str) -> Fleet:
    slug, _, stage = name.partition("/")
    try:
        return await fleets.get(tx, slug, stage or "production")
    except NotFound as error:
        raise InvalidInput(error.message, field="fleet") from None
