"""Lanes take turns: start-time fair queueing over lanes, in memory.

A rank is a virtual time of its own lane, so it can't be compared with another lane's. Without
turns, the lane with 100,000 older jobs would have them all before another lane's single job.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from comfyfleet.dispatch.model import Lane

LANES_REMEMBERED_MAX = 10_000


class Turns:
    """Counts what each lane was given. Forgetting them costs one round of fairness, no more."""

    def __init__(self) -> None:
        self._time = 0.0
        self._finished: dict[Lane, float] = {}

    def starts(self, lanes: Iterable[Lane]) -> Mapping[Lane, float]:
        """A lane that had nothing for a while starts now: it has neither credit nor debt."""
        return {lane: max(self._time, self._finished.get(lane, 0.0)) for lane in lanes}

    def given(self, lanes: Iterable[Lane]) -> None:
        if len(self._finished) > LANES_REMEMBERED_MAX:
            self._finished.clear()
        counted = Counter(lanes)
        if not counted:
            return
        for lane, count in counted.items():
            self._finished[lane] = max(self._time, self._finished.get(lane, 0.0)) + count
        # Time is where the lane stands that is furthest behind of those just served.
        self._time = max(self._time, min(self._finished[lane] for lane in counted) - 1)
