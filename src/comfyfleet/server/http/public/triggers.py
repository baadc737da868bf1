"""Routes for triggers, which are schedules and incoming webhooks that start runs, and the route
that receives webhooks."""

import hmac
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Header, Path, Query, Request, Response, status
from pydantic import Field

from comfyfleet.api.graphs import (
    FiringAnswer,
    FiringCause,
    Firings,
    FiringStatus,
    MadeTrigger,
    ScheduleMoments,
    TriggerAnswer,
    TriggerKind,
    Triggers,
)
from comfyfleet.api.webhooks import HEADER, Signature, verified_signature
from comfyfleet.errors import Conflict, InvalidInput, LimitSpent, NotFound, Refused
from comfyfleet.server import triggers
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.http.deps import NowDep, PlaneDep, problems
from comfyfleet.server.http.public.auth import (
    IDEMPOTENCY_HEADER,
    KEY_CHARACTERS_MAX,
    PAGE_USUAL,
    Body,
    IdempotencyHeader,
    KeyHolder,
    Limit,
    RateLimiter,
    Reader,
    Text,
    Writer,
    admit_stranger,
    public_router,
)
from comfyfleet.server.http.public.graphs import TOKENS_MAX, find_graph_id, owner_of
from comfyfleet.server.http.request_body import Tokens, VersionNumber, parse, parsed
from comfyfleet.server.notifications.webhooks import DELIVERY_ID
from comfyfleet.server.pipelines.actions import BASE_CANDIDATES_MAX, find_pipeline
from comfyfleet.server.tenants.model import Caller, Scope
from comfyfleet.server.triggers import (
    SCHEDULE_CHARACTERS_MAX,
    DayUse,
    Delivery,
    NewTrigger,
    StoredTrigger,
    TriggerFiring,
)

router = public_router("triggers")
HOOKS_PATH = "/hooks"
# Rate limit per webhook, regardless of the sender.
HOOK_CALLS_PER_SECOND, HOOK_CALLS_AT_ONCE = 5.0, 50
Named = Annotated[Text | None, Field(min_length=1, max_length=200)]


class NewTriggerBody(Body):
    name: Text = Field(min_length=1, max_length=200, description="A display name.")
    graph: Named = Field(
        default=None, description="The id or name of a graph. Send either a graph or a pipeline."
    )
    version: VersionNumber | None = Field(
        default=None, description="The graph's version. The default is the newest at each firing."
    )
    pipeline: Named = Field(default=None, description="The id or name of a pipeline.")
    base_candidates: int | None = Field(
        default=None,
        ge=1,
        le=BASE_CANDIDATES_MAX,
        description="The number of base candidates in each pipeline run.",
    )
    inputs: dict[str, Any] = Field(
        default_factory=dict,
        description="The inputs of each graph run, or the variables of each pipeline run. In a "
        "webhook, a string such as `body.order.photo` is a path in the request body.",
        examples=[{"photo": "body.photo", "width": 640}],
    )
    cron: Text | None = Field(
        default=None,
        max_length=SCHEDULE_CHARACTERS_MAX,
        description="The schedule as a cron expression with five fields. Without a schedule, the "
        "trigger is a webhook.",
        examples=["30 7 * * MON-FRI"],
    )
    timezone: Text = Field(
        default="UTC",
        max_length=64,
        description="The time zone of the schedule and of the daily limit.",
        examples=["Europe/Berlin"],
    )
    catch_up: bool = Field(
        default=False,
        description="Whether to fire once later if a scheduled time was missed because no control "
        "plane was running. Only the latest missed time is fired.",
    )
    tokens_per_day: Tokens = Field(
        ge=0, le=TOKENS_MAX, description="Maximum tokens that all runs of a day may spend."
    )
    max_tokens: Tokens | None = Field(
        default=None, ge=0, le=TOKENS_MAX, description="Maximum tokens that one run may spend."
    )


class FireBody(Body):
    body: Any = Field(default=None, description="The body that a webhook delivery would contain.")
    idempotency_key: Text | None = Field(
        default=None,
        min_length=1,
        max_length=KEY_CHARACTERS_MAX,
        description="Repeating the request with the same key returns the same firing.",
    )


