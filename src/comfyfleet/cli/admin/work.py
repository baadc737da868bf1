"""`comfyfleet admin tenants work`: a tenant's graph runs, pipeline runs and triggers."""

from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from comfyfleet.cli.context import InjectedContext
from comfyfleet.cli.control_plane import API_DEFAULTS, ApiOptions, connect
from comfyfleet.errors import InvalidInput

work_app = App(name="work", help="A tenant's runs, pipelines and triggers: list, pause, stop.")
WORK_COLUMNS = ("kind", "id", "user_id", "status", "created_at")
# A run with one of these statuses had already ended. A stopped run is cancelled.
ENDED_BEFORE = ("completed", "failed")
TenantId = Annotated[str, Parameter(help="The tenant's id.")]
UserId = Annotated[
    str | None, Parameter(name="--user", metavar="ID", help="Only runs and triggers of this user.")
]
Kind = Annotated[
    Literal["graph_run", "pipeline_run", "trigger"] | None,
    Parameter(help="The kind of the run or trigger that --id names."),
]
ItemId = Annotated[str | None, Parameter(name="--id", help="Only this run or trigger.")]


@work_app.command(name="list")
def list_work(
    tenant: TenantId,
    /,
    *,
    user: UserId = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """List open graph runs and pipeline runs, and all triggers."""
    query = {"user_id": user} if user else {}
    with connect(options, context) as plane:
        answer = plane.get("tenants", tenant, "work", **query)
    plane.tell_rows(
        answer, "items", WORK_COLUMNS, none="the tenant has no open runs and no triggers"
    )


@work_app.command(name="stop")
def stop_work(
    tenant: TenantId,
    /,
    *,
    user: UserId = None,
    kind: Kind = None,
    item: ItemId = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Stop runs and pipelines, and pause triggers. Running jobs are cancelled and refunded.

    Without --kind and --id, this applies to all of them.
    """
    _act("stop", "stopped", tenant, user, kind, item, options, context)


@work_app.command(name="pause")
def pause_work(
    tenant: TenantId,
    /,
    *,
    user: UserId = None,
    kind: Kind = None,
    item: ItemId = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Pause runs of graphs and pipelines, and triggers. Submitted jobs continue.

    Without --kind and --id, this applies to all of them.
    """
    _act("pause", "paused", tenant, user, kind, item, options, context)


def _act(
    verb: str,
    done: str,
    tenant: str,
    user: str | None,
    kind: str | None,
    item: str | None,
    options: ApiOptions,
    context: InjectedContext,
) -> None:
    if (kind is None) != (item is None):
        raise InvalidInput("--kind and --id can only be used together")
    with connect(options, context) as plane:
        if kind is not None and item is not None:
            answer = plane.post("tenants", tenant, "work", kind, item, verb)
            status = answer["status"]
            has_ended = status in ENDED_BEFORE
            result = (
                f"had already {status}; nothing was changed" if has_ended else f"is now {status}"
            )
            plane.tell(answer, f"{kind} {item} {result}")
            return
        scope = {"user_id": user} if user else {}
        total: dict[str, Any] = {"graph_runs": 0, "pipeline_runs": 0, "triggers": 0}
        has_more = True
        while has_more:
            answer = plane.post("tenants", tenant, "work", verb, **scope)
            has_more = answer["has_more"]
            total = {name: count + answer[name] for name, count in total.items()}
        summary = (
            f"{done}: {total['graph_runs']} graph runs, {total['pipeline_runs']} pipeline runs; "
            f"triggers paused: {total['triggers']}"
        )
        plane.tell(total, summary)
