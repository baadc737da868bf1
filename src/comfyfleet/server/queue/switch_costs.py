"""What it costs a fleet to switch to a model, learned from finished runs. Pure but for its memory.

A run either stayed with the heavy model of the run before it on the same backend, or switched to one
that the backend had used before. How much longer such a run took than usual is seen by the runs of the
same workflow and model that stayed; the median counts, and of it the upper end: while runs vary too much
to tell, a switch is taken for dear, as it is before anything is known.
"""

import math
import statistics
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

SAMPLES_MIN = 5
# Jobs are grouped by model before anything is known, so the first mixed backlog has only a few switches.
SWITCHES_MIN = 2
SAMPLES_KEPT_MAX = 32
RUNS_NOTED_MAX = 10_000
WORKERS_KEPT_MAX = 10_000
# A worker that was not given a job for this long is no longer waited for.
WARM_MAX = timedelta(minutes=5)
RUN_SECONDS_MAX = 86_400.0
# A switch that costs less than this share of a run is considered free, and jobs keep their order of
# arrival.
FREE_SHARE = 0.1
# A job may be passed for half of this many times the cost, so that a group lasts ten times as long
# as a switch.
PASSED_PER_COST = 20
# A switch is paid twice, there and back, and by all waiting jobs. So a job may be held for longer
# than one switch takes.
HELD_PER_COST = 3
# For normally distributed values: the standard deviation per median absolute deviation, and the
# standard error of a median.
_DEVIATION_PER_MAD, _ERROR_OF_MEDIAN = 1.4826, 1.2533


class ModelChange(StrEnum):
    """How a run's heavy model was loaded."""

    SAME = "same"  # the previous run used it as well
    SWITCHED = "switched"  # an earlier run used it
    FIRST = "first"  # no run has used it since the backend started


class RunKind(NamedTuple):
    """Runs that are comparable with each other."""

    fleet_id: int
    model_key: str
    workflow_id: int


class TimedRun(NamedTuple):
    kind: RunKind
    change: ModelChange
    seconds: float


class Samples(NamedTuple):
    """Seconds of the last runs of a kind, the newest one last."""

    stayed: tuple[float, ...] = ()
    switched: tuple[float, ...] = ()

    def with_run(self, change: ModelChange, seconds: float) -> "Samples":
        if change is ModelChange.SAME:
            return self._replace(stayed=(*self.stayed, seconds)[-SAMPLES_KEPT_MAX:])
        if change is ModelChange.SWITCHED:
            return self._replace(switched=(*self.switched, seconds)[-SAMPLES_KEPT_MAX:])
        return self  # reading a model for the first time says nothing about switches


class Estimate(NamedTuple):
    """The cost of a switch to a model in seconds. `error` is the uncertainty in it."""

    seconds: float
    error: float
    run_seconds: float
    stayed: int
    switched: int

    @property
    def is_free(self) -> bool:
        return self.seconds <= FREE_SHARE * self.run_seconds


def estimate(of_workflows: Iterable[Samples]) -> Estimate | None:
    """Estimates the cost of a switch to one model, from the runs of all workflows or of the one
    with the most precise estimate.

    Returns None if there are too few runs.
    """
    usable = [each for each in of_workflows if len(each.stayed) >= SAMPLES_MIN and each.switched]
    alone = [[each] for each in usable]
    found = [each for those in (usable, *alone) if (each := _estimate(those))]
    return min(found, key=lambda each: each.error) if found else None


def _estimate(of_workflows: Sequence[Samples]) -> Estimate | None:
    longer: list[float] = []
    usual: list[float] = []
    errors: list[float] = []
    for stayed, switched in of_workflows:
        run_seconds = statistics.median(stayed)
        longer += [seconds - run_seconds for seconds in switched]
        usual += [run_seconds] * len(switched)
        errors += [_error_of_median(stayed)] * len(switched)
    if len(longer) < SWITCHES_MIN:
        return None
    # The deviation of a few values is unreliable, so their whole range is used as the uncertainty.
    of_few = max(longer) - min(longer) if len(longer) < SAMPLES_MIN else 0.0
    error = math.hypot(max(of_few, _error_of_median(longer)), statistics.fmean(errors))
    return Estimate(
        seconds=max(0.0, statistics.median(longer)) + error,
        error=error,
        run_seconds=statistics.median(usual),
        stayed=sum(len(each.stayed) for each in of_workflows),
        switched=len(longer),
    )


