"""Operators' routes for workflows and effects."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import uuid4

from fastapi import Body as InBody
from fastapi import Path, Query, Request, status
from pydantic import AliasChoices, Field, model_validator

from comfyfleet.api.admin import (
    AbleWorker,
    AbleWorkers,
    AdminEffectAnswer,
    AdminEffects,
    AiMark,
    MadeEffect,
    Model,
    OutputRule,
    RegisteredVersion,
    WorkflowAnswer,
    WorkflowDetail,
    Workflows,
)
from comfyfleet.api.console import (
    Drawing,
    MissingInFile,
    WorkflowDiff,
    WorkflowInspection,
    WorkflowOutput,
)
from comfyfleet.errors import InvalidInput, NotFound, Refused
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.catalog.draft import best_object_info, draft_workflow
from comfyfleet.server.catalog.layout import (
    DrawnVersion,
    diff_versions,
    draw,
    suggest_properties,
)
from comfyfleet.server.catalog.model import (
    EXAMPLES_MAX,
    EffectDefinition,
    EffectSettings,
    ExampleSide,
    RegisteredWorkflow,
    WorkflowDraft,
    WorkflowTerms,
)
from comfyfleet.server.catalog.payload import find_document
from comfyfleet.server.db import Tx
from comfyfleet.server.fleets import object_info
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import Fleet
from comfyfleet.server.http.admin.auth import Body, OperatorDep, admin_router
from comfyfleet.server.http.admin.properties import PropertyBody, property_answer
from comfyfleet.server.http.deps import NowDep, PlaneDep
from comfyfleet.server.http.examples import example_views
from comfyfleet.server.http.request_body import Tokens, VersionNumber
from comfyfleet.server.ingest import keep_example
from comfyfleet.server.notifications.service import record_audit
from comfyfleet.server.pipelines.run_state import request_wake
from comfyfleet.workflow.embedded import Opened, open_document
from comfyfleet.workflow.inspect import inspect

# Each object_info is megabytes in size, so documents are only compared with the newest ones.
OBJECT_INFOS_MAX = 10


PRICE_NAMES = AliasChoices("price_tokens", "credits_cost")


class TermsBody(Body):
    """The settings of a workflow. Omitted fields aren't changed."""

    required_capabilities: list[str] | None = Field(
        default=None, description="Capabilities that a worker must have.", max_length=200
    )
    run_limit_seconds: int | None = Field(
        default=None, description="Seconds per job. Default: COMFYFLEET_RUN_LIMIT_SECONDS."
    )
    price_tokens: Tokens | None = Field(
        default=None,
        validation_alias=PRICE_NAMES,
        description="If set, customers can use the workflow in graphs and pipelines at this price.",
    )
    is_withdrawn: bool = Field(
        default=False,
        description="Whether to stop offering the workflow. Active runs may still use it.",
    )
    output: OutputRule | None = Field(
        default=None,
        description="Whether a result must contain a file or a value. The default is required, or "
        "optional for a new workflow whose output nodes only show text.",
    )
    ai_mark: AiMark | None = Field(
        default=None,
        description="How delivered files are marked as AI-generated. auto (the default) decides by "
        "the prompt, generated and edited always mark them, and none never does.",
    )

    @model_validator(mode="before")
    @classmethod
    def _with_our_spelling(cls, body: Any) -> Any:
        """Accepts `is_active` as the opposite of `is_withdrawn`."""
        if not isinstance(body, dict) or "is_active" not in body or "is_withdrawn" in body:
            return body
        rest = {name: value for name, value in body.items() if name != "is_active"}
        is_active = body["is_active"]
        return {**rest, "is_withdrawn": not is_active if isinstance(is_active, bool) else is_active}

    def terms(self) -> WorkflowTerms:
        named = self.required_capabilities
        return WorkflowTerms(
            required_capabilities=None if named is None else frozenset(named),
            run_limit_seconds=self.run_limit_seconds,
            price_tokens=self.price_tokens,
            is_withdrawn=self.is_withdrawn or None,
            output=self.output,
            ai_mark=self.ai_mark,
        )