@router.post("/triggers", status_code=status.HTTP_201_CREATED, responses=problems(404))
async def create(body: NewTriggerBody, plane: PlaneDep, caller: Writer) -> MadeTrigger:
    """Creates a trigger. A trigger without `cron` is a webhook, whose secret is shown only in this
    response.

    Creating a webhook also requires the `keys` scope, because the secret stays valid after the
    caller's key is revoked.
    """
    if body.cron is None:
        caller.require(Scope.KEYS)
    fields = body.model_dump(exclude={"graph", "version", "pipeline"})
    if body.graph is not None:
        fields["graph_id"] = await find_graph_id(plane, caller, body.graph)
    if body.pipeline is not None:
        whose = caller.tenant.id, caller.user_id
        fields["pipeline_id"] = await find_pipeline(plane.context, *whose, body.pipeline)
    new = NewTrigger(**fields, graph_version=body.version)
    trigger = await triggers.create_trigger(plane.graphs, owner_of(caller), new)
    await _audit(plane, caller, "create_trigger", trigger.id)
    return _made(plane, trigger, DayUse())


def _made(plane: ControlPlane, trigger: StoredTrigger, use: DayUse) -> MadeTrigger:
    is_webhook = trigger.kind == TriggerKind.WEBHOOK
    secret = triggers.secret_of(trigger, plane.webhook_key) if is_webhook else None
    return MadeTrigger(**_answer(trigger, use).model_dump(), secret=secret)


async def _audit(plane: ControlPlane, caller: Caller, action: str, trigger_id: UUID) -> None:
    await plane.context.audit(
        caller.tenant.subject,
        action,
        f"trigger:{trigger_id}",
        caller.tenant.id,
        user_id=caller.user_id,
        by_key=caller.key.id,
    )


@router.get("/triggers", responses=problems(404), name="list")
async def list_triggers(
    plane: PlaneDep, caller: Reader, before: UUID | None = None, limit: Limit = PAGE_USUAL
) -> Triggers:
    """Lists your triggers with the tokens that they have used today."""
    stored = await triggers.list_triggers(
        plane.graphs, owner_of(caller), before=before, limit=limit + 1
    )
    page = stored[:limit]
    uses = await triggers.day_uses(plane.graphs, *page)
    return Triggers(
        triggers=tuple(map(_answer, page, uses)),
        next=page[-1].id if len(stored) > limit else None,
    )


@router.get("/triggers/moments", name="moments")
async def show_moments(
    _: Reader,
    now: NowDep,
    cron: Annotated[
        str,
        Query(
            max_length=SCHEDULE_CHARACTERS_MAX,
            description="A cron expression with five fields. The default is every midnight.",
            examples=["30 7 * * MON-FRI"],
        ),
    ] = "0 0 * * *",
    timezone: Annotated[str, Query(max_length=64)] = "UTC",
) -> ScheduleMoments:
    """Returns the next times at which a schedule would fire, without creating a trigger."""
    return ScheduleMoments(moments=triggers.next_moments(cron, timezone, now))


@router.get("/triggers/{trigger_id}", responses=problems(404))
async def show(trigger_id: UUID, plane: PlaneDep, caller: Reader) -> TriggerAnswer:
    return await _shown(
        plane, await triggers.get_trigger(plane.graphs, owner_of(caller), trigger_id)
    )


async def _shown(plane: ControlPlane, trigger: StoredTrigger) -> TriggerAnswer:
    [use] = await triggers.day_uses(plane.graphs, trigger)
    return _answer(trigger, use)


@router.post("/triggers/{trigger_id}/pause", responses=problems(404))
async def pause(trigger_id: UUID, plane: PlaneDep, caller: Writer) -> TriggerAnswer:
    """Pauses a trigger. Its active runs continue."""
    return await _shown(
        plane, await triggers.pause_trigger(plane.graphs, owner_of(caller), trigger_id)
    )


@router.post("/triggers/{trigger_id}/resume", responses=problems(404))
async def resume(trigger_id: UUID, plane: PlaneDep, caller: Writer) -> TriggerAnswer:
    """Resumes a trigger. A schedule fires again at its next scheduled time."""
    return await _shown(
        plane, await triggers.resume_trigger(plane.graphs, owner_of(caller), trigger_id)
    )


