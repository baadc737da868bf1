"""The fleet of `comfyfleet up`. It is created at the first start, and gets all workflows that its
backends can run."""

import logging
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from uuid import UUID, uuid5

from comfyfleet.api.admin import FleetPrompts, TenantPrompts
from comfyfleet.api.worker import BackendFacts
from comfyfleet.errors import NotFound, Unauthenticated
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.catalog.model import RegisteredWorkflow
from comfyfleet.server.catalog.service import fewest_missing, missing_by_worker
from comfyfleet.server.db import Tx
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import Fleet, FleetWorker
from comfyfleet.server.gateway.policy import COMPUTING
from comfyfleet.server.notifications.service import record_audit
from comfyfleet.server.secrets import KEY_CHARACTERS, hash_key, new_key
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants import wallet as ledger
from comfyfleet.server.tenants.model import NewApiKey, new_api_key

FLEET, STAGE = "default", "production"
SECRET_FILE = "fleet.secret"  # noqa: S105 - the name of a file
LOCAL_KEY_FILE = "local.key"
# The user for prompts from programs on this machine that send no key.
LOCAL = "local"
# The balance after each start, and the balance below which it is topped up. Both exceed what one
# person can spend between two starts.
LOCAL_TOKENS, LOCAL_TOKENS_LEAST = 1_000_000_000, 500_000_000
LOCAL_TENANT = UUID("de7a0170-0000-4000-8000-00000000c0de")
SECRET_MODE = 0o600


async def embedded_fleet_secret(plane: ControlPlane, data: Path) -> str:
    """Returns the fleet's secret. Generates it at the first start, and writes it to a file before
    creating the fleet. If an earlier start was interrupted in between, creates the fleet with the
    secret in the file."""
    path = data / SECRET_FILE
    secret = _read_secret(path) or _write_secret(path, new_key())
    async with plane.central.transaction() as tx:
        await _ensure_fleet(tx, plane, secret)
    return secret


async def open_embedded_fleet(plane: ControlPlane) -> None:
    """Allows the fleet to run prompts of ComfyUI clients, unless an operator has changed this
    setting.

    Custom nodes are allowed, because the user who starts `up` has installed them, and the prompts
    come from this machine."""
    now = plane.clock()
    async with plane.central.transaction() as tx:
        fleet = await fleets.get_fleet(tx, FLEET, STAGE)
        if fleet.gateway is None:
            terms = FleetPrompts(allows_unknown=True)
            await catalog.set_prompt_terms(tx, fleet, terms, now=now)
            details = terms.model_dump(mode="json")
            await record_audit(tx, "system", "set_prompts", fleet.subject, now, **details)


async def local_user_key(plane: ControlPlane, data: Path) -> str:
    """Returns the key of the local user, who owns the prompts that come from this machine without a
    key. The key never leaves this machine."""
    path, now = data / LOCAL_KEY_FILE, plane.clock()
    key = _read_text(path)
    if key is not None:
        try:
            async with plane.central.read() as tx:
                await tenants.authenticate_key(tx, key, now=now)
        except Unauthenticated:
            key = None
    if key is not None:
        return key
    user_id = await _ensure_local_user(plane)
    key = _write_secret(path, new_api_key())
    async with plane.central.transaction() as tx:
        new = NewApiKey(
            id=plane.context.new_id(),
            key=key,
            tenant_id=LOCAL_TENANT,
            user_id=user_id,
            name="this machine",
        )
        await tenants.create_key(tx, new, now=now)
    return key


async def allow_computing_nodes(plane: ControlPlane) -> None:
    """Allows the local user to run all of ComfyUI's nodes that only compute, unless an operator has
    set this user's allowed nodes."""
    now = plane.clock()
    async with plane.central.transaction() as tx:
        tenant = await tenants.get_tenant(tx, LOCAL_TENANT)
        if tenant.prompts != TenantPrompts():
            return
        terms = TenantPrompts(allow=COMPUTING)
        await tenants.set_prompts(tx, LOCAL_TENANT, terms)
        changed = terms.model_dump(mode="json")
        await record_audit(tx, "system", "set_prompts", tenant.subject, now, tenant.id, **changed)


async def top_up_local_user(plane: ControlPlane) -> None:
    """Credits the local user, who pays nothing, with more tokens than one person can spend until
    the next start."""
    user_id, now = uuid5(LOCAL_TENANT, LOCAL), plane.clock()
    async with plane.context.tenant_transaction(LOCAL_TENANT) as tx:
        wallet = await ledger.lock_wallet(tx, LOCAL_TENANT, user_id, now=now)
        missing = LOCAL_TOKENS - wallet.balance
        if wallet.balance < LOCAL_TOKENS_LEAST:
            reference = f"comfyfleet-up-{plane.context.new_id()}"
            await ledger.credit(tx, LOCAL_TENANT, user_id, missing, reference, now=now)