class NewWorkflow(TermsBody):
    slug: str = Field(
        description="Lowercase letters, digits, ., - and _. An existing slug gets a new version."
    )
    document: dict[str, Any] = Field(
        validation_alias=AliasChoices("document", "api_json"),
        description="A workflow saved by ComfyUI's editor, a prompt, or JSON that contains one.",
    )
    properties: list[PropertyBody] = Field(
        default_factory=list,
        validation_alias=AliasChoices("properties", "exposed_parameters"),
        description="The workflow's named inputs.",
    )
    output_node_id: str | int | None = Field(
        default=None,
        description="The node whose files are the result. The default is all output nodes.",
    )
    fleet: str | None = Field(
        default=None,
        description="The fleet to check against (SLUG/STAGE). The default is the best match.",
    )
    break_effects: bool = Field(
        default=False,
        description="Register it even if published effects become invalid and refuse jobs.",
    )
    is_draft: bool = Field(
        default=False,
        description="Don't use this version for new jobs until it is activated.",
    )


async def register(body: NewWorkflow, plane: ControlPlane, operator: str) -> RegisteredVersion:
    """Validates a workflow and registers it. The document is stored before the database rows."""
    reported, usual = await _object_infos(body.fleet, body.document, plane)
    draft = await asyncio.to_thread(_draft, body, [*reported, *usual], bool(reported))
    await catalog.store_document(plane.store, draft)
    now = plane.clock()
    async with plane.central.transaction() as tx:
        before = await catalog.properties_in_use(tx, body.slug)
        workflow, version = await catalog.register_workflow(
            tx,
            draft,
            body.terms(),
            now=now,
            run_limit_seconds=plane.settings.run_limit_seconds,
            is_draft=body.is_draft,
        )
        is_used = workflow.version == version.version
        if is_used and not body.break_effects:
            await catalog.require_no_broken_effects(tx, workflow, version.properties, before)
        capability_warnings = await catalog.capability_warnings(tx, workflow, version)
        if is_used:
            capability_warnings += await catalog.broken_effect_warnings(
                tx, workflow, version, before
            )
        await record_audit(
            tx,
            operator,
            "register_workflow",
            workflow.subject,
            now,
            version=version.version,
            document_hash=version.document_hash,
        )
    request_wake(plane.context)
    property_warnings = [
        warning for property_body in body.properties for warning in property_body.warnings()
    ]
    return RegisteredVersion(
        slug=workflow.slug,
        version=version.version,
        warnings=[*property_warnings, *draft.warnings, *capability_warnings],
        notes=list(draft.notes),
    )


def _draft(
    body: NewWorkflow, object_infos: list[Mapping[str, Any]], is_reported: bool
) -> WorkflowDraft:
    """Validates a workflow. Runs in a thread, because large workflows take a while."""
    object_info = best_object_info(body.document, object_infos)
    output = None if body.output_node_id is None else str(body.output_node_id)
    return draft_workflow(
        slug=body.slug,
        document=body.document,
        properties=[property_body.parsed() for property_body in body.properties],
        output_node_id=output,
        object_info=object_info if object_info is not None else {},
        is_reported=is_reported,
    )


