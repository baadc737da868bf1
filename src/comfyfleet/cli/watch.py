"""`comfyfleet watch`: back to a run that was left alone."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Annotated

from cyclopts import Parameter

from comfyfleet.cli.run import INTO_OUTPUT, ResultOptions, print_results, reporter_for
from comfyfleet.cli.running.naming import check_folder
from comfyfleet.cli.running.progress import Plan, plan_from
from comfyfleet.cli.running.reporting import Reporter
from comfyfleet.cli.running.session import Made, Session
from comfyfleet.cli.running.targets import ANYWHERE, Target, TargetOptions, lasting_targets
from comfyfleet.cli.world import InWorld, World
from comfyfleet.comfy import Backend, ComfyServer
from comfyfleet.kernel.errors import FleetError, RunLost


def watch(
    run_id: Annotated[str, Parameter(metavar="ID", help="What `comfyfleet run --detach` printed.")],
    /,
    *,
    where: TargetOptions = ANYWHERE,
    results: ResultOptions = INTO_OUTPUT,
    world: InWorld,
) -> None:
    """See helps.WATCH."""
    check_folder(results.output_dir)
    targets = lasting_targets(where, world)
    with reporter_for(results, run_id[:8], world) as reporter:
        try:
            target, made = asyncio.run(_finished(run_id, targets, reporter, results, world))
        except FleetError as error:
            reporter.failed(error)
            raise
        except KeyboardInterrupt:
            world.say(f"no longer watched; run {run_id} goes on")
            raise
    if not results.as_json:
        print_results(made, target, world)


async def _finished(
    run_id: str,
    targets: Sequence[Target],
    reporter: Reporter,
    results: ResultOptions,
    world: World,
) -> tuple[Target, Made]:
    for target in targets:
        async with aclosing(target.connect()) as backend:
            # A cloud has another id for it than we gave, and is asked alone: no search for it.
            if len(targets) > 1 and await backend.adopt(run_id) is None:
                continue
            session = Session(backend, target, reporter, results.output_dir, world)
            plan = await _plan(backend, run_id)
            return target, await session.finish(run_id, plan, again=True)
    names = ", ".join(target.name for target in targets)
    raise RunLost(f"no run {run_id} is known to {names}", hint="Is it the right --server?")


async def _plan(backend: Backend, run_id: str) -> Plan:
    """The nodes and their names, where the server tells what it was given; a cloud doesn't."""
    found = await backend.handed_in(run_id) if isinstance(backend, ComfyServer) else None
    return Plan({}) if found is None else plan_from(*found)
