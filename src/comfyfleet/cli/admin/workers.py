"""`comfyfleet admin workers`."""

from typing import Annotated, Any

from cyclopts import App, Parameter

from comfyfleet.cli.admin.client import USUALLY, Asking, control
from comfyfleet.cli.admin.showing import print_fields, print_json, print_rows
from comfyfleet.cli.world import InWorld

app = App(name="workers", help="The agents beside the GPUs. They join by themselves.")
WorkerId = Annotated[str, Parameter(help="The worker's id.")]
COLUMNS = (
    "worker:worker_id",
    "fleet",
    "state",
    "load:current_load",
    "of:max_concurrency",
    "seen:last_seen_at",
    "models_loaded",
)


@app.command(name="list")
def list_workers(
    *,
    fleet: Annotated[str | None, Parameter(help="Only this one's, as SLUG/STAGE.")] = None,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """All workers: where they are, what they do, when they were last heard of."""
    with control(asking, world) as plane:
        answer = plane.get("workers", fleet=fleet)
    if asking.as_json:
        print_json(answer, world)
        return
    none = "no worker has joined yet: comfyfleet worker --help"
    print_rows(answer["workers"], COLUMNS, world, none=none)


@app.command
def show(worker: WorkerId, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """One worker with its backend, its assignments and its last reading."""
    with control(asking, world) as plane:
        answer = plane.get("workers", worker)
    if asking.as_json:
        print_json(answer, world)
        return
    print_fields({**answer, "backend": None, "reading": None}, world)
    for name, part in (("Backend", answer["backend"]), ("Machine", answer["reading"])):
        if part:
            world.out.print(f"\n{name}")
            print_fields({field: _counted(value) for field, value in part.items()}, world)


@app.command
def approve(worker: WorkerId, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """Let a worker take jobs that waits for approval, or that was revoked."""
    _act(worker, "approve", "takes jobs", asking, world)


@app.command
def revoke(worker: WorkerId, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """End a worker's key at once, bar its id, and give its jobs to others."""
    answer = _act(worker, "revoke", "is revoked; its jobs are queued again", asking, world)
    if not asking.as_json:
        world.say(answer["hint"])


@app.command
def drain(
    worker: WorkerId,
    /,
    *,
    stop: Annotated[bool, Parameter(help="Let it take jobs again.")] = False,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Let a worker finish what it runs and take nothing new."""
    if stop:
        _act(worker, "undrain", "takes jobs again", asking, world)
    else:
        _act(
            worker, "drain", "drains: it finishes what it has and takes nothing new", asking, world
        )


@app.command
def rotate_key(
    worker: WorkerId,
    /,
    *,
    now: Annotated[
        bool, Parameter(help="The key it has is dead at once, and its run is lost.")
    ] = False,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Make a worker a new key. It is told, and goes on with it; the old one is dead then."""
    with control(asking, world) as plane:
        answer = plane.post("workers", worker, "rotate-token", now=now)
    if asking.as_json:
        print_json(answer, world)
        return
    world.say(f"worker {worker}; its new key, shown this once:")
    world.stdout.write(f"{answer['token']}\n".encode())
    world.stdout.flush()


def _counted(value: Any) -> Any:
    """Hundreds of node types and model files are told by their number; --json has them all."""
    return len(value) if isinstance(value, list | dict) else value


def _act(worker: str, act: str, done: str, asking: Asking, world: InWorld) -> dict[str, Any]:
    with control(asking, world) as plane:
        answer = plane.post("workers", worker, act)
    if asking.as_json:
        print_json(answer, world)
    else:
        world.say(f"worker {worker} {done}")
    return answer
