"""What a pack of workers does, for Prometheus: asked for at the worker itself, where that is wanted."""

import contextlib
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from comfyfleet.agent.pack import Pack

PREFIX = "comfyfleet_worker"


class PackMetrics(Collector):
    def __init__(self, pack: Pack) -> None:
        self._pack = pack

    def collect(self) -> Iterator[Metric]:
        there = GaugeMetricFamily(
            f"{PREFIX}_backends", "ComfyUIs by state: ready, leaving, away", labels=("gpu", "state")
        )
        for gpu, members in self._pack.members.items():
            leaving = sum(each.is_leaving for each in members)
            ready = sum(each.is_ready for each in members)
            there.add_metric((gpu, "ready"), ready)
            there.add_metric((gpu, "leaving"), leaving)
            there.add_metric((gpu, "away"), len(members) - ready - leaving)
        yield there
        finished = CounterMetricFamily(f"{PREFIX}_jobs_finished", "Jobs delivered", labels=("gpu",))
        short = CounterMetricFamily(
            f"{PREFIX}_out_of_memory", "Runs that ran out of memory", labels=("gpu",)
        )
        for gpu, counts in self._pack.counts.items():
            finished.add_metric((gpu,), counts.finished)
            short.add_metric((gpu,), counts.out_of_memory)
        yield from (finished, short)
        decisions = CounterMetricFamily(
            f"{PREFIX}_pack_decisions",
            "Changes of how many ComfyUIs share a GPU, and why",
            labels=("gpu", "decision", "reason"),
        )
        for (gpu, move, reason), count in list(self._pack.decisions.items()):
            decisions.add_metric((gpu, move.value, reason.value), count)
        yield decisions


@contextlib.contextmanager
def serving_metrics(pack: Pack, host: str, port: int) -> Iterator[int]:
    """The port. Raises OSError if it is taken."""
    registry = CollectorRegistry()
    registry.register(PackMetrics(pack))
    server, thread = start_http_server(port, host, registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
