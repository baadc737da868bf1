"""Routes that let the user of `comfyfleet up` register workflows for pipelines without the help of
an operator."""

import asyncio
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Request
from pydantic import Field

from comfyfleet.api.admin import RegisteredVersion
from comfyfleet.api.values import Response
from comfyfleet.errors import NotFound
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.http.admin import catalog as registration
from comfyfleet.server.http.deps import PlaneDep, local_access_of, problems
from comfyfleet.server.http.public.auth import Reader, Writer
from comfyfleet.server.http.request_body import Body, JsonRoute, Text
from comfyfleet.server.jobs import customer, lists
from comfyfleet.server.jobs.heartbeat import sent_prompt
from comfyfleet.server.maintenance.embedded_fleet import LOCAL, LOCAL_TENANT
from comfyfleet.server.tenants.model import Caller

router = APIRouter(
    prefix="/api/local",
    tags=["pipelines"],
    route_class=JsonRoute,
    responses=problems(400, 401, 403, 404, 413, 422, 429, 503),
)
NAME_CHARACTERS_MAX = 60
HASH_CHARACTERS = 12
_NOT_IN_SLUG = re.compile(r"[^a-z0-9]+")


class LocalWorkflow(Body):
    name: Text = Field(
        min_length=1,
        max_length=200,
        description="A name from which the slug is derived, such as the file name.",
    )
    document: dict[str, Any] = Field(
        description="A workflow saved by ComfyUI's editor, a prompt, or JSON that contains one."
    )


class LocalWorkflowAnswer(Response):
    slug: str = Field(description="The workflow's name in steps of pipelines.")
    properties: dict[str, str] = Field(description="The types of the properties, by name.")


@router.post("/workflows")
async def register_local(
    body: LocalWorkflow, plane: PlaneDep, request: Request, caller: Writer
) -> LocalWorkflowAnswer:
    """Registers a free workflow for the local user of `comfyfleet up`.

    All inputs that can be set become properties. The slug contains a hash of the document, so
    registering the same document again returns the same workflow. Registered workflows never
    change.
    """
    _require_local(request, caller)
    slug = _slug(body.name, body.document)
    if not await _is_registered(plane, slug):
        await _register(plane, slug, body.document)
    async with plane.central.read() as tx:
        version = await catalog.get_version(tx, await catalog.find_workflow(tx, slug))
    return LocalWorkflowAnswer(
        slug=slug, properties={prop.name: prop.type for prop in version.properties}
    )


class LocalPrompt(Response):
    prompt: dict[str, Any] | None = Field(
        description="The prompt of the last attempt, or null after COMFYFLEET_PROMPT_KEEP_DAYS."
    )


@router.get("/jobs/{job_id}/prompt")
async def show_prompt(
    job_id: UUID, plane: PlaneDep, request: Request, caller: Reader
) -> LocalPrompt:
    """Returns the prompt of a job. Only the local user of `comfyfleet up` can call this route,
    because the workflow belongs to this user as well."""
    _require_local(request, caller)
    job = await customer.get_job(plane.context, caller.tenant.id, caller.user_id, job_id)
    sent = [sent_prompt(job, attempt) for attempt in await lists.attempts_of(plane.context, job)]
    return LocalPrompt(prompt=next(filter(None, reversed(sent)), dict(job.spec.prompt) or None))


def _require_local(request: Request, caller: Caller) -> None:
    if local_access_of(request) is None or caller.tenant.id != LOCAL_TENANT:
        raise NotFound(
            "only the local user of `comfyfleet up` can register workflow files and view prompts",
            hint="An operator can register workflows: comfyfleet admin workflows register",
        )


def _slug(name: str, document: Mapping[str, Any]) -> str:
    plain = _NOT_IN_SLUG.sub("-", name.lower()).strip("-")[:NAME_CHARACTERS_MAX] or "workflow"
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:HASH_CHARACTERS]}"


async def _is_registered(plane: ControlPlane, slug: str) -> bool:
    async with plane.central.read() as tx:
        try:
            await catalog.find_workflow(tx, slug)
        except NotFound:
            return False
    return True


async def _register(plane: ControlPlane, slug: str, document: dict[str, Any]) -> RegisteredVersion:
    suggested = await registration.suggested_properties(plane, document)
    new = await asyncio.to_thread(
        registration.NewWorkflow,
        slug=slug,
        document=document,
        properties=suggested,
        price_tokens=0,
    )
    return await registration.register(new, plane, LOCAL)
