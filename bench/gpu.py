"""A mixed backlog on a GPU: by ComfyUI's own queue, and through comfyfleet.

    python bench/gpu.py --comfyui ~/ComfyUI --checkpoints a.safetensors b.safetensors
    python bench/gpu.py --engine                    (no GPU and no ComfyUI: whether the bench works)

The jobs are text to image with checkpoints that the ComfyUI has, shuffled by a seed. Each scenario starts
with models unloaded and caches dropped, after every server has run each model once:

  queue     all jobs in one ComfyUI's own queue, as they come        fleet      the same through comfyfleet
  queues    in turn into the queues of --per-gpu ComfyUIs            fleets     through comfyfleet, a worker each

Runs are taken from the servers' own history: the time from the first start to the last end, how often a
server had to switch models, what a run takes with and without that, and for how long a server stood idle
between two runs. How busy the GPU was is told by NVML. One run each, so look at ratios, and twice.
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
    """The figures of one scenario."""

    runs: int  # more than jobs, if one was run again
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
    free_seconds: float  # for a ComfyUI to let go of its models


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
            raise Problem(f"{what}: it did not happen within {seconds:.0f} s")
        time.sleep(POLL_SECONDS)


def warm_up(servers: Sequence[Server], plan: Plan) -> None:
    """Runs each model once: CUDA's first start, tokenizers and kernels are not what is measured."""
    for number, server in enumerate(servers):
        for model in plan.models:
            server.post(model, number)
    until(lambda: not any(each.remaining() for each in servers), plan.limit_seconds, "warm-up")
    if not all(run.is_ok for server in servers for run in server.spans()):
        raise Problem("a run of the warm-up failed: look at the servers' logs")


def by_own_queue(servers: Sequence[Server], plan: Plan) -> None:
    """Distributes jobs in turn, as a program without a scheduler would."""
    for number, (model, seed) in enumerate(backlog(plan.models, plan.jobs, plan.seed)):
        servers[number % len(servers)].post(model, seed)
    until(lambda: not any(each.remaining() for each in servers), plan.limit_seconds, "the backlog")


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
            return sum(len(each.spans()) for each in servers) >= plan.jobs

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
    """A fleet with one workflow whose jobs choose the model; returns the fleet's secret."""
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
    found = {}
    with GpuMeter(index) as meter:
        warm_up(servers, plan)
        for scenario in scenarios:
            those = servers[:1] if scenario in (QUEUE, FLEET_OF_ONE) else servers
            for server in servers:
                server.forget()
            time.sleep(plan.free_seconds)
            run = through_comfyfleet if scenario in PEERS else by_own_queue
            run(those, plan)
            found[scenario] = scenario_result([each.spans() for each in those], plan.jobs, meter)
            console.print(f"{scenario}: {found[scenario].seconds} s")
    return found


def ratios(found: dict[str, ScenarioResult]) -> dict[str, float]:
    """The ratios of comfyfleet to the servers' own queues."""
    found_ratios = {}
    for ours, peer in PEERS.items():
        if ours in found and peer in found:
            found_ratios[f"time {ours} / {peer}"] = found[ours].seconds / found[peer].seconds
            found_ratios[f"switches {ours} / {peer}"] = found[ours].switches / found[peer].switches
    return {name: round(value, 3) for name, value in found_ratios.items()}


