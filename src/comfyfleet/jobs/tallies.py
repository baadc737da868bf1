"""What this process has seen end since it began: counted where it happens, read by who measures."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter

OVER = ("completed", "failed", "cancelled")
ENDED = ("done", "failed", "cancelled")
ALERTS = ("pipeline.alert", "pipeline.paused")


class Tallies:
    """By outcome only: who it was of is in the databases, and would be a label without end."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.graph_runs = self._counter(
            "graph_runs_ended", "Graph runs that ended", "outcome", OVER
        )
        self.pipeline_jobs = self._counter(
            "pipeline_jobs_ended", "Jobs of pipeline runs that ended", "outcome", ENDED
        )
        self.pipeline_alerts = self._counter(
            "pipeline_alerts", "What owners of pipeline runs were told of", "event", ALERTS
        )

    def _counter(self, name: str, text: str, label: str, usual: Iterable[str]) -> Counter:
        """The usual ones are there from the start: a rate needs a zero to begin with."""
        counter = Counter(f"comfyfleet_{name}", text, (label,), registry=self.registry)
        for value in usual:
            counter.labels(value)
        return counter