@router.post("/triggers/{trigger_id}/secret", responses=problems(404, 409))
async def renew_secret(trigger_id: UUID, plane: PlaneDep, caller: KeyHolder) -> MadeTrigger:
    """Replaces a webhook's secret. The new secret is shown only in this response, and the old one
    becomes invalid immediately. Requires the `keys` and `write` scopes."""
    caller.require(Scope.WRITE)
    changed = await triggers.renew_secret(plane.graphs, owner_of(caller), trigger_id)
    await _audit(plane, caller, "renew_trigger_secret", trigger_id)
    [use] = await triggers.day_uses(plane.graphs, changed)
    return _made(plane, changed, use)


@router.delete(
    "/triggers/{trigger_id}", status_code=status.HTTP_204_NO_CONTENT, responses=problems(404)
)
async def delete(trigger_id: UUID, plane: PlaneDep, caller: Writer) -> None:
    """Deletes a trigger and its list of firings, but not its runs."""
    await triggers.delete_trigger(plane.graphs, owner_of(caller), trigger_id)
    await _audit(plane, caller, "delete_trigger", trigger_id)


@router.get("/triggers/{trigger_id}/firings", responses=problems(404))
async def firings(
    trigger_id: UUID,
    plane: PlaneDep,
    caller: Reader,
    before: UUID | None = None,
    limit: Limit = PAGE_USUAL,
) -> Firings:
    """Lists a trigger's firings, including rejected and missed ones."""
    entries = await triggers.list_firings(
        plane.graphs, owner_of(caller), trigger_id, before=before, limit=limit + 1
    )
    page = entries[:limit]
    return Firings(
        firings=tuple(map(_firing, page)), next=page[-1].id if len(entries) > limit else None
    )


@router.post("/triggers/{trigger_id}/fire", responses=problems(404, 409))
async def fire(
    trigger_id: UUID,
    body: FireBody,
    plane: PlaneDep,
    caller: Writer,
    idempotency_header: IdempotencyHeader = None,
) -> FiringAnswer:
    """Fires a trigger now, even if it is paused. Its daily token limit applies."""
    trigger = await triggers.get_trigger(plane.graphs, owner_of(caller), trigger_id)
    delivery = Delivery(body.idempotency_key or idempotency_header)
    fired, _ = await triggers.fire(
        plane.graphs, trigger, cause=FiringCause.HAND, delivery=delivery, body=body.body
    )
    return _firing(fired)


def _answer(trigger: StoredTrigger, use: DayUse) -> TriggerAnswer:
    is_webhook = trigger.kind == TriggerKind.WEBHOOK
    return TriggerAnswer(
        id=trigger.id,
        name=trigger.name,
        kind=trigger.kind,
        graph_id=trigger.graph_id,
        version=trigger.graph_version,
        pipeline_id=trigger.pipeline_id,
        base_candidates=trigger.base_candidates,
        inputs=dict(trigger.inputs),
        cron=trigger.cron,
        timezone=trigger.timezone,
        catch_up=trigger.catch_up,
        tokens_per_day=trigger.tokens_per_day,
        max_tokens=trigger.max_tokens,
        used_tokens=use.tokens,
        is_paused=trigger.is_paused,
        is_spent=use.is_spent or use.tokens >= trigger.tokens_per_day > 0,
        next_at=None if trigger.is_paused else trigger.next_at,
        missed=trigger.missed,
        missed_at=trigger.missed_at,
        path=f"{HOOKS_PATH}/{trigger.id}" if is_webhook else None,
        created_at=trigger.created_at,
    )


def _firing(firing: TriggerFiring) -> FiringAnswer:
    return FiringAnswer(
        id=firing.id,
        trigger_id=firing.trigger_id,
        cause=firing.cause,
        status=firing.status,
        planned_at=firing.planned_at,
        run_id=firing.run_id,
        run_status=firing.run_status,
        max_tokens=firing.granted_tokens,
        error_code=firing.error_code,
        error=firing.error,
        missed=firing.missed,
        created_at=firing.created_at,
        ended_at=firing.ended_at,
    )


