"""`comfyfleet admin jobs`: one job as its tenant sees it."""

from typing import Annotated

from cyclopts import App, Parameter

from comfyfleet.cli.admin.client import USUALLY, Asking, control
from comfyfleet.cli.admin.showing import print_fields, print_json, print_rows
from comfyfleet.cli.world import InWorld

app = App(name="jobs", help="Jobs, by the ids that submit printed.")
OUTPUT_COLUMNS = ("filename", "size", "content_type", "url")
VALUE_COLUMNS = ("node_id", "name", "value")


@app.command
def show(
    job: Annotated[str, Parameter(help="The job's id.")],
    /,
    *,
    tenant: Annotated[
        str | None, Parameter(metavar="ID", help="Whose it is; else the tenant `default`.")
    ] = None,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """A job, its outputs, and why it isn't running if it isn't."""
    with control(asking, world) as plane:
        answer = plane.get("jobs", job, tenant_id=tenant)
    if asking.as_json:
        print_json(answer, world)
        return
    outputs = answer.pop("outputs", [])
    values = answer.pop("values", [])
    dispatch = answer.pop("dispatch", None) or {}
    keep = ("id", "worker_id", "attempts", "duration_seconds", "last_error")
    print_fields({**answer, **{f"dispatch {name}": dispatch.get(name) for name in keep}}, world)
    if outputs:
        world.out.print()
        print_rows(outputs, OUTPUT_COLUMNS, world, none="")
    if values:
        world.out.print()
        print_rows(values, VALUE_COLUMNS, world, none="")
