"""Measures how fast workflows are converted, next to comfy-cli's converter in the same run.

    make bench        or        python bench/convert.py [--rounds N] [--quick] [--check]

It prints three tables:

- All workflows in shared/oracle: the median and 95th percentile of the time per workflow. The
  converters take turns, and the best of several rounds counts.
- The time per node, from 10 to 10,000 nodes.
- The time per pass for a file of 200 nodes.

The script measures CPU time, because it is less affected by other load than the elapsed time.
"""

import argparse
import contextlib
import gc
import gzip
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from comfy_cli.workflow_to_api import convert_ui_to_api
from rich.console import Console
from rich.progress import track
from rich.table import Table

from comfyfleet.workflow import ObjectInfo, convert
from comfyfleet.workflow.emit import Budgets, Emission, Patterns, emit
from comfyfleet.workflow.model import DEFAULT_LIMITS
from comfyfleet.workflow.object_info import NodeTypes
from comfyfleet.workflow.parse import parse
from comfyfleet.workflow.resolve import Resolver, apply_primitives
from comfyfleet.workflow.subgraphs import expand, unique_ids, wire_all
from comfyfleet.workflow.wire import settle_types
from generated_workflows import CLASSES, generated
from support import exit_status

SHARED = Path(os.environ.get("COMFYFLEET_SHARED", Path(__file__).parents[2] / "shared"))
ORACLE = SHARED / "oracle"
SETS = (("core", "core"), ("custom", "custom"), ("synthetic", "custom"))
RATIO_MAX = 0.5
Case = tuple[Any, Any]

console = Console()


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--quick", action="store_true", help="few workflows, one round")
    options.add_argument("--check", action="store_true", help="fail if a limit is missed")
    arguments = options.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    logging.disable(logging.CRITICAL)  # comfy-cli logs every workflow that it can't convert
    is_met = True
    if ORACLE.is_dir():
        is_met = compare(load_cases()[:: 40 if arguments.quick else 1], rounds)
    else:
        console.print(
            f"The editor's recordings are not at {ORACLE}, so the converters are not compared."
        )
    scale(rounds, (10, 100) if arguments.quick else (10, 100, 1_000, 10_000))
    passes(rounds)
    return exit_status(is_met=is_met)


def load_cases() -> list[Case]:
    cases = []
    for name, info in SETS:
        object_info = json.loads(
            gzip.decompress((ORACLE / f"object_info.{info}.json.gz").read_bytes())
        )
        lines = gzip.decompress((ORACLE / f"{name}.jsonl.gz").read_bytes()).splitlines()
        cases += [(json.loads(line)["workflow"], object_info) for line in lines]
    return cases


def spent(function: Callable[[], Any]) -> float:
    """Returns CPU milliseconds. If a converter fails, the time until its error counts."""
    start = time.process_time_ns()
    with contextlib.suppress(Exception):
        function()
    return (time.process_time_ns() - start) / 1e6


def compare(cases: list[Case], rounds: int) -> bool:
    """Prints the table, and returns whether the ratios are within the limit."""
    gc.collect()
    gc.freeze()  # keeps the loaded cases out of collections during the measurement
    remembered = {id(info): ObjectInfo(info) for _, info in cases}
    times: dict[str, list[float]] = {"comfyfleet": [], "comfy-cli": [], "with ObjectInfo": []}
    for document, info in track(cases, "recorded workflows", console=console, transient=True):
        ways = (
            lambda: convert(document, info),  # noqa: B023
            lambda: convert_ui_to_api(document, info),  # noqa: B023
            lambda: convert(document, remembered[id(info)]),  # noqa: B023
        )
        measured = [[spent(way) for way in ways] for _ in range(rounds)]
        for name, column in zip(times, zip(*measured, strict=True), strict=True):
            times[name].append(min(column))
    table = Table("ms per workflow", *times, "ratio", title=f"{len(cases)} workflows")
    is_met = True
    for name, of in (("median", statistics.median), ("95th percentile", percentile_95)):
        ratio = of(times["comfyfleet"]) / of(times["comfy-cli"])
        is_met &= ratio <= RATIO_MAX
        verdict = "" if ratio <= RATIO_MAX else f" (target {RATIO_MAX})"
        table.add_row(
            name,
            *(f"{of(milliseconds):.3f}" for milliseconds in times.values()),
            f"{ratio:.2f}{verdict}",
        )
    console.print(table)
    return is_met


def percentile_95(times: list[float]) -> float:
    return sorted(times)[int(len(times) * 0.95)]


def scale(rounds: int, sizes: Sequence[int]) -> None:
    table = Table("nodes", "ms", "µs per node", "comfy-cli µs per node", title="size")
    for size in sizes:
        case = (generated(size), CLASSES)
        mine = min(spent(lambda case=case: convert(*case)) for _ in range(rounds))  # type: ignore[misc]
        other = min(spent(lambda case=case: convert_ui_to_api(*case)) for _ in range(rounds))  # type: ignore[misc]
        per_node = f"{mine / size * 1000:.1f}", f"{other / size * 1000:.1f}"
        table.add_row(f"{size:,}", f"{mine:.2f}", *per_node)
    console.print(table)


def passes(rounds: int) -> None:
    document = generated(200)
    parsed = unique_ids(parse(document))
    types = NodeTypes(CLASSES)
    graphs = {key: settle_types(wired) for key, wired in wire_all(parsed, types).items()}
    ready = {key: apply_primitives(wired, str) for key, wired in graphs.items()}
    steps: dict[str, Callable[[], Any]] = {
        "parse": lambda: parse(document),
        "wire: widgets, subgraphs": lambda: wire_all(parsed, NodeTypes(CLASSES)),
        "types of slots": lambda: [settle_types(wired) for wired in graphs.values()],
        "virtual wires: primitives": lambda: [apply_primitives(g, str) for g in graphs.values()],
        "virtual wires and bypass, emit": lambda: emitted(ready),
        "whole conversion": lambda: convert(document, CLASSES),
    }
    table = Table(
        "pass", "ms", title="200 nodes, half of them reroutes, Set/Get, bypassed, primitives"
    )
    for name, step in steps.items():
        table.add_row(name, f"{min(spent(step) for _ in range(rounds * 4)):.2f}")
    console.print(table)


def emitted(graphs: Any) -> Any:
    scopes = expand(graphs, DEFAULT_LIMITS)
    budgets = Budgets(DEFAULT_LIMITS)
    patterns = Patterns(graphs, None, budgets)
    return emit(scopes, Emission(Resolver(scopes), patterns, DEFAULT_LIMITS, budgets, None, False))


if __name__ == "__main__":
    sys.exit(main())