# These routes require no key, because the webhook's secret or signature authorizes the request.
hooks_router = APIRouter(tags=["triggers"], responses=problems(404, 409, 413, 422, 429, 503))
ANY_JSON: dict[str, Any] = {"requestBody": {"content": {"application/json": {"schema": {}}}}}


@hooks_router.post(
    f"{HOOKS_PATH}/{{hook_id}}", status_code=status.HTTP_202_ACCEPTED, openapi_extra=ANY_JSON
)
async def receive(
    hook_id: Annotated[str, Path(description="The webhook's id.")],
    request: Request,
    response: Response,
    plane: PlaneDep,
    now: NowDep,
    delivery: Annotated[
        str | None,
        Header(
            alias=DELIVERY_ID,
            description="Repeating a delivery with the same id returns the same run.",
        ),
    ] = None,
) -> FiringAnswer:
    """Receives a webhook delivery and starts a run.

    Authenticate with `Authorization: Bearer SECRET` or, preferably, with a signature of the body in
    `X-Comfyfleet-Signature: t=…,v1=…`. An unknown id and a wrong secret get the same response.

    A repeated delivery returns the run of the first one. A delivery counts as repeated if its id or
    its signature was already used.
    """
    admit_stranger(request, now)
    content = await request.body()
    trigger, signature = await _find(plane, hook_id, request, content, now)
    request.app.state.hook_rates.take(trigger.id, now)
    tenant_rates: RateLimiter = request.app.state.tenant_rates
    tenant_rates.take(trigger.tenant_id, now)
    if trigger.is_paused:
        raise Conflict("this webhook is paused")
    fired, is_new = await triggers.fire(
        plane.graphs,
        trigger,
        cause=FiringCause.WEBHOOK,
        delivery=Delivery(_delivery_id(request, delivery), signature),
        body=await _parsed(content),
    )
    if not is_new:
        response.status_code = status.HTTP_200_OK
    if fired.status == FiringStatus.REFUSED:
        kind = LimitSpent if fired.error_code == LimitSpent.code else Refused
        raise kind(fired.error or "refused", firing_id=str(fired.id), reason=fired.error_code)
    return _firing(fired)


async def _find(
    plane: ControlPlane, hook_id: str, request: Request, content: bytes, now: datetime
) -> tuple[StoredTrigger, Signature | None]:
    missing = NotFound("this webhook doesn't exist, or the secret is wrong")
    try:
        trigger = await triggers.find_webhook(plane.graphs, UUID(hook_id))
    except ValueError:
        raise missing from None
    if trigger is None:
        raise missing
    secret, header = _secret(plane, trigger), request.headers.get(HEADER)
    if header is None:
        if not _has_secret(request, secret):
            raise missing
        return trigger, None
    # If there is a signature, it must be valid, even if the request contains the secret as well.
    signature = verified_signature(secret, content, header, now=int(now.timestamp()))
    if signature is None:
        raise missing
    return trigger, signature


def _secret(plane: ControlPlane, trigger: StoredTrigger) -> str:
    return triggers.secret_of(trigger, plane.webhook_key)


def _has_secret(request: Request, secret: str) -> bool:
    scheme, _, secret_sent = request.headers.get("authorization", "").partition(" ")
    is_same = hmac.compare_digest(secret_sent.strip().encode(), secret.encode())
    return scheme.lower() == "bearer" and is_same


def _delivery_id(request: Request, delivery: str | None) -> str | None:
    """Returns the id that the sender gave to the delivery, or None."""
    delivery_id = delivery or request.headers.get(IDEMPOTENCY_HEADER)
    if delivery_id is not None and len(delivery_id) > KEY_CHARACTERS_MAX:
        raise InvalidInput(
            f"the delivery id can have at most {KEY_CHARACTERS_MAX} characters", field=DELIVERY_ID
        )
    return delivery_id or None


async def _parsed(content: bytes) -> Any:
    if not content.strip():
        return None
    try:
        return await parsed(content, parse)
    except ValueError:
        raise InvalidInput("the body must be valid JSON") from None
