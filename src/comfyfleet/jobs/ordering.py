"""From what somebody asks for to what a job pins: version, prompt, files, models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import SystemRandom
from typing import Any, NamedTuple
from uuid import UUID

from comfyfleet.db import Tx
from comfyfleet.effects import documents, objectinfo, payload
from comfyfleet.effects import service as effects
from comfyfleet.effects.model import PRIMARY_INPUT, SEED_MAX, AssetRef, Payload, Version, Workflow
from comfyfleet.effects.prompting import Chance
from comfyfleet.files import service as files
from comfyfleet.files.model import File
from comfyfleet.fleets import service as fleets
from comfyfleet.fleets.model import Fleet
from comfyfleet.jobs import arrival
from comfyfleet.jobs.model import Submission
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import InvalidInput, NotFound, Refused
from comfyfleet.media.kinds import kind_of

# Some of them move, which their type does not tell; nodes that load videos do not take them.
MAYBE_ANIMATED = ("image/gif", "image/webp", "image/png", "image/avif")

_dice = SystemRandom()


@dataclass(frozen=True, slots=True)
class Order:
    """What somebody asks for. `files` are files of the tenant, by property."""

    slug: str
    version: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    locked: tuple[str, ...] = ()  # properties that are the effect's alone
    media_types: tuple[str, ...] = ()  # of its primary input; none named: all of its kind
    max_upload_bytes: int | None = None
    files: Mapping[str, UUID] = field(default_factory=dict)
    stage: str = "production"
    provider: str = "self_hosted"
    priority: int = 0
    backend_affinity: str | None = None
    user_id: UUID | None = None
    effect_id: UUID | None = None
    idempotency_key: str | None = None
    request_hash: str | None = None
    price_tokens: int = 0
    video_id: UUID | None = None


class Registered(NamedTuple):
    """What an order names, and the fleet whose node types decide how it becomes a prompt."""

    workflow: Workflow
    version: Version
    fleet: Fleet | None


class Lookup:
    """What orders of one moment name: however many they are, each is looked up once."""

    def __init__(self, sides: Sides) -> None:
        self._sides = sides
        self._found: dict[tuple[str, int | None, str], Registered] = {}

    async def get(self, order: Order) -> Registered:
        key = order.slug, order.version, order.stage
        if key not in self._found:
            self._found[key] = await _named(self._sides, order)
        return self._found[key]


async def submission(
    sides: Sides,
    tenant_id: UUID,
    order: Order,
    *,
    known: Registered | None = None,
) -> Submission:
    """Raises what is wrong with the order, and names the property. Nothing is written.

    `known`: what the order names, for who has just read it.
    """
    found = known or await _named(sides, order)
    workflow, version = found.workflow, found.version
    _refuse_locked(order)
    built = await _built(sides, found, order)
    wanted = {each.name: each for each in built.assets}
    await _require_files(sides, tenant_id, order, wanted)
    return Submission(
        workflow_id=workflow.id,
        workflow_slug=workflow.slug,
        workflow_version=version.version,
        prompt=built.prompt,
        properties=built.properties,
        assets=built.assets,
        output_node_id=version.output_node_id,
        stage=order.stage,
        provider=order.provider,
        priority=order.priority,
        backend_affinity=order.backend_affinity,
        model_key=built.model_key,
        model_set=built.model_set,
        user_id=order.user_id,
        effect_id=order.effect_id,
        idempotency_key=order.idempotency_key,
        request_hash=order.request_hash,
        price_tokens=order.price_tokens,
        video_id=order.video_id,
    )


def _refuse_locked(order: Order) -> None:
    for name in order.locked:
        if name in order.values or name in order.files:
            raise InvalidInput(f"{name} is set by the effect", property=name)


async def _named(sides: Sides, order: Order) -> Registered:
    async with sides.central.look() as tx:
        workflow = await effects.by_slug(tx, order.slug)
        version = await effects.get_version(tx, workflow, order.version)
        return await registered(tx, workflow, version, stage=order.stage)


def require_active(workflow: Workflow) -> None:
    if not workflow.is_active or workflow.is_open:
        raise Refused(f"the workflow {workflow.slug} takes no jobs", field="workflow_slug")


async def registered(tx: Tx, workflow: Workflow, version: Version, *, stage: str) -> Registered:
    require_active(workflow)
    assigned = await fleets.fleets_with(tx, workflow.id, stage=stage)
    known = [fleet for fleet in assigned if fleet.object_info_hash]
    return Registered(workflow, version, next(iter(known or assigned), None))


async def _built(sides: Sides, found: Registered, order: Order) -> Payload:
    version, fleet = found.version, found.fleet
    document = await sides.documents.get(
        version.document_key, lambda: documents.read(sides.store, version)
    )
    of_fleet = f"object_info/{fleet.object_info_hash if fleet else None}"
    object_info = await sides.documents.get(
        of_fleet, lambda: objectinfo.object_info_for(sides.store, fleet)
    )
    seed = _dice.randint(0, SEED_MAX)
    resolved = payload.resolved_for(
        version, order.values, order.overrides, files=order.files, seed=seed
    )
    prompt = sides.prompts.get(
        f"{version.workflow_id}/{version.version}/{of_fleet}",
        lambda chance: payload.marked(version, document, object_info, chance),
        # As the editor does when it queues: {a|b} is chosen anew, and %date% is today's.
        Chance(sides.clock(), _dice),
    )
    return payload.filled_in(version, prompt, object_info, resolved)


async def _require_files(
    sides: Sides, tenant_id: UUID, order: Order, wanted: Mapping[str, AssetRef]
) -> None:
    """Each is the user's, of its property's kind, and has arrived; one that was only announced is looked for.

    Those in `order.files` were looked up by whoever orders; values may name anything.
    """
    pool = await sides.pool_of(tenant_id)
    for name, asset in wanted.items():
        try:
            async with pool.look() as tx:
                file = await files.get(tx, tenant_id, asset.file_id)
            if name not in order.files:
                _require_own(file, order.user_id)
        except NotFound:
            raise InvalidInput(f"{name}: there is no file {asset.file_id}", property=name) from None
        try:
            file = await arrival.arrived(sides, pool, file)
        except arrival.REFUSALS as error:
            raise InvalidInput(f"{name}: {error.message}", property=name) from error
        _check_kind(asset, file)
        if name == PRIMARY_INPUT:
            _check_limits(order, file)


def _check_kind(asset: AssetRef, file: File) -> None:
    kind = kind_of(file.mime_type)
    if kind is not None and kind != asset.kind:
        raise InvalidInput(
            f"{asset.name} takes {asset.kind}, and the file is {file.mime_type}{_advice(asset, file)}",
            property=asset.name,
        )


def _advice(asset: AssetRef, file: File) -> str:
    is_maybe_animated = asset.kind == "video" and file.mime_type in MAYBE_ANIMATED
    return (
        "; an animated picture has to be converted to MP4 or WebM first"
        if is_maybe_animated
        else ""
    )


def _check_limits(order: Order, file: File) -> None:
    """Those of the effect, on what it is applied to."""
    if order.media_types and file.mime_type not in order.media_types:
        raise InvalidInput(
            f"the effect takes {', '.join(order.media_types)}, not {file.mime_type}",
            property=PRIMARY_INPUT,
        )
    most = order.max_upload_bytes
    if most is not None and (file.size or 0) > most:
        raise InvalidInput(
            f"the effect takes at most {most:,} bytes, not {file.size:,}", property=PRIMARY_INPUT
        )


def _require_own(file: File, user_id: UUID | None) -> None:
    """Operators have no user, and may name any."""
    if user_id is not None and file.user_id != user_id:
        raise NotFound(f"there is no file {file.id}")
