"""How many workers a fleet needs, and telling it to CloudWatch, where an auto-scaling group reads it."""

import asyncio
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from typing import Any

from comfyfleet.kernel.extras import missing_extra

logger = logging.getLogger(__name__)

TARGET_SECONDS = 300.0
ASSUMED_SECONDS = 60.0  # a job of a workflow that has never run
OVERDUE_MAX = 4
METRICS_PER_CALL_MAX = 1000  # CloudWatch takes no more at once
METRICS_PER_FLEET = 4
CONNECT_SECONDS_MAX, ANSWER_SECONDS_MAX = 3, 10


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """One fleet at one moment. A workflow of several fleets counts in each.

    `slots`: how many jobs its live workers run at once, all together; leases beyond are prefetched.
    """

    slug: str
    stage: str
    depth: int
    leased: int
    oldest_age_seconds: float = 0.0
    typical_seconds: float | None = None
    cap: int = 50
    slots: int | None = None
    jobs_per_worker: int = 1


def wanted_workers(
    *,
    depth: int,
    leased: int,
    oldest_age: float,
    typical_seconds: float | None,
    cap: int,
    slots: int | None = None,
    jobs_per_worker: int = 1,
    target_seconds: float = TARGET_SECONDS,
) -> int:
    """Enough to run what runs, and to start all that waits within the target; none when idle.

    When the oldest has already waited for the target, twice as many, and so on up to a limit: then
    the typical duration was wrong, or workers come too slowly. Never more workers than jobs.
    """
    if depth + leased == 0 or cap <= 0:
        return 0
    running = leased if slots is None else min(leased, slots)
    waiting = depth + leased - running
    overdue = min(OVERDUE_MAX, int(max(0.0, oldest_age) // target_seconds))
    seconds = waiting * (typical_seconds or ASSUMED_SECONDS) * (1 + overdue)
    at_once = running + math.ceil(min(waiting, seconds / target_seconds))
    return min(cap, max(1, math.ceil(at_once / max(1, jobs_per_worker))))


def metrics_of(
    figures: FleetFigures, *, now: datetime, target_seconds: float = TARGET_SECONDS
) -> list[dict[str, Any]]:
    """As CloudWatch takes them."""
    wanted = wanted_workers(
        depth=figures.depth,
        leased=figures.leased,
        oldest_age=figures.oldest_age_seconds,
        typical_seconds=figures.typical_seconds,
        cap=figures.cap,
        slots=figures.slots,
        jobs_per_worker=figures.jobs_per_worker,
        target_seconds=target_seconds,
    )
    values = (
        ("QueueDepth", figures.depth, "Count"),
        ("OldestAgeSeconds", max(0.0, figures.oldest_age_seconds), "Seconds"),
        ("Leased", figures.leased, "Count"),
        ("WantedWorkers", wanted, "Count"),
    )
    dimensions = [
        {"Name": "Fleet", "Value": figures.slug},
        {"Name": "Stage", "Value": figures.stage},
    ]
    return [
        {
            "MetricName": name,
            "Dimensions": dimensions,
            "Timestamp": now,
            "Value": float(value),
            "Unit": unit,
        }
        for name, value, unit in values
    ]


class CloudWatch:
    """Publishes figures of fleets; what fails is logged, and the next pass tells newer ones."""

    def __init__(self, namespace: str, *, target_seconds: float = TARGET_SECONDS) -> None:
        self._namespace = namespace
        self._target_seconds = target_seconds
        self._client: Any = None

    async def publish(self, fleets: Sequence[FleetFigures], *, now: datetime) -> bool:
        """Whether all of it was taken."""
        if not fleets:
            return True
        return await asyncio.to_thread(self._publish, fleets, now)

    def _publish(self, fleets: Sequence[FleetFigures], now: datetime) -> bool:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            client = self._client = self._client or _open_client()
            for metrics in self._calls(fleets, now):
                client.put_metric_data(Namespace=self._namespace, MetricData=metrics)
        except (BotoCoreError, ClientError) as error:
            logger.warning("CloudWatch did not take the figures of the fleets: %s", error)
            return False
        return True

    def _calls(self, fleets: Sequence[FleetFigures], now: datetime) -> Iterator[list[Any]]:
        """A fleet's figures are never split: they are of one moment."""
        fleets_per_call = METRICS_PER_CALL_MAX // METRICS_PER_FLEET
        for start in range(0, len(fleets), fleets_per_call):
            yield [
                metric
                for each in fleets[start : start + fleets_per_call]
                for metric in metrics_of(each, now=now, target_seconds=self._target_seconds)
            ]


def require_aws() -> None:
    """Raises at the start what would else be told by a log only, pass after pass."""
    if find_spec("boto3") is None:
        raise missing_extra("COMFYFLEET_CLOUDWATCH_NAMESPACE", "boto3", "aws")


def _open_client() -> Any:
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=CONNECT_SECONDS_MAX,
        read_timeout=ANSWER_SECONDS_MAX,
        retries={"total_max_attempts": 2},
    )
    return boto3.session.Session().client("cloudwatch", config=config)