async def _object_infos(
    fleet_name: str | None, document: Mapping[str, Any], plane: ControlPlane
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Returns the latest object_infos of fleets, and the built-in engine's if it is installed and
    needed."""
    async with plane.central.read() as tx:
        searched = (
            [await _fleet_by_name(tx, fleet_name)] if fleet_name else await fleets.list_fleets(tx)
        )
    keys = {fleet.object_info_key: fleet for fleet in searched if fleet.object_info_key}
    newest = list(keys.values())[-OBJECT_INFOS_MAX:]
    reported: list[Mapping[str, Any]] = []
    for fleet in newest:
        try:
            fleet_info = await object_info.read_object_info(plane.store, fleet)
        except NotFound:
            continue
        if fleet_info is not None:
            reported.append(fleet_info)
    if fleet_name and reported:
        return reported, []
    try:
        return reported, [catalog.engine_object_info()]
    except Refused:
        if reported or "nodes" not in document:
            return reported, []
        raise


async def _fleet_by_name(tx: Tx, name: str) -> Fleet:
    slug, _, stage = name.partition("/")
    try:
        return await fleets.get_fleet(tx, slug, stage or "production")
    except NotFound as error:
        raise InvalidInput(error.message, field="fleet") from None


router = admin_router()
FILE = {"type": "string", "format": "binary"}
WorkflowSlug = Annotated[str, Path(description="The workflow's slug.")]
Number = Annotated[VersionNumber | None, Query(description="The default is the active version.")]


class Chosen(Body):
    version: VersionNumber | None = Field(default=None, description="The version for new jobs.")
    break_effects: bool = Field(
        default=False,
        description="Activate it even if published effects become invalid and refuse jobs.",
    )


@router.post("/workflows", status_code=status.HTTP_201_CREATED, name="create")
async def create_workflow(
    body: NewWorkflow, plane: PlaneDep, operator: OperatorDep
) -> RegisteredVersion:
    """Registers a workflow, or a new version if the slug exists.

    If the workflow is invalid, the response is 422 with the property and the node, and nothing is
    stored.
    """
    return await register(body, plane, operator)


@router.post(
    "/workflows/inspect",
    openapi_extra={
        "requestBody": {"required": True, "content": {"application/octet-stream": {"schema": FILE}}}
    },
)
async def inspect_file(
    request: Request,
    plane: PlaneDep,
    fleet: Annotated[
        str | None, Query(description="SLUG/STAGE to compare with. The default is the best match.")
    ] = None,
) -> WorkflowInspection:
    """Inspects the workflow in a JSON, image or video file without storing it.

    Returns a drawing of the workflow, the inputs that can become properties, and the nodes and
    files that fleets lack.
    """
    opened = await asyncio.to_thread(open_document, await request.body())
    document = opened.workflow if opened.workflow is not None else opened.prompt or {}
    reported, usual = await _object_infos(fleet, document, plane)
    return await asyncio.to_thread(_inspection, opened, document, reported, usual)


async def suggested_properties(plane: ControlPlane, document: dict[str, Any]) -> list[PropertyBody]:
    """Suggests a property for each input of a workflow that can be set."""
    opened = _opened(document)
    reported, usual = await _object_infos(None, document, plane)

    def suggest() -> list[PropertyBody]:
        seen = inspect(opened, best_object_info(document, [*reported, *usual]))
        return [
            PropertyBody(name=suggestion.name, type=suggestion.type, binding=suggestion.binding)
            for suggestion in suggest_properties(seen)
        ]

    return await asyncio.to_thread(suggest)


def _inspection(
    opened: Opened,
    document: dict[str, Any],
    reported: Sequence[Mapping[str, Any]],
    usual: Sequence[Mapping[str, Any]],
) -> WorkflowInspection:
    seen = inspect(opened, best_object_info(document, [*reported, *usual]))
    missing = None
    if reported and seen.missing is not None:
        missing = MissingInFile(
            node_types=[node_type.class_type for node_type in seen.missing.node_types],
            files=[*(str(value.value) for value in seen.missing.values), *seen.missing.files],
        )
    return WorkflowInspection(
        file_kind=seen.file_kind,
        form=seen.form,
        document=document,
        drawing=draw(opened),
        properties=suggest_properties(seen),
        outputs=[
            WorkflowOutput(
                node_id=output.node.id,
                title=output.node.title,
                media=output.media,
                is_saved=output.saved,
            )
            for output in seen.makes
        ],
        node_types=[node_type.class_type for node_type in seen.node_types],
        files=[file.name for file in seen.files],
        missing=missing,
        notes=list(seen.notes),
    )


@router.get("/workflows/{slug}/drawing")
async def drawing(slug: WorkflowSlug, plane: PlaneDep, version: Number = None) -> Drawing:
    """Returns the drawing of a workflow version."""
    async with plane.central.read() as tx:
        version_row = await catalog.get_version(tx, await catalog.find_workflow(tx, slug), version)
    opened = _opened(await catalog.read_document(plane.store, version_row))
    return await asyncio.to_thread(draw, opened)


@router.get("/workflows/{slug}/diff")
async def diff(
    slug: WorkflowSlug,
    plane: PlaneDep,
    before: Annotated[VersionNumber, Query(description="The first version.")],
    after: Annotated[VersionNumber, Query(description="The second version.")],
) -> WorkflowDiff:
    """Compares the nodes, links, values, files and properties of two versions of a workflow."""
    async with plane.central.read() as tx:
        workflow = await catalog.find_workflow(tx, slug)
        versions = [await catalog.get_version(tx, workflow, number) for number in (before, after)]
    documents = [_opened(await catalog.read_document(plane.store, version)) for version in versions]
    reported, usual = await _object_infos(None, documents[0].workflow or {}, plane)

    def compare() -> WorkflowDiff:
        sides = []
        for version, opened in zip(versions, documents, strict=True):
            info = best_object_info(opened.workflow or opened.prompt or {}, [*reported, *usual])
            sides.append(DrawnVersion(opened, inspect(opened, info), version.properties))
        return diff_versions(*sides)

    return await asyncio.to_thread(compare)


def _opened(document: Mapping[str, Any]) -> Opened:
    kind, content = find_document(document)
    is_workflow = kind == "workflow"
    return Opened("json", content if is_workflow else None, None if is_workflow else content)


@router.get("/workflows")
async def list_workflows(plane: PlaneDep) -> Workflows:
    async with plane.central.read() as tx:
        answers = [await _workflow_answer(tx, row) for row in await catalog.list_workflows(tx)]
    return Workflows(workflows=answers)


@router.get("/workflows/{slug}", name="show")
async def show_workflow(
    slug: WorkflowSlug, plane: PlaneDep, version: Number = None
) -> WorkflowDetail:
    async with plane.central.read() as tx:
        workflow = await catalog.find_workflow(tx, slug)
        version_row = await catalog.get_version(tx, workflow, version)
        versions = await catalog.versions_of(tx, workflow)
        return WorkflowDetail(
            **(await _workflow_answer(tx, workflow)).model_dump(),
            kind=version_row.kind,
            document_hash=version_row.document_hash,
            output_node_id=version_row.output_node_id,
            properties=[property_answer(prop) for prop in version_row.properties],
            node_types=list(version_row.node_types),
            models=[Model(input=model.input, file=model.file) for model in version_row.models],
            versions=[row.version for row in versions],
            registered_at={row.version: row.created_at for row in versions},
        )


@router.get("/workflows/{slug}/document")
async def document(slug: WorkflowSlug, plane: PlaneDep, version: Number = None) -> dict[str, Any]:
    """Returns a workflow's document in its original form."""
    async with plane.central.read() as tx:
        version_row = await catalog.get_version(tx, await catalog.find_workflow(tx, slug), version)
    return await catalog.read_document(plane.store, version_row)


@router.get("/workflows/{slug}/workers")
async def able_workers(slug: WorkflowSlug, plane: PlaneDep, version: Number = None) -> AbleWorkers:
    """Lists the workers of the workflow's fleets, and the nodes and models that they lack."""
    async with plane.central.read() as tx:
        workflow = await catalog.find_workflow(tx, slug)
        version_row = await catalog.get_version(tx, workflow, version)
        rows = [
            AbleWorker(worker_id=name, fleet=fleet.name, can_run=not lack, missing=lack.as_json())
            for fleet in await fleets.fleets_with(tx, workflow.id)
            for name, lack in (
                await catalog.missing_in_fleet(tx, fleet, workflow, version_row)
            ).items()
        ]
    return AbleWorkers(workers=rows)


@router.patch("/workflows/{slug}")
async def change_terms(
    slug: WorkflowSlug, body: TermsBody, plane: PlaneDep, now: NowDep, operator: OperatorDep
) -> WorkflowAnswer:
    """Changes a workflow's settings, such as its price, without creating a new version."""

    async def change(tx: Tx, workflow: RegisteredWorkflow) -> RegisteredWorkflow:
        return await catalog.change_terms(tx, workflow, body.terms())

    details = body.model_dump(exclude_unset=True)
    return await _change_workflow(plane, slug, "change_workflow", change, operator, now, **details)


@router.post("/workflows/{slug}/activate")
async def activate(
    slug: WorkflowSlug,
    plane: PlaneDep,
    now: NowDep,
    operator: OperatorDep,
    body: Annotated[Chosen | None, InBody()] = None,
) -> WorkflowAnswer:
    """Activates a workflow, or another version of it, for new jobs."""
    version = body.version if body else None

    async def change(tx: Tx, workflow: RegisteredWorkflow) -> RegisteredWorkflow:
        if body and version is not None and not body.break_effects:
            version_row = await catalog.get_version(tx, workflow, version)
            before = await catalog.properties_in_use(tx, workflow.slug)
            await catalog.require_no_broken_effects(tx, workflow, version_row.properties, before)
        return await catalog.activate_version(tx, workflow, version=version)

    return await _change_workflow(plane, slug, "activate", change, operator, now, version=version)


@router.post("/workflows/{slug}/deactivate")
async def deactivate(
    slug: WorkflowSlug, plane: PlaneDep, now: NowDep, operator: OperatorDep
) -> WorkflowAnswer:
    """Stops accepting new jobs for a workflow. Queued jobs wait until it is active again."""
    return await _change_workflow(
        plane, slug, "deactivate", catalog.deactivate_version, operator, now
    )


@router.post("/workflows/{slug}/pause")
async def pause(
    slug: WorkflowSlug, plane: PlaneDep, now: NowDep, operator: OperatorDep
) -> WorkflowAnswer:
    """Pauses a workflow. New jobs are accepted but stay queued, and running jobs finish."""
    return await _change_workflow(plane, slug, "pause", catalog.pause_workflow, operator, now)


@router.post("/workflows/{slug}/resume")
async def resume(
    slug: WorkflowSlug, plane: PlaneDep, now: NowDep, operator: OperatorDep
) -> WorkflowAnswer:
    return await _change_workflow(plane, slug, "resume", catalog.resume_workflow, operator, now)


async def _change_workflow(
    plane: ControlPlane,
    slug: str,
    action: str,
    change: Callable[[Tx, RegisteredWorkflow], Awaitable[RegisteredWorkflow]],
    operator: str,
    now: datetime,
    **details: object,
) -> WorkflowAnswer:
    async with plane.central.transaction() as tx:
        workflow = await change(tx, await catalog.find_workflow(tx, slug))
        await record_audit(tx, operator, action, workflow.subject, now, **details)
        answer = await _workflow_answer(tx, workflow)
        worker_ids = [
            worker.worker_id
            for fleet in await fleets.fleets_with(tx, workflow.id)
            for worker in await fleets.workers_of(tx, fleet)
        ]
    # Wakes pending polls, so that the new state applies to them.
    plane.queue.order(worker_ids)
    request_wake(plane.context)
    return answer


async def _workflow_answer(tx: Tx, workflow: RegisteredWorkflow) -> WorkflowAnswer:
    return WorkflowAnswer(
        slug=workflow.slug,
        version=workflow.version,
        is_active=workflow.is_active,
        is_paused=workflow.is_paused,
        required_capabilities=sorted(workflow.required_capabilities),
        run_limit_seconds=workflow.run_limit_seconds,
        price_tokens=workflow.price_tokens,
        fleets=[fleet.name for fleet in await fleets.fleets_with(tx, workflow.id)],
        created_at=workflow.created_at,
        output=workflow.output,
        ai_mark=workflow.ai_mark,
    )


EffectSlug = Annotated[str, Path(description="The effect's slug.")]
Change = Callable[[Tx, EffectDefinition], Awaitable[EffectDefinition]]


class FaceBody(Body):
    """The settings of an effect. Omitted fields aren't changed. In a new effect, they have their
    defaults."""

    title: str | None = Field(default=None, description="The title. The default is the slug.")
    description: str | None = None
    preview_url: str | None = Field(default=None, description="An image or video of the result.")
    price_tokens: Tokens | None = Field(
        default=None, validation_alias=PRICE_NAMES, description="Price per job. The default is 0."
    )
    overrides: dict[str, Any] | None = Field(
        default=None, description="Property values that replace the workflow's defaults."
    )
    locked: list[str] | None = Field(
        default=None, description="Properties that customers can't see or set."
    )
    stage: str | None = Field(
        default=None, description="The stage of the effect's fleets. The default is production."
    )
    provider: Literal["self_hosted", "cloud"] | None = None
    published: bool | None = Field(
        default=None,
        validation_alias=AliasChoices("published", "is_active"),
        description="Whether customers can see and use the effect.",
    )
    max_upload_bytes: int | None = Field(
        default=None, description="Maximum size of the user's media."
    )
    media_types: list[str] | None = Field(
        default=None, description="Accepted MIME types, such as image/png. Empty means all types."
    )
    keep_metadata: bool | None = Field(
        default=None,
        description="Whether result files contain the prompt and workflow. The default is false.",
    )
    reuse: bool | None = Field(default=None, description="Whether identical jobs reuse results.")
    tags: list[str] | None = Field(
        default=None, description="Lowercase tags for the catalog.", examples=[["portrait"]]
    )

    def settings(self, before: EffectSettings) -> EffectSettings:
        values = {
            name: getattr(self, name) for name in self.model_fields_set if name != "published"
        }
        # null resets these fields. In all other fields, null has no effect.
        resettable = ("preview_url", "max_upload_bytes")
        changes = {
            name: value for name, value in values.items() if value is not None or name in resettable
        }
        effect_fields = {
            name: changes[name] for name in changes if name in EffectSettings.__slots__
        }
        for name in ("media_types", "locked", "tags"):
            if name in effect_fields:
                effect_fields[name] = tuple(effect_fields[name])
        published = before.is_published if self.published is None else self.published
        return replace(before, **effect_fields, is_published=published)


class NewEffect(FaceBody):
    slug: str = Field(
        description="Up to 100 lowercase letters, digits, ., - and _.", examples=["sepia"]
    )
    workflow_slug: str = Field(
        validation_alias=AliasChoices("workflow_slug", "workflow_id"),
        description="The slug of the effect's workflow.",
    )


@router.post("/effects", status_code=status.HTTP_201_CREATED, name="create")
async def create_effect(
    body: NewEffect, plane: PlaneDep, now: NowDep, operator: OperatorDep
) -> MadeEffect:
    """Creates an effect. Its overrides are checked against the workflow's properties. Customers see
    the effect after it is published."""
    settings = body.settings(EffectSettings())
    async with plane.central.transaction() as tx:
        effect = await catalog.create_effect(
            tx,
            effect_id=uuid4(),
            slug=body.slug,
            workflow=await _workflow_by_slug(tx, body.workflow_slug),
            settings=settings,
            now=now,
        )
        details = {"workflow": body.workflow_slug, **asdict(settings)}
        await record_audit(tx, operator, "create_effect", effect.subject, now, **details)
    return MadeEffect(id=effect.id, slug=effect.slug)


@router.get("/effects")
async def list_effects(
    plane: PlaneDep,
    workflow: Annotated[str | None, Query(description="Only effects of this workflow.")] = None,
) -> AdminEffects:
    """Lists all effects by slug, including unpublished ones."""
    async with plane.central.read() as tx:
        workflow_row = await catalog.workflow_by_slug(tx, workflow) if workflow else None
        effects = await catalog.list_effects(tx, workflow=workflow_row)
        slugs = {
            workflow_row.id: workflow_row.slug for workflow_row in await catalog.list_workflows(tx)
        }
    return AdminEffects(
        effects=[_effect_answer(plane, effect, slugs[effect.workflow_id]) for effect in effects]
    )


@router.get("/effects/{slug}", name="show")
async def show_effect(slug: EffectSlug, plane: PlaneDep) -> AdminEffectAnswer:
    async with plane.central.read() as tx:
        return await _read_effect_answer(tx, plane, await catalog.effect_by_slug(tx, slug))


@router.patch("/effects/{slug}")
async def change(
    slug: EffectSlug, body: FaceBody, plane: PlaneDep, now: NowDep, operator: OperatorDep
) -> AdminEffectAnswer:
    """Changes an effect. Jobs that were already submitted keep their price and prompt."""

    async def changed(tx: Tx, effect: EffectDefinition) -> EffectDefinition:
        return await catalog.update_effect(tx, effect, body.settings(effect.settings))

    details = body.model_dump(exclude_unset=True)
    return await _change_effect(plane, slug, "change_effect", changed, operator, now, **details)


ExamplePosition = Annotated[
    int, Path(ge=0, lt=EXAMPLES_MAX, description="The example's index, from 0.")
]


@router.put(
    "/effects/{slug}/examples/{position}/{side}",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                kind: {"schema": {"type": "string", "format": "binary"}}
                for kind in ("image/*", "video/*")
            },
        }
    },
)
async def set_example(
    slug: EffectSlug,
    position: ExamplePosition,
    side: Annotated[ExampleSide, Path(description="Which file to set: the input or the result.")],
    request: Request,
    plane: PlaneDep,
    now: NowDep,
    operator: OperatorDep,
) -> AdminEffectAnswer:
    """Sets an example image or video of the effect, sent as the request body. Its metadata is
    removed."""
    async with plane.central.read() as tx:
        await catalog.effect_by_slug(tx, slug)  # raises NotFound before the file is stored
    file = await keep_example(plane, await request.body())
    async with plane.central.transaction() as tx:
        effect = await catalog.lock_effect(tx, slug)
        effect, replaced = await catalog.set_example(tx, effect, position, side, file)
        details = {"position": position, "side": side, "size": file.size}
        await record_audit(tx, operator, "set_example", effect.subject, now, **details)
        answer = await _read_effect_answer(tx, plane, effect)
    request.app.state.examples.forget()
    plane.context.deferred.delete_objects(plane.store, [file.key for file in replaced])
    return answer


