"""The admin API for operators: workflows, effects, fleets, workers, tenants, jobs, the queue and
the audit log."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote
from uuid import UUID

from comfyfleet.api.admin import (
    AbleWorker,
    AbleWorkers,
    AdminEffectAnswer,
    AdminEffects,
    AdminKeyAnswer,
    AdminKeys,
    AdminMadeKey,
    AdminTransactionAnswer,
    AdminTransactions,
    AdminWalletAnswer,
    AdminWallets,
    AssignmentAnswer,
    Attempts,
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
    NewKey,
    OperatorAnswer,
    Operators,
    ReadingAnswer,
    Readings,
    RegisteredVersion,
    Repaired,
    RetriedDispatch,
    Storage,
    TenantAnswer,
    Tenants,
    UserAnswer,
    Users,
    WorkerAnswer,
    WorkerDetail,
    Workers,
    WorkerSeen,
    WorkflowAnswer,
    WorkflowDetail,
    Workflows,
)
from comfyfleet.api.console import (
    Alert,
    Alerts,
    BulkAnswer,
    Drawing,
    FoundThing,
    FoundThings,
    JobCountsAnswer,
    JobDetails,
    Matrix,
    Overview,
    ReplayedJob,
    SettingsAnswer,
    WorkflowDiff,
    WorkflowInspection,
)
from comfyfleet.client.files import upload_source, upload_to
from comfyfleet.client.transport import PAGE, Answer, ApiCalls, fetch_pages, parse_answer
from comfyfleet.transport.http import Call

PREFIX = "/api/admin"
PRODUCTION = "production"


class AdminApi:
    """Calls the admin API. Requires an operator's key. Methods send additional keyword arguments as
    fields of the request."""

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
        """Registers a workflow. If the slug exists, registers its next version."""
        body = {"slug": slug, "document": dict(document), **fields}
        return await self._send(RegisteredVersion, "POST", "workflows", body=body)

    async def change_workflow(self, slug: str, **fields: Any) -> WorkflowAnswer:
        """Changes capabilities, run limit or price without a new version. `is_withdrawn=True`
        withdraws the workflow."""
        return await self._send(WorkflowAnswer, "PATCH", "workflows", slug, body=fields)

    async def act_on_workflow(
        self, slug: str, act: Literal["activate", "deactivate", "pause", "resume"], **fields: Any
    ) -> WorkflowAnswer:
        """Changes the state of a workflow. `activate` can also select another `version`."""
        return await self._send(WorkflowAnswer, "POST", "workflows", slug, act, body=fields)

    async def inspect_workflow(
        self, file: bytes, *, fleet: str | None = None
    ) -> WorkflowInspection:
        """Returns the content of a JSON file, image or video: the drawing, the inputs that can be
        exposed, and the missing requirements."""
        query = {} if fleet is None else {"fleet": fleet}
        call = Call("POST", f"{PREFIX}/workflows/inspect", content=file, params=query)
        return parse_answer(WorkflowInspection, await self._calls.ask(call))

    async def workflow_drawing(self, slug: str, *, version: int | None = None) -> Drawing:
        return await self._get(Drawing, "workflows", slug, "drawing", version=version)

    async def diff_workflow(self, slug: str, before: int, after: int) -> WorkflowDiff:
        """Returns the differences between two versions."""
        return await self._get(WorkflowDiff, "workflows", slug, "diff", before=before, after=after)

    async def able_workers(self, slug: str) -> list[AbleWorker]:
        """Returns the workers of the workflow's fleets, with the missing requirements of each."""
        return (await self._get(AbleWorkers, "workflows", slug, "workers")).workers

    async def effects(self) -> list[AdminEffectAnswer]:
        return (await self._get(AdminEffects, "effects")).effects

    async def effect(self, slug: str) -> AdminEffectAnswer:
        return await self._get(AdminEffectAnswer, "effects", slug)

    async def create_effect(self, slug: str, workflow_slug: str, **fields: Any) -> MadeEffect:
        """Creates an effect. Customers see it once it is published (`published=True`)."""
        body = {"slug": slug, "workflow_slug": workflow_slug, **fields}
        return await self._send(MadeEffect, "POST", "effects", body=body)

    async def change_effect(self, slug: str, **fields: Any) -> AdminEffectAnswer:
        return await self._send(AdminEffectAnswer, "PATCH", "effects", slug, body=fields)

    async def act_on_effect(
        self, slug: str, act: Literal["publish", "withdraw"]
    ) -> AdminEffectAnswer:
        return await self._send(AdminEffectAnswer, "POST", "effects", slug, act)

    async def set_example(
        self,
        slug: str,
        content: bytes,
        *,
        side: Literal["before", "after"] = "after",
        position: int = 0,
    ) -> AdminEffectAnswer:
        """Sets an image or video that shows customers the input or output of an effect."""
        path = _path(("effects", slug, "examples", position, side))
        call = Call("PUT", path, content=content, is_repeatable=True)
        return parse_answer(AdminEffectAnswer, await self._calls.ask(call))

    async def remove_example(self, slug: str, position: int = 0) -> AdminEffectAnswer:
        """Removes an example. Those after it move up by one position."""
        return await self._send(AdminEffectAnswer, "DELETE", "effects", slug, "examples", position)

    # Fleets and workers

    async def fleets(self) -> list[FleetAnswer]:
        return (await self._get(Fleets, "fleets")).fleets

    async def fleet(self, slug: str, stage: str = PRODUCTION) -> FleetDetails:
        return await self._get(FleetDetails, "fleets", slug, stage)

    async def create_fleet(self, slug: str, **fields: Any) -> FleetSecret:
        """Creates a fleet. The answer contains the `secret` that workers join with, which is shown
        only once."""
        return await self._send(FleetSecret, "POST", "fleets", body={"slug": slug, **fields})

    async def assign_workflows(
        self, slug: str, workflow_slugs: Sequence[str], *, stage: str = PRODUCTION
    ) -> AssignmentAnswer:
        """Sets the workflows of a fleet. The fleet runs no other workflows."""
        body = {"workflow_slugs": list(workflow_slugs)}
        return await self._send(
            AssignmentAnswer, "PUT", "fleets", slug, stage, "workflows", body=body
        )

    async def rotate_fleet_secret(self, slug: str, stage: str = PRODUCTION) -> FleetSecret:
        """Replaces a fleet's secret. The old one becomes invalid immediately. Workers that have
        joined keep their keys."""
        return await self._send(FleetSecret, "POST", "fleets", slug, stage, "rotate-secret")

    async def set_cap(self, slug: str, max_workers: int, *, stage: str = PRODUCTION) -> FleetAnswer:
        """Sets the maximum number of workers. A lower limit removes no workers, but no more can
        join."""
        body = {"max_workers": max_workers}
        return await self._send(FleetAnswer, "PUT", "fleets", slug, stage, "cap", body=body)

    async def set_starts_within(
        self, slug: str, seconds: int | None, *, stage: str = PRODUCTION
    ) -> FleetAnswer:
        """Sets how many seconds the fleet's machines take to start on demand. None means the
        default for all fleets."""
        body = {"seconds": seconds}
        return await self._send(
            FleetAnswer, "PUT", "fleets", slug, stage, "starts-within", body=body
        )

    async def set_approval(
        self, slug: str, approval: Literal["auto", "manual"], *, stage: str = PRODUCTION
    ) -> FleetAnswer:
        """Sets whether new workers need approval. Workers that have already joined are not
        affected."""
        body = {"approval": approval}
        return await self._send(FleetAnswer, "PUT", "fleets", slug, stage, "approval", body=body)

    async def workers(self, *, fleet: str | None = None) -> AsyncIterator[WorkerSeen]:
        """Yields workers, ordered by id. `fleet` is SLUG/STAGE."""
        query = {"fleet": fleet}
        async for page in fetch_pages(self._calls, f"{PREFIX}/workers", Workers, query, by="after"):
            for worker in page.workers:
                yield worker

    async def matrix(self) -> Matrix:
        """Returns which workers can run which workflows, and the missing requirements of the
        others."""
        return await self._get(Matrix, "matrix")

    async def worker(self, worker_id: str) -> WorkerDetail:
        return await self._get(WorkerDetail, "workers", worker_id)

    async def act_on_worker(
        self, worker_id: str, act: Literal["approve", "revoke", "drain", "undrain"]
    ) -> WorkerAnswer:
        return await self._send(WorkerAnswer, "POST", "workers", worker_id, act)

    async def rotate_worker_key(self, worker_id: str, *, now: bool = False) -> str:
        """Replaces a worker's key and returns the new one, which is shown only once. The worker
        receives it automatically. With `now`, the old key becomes invalid immediately."""
        path = ("workers", worker_id, "rotate-token")
        return (await self._send(NewKey, "POST", *path, body={"now": now})).token

    async def readings(
        self, worker_id: str, *, hours: float = 1, points: int | None = None
    ) -> list[ReadingAnswer]:
        """Returns GPU, memory, temperature, CPU and disk readings of the last `hours`. Returns at
        most `points` readings, evenly spaced."""
        query = {"hours": hours, **({} if points is None else {"points": points})}
        return (await self._get(Readings, "workers", worker_id, "readings", **query)).readings

    # Tenants, their users and wallets

    async def tenants(self) -> list[TenantAnswer]:
        return (await self._get(Tenants, "tenants")).tenants

    async def create_tenant(self, name: str, *, email: str | None = None) -> MadeTenant:
        """Creates a tenant with its first user. The answer contains the user's `key`, which is
        shown only once."""
        return await self._send(MadeTenant, "POST", "tenants", body={"name": name, "email": email})

    async def tenant(self, tenant_id: UUID) -> TenantAnswer:
        return await self._get(TenantAnswer, "tenants", tenant_id)

    async def set_limits(self, tenant_id: UUID, **fields: Any) -> TenantAnswer:
        """Sets `min_priority`, `max_priority` and `max_queued`. Omitted fields use the defaults
        from the settings."""
        return await self._send(TenantAnswer, "PUT", "tenants", tenant_id, "limits", body=fields)

    async def set_retention(self, tenant_id: UUID, days: int | None) -> TenantAnswer:
        """Sets after how many days media and files are deleted. None means the default from the
        settings."""
        body = {"retention_days": days}
        return await self._send(TenantAnswer, "PUT", "tenants", tenant_id, "retention", body=body)

    async def set_quota(self, tenant_id: UUID, max_storage_bytes: int | None) -> TenantAnswer:
        """Sets the storage limit. None means the default from the settings."""
        body = {"max_storage_bytes": max_storage_bytes}
        return await self._send(TenantAnswer, "PUT", "tenants", tenant_id, "quota", body=body)

    async def storage(self, tenant_id: UUID) -> Storage:
        return await self._get(Storage, "tenants", tenant_id, "storage")

    async def erase(self, tenant_id: UUID) -> TenantAnswer:
        """Starts to delete all private data permanently. `erased_at` is set when that is
        complete."""
        return await self._send(TenantAnswer, "POST", "tenants", tenant_id, "erase")

    async def users(self, tenant_id: UUID, *, page_size: int = PAGE) -> AsyncIterator[UserAnswer]:
        """Yields the users of a tenant, oldest first."""
        path, query = _path(("tenants", tenant_id, "users")), {"limit": page_size}
        async for page in fetch_pages(self._calls, path, Users, query, by="after"):
            for user in page.users:
                yield user

    async def create_user(self, tenant_id: UUID, **fields: Any) -> UserAnswer:
        """Creates a user with `email` and `name`, without a key."""
        return await self._send(UserAnswer, "POST", "tenants", tenant_id, "users", body=fields)

    async def act_on_user(
        self, tenant_id: UUID, user_id: UUID, act: Literal["activate", "deactivate"]
    ) -> UserAnswer:
        """Activates or deactivates a user. Deactivation revokes all the user's keys. Submitted jobs
        continue."""
        return await self._send(UserAnswer, "POST", "tenants", tenant_id, "users", user_id, act)

    async def keys(self, tenant_id: UUID, user_id: UUID) -> list[AdminKeyAnswer]:
        return (await self._get(AdminKeys, "tenants", tenant_id, "users", user_id, "keys")).keys

    async def create_key(self, tenant_id: UUID, user_id: UUID, **fields: Any) -> AdminMadeKey:
        """Creates a key. The answer contains the `key`, which is shown only once. `name`, `scopes`
        and `expires_at` are optional."""
        path = ("tenants", tenant_id, "users", user_id, "keys")
        return await self._send(AdminMadeKey, "POST", *path, body=fields)

    async def revoke_key(self, tenant_id: UUID, user_id: UUID, key_id: UUID) -> AdminKeyAnswer:
        path = ("tenants", tenant_id, "users", user_id, "keys", key_id, "revoke")
        return await self._send(AdminKeyAnswer, "POST", *path)

    async def balance(self, tenant_id: UUID, user_id: UUID) -> int:
        return (await self._get(Balance, "tenants", tenant_id, "wallets", user_id)).balance

    async def wallets(
        self, tenant_id: UUID, *, page_size: int = PAGE
    ) -> AsyncIterator[AdminWalletAnswer]:
        """Yields the wallets of all users that have ever had tokens, ordered by user."""
        path, query = _path(("tenants", tenant_id, "wallets")), {"limit": page_size}
        async for page in fetch_pages(self._calls, path, AdminWallets, query, by="after"):
            for wallet in page.wallets:
                yield wallet

    async def transactions(
        self, tenant_id: UUID, user_id: UUID, *, page_size: int = PAGE
    ) -> AsyncIterator[AdminTransactionAnswer]:
        """Yields transactions, newest first."""
        path = _path(("tenants", tenant_id, "wallets", user_id, "transactions"))
        query = {"limit": page_size}
        async for page in fetch_pages(self._calls, path, AdminTransactions, query):
            for transaction in page.transactions:
                yield transaction

    async def credit(
        self,
        tenant_id: UUID,
        user_id: UUID,
        amount: int,
        *,
        provider_transaction_id: str,
        reason: str | None = None,
    ) -> int:
        """Records a payment and returns the new balance. Repeating it with the same transaction id
        has no effect. `reason` is stored in the audit log."""
        path = _path(("tenants", tenant_id, "wallets", user_id, "credits"))
        body: dict[str, Any] = {
            "amount": amount,
            "provider_transaction_id": provider_transaction_id,
        }
        if reason:
            body["reason"] = reason
        answer = await self._calls.ask(Call("POST", path, body, is_repeatable=True))
        return parse_answer(Balance, answer).balance

    async def verify_ledger(self, *, tenant_id: UUID | None = None) -> Books:
        return await self._get(Books, "ledger", tenant_id=tenant_id)

    # Jobs and the queue

    async def upload(
        self,
        source: Path | bytes,
        *,
        filename: str | None = None,
        content_type: str | None = None,
        tenant_id: UUID | str | None = None,
    ) -> UUID:
        """Uploads a file and returns its id for `submit(files={name: id})`. Without a tenant, it
        belongs to the tenant `default`."""
        file = upload_source(source, filename=filename, content_type=content_type)
        fields = {} if tenant_id is None else {"tenant_id": str(tenant_id)}
        return await upload_to(self._calls, f"{PREFIX}/uploads", file, None, **fields)

    async def submit(self, workflow_slug: str, **fields: Any) -> JobIds:
        """Submits a job, or `count` identical jobs, each with its own random seed."""
        return await self._send(
            JobIds, "POST", "jobs", body={"workflow_slug": workflow_slug, **fields}
        )

    async def jobs(self, *, page_size: int = PAGE, **filters: Any) -> AsyncIterator[JobListed]:
        """Yields the jobs of all tenants, newest first. Jobs in a pool that is down are left
        out."""
        query = {**filters, "limit": page_size}
        async for page in fetch_pages(self._calls, f"{PREFIX}/jobs", JobPage, query, by="after"):
            for job in page.jobs:
                yield job

    async def job(self, job_id: UUID | str) -> JobSeen:
        return await self._get(JobSeen, "jobs", job_id)

    async def job_details(self, job_id: UUID | str, *, files: bool = True) -> JobDetails:
        """Returns the job with its attempts, prompt, files, error and audit log. Access to customer
        files is audited."""
        return await self._get(JobDetails, "jobs", job_id, "details", files=files)

    async def count_jobs(self, **filters: Any) -> JobCountsAnswer:
        """Returns the number of jobs by status, up to a limit. `filters` are tenant, workflow,
        effect, since and until."""
        return await self._get(JobCountsAnswer, "jobs", "counts", **filters)

    async def act_on_jobs(
        self,
        act: Literal["cancel", "retry", "reprioritise"],
        *,
        ids: Sequence[UUID | str] | None = None,
        **fields: Any,
    ) -> BulkAnswer:
        """Acts on jobs by id, or on all jobs that match `filter`. Repeat the call with `after=next`
        until `next` is None."""
        named = {} if ids is None else {"ids": [str(job_id) for job_id in ids]}
        body = {"act": act, **named, **fields}
        return await self._send(BulkAnswer, "POST", "jobs", "bulk", body=body)

    async def replay(self, job_id: UUID | str, **fields: Any) -> UUID:
        """Starts a new job with the same prompt and files, and returns its id. The tenant isn't
        charged for it."""
        return (await self._send(ReplayedJob, "POST", "jobs", job_id, "replay", body=fields)).job_id

    async def overview(self, range: Literal["1h", "24h", "7d"] = "1h") -> Overview:
        """Returns the current load, a summary of the last hour, day or week, and what needs an
        operator's attention."""
        return await self._get(Overview, "overview", range=range)

    async def search(self, text: str) -> list[FoundThing]:
        """Finds jobs, workers, tenants, effects and workflows by part of their name or the start of
        their id."""
        return (await self._get(FoundThings, "search", q=text)).found

    async def settings(self) -> SettingsAnswer:
        """Returns the current settings, with secrets masked."""
        return await self._get(SettingsAnswer, "settings")

    async def events(self) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Yields changes as (kind, data): counts, jobs, workers and alerts. Raises
        httpx.TransportError if the stream is interrupted."""
        async with aclosing(self._calls.lines(Call("GET", f"{PREFIX}/events"))) as lines:
            kind = ""
            async for line in lines:
                name, _, value = line.partition(": ")
                if name == "event":
                    kind = value
                elif name == "data":
                    yield kind, json.loads(value)

    async def alerts(self) -> list[Alert]:
        return (await self._get(Alerts, "alerts")).alerts

    async def attempts(self, job_id: UUID | str) -> Attempts:
        """Returns the prompt as workers receive it, and as each worker sent it to its backend."""
        return await self._get(Attempts, "jobs", job_id, "attempts")

    async def dispatches(
        self, *, page_size: int = PAGE, **filters: Any
    ) -> AsyncIterator[DispatchSeen]:
        """Yields dispatches, newest first."""
        query = {**filters, "limit": page_size}
        async for page in fetch_pages(self._calls, f"{PREFIX}/dispatches", DispatchPage, query):
            for dispatch in page.dispatches:
                yield dispatch

    async def dispatch(self, dispatch_id: int) -> DispatchWhole:
        """Returns a dispatch with its attempts, and why it isn't running."""
        return await self._get(DispatchWhole, "dispatches", dispatch_id)

    async def cancel_dispatch(self, dispatch_id: int) -> DispatchSeen:
        return await self._send(DispatchSeen, "POST", "dispatches", dispatch_id, "cancel")

    async def retry_dispatch(self, dispatch_id: int) -> UUID:
        """Starts a new job with the same prompt and files, and returns its id."""
        return (
            await self._send(RetriedDispatch, "POST", "dispatches", dispatch_id, "retry")
        ).job_id

    async def reprioritise(self, dispatch_id: int, priority: int) -> DispatchSeen:
        path = ("dispatches", dispatch_id, "reprioritise")
        return await self._send(DispatchSeen, "POST", *path, body={"priority": priority})

    async def reconcile(self, *, after: str | None = None) -> Repaired:
        """Repairs part of the queue. Repeat the call with `after=next` until `next` is None."""
        return await self._send(Repaired, "POST", "reconcile", body={"after": after})

    async def in_maintenance(self) -> bool:
        return await self._maintenance("GET")

    async def set_maintenance(self, *, on: bool) -> bool:
        """Turns maintenance mode on or off. While it is on, workers get no new jobs, and running
        jobs finish."""
        return await self._maintenance("POST", {"on": on})

    async def _maintenance(self, method: str, body: object = None) -> bool:
        answer = await self._calls.ask_json(Call(method, f"{PREFIX}/maintenance", body))
        return bool(answer["on"])

    # Operators

    async def operators(self) -> list[OperatorAnswer]:
        return (await self._get(Operators, "operators")).operators

    async def add_operator(
        self, name: str, *, role: Literal["viewer", "operator", "owner"] = "operator"
    ) -> MadeOperator:
        """Adds an operator. The answer contains the operator's `key`, which is shown only once."""
        return await self._send(
            MadeOperator, "POST", "operators", body={"name": name, "role": role}
        )

    async def revoke_operator(self, name: str) -> OperatorAnswer:
        return await self._send(OperatorAnswer, "POST", "operators", name, "revoke")

    async def audit(self, *, page_size: int = PAGE, **filters: Any) -> AsyncIterator[EntryAnswer]:
        """Yields audit entries, newest first. `filters` are action, subject, actor, tenant, since
        and until."""
        query = {**filters, "limit": page_size}
        async for page in fetch_pages(self._calls, f"{PREFIX}/audit", Entries, query):
            for entry in page.entries:
                yield entry

    async def export_audit(self, **filters: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Streams all matching audit entries, newest first. Raises httpx.TransportError if the
        stream is interrupted."""
        call = Call("GET", f"{PREFIX}/audit/export", params=filters)
        async with aclosing(self._calls.lines(call)) as lines:
            async for line in lines:
                yield json.loads(line)


def _path(parts: Sequence[object]) -> str:
    return "/".join((PREFIX, *(quote(str(part), safe="") for part in parts)))
