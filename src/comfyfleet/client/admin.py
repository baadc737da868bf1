"""The admin API, for operators: workflows, effects, fleets, workers, tenants, jobs, the queue, the audit log."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import quote
from uuid import UUID

from comfyfleet.api.admin import (
    AdminEffectAnswer,
    AdminEffects,
    AssignmentAnswer,
    Balance,
    Books,
    DispatchPage,
    DispatchSeen,
    DispatchWhole,
    Entries,
    EntryAnswer,
    FleetAnswer,
    FleetDetails,
    Fleets,
    FleetSecret,
    JobIds,
    JobListed,
    JobPage,
    JobSeen,
    MadeEffect,
    MadeOperator,
    MadeTenant,
    OperatorAnswer,
    Operators,
    RegisteredVersion,
    Repaired,
    RetriedDispatch,
    TenantAnswer,
    Tenants,
    WorkerAnswer,
    WorkerDetail,
    Workers,
    WorkflowAnswer,
    WorkflowDetail,
    Workflows,
)
from comfyfleet.client.transport import PAGE, Answer, ApiCalls, fetch_pages, parse_answer
from comfyfleet.transport.http import Call

PREFIX = "/api/admin"
PRODUCTION = "production"


class AdminApi:
    """Needs the key of an operator. Keywords that a method passes on are fields of the API."""

    def __init__(self, calls: ApiCalls) -> None:
        self._calls = calls

    async def _get(self, kind: type[Answer], *path: object, **query: Any) -> Answer:
        call = Call("GET", _path(path), params=query)
        return parse_answer(kind, await self._calls.ask(call))

    async def _send(
        self, kind: type[Answer], method: str, *path: object, body: Mapping[str, Any] | None = None
    ) -> Answer:
        call = Call(method, _path(path), body if body is not None else {})
        return parse_answer(kind, await self._calls.ask(call))

    # Workflows and effects

    async def workflows(self) -> list[WorkflowAnswer]:
        return (await self._get(Workflows, "workflows")).workflows

    async def workflow(self, slug: str, *, version: int | None = None) -> WorkflowDetail:
        return await self._get(WorkflowDetail, "workflows", slug, version=version)

    async def register_workflow(
        self, slug: str, document: Mapping[str, Any], **fields: Any
    ) -> RegisteredVersion:
        """Under a slug that exists: its next version."""
        body = {"slug": slug, "document": dict(document), **fields}
        return await self._send(RegisteredVersion, "POST", "workflows", body=body)

    async def effects(self) -> list[AdminEffectAnswer]:
        return (await self._get(AdminEffects, "effects")).effects

    async def create_effect(self, slug: str, workflow_slug: str, **fields: Any) -> MadeEffect:
        """Customers see it once it is published (`published=True`)."""
        body = {"slug": slug, "workflow_slug": workflow_slug, **fields}
        return await self._send(MadeEffect, "POST", "effects", body=body)

    async def change_effect(self, slug: str, **fields: Any) -> AdminEffectAnswer:
        return await self._send(AdminEffectAnswer, "PATCH", "effects", slug, body=fields)

    # Fleets and workers

    async def fleets(self) -> list[FleetAnswer]:
        return (await self._get(Fleets, "fleets")).fleets

    async def fleet(self, slug: str, stage: str = PRODUCTION) -> FleetDetails:
        return await self._get(FleetDetails, "fleets", slug, stage)

    async def create_fleet(self, slug: str, **fields: Any) -> FleetSecret:
        """Its `secret`, with which workers join, is shown this once."""
        return await self._send(FleetSecret, "POST", "fleets", body={"slug": slug, **fields})

    async def assign_workflows(
        self, slug: str, workflow_slugs: Sequence[str], *, stage: str = PRODUCTION
    ) -> AssignmentAnswer:
        """The fleet runs these, and no others."""
        body = {"workflow_slugs": list(workflow_slugs)}
        return await self._send(
            AssignmentAnswer, "PUT", "fleets", slug, stage, "workflows", body=body
        )

    async def workers(self, *, fleet: str | None = None) -> AsyncIterator[WorkerAnswer]:
        """By id; `fleet` is SLUG/STAGE."""
        query = {"fleet": fleet}
        async for page in fetch_pages(self._calls, f"{PREFIX}/workers", Workers, query, by="after"):
            for each in page.workers:
                yield each

    async def worker(self, worker_id: str) -> WorkerDetail:
        return await self._get(WorkerDetail, "workers", worker_id)

    async def act_on_worker(
        self, worker_id: str, act: Literal["approve", "revoke", "drain", "undrain"]
    ) -> WorkerAnswer:
        return await self._send(WorkerAnswer, "POST", "workers", worker_id, act)

    # Tenants

    async def tenants(self) -> list[TenantAnswer]:
        return (await self._get(Tenants, "tenants")).tenants

    async def create_tenant(self, name: str, *, email: str | None = None) -> MadeTenant:
        """With its first user and that user's `key`, which is shown this once."""
        return await self._send(MadeTenant, "POST", "tenants", body={"name": name, "email": email})

    async def credit(
        self, tenant_id: UUID, user_id: UUID, amount: int, *, provider_transaction_id: str
    ) -> int:
        """The balance after a payment, which counts once however often it is sent."""
        path = _path(("tenants", tenant_id, "wallets", user_id, "credits"))
        body = {"amount": amount, "provider_transaction_id": provider_transaction_id}
        answer = await self._calls.ask(Call("POST", path, body, is_repeatable=True))
        return parse_answer(Balance, answer).balance

    async def verify_ledger(self, *, tenant_id: UUID | None = None) -> Books:
        return await self._get(Books, "ledger", tenant_id=tenant_id)

    # Jobs and the queue

    async def submit(self, workflow_slug: str, **fields: Any) -> JobIds:
        """One job, or `count` alike; each draws its own seed."""
        return await self._send(
            JobIds, "POST", "jobs", body={"workflow_slug": workflow_slug, **fields}
        )

    async def jobs(self, *, page_size: int = PAGE, **filters: Any) -> AsyncIterator[JobListed]:
        """Of all tenants, the newest first; those of a pool that is down are left out."""
        query = {**filters, "limit": page_size}
        async for page in fetch_pages(self._calls, f"{PREFIX}/jobs", JobPage, query, by="after"):
            for each in page.jobs:
                yield each

    async def job(self, job_id: UUID | str) -> JobSeen:
        return await self._get(JobSeen, "jobs", job_id)

    async def dispatches(
        self, *, page_size: int = PAGE, **filters: Any
    ) -> AsyncIterator[DispatchSeen]:
        """The newest first."""
        query = {**filters, "limit": page_size}
        async for page in fetch_pages(self._calls, f"{PREFIX}/dispatches", DispatchPage, query):
            for each in page.dispatches:
                yield each

    async def dispatch(self, dispatch_id: int) -> DispatchWhole:
        """With its attempts, and why it is not running."""
        return await self._get(DispatchWhole, "dispatches", dispatch_id)

    async def cancel_dispatch(self, dispatch_id: int) -> DispatchSeen:
        return await self._send(DispatchSeen, "POST", "dispatches", dispatch_id, "cancel")

    async def retry_dispatch(self, dispatch_id: int) -> UUID:
        """The id of a new job with the same prompt and files."""
        return (
            await self._send(RetriedDispatch, "POST", "dispatches", dispatch_id, "retry")
        ).job_id

    async def reprioritise(self, dispatch_id: int, priority: int) -> DispatchSeen:
        path = ("dispatches", dispatch_id, "reprioritise")
        return await self._send(DispatchSeen, "POST", *path, body={"priority": priority})

    async def reconcile(self, *, after: str | None = None) -> Repaired:
        """Repairs a part of the queue; call it again with `after=next` until `next` is None."""
        return await self._send(Repaired, "POST", "reconcile", body={"after": after})

    # Operators

    async def operators(self) -> list[OperatorAnswer]:
        return (await self._get(Operators, "operators")).operators

    async def add_operator(
        self, name: str, *, role: Literal["viewer", "operator", "owner"] = "operator"
    ) -> MadeOperator:
        """With a `key` of their own, which is shown this once."""
        return await self._send(
            MadeOperator, "POST", "operators", body={"name": name, "role": role}
        )

    async def revoke_operator(self, name: str) -> OperatorAnswer:
        return await self._send(OperatorAnswer, "POST", "operators", name, "revoke")

    async def audit(self, *, page_size: int = PAGE, **filters: Any) -> AsyncIterator[EntryAnswer]:
        """The newest first; `filters` are action, subject, actor, tenant, since and until."""
        query = {**filters, "limit": page_size}
        async for page in fetch_pages(self._calls, f"{PREFIX}/audit", Entries, query):
            for each in page.entries:
                yield each


def _path(parts: Sequence[object]) -> str:
    return "/".join((PREFIX, *(quote(str(part), safe="") for part in parts)))