@router.delete("/effects/{slug}/examples/{position}")
async def remove_example(
    slug: EffectSlug,
    position: ExamplePosition,
    request: Request,
    plane: PlaneDep,
    now: NowDep,
    operator: OperatorDep,
) -> AdminEffectAnswer:
    """Removes an example. Later examples move up by one."""
    async with plane.central.transaction() as tx:
        effect = await catalog.lock_effect(tx, slug)
        effect, removed = await catalog.remove_example(tx, effect, position)
        await record_audit(tx, operator, "remove_example", effect.subject, now, position=position)
        answer = await _read_effect_answer(tx, plane, effect)
    request.app.state.examples.forget()
    plane.context.deferred.delete_objects(plane.store, [file.key for file in removed])
    return answer


@router.post("/effects/{slug}/publish")
async def publish(
    slug: EffectSlug, plane: PlaneDep, now: NowDep, operator: OperatorDep
) -> AdminEffectAnswer:
    """Publishes an effect if it is valid for the workflow's current version."""
    return await _change_effect(plane, slug, "publish", catalog.publish_effect, operator, now)


@router.post("/effects/{slug}/withdraw")
async def withdraw(
    slug: EffectSlug, plane: PlaneDep, now: NowDep, operator: OperatorDep
) -> AdminEffectAnswer:
    """Withdraws an effect. New jobs are refused, and submitted jobs continue."""
    return await _change_effect(plane, slug, "withdraw", catalog.withdraw_effect, operator, now)


