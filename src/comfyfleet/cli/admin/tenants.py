"""`comfyfleet admin tenants | ledger | jobs | submit`: tenants with their keys, wallets and
jobs."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Group, Parameter

from comfyfleet.cli.admin.fleets import changed_terms, tell_terms
from comfyfleet.cli.context import CliContext, InjectedContext, counted
from comfyfleet.cli.control_plane import API_DEFAULTS, ApiOptions, ApiSession, connect
from comfyfleet.cli.job_waiter import JobWaiter, person_needed_if_refused
from comfyfleet.cli.tables import print_fields, print_json, print_rows
from comfyfleet.cli.upload import download, parse_files, parse_values, upload
from comfyfleet.errors import Conflict, InvalidInput, NotFound, RunFailed, RunTimedOut, Unavailable

ledger_app = App(name="ledger", help="Wallets and transactions: verify that they add up.")
LEDGER_COLUMNS = ("fault", "tenant:tenant_id", "user:user_id", "job:job_id", "message")


@ledger_app.command
def verify(
    *,
    tenant: Annotated[str | None, Parameter(metavar="ID", help="Verify only this tenant.")] = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Check balances against transactions, and transactions against jobs, without changing anything.

    Exits with code 1 if something does not add up, or if a pool can't be reached. The other pools
    are still verified."""
    with connect(options, context) as plane:
        answer = plane.get("ledger", tenant_id=tenant)
    if options.as_json:
        print_json(answer, context)
    elif answer["is_sound"]:
        context.say("everything adds up")
    else:
        print_rows(
            answer["drifts"], LEDGER_COLUMNS, context, none="all pools that could be read add up"
        )
    down = ", ".join(answer.get("pools_left_out", ()))
    if down and answer["found"]:
        context.warn(f"pools that can't be reached were not verified: {down}")
    elif down:
        raise Unavailable(
            f"pools that can't be reached were not verified: {down}",
            hint="See the control plane's log for the reason, and verify again when they are available.",
        )
    if not answer["is_sound"]:
        raise Conflict(
            f"{counted(answer['found'], 'inconsistency', 'inconsistencies')} found",
            hint="See docs/how-to/operate.md for the meaning of each fault and how to fix it.",
        )


jobs_app = App(name="jobs", help="Jobs of all tenants: list, explain.")
LIST_COLUMNS = (
    "id",
    "status",
    "workflow",
    "tenant:tenant_id",
    "attempt",
    "submitted:submitted_at",
    "error",
)
OUTPUT_COLUMNS = ("filename", "size", "content_type", "url")
VALUE_COLUMNS = ("node_id", "name", "value")


