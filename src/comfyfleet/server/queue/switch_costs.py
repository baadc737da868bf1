"""Estimates what it costs a fleet to switch to a model, from finished runs. Has no effects except
on its own state.

A run either uses the same heavy model as the previous run on its backend, or switches to a model
that the backend used earlier. The cost of a switch is the additional time that such runs take,
compared with runs of the same workflow and model without a switch. The estimate is the upper bound
of the median. So a switch counts as expensive while the durations vary too much for a precise
estimate, and also before there are any samples.
"""

import math
import statistics
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

# Number of runs without a switch that an estimate requires.
SAMPLES_MIN = 5
# Number of runs with a switch that an estimate requires. The number is low, because jobs are
# grouped by model until there is an estimate. The first mixed backlog therefore has only a few
# switches.
SWITCHES_MIN = 2
SAMPLES_KEPT_MAX = 32  # samples of each kind that are stored
RUNS_NOTED_MAX = 10_000  # runs that wait to be stored
WORKERS_KEPT_MAX = 10_000
# Jobs no longer wait for a worker that hasn't received a job for this long.
WARM_MAX = timedelta(minutes=5)
RUN_SECONDS_MAX = 86_400.0  # longer runs are ignored
# A switch that costs less than this fraction of a run counts as free. Jobs then keep their order of
# arrival.
FREE_SHARE = 0.1
# Maximum wait of a passed job, as a multiple of the mean switch cost. Other jobs may pass it for
# half of this time, so a group of jobs with the same model takes ten times as long as a switch.
PASSED_PER_COST = 20
# Multiple of the switch cost for which a job may be held. It exceeds 1, because a switch must also
# be undone later and delays all waiting jobs.
HELD_PER_COST = 3
# Factors for normally distributed values: from the median absolute deviation to the standard
# deviation, and from that to the standard error of the median.
_DEVIATION_PER_MAD, _ERROR_OF_MEDIAN = 1.4826, 1.2533


class ModelChange(StrEnum):
    """How a run's heavy model relates to earlier runs on its backend."""

    SAME = "same"  # the previous run used the same model
    SWITCHED = "switched"  # an earlier run used the model, but not the previous one
    FIRST = "first"  # no run has used the model since the backend started


class RunKind(NamedTuple):
    """The key of runs whose durations can be compared."""

    fleet_id: int
    model_key: str
    workflow_id: int


class TimedRun(NamedTuple):
    kind: RunKind
    change: ModelChange
    seconds: float


class Samples(NamedTuple):
    """The durations of the last runs of a kind in seconds, the newest last."""

    stayed: tuple[float, ...] = ()
    switched: tuple[float, ...] = ()

    def with_run(self, change: ModelChange, seconds: float) -> "Samples":
        if change is ModelChange.SAME:
            return self._replace(stayed=(*self.stayed, seconds)[-SAMPLES_KEPT_MAX:])
        if change is ModelChange.SWITCHED:
            return self._replace(switched=(*self.switched, seconds)[-SAMPLES_KEPT_MAX:])
        return self  # the first load of a model doesn't show the cost of a switch


class Estimate(NamedTuple):
    """The estimated cost of a switch to a model. `seconds` includes the uncertainty `error`."""

    seconds: float
    error: float
    run_seconds: float
    stayed: int
    switched: int

    @property
    def is_free(self) -> bool:
        return self.seconds <= FREE_SHARE * self.run_seconds


def estimate(of_workflows: Iterable[Samples]) -> Estimate | None:
    """Estimates the cost of a switch to a model. Computes one estimate from the runs of all
    workflows and one from the runs of each single workflow, and returns the most precise one.

    Returns None if there are too few runs.
    """
    usable = [
        samples
        for samples in of_workflows
        if len(samples.stayed) >= SAMPLES_MIN and samples.switched
    ]
    alone = [[samples] for samples in usable]
    estimates = [costs for group in (usable, *alone) if (costs := _estimate(group))]
    return min(estimates, key=lambda costs: costs.error) if estimates else None


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
    # The deviation of a few values is unreliable, so their entire range is used as the uncertainty.
    of_few = max(longer) - min(longer) if len(longer) < SAMPLES_MIN else 0.0
    error = math.hypot(max(of_few, _error_of_median(longer)), statistics.fmean(errors))
    return Estimate(
        seconds=max(0.0, statistics.median(longer)) + error,
        error=error,
        run_seconds=statistics.median(usual),
        stayed=sum(len(samples.stayed) for samples in of_workflows),
        switched=len(longer),
    )


def _error_of_median(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    deviation = _DEVIATION_PER_MAD * statistics.median(abs(value - middle) for value in values)
    return _ERROR_OF_MEDIAN * deviation / math.sqrt(len(values))


ModelOfFleet = tuple[int, str]  # a fleet's id and a model key


class WarmWorkers:
    """The model of each worker's last job. A job may wait briefly for a worker that has its model
    loaded.
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
        previous = self._last.pop(worker_id, None)
        if previous is not None:
            self._counts[previous[0]] -= 1
            if not self._counts[previous[0]]:
                del self._counts[previous[0]]


@dataclass(slots=True)
class SwitchCosts:
    """The current estimates, and the runs that have not been stored yet."""

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
        costs = self.estimates.get((fleet_id, model_key))
        return costs is not None and costs.is_free

    def passed_max(
        self, fleet_id: int | None, loaded: str, passed: str | None, most: timedelta
    ) -> timedelta:
        """Returns the maximum wait of a job that is passed by jobs with the loaded model. They may
        pass it for half of this time.

        A worker that runs that job in between needs two switches, to its model and back.
        """
        if fleet_id is None or not self.estimates:
            return most
        back = self.estimates.get((fleet_id, loaded))
        forth = self.estimates.get((fleet_id, passed or loaded))
        if back is None or forth is None:
            return most
        cost = (back.seconds + forth.seconds) / 2
        if cost <= FREE_SHARE * (back.run_seconds + forth.run_seconds) / 2:
            return timedelta()
        return min(most, timedelta(seconds=PASSED_PER_COST * cost))

    def held_max(self, fleet_id: int | None, model_key: str | None, ahead: int) -> timedelta:
        """Returns how long a new job is reserved for workers that have its model loaded, even if
        other workers are idle.

        The time is three times the cost of a switch. It is zero if none of these workers is likely
        to be free by then. With n busy workers, the first one is expected to be free after 1/(n+1)
        of a run, and each of the `ahead` earlier jobs with the same model adds 1/n of a run.
        """
        costs = None
        if fleet_id is not None and model_key is not None:
            costs = self.estimates.get((fleet_id, model_key))
        if fleet_id is None or model_key is None or costs is None or costs.is_free:
            return timedelta()
        warm = self.warm.count(fleet_id, model_key)
        switch_seconds = costs.seconds - costs.error
        most = HELD_PER_COST * switch_seconds
        if not warm or costs.run_seconds * (1 / (warm + 1) + ahead / warm) >= most:
            return timedelta()
        return timedelta(seconds=most)