async def _change_effect(
    plane: ControlPlane,
    slug: str,
    action: str,
    act: Change,
    operator: str,
    now: datetime,
    **details: object,
) -> AdminEffectAnswer:
    async with plane.central.transaction() as tx:
        effect = await act(tx, await catalog.effect_by_slug(tx, slug))
        await record_audit(tx, operator, action, effect.subject, now, **details)
        answer = await _read_effect_answer(tx, plane, effect)
    request_wake(plane.context)
    return answer


async def _workflow_by_slug(tx: Tx, slug: str) -> RegisteredWorkflow:
    try:
        return await catalog.workflow_by_slug(tx, slug)
    except NotFound as error:
        raise InvalidInput(error.message, field="workflow_slug") from None


async def _read_effect_answer(
    tx: Tx, plane: ControlPlane, effect: EffectDefinition
) -> AdminEffectAnswer:
    return _effect_answer(plane, effect, (await catalog.get_workflow(tx, effect.workflow_id)).slug)


def _effect_answer(
    plane: ControlPlane, effect: EffectDefinition, workflow_slug: str
) -> AdminEffectAnswer:
    settings = asdict(effect.settings)
    return AdminEffectAnswer(
        **{name: settings[name] for name in settings if name in AdminEffectAnswer.model_fields},
        id=effect.id,
        slug=effect.slug,
        workflow_slug=workflow_slug,
        examples=list(example_views(plane, effect.examples)),
        published=effect.settings.is_published,
        last_processing_time_seconds=effect.last_processing_time_seconds,
        typical_seconds=effect.typical_seconds,
        created_at=effect.created_at,
    )