@jobs_app.command(name="show")
def show_job(
    job: Annotated[str, Parameter(help="The job's id.")],
    /,
    *,
    tenant: Annotated[
        str | None, Parameter(metavar="ID", help="Search for the job only in this tenant.")
    ] = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Show a job of any tenant, its outputs, and why it isn't running."""
    with connect(options, context) as plane:
        answer = plane.get("jobs", job, tenant_id=tenant)
    if options.as_json:
        print_json(answer, context)
        return
    outputs = answer.pop("outputs", [])
    values = answer.pop("values", [])
    dispatch = answer.pop("dispatch", None) or {}
    keep = ("id", "worker_id", "attempts", "duration_seconds", "last_error")
    print_fields({**answer, **{f"dispatch {name}": dispatch.get(name) for name in keep}}, context)
    if outputs:
        context.out.print()
        print_rows(outputs, OUTPUT_COLUMNS, context, none="")
    if values:
        context.out.print()
        print_rows(values, VALUE_COLUMNS, context, none="")


@Parameter(name="*")
@dataclass(frozen=True)
class JobFilterOptions:
    """Selects jobs."""

    status: Annotated[
        Literal["queued", "processing", "completed", "failed", "cancelled"] | None,
        Parameter(help="Only jobs with this status."),
    ] = None
    tenant: Annotated[str | None, Parameter(metavar="ID", help="Show only this tenant.")] = None
    workflow: Annotated[str | None, Parameter(help="Show only this workflow.")] = None
    worker: Annotated[
        str | None, Parameter(help="Only jobs that were last leased to this worker.")
    ] = None
    since: Annotated[
        str | None,
        Parameter(metavar="TIME", help="Only jobs submitted since this date, such as 2026-11-15."),
    ] = None
    after: Annotated[
        str | None,
        Parameter(help="Show the next page. Use the value that the previous page printed."),
    ] = None


ALL = JobFilterOptions()


@jobs_app.command(name="list")
def list_jobs(
    *,
    filters: JobFilterOptions = ALL,
    limit: Annotated[int, Parameter(help="Maximum number of rows.")] = 50,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """List jobs of all tenants, newest first."""
    with connect(options, context) as plane:
        answer = plane.get("jobs", **asdict(filters), limit=limit)
    if options.as_json:
        print_json(answer, context)
        return
    print_rows(answer["jobs"], LIST_COLUMNS, context, none="there are no matching jobs")
    if down := answer.get("pools_left_out"):
        context.warn(
            f"left out, because they can't be reached: jobs of the pools {', '.join(down)}"
        )
    if answer.get("next"):
        context.say(f"next page: --after {answer['next']}")


@jobs_app.command
def prompt(
    job: Annotated[str, Parameter(help="The job's id.")],
    /,
    *,
    attempt: Annotated[
        int | None, Parameter(help="The number of the attempt. Default: the last reported one.")
    ] = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Print the prompt as it was sent to the backend, as JSON."""
    with connect(options, context) as plane:
        answer = plane.get("jobs", job, "attempts")
    if options.as_json:
        print_json(answer, context)
        return
    sent = [entry for entry in answer["attempts"] if attempt in (None, entry["attempt"])]
    if sent:
        context.say(f"attempt {sent[-1]['attempt']} on {sent[-1]['worker_id']}")
    else:
        context.say(
            "no worker has reported what it sent; this is the prompt as workers receive it:"
        )
    prompt_sent = sent[-1]["prompt"] if sent else answer["prompt"]
    if prompt_sent is None:
        raise NotFound("the prompt was deleted, because the job ended long ago")
    print_json(prompt_sent, context)


WHERE = Group("Where and when", sort_key=2)
RESULTS = Group("Results", sort_key=3)


@Parameter(name="*", group=WHERE)
@dataclass(frozen=True)
class PlacementOptions:
    tenant: Annotated[
        str | None,
        Parameter(metavar="ID", help="The owner of the job. Default: the tenant `default`."),
    ] = None
    version: Annotated[
        int | None, Parameter(help="The workflow's version. Default: the active one.")
    ] = None
    priority: Annotated[
        int, Parameter(help="Jobs with a higher priority run first.", allow_leading_hyphen=True)
    ] = 0
    stage: Annotated[str, Parameter(help="The stage of the fleets that may run it.")] = "production"
    provider: Annotated[Literal["self_hosted", "cloud"], Parameter(help="The kind of backend.")] = (
        "self_hosted"
    )
    affinity: Annotated[
        str | None,
        Parameter(
            metavar="WHO",
            help="Run the job only on this worker or fleet: worker:ID or fleet:SLUG/STAGE.",
        ),
    ] = None


@Parameter(name="*", group=RESULTS)
@dataclass(frozen=True)
class FollowOptions:
    wait: Annotated[
        bool, Parameter(help="Wait until all jobs have ended, and print the results.")
    ] = False
    output_dir: Annotated[
        Path | None,
        Parameter(
            name=["--output-dir", "-o"],
            metavar="DIR",
            help="Wait, and save the results in this folder. Existing files are not overwritten.",
        ),
    ] = None

    @property
    def waits(self) -> bool:
        return self.wait or self.output_dir is not None


ANYWHERE, NOT_FOLLOWED = PlacementOptions(), FollowOptions()


def submit(
    workflow: Annotated[str, Parameter(help="The slug of a registered workflow.")],
    /,
    *,
    set_: Annotated[
        tuple[str, ...],
        Parameter(
            name="--set",
            metavar="NAME=VALUE",
            help="A property's value. Repeatable.",
            allow_leading_hyphen=True,
        ),
    ] = (),
    file: Annotated[
        tuple[str, ...],
        Parameter(
            metavar="NAME=PATH", help="A file for an image, video or audio property. Repeatable."
        ),
    ] = (),
    count: Annotated[
        int,
        Parameter(help="Number of jobs. Each one gets new random seeds, unless you set the seeds."),
    ] = 1,
    placing: PlacementOptions = ANYWHERE,
    following: FollowOptions = NOT_FOLLOWED,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Submit one or more jobs. Prints their ids to stdout.

    ```
    comfyfleet admin submit cat --set prompt="a cat" --file input=cat.png --wait
    ```
    """
    if following.output_dir:
        from comfyfleet.cli.run_session import check_folder  # slow: imports all backends

        check_folder(following.output_dir)
    with connect(options, context) as plane:
        submission = _Submission(plane, placing, following, options, context)
        with person_needed_if_refused(waits=following.waits):
            submission.run(workflow, set_, file, count)


@dataclass(frozen=True)
class _Submission:
    plane: ApiSession
    placing: PlacementOptions
    following: FollowOptions
    options: ApiOptions
    context: CliContext

    def run(self, slug: str, texts: Sequence[str], files: Sequence[str], count: int) -> None:
        properties = self.plane.get("workflows", slug)["properties"]
        values = parse_values(texts, properties, slug)
        uploads = parse_files(files, properties, slug)
        ids = self._submitted(slug, values, uploads, count)
        if not self.following.waits:
            self._print_ids(ids, slug)
            return
        try:
            jobs = JobWaiter(self.plane, self.context, self.placing.tenant).wait(ids)
        except KeyboardInterrupt:
            self._print_ids(ids, slug)  # the jobs continue, and these ids identify them
            raise
        saved = self._saved(jobs)
        if self.options.as_json:
            print_json({"jobs": jobs, "saved": saved}, self.context)
        else:
            self._tell(jobs, saved)
        _check(jobs)

    def _submitted(
        self, slug: str, values: Mapping[str, Any], files: Mapping[str, Path], count: int
    ) -> list[str]:
        placing = self.placing
        body: dict[str, Any] = {
            "workflow_slug": slug,
            "properties": values,
            "files": {name: self._uploaded(path) for name, path in files.items()},
            "priority": placing.priority,
            "stage": placing.stage,
            "provider": placing.provider,
            "count": count,
            "tenant_id": placing.tenant,
            "version": placing.version,
            "backend_affinity": placing.affinity,
        }
        fields = {name: value for name, value in body.items() if value is not None}
        answer = self.plane.post("jobs", **fields)
        for warning in answer.get("warnings", ()):
            self.context.warn(warning)
        ids: list[str] = answer["ids"]
        return ids

    def _uploaded(self, path: Path) -> str:
        owner = {"tenant_id": self.placing.tenant} if self.placing.tenant else {}
        return upload(self.plane, path, "uploads", **owner)

    def _saved(self, jobs: Sequence[Mapping[str, Any]]) -> list[str]:
        from comfyfleet.cli.run_session import readable_name, reserve_name

        folder = self.following.output_dir
        if folder is None:
            return []
        saved = []
        for output in (item for job in jobs for item in job.get("outputs", ())):
            path = reserve_name(folder, readable_name(output["filename"]))
            download(self.plane, output["url"], path)
            saved.append(str(path))
        return saved

    def _print_ids(self, ids: Sequence[str], slug: str) -> None:
        if self.options.as_json:
            print_json({"ids": ids}, self.context)
            return
        self._lines(ids)
        self.context.say(
            f"{counted(len(ids), 'job', 'jobs')} of {slug} submitted; "
            f"show one with: comfyfleet admin jobs show {ids[0]}"
        )

    def _tell(self, jobs: Sequence[Mapping[str, Any]], saved: Sequence[str]) -> None:
        urls = [str(output["url"]) for job in jobs for output in job.get("outputs", ())]
        values = [value["value"] for job in jobs for value in job.get("values", ())]
        self._lines(saved if self.following.output_dir else urls)
        self._lines([value if isinstance(value, str) else json.dumps(value) for value in values])
        good = sum(job["status"] == "completed" for job in jobs)
        files = counted(len(urls), "file", "files")
        if values:
            files += ", " + counted(len(values), "value", "values")
        self.context.say(f"{good} of {counted(len(jobs), 'job', 'jobs')} completed: {files}")

    def _lines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.context.stdout.write(f"{line}\n".encode())
        self.context.stdout.flush()


def _check(jobs: Sequence[Mapping[str, Any]]) -> None:
    """Raises an error, which sets the exit code, if a job did not complete."""
    bad = [job for job in jobs if job["status"] != "completed"]
    if not bad:
        return
    first = bad[0]
    reason = first.get("error") or first["status"]
    raise RunFailed(
        f"{len(bad)} of {counted(len(jobs), 'job', 'jobs')} did not complete; job {first['id']}: {reason}",
        hint=f"Show it with: comfyfleet admin jobs show {first['id']}",
    )


TenantId = Annotated[str, Parameter(help="The tenant's id.")]
UserId = Annotated[str | None, Parameter(metavar="ID", help="The user, if the tenant has several.")]


def resolve_user(plane: ApiSession, tenant: str, user: str | None) -> str:
    """Returns the given user, or the tenant's only user."""
    if user is not None:
        return user
    users = plane.get("tenants", tenant, "users", limit=2)["users"]
    if len(users) != 1:
        raise InvalidInput(
            f"tenant {tenant} has {'several users' if users else 'no user'}; specify one with --user",
            hint=f"List the users with: comfyfleet admin tenants show {tenant}",
        )
    user_id: str = users[0]["id"]
    return user_id


keys_app = App(name="keys", help="API keys of a tenant's users.")
KEY_COLUMNS = ("id", "name", "prefix", "scopes", "created:created_at", "expires_at", "revoked_at")


@keys_app.command(name="list")
def list_keys(
    tenant: TenantId,
    /,
    *,
    user: UserId = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """List a user's keys, including revoked ones. Only their first characters are shown."""
    with connect(options, context) as plane:
        answer = plane.get("tenants", tenant, "users", resolve_user(plane, tenant, user), "keys")
    plane.tell_rows(answer, "keys", KEY_COLUMNS, none="there are no keys")


@keys_app.command(name="create")
def create_key(
    tenant: TenantId,
    /,
    *,
    name: Annotated[str, Parameter(help="A name for the key.")] = "key",
    scope: Annotated[
        tuple[str, ...], Parameter(help="read, write or keys. Default: all. Repeatable.")
    ] = (),
    expires: Annotated[
        str | None,
        Parameter(
            metavar="TIME",
            help="When the key expires, such as 2027-01-31T12:00:00Z. Default: never.",
        ),
    ] = None,
    user: UserId = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Create a key for a user. It is shown only once."""
    options_by_field: dict[str, Any] = {"name": name, "scopes": list(scope), "expires_at": expires}
    fields = {field: value for field, value in options_by_field.items() if value}
    with connect(options, context) as plane:
        owner = resolve_user(plane, tenant, user)
        answer = plane.post("tenants", tenant, "users", owner, "keys", **fields)
    message = f"key {answer['id']} of user {owner}, shown only once:"
    plane.tell(answer, message, line=answer["key"])


@keys_app.command
def revoke(
    tenant: TenantId,
    key: Annotated[str, Parameter(help="The key's id, from `list`.")],
    /,
    *,
    user: UserId = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Revoke a key immediately."""
    with connect(options, context) as plane:
        owner = resolve_user(plane, tenant, user)
        answer = plane.post("tenants", tenant, "users", owner, "keys", key, "revoke")
    plane.tell(answer, f"key {answer['prefix']}… is revoked")


tenants_app = App(
    name="tenants", help="Owners of jobs, who pay for them: create, limit, credit, erase."
)
tenants_app.command(keys_app)
TENANT_COLUMNS = (
    "id",
    "name",
    "pool",
    "retention_days",
    "max_queued",
    "created:created_at",
    "erased_at",
)
USER_COLUMNS = ("id", "email", "name", "is_active", "balance", "created:created_at")
PAUSE_SECONDS = 1.0
WAIT_SECONDS_MAX = 600.0


@tenants_app.command(name="list")
def list_tenants(*, options: ApiOptions = API_DEFAULTS, context: InjectedContext) -> None:
    """List all tenants."""
    none = "there are no tenants yet: comfyfleet admin tenants create NAME"
    with connect(options, context) as plane:
        plane.tell_rows(plane.get("tenants"), "tenants", TENANT_COLUMNS, none=none)


@tenants_app.command(name="create")
def create_tenant(
    name: Annotated[str, Parameter(help="A display name. Commands use the id.")],
    /,
    *,
    email: Annotated[
        str | None, Parameter(help="The email address of the tenant's first user.")
    ] = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Create a tenant and its first user in the pool with the fewest tenants. The key is shown only
    once."""
    body = {} if email is None else {"email": email}
    with connect(options, context) as plane:
        answer = plane.post("tenants", name=name, **body)
    message = f"tenant {answer['id']} ({name}) with user {answer['user_id']}"
    plane.tell(answer, message, "the user's key, shown only once:", line=answer["key"])


@tenants_app.command(name="show")
def show_tenant(
    tenant: TenantId, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Show a tenant, its limits, and its users with their balances."""
    with connect(options, context) as plane:
        answer = plane.get("tenants", tenant)
        users, problem = _users(plane, tenant)
    if options.as_json:
        print_json({**answer, "users": users}, context)
    else:
        print_fields(answer, context)
    if problem is not None:
        raise Unavailable(
            f"the users and balances in pool {answer['pool']} could not be read: {problem.message}",
            hint="See the control plane's log for the reason.",
        )
    if not options.as_json:
        context.out.print()
        print_rows(users or (), USER_COLUMNS, context, none="it has no users")


def _users(
    plane: ApiSession, tenant: str
) -> tuple[list[dict[str, Any]] | None, Unavailable | None]:
    """Returns the users with their balances, or None with the reason why their pool can't be
    read."""
    try:
        users = plane.get("tenants", tenant, "users")["users"]
        wallets = [plane.get("tenants", tenant, "wallets", user["id"]) for user in users]
    except Unavailable as error:
        return None, error
    pairs = zip(users, wallets, strict=True)
    return [{**user, "balance": wallet["balance"]} for user, wallet in pairs], None


@tenants_app.command
def limits(
    tenant: TenantId,
    /,
    *,
    min_priority: Annotated[int, Parameter(help="The lowest priority of the tenant's jobs.")] = -10,
    max_priority: Annotated[int, Parameter(help="The highest priority of the tenant's jobs.")] = 10,
    max_queued: Annotated[
        int | None, Parameter(help="Maximum number of queued jobs. Default: the global limit.")
    ] = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Set the range of a tenant's priorities, and its maximum number of queued jobs."""
    fields = {
        "min_priority": min_priority,
        "max_priority": max_priority,
        "max_queued": max_queued,
    }
    with connect(options, context) as plane:
        answer = plane.put("tenants", tenant, "limits", **fields)
    most = "the default number of jobs" if max_queued is None else f"{max_queued} jobs"
    message = f"tenant {tenant}: priorities {min_priority} to {max_priority}, at most {most} can be queued"
    plane.tell(answer, message)


@Parameter(name="*")
@dataclass(frozen=True)
class TenantPromptOptions:
    """The changes to a tenant's prompt settings."""

    fleets: Annotated[
        tuple[str, ...] | None,
        Parameter(
            name="--fleet",
            metavar="SLUG/STAGE",
            help="A fleet that the tenant's prompts may use. Repeatable; replaces the list.",
        ),
    ] = None
    any_fleet: Annotated[
        bool, Parameter(negative="", help="Allow all fleets that accept prompts.")
    ] = False
    allow: Annotated[
        tuple[str, ...] | None,
        Parameter(
            help="Node types that the tenant's prompts may use. Repeatable; replaces the list."
        ),
    ] = None
    deny: Annotated[
        tuple[str, ...] | None,
        Parameter(
            help="Node types that the tenant's prompts may not use. Repeatable; replaces the list."
        ),
    ] = None


NO_CHANGE = TenantPromptOptions()


@tenants_app.command
def prompts(
    tenant: TenantId,
    /,
    *,
    prompt_options: TenantPromptOptions = NO_CHANGE,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Show or change which fleets and node types a tenant's prompts may use."""
    if prompt_options.any_fleet and prompt_options.fleets:
        raise InvalidInput("--any-fleet and --fleet can't be combined")
    changes = changed_terms(prompt_options)
    if changes.pop("any_fleet"):
        changes["fleets"] = None
    with connect(options, context) as plane:
        answer = plane.get("tenants", tenant, "prompts")
        if changes:
            answer = plane.put("tenants", tenant, "prompts", **{**answer, **changes})
    tell_terms(answer, options, context)


@tenants_app.command
def retention(
    tenant: TenantId,
    days: Annotated[
        int | None, Parameter(help="Number of days. Default: the global setting.")
    ] = None,
    /,
    *,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Set after how many days a tenant's media and files are deleted. The ledger is kept."""
    with connect(options, context) as plane:
        answer = plane.put("tenants", tenant, "retention", retention_days=days)
    period = "for the default period" if days is None else f"for {days} days"
    plane.tell(answer, f"tenant {tenant}: media and files are kept {period}")


@tenants_app.command
def quota(
    tenant: TenantId,
    most_bytes: Annotated[
        int | None,
        Parameter(help="The quota. If omitted, the quota is only shown. 0 refuses all uploads."),
    ] = None,
    /,
    *,
    as_settings: Annotated[bool, Parameter(help="Reset the quota to the default.")] = False,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Show a tenant's storage usage and quota, or set the quota."""
    with connect(options, context) as plane:
        if as_settings or most_bytes is not None:
            limit = None if as_settings else most_bytes
            plane.put("tenants", tenant, "quota", max_storage_bytes=limit)
        answer = plane.get("tenants", tenant, "storage")
    usage = f"{answer['used_bytes']:,} of {answer['max_storage_bytes']:,} bytes are used"
    plane.tell(answer, f"tenant {tenant}: {usage}")


@tenants_app.command
def storage(
    tenant: TenantId,
    /,
    *,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Show a tenant's storage usage, and the number of its objects without a database row.

    Such objects remain from interrupted uploads and jobs. A sweep deletes them after a day."""
    with connect(options, context) as plane:
        answer = plane.get("tenants", tenant, "storage", unnamed=True)
    count = f"{answer['unnamed_objects']:,}"
    more = "" if answer["is_complete"] else " of the first 100,000"
    plane.tell(
        answer,
        f"tenant {tenant}: {answer['used_bytes']:,} of {answer['max_storage_bytes']:,} bytes are used; "
        f"{count}{more} objects have no row",
    )


@tenants_app.command
def show_backends(
    tenant: TenantId,
    setting: Annotated[
        Literal["on", "off", "default"],
        Parameter(help="`default` means the value of COMFYFLEET_SHOW_BACKENDS."),
    ],
    /,
    *,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Set whether a tenant's users see machine names, tracebacks and devices."""
    value = None if setting == "default" else setting == "on"
    with connect(options, context) as plane:
        answer = plane.put("tenants", tenant, "show-backends", show_backends=value)
    plane.tell(answer, f"tenant {tenant}: backends are shown: {setting}")


@tenants_app.command
def credit(
    tenant: TenantId,
    amount: Annotated[int, Parameter(help="In tokens.")],
    /,
    *,
    payment: Annotated[
        str,
        Parameter(
            metavar="ID",
            help="The payment's id at the payment provider. Repeating an id has no effect.",
        ),
    ],
    reason: Annotated[str | None, Parameter(help="The reason, for the audit log.")] = None,
    user: UserId = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Credit a payment to a user's wallet. Each payment is credited only once."""
    with connect(options, context) as plane:
        owner = resolve_user(plane, tenant, user)
        answer = plane.post(
            "tenants",
            tenant,
            "wallets",
            owner,
            "credits",
            amount=amount,
            provider_transaction_id=payment,
            **({"reason": reason} if reason else {}),
        )
    plane.tell(answer, f"user {owner} has {answer['balance']} tokens")


@tenants_app.command
def erase(
    tenant: TenantId,
    /,
    *,
    yes: Annotated[
        bool,
        Parameter(
            help="Confirm the deletion, which can't be undone. Without this option, nothing is deleted."
        ),
    ] = False,
    wait: Annotated[
        bool, Parameter(negative="--no-wait", help="Wait until everything is deleted.")
    ] = True,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Delete a tenant's private data: files, media, prompts, properties, events, webhooks and keys.

    Active jobs are cancelled and refunded. The ledger is kept. Run the command again to
    continue."""
    with connect(options, context) as plane:
        answer = plane.get("tenants", tenant)
        if not yes:
            raise InvalidInput(
                f"tenant {tenant} ({answer['name']}) would be erased, which can't be undone",
                hint=f"Erase it with: comfyfleet admin tenants erase {tenant} --yes",
            )
        answer = plane.post("tenants", tenant, "erase")
        if wait:
            answer = _erased(plane, tenant)
    result = "is erased; its ledger is kept" if answer["erased_at"] else "is being erased"
    plane.tell(answer, f"tenant {tenant} {result}")


def _erased(plane: ApiSession, tenant: str) -> dict[str, Any]:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while time.monotonic() < deadline:
        answer = plane.get("tenants", tenant)
        if answer["erased_at"]:
            return answer
        time.sleep(PAUSE_SECONDS)
    raise RunTimedOut(
        f"tenant {tenant} is still being erased after {WAIT_SECONDS_MAX:g} s; the erasure continues",
        hint=f"Check whether it is complete with: comfyfleet admin tenants show {tenant}",
    )
