"""Shows the results as tables and as JSON."""

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from service_load.idle import Idle
from service_load.job_lifecycle import JOB_ROUTES, ROUTES
from service_load.measures import Latencies, Throughput
from service_load.processes import ProcessComparison

BEFORE, AFTER, FLOOR = "before", "after", "floor"
SIDES = (BEFORE, AFTER, FLOOR)
JOB = "job: the four"
JOB_MS_MAX = 5.0
STATEMENTS_MAX = 28
# The p50 of a submission, and the p50 until a waiting worker has the job.
LATENCY_MS_MAX = {"sqlite": (12, 15), "postgres": (10, 12)}


@dataclass
class Figures:
    """All results, by database and side."""

    cpu: dict[str, dict[str, Mapping[str, Sequence[float]]]] = field(default_factory=dict)
    statements: dict[str, dict[str, float]] = field(default_factory=dict)
    latency: dict[str, dict[str, Latencies]] = field(default_factory=dict)
    throughput: dict[str, dict[str, list[Throughput]]] = field(default_factory=dict)
    idle: dict[str, dict[str, Idle]] = field(default_factory=dict)
    several: list[ProcessComparison] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "cpu_microseconds": {
                database: {side: micros(samples) for side, samples in context.items()}
                for database, context in self.cpu.items()
            },
            "statements": self.statements,
            "latency_ms": {
                database: {
                    side: {name: quantiles(values) for name, values in vars(took).items()}
                    for side, took in context.items()
                }
                for database, context in self.latency.items()
            },
            "throughput": {
                database: {side: [vars(run) for run in runs] for side, runs in context.items()}
                for database, context in self.throughput.items()
            },
            "idle": {
                database: {side: vars(result) for side, result in context.items()}
                for database, context in self.idle.items()
            },
            "processes": [
                {
                    "processes": comparison.processes,
                    **vars(comparison.throughput),
                    "waits": comparison.waits,
                }
                for comparison in self.several
            ],
        }


def lower_quartile(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=4)[0] if len(values) > 1 else values[0]


def quantiles(values: Sequence[float]) -> dict[str, float]:
    parts = statistics.quantiles(values, n=100)
    return {"p50": parts[49], "p99": parts[98]}


def micros(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns the lower quartiles in microseconds, by route and for a whole job."""
    micros_by_route = {
        route: lower_quartile(samples[route]) for route in ROUTES if samples.get(route)
    }
    return micros_by_route | {JOB: sum(micros_by_route[route] for route in JOB_ROUTES)}


def print_tables(console: Console, figures: Figures, routes: Collection[str]) -> None:
    for database, context in figures.cpu.items():
        console.print(_cpu(database, context, figures.statements, routes))
    for database, took in figures.latency.items():
        console.print(_latency(database, took))
    for database, runs in figures.throughput.items():
        console.print(_throughput(database, runs))
    for database, results in figures.idle.items():
        console.print(_idle(database, results))
    if figures.several:
        console.print(_several(figures.several))


def _cpu(
    database: str,
    context: Mapping[str, Mapping[str, Sequence[float]]],
    statements: Mapping[str, Mapping[str, float]],
    routes: Collection[str],
) -> Table:
    table = Table("µs of CPU a call", *SIDES, "after/before", "after/floor", "statements", "limit")
    table.title = database
    micros_by_side = {side: micros(samples) for side, samples in context.items()}
    for route in (*ROUTES, JOB):
        if route not in routes and route != JOB:
            continue
        row = {side: values[route] for side, values in micros_by_side.items() if route in values}
        table.add_row(
            route,
            *(f"{row[side]:,.0f}" if side in row else "" for side in SIDES),
            _ratio(row, BEFORE),
            _ratio(row, FLOOR),
            " → ".join(
                f"{_count(statements[side], route):.1f}" for side in SIDES[:2] if side in statements
            ),
            f"≤ {JOB_MS_MAX * 1000:,.0f} µs, {STATEMENTS_MAX}" if route == JOB else "",
        )
    return table


def _ratio(values: Mapping[str, float], other: str) -> str:
    return f"{values[AFTER] / values[other]:.2f}" if AFTER in values and other in values else ""


def _count(statements: Mapping[str, float], route: str) -> float:
    routes = JOB_ROUTES if route == JOB else (route,)
    return sum(statements.get(name, 0) for name in routes)


def _latency(database: str, took: Mapping[str, Latencies]) -> Table:
    table = Table(
        "ms, one at a time",
        "submit p50",
        "p99",
        "a waiting worker has it p50",
        "p99",
        "complete p50",
        "p99",
    )
    table.title = database
    for side, durations in took.items():
        values = [
            quantiles(part) for part in (durations.submit, durations.has_it, durations.complete)
        ]
        table.add_row(side, *(f"{part[name]:.1f}" for part in values for name in ("p50", "p99")))
    submit, has_it = LATENCY_MS_MAX[database]
    table.add_row("limit", f"{submit}", "", f"{has_it}", "", "", "")
    return table


def _throughput(database: str, runs: Mapping[str, Sequence[Throughput]]) -> Table:
    table = Table("clients and workers", "jobs a second", "CPU ms a job")
    table.title = database
    for side, results in runs.items():
        best = max(one.jobs_per_second for one in results)
        table.add_row(
            side, f"{best:,.0f}", f"{lower_quartile([one.cpu_ms_per_job for one in results]):.1f}"
        )
    return table


def _idle(database: str, results: Mapping[str, Idle]) -> Table:
    table = Table("idle", "alone", "100 polls wait", "many polls", "memory alone", "with them")
    table.title = database
    for side, result in results.items():
        percents = (f"{result.alone_percent:.1f} %", f"{result.few_percent:.1f} %")
        sizes = (f"{result.base_mb:.0f} MB", f"{result.many_mb:.0f} MB")
        table.add_row(side, *percents, f"{result.many:,}", *sizes)
    table.add_row("limit", "1 %", "2 %", "10,000", "", "250 MB")
    return table


def _several(comparisons: Sequence[ProcessComparison]) -> Table:
    table = Table("processes", "jobs a second", "CPU ms a job", "connections that waited, by cause")
    table.title = "one port, postgres"
    for comparison in comparisons:
        one = comparison.throughput
        table.add_row(
            str(comparison.processes),
            f"{one.jobs_per_second:,.0f}",
            f"{one.cpu_ms_per_job:.1f}",
            comparison.summary(),
        )
    return table