async def _ensure_local_user(plane: ControlPlane) -> UUID:
    user_id = uuid5(LOCAL_TENANT, LOCAL)
    async with plane.central.transaction() as tx:
        try:
            await tenants.get_tenant(tx, LOCAL_TENANT)
        except NotFound:
            pool = await tenants.emptiest_pool(tx, plane.pools)
            await tenants.create_tenant(
                tx, tenant_id=LOCAL_TENANT, name=LOCAL, pool=pool, now=plane.clock()
            )
    async with plane.context.tenant_transaction(LOCAL_TENANT) as tx:
        try:
            await tenants.get_user(tx, LOCAL_TENANT, user_id)
        except NotFound:
            await tenants.create_user(
                tx,
                tenant_id=LOCAL_TENANT,
                user_id=user_id,
                email=None,
                name=LOCAL,
                now=plane.clock(),
            )
    return user_id


async def _ensure_fleet(tx: Tx, plane: ControlPlane, secret: str) -> None:
    now = plane.clock()
    try:
        fleet = await fleets.get_fleet(tx, FLEET, STAGE)
        fleets.check_secret(fleet, secret)
    except NotFound:
        fleet = await fleets.create_fleet(
            tx, slug=FLEET, stage=STAGE, secret_hash=hash_key(secret), max_workers=None, now=now
        )
        action = "fleet_created"
    except Unauthenticated:
        fleet = await fleets.rotate_secret(tx, fleet, secret_hash=hash_key(secret))
        action = "fleet_secret_rotated"
    else:
        return
    await record_audit(tx, "system", action, fleet.subject, now)


def _read_secret(path: Path) -> str | None:
    text = _read_text(path)
    return text if text and len(text) == KEY_CHARACTERS else None


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip() or None
    except (FileNotFoundError, UnicodeDecodeError):
        return None


def _write_secret(path: Path, secret: str) -> str:
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with os.fdopen(os.open(path, flags, SECRET_MODE), "w", encoding="ascii") as file:
        file.write(f"{secret}\n")
    return secret


logger = logging.getLogger(__name__)


class AutoAssign:
    """A sweep that assigns workflows. It only adds assignments, and never removes those of an
    operator."""

    def __init__(self, plane: ControlPlane, slug: str, stage: str) -> None:
        self._plane = plane
        self._slug = slug
        self._stage = stage
        self._looked_at: object = None

    async def __call__(self) -> None:
        plane = self._plane
        async with plane.central.read() as tx:
            fleet = await fleets.get_fleet(tx, self._slug, self._stage)
            workers = await self._workers(tx, fleet)
            facts = await fleets.facts_of(tx, workers)
            workflows = [
                workflow for workflow in await catalog.list_workflows(tx) if workflow.is_active
            ]
            situation = _situation(workflows, workers)
            if not facts or situation == self._looked_at:
                return
            runnable = [
                workflow for workflow in workflows if await _can_run(tx, workflow, workers, facts)
            ]
            assigned = {workflow.workflow_id for workflow in await fleets.assigned_to(tx, fleet)}
        target = assigned | {workflow.id for workflow in runnable}
        if target != assigned:
            await self._assign(
                target, [workflow.slug for workflow in runnable if workflow.id not in assigned]
            )
        self._looked_at = situation

    async def _workers(self, tx: Tx, fleet: Fleet) -> list[FleetWorker]:
        """Returns one online worker of each kind, because there may be thousands."""
        plane = self._plane
        seen_since = plane.clock() - timedelta(seconds=plane.settings.offline_after_seconds)
        return await fleets.one_of_each_kind(tx, fleet, seen_since=seen_since)

    async def _assign(self, workflow_ids: set[int], new: Sequence[str]) -> None:
        plane, now = self._plane, self._plane.clock()
        async with plane.central.transaction() as tx:
            fleet = await fleets.get_fleet(tx, self._slug, self._stage)
            await fleets.assign(tx, fleet, workflow_ids, now=now)
            await record_audit(
                tx, "system", "assign", fleet.subject, now, workflows_added=list(new)
            )
        # Waiting workers poll again, since they may now run more workflows.
        plane.queue.order()
        logger.info("fleet %s now runs %s", fleet.name, ", ".join(new))


async def _can_run(
    tx: Tx,
    workflow: RegisteredWorkflow,
    workers: Sequence[FleetWorker],
    facts: Mapping[str, BackendFacts],
) -> bool:
    """Checks whether any of the workers can run the workflow. A job is given only to workers that
    can run it."""
    version = await catalog.get_version(tx, workflow)
    known = missing_by_worker(workflow, version, workers, facts)
    if all(known.values()):
        logger.warning(
            "workflow %s is not assigned, because the workers lack %s",
            workflow.slug,
            fewest_missing(known.values()).in_words(),
        )
        return False
    return True


def _situation(workflows: Sequence[RegisteredWorkflow], workers: Sequence[FleetWorker]) -> object:
    """Returns the state that the assignment depends on. Workflows are assigned again only when this
    state changes."""
    return (
        frozenset(
            (workflow.id, workflow.version, workflow.required_capabilities)
            for workflow in workflows
        ),
        frozenset((worker.worker_id, worker.facts_hash, worker.capabilities) for worker in workers),
    )
