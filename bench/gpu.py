"""Runs a mixed backlog on a GPU, first through ComfyUI's own queue and then through comfyfleet.

    python bench/gpu.py --comfyui ~/ComfyUI --checkpoints a.safetensors b.safetensors
    python bench/gpu.py --engine                    (without GPU and ComfyUI: tests the benchmark)

The jobs generate images from text with checkpoints of that ComfyUI, in an order that is determined
by a seed. First, every server runs each model once. Then each scenario starts without loaded models
and with empty caches:

  queue     all jobs in the queue of one ComfyUI, in their order
  fleet     the same through comfyfleet
  queues    jobs distributed in turn over the queues of --per-gpu ComfyUIs
  fleets    the same through comfyfleet, with a worker for each

The figures come from the servers' own histories: the time from the first start to the last end, how
often a server had to switch models, the duration of a run with and without a switch, and how long a
server was idle between two runs. NVML reports how busy the GPU was. Each scenario runs only once,
so compare ratios, and run the benchmark twice.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from gpu_load.meter import GpuMeter
from gpu_load.prompts import EngineSteps, TextToImage, Workload, backlog
from gpu_load.servers import Problem, Server, Span, comfyuis, engines, logged
from support import ADMIN_KEY, COMFYFLEET, answers, bearer, call_json, free_port

FLEET, SLUG = "gpus", "bench"
QUEUE, FLEET_OF_ONE, QUEUES, FLEETS = SCENARIOS = ("queue", "fleet", "queues", "fleets")
PEERS = {FLEET_OF_ONE: QUEUE, FLEETS: QUEUES}
ENGINE_MODELS = ["a.safetensors", "b.safetensors"]
PER_GPU_MAX = 16
JOBS_MAX = 5_000
READY_SECONDS_MAX = 60
POLL_SECONDS = 0.2
Starting = AbstractContextManager[list[Server]]

console = Console(stderr=True)


@dataclass(frozen=True)
class ScenarioResult:
    """One scenario's results."""

    runs: int  # more than the number of jobs if a job was retried
    failed: int
    seconds: float
    jobs_per_minute: float
    switches: int
    run_seconds_same_model: float | None
    run_seconds_after_switch: float | None
    gap_ms_median: float | None
    gap_ms_longest: float | None
    gpu_percent: float | None
    gpu_memory_mib: int | None


@dataclass(frozen=True)
class Plan:
    workload: Workload
    models: list[str]
    jobs: int
    seed: int
    limit_seconds: int
    folder: Path
    free_seconds: float  # how long a ComfyUI gets to unload its models


def scenario_result(
    of_servers: Sequence[Sequence[Span]], jobs: int, meter: GpuMeter
) -> ScenarioResult:
    runs = [run for spans in of_servers for run in spans]
    pairs = [pair for spans in of_servers for pair in pairwise(spans)]
    gaps = [1000 * (after.started - before.ended) for before, after in pairs]
    same = [after.seconds for before, after in pairs if before.model == after.model]
    switched = [after.seconds for before, after in pairs if before.model != after.model]
    start, end = min(run.started for run in runs), max(run.ended for run in runs)
    gpu = meter.between(start, end)
    return ScenarioResult(
        runs=len(runs),
        failed=sum(not run.is_ok for run in runs),
        seconds=round(end - start, 2),
        jobs_per_minute=round(60 * jobs / max(end - start, 0.001), 1),
        switches=len(switched) + sum(bool(spans) for spans in of_servers),
        run_seconds_same_model=_median(same, 3),
        run_seconds_after_switch=_median(switched, 3),
        gap_ms_median=_median(gaps, 1),
        gap_ms_longest=round(max(gaps), 1) if gaps else None,
        gpu_percent=None if gpu is None else round(gpu[0], 1),
        gpu_memory_mib=None if gpu is None else gpu[1] // 2**20,
    )


def _median(values: Sequence[float], digits: int) -> float | None:
    return round(statistics.median(values), digits) if values else None


