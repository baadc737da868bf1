"""How much of anything a graph may have. Every limit has its unit in its name."""

from typing import NamedTuple


class GraphLimits(NamedTuple):
    nodes_max: int = 500
    connections_max: int = 5_000
    fanout_outputs_max: int = 100
    fanout_items_max: int = 10_000
    fanout_depth_max: int = 3  # one per-item fan-out inside another
    jobs_max: int = 20_000  # with every list as long as it may be
    retries_max: int = 10
    timeout_seconds_max: int = 7 * 24 * 3600
    priority_max: int = 1_000  # either way
    text_characters_max: int = 200


DEFAULT_LIMITS = GraphLimits()
