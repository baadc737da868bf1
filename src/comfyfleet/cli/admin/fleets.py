"""`comfyfleet admin fleets | workers | dispatches | operators | audit | maintenance | poisoned |
reconcile`: fleets, workers, the queue and operators."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from comfyfleet.cli.context import InjectedContext, counted
from comfyfleet.cli.control_plane import API_DEFAULTS, ApiOptions, ApiSession, connect
from comfyfleet.cli.tables import print_fields, print_json, print_rows
from comfyfleet.errors import InvalidInput

AUDIT_COLUMNS = ("id", "at", "actor", "action", "subject", "details")


@Parameter(name="*")
@dataclass(frozen=True)
class AuditFilterOptions:
    """Selects audit entries."""

    action: Annotated[
        str | None, Parameter(help="Only entries with this action, such as submit or lease.")
    ] = None
    subject: Annotated[
        str | None,
        Parameter(help="Only entries about this subject, such as dispatch:12 or worker:gpu-7."),
    ] = None
    actor: Annotated[
        str | None,
        Parameter(
            help="Only entries by this actor, such as operator:ada, admin, sweep or worker:gpu-7."
        ),
    ] = None
    tenant: Annotated[
        str | None, Parameter(metavar="ID", help="Only entries about this tenant.")
    ] = None
    since: Annotated[
        str | None,
        Parameter(metavar="TIME", help="Only entries since this date or time, such as 2026-11-15."),
    ] = None
    until: Annotated[
        str | None, Parameter(metavar="TIME", help="Only entries before this time.")
    ] = None
    before: Annotated[int | None, Parameter(help="Only entries with a lower id.")] = None


ALL = AuditFilterOptions()


def audit(
    *,
    filters: AuditFilterOptions = ALL,
    limit: Annotated[int, Parameter(help="Maximum number of rows.")] = 50,
    export: Annotated[
        bool, Parameter(help="Print all matching entries, one JSON object per line.")
    ] = False,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Show the audit log, newest first."""
    query = asdict(filters)
    with connect(options, context) as plane:
        if export:
            for line in plane.lines("audit", "export", **query):
                context.stdout.write(f"{line}\n".encode())
            context.stdout.flush()
            return
        answer = plane.get("audit", **query, limit=limit)
    none = "there are no matching entries"
    plane.tell_rows(answer, "entries", AUDIT_COLUMNS, none=none, older="--before")


operators_app = App(
    name="operators", help="People who operate the fleet, each with a key and a role."
)
OPERATOR_COLUMNS = (
    "name",
    "role",
    "prefix",
    "created:created_at",
    "by:created_by",
    "used:last_used_at",
    "revoked:revoked_at",
)
Name = Annotated[str, Parameter(help="The operator's name, as shown in the audit log.")]