def until(is_so: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            raise Problem(f"{what}: not finished within {seconds:.0f} s")
        time.sleep(POLL_SECONDS)


def warm_up(servers: Sequence[Server], plan: Plan) -> None:
    """Runs each model once, because CUDA's first start, tokenizers and kernels are not part of the
    measurement."""
    for number, server in enumerate(servers):
        for model in plan.models:
            server.post(model, number)
    until(lambda: not any(server.remaining() for server in servers), plan.limit_seconds, "warm-up")
    if not all(run.is_ok for server in servers for run in server.spans()):
        raise Problem("a run of the warm-up failed: look at the servers' logs")


def by_own_queue(servers: Sequence[Server], plan: Plan) -> None:
    """Distributes jobs in turn, as a program without a scheduler would."""
    for number, (model, seed) in enumerate(backlog(plan.models, plan.jobs, plan.seed)):
        servers[number % len(servers)].post(model, seed)
    until(
        lambda: not any(server.remaining() for server in servers), plan.limit_seconds, "the backlog"
    )


def through_comfyfleet(servers: Sequence[Server], plan: Plan) -> None:
    """Queues the whole backlog before the first worker starts, as in the other scenarios."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=plan.folder)))
        url, admin = stack.enter_context(_control_plane(folder))
        secret = _set_up(admin, plan)
        for model, seed in backlog(plan.models, plan.jobs, plan.seed):
            values = {"model": model, "seed": seed}
            call_json(admin, "POST", "/jobs", workflow_slug=SLUG, properties=values)
        for server in servers:
            where = ("--control", url, "--fleet", FLEET, "--backend", server.url)
            state = ("--state", str(folder / f"worker-{server.number}"))
            command = (str(COMFYFLEET), "worker", *where, *state)
            log = plan.folder / f"worker-{server.number}.log"
            stack.enter_context(logged(command, folder, log, COMFYFLEET_FLEET_SECRET=secret))

        def all_ended() -> bool:
            return sum(len(server.spans()) for server in servers) >= plan.jobs

        until(all_ended, plan.limit_seconds, "the backlog through comfyfleet")


@contextmanager
def _control_plane(folder: Path) -> Iterator[tuple[str, httpx.Client]]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = (str(COMFYFLEET), "serve", "--port", str(port), "--data", str(folder / "data"))
    with (
        logged(command, folder, folder / "plane.log", COMFYFLEET_ADMIN_KEY=ADMIN_KEY),
        httpx.Client(base_url=url, headers=bearer(ADMIN_KEY), timeout=READY_SECONDS_MAX) as admin,
    ):
        until(lambda: answers(admin), READY_SECONDS_MAX, "the control plane's start")
        yield url, admin


def _set_up(admin: httpx.Client, plan: Plan) -> str:
    """Creates a fleet with one workflow whose jobs choose the model, and returns the fleet's
    secret."""
    secret = call_json(admin, "POST", "/fleets", slug=FLEET, stage="production")["secret"]
    workload = plan.workload
    seed = {"name": "seed", "type": "integer", "binding": workload.seed_input, "default": 0}
    model = {"name": "model", "type": "choice", "choices": plan.models}
    call_json(
        admin,
        "POST",
        "/workflows",
        slug=SLUG,
        document=workload.prompt(plan.models[0], 0),
        properties=[seed, {**model, "binding": workload.model_input}],
        output_node_id="9",
    )
    call_json(admin, "PUT", f"/fleets/{FLEET}/production/workflows", workflow_slugs=[SLUG])
    return str(secret)


def measured(
    scenarios: Sequence[str], servers: Sequence[Server], plan: Plan, index: int
) -> dict[str, ScenarioResult]:
    results = {}
    with GpuMeter(index) as meter:
        warm_up(servers, plan)
        for scenario in scenarios:
            selected = servers[:1] if scenario in (QUEUE, FLEET_OF_ONE) else servers
            for server in servers:
                server.forget()
            time.sleep(plan.free_seconds)
            run = through_comfyfleet if scenario in PEERS else by_own_queue
            run(selected, plan)
            results[scenario] = scenario_result(
                [server.spans() for server in selected], plan.jobs, meter
            )
            console.print(f"{scenario}: {results[scenario].seconds} s")
    return results


def ratios(results: dict[str, ScenarioResult]) -> dict[str, float]:
    """Returns comfyfleet's results divided by the results of the servers' own queues."""
    values = {}
    for ours, peer in PEERS.items():
        if ours in results and peer in results:
            values[f"time {ours} / {peer}"] = results[ours].seconds / results[peer].seconds
            values[f"switches {ours} / {peer}"] = results[ours].switches / results[peer].switches
    return {name: round(value, 3) for name, value in values.items()}


def show(results: dict[str, ScenarioResult], found_ratios: dict[str, float]) -> None:
    table = Table("", *results)
    for field in asdict(next(iter(results.values()))):
        values = (getattr(result, field) for result in results.values())
        table.add_row(
            field.replace("_", " "), *("–" if value is None else f"{value}" for value in values)
        )
    console.print(table)
    for name, value in found_ratios.items():
        console.print(f"{name}: {value}")


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--comfyui", type=Path, help="the folder of ComfyUI that contains main.py")
    add("--checkpoints", nargs="+", default=[], help="the names of two or more of its checkpoints")
    add("--engine", action="store_true", help="use the built-in engine instead, as a smoke test")
    add("--python", default=sys.executable, help="the Python that runs ComfyUI (default: this one)")
    add("--args", default="", help='arguments for ComfyUI, such as "--cache-lru 20"; --args="…"')
    add(
        "--per-gpu",
        type=int,
        default=1,
        help="the number of ComfyUIs on the GPU; with 2 or more, queues and fleets run as well",
    )
    add("--gpu", type=int, default=0, help="the index of the GPU whose utilization is read (0)")
    add("--jobs", type=int, default=60, help="the number of jobs in the backlog (60)")
    add("--size", type=int, default=512, help="the width and height of the pictures (512)")
    add("--steps", type=int, default=20, help="the sampler's steps (20)")
    add("--seed", type=int, default=7, help="the seed of the backlog's order (7)")
    scenarios = "comma-separated: queue,fleet,queues,fleets (default: all that --per-gpu allows)"
    add("--scenarios", default="", help=scenarios)
    add("--start-seconds", type=int, default=240, help="how long a ComfyUI may take to start (240)")
    add("--limit-seconds", type=int, default=1800, help="how long a scenario may take (1800)")
    add(
        "--folder",
        type=Path,
        default=Path("gpu-bench"),
        help="the folder for logs and outputs (gpu-bench)",
    )
    add("--json", type=Path, help="a file to which all results are written")
    add("--quick", action="store_true", help="two jobs on the built-in engine, as a smoke test")
    parsed = parser.parse_args(arguments)
    if parsed.quick:
        parsed.engine, parsed.jobs, parsed.steps = True, 2, 1
    return parsed


def checked(arguments: argparse.Namespace) -> list[str]:
    """Returns the scenarios. Raises Problem for invalid options before anything is started."""
    if arguments.engine == bool(arguments.comfyui):
        raise Problem("give either --comfyui FOLDER or --engine")
    if arguments.comfyui and not (arguments.comfyui / "main.py").is_file():
        raise Problem(f"{arguments.comfyui} is not a ComfyUI: there is no main.py in it")
    if arguments.comfyui and len(set(arguments.checkpoints)) < 2:
        raise Problem(
            "--checkpoints needs two or more names, because there is nothing to switch with one"
        )
    for name, maximum in (
        ("jobs", JOBS_MAX),
        ("per_gpu", PER_GPU_MAX),
        ("size", 8192),
        ("steps", 1000),
    ):
        if not 1 <= getattr(arguments, name) <= maximum:
            raise Problem(f"--{name.replace('_', '-')} must be 1 to {maximum}")
    usual = SCENARIOS if arguments.per_gpu > 1 else (QUEUE, FLEET_OF_ONE)
    scenarios = arguments.scenarios.split(",") if arguments.scenarios else list(usual)
    unknown = sorted(set(scenarios) - set(SCENARIOS))
    if unknown:
        raise Problem(f"there is no scenario {unknown[0]!r}; there are {', '.join(SCENARIOS)}")
    return scenarios


def starting(arguments: argparse.Namespace, plan: Plan) -> Starting:
    if arguments.engine:
        return engines(arguments.per_gpu, plan.workload, plan.folder)
    return comfyuis(
        arguments.per_gpu,
        plan.workload,
        plan.folder,
        tree=arguments.comfyui,
        python=arguments.python,
        more=arguments.args.split(),
        start_seconds=arguments.start_seconds,
    )


def plan_of(arguments: argparse.Namespace) -> Plan:
    engine = EngineSteps(arguments.steps)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    return Plan(
        workload=engine if arguments.engine else TextToImage(arguments.size, arguments.steps),
        models=ENGINE_MODELS if arguments.engine else list(dict.fromkeys(arguments.checkpoints)),
        jobs=arguments.jobs,
        seed=arguments.seed,
        limit_seconds=arguments.limit_seconds,
        folder=arguments.folder.resolve(),
        free_seconds=0.0 if arguments.engine else 2.0,
    )


def check_models(server: Server, models: Sequence[str]) -> None:
    offered = server.checkpoints()
    missing = [name for name in models if name not in offered]
    if missing:
        known = ", ".join(offered[:20]) or "none"
        raise Problem(f"this ComfyUI has no checkpoint {missing[0]!r}; it has: {known}")


def run(arguments: argparse.Namespace) -> int:
    scenarios, plan = checked(arguments), plan_of(arguments)
    with starting(arguments, plan) as servers:
        if not arguments.engine:
            check_models(servers[0], plan.models)
        results = measured(scenarios, servers, plan, arguments.gpu)
    result_ratios = ratios(results)
    show(results, result_ratios)
    whole = {
        "scenarios": {name: asdict(result) for name, result in results.items()},
        "ratios": result_ratios,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(whole, indent=2))
    is_right = all(result.runs >= plan.jobs and not result.failed for result in results.values())
    return 0 if is_right else 1


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return run(options(arguments))
    except Problem as problem:
        print(f"bench/gpu.py: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