def _error_of_median(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    deviation = _DEVIATION_PER_MAD * statistics.median(abs(each - middle) for each in values)
    return _ERROR_OF_MEDIAN * deviation / math.sqrt(len(values))


ModelOfFleet = tuple[int, str]


class WarmWorkers:
    """The model that each worker was given last, so that a job may wait briefly for a worker that
    has its model.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[str, tuple[ModelOfFleet, datetime]] = OrderedDict()
        self._counts: Counter[ModelOfFleet] = Counter()

    def given(self, worker_id: str, fleet_id: int, model_key: str, now: datetime) -> None:
        self._forget(worker_id)
        self._last[worker_id] = (fleet_id, model_key), now
        self._counts[fleet_id, model_key] += 1
        oldest, (_, at) = next(iter(self._last.items()))
        if now - at > WARM_MAX or len(self._last) > WORKERS_KEPT_MAX:
            self._forget(oldest)

    def count(self, fleet_id: int, model_key: str) -> int:
        return self._counts[fleet_id, model_key]

    def _forget(self, worker_id: str) -> None:
        before = self._last.pop(worker_id, None)
        if before is not None:
            self._counts[before[0]] -= 1
            if not self._counts[before[0]]:
                del self._counts[before[0]]


@dataclass(slots=True)
class SwitchCosts:
    """The current estimates, and runs that have not been stored yet."""

    estimates: Mapping[ModelOfFleet, Estimate] = field(default_factory=dict)
    warm: WarmWorkers = field(default_factory=WarmWorkers)
    noted: list[TimedRun] = field(default_factory=list)

    def note(self, run: TimedRun) -> None:
        is_sound = math.isfinite(run.seconds) and 0 <= run.seconds <= RUN_SECONDS_MAX
        if is_sound and run.change is not ModelChange.FIRST and len(self.noted) < RUNS_NOTED_MAX:
            self.noted.append(run)

    def knows(self, fleet_id: int, model_key: str) -> bool:
        return (fleet_id, model_key) in self.estimates

    def is_free(self, fleet_id: int | None, model_key: str | None) -> bool:
        """Whether a switch to the model is known to cost almost nothing."""
        if fleet_id is None or model_key is None:
            return False
        known = self.estimates.get((fleet_id, model_key))
        return known is not None and known.is_free

    def passed_max(
        self, fleet_id: int | None, loaded: str, passed: str | None, most: timedelta
    ) -> timedelta:
        """Returns how long jobs with the loaded model may pass one with another model.

        A worker that runs that job and then continues pays twice, to switch to its model and back.
        """
        if fleet_id is None or not self.estimates:
            return most
        here = self.estimates.get((fleet_id, loaded))
        there = self.estimates.get((fleet_id, passed or loaded))
        if here is None or there is None:
            return most
        cost = (here.seconds + there.seconds) / 2
        if cost <= FREE_SHARE * (here.run_seconds + there.run_seconds) / 2:
            return timedelta()
        return min(most, timedelta(seconds=PASSED_PER_COST * cost))

    def held_max(self, fleet_id: int | None, model_key: str | None, ahead: int) -> timedelta:
        """Returns how long a new job is left to workers that have its model, although others are
        idle.

        Three times the cost, unless none of them is likely to be free before that: with n workers
        at work the first becomes free after 1/(n+1) of a run, and for each job of the model that is
        `ahead` after another 1/n of a run.
        """
        known = None
        if fleet_id is not None and model_key is not None:
            known = self.estimates.get((fleet_id, model_key))
        if fleet_id is None or model_key is None or known is None or known.is_free:
            return timedelta()
        warm = self.warm.count(fleet_id, model_key)
        cost = known.seconds - known.error
        most = HELD_PER_COST * cost
        if not warm or known.run_seconds * (1 / (warm + 1) + ahead / warm) >= most:
            return timedelta()
        return timedelta(seconds=most)