@operators_app.command
def add(
    name: Name,
    /,
    *,
    role: Annotated[
        Literal["viewer", "operator", "owner"],
        Parameter(
            help="A viewer can read, an operator can also make changes, and an owner can also manage operators and money."
        ),
    ] = "operator",
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Create an operator with a key. The key is shown only once."""
    with connect(options, context) as plane:
        answer = plane.post("operators", name=name, role=role)
    message = f"{answer['role']} {answer['name']}; the key, shown only once:"
    plane.tell(answer, message, line=answer["key"])


@operators_app.command(name="list")
def list_operators(*, options: ApiOptions = API_DEFAULTS, context: InjectedContext) -> None:
    """List operators with their roles, including revoked ones."""
    with connect(options, context) as plane:
        answer = plane.get("operators")
    plane.tell_rows(
        answer, "operators", OPERATOR_COLUMNS, none="there are no operators besides the admin key"
    )


@operators_app.command(name="revoke")
def revoke_operator(
    name: Name, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Revoke an operator's key immediately, on every control plane."""
    with connect(options, context) as plane:
        answer = plane.post("operators", name, "revoke")
        plane.tell(answer, f"the key of {answer['name']} is revoked")


fleets_app = App(name="fleets", help="Groups of interchangeable workers: create, limit, assign.")
PRODUCTION = "production"
Slug = Annotated[str, Parameter(help="The fleet's slug.")]
Stage = Annotated[str, Parameter(help="The fleet's stage.")]
FLEET_COLUMNS = (
    "slug",
    "stage",
    "workers",
    "max_workers",
    "approval",
    "workflows",
    "created:created_at",
)

SWITCH_COLUMNS = ("model", "costs_s:seconds", "run_s:run_seconds", "is_free", "runs")


@fleets_app.command(name="list")
def list_fleets(*, options: ApiOptions = API_DEFAULTS, context: InjectedContext) -> None:
    """List all fleets with their assigned workflows."""
    none = "there are no fleets yet: comfyfleet admin fleets create SLUG"
    with connect(options, context) as plane:
        plane.tell_rows(plane.get("fleets"), "fleets", FLEET_COLUMNS, none=none)


@fleets_app.command(name="show")
def show_fleet(
    slug: Slug,
    /,
    *,
    stage: Stage = PRODUCTION,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Show a fleet, with the measured cost of switching to each of its models."""
    with connect(options, context) as plane:
        answer = plane.get("fleets", slug, stage)
    if options.as_json:
        print_json(answer, context)
        return
    switches = answer.pop("model_switches", [])
    print_fields(answer, context)
    context.out.print("\nModel switches")
    if switches:
        print_rows(switches, SWITCH_COLUMNS, context, none="")
    else:
        context.out.print("Their cost is not known yet. Measuring it takes a few dozen runs.")


@fleets_app.command
def create(
    slug: Slug,
    /,
    *,
    stage: Stage = PRODUCTION,
    max_workers: Annotated[
        int | None, Parameter(help="Maximum number of workers. Default: the global limit.")
    ] = None,
    approval: Annotated[
        Literal["auto", "manual"],
        Parameter(
            help="With manual, new workers get no jobs until `admin workers approve` approves them."
        ),
    ] = "auto",
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Create a fleet. Its secret, which workers use to join, is shown only once."""
    body = {} if max_workers is None else {"max_workers": max_workers}
    with connect(options, context) as plane:
        _tell_secret(plane, plane.post("fleets", slug=slug, stage=stage, approval=approval, **body))


@fleets_app.command
def rotate_secret(
    slug: Slug,
    /,
    *,
    stage: Stage = PRODUCTION,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Create a new secret. Workers that have joined keep their own keys."""
    with connect(options, context) as plane:
        _tell_secret(plane, plane.post("fleets", slug, stage, "rotate-secret"))


@fleets_app.command
def cap(
    slug: Slug,
    max_workers: Annotated[int, Parameter(help="Maximum number of workers.")],
    /,
    *,
    stage: Stage = PRODUCTION,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Limit a fleet's workers. A lower limit removes no workers, but no more can join."""
    with connect(options, context) as plane:
        answer = plane.put("fleets", slug, stage, "cap", max_workers=max_workers)
    plane.tell(answer, f"fleet {slug}/{stage} can have at most {max_workers} workers")


@fleets_app.command(name="set")
def set_(
    slug: Slug,
    /,
    *,
    starts_within: Annotated[
        int | None,
        Parameter(
            metavar="SECONDS",
            help="How long the fleet's machines take to start on demand. During that time, graphs, pipelines and waiting "
            "commands don't give up on a job that no worker can run. 0 means the value of "
            "COMFYFLEET_NO_BACKEND_SECONDS.",
        ),
    ] = None,
    in_order: Annotated[
        bool | None,
        Parameter(
            negative="--any-order",
            help="Whether WebSockets show a client's prompts one after another, as with a single ComfyUI (the "
            "default), or send all messages as they arrive. Applies to new prompts.",
        ),
    ] = None,
    stage: Stage = PRODUCTION,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Change the settings of a fleet."""
    if starts_within is None and in_order is None:
        raise InvalidInput("specify a setting: --starts-within, --in-order or --any-order")
    answer: dict[str, Any] = {}
    lines: list[str] = []
    with connect(options, context) as plane:
        if starts_within is not None:
            seconds = starts_within or None
            answer |= plane.put("fleets", slug, stage, "starts-within", seconds=seconds)
            description = f"start within {seconds} s" if seconds else "use the default start time"
            lines.append(f"the machines of fleet {slug}/{stage} {description}")
        if in_order is not None:
            answer |= _set_order(plane, slug, stage, in_order)
            description = "its prompts one after another" if in_order else "all messages at once"
            lines.append(f"a client of fleet {slug}/{stage} sees {description}")
    plane.tell(answer, *lines)


def _set_order(plane: ApiSession, slug: str, stage: str, in_order: bool) -> dict[str, Any]:
    terms = plane.get("fleets", slug, stage, "prompts")
    terms.pop("warning", None)
    answer: dict[str, Any] = plane.put(
        "fleets", slug, stage, "prompts", **{**terms, "in_order": in_order}
    )
    return answer


@fleets_app.command
def approval(
    slug: Slug,
    approval: Annotated[
        Literal["auto", "manual"],
        Parameter(help="Whether new workers are approved automatically or by an operator."),
    ],
    /,
    *,
    stage: Stage = PRODUCTION,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Set how new workers are approved: auto or manual. Workers that have already joined are not
    affected."""
    with connect(options, context) as plane:
        answer = plane.put("fleets", slug, stage, "approval", approval=approval)
    plane.tell(answer, f"approval of workers that join {slug}/{stage}: {approval}")


@Parameter(name="*")
@dataclass(frozen=True)
class FleetPromptOptions:
    """The changes to a fleet's prompt settings."""

    is_open: Annotated[
        bool | None,
        Parameter(
            name="--open",
            negative="--close",
            help="Accept prompts of ComfyUI clients, or stop accepting them.",
        ),
    ] = None
    price_tokens: Annotated[
        int | None, Parameter(name="--price", help="Tokens for each prompt.")
    ] = None
    price_per_second: Annotated[
        float | None, Parameter(help="Tokens for each second on the GPU, instead of a fixed price.")
    ] = None
    allow: Annotated[
        tuple[str, ...] | None,
        Parameter(help="Node types that may run, such as 'VHS_*'. Repeatable; replaces the list."),
    ] = None
    deny: Annotated[
        tuple[str, ...] | None,
        Parameter(help="Node types that may not run. Repeatable; replaces the list."),
    ] = None
    allows_unknown: Annotated[
        bool | None,
        Parameter(
            name="--allow-unknown",
            negative="--deny-unknown",
            help="Allow node types that are not part of ComfyUI, unless they accept a path, a URL, "
            "code or a command.",
        ),
    ] = None
    nodes_max: Annotated[int | None, Parameter(help="Maximum number of nodes per prompt.")] = None
    prompt_bytes_max: Annotated[
        int | None, Parameter(help="Maximum size of a prompt in bytes.")
    ] = None
    run_limit_seconds: Annotated[int | None, Parameter(help="Time limit of a run in seconds.")] = (
        None
    )
    passthrough: Annotated[
        tuple[str, ...] | None,
        Parameter(
            help="Routes that are passed on to a backend, such as /api/etn. Repeatable; replaces "
            "the list."
        ),
    ] = None


NO_CHANGE = FleetPromptOptions()


@fleets_app.command
def prompts(
    slug: Slug,
    /,
    *,
    stage: Stage = PRODUCTION,
    options_to_change: FleetPromptOptions = NO_CHANGE,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Show or change a fleet's settings for prompts of ComfyUI clients."""
    changes = changed_terms(options_to_change)
    # A fleet has either a fixed price or a price per second.
    if changes.get("price_tokens") is not None:
        changes.setdefault("price_per_second", None)
    elif "price_per_second" in changes:
        changes["price_tokens"] = 0
    with connect(options, context) as plane:
        answer = plane.get("fleets", slug, stage, "prompts")
        if changes:
            wanted_terms = {**answer, **changes}
            wanted_terms.pop("warning", None)
            answer = plane.put("fleets", slug, stage, "prompts", **wanted_terms)
    warning = answer.get("warning")
    if warning and not options.as_json:
        context.warn(warning)
    tell_terms(answer, options, context)


def changed_terms(prompt_options: Any) -> dict[str, Any]:
    """Returns the options that were set. An empty string clears a list."""
    return {
        name: [entry for entry in value if entry] if isinstance(value, tuple) else value
        for name, value in asdict(prompt_options).items()
        if value is not None
    }


def tell_terms(answer: dict[str, Any], options: ApiOptions, context: InjectedContext) -> None:
    if options.as_json:
        print_json(answer, context)
    else:
        print_fields(answer, context)


@fleets_app.command
def assign(
    slug: Slug,
    /,
    *workflows: Annotated[str, Parameter(help="The slugs of the workflows.")],
    stage: Stage = PRODUCTION,
    add: Annotated[bool, Parameter(help="Keep the workflows that are already assigned.")] = False,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Set the workflows that a fleet runs: only these, unless --add is given."""
    with connect(options, context) as plane:
        existing = plane.get("fleets", slug, stage)["workflows"] if add else []
        slugs = sorted({*existing, *workflows})
        answer = plane.put("fleets", slug, stage, "workflows", workflow_slugs=slugs)
    if not options.as_json:
        for warning in answer.get("warnings", ()):
            context.warn(warning)
    message = f"fleet {slug}/{stage} runs {', '.join(slugs) or 'nothing'}"
    if removed := answer["removed"]:
        message += f", and no longer {', '.join(removed)}"
    plane.tell(answer, message)


def _tell_secret(plane: ApiSession, answer: dict[str, Any]) -> None:
    slug, stage = answer["slug"], answer["stage"]
    message = f"fleet {slug}/{stage}; its secret, shown only once:"
    how = (
        f"workers join with: COMFYFLEET_FLEET_SECRET=… comfyfleet worker --control URL "
        f"--fleet {slug} --stage {stage} --backend URL"
    )
    plane.tell(answer, message, line=answer["secret"], then=how)


workers_app = App(name="workers", help="Workers next to the GPUs. They register themselves.")
WorkerId = Annotated[str, Parameter(help="The worker's id.")]
WORKER_COLUMNS = (
    "worker:worker_id",
    "fleet",
    "state",
    "load:current_load",
    "of:max_concurrency",
    "seen:last_seen_at",
    "models_loaded",
)


@workers_app.command(name="list")
def list_workers(
    *,
    fleet: Annotated[
        str | None, Parameter(help="Only workers of this fleet, as SLUG/STAGE.")
    ] = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """List all workers with their fleet, their state and when they were last seen."""
    none = "no worker has joined yet: comfyfleet worker --help"
    with connect(options, context) as plane:
        plane.tell_rows(plane.get("workers", fleet=fleet), "workers", WORKER_COLUMNS, none=none)


@workers_app.command(name="show")
def show_worker(
    worker: WorkerId, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Show a worker with its backend, its assignments and its latest metrics."""
    with connect(options, context) as plane:
        answer = plane.get("workers", worker)
    if options.as_json:
        print_json(answer, context)
        return
    print_fields({**answer, "backend": None, "reading": None}, context)
    for name, part in (("Backend", answer["backend"]), ("Machine", answer["reading"])):
        if part:
            context.out.print(f"\n{name}")
            print_fields({field: _counted(value) for field, value in part.items()}, context)


@workers_app.command
def approve(
    worker: WorkerId, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Approve a worker that is pending or was revoked."""
    _act(worker, "approve", "is approved", options, context)


@workers_app.command(name="revoke")
def revoke_worker(
    worker: WorkerId, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Revoke a worker's key and id immediately, and requeue its jobs."""
    answer = _act(worker, "revoke", "is revoked; its jobs are requeued", options, context)
    if not options.as_json:
        context.say(answer["hint"])


@workers_app.command
def drain(
    worker: WorkerId,
    /,
    *,
    stop: Annotated[bool, Parameter(help="Let the worker accept jobs again.")] = False,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Let a worker finish its jobs without accepting new ones."""
    if stop:
        _act(worker, "undrain", "accepts jobs again", options, context)
    else:
        message = "is draining: it finishes its jobs and accepts no new ones"
        _act(worker, "drain", message, options, context)


@workers_app.command
def rotate_key(
    worker: WorkerId,
    /,
    *,
    now: Annotated[
        bool,
        Parameter(help="Invalidate the old key immediately. The worker's current run is lost."),
    ] = False,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Create a new key for a worker. The worker receives it automatically, and then the old key
    becomes invalid."""
    with connect(options, context) as plane:
        answer = plane.post("workers", worker, "rotate-token", now=now)
    message = f"worker {worker}; its new key, shown only once:"
    plane.tell(answer, message, line=answer["token"])


def _counted(value: Any) -> Any:
    """Replaces a list or object, such as node types or model files, with its number of entries.
    --json shows the full lists."""
    return len(value) if isinstance(value, list | dict) else value


def _act(
    worker: str, act: str, done: str, options: ApiOptions, context: InjectedContext
) -> dict[str, Any]:
    with connect(options, context) as plane:
        answer = plane.post("workers", worker, act)
    plane.tell(answer, f"worker {worker} {done}")
    return answer


dispatches_app = App(name="dispatches", help="The queue: list, explain, repair.")
DispatchId = Annotated[int, Parameter(help="The dispatch's id.")]
DISPATCH_COLUMNS = (
    "id",
    "status",
    "workflow",
    "priority",
    "attempts",
    "worker:worker_id",
    "queued:queued_at",
    "seconds:duration_seconds",
    "last_error",
)
ATTEMPT_COLUMNS = ("at", "actor", "action", "details")


@dispatches_app.command(name="list")
def list_dispatches(
    *,
    status: Annotated[
        Literal["queued", "leased", "completed", "failed", "cancelled"] | None,
        Parameter(help="Only dispatches with this status."),
    ] = None,
    workflow: Annotated[str | None, Parameter(help="Show only this workflow.")] = None,
    worker: Annotated[str | None, Parameter(help="Show only this worker.")] = None,
    tenant: Annotated[str | None, Parameter(metavar="ID", help="Show only this tenant.")] = None,
    before: Annotated[int | None, Parameter(help="Only dispatches with a lower id.")] = None,
    limit: Annotated[int, Parameter(help="Maximum number of rows.")] = 50,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """List dispatches, newest first."""
    with connect(options, context) as plane:
        answer = plane.get(
            "dispatches",
            status=status,
            workflow=workflow,
            worker=worker,
            tenant=tenant,
            before=before,
            limit=limit,
        )
    none = "there are no matching dispatches"
    plane.tell_rows(answer, "dispatches", DISPATCH_COLUMNS, none=none, older="--before")


@dispatches_app.command(name="show")
def show_dispatch(
    dispatch: DispatchId, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Show a dispatch with all its attempts, and why it isn't running."""
    with connect(options, context) as plane:
        answer = plane.get("dispatches", dispatch)
    if options.as_json:
        print_json(answer, context)
        return
    print_fields({**answer["dispatch"], "why": answer.get("why")}, context)
    context.out.print()
    print_rows(answer["attempts"], ATTEMPT_COLUMNS, context, none="there are no recorded attempts")


@dispatches_app.command
def why(
    dispatch: DispatchId, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Explain in one sentence why a job isn't running."""
    with connect(options, context) as plane:
        answer = plane.get("dispatches", dispatch, "why")
    plane.tell(answer, line=answer["why"])


@dispatches_app.command
def retry(
    dispatch: DispatchId, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Submit the same prompt and files again, as a new job."""
    with connect(options, context) as plane:
        answer = plane.post("dispatches", dispatch, "retry")
    plane.tell(answer, "submitted again; the new job:", line=answer["job_id"])


@dispatches_app.command
def cancel(
    dispatch: DispatchId, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Cancel a job: immediately if it is queued, or with the worker's next heartbeat if it is
    running."""
    with connect(options, context) as plane:
        answer = plane.post("dispatches", dispatch, "cancel")
    status = (
        "its worker will be notified" if answer.get("cancel_requested") else answer.get("status")
    )
    plane.tell(answer, f"dispatch {dispatch}: {status}")


@dispatches_app.command
def reprioritise(
    dispatch: DispatchId,
    priority: Annotated[
        int, Parameter(help="Jobs with a higher priority run first.", allow_leading_hyphen=True)
    ],
    /,
    *,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Change the priority of a queued job."""
    with connect(options, context) as plane:
        answer = plane.post("dispatches", dispatch, "reprioritise", priority=priority)
    plane.tell(answer, f"dispatch {dispatch} has priority {priority}")


def maintenance(
    wanted: Annotated[
        Literal["on", "off"] | None,
        Parameter(help="Turn maintenance on or off. Without a value, show the current state."),
    ] = None,
    /,
    *,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Stop or resume giving jobs to workers. Running jobs finish."""
    with connect(options, context) as plane:
        if wanted is None:
            answer = plane.get("maintenance")
        else:
            answer = plane.post("maintenance", on=wanted == "on")
    on, off = "on: running jobs finish, and no new jobs start", "off: jobs are given to workers"
    plane.tell(answer, f"maintenance is {on if answer['on'] else off}")


def poisoned(
    *,
    before: Annotated[int | None, Parameter(help="Only dispatches with a lower id.")] = None,
    limit: Annotated[int, Parameter(help="Maximum number of rows.")] = 50,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """List jobs that were set aside because they were requeued too often.

    `comfyfleet admin dispatches show ID` shows what happened each time. `retry` submits the job
    again.
    """
    with connect(options, context) as plane:
        answer = plane.get("dispatches", poisoned=True, before=before, limit=limit)
    none = "no jobs are set aside"
    plane.tell_rows(answer, "dispatches", DISPATCH_COLUMNS, none=none, older="--before")


def reconcile(*, options: ApiOptions = API_DEFAULTS, context: InjectedContext) -> None:
    """Find and repair differences between jobs and dispatches. Safe at any time."""
    with connect(options, context) as plane:
        answer = _reconciled(plane)
    if options.as_json:
        print_json(answer, context)
        return
    ended = counted(answer["dispatches_ended"], "dispatch", "dispatches")
    created = counted(answer["dispatches_made"], "dispatch", "dispatches")
    context.say(f"{ended} ended, {created} created")
    if answer.get("pools_skipped"):
        context.warn(f"{counted(answer['pools_skipped'], 'pool', 'pools')} could not be reached")


def _reconciled(plane: ApiSession) -> dict[str, Any]:
    """Reconciles the whole queue. Each call covers part of a large queue."""
    answer = plane.post("reconcile")
    while following := answer.get("next"):
        more = plane.post("reconcile", after=following)
        answer = {
            name: more[name] if name == "next" else answer[name] + more[name] for name in answer
        }
    return answer
