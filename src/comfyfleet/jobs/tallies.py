"""What this process has seen end since it began: counted where it happens, read by who measures."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Tallies:
    """By outcome only: who it was of is in the databases, and would be a label without end."""

    graph_runs: Counter[str] = field(default_factory=Counter)
    pipeline_jobs: Counter[str] = field(default_factory=Counter)
    pipeline_alerts: Counter[str] = field(default_factory=Counter)  # by what was told