def show(found: dict[str, ScenarioResult], found_ratios: dict[str, float]) -> None:
    table = Table("", *found)
    for field in asdict(next(iter(found.values()))):
        values = (getattr(each, field) for each in found.values())
        table.add_row(
            field.replace("_", " "), *("–" if each is None else f"{each}" for each in values)
        )
    console.print(table)
    for name, value in found_ratios.items():
        console.print(f"{name}: {value}")


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--comfyui", type=Path, help="ComfyUI's folder, with main.py in it")
    add("--checkpoints", nargs="+", default=[], help="two or more that it has, by name")
    add("--engine", action="store_true", help="the built-in engine instead: a smoke run")
    add("--python", default=sys.executable, help="the Python that runs ComfyUI; else this one")
    add("--args", default="", help='for ComfyUI, such as "--cache-lru 20"; --args="…"')
    add(
        "--per-gpu",
        type=int,
        default=1,
        help="so many ComfyUIs on the GPU; 2 or more add queues and fleets",
    )
    add("--gpu", type=int, default=0, help="whose utilisation is read, by its index")
    add("--jobs", type=int, default=60, help="of the backlog (60)")
    add("--size", type=int, default=512, help="of the pictures, each side (512)")
    add("--steps", type=int, default=20, help="of the sampler (20)")
    add("--seed", type=int, default=7, help="of the backlog's order (7)")
    add("--scenarios", default="", help="some of queue,fleet,queues,fleets; else all that fit")
    add("--start-seconds", type=int, default=240, help="for a ComfyUI to start (240)")
    add("--limit-seconds", type=int, default=1800, help="for one scenario (1800)")
    add("--folder", type=Path, default=Path("gpu-bench"), help="for logs and outputs (gpu-bench)")
    add("--json", type=Path, help="where all figures go, too")
    add("--quick", action="store_true", help="two jobs on the built-in engine: a smoke run")
    given = parser.parse_args(arguments)
    if given.quick:
        given.engine, given.jobs, given.steps = True, 2, 1
    return given


def checked(given: argparse.Namespace) -> list[str]:
    """The scenarios; raises Problem for invalid options before anything is started."""
    if given.engine == bool(given.comfyui):
        raise Problem("give either --comfyui FOLDER or --engine")
    if given.comfyui and not (given.comfyui / "main.py").is_file():
        raise Problem(f"{given.comfyui} is no ComfyUI: there is no main.py in it")
    if given.comfyui and len(set(given.checkpoints)) < 2:
        raise Problem("--checkpoints needs two or more names: with one there is nothing to switch")
    for name, most in (
        ("jobs", JOBS_MAX),
        ("per_gpu", PER_GPU_MAX),
        ("size", 8192),
        ("steps", 1000),
    ):
        if not 1 <= getattr(given, name) <= most:
            raise Problem(f"--{name.replace('_', '-')} must be 1 to {most}")
    usual = SCENARIOS if given.per_gpu > 1 else (QUEUE, FLEET_OF_ONE)
    wanted = given.scenarios.split(",") if given.scenarios else list(usual)
    unknown = sorted(set(wanted) - set(SCENARIOS))
    if unknown:
        raise Problem(f"there is no scenario {unknown[0]!r}; there are {', '.join(SCENARIOS)}")
    return wanted


def starting(given: argparse.Namespace, plan: Plan) -> Starting:
    if given.engine:
        return engines(given.per_gpu, plan.workload, plan.folder)
    return comfyuis(
        given.per_gpu,
        plan.workload,
        plan.folder,
        tree=given.comfyui,
        python=given.python,
        more=given.args.split(),
        start_seconds=given.start_seconds,
    )


def plan_of(given: argparse.Namespace) -> Plan:
    engine = EngineSteps(given.steps)
    given.folder.mkdir(parents=True, exist_ok=True)
    return Plan(
        workload=engine if given.engine else TextToImage(given.size, given.steps),
        models=ENGINE_MODELS if given.engine else list(dict.fromkeys(given.checkpoints)),
        jobs=given.jobs,
        seed=given.seed,
        limit_seconds=given.limit_seconds,
        folder=given.folder.resolve(),
        free_seconds=0.0 if given.engine else 2.0,
    )


def check_models(server: Server, models: Sequence[str]) -> None:
    offered = server.checkpoints()
    missing = [each for each in models if each not in offered]
    if missing:
        known = ", ".join(offered[:20]) or "none"
        raise Problem(f"this ComfyUI has no checkpoint {missing[0]!r}; it has: {known}")


def run(given: argparse.Namespace) -> int:
    scenarios, plan = checked(given), plan_of(given)
    with starting(given, plan) as servers:
        if not given.engine:
            check_models(servers[0], plan.models)
        found = measured(scenarios, servers, plan, given.gpu)
    found_ratios = ratios(found)
    show(found, found_ratios)
    whole = {
        "scenarios": {name: asdict(each) for name, each in found.items()},
        "ratios": found_ratios,
    }
    if given.json:
        given.json.write_text(json.dumps(whole, indent=2))
    is_right = all(each.runs >= plan.jobs and not each.failed for each in found.values())
    return 0 if is_right else 1


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return run(options(arguments))
    except Problem as problem:
        print(f"bench/gpu.py: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
